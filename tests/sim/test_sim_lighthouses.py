"""Two lighthouses behind one address, which leads to one of them, the other, or both in turn.

All promises but S6 must hold, since the jobs say how many processes they have: no process that lives holds a commit
beside which another one was made (S2), but of the first step, which is not waited for. A process may be told "discard" by the
lighthouse that it leaves of a step that the next one commits. When one lighthouse is left all go on (L1).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lighthouse.machine import fence
from lighthouse.machine.job import JobState
from lighthouse.machine.members import History, Members
from lighthouse.wire.messages import Term
from tests.sim.cluster import Cluster
from tests.sim.network import Link
from tests.sim.profile import Profile, profile_of
from tests.sim.run import Result, run

Patch = pytest.MonkeyPatch


def two_lighthouses(seed: int) -> Result:
    """The faults of `seed`, and an address that leads elsewhere now and then."""
    profile = profile_of(seed)
    count = len(profile.slots)
    # A death that is told must be true.
    faults = tuple(f for f in profile.faults if f.kind != "false_death_notice")
    profile = replace(
        profile, lighthouses=2, group_commit=False, expected_replicas=count, faults=faults
    )
    return run(seed, profile, prepare=lambda cluster: _prepare(cluster, profile, seed))


def _prepare(cluster: Cluster, profile: Profile, seed: int) -> None:
    rng, clock = random.Random(f"front {seed}"), cluster.clock

    def links(slot: str) -> list[Link]:
        return [process.link for process in cluster.running.values() if process.slot == slot]

    clock.at(0.0, cluster.lighthouses.start, 1)
    cluster.lighthouses.mislead(rng, profile.faulty_s, profile.slots, links)
    clock.at(profile.faulty_s - 0.02, cluster.network.mend)
    clock.at(profile.faulty_s - 0.02, cluster.lighthouses.lead, (0,))
    clock.at(profile.faulty_s - 0.01, cluster.lighthouses.crash, 1)


def first_complaint(seeds: int) -> str:
    for seed in range(seeds):
        try:
            two_lighthouses(seed)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__} {error}"
    return ""


def test_two_lighthouses_never_share_an_id_or_a_lineage() -> None:
    commits = forks = 0
    for seed in range(200):
        try:
            result = two_lighthouses(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        commits, forks = commits + result.commits, forks + result.forks
    assert commits > 5_000
    assert forks > 20, "both lighthouses have to be in use"


def shares_the_nonce(patch: Patch) -> None:
    original = JobState.__init__

    def init(self: JobState, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        self.term = Term(0, 1)

    patch.setattr(JobState, "__init__", init)


def counts_all(patch: Patch) -> None:
    """A lighthouse counts processes that have promised themselves to another one."""
    original = JobState._on_join

    def on_join(self: JobState, peer: bytes, join: object, now: float) -> None:
        original(self, peer, replace(join, promised=self.term), now)  # type: ignore[type-var]

    patch.setattr(JobState, "_on_join", on_join)


def takes_over_with_half(patch: Patch) -> None:
    """A new lighthouse goes on with half of those that have trained last: so may the one before it."""
    original = fence.enough

    def enough(*args: Any, more: bool) -> bool:
        return original(*args, more=False)

    patch.setattr(fence, "enough", enough)


def takes_over_after_the_join_timeout(patch: Patch) -> None:
    """As it was: a new lighthouse goes on with those that have come."""
    original = History.takeover

    def takeover(self: History, members: Members, branch: int, *, complete: bool) -> object:
        waits = original(self, members, branch, complete=complete)
        return waits or original(self, members, branch, complete=True)

    patch.setattr(History, "takeover", takeover)


@pytest.mark.parametrize(
    ("mutate", "wanted"),
    [
        (shares_the_nonce, "S1|S3"),
        (counts_all, "S1|L1"),
        (takes_over_with_half, "S2"),
        (takes_over_after_the_join_timeout, "S2"),
    ],
)
def test_a_broken_term_is_caught(
    mutate: Callable[[Patch], None], wanted: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    complaint = first_complaint(200)
    assert re.search(wanted, complaint), complaint or "no seed found it"
