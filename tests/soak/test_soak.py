"""The soak's parts, and a short run of it. The long ones: `python -m tests.soak`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.waiting import PATIENCE_S
from tests.soak.__main__ import problems
from tests.soak.checks import Checker, Gap
from tests.soak.run import Soak
from tests.soak.schedule import DILOCO, MODES, RANKS, SYNC, WEIGHTS, Shape, schedule
from tests.soak.stops import SCRIPTS
from tests.soak.stops import soak as soak_of_stops


def shape(mode: str, *, networks: bool = True) -> Shape:
    return Shape(mode=mode, groups=3, ranks=2 if mode == RANKS else 1, networks=networks)


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_repeats_the_schedule(mode: str) -> None:
    faults = schedule(7, 3600.0, shape(mode))
    assert faults == schedule(7, 3600.0, shape(mode))
    assert faults != schedule(8, 3600.0, shape(mode))
    without = {"kill_all", "term"} if mode == DILOCO else set()
    assert {fault.kind for fault in faults} == set(WEIGHTS) - without
    assert all(len(set(fault.groups)) == len(fault.groups) for fault in faults)
    kinds = {fault.kind for fault in schedule(7, 3600.0, shape(mode, networks=False))}
    assert not kinds & {"cut_pair", "cut_lighthouse"}
    assert {f.kind for f in schedule(7, 600.0, shape(mode), ["kill", "stray"])} == {"kill", "stray"}


def _step(step: int, lineage: str, digest: str = "x", committed: bool = True) -> dict[str, object]:
    return {"step": step, "lineage": lineage, "digest": digest, "committed": committed}


def test_what_the_checker_notices() -> None:
    checker = Checker(one_lineage=True)
    checker.step(0, 0, _step(1, "a"), 10.0)
    checker.step(1, 0, _step(1, "a"), 10.1)
    checker.step(1, 1, _step(1, "a", "other shard"), 10.2)
    assert not checker.violations
    assert checker.equal_at_the_end(2)
    checker.step(0, 0, _step(2, "b"), 10.2)
    assert not checker.equal_at_the_end(2)
    checker.step(1, 0, _step(1, "a", "y"), 10.3)
    assert "S3" in checker.violations[-1]
    checker.step(0, 0, _step(2, "b"), 10.4)
    checker.step(1, 0, _step(1, "c"), 10.4)
    assert (
        "S2: step 1 has two lineages: a, held by group 0 rank 0 at step 2"
        in (checker.violations[-1])
    )
    reason = "r1: its parameters at step 1 are not those of its peers"
    checker.step(0, 0, {**_step(2, "b", committed=False), "reason": reason}, 10.4)
    assert "is told: r1: its parameters" in checker.violations[-1]
    found = len(checker.violations)
    checker.step(1, 0, _step(1, "c2"), 10.4, unheard={0, 1})
    assert len(checker.violations) == found, "the only holders could not be heard"
    for group in range(2):
        checker.gone(group)
    checker.step(0, 0, _step(1, "d"), 10.5)
    checker.step(0, 0, _step(2, "e"), 10.5)
    assert len(checker.violations) == found, "the job went back, as it must"
    pairs = Checker(one_lineage=True, ranks=2)
    for step, lineage in ((1, "a"), (2, "b")):
        pairs.step(0, 1, _step(step, lineage), 1.0)
    pairs.step(1, 0, _step(1, "c"), 1.1)
    assert not pairs.violations, (
        "rank 0 had not healed when its source died: the group held nothing"
    )
    pairs.step(1, 1, _step(1, "c"), 1.1)
    pairs.step(0, 0, _step(1, "d"), 1.2)
    assert "held by group 1 rank 0 at step 1, group 1 rank 1" in pairs.violations[-1]
    own = Checker(one_lineage=False)
    for lineage in "ab":
        own.step(0, 0, _step(1, lineage), 1.0)
    assert not own.violations, "groups that commit on their own"


def test_times_without_a_commit_belong_to_the_faults_around_them() -> None:
    checker = Checker(one_lineage=True)
    checker.step(0, 0, _step(1, "a"), 10.0)
    checker.fault("kill", 10.5)
    checker.fault("stop", 11.0, 5.0)
    checker.step(0, 0, _step(1, "a", committed=False), 11.5)
    checker.step(0, 0, _step(2, "b"), 13.0)
    checker.step(0, 0, _step(3, "c"), 14.0)
    checker.step(0, 0, _step(4, "d"), 18.0)
    checker.step(0, 0, _step(5, "e"), 30.0)
    checker.step(0, 0, _step(6, "f"), 80.0)
    longest = [Gap(50.0, 0.0, []), Gap(12.0, 0.0, ["stop"]), Gap(4.0, 0.0, ["stop"])]
    assert checker.gaps[:3] == longest
    assert checker.table() == [("kill", 1, 3.0, 3.0), ("stop", 1, 12.0, 12.0)]


def test_the_time_for_which_the_soak_itself_stood_still_is_told_from_the_rest() -> None:
    checker = Checker(one_lineage=True)
    checker.step(0, 0, _step(1, "a"), 10.0)
    checker.stood_still(8.0, 12.0)
    checker.stood_still(20.0, 25.0)
    checker.stood_still(24.0, 30.0)
    checker.step(0, 0, _step(2, "b"), 50.0)
    checker.step(0, 0, _step(3, "c"), 60.0)
    checker.stood_still(40.0, 41.0)  # told after the step that ended the gap
    assert checker.gaps[:2] == [Gap(40.0, 13.0, []), Gap(10.0, 0.0, [])]
    assert checker.still_s == 15.0
    soak = SimpleNamespace(checker=checker, endings={}, settled=True)
    assert problems(soak, 26.0) == [  # type: ignore[arg-type]
        "no commit for 40.00 s (for 13.0 s of which the soak itself stood still), after no fault"
    ]
    assert not problems(soak, 27.0)  # type: ignore[arg-type]


@pytest.mark.process
def test_a_short_run_holds() -> None:
    """Two groups; which faults strike is known, when they do is not: each is awaited by the checks,
    which hold whatever the timing."""
    small = Shape(mode=SYNC, groups=2, ranks=1, networks=False)
    faults = schedule(3, 20.0, small, ["kill", "term", "kill_all", "lighthouse_kill", "stray"])
    soak = Soak(small, faults, 20.0, timeout_s=PATIENCE_S)  # a busy machine ends no process
    soak.run()
    assert not problems(soak, PATIENCE_S)
    assert soak.checker.counts["commits"] > 0
    assert len(faults) == sum(n for k, n in soak.checker.counts.items() if k.startswith("fault: "))


@pytest.mark.process
@pytest.mark.parametrize("script", SCRIPTS)
def test_groups_of_a_script_that_are_stopped_agree(script: str, tmp_path: Path) -> None:
    made = soak_of_stops(tmp_path, script, groups=2, seconds=8.0, steps=100, seed=1)
    assert 2 in made.values()
