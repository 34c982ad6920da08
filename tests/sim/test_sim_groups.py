"""Replica groups of several ranks under faults: what a rank is promised holds for each rank, and all
ranks of a group hear the same."""

from __future__ import annotations

from collections import Counter

import pytest

from ft_core.replica.machine import Replica
from tests.sim.groups import FAULTS, Groups

SEEDS = 50


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


@pytest.mark.parametrize("kinds", [("give up", "hang a rank"), (*FAULTS, "kill all")])
def test_two_lighthouses_behind_one_address(kinds: tuple[str, ...]) -> None:
    """As in `test_sim_lighthouses.py`: a group that moves from one to the other moves as a whole."""
    commits = forks = 0
    for seed in range(SEEDS):
        groups = Groups(seed, homes=2, kinds=kinds, faults=15)
        groups.run()
        commits += sum(world.checker.commits for world in groups.worlds)
        forks += sum(world.checker.forks for world in groups.worlds)
    assert commits > 50 * SEEDS
    assert forks > SEEDS // 5, "both lighthouses have to be in use"


def test_ranks_that_make_attempts_of_their_own_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has reduced under a quorum that is lost, the other has not: it would go on with its
    attempt under the next quorum, and be an attempt behind for good."""
    monkeypatch.setattr(Replica, "_fail_if_spent", lambda self: None)
    with pytest.raises(AssertionError, match="attempt"):
        for seed in range(SEEDS):
            Groups(seed).run()
