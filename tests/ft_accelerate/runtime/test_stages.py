"""Scripts with two Accelerators: a process that comes back has all that live, or is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ft_core.launch.restarts import OVER_EXIT_CODE
from tests.ft_accelerate.harness import compare, running

pytestmark = pytest.mark.process
WORKER = Path(__file__).with_name("stages_worker.py")


def test_what_both_accelerators_train_heals(tmp_path: Path, lighthouse: str) -> None:
    with running(tmp_path, lighthouse, WORKER, holds=["step-1-5"]) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-1-5", of=0)
        run.wait(zero, one)
    healed = [line for line in run.lines(1) if line["pid"] == one.pid]
    assert healed and compare(run.lines(0), healed) == len(healed)
    assert run.end(0)["digest"] == run.end(1)["digest"]


@pytest.mark.parametrize("seedable", [False, True])
def test_a_model_and_a_loader_that_are_prepared_later_are_alike_in_all(
    tmp_path: Path, lighthouse: str, seedable: bool
) -> None:
    """The next fold's. DistributedDataParallel sees to that, too: scripts don't. One process has come back in
    the fold before, so that its random numbers are others than its peers' in any case."""
    options = {"folds": True, "seedable": seedable, "holds": ["step-1-5"]}
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-1-5", of=0)
        run.wait(zero, one)
    second = [line for line in run.lines(1) if line["stage"] == 2]
    assert len(second) == 24 and compare(run.lines(0), second) == 24
    for epoch in range(3):  # each sample is seen once
        lines = [*run.lines(0), *run.lines(1)]
        rows = [x for e in lines if (e["stage"], e["epoch"]) == (2, epoch) for x in e["rows"]]
        assert len(rows) == len(set(rows)) == 64
    assert run.end(0)["digest"] == run.end(1)["digest"]


def test_a_loader_that_is_prepared_later_may_be_in_its_second_pass_when_one_comes_back(
    tmp_path: Path, lighthouse: str
) -> None:
    """That is the first one that it draws an order for. Trainer has such a loader: that of its evaluations, with
    `dataloader_persistent_workers` and `group_by_length`. It took the order in an operation that its peers had
    done in the first pass only, and raised, in each of its lives."""
    options = {"folds": True, "evaluates": True, "holds": ["evaluation-1-2"]}
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="evaluation-1-2", of=0)
        run.wait(zero, one)
    assert run.end(0)["digest"] == run.end(1)["digest"]


def test_killed_in_the_second_training_it_does_not_join_with_the_first(
    tmp_path: Path, lighthouse: str
) -> None:
    options = {"one_by_one": True, "holds": ["step-2-3", "step-2-20"]}
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        zero, one = run.start(0), run.start(1)
        run.until_held(1, "step-2-3")
        one.kill()
        run.wait(one, code=-signal.SIGKILL)
        run.until_held(0, "step-2-3")
        asked = run.events(1, "waiting", "quorum")
        again = run.start(1, FT_RESTARTS="1")
        run.until(lambda: run.events(1, "waiting", "quorum") > asked, "it asks for a quorum")
        run.go("step-2-3")
        run.wait(again, code=OVER_EXIT_CODE)
        assert "its peers are in a later training of the script" in run.output()
        run.go("step-2-20")
        run.wait(zero)
    assert all(line["pid"] != again.pid for line in run.lines(1))
    assert [line["step"] for line in run.lines(0) if line["stage"] == 2] == list(range(1, 25))


def test_a_training_after_the_end_is_refused(tmp_path: Path, lighthouse: str) -> None:
    """Plain Accelerate has no process group any more. Here each process trained on its own model, which the others
    took for another state: no step was made, for ever."""
    options = {"one_by_one": True, "ends": True}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        run.wait(run.start(0, **both), run.start(1, **both), code=1)
        assert "the script trains on after accelerator.end_training(), with which" in run.output()
    assert {line["stage"] for line in run.lines(0)} == {1}


def test_one_replica_group_may_train_after_the_end(tmp_path: Path, lighthouse: str) -> None:
    with running(tmp_path, lighthouse, WORKER, one_by_one=True, ends=True) as run:
        run.wait(run.start(0, 1))
    assert [line["stage"] for line in run.lines(0)] == [1] * 48 + [2] * 48
