"""Replica groups of several processes, each with a copy of the model: raw loops in real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_accelerate.launch.cli_test import SCRIPT
from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.ft_accelerate.harness import compare, running
from tests.ft_accelerate.installed import installed
from tests.harness.waiting import PATIENCE_S
from tests.harness.workers import start

pytestmark = pytest.mark.process

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
        tmp_path / "ft",
        lighthouse,
        holds=["step-14"],
        stay_s=0.001,
        first_seed_only=True,
        **options,
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
        ends = [run.end(index) for index in EVERYBODY]
    for name, (away, there) in REACHES.items():
        for index, end in enumerate(ends):
            assert end["results"][name] == [away, away, away, there], f"{name}, process {index}"
    assert all(end["weight"] == ends[0]["weight"] for end in ends)
    assert [end["main"] for end in ends].count(True) == 1


def test_num_processes_are_one_group_or_so_many_groups_and_the_dead_are_restarted(
    tmp_path: Path,
) -> None:
    """`accelerate launch --num_processes 2`, Accelerate's own command; process 1 is killed. Of two
    groups it is started again and heals; one group of two is, as a whole, and begins anew. Nothing
    of it shows in the weights.

    The one group dies with the newest state, which the lighthouse awaits until the join timeout.
    """
    timeouts = Timeouts.derive(join_timeout_s=1.0)
    with LighthouseServer(config=LighthouseConfig(timeouts=timeouts)) as server:
        starts: dict[str, dict[str, Any]] = {
            "groups": {"min_replicas": 2},
            "group": {"group_size": 2, "lighthouse": server.address()},
        }
        said, codes = launch_two_processes(tmp_path, starts)
    assert codes == [0, 0], said
    ends = {
        name: [json.loads((tmp_path / name / f"{index}.json").read_text()) for index in (0, 1)]
        for name in starts
    }
    assert [end["lives"] for end in ends["groups"]] == [1, 2]
    assert [end["lives"] for end in ends["group"]] == [2, 2]
    for key in ("weights", "steps", "loss"):
        assert len({end[key] for both in ends.values() for end in both}) == 1, key
    assert said["groups"].count("was killed by SIGKILL; it is started again") == 1
    assert said["group"].count("was killed by SIGKILL; it is started again") == 1
    assert "only replica group" not in "".join(said.values())


def launch_two_processes(
    tmp_path: Path, starts: dict[str, dict[str, Any]]
) -> tuple[dict[str, str], list[int]]:
    """`accelerate launch --num_processes 2` with each of these sections, all at once: what each said,
    and exit codes."""
    launchers = {}
    for name, section in starts.items():
        folder = tmp_path / name
        folder.mkdir()
        config = folder / "config.yaml"
        machine = {"distributed_type": "MULTI_CPU", "use_cpu": True}
        config.write_text(yaml.safe_dump({**machine, "fault_tolerance_config": section}))
        command = [
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            "--config_file",
            str(config),
            "--num_processes",
            "2",
            str(SCRIPT),
            str(folder),
            "1",
            "1",
        ]
        with (folder / "said").open("wb") as output:
            launchers[name] = start(
                "accelerate", command, env=installed(folder), stdout=output, stderr=output
            )
    try:
        codes = [launcher.wait(PATIENCE_S) for launcher in launchers.values()]
    finally:
        for launcher in launchers.values():
            launcher.end()
    return {name: (tmp_path / name / "said").read_text() for name in starts}, codes


def test_all_others_die_while_one_catches_up_outside_of_the_quorum(
    tmp_path: Path, lighthouse: str
) -> None:
    """It holds the state that it has healed, and no other process does: the job goes on from there."""
    options = {"epochs": EPOCHS, "samples": SAMPLES, "stay_s": 0.001}
    two = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path, lighthouse, holds=["step-14", "past-step-3"], **options) as run:
        zero, one = (run.start(index, **two) for index in (0, 1))
        again = run.killed_and_back(one, 1, hold="step-14", of=0, **two)
        run.until_held(1, "past-step-3")
        assert " batches behind" in (tmp_path / "1.events").read_text()
        zero.kill()
        zero.wait()
        back = run.start(0, FT_RESTARTS="1", **two)
        run.go("past-step-3")
        run.wait(again, back)
    for key in ("digest", "step", "ticks", "lr", "accuracy", "count"):
        assert run.end(0)[key] == run.end(1)[key], key
    made = [[line["step"] for line in run.lines(index)] for index in (0, 1)]
    for index, last in ((0, back), (1, again)):
        assert made[index] == sorted(set(made[index]))  # none was made twice
        assert run.lines(index)[-1]["pid"] == last.pid
    assert set(made[0] + made[1]) == set(range(1, EPOCHS * 2 * STEPS + 1))
    assert compare(run.lines(0), run.lines(1)) > STEPS
