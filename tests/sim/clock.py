"""The simulator's time: a heap of calls, in order of time and, at one time, of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual seconds. Nothing here depends on anything but the calls that were made."""

    __slots__ = ("_heap", "_order", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` at `when` (now, if that is past)."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` in `delay_s` seconds."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, call, args))

    def run_until(self, end: float, stop: Callable[[], bool] | None = None) -> bool:
        """Run everything due before `end`; True if `stop()` turned true (looked at each event)."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
            if stop is not None and stop():
                return True
        self.now = max(self.now, end)
        return False
