"""The core's example scripts: replica groups are processes, one of which is killed.

One process starts cold, as it does for a user; the others are forks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ft_core.launch.restarts import OVER_EXIT_CODE
from lighthouse import LighthouseServer
from tests.harness import workers
from tests.harness.lighthouses import patient_lighthouse
from tests.harness.waiting import PATIENCE_S
from tests.harness.waiting import until as until_true

ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.Popen[bytes] | workers.Worker


class Job:
    """Replica groups that run examples."""

    def __init__(self, server: LighthouseServer) -> None:
        self.server, self.stack = server, ExitStack()

    def start(
        self,
        group: int,
        *arguments: str,
        launcher: tuple[str, ...] = (),
        script: str = "examples/train_ddp.py",
        cold: bool = False,
        groups: int = 2,
    ) -> Process:
        environment = os.environ | {
            "TORCHFT_LIGHTHOUSE": self.server.address(),
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(groups),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        command = [*launcher, script, *arguments]
        streams: Any = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE}
        process: Process
        if cold:
            process = subprocess.Popen(
                [sys.executable, *command], start_new_session=True, **streams
            )
        else:
            process = workers.start("torch", command, **streams)
        self.stack.callback(finish, process)
        return process

    def start_again(self, group: int, survivor: Process, *arguments: str, **how: Any) -> Process:
        """Another life of `group`; the survivor is stopped until it waits to be let in."""
        survivor.send_signal(signal.SIGSTOP)
        process = self.start(group, *arguments, **how)
        until_true(self._is_joining, "the next life to join")
        survivor.send_signal(signal.SIGCONT)
        return process

    def _is_joining(self) -> bool:
        return any(job["waiting"] for job in self.server.status()["jobs"])


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """The fixture's parameter: how many groups there must be for any to train (1)."""
    min_replicas = getattr(request, "param", 1)
    with patient_lighthouse(60.0, min_replicas=min_replicas) as server:
        job = Job(server)
        with job.stack:
            yield job


def finish(process: Process) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def until(process: Process, pattern: str) -> re.Match[str]:
    """Read the process's output up to a line that matches."""
    assert process.stdout is not None
    seen = []
    for raw in process.stdout:
        line = raw.decode()
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line like {pattern!r} in:\n{''.join(seen)}")


DONE = r"done: accuracy (\S+),.* weights (\S+)"


@pytest.mark.process
def test_one_is_killed_and_started_again_and_both_end_with_equal_weights(job: Job) -> None:
    arguments = ("--steps", "400", "--pace-s", "0.025")
    survivor, victim = job.start(0, *arguments), job.start(1, *arguments)
    until(victim, r"step [2-9]0 .* participants 2")
    victim.send_signal(signal.SIGKILL)
    until(survivor, r"participants 1")
    again = job.start_again(1, survivor, *arguments)
    until(survivor, r"participants 2")
    ends = [until(process, DONE).groups() for process in (survivor, again)]
    assert ends[0] == ends[1]
    assert float(ends[0][0]) > 0.9
    assert [process.wait(timeout=PATIENCE_S) for process in (survivor, again)] == [0, 0]


@pytest.mark.process
def test_a_hot_spare_takes_over_from_one_that_is_killed(job: Job) -> None:
    """Group 2 is the spare of two: it computes on share 1 until the holder of share 0 is killed."""
    arguments = ("--steps", "300", "--pace-s", "0.025", "--spares", "1")
    victim, survivor, spare = (job.start(group, *arguments, groups=3) for group in range(3))
    until(victim, r"step [2-9]0 .* participants 2")
    victim.send_signal(signal.SIGKILL)
    until(spare, r"takes over share 0")
    ends = [until(process, DONE).groups() for process in (survivor, spare)]
    assert ends[0] == ends[1]


@pytest.mark.process
@pytest.mark.parametrize("more", ["--steps 20", "--steps 12 --tensor 2"])
def test_a_rank_of_shards_is_killed_and_its_group_heals(more: str) -> None:
    """The demonstration itself: it starts, kills and compares."""
    done = workers.run(
        "torch",
        ["examples/train_hsdp.py", "--kill-at", "5", "--pace-s", "0", *more.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    story = "SIGKILL to rank 1 of group 1.*started again.*group 1: healed.*hold the same weights"
    assert re.search(story, done.stdout, re.DOTALL), done.stdout


@pytest.mark.process
def test_a_client_of_a_parameter_server_is_killed_and_the_others_finish() -> None:
    done = workers.run(
        "torch",
        ["examples/parameter_server.py", "--steps", "60"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"client 0 was killed.*2 clients have finished", done.stdout, re.DOTALL)


@pytest.mark.process
@pytest.mark.parametrize("job", [2], indirect=True)  # or one may be done before the other begins
def test_it_runs_under_torchrun(job: Job) -> None:
    def under_torchrun(group: int) -> Process:
        launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "0")
        return job.start(group, "--steps", "60", launcher=launcher, cold=group == 0)

    processes = [under_torchrun(group) for group in range(2)]
    ends = [until(process, DONE).group(2) for process in processes]
    assert ends[0] == ends[1]
    assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0]


@pytest.mark.process
def test_diloco_is_killed_and_started_again_and_both_end_with_equal_weights(job: Job) -> None:
    arguments = ("--outer-steps", "60", "--sync-every", "10", "--pace-s", "0.02", "--codec", "int8")
    script = "examples/train_diloco.py"
    survivor, victim = (job.start(group, *arguments, script=script) for group in (0, 1))
    until(victim, r"outer step [2-9] .* participants 2")
    victim.send_signal(signal.SIGKILL)
    until(survivor, r"participants 1")
    again = job.start_again(1, survivor, *arguments, script=script)
    until(survivor, r"participants 2")
    ends = [until(process, DONE).groups() for process in (survivor, again)]
    assert ends[0] == ends[1]
    assert [process.wait(timeout=PATIENCE_S) for process in (survivor, again)] == [0, 0]


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "steps"),
    [("examples/train_ddp.py", "--steps"), ("examples/train_diloco.py", "--outer-steps")],
)
def test_one_that_comes_back_when_the_others_have_finished_does_not_start_over(
    script: str, steps: str
) -> None:
    with patient_lighthouse(60.0, connect_timeout_s=2.0) as server:
        job = Job(server)
        with job.stack:
            ended = [job.start(group, steps, "3", script=script) for group in range(2)]
            for process in ended:
                until(process, DONE)
            late = job.start(1, steps, "3", script=script)
            assert late.wait(timeout=PATIENCE_S) == OVER_EXIT_CODE
            assert late.stdout is not None
            assert b"step" not in late.stdout.read()
