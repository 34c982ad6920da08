"""The keeper of states in simulated runs: what it saves, and that its promise bites."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.checker import Violation
from tests.sim.cluster import Cluster, Start
from tests.sim.groups import Groups
from tests.sim.keeper import GroupsKeeper, Keeper
from tests.sim.profile import Fault, Profile
from tests.sim.run import run


def all_killed(seed: int) -> Profile:
    """Again and again, with checkpoints of other steps in some runs, and single deaths in between."""
    rng = random.Random(f"all killed {seed}")
    times = sorted(rng.uniform(1.5, 6.0) for _ in range(3))
    crashes = [Fault(rng.uniform(0.5, 6.0), "crash", rng.choice("abc")) for _ in range(2)]
    faults = [Fault(at_s, "kill_all") for at_s in times] + crashes
    return Profile(
        expected_replicas=3,
        faulty_s=6.0,
        restart_s=0.1,
        checkpoint_every=rng.choice((0, 5)),
        own_checkpoints=rng.random() < 0.5,
        keep_every_s=rng.choice((0.1, 0.5)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def one_differs(seed: int) -> Profile:
    """A bit of one process's state flips, and a new keeper may fetch just that state. All are killed when its
    peers know, and the keeper has fetched no other."""
    rng = random.Random(f"one differs {seed}")
    at_s = rng.uniform(1.5, 3.0)
    faults = (
        Fault(at_s, "flip", rng.choice("abc")),
        Fault(at_s + 0.2, "keeper_dies"),
        Fault(at_s + 2.0, "kill_all"),
    )
    return Profile(
        expected_replicas=3,
        faulty_s=6.0,
        restart_s=0.1,
        keep_every_s=4.0,
        compare_steps=8,
        faults=faults,
    )


def saved(seeds: range, **options: Any) -> Iterator[int]:
    """How often the job of each run has gone on from what was kept."""
    for seed in seeds:
        clusters: list[Cluster] = []
        run(seed, all_killed(seed), prepare=clusters.append, **options)
        yield sum(keeper.saved for keeper in clusters[0].keepers)


def test_jobs_go_on_from_what_is_kept() -> None:
    assert sum(saved(range(12))) > 12


def test_processes_that_leave_out_what_is_kept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def begins_anew(self: Keeper, own: Start) -> Start:
        return own

    monkeypatch.setattr(Keeper, "start_of", begins_anew)
    with pytest.raises(Violation, match="K: the job goes on from"):
        list(saved(range(12)))


def test_a_keeper_that_takes_what_was_not_committed_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K1: a state that has changed since it was read is not that of its version."""
    sees = Keeper.sees

    def too_late(self: Keeper, shown: Start) -> None:
        position, state, origin = shown
        sees(self, (position, state + 1, origin))

    monkeypatch.setattr(Keeper, "sees", too_late)
    with pytest.raises(Violation, match="S3"):
        list(saved(range(12)))


def found_different(seeds: range) -> None:
    for seed in seeds:
        clusters: list[Cluster] = []
        run(seed, one_differs(seed), prepare=clusters.append)
        (checker,) = clusters[0].checkers.values()
        assert not checker.flipped, "it was not noticed"


def test_what_a_process_has_shown_whose_state_differs_is_taken_back() -> None:
    found_different(range(12))


def test_a_keeper_that_keeps_what_a_diverged_member_has_shown_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K4."""
    monkeypatch.setattr(Keeper, "disowned", lambda self: None)
    with pytest.raises(Violation, match="S3: .* has another state at"):
        found_different(range(12))


def kept_by_ranks(seeds: range) -> int:
    """How often jobs of groups of two ranks have gone on from what was kept."""
    found = 0
    for seed in seeds:
        groups = Groups(seed, keep_every_s=(0.1, 0.5)[seed % 2])
        groups.run()
        found += groups.keeper.saved
    return found


def test_groups_of_several_ranks_go_on_from_parts_of_one_version() -> None:
    assert kept_by_ranks(range(30)) > 30


def test_a_keeper_that_takes_parts_of_two_versions_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def whichever(self: GroupsKeeper, replica_id: str, rank: int, shown: Start) -> None:
        parts = self._shown.setdefault((replica_id, (0, "")), {})
        parts[rank] = shown
        if rank == 0 and len(parts) == self._size and self.sees(shown):
            position, _, origin = shown
            self._parts = {each: (position, part[1], origin) for each, part in parts.items()}

    monkeypatch.setattr(GroupsKeeper, "sees_part", whichever)
    with pytest.raises(Violation, match="S3"):
        kept_by_ranks(range(30))


def found_different_in_one_rank(seeds: range) -> None:
    """As `one_differs`, in jobs of groups of two ranks."""
    for seed in seeds:
        groups = Groups(seed, faults=0, keep_every_s=4.0, kills_all=0, compare_steps=8)
        at_s = random.Random(f"one rank differs {seed}").uniform(1.5, 3.0)
        groups.clock.at(at_s, groups.flip)
        groups.clock.at(at_s + 0.2, groups.keeper.dies)
        groups.clock.at(at_s + 2.0, groups.strike, "kill all")
        groups.run()
        assert not any(world.checker.flipped for world in groups.worlds), "it was not noticed"


def test_what_a_group_has_shown_of_which_one_rank_differs_is_taken_back() -> None:
    found_different_in_one_rank(range(24))


def test_a_keeper_that_keeps_the_parts_of_a_diverged_group_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K4."""
    monkeypatch.setattr(GroupsKeeper, "disowned", lambda self: None)
    with pytest.raises(Violation, match="S3: .* has another state at"):
        found_different_in_one_rank(range(24))
