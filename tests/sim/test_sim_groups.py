"""Replica groups of several ranks under faults: what a rank is promised holds for each rank, and all
ranks of a group hear the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ft_core.replica.group_leader import GroupLeader
from ft_core.replica.machine import Replica
from lighthouse.wire.messages import Leave, Vote
from tests.sim.groups import FAULTS, Groups

SEEDS = 100


@pytest.mark.parametrize(("size", "seeds"), [(2, range(SEEDS)), (3, range(SEEDS, 2 * SEEDS))])
def test_promises_hold_for_every_rank(size: int, seeds: range) -> None:
    struck: Counter[str] = Counter()
    heals = 0
    for seed in seeds:
        groups = Groups(seed, size=size)
        try:
            groups.run()
        except Exception as error:
            raise AssertionError(f"Groups({seed}, size={size}).run(): {error}") from error
        struck.update(groups.struck)
        heals += sum(world.checker.heals for world in groups.worlds)
    assert len(struck) >= 7
    assert heals > len(seeds)


@pytest.mark.parametrize("kinds", [("give up", "no"), FAULTS])
def test_many_faults_in_a_short_time_strand_no_group(kinds: tuple[str, ...]) -> None:
    """What a group says when it leaves crosses what it hears."""
    for seed in range(SEEDS):
        Groups(seed, kinds=kinds, faults=40).run()


def complaint(kinds: tuple[str, ...] = FAULTS) -> str:
    """What the first failing seed says; empty if none fails."""
    for seed in range(SEEDS):
        try:
            Groups(seed, kinds=kinds).run()
        except Exception as error:
            return f"seed {seed}: {error}"
    return ""


def test_a_leader_that_votes_yes_for_one_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_vote(self: Any, rank: int, vote: Vote) -> None:
        self._votes[rank] = vote
        original(self, rank, vote)
        if vote.ok and len(self._votes) < self._size:
            for other in range(self._size):
                if other not in self._votes:
                    original(self, other, vote)

    original = GroupLeader._on_vote
    monkeypatch.setattr(GroupLeader, "_on_vote", on_vote)
    assert complaint()


def test_a_leader_that_lets_the_others_stay_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank gives up its state, and the others are not told to join again."""

    def on_leave(self: Any, rank: int, leave: Leave) -> None:
        original(self, rank, replace(leave, reason="shutdown"))

    original = GroupLeader._on_leave
    monkeypatch.setattr(GroupLeader, "_on_leave", on_leave)
    assert "L1" in complaint(("give up", "hang a rank"))


def test_ranks_that_make_attempts_of_their_own_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has reduced under a quorum that is lost, the other has not: it would go on with its
    attempt under the next quorum, and be an attempt behind for good."""
    monkeypatch.setattr(Replica, "_fail_if_spent", lambda self: None)
    assert "attempt" in complaint()
