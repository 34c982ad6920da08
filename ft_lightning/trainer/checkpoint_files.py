"""Checkpoint files: written by the leader, whole or not at all, with the manager's position inside.
And pickles of a strategy.

A disk that is full must not end a training that survives the loss of machines: a save that fails is
said and passed over, and as long as the newest file is missing, none that it was to replace goes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ft_core.manager import Manager

log = logging.getLogger("ft_lightning")

KEY = "ft_lightning"
"""Where a checkpoint holds `Manager.state_dict()`."""

_LIVE = (
    "_manager", "_driver", "_batches", "_decisions", "_rounds", "_sink", "_prepare_lock", "_sigterm",
)  # fmt: skip
"""Attributes of the strategy that belong to a fit under way."""


class Checkpoints:
    """The checkpoint files of one strategy. Thread: the one that saves."""

    def __init__(self) -> None:
        self.failed = 0
        """Saves in a row that failed."""
        self.loaded: dict[str, Any] = {}
        """The manager's part of the checkpoint that was loaded last."""

    def save(
        self, io: Any, checkpoint: dict[str, Any], path: Any, options: Any, *, plain: bool
    ) -> bool:
        """Write through Lightning's `CheckpointIO`; whether it worked.

        `plain`: it writes one file, and now. Then, on a disk of this machine, under a name of its
        own first: a process that dies in the midst leaves no half file under the right name.
        """
        local = plain and "://" not in str(path)
        target = f"{path}.part-{os.getpid()}" if local else path
        try:
            io.save_checkpoint(checkpoint, target, storage_options=options)
            if local and os.path.exists(target):
                os.replace(target, path)
        except Exception as error:  # a storage's own errors are of any kind
            self.failed += 1
            log.warning("checkpoint %s could not be saved (%s): training goes on", path, error)
            if local and os.path.exists(target):
                os.remove(target)
            return False
        self.failed = 0
        return True

    def may_remove(self, path: Any) -> bool:
        """Whether a file that a newer one was to replace may go."""
        if self.failed:
            log.warning("checkpoint %s is kept: the newer one could not be saved", path)
        return not self.failed

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Take the manager's part out of a checkpoint that was loaded: hooks see their own."""
        self.loaded = dict(checkpoint.pop(KEY, None) or {})


if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class CheckpointMixin(_Base):
    """The part of the strategy that saves and loads."""

    _manager: Manager | None
    _from: Callable[[str], Any]
    _saved: Checkpoints | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a Trainer, or of what refers to one, has no fit under way: sockets, threads
        and what works with them stay with this one."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        dead = {name: None for name in _LIVE if name in state}
        return {**state, **dead, "_model": self.lightning_module}  # without its wrapper

    @property
    def _checkpoints(self) -> Checkpoints:
        if self._saved is None:
            self._saved = Checkpoints()
        return self._saved

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Called on all; the leader writes. A failure is logged, and the training goes on."""
        if not self.is_global_zero:
            return
        if self._manager is not None:
            # In a copy: hooks may have kept theirs, and look at it.
            checkpoint = {**checkpoint, KEY: self._manager.state_dict()}
        io = self.checkpoint_io
        plain = isinstance(io, self._from("plugins.io").TorchCheckpointIO)
        self._checkpoints.save(io, checkpoint, filepath, storage_options, plain=plain)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero and self._checkpoints.may_remove(filepath):
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._checkpoints.take(checkpoint)
        return checkpoint
