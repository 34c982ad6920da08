"""Many replica groups at one lighthouse: as threads, with the real Manager, ZeroMQ and heals. They reduce
nothing: Gloo's connections between all pairs of them are not what is looked at here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ft_core.process_group import ProcessGroupDummy
from ft_core.shell import data_plane
from lighthouse import LighthouseServer
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

GROUPS, LOST = 64, 16
COMMITS = 50


class Group(Replica):
    """Each committed step takes one from its weights."""

    def __init__(self, server: LighthouseServer, name: str) -> None:
        super().__init__(server, name, pg=ProcessGroupDummy(), expected_replicas=GROUPS)
        self.look: Callable[[], object] = lambda: None  # before each vote

    def step(self, gradient: float = 1.0) -> bool:
        self.manager.start_quorum()
        self.look()
        committed = self.manager.should_commit()
        if committed:
            self.weights -= gradient
        return committed

    def vanish(self) -> None:
        """Its connections end, and it has not said that it leaves."""
        session: Any = self.manager._session
        session.control.submit = lambda event: session.control.status
        self.close()


def test_a_quarter_of_64_groups_vanishes_at_once_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch = data_plane.fetch

    def fetch_from_two(sources: list[str], *given: Any, **options: Any) -> Any:
        """One process that is source and target 768 times looks through its descriptors as often."""
        return fetch(sources[:2], *given, **options)

    monkeypatch.setattr(data_plane, "fetch", fetch_from_two)
    with lighthouse(all_join=True) as server:
        groups = {str(number): Group(server, str(number)) for number in range(GROUPS)}
        first, last, others_went_on = groups["0"].manager, list[int](), threading.Event()

        def look() -> None:
            members, step = first.replica_world_size(), first.current_step()
            if members == GROUPS - LOST and step >= COMMITS + 10:
                others_went_on.set()
            elif members == GROUPS and others_went_on.is_set() and not last:
                last.append(step + 3)  # all see it, since this vote comes later

        groups["0"].look = look

        def train(name: str) -> None:
            group = groups[name]
            while not last or group.manager.current_step() < last[0]:
                group.step()

        def vanish_and_come_back(name: str) -> None:
            groups[name].run_to(COMMITS)
            groups[name].vanish()
            assert others_went_on.wait(PATIENCE_S)
            groups[name] = Group(server, name)
            train(name)

        lost = [str(number) for number in range(GROUPS - LOST, GROUPS)]
        replicas(
            *(
                lambda name=name: (vanish_and_come_back if name in lost else train)(name)
                for name in groups
            )
        )
        (job,) = server.status()["jobs"]
        assert len(job["members"]) == GROUPS
        assert not any(member["gone"] for member in job["members"])
        replicas(*(group.close for group in groups.values()))
        steps = {group.manager.current_step() for group in groups.values()}
        assert steps == {last[0]}
        assert all(torch.equal(g.weights, torch.full((8,), -last[0])) for g in groups.values())
