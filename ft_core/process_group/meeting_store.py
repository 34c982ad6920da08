"""The rendezvous store that a c10d backend is given: its keys travel through a meeting."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ft_core.process_group.errors import ProcessGroupError
from ft_core.process_group.rendezvous import Rendezvous


class RendezvousStore(dist.Store):
    """What is set here is set at every member; what is waited for comes from them.

    It outlives meetings, as backends keep their store; `meeting` is the one under way, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meeting: Rendezvous | None = None
        self.on_publish: Callable[[bytes], None] | None = None

    def _now(self) -> Rendezvous:
        if self.meeting is None:
            raise ProcessGroupError("no quorum is being configured: the store is closed")
        return self.meeting

    @staticmethod
    def _canonical(key: str) -> str:
        # torch's native reconfiguration puts "reconfigure/<uuid>/" before the keys that a fresh
        # group uses. A meeting knows one quorum only, so members of both kinds can meet.
        parts = key.split("/", 2)
        return parts[2] if parts[0] == "reconfigure" and len(parts) == 3 else key

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self.on_publish is not None:
            self.on_publish(data)
        self._now().publish(self._canonical(key), data)

    def get(self, key: str) -> bytes:
        return self._now().lookup(self._canonical(key), None)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for key in keys:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            self._now().lookup(self._canonical(key), left_s)

    def check(self, keys: list[str]) -> bool:
        return all(self._now().knows(self._canonical(key)) for key in keys)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        data = desired.encode() if isinstance(desired, str) else bytes(desired)
        return self._now().set_if_absent(self._canonical(key), data)

    def has_extended_api(self) -> bool:
        return False
