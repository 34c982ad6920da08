"""A member that serves its state to others is only told of changes that its loop has made meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ft_core.state import LARGE_BYTES
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import until

LARGE = LARGE_BYTES // 4


class LargeReplica(Replica):
    """Its tensor is served and received in place."""

    def __init__(self, server: Any, name: str) -> None:
        super().__init__(server, name, use_async_quorum=True)
        self.weights = torch.zeros(LARGE)
        self.discards: list[str] = []
        self.manager.register_step_end(self._ended)

    def _ended(self, committed: bool) -> None:
        if not committed:
            self.discards.append(str(self.manager.errored()))

    def step(self, gradient: float = 1.0) -> bool:
        self.manager.start_quorum()
        reduced = torch.full((LARGE,), gradient)
        self.manager.allreduce(reduced).wait()
        committed = self.manager.should_commit()
        if committed:
            self.weights -= reduced
        return committed


def waiting(server: Any, *names: str) -> bool:
    jobs = server.status()["jobs"]
    return bool(jobs) and set(names) <= set(jobs[0]["waiting"])


def test_two_members_that_heal_at_the_same_step() -> None:
    """Each is up to date before the step's vote, and the other one does not heal from it."""
    with lighthouse() as server:
        a, b, c = (LargeReplica(server, name) for name in "abc")
        running = threading.Event()

        def first() -> None:
            a.run_to(3)
            a.manager.start_quorum()
            running.set()
            until(lambda: waiting(server, "b", "c"), "both newcomers")
            assert a.manager.should_commit()
            a.weights -= 1.0
            a.run_to(8)
            a.close()

        def later(replica: LargeReplica) -> None:
            running.wait()
            replica.run_to(8)
            replica.close()

        replicas(first, lambda: later(b), lambda: later(c))
        assert [a.discards, b.discards, c.discards] == [[], [], []]
        assert torch.equal(a.weights, b.weights) and torch.equal(a.weights, c.weights)
