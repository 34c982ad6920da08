"""The example scripts, run as their first lines say; replica groups are processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """`start(group, *arguments)` runs an example as that replica group. The fixture's parameter: how
    many groups there must be for any to train (1)."""
    min_replicas = getattr(request, "param", 1)
    config = LighthouseConfig(timeouts=Timeouts.derive(20.0), min_replicas=min_replicas)
    with LighthouseServer("tcp://127.0.0.1:0", config=config) as server, ExitStack() as stack:

        def run(
            group: int,
            *arguments: str,
            launcher: tuple[str, ...] = (),
            script: str = "examples/train_ddp.py",
        ) -> subprocess.Popen[str]:
            environment = os.environ | {
                "TORCHFT_LIGHTHOUSE": server.address(),
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": "2",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                [sys.executable, *launcher, script, *arguments],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
            stack.callback(finish, process)
            return process

        yield run


def finish(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read the process's output up to a line that matches."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line like {pattern!r} in:\n{''.join(seen)}")


DONE = r"done: accuracy (\S+),.* weights (\S+)"


@pytest.mark.process
def test_one_is_killed_and_started_again_and_both_end_with_equal_weights(start: Start) -> None:
    arguments = ("--steps", "1000", "--pace-s", "0.02")
    survivor, victim = start(0, *arguments), start(1, *arguments)
    until(victim, r"step [2-9]0 .* participants 2")
    victim.send_signal(signal.SIGKILL)
    until(survivor, r"participants 1")
    again = start(1, *arguments)
    until(survivor, r"participants 2")
    ends = [until(process, DONE).groups() for process in (survivor, again)]
    assert ends[0] == ends[1]
    assert float(ends[0][0]) > 0.9
    assert [process.wait(timeout=PATIENCE_S) for process in (survivor, again)] == [0, 0]


@pytest.mark.process
@pytest.mark.parametrize("start", [2], indirect=True)  # or one may be done before the other begins
def test_it_runs_under_torchrun(start: Start) -> None:
    def under_torchrun(group: int) -> subprocess.Popen[str]:
        launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "0")
        return start(group, "--steps", "60", launcher=launcher)

    processes = [under_torchrun(group) for group in range(2)]
    ends = [until(process, DONE).group(2) for process in processes]
    assert ends[0] == ends[1]
    assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0]


@pytest.mark.process
def test_diloco_is_killed_and_started_again_and_both_end_with_equal_weights(start: Start) -> None:
    arguments = ("--outer-steps", "60", "--pace-s", "0.02", "--codec", "int8")

    def begin(group: int) -> subprocess.Popen[str]:
        return start(group, *arguments, script="examples/train_diloco.py")

    survivor, victim = begin(0), begin(1)
    until(victim, r"outer step [2-9] .* participants 2")
    victim.send_signal(signal.SIGKILL)
    until(survivor, r"participants 1")
    again = begin(1)
    until(survivor, r"participants 2")
    ends = [until(process, DONE).groups() for process in (survivor, again)]
    assert ends[0] == ends[1]
    assert [process.wait(timeout=PATIENCE_S) for process in (survivor, again)] == [0, 0]
