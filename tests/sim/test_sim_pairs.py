"""Hosts that are cut off from each other for good: those that can connect commit, at nearly full rate.

Each run cuts a random graph of pairs, one way or both, before the first quorum or in the middle of a
step, and mends it much later. Mutants of the rules D1 to D4 must be noticed.
"""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest

import lighthouse.machine.forming as forming
from ft_core.replica.machine import Replica
from lighthouse.machine.pairs import BadPair, Pairs
from lighthouse.wire.messages import ReachReport
from tests.sim.checker import Checker
from tests.sim.clock import Clock
from tests.sim.cluster import Cluster
from tests.sim.plane import Plane
from tests.sim.profile import Fault, Profile
from tests.sim.run import run

SEEDS = 40
SETTLED_S, CUT_UNTIL_S, END_S = 6.0, 26.0, 100.0
SWALLOWED_S = 12.0  # two quorums that fail by silence one way, and one by silence both ways
FULL_RATE = 5.0  # commits a second; without faults about six


class Cut:
    """One run, and what is wrong with it (empty: nothing)."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"pairs {seed}")
        slots = tuple("abcde"[: rng.choice((2, 3, 3, 4, 5))])
        self.cluster = Cluster(seed, Profile(slots=slots, faulty_s=0.0))
        self.slots = slots
        pairs = list(combinations(slots, 2))
        self.cuts: set[tuple[str, str]] = set()
        for one, other in rng.sample(pairs, rng.randint(1, len(pairs))):
            ways = [(one, other), (other, one)]
            self.cuts.update(rng.choice((ways[:1], ways[1:], ways)))
        self.cut_at = rng.choice((0.0, 3.0))

    def _begin(self) -> tuple[Clock, Plane, Checker]:
        """The lighthouse and all groups are about to start."""
        clock = self.cluster.clock
        (plane,) = self.cluster.planes.values()
        (checker,) = self.cluster.checkers.values()
        clock.at(0.0, self.cluster.start_lighthouse)
        for slot in self.slots:
            clock.at(0.1, self.cluster.spawn, slot)
        return clock, plane, checker

    def complaint(self) -> str:
        clock, plane, checker = self._begin()
        clock.at(self.cut_at, plane.cuts.update, self.cuts)
        clock.at(CUT_UNTIL_S, plane.mend)
        clock.run_until(SETTLED_S)
        quorums = len(checker.births)
        clock.run_until(CUT_UNTIL_S)
        members = checker.newest.members
        slots = {member.partition(":")[0] for member in members}
        if any({one, other} <= slots for one, other in self.cuts):
            return f"{sorted(slots)} can't connect: {sorted(self.cuts)}"
        times = next(t for r, t in checker.commit_times.items() if r in members)
        made = sum(SETTLED_S <= t < CUT_UNTIL_S for t in times)
        if made < FULL_RATE * (CUT_UNTIL_S - SETTLED_S):
            return f"only {made} commits while {sorted(self.cuts)} were cut"
        if len(checker.births) > quorums + 2:
            return f"{len(checker.births) - quorums} quorums for a standing cut"
        together = clock.run_until(END_S, lambda: self._all_in(checker))
        return "" if together else "not all came back"

    def _all_in(self, checker: Checker) -> bool:
        birth = checker.newest
        return len(birth.members) == len(self.slots) and all(
            checker.commit_times.get(member, [0.0])[-1] > CUT_UNTIL_S for member in birth.members
        )


class Swallowed(Cut):
    """Connections are accepted, and what is sent goes nowhere. So each trial seems to succeed, and costs
    one more attempt to make a process group."""

    def complaint(self) -> str:
        clock, plane, checker = self._begin()
        clock.at(0.0, plane.swallowed.update, self.cuts)
        clock.run_until(CUT_UNTIL_S)
        times = sorted({t for times in checker.commit_times.values() for t in times})
        if len(times) < FULL_RATE * CUT_UNTIL_S / 2 / 2:
            return f"only {len(times)} commits while {sorted(self.cuts)} were swallowed"
        longest_s = max(later - t for t, later in pairwise((0.0, *times)))
        if longest_s > SWALLOWED_S:
            return f"{longest_s:.1f} s without a commit while {sorted(self.cuts)} were swallowed"
        plane.mend()
        back = clock.run_until(END_S, lambda: self._all_in(checker))
        return "" if back else "not all came back"


def first_complaint(kind: type[Cut] = Cut, seeds: int = SEEDS) -> str:
    for seed in range(seeds):
        try:
            complaint = kind(seed).complaint()
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            return f"seed {seed}: {complaint}"
    return ""


def test_those_that_can_connect_commit_and_all_come_back() -> None:
    assert first_complaint() == ""


def test_those_between_which_bytes_get_through_commit_and_all_come_back() -> None:
    assert first_complaint(Swallowed, SEEDS // 2) == ""


# ---------------------------------------------------------------- mutants


def names_no_member(patch: pytest.MonkeyPatch) -> None:
    original = Replica._on_configured

    def on_configured(self: Replica, event: Any, now: float) -> Any:
        effects = original(self, event, now)
        return [e for e in effects if not isinstance(getattr(e, "message", None), ReachReport)]

    patch.setattr(Replica, "_on_configured", on_configured)


def leaves_no_member_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forming, "leave_out", lambda order, bad, behind: {})


def leaves_both_ends_out(patch: pytest.MonkeyPatch) -> None:
    def leave_out(order: Any, bad: Any, behind: Any) -> Any:
        return {end: sorted(pair - {end}) for pair in bad for end in pair if end in order}

    patch.setattr(forming, "leave_out", leave_out)


def never_asks_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pairs, "expire", lambda self, now: [])
    patch.setattr(Pairs, "deadline", lambda self: None)


def lets_them_in_without_a_trial(patch: pytest.MonkeyPatch) -> None:
    def expire(self: Pairs, now: float) -> list[tuple[str, str]]:
        for known in self._pairs.values():
            known.good = known.good or known.until <= now
        return []

    patch.setattr(Pairs, "expire", expire)


def rests_for_ever_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    original = BadPair.fail

    def fail(self: BadPair, now: float) -> None:
        original(self, now)
        self.until = now + 1e6

    patch.setattr(BadPair, "fail", fail)


MUTANTS = [
    names_no_member,
    leaves_no_member_out,
    leaves_both_ends_out,
    never_asks_again,
    lets_them_in_without_a_trial,
    rests_for_ever_after_a_failure,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_broken_rule_is_noticed(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert first_complaint()


def test_quorums_that_fail_for_no_known_reason_do_not_follow_each_other_in_a_hot_loop() -> None:
    """D4: a member's process group can't be made, and no member says why."""
    cluster = Cluster("hot", Profile(slots=("a", "b"), faulty_s=0.0))
    (checker,) = cluster.checkers.values()
    cluster.clock.at(0.0, cluster.start_lighthouse)
    for slot in ("a", "b"):
        cluster.clock.at(0.1, cluster.spawn, slot)
    cluster.clock.run_until(0.11)
    for process in cluster.running.values():
        process.habits.configure_failures = 1.0
    cluster.clock.run_until(60.0)
    assert len(checker.births) < 30
    for process in cluster.running.values():
        process.habits.configure_failures = 0.0
    assert cluster.clock.run_until(70.0, lambda: checker.commits > 10)


def test_a_run_with_cuts_among_other_faults() -> None:
    faults = (
        Fault(2.0, "cut", "a", 2.0),
        Fault(2.5, "crash", "b", 1.0),
        Fault(4.0, "cut", "c", 1.0),
    )
    result = run("cut and crash", Profile(faults=faults, faulty_s=6.0))
    assert result.commits > 30
