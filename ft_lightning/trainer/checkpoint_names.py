"""Which names of checkpoints are taken, for all replica groups alike.

A ModelCheckpoint whose file is there takes the next name, "epoch=1-v1.ckpt". Lightning has the first process
look, and tells the others. Here none waits for the leader, which may have written that very file by then.
So a name is taken if it was there when the training began, or was given to a checkpoint since: all groups
know that, and one that heals is told. Otherwise a follower would mean another file by its best checkpoint,
and remove that when it leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class CheckpointNames:
    """Those of one fit. The loop's thread."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._callbacks: list[Any] = []
        self._file_system: Callable[[Any], Any] | None = None

    def begin(
        self,
        callbacks: Iterable[Any],
        file_system: Callable[[Any], Any],
        broadcast: Callable[[Any], Any],
    ) -> None:
        """The callbacks know their folders, and nothing is saved yet. `file_system(path)`: fsspec's.
        `broadcast(names)`: what rank 0 of the replica group has found."""
        self.release()
        self._file_system = file_system
        for callback in callbacks:
            method = getattr(type(callback), "file_exists", None)
            owner = getattr(method, "__module__", "").partition(".")[0]
            if owner in ("lightning", "pytorch_lightning"):  # else it is the script's own
                self._callbacks.append(callback)
                callback.file_exists = self._is_taken
        found = [name for each in self._callbacks for name in self._find(each)]
        self._taken = set(broadcast(found))

    def release(self) -> None:
        """The fit is over: the callbacks look for themselves."""
        for callback in self._callbacks:
            vars(callback).pop("file_exists", None)
        self._callbacks = []

    def saved(self, path: Any) -> None:
        """All groups have come to where this checkpoint is saved."""
        if self._file_system is not None:
            self._taken.add(self._name(path))

    def removed(self, path: Any) -> None:
        """All groups have come to where this checkpoint is removed."""
        if self._file_system is not None:
            self._taken.discard(self._name(path))

    def state(self) -> list[str]:
        """What a group that heals is told."""
        return sorted(self._taken)

    def load(self, taken: Iterable[str]) -> None:
        """Take a peer's `state`."""
        self._taken = set(taken)

    def _find(self, callback: Any) -> list[str]:
        folder, depth = callback.dirpath, str(callback.filename or "").count("/") + 1
        if self._file_system is None or not folder:
            return []
        found = self._file_system(folder).find(self._name(folder), maxdepth=depth, withdirs=True)
        return list(found)

    def _name(self, path: Any) -> str:
        assert self._file_system is not None
        return str(self._file_system(path)._strip_protocol(str(path)))

    def _is_taken(self, filepath: Any, trainer: Any) -> bool:
        return self._name(filepath) in self._taken
