"""A process group that moves nothing: for tests, dry runs and members that take no part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import Work

from ft_core.process_group.base import ProcessGroup, completed


class ProcessGroupDummy(ProcessGroup):
    """Soaks up every collective: the tensors stay as they are and the work is done at once.

    `rank` and `world` are what `rank()` and `size()` say until `configure` changes them. After
    `revoke` collectives still succeed: there is nobody to lose. It counts what happens to it.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        self._rank = rank
        self._size = world
        self._error: Exception | None = None
        self._quorum_id = -1
        self.configure_count = 0
        self.collective_count = 0

    @property
    def quorum_id(self) -> int:
        return self._quorum_id

    def address(self) -> bytes:
        return b"dummy/%x" % id(self)

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        self._quorum_id, self._rank, self._size = quorum_id, rank, len(addresses)
        self._error = None
        self.configure_count += 1

    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        if quorum_id in (None, self.quorum_id) and self._error is None:
            self._error = reason

    def errored(self) -> Exception | None:
        return self._error

    def shutdown(self) -> None:
        self.unregister()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "ft-dummy"

    def _issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        self.collective_count += 1
        return completed(operation, args)
