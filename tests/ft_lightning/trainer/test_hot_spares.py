"""Real Trainers with a hot spare: it takes over the share of one that is killed, with the next step.

What they train on is compared with a run of as many groups as there are shares, without a fault.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lighthouse import LighthouseServer
from tests.ft_lightning.harness import ASKS, Line, Run, compare, running
from tests.harness.runs import Process

pytestmark = pytest.mark.process

SHARES = 3
BATCHES = 13  # of each share: 51 of 152 samples, 4 a batch
Batch = tuple[int, int]  # rank among those of all shares, batch of the run


def reference(
    folder: Path, lighthouse: str, **options: Any
) -> tuple[Run, dict[Batch, list[float]]]:
    """A run of three groups without a fault, and its batches."""
    with running(folder, lighthouse, **options) as run:
        run.wait(*[run.start(index, groups=SHARES) for index in range(SHARES)])
    return run, {(i, x["total"]): x["batch"] for i in range(SHARES) for x in run.lines(i)}


def trained(run: Run, groups: int, size: int = 1) -> dict[Batch, list[float]]:
    """The batches that count, of all groups of so many ranks. None counts twice."""
    found: dict[Batch, list[float]] = {}
    for rank in range(groups * size):
        for line in (line for line in run.lines(rank) if line["share"] is not None):
            batch = line["share"] * size + rank % size, line["total"]
            assert batch not in found
            found[batch] = line["batch"]
    return found


def kill(process: Process) -> None:
    process.kill()
    process.wait()


def by_step(lines: list[Line]) -> dict[int, Line]:
    return {line["step"]: line for line in lines}


@pytest.mark.parametrize("min_replicas", [1, SHARES])
def test_a_spare_takes_over_and_the_one_that_comes_back_is_the_next(
    tmp_path: Path, coordinator: LighthouseServer, min_replicas: int
) -> None:
    """A group is killed in a forward: its batch of that step is lost, or none where all shares are
    needed. It comes back, and takes over from the next one that is killed, in the next epoch."""
    address, needs_all = coordinator.address(), min_replicas == SHARES
    same = {"max_epochs": 3}
    expected, batches = reference(tmp_path / "three", address, **same)
    holds = ["step:5", "step:16", "step:20"]
    options = {"spares": 1, "min_replicas": min_replicas}
    with running(tmp_path / "spare", address, holds=holds, strategy_options=options, **same) as run:
        zero, one, two, spare = (run.start(index, groups=4) for index in range(4))
        for index in range(4):
            run.until_held(index, "step:5")
        kill(one)
        run.go("step:5")
        run.until_held(0, "step:16")
        again = run.start(1, groups=4)
        run.until_waiting(coordinator, "1")
        run.go("step:16")
        for index in (0, 1, 2, 3):
            run.until_held(index, "step:20")
        kill(zero)
        run.go("step:20")
        run.wait(two, spare, again)
    assert [run.end(i)["world_size"] for i in (1, 2, 3)] == [SHARES] * 3
    assert [run.end(i)["rank"] for i in (1, 2, 3)] == [0, 2, 1], "the shares that they hold"
    found = trained(run, 4)
    lost = {} if needs_all else {(1, 5), (0, 20)}
    assert found == {key: batch for key, batch in batches.items() if key not in lost}
    full, less = SHARES, SHARES - (not needs_all)
    assert [line["participants"] for line in run.lines(2)] == (
        [full] * 5 + [less] + [full] * 14 + [less] + [full] * (3 * BATCHES - 21)
    )
    for index in (0, 1, 3):
        compare(run.lines(2), run.lines(index))
    assert len({run.end(i)["digest"] for i in (1, 2, 3)}) == 1
    if needs_all:
        norms, theirs = ([line["norm"] for line in r.lines(2)] for r in (run, expected))
        assert norms == pytest.approx(theirs, rel=1e-5), "as in a run without a fault"
    held = [by_step(run.lines(i)) for i in range(4)]
    assert {held[3][step]["share"] for step in range(1, 6)} == {None}
    assert [held[3][s]["share"] for s in (6, 7)] == [1 if needs_all else None, 1]
    assert {line["share"] for line in run.lines(1) if 16 < line["step"] <= 20} == {None}


def test_it_takes_over_within_a_window_of_batches_and_in_a_divided_validation(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Both groups are needed for a step. The leader dies in a window of accumulated batches: the spare
    computes the whole window of the dead one's share. The other one dies in a validation: what it has
    not done is done by those that are left, and a spare does nothing of it."""
    address = coordinator.address()
    options: dict[str, Any] = {
        "strategy_options": {"min_replicas": 2, "validation": "sharded"},
        "accumulate": 2,
    }
    with running(tmp_path / "two", address, **options) as plain:
        plain.wait(plain.start(0), plain.start(1))
    options["strategy_options"]["spares"] = 1
    holds = ["step:4", "end:0", "val batch:1:0"]
    with running(tmp_path / "spare", address, holds=holds, **options) as run:
        zero, one, spare = (run.start(index, groups=3) for index in range(3))
        for index in range(3):
            run.until_held(index, "step:4")
        kill(zero)
        run.go("step:4")
        run.until_held(1, "end:0")
        again = run.start(0, groups=3)
        run.until_waiting(coordinator, "0")
        run.go("end:0")
        run.until_held(1, "val batch:1:0")
        kill(one)
        run.go("val batch:1:0")
        run.wait(spare, again)
    divided = [run.validations(group)[1]["batches"] for group in (2, 0)]
    assert divided[0][:2] == [1, 3], "one of two, beside a spare"
    assert sorted(divided[0] + divided[1]) == [0, 1, 2, 3]
    norms = [{line["step"]: line["norm"] for line in r.lines(2 * (r is run))} for r in (plain, run)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert run.end(0)["digest"] == run.end(2)["digest"]
    ran = run.end(2)["runs"]
    assert ran.count([0, 8]) == ran.count([0, 9]) == 2, "a window, as a spare and as the holder"
    assert len(ran) == len({(epoch, batch) for epoch, batch in ran}) + 2


def test_a_spare_dies_while_it_takes_over(tmp_path: Path) -> None:
    """In the very step in which the holder died, which needs both shares; one of two ranks in each. The
    supervisor starts both again. The step is committed when one is back, and no batch is lost."""
    options = {"group_size": 2}
    with running(tmp_path / "two", devices=4, strategy_options=options) as plain:
        plain.wait(plain.start())
    expected = {(i, x["total"]): x["batch"] for i in range(4) for x in plain.lines(i)}
    options |= {"spares": 1, "min_replicas": 2}
    faults = {"dies": {"4": 0}, "holds": ["step:7"]}
    with running(tmp_path / "spare", devices=6, strategy_options=options, **faults) as run:
        process = run.start()
        run.until(lambda: len(run.lives(4)) == 2, "the spare to be started again")
        began = (run.log / "4.started").stat().st_mtime
        run.until(lambda: run.events(2, *ASKS, since=began) > 0, "the spare to join")
        run.go("step:7")
        run.wait(process)
        for group in (0, 2):
            assert f"replica group {group} was killed by SIGKILL" in run.output()
    assert trained(run, groups=3, size=2) == expected
    assert {line["participants"] for line in run.lines(2)} == {4}
    assert len({run.end(i)["digest"] for i in range(6)}) == 1
    assert {run.end(i)["world_size"] for i in range(6)} == {4}


@pytest.mark.parametrize(("min_replicas", "dies_at"), [(1, "14"), (2, "15")])
def test_a_group_dies_between_two_steps_of_a_batch(
    tmp_path: Path, lighthouse: str, min_replicas: int, dies_at: str
) -> None:
    """Manual optimization: the rest of the batch is computed on what the spare has fetched."""
    options = {"spares": 1, "min_replicas": min_replicas}
    faults: dict[str, Any] = {"gan": True, "dies": {dies_at: 0}}
    with running(tmp_path, lighthouse, max_epochs=1, strategy_options=options, **faults) as run:
        zero, one, spare = (run.start(index, groups=3) for index in range(3))
        run.wait(zero, code=-signal.SIGKILL)
        run.wait(one, spare)
    assert compare(run.lines(1), run.lines(2)) == 19
    assert run.end(1)["digest"] == run.end(2)["digest"]
    assert run.end(2)["runs"] == [[0, batch] for batch in range(19)], "each batch once"
    shares = {line["step"]: (line["share"], line["participants"]) for line in run.lines(2)}
    assert [shares[step] for step in (14, 16, 18)] == [(None, 2), (0, 2), (0, 2)]
