"""Starts raw Accelerate loops in processes, reads what they logged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ft_accelerate.options import ENV_SUPERVISOR
from ft_core.rank_group import group_command

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("loop_worker.py")
SCENARIOS = Path(__file__).with_name("scenarios.py")
WAIT_S = 150.0

Line = dict[str, Any]


class Run:
    """Scripts of one test; `log` is the folder that they write to."""

    def __init__(self, log: Path, lighthouse: str, worker: Path, **options: Any) -> None:
        self.log, self.lighthouse, self.worker = log, lighthouse, worker
        self.options = {"log": str(log), **options}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        index: int,
        groups: int = 2,
        size: int = 1,
        launcher: Sequence[str] = (),
        **env: str,
    ) -> subprocess.Popen[bytes]:
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

    def start_by_torchrun(self, size: int) -> subprocess.Popen[bytes]:
        """The only replica group, of `size` processes, with torchrun as its launcher."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
        return self.start(0, 1, launcher=torchrun)

    def start_plain(self, world_size: int = 2) -> list[subprocess.Popen[bytes]]:
        """Plain Accelerate on torch's DistributedDataParallel, the oracle."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            self._start({"RANK": str(rank), "LOCAL_RANK": str(rank), **world, **address})
            for rank in range(world_size)
        ]

    def _start(
        self, env: dict[str, str], size: int = 1, launcher: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("FT_", "TORCHFT_", "ACCELERATE_", "REPLICA_", "NUM_REPLICA"))
        }
        path = self.log / f"output.{len(self.processes)}"
        with path.open("wb") as output:
            command = [sys.executable, *launcher, str(self.worker), json.dumps(self.options)]
            process = subprocess.Popen(
                group_command(command, size, parent_env=ENV_SUPERVISOR),
                env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def lines(self, name: int) -> list[Line]:
        """What replica `name` logged so far, in order, over all its lives."""
        path = self.log / f"{name}.steps"
        if not path.exists():
            return []
        with contextlib.suppress(json.JSONDecodeError):
            return [json.loads(text) for text in path.read_text().splitlines()]
        return self.lines(name)  # a line was half written

    def end(self, name: int) -> Line:
        path = self.log / f"{name}.end"
        assert path.exists(), f"replica {name} has not finished:\n{self.output()}"
        result: Line = json.loads(path.read_text())
        return result

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            failed = any((p.poll() or 0) > 0 for p in self.processes)
            if failed or time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}:\n{self.output()}")
            time.sleep(0.02)  # other processes' files announce nothing

    def until_step(self, name: int, step: int) -> None:
        self.until(
            lambda: any(line["step"] >= step for line in self.lines(name)[-1:]),
            f"step {step} of replica {name}",
        )

    def lives(self, name: int) -> list[int]:
        """Process ids of replica `name`, in the order in which their training started."""
        path = self.log / f"{name}.ready"
        return [int(text) for text in path.read_text().split()] if path.exists() else []

    def until_held(self, name: int, hold: str) -> None:
        """Until replica `name` waits at this hold (option `holds`)."""
        path = self.log / f"{name}.holds"
        self.until(
            lambda: path.exists() and hold in path.read_text().split(), f"{hold} of replica {name}"
        )

    def go(self, hold: str) -> None:
        """Let the replicas go on that wait there."""
        (self.log / f"go.{hold}").touch()

    def killed_and_back(
        self,
        victim: subprocess.Popen[bytes],
        index: int,
        *,
        hold: str,
        of: int,
        groups: int = 2,
        size: int = 1,
        **env: str,
    ) -> subprocess.Popen[bytes]:
        """SIGKILL replica group `index` while process `of` waits at `hold`: its last process, which
        the group does not survive. Its next life, when the others have been told to go on and it
        has come back to them."""
        self.until_held(of, hold)
        if size == 1:
            victim.kill()
        else:
            os.kill(self.lives(index * size + size - 1)[-1], signal.SIGKILL)
        victim.wait(WAIT_S)
        asked, met = self.events(index, "waiting", "quorum"), self.events(index, "quorum")
        again = self.start(index, groups, size, ACCELERATE_FAULT_TOLERANCE_RESTARTS="1", **env)
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

    def wait(self, *processes: subprocess.Popen[bytes], code: int | None = 0) -> None:
        """Until they have ended, with this exit code. None: whatever it is (torch's own Gloo group
        sometimes aborts a plain process at its exit, when all is done)."""
        for process in processes:
            try:
                got = process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self._ask_for_stacks()
                raise AssertionError(f"process does not end:\n{self.output()}") from None
            assert code is None or got == code, (
                f"exit code {got} instead of {code}:\n{self.output()}"
            )

    def _ask_for_stacks(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR2)
        time.sleep(1.0)  # for them to write

    def output(self) -> str:
        texts = []
        for path in sorted(self.log.glob("output.*")):
            texts.append(f"--- {path.name}\n{path.read_text()[-3000:]}")
        return "\n".join(texts)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def running(
    log: Path, lighthouse: str = "", worker: Path = WORKER, **options: Any
) -> Iterator[Run]:
    """A run whose processes are gone at the end."""
    log.mkdir(parents=True, exist_ok=True)
    run = Run(log, lighthouse, worker, **options)
    try:
        yield run
    finally:
        run.close()


class Scenarios(Run):
    """Several fits in each process, see `scenarios.py`."""

    script = SCENARIOS

    def run(self, groups: int) -> None:
        """All of them, on so many processes, under "ft_ddp" or what `strategy` says."""
        if self.options.get("strategy", "ft_ddp") == "ft_ddp":
            self.wait(*[self.start(index, groups) for index in range(groups)])
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(groups)}
        self.wait(*[self.start(LOCAL_RANK=str(index), **world) for index in range(groups)])

    def result(self, rank: int, name: str) -> Line:
        result: Line = json.loads((self.log / f"{rank}.{name}").read_text())
        return result


MUST_AGREE = ("epoch", "index", "digest", "lr", "ticks", "average", "count")


def compare(a: list[Line], b: list[Line]) -> int:
    """Assert that two replicas agree at every step that both logged; returns how many those are."""
    by_step = {line["step"]: line for line in a}
    common = [(by_step[line["step"]], line) for line in b if line["step"] in by_step]
    for mine, other in common:
        for key in MUST_AGREE:
            assert mine[key] == other[key], (
                f"step {mine['step']}: {key} is {mine[key]!r} and {other[key]!r}"
            )
    return len(common)
