"""Checkpoints that the leader writes: whole, by one process, and not lost with it. For Trainer and Fabric.

| the leader | the file |
|---|---|
| dies while it writes, or before | the next leader writes it: it has held what it would have written |
| is stopped meanwhile, and has a successor | that writes it; the file of the stopped one does not get its name |
| is evicted, and leads again | it writes it then |
| dies in the last save of a fit, and nothing that all agree on follows | the others wait for it at the end of their fits; the first of them writes |

A process holds a save until it knows that the leader has made it: until the leader has voted for a later
step, or has met the others at the end of the validation or the epoch. After a Trainer's fit no process votes, and
it holds until the next one what the script saves.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import strip_protocol, url_to_fs
from fsspec.utils import get_protocol
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ft_core.heal.changed import place_of, with_others
from ft_lightning.shared.strategy_base import NoLongerLeads
from lighthouse.files import remove_drafts, replace_whole


def local_path(path: Any) -> Path | None:
    """`path` on this machine's file systems, also if it is a "file:" URL; None: it is another storage's."""
    text = str(path)
    return Path(strip_protocol(text)) if get_protocol(text) == "file" else None


def lasts(path: Any) -> bool:
    """Whether what is written there is there for another process."""
    return get_protocol(str(path)) != "memory"


class SmallFile:
    """A small file `name` in the folder `root`, a path or a URL of any storage that fsspec knows. Any thread, one at a time."""

    def __init__(self, root: Any, name: str) -> None:
        self._local = local_path(root)
        self._url = f"{str(root).rstrip('/')}/{name}"
        if self._local is not None:
            self._local /= name

    def __str__(self) -> str:
        return self._url if self._local is None else str(self._local)

    @property
    def folder(self) -> Path | None:
        """On this machine; None: elsewhere."""
        return None if self._local is None else self._local.parent

    def read(self) -> bytes:
        """Its content; nothing if there is none, or it can't be read."""
        with suppress(Exception):  # a storage's own errors are of any kind
            if self._local is not None:
                return self._local.read_bytes()
            storage, path = url_to_fs(self._url)
            content: bytes = storage.cat_file(path)
            return content
        return b""

    def write(self, content: bytes) -> None:
        """Replace it, on this machine as a whole. Raises what the storage raises."""
        if self._local is not None:
            self._local.parent.mkdir(parents=True, exist_ok=True)
            with replace_whole(self._local) as draft:
                draft.write_bytes(content)
            return
        storage, path = url_to_fs(self._url)
        storage.makedirs(path.rpartition("/")[0], exist_ok=True)
        storage.pipe_file(path, content)


# ---------------------------------------------------------------- checkpoints


def write_whole(
    io: Any,
    checkpoint: dict[str, Any],
    path: Any,
    options: Any,
    *,
    plain: bool,
    still_leads: Callable[[], bool],
) -> None:
    """Write through a `CheckpointIO` of Lightning's. Raises what that raises, and NoLongerLeads.

    `plain`: it writes one file, and now. On a disk of this machine that file is written whole:
    a process that dies meanwhile leaves no half file under the right name; and one that was stopped
    meanwhile replaces no file of its successor, as far as `still_leads()` tells.
    """
    local = local_path(path) if plain else None
    with contextlib.nullcontext(path) if local is None else replace_whole(local) as target:
        io.save_checkpoint(checkpoint, target, storage_options=options)
        if local is not None and not still_leads():
            raise NoLongerLeads
    if local is not None:
        remove_drafts(os.path.dirname(os.path.abspath(local)))


def with_copied_buffers(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The checkpoint, with copies of the buffers of `module`, which a forward pass changes, wherever they are in it. Its
    other tensors stay, so that nothing large is copied."""
    buffers = {place_of(each) for each in module.buffers()}
    copied: dict[str, Any] = with_others(
        checkpoint, lambda tensor: tensor.clone() if place_of(tensor) in buffers else tensor
    )
    return copied


def versions(checkpoint: Any) -> list[int]:
    """Differ if one of its tensors was changed in place."""
    tensors = [leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)]
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def copied(checkpoint: Any) -> Any:
    """A copy that later steps do not change. In CPU memory, as what is written."""
    return copy.deepcopy(with_others(checkpoint, lambda tensor: tensor.detach().cpu()))
