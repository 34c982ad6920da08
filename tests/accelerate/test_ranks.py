"""Replica groups of several processes, each with a copy of the model: raw loops in real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.harness import compare, running

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

EPOCHS, STEPS = 3, 10
SAMPLES, BATCH = 160, 4
EVERYBODY = range(4)


def test_a_rank_is_killed_and_its_group_comes_back_as_a_whole(
    tmp_path: Path, lighthouse: str
) -> None:
    """Two groups of two. The oracle is one process with the batches of all four, to rounding: no
    step is trained without both groups, so the fault must not show in the numbers.

    No two processes begin with the same weights: the first one's count, as with
    DistributedDataParallel. The group that comes back leaves the quorum while it catches up.
    """
    options = {"epochs": EPOCHS, "samples": SAMPLES, "norm": False, "seedable": True}
    with running(tmp_path / "plain", **options, batch_size=4 * BATCH) as plain:
        plain.wait(*plain.start_plain(1))
    two = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(
        tmp_path / "ft", lighthouse, holds=["step-14"], far=5, first_seed_only=True, **options
    ) as run:
        zero, one = (run.start(index, 2, 2, **two) for index in (0, 1))
        again = run.killed_and_back(one, 1, hold="step-14", of=0, size=2)
        run.wait(zero, again)
    assert one.returncode == -signal.SIGKILL  # as the rank did
    assert " batches behind" in (tmp_path / "ft" / "1.events").read_text()
    assert [len(run.lives(index)) for index in EVERYBODY] == [1, 1, 2, 2]
    ends = [run.end(index) for index in EVERYBODY]
    assert [(end["index"], end["processes"]) for end in ends] == [(i, 4) for i in EVERYBODY]
    for key in ("digest", "step", "ticks", "lr", "accuracy", "count"):
        assert len({end[key] for end in ends}) == 1, key
    assert sum(end["main"] for end in ends) == 1
    assert ends[0]["step"] == EPOCHS * STEPS
    expected = {line["step"]: line for line in plain.lines(0)}
    for index in EVERYBODY:
        assert compare(run.lines(0), run.lines(index)) == len(run.lines(index))
        for line in run.lines(index):
            alike = expected[line["step"]]
            assert line["average"] == pytest.approx(alike["average"], rel=1e-4)
            assert line["lr"] == pytest.approx(alike["lr"])
            assert set(line["batch"]) < set(alike["batch"])
    whole = {line["step"] for index in (2, 3) for line in run.lines(index)}
    assert whole == set(range(1, EPOCHS * STEPS + 1))


REACHES: dict[str, tuple[Any, Any]] = {  # (processes 2 and 3 are away, all are there)
    "gather": ([1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]),
    "gather_for_metrics": ([1, 2, 1, 2], [1, 2, 3, 4]),
    "gather_object": (["p1", "p2"], ["p1", "p2", "p3", "p4"]),
    "reduce_sum": (6.0, 10.0),
    "reduce_mean": (1.5, 2.5),
    "broadcast": ([1], [3]),
    "broadcast_object_list": (["p1"], ["p3"]),
    "wait_for_everyone": ("out", "out"),
}


def test_operations_reach_all_processes_while_a_group_is_away(
    tmp_path: Path, lighthouse: str
) -> None:
    """Four processes bring 1 to 4; the group of the last two leaves, heals and is back."""
    worker = Path(__file__).with_name("collectives_worker.py")
    options = {"operations": list(REACHES), "group": 1, "stay_together": True}
    with running(tmp_path, lighthouse, worker, **options) as run:
        run.wait(*[run.start(index, 2, 2) for index in (0, 1)])
    ends = [json.loads((tmp_path / f"{index}.json").read_text()) for index in EVERYBODY]
    for name, (away, there) in REACHES.items():
        for index, end in enumerate(ends):
            assert end["results"][name] == [away, away, away, there], f"{name}, process {index}"
    assert all(end["weight"] == ends[0]["weight"] for end in ends)
    assert [end["main"] for end in ends].count(True) == 1
