"""A transfer slower than the timeout: the healthy train on; it heals when the link is better."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch

from ft_core.heal import HealServer
from ft_core.heal.snapshot import Publication
from ft_core.shell import data_plane as plane
from ft_core.shell.data_plane import DataPlane
from tests.ft_core.heal.support import FaultyLink
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

TIMEOUT_S = 2.0  # so that a heal that keeps peers waiting for 1 s is given up
STEPS_MEANWHILE = 30


class Throttle:
    """A link that is slow until it is told not to be."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.links: list[FaultyLink] = []

    def edit(self, _: int, data: bytearray) -> bytearray:
        self.over.wait(len(data) / 1e6)  # 1 MB/s a source: the state would take 8 s
        return data


@pytest.fixture
def throttle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Heal servers behind a slow link, and without the way round it on one host."""
    slow = Throttle()

    class SlowServer(HealServer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, same_host=False)
            self._link = FaultyLink(super().address, slow.edit)
            slow.links.append(self._link)

        @property
        def address(self) -> str:
            return self._link.address

    monkeypatch.setattr(plane, "HealServer", SlowServer)
    yield slow
    slow.over.set()
    for link in slow.links:
        link.close()


def test_a_transfer_slower_than_the_timeout_harms_no_healthy_member(throttle: Throttle) -> None:
    with lighthouse(timeout_s=TIMEOUT_S) as server:
        names = ("r0", "r1", "late")
        group = [Replica(server, name, timeout=timedelta(seconds=TIMEOUT_S)) for name in names]
        big = [torch.full((4_000_000,), float(i == 2)) for i in range(3)]
        for index, replica in enumerate(group):
            replica.manager.register_state_dict_fn(
                "big", lambda s, i=index: big[i].copy_(s["t"]), lambda i=index: {"t": big[i]}
            )
        joined, commits = threading.Event(), [[], []]

        def healthy(index: int) -> None:
            replica = group[index]
            begun = False
            while not joined.is_set():
                if replica.step():
                    commits[index].append(time.monotonic())
                if len(commits[index]) == STEPS_MEANWHILE and not begun:
                    begun = True
                    newcomer.set()
                if index == 0 and len(commits[0]) == 3 * STEPS_MEANWHILE:
                    throttle.over.set()
                time.sleep(0.02)  # a step's work
            replica.run_to(final[0])
            replica.close()

        def late() -> None:
            assert newcomer.wait(PATIENCE_S)
            replica = group[2]
            while not replica.step():
                pass
            final.append(replica.manager.current_step() + 3)
            joined.set()
            replica.run_to(final[0])
            replica.close()

        newcomer, final = threading.Event(), []
        replicas(lambda: healthy(0), lambda: healthy(1), late)
        assert len(commits[0]) >= 3 * STEPS_MEANWHILE
        longest = max(b - a for a, b in pairwise(commits[0]))
        assert longest < 2 * TIMEOUT_S  # once a heal timeout, not the transfer's 8 s
        assert torch.equal(big[2], big[0])
        assert torch.equal(group[0].weights, group[2].weights)


NUMEL = 600_000


@pytest.mark.parametrize(("commit", "may_be_read"), [("quorum", False), ("group", True)])
def test_a_state_that_no_target_read_is_kept_only_where_one_may_still_come(
    monkeypatch: pytest.MonkeyPatch, commit: str, may_be_read: bool
) -> None:
    """All members have voted, the healed one too: its training thread used to copy the whole state
    before each optimizer step that follows a heal. Where a group acts on its own vote, the target
    may still be reading, and the source keeps what it lacks."""
    copies: list[set[int]] = []
    kept: list[DataPlane] = []
    copy, keep = Publication.freeze, DataPlane.freeze

    def spy(self: Publication, needed: set[int]) -> None:
        copies.append(needed)
        copy(self, needed)

    def spy_on_plane(self: DataPlane) -> None:
        kept.append(self)
        keep(self)

    monkeypatch.setattr(Publication, "freeze", spy)
    monkeypatch.setattr(DataPlane, "freeze", spy_on_plane)
    with lighthouse() as server:
        group = [
            Replica(server, f"r{i}", value=float(i == 2), expected_replicas=3, commit=commit)
            for i in range(3)
        ]
        big = [torch.full((NUMEL,), float(i == 2)) for i in range(3)]
        healed = threading.Event()
        for index, replica in enumerate(group):
            replica.manager.register_state_dict_fn(
                "big", lambda s, i=index: big[i].copy_(s["t"]), lambda i=index: {"t": big[i]}
            )

        def see(event: Any) -> None:
            if event.kind == "heal_done":
                healed.set()

        group[2].manager.telemetry.add_sink(see)

        def script(index: int) -> None:
            replica = group[index]
            if index == 1:
                save = replica.manager.state.save

                def late() -> Any:
                    """It offers its state when the target has all of it from r0."""
                    if replica.manager.in_quorum():
                        assert healed.wait(PATIENCE_S)
                    return save()

                monkeypatch.setattr(replica.manager.state, "save", late)
            replica.run_to(3)
            replica.close()

        replicas(*(lambda i=i: script(i) for i in range(3)))
    assert torch.equal(big[2], big[0])
    assert bool(kept) == may_be_read
    assert may_be_read or not any(copies)
