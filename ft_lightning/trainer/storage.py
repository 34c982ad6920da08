"""Small files in the Trainer's `default_root_dir`, which may be a URL: any storage that fsspec knows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import strip_protocol, url_to_fs
from fsspec.utils import get_protocol

from lighthouse.files import replace_whole


def local_path(path: Any) -> Path | None:
    """`path` on this machine's file systems, also if it is a "file:" URL; None: it is another storage's."""
    text = str(path)
    return Path(strip_protocol(text)) if get_protocol(text) == "file" else None


def lasts(path: Any) -> bool:
    """Whether what is written there is there for another process."""
    return get_protocol(str(path)) != "memory"


class SmallFile:
    """A file `name` in the folder `root`, a path or a URL. Any thread, one at a time."""

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
            self._local.parent.mkdir(exist_ok=True)
            with replace_whole(self._local) as draft:
                draft.write_bytes(content)
            return
        storage, path = url_to_fs(self._url)
        storage.makedirs(path.rpartition("/")[0], exist_ok=True)
        storage.pipe_file(path, content)
