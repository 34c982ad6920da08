"""Members of one quorum as threads of the test, each with a real Gloo group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ft_core.process_group import ProcessGroupError, ProcessGroupGloo, native_reconfigure_available
from tests.harness.waiting import PATIENCE_S

KINDS = [False, True] if native_reconfigure_available() else [False]
KIND_NAMES = ["rebuild", "native"][: len(KINDS)]


@contextmanager
def gloo_groups(
    count: int, *, native: bool | None = None, timeout_s: float = 10.0
) -> Iterator[list[ProcessGroupGloo]]:
    """That many groups, shut down at the end."""
    groups = [
        ProcessGroupGloo(timeout_s, hostname="127.0.0.1", native=native) for _ in range(count)
    ]
    try:
        yield groups
    finally:
        for group in groups:
            group.shutdown()


class Calls:
    """`action(i)` in a thread for each of `indices`; outcomes are values or exceptions."""

    def __init__(self, action: Callable[[int], Any], indices: Sequence[int]) -> None:
        self.outcomes: dict[int, Any] = {}
        self._action = action
        self._threads = [threading.Thread(target=self._call, args=(i,)) for i in indices]
        for thread in self._threads:
            thread.start()

    def _call(self, index: int) -> None:
        try:
            self.outcomes[index] = self._action(index)
        except Exception as error:
            self.outcomes[index] = error

    def finish(self) -> dict[int, Any]:
        """All outcomes; fails on a hang."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a member hangs"
        return self.outcomes

    def values(self) -> dict[int, Any]:
        """All outcomes; raises the first exception among them."""
        for outcome in self.finish().values():
            if isinstance(outcome, Exception):
                raise outcome
        return self.outcomes


def configure(groups: Sequence[ProcessGroupGloo], quorum_id: int, timeout_s: float = 10.0) -> None:
    """All groups, in this order of ranks, as the members of one quorum."""
    addresses = [group.address() for group in groups]
    Calls(
        lambda rank: groups[rank].configure(quorum_id, rank, addresses, timeout_s),
        range(len(groups)),
    ).values()


def sums(groups: Sequence[ProcessGroupGloo], elements: int = 100) -> list[float]:
    """Every member adds its rank + 1; what each one gets."""

    def add(rank: int) -> float:
        tensor = torch.full((elements,), rank + 1.0)
        groups[rank].allreduce([tensor]).wait()
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    outcomes = Calls(add, range(len(groups))).values()
    return [outcomes[rank] for rank in range(len(groups))]


def assert_freed(outcome: Any) -> None:
    """It has failed for what happened to its peers, and not by waiting for its timeout."""
    assert isinstance(outcome, ProcessGroupError), outcome
    assert "imed out" not in str(outcome) and "imeout" not in str(outcome), outcome


def right_sum(count: int) -> list[float]:
    return [count * (count + 1) / 2.0] * count
