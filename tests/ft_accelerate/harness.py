"""Starts raw Accelerate loops in processes, reads what they logged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft_core.launch.rank_group import free_port, group_command
from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import runs, workers
from tests.harness.runs import Line, Process, compare_steps, ended
from tests.harness.waiting import PATIENCE_S

WORKER = Path(__file__).parent / "runtime" / "loop_worker.py"
NOT_OURS = ("FT_", "TORCHFT_", "ACCELERATE_", "REPLICA_", "NUM_REPLICA")


class Run(runs.Run):
    """Scripts of one test."""

    framework = "accelerate"

    def start(
        self,
        index: int,
        groups: int = 2,
        size: int = 1,
        launcher: Sequence[str] = (),
        **env: str,
    ) -> Process:
        """Replica group `index` of `groups`; of `size` processes that live and die together.
        `launcher`: python's arguments before the script."""
        prefix = "ACCELERATE_FAULT_TOLERANCE_"
        return self._start(
            {
                "ACCELERATE_USE_FAULT_TOLERANCE": "true",
                prefix + "REPLICA_GROUP_ID": str(index),
                prefix + "NUM_REPLICA_GROUPS": str(groups),
                prefix + "LIGHTHOUSE": self.lighthouse,
                prefix + "JOB_ID": str(self.log),  # one lighthouse serves several runs
                prefix + "TIMEOUT_S": "20",
                "FT_EVENT_LOG": str(self.log / f"{index}.events"),
                **env,
            },
            size,
            launcher,
        )

    def start_by_torchrun(self, size: int) -> Process:
        """The only replica group, of `size` processes, with torchrun as its launcher."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
        return self.start(0, 1, launcher=torchrun)

    def start_plain(self, world_size: int = 2) -> list[Process]:
        """Plain Accelerate on torch's DistributedDataParallel, the oracle."""
        world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self._start({"RANK": str(rank), "LOCAL_RANK": str(rank), **world, **address})
            for rank in range(world_size)
        ]

    def _start(self, env: dict[str, str], size: int = 1, launcher: Sequence[str] = ()) -> Process:
        command = [sys.executable, *launcher, str(self.script), json.dumps(self.options)]
        _, *arguments = group_command(command, size)
        supervises = size > 1 or bool(launcher)
        return self.launch(arguments, env, without=NOT_OURS, supervises=supervises)

    def killed_and_back(
        self,
        victim: Process,
        index: int,
        *,
        hold: str,
        of: int,
        groups: int = 2,
        size: int = 1,
        **env: str,
    ) -> Process:
        """SIGKILL replica group `index` while process `of` waits at `hold`: its last process, which
        the group does not survive. Its next life, when the others have been told to go on and it
        has come back to them."""
        self.until_held(of, hold)
        if size == 1:
            victim.kill()
        else:
            os.kill(self.lives(index * size + size - 1)[-1], signal.SIGKILL)
        victim.wait(PATIENCE_S)
        asked, met = self.events(index, "waiting", "quorum"), self.events(index, "quorum")
        again = self.start(index, groups, size, FT_RESTARTS="1", **env)
        self.until(
            lambda: self.events(index, "waiting", "quorum") > asked,
            f"replica {index} asks for a quorum",
        )
        self.go(hold)
        self.until(lambda: self.events(index, "quorum") > met, f"replica {index} in a quorum")
        return again

    def evaluations(self, name: int, live: bool | None = None) -> list[Line]:
        """Results of the evaluations of replica `name`, over all its lives."""
        path = self.log / f"{name}.evals"
        found = [json.loads(text) for text in path.read_text().splitlines()]
        return [
            {k: e[k] for k in ("epoch", "right", "total")}
            for e in found
            if live is None or e["live"] == live
        ]

    def events(self, name: int, *kinds: str) -> int:
        """How many telemetry events of these kinds replica `name` has written (FT_EVENT_LOG)."""
        path = self.log / f"{name}.events"
        text = path.read_text() if path.exists() else ""
        return sum(text.count(f'"kind": "{kind}"') for kind in kinds)


def running(
    log: Path, lighthouse: str = "", worker: Path = WORKER, **options: Any
) -> contextlib.AbstractContextManager[Run]:
    """A run whose processes are gone at the end."""
    return ended(Run(log, lighthouse, worker, **options))


MUST_AGREE = ("epoch", "index", "digest", "lr", "ticks", "average", "count")


def compare(a: list[Line], b: list[Line]) -> int:
    """Assert that two replicas agree at every step that both logged; returns how many those are."""
    return compare_steps(a, b, MUST_AGREE)


def forget_accelerate() -> None:
    """Let the next test of this process make Accelerate's states anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def said_by(script_text: str, tmp_path: Path, group_size: int, timeout_s: int) -> str:
    """What `accelerate launch` of two replica groups, both of which are needed, says of a script that gets
    `tmp_path` and ends well."""
    script = tmp_path / "script.py"
    script.write_text(script_text)
    flags = ["--cpu", "--num_processes", str(2 * group_size), "--fault_tolerance_min_replicas", "2"]
    flags += ["--fault_tolerance_group_size", str(group_size)]
    flags += ["--fault_tolerance_timeout_s", str(timeout_s)]
    command = [*accelerate("launch")[1:], *flags, str(script), str(tmp_path)]
    env = installed(tmp_path / "package", ACCELERATE_USE_FAULT_TOLERANCE="true")
    with (tmp_path / "said").open("wb") as out:
        job = workers.start("accelerate", command, env=env, stdout=out, stderr=out)
        try:
            code = job.wait(PATIENCE_S)
        finally:
            job.end()
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    return said
