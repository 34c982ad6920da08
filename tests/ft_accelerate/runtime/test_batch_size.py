"""Searches for a batch size: a process that comes back goes on to its peers' size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.harness import compare, running

pytestmark = pytest.mark.process
WORKER = Path(__file__).with_name("search_worker.py")
BOTH = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
WEIGHTS = ("step", "digest", "rows")


@pytest.mark.parametrize("runs_out", ["forward", "backward", "update"])
def test_killed_in_turn_in_a_search_and_after_it(
    tmp_path: Path, lighthouse: str, runs_out: str
) -> None:
    """The weights are those of plain DistributedDataParallel. In a later size, too, each sample is read once,
    by random numbers of the process that was always there."""
    options = {"runs_out": runs_out, "seedable": runs_out != "forward"}
    options["evaluates_first"] = "bare" if runs_out == "update" else ""
    with running(tmp_path / "plain", "", WORKER, **options) as plain:
        plain.wait(*plain.start_plain(), code=None)
    holds = ["step-10-1", "step-8-5"]
    with running(tmp_path / "ft", lighthouse, WORKER, holds=holds, **options) as run:
        zero, one = run.start(0, **BOTH), run.start(1, **BOTH)
        run.until_held(1, holds[0])  # it has written its last row
        one = run.killed_and_back(one, 1, hold=holds[0], of=0, **BOTH)
        run.until_held(0, holds[1])
        zero = run.killed_and_back(zero, 0, hold=holds[1], of=1, **BOTH)
        run.wait(zero, one)
    for index in (0, 1):
        expected = {e["step"]: e for e in plain.lines(index)}
        for mine in run.lines(index):
            for key in WEIGHTS:
                assert mine[key] == expected[mine["step"]][key], (index, mine["step"], key)
        assert {e["step"] for e in run.lines(index)} == set(expected)
        for key in ("size", "step", "digest", "draw"):
            assert run.end(index)[key] == plain.end(index)[key] == run.end(0)[key]
    assert compare(run.lines(0), run.lines(1)) == len(run.lines(1))


def test_killed_in_a_try_before_its_first_step(tmp_path: Path, lighthouse: str) -> None:
    """What it draws in that try is what its peer draws, which has gone through the tries before."""
    options = {"runs_out": "update", "evaluates_first": "model", "seedable": False}
    with running(tmp_path / "plain", "", WORKER, **options) as plain:
        plain.wait(*plain.start_plain(), code=None)
    hold = "evaluates-8"
    with running(tmp_path / "ft", lighthouse, WORKER, holds=[hold], **options) as run:
        zero, one = run.start(0, **BOTH), run.start(1, **BOTH)
        run.until_held(0, hold)
        run.until_held(1, hold)
        one = run.killed_and_back(one, 1, hold=hold, of=0, **BOTH)
        run.wait(zero, one)
    for index in (0, 1):
        for key in ("size", "step", "digest", "draw"):
            assert run.end(index)[key] == plain.end(index)[key]


@pytest.mark.parametrize("runs_out", ["forward", "backward"])
def test_a_process_is_late_for_the_batch_that_runs_out_of_memory(
    tmp_path: Path, lighthouse: str, runs_out: str
) -> None:
    """Its peer is in the next try, of a smaller size, before it has begun the batch: both are right."""
    hold = "step-12-2-of-0"
    env = {**BOTH, "ACCELERATE_FAULT_TOLERANCE_TIMEOUT_S": "8"}
    with running(tmp_path, lighthouse, WORKER, holds=[hold], runs_out=runs_out) as run:
        zero, one = run.start(0, **env), run.start(1, **env)
        run.until_held(0, hold)
        run.until(lambda: run.events(1, "discard") > 0, "replica 1 waits in vain in its next try")
        run.go(hold)
        run.wait(zero, one)
        assert run.end(0)["digest"] == run.end(1)["digest"]
        assert run.end(0)["size"] == run.end(1)["size"] == 8
