"""Starts Trainers in processes, reads what they logged."""

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

from ft_core.rank_group import free_port, rank_environment

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
SCENARIOS = Path(__file__).with_name("scenarios.py")
WAIT_S = 150.0

Line = dict[str, Any]


class Run:
    """Trainers of one test; `log` is the folder that they write to."""

    script = WORKER

    def __init__(self, log: Path, lighthouse: str, **options: Any) -> None:
        self.log, self.lighthouse = log, lighthouse
        self.script = options.pop("worker", self.script)
        self.options = {"log": str(log), **options}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.waited: list[subprocess.Popen[bytes]] = []  # and ended as they should

    def start(
        self, index: int | None = None, groups: int = 2, through: Sequence[str] = (), **env: str
    ) -> subprocess.Popen[bytes]:
        """Replica group `index` of `groups`; None: a plain start of the script. `through`: what
        Python runs in its place, such as torchrun's module."""
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("FT_", "TORCHFT_", "PL_", "REPLICA_", "NUM_REPLICA"))
        }
        if index is not None:
            env = {"REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": str(groups), **env}
            env["TORCHFT_LIGHTHOUSE"] = self.lighthouse
            env["FT_JOB_ID"] = str(self.log)  # one lighthouse serves several runs
        path = self.log / f"output.{len(self.processes)}"
        with path.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *through, str(self.script), json.dumps(self.options)],
                env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def start_ranks(
        self, index: int, *, size: int, groups: int, **env: str
    ) -> list[subprocess.Popen[bytes]]:
        """The processes of replica group `index`, as a launcher would start them."""
        port = free_port()
        return [
            self.start(index, groups, **rank_environment(env, rank=rank, size=size, port=port))
            for rank in range(size)
        ]

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
            failed = any((p.poll() or 0) > 0 for p in self.processes if p not in self.waited)
            if failed or time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}:\n{self.output()}")
            time.sleep(0.02)  # other processes' files announce nothing

    def until_step(self, name: int, step: int) -> None:
        self.until(
            lambda: any(line["step"] >= step for line in self.lines(name)[-1:]),
            f"step {step} of replica {name}",
        )

    def validations(self, name: int) -> dict[int, Line]:
        """What replica `name` logged of each epoch's validation; its metric is that of the set."""
        lines = [json.loads(text) for text in (self.log / f"{name}.validations").open()]
        for line in lines:
            assert abs(line["val_loss"] - line["truth"]) < 1e-5, (name, line)
        return {line["epoch"]: line for line in lines}

    def lives(self, name: int) -> list[int]:
        """Process ids of replica `name`, in the order in which their training started."""
        path = self.log / f"{name}.ready"
        return [int(text) for text in path.read_text().split()] if path.exists() else []

    def go(self) -> None:
        """Let the replicas go on that hold (option `hold`)."""
        (self.log / "go").touch()

    def wait(self, *processes: subprocess.Popen[bytes], code: int = 0) -> None:
        for process in processes:
            try:
                got = process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self._ask_for_stacks()
                raise AssertionError(f"process does not end:\n{self.output()}") from None
            assert got == code, f"exit code {got} instead of {code}:\n{self.output()}"
            self.waited.append(process)

    def _ask_for_stacks(self) -> None:
        for process in self.processes:
            if process.poll() is None and "devices" not in self.options:
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
def running(log: Path, lighthouse: str = "", **options: Any) -> Iterator[Run]:
    """A run whose processes are gone at the end."""
    log.mkdir(parents=True, exist_ok=True)
    run = Run(log, lighthouse, **options)
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


MUST_AGREE = (
    "epoch", "batch_idx", "module_batch_idx", "last", "total", "digest", "lr", "schedulers",
    "average", "steps", "manager_step",
)  # fmt: skip


def compare(a: list[Line], b: list[Line]) -> int:
    """Assert that two replicas agree at every step that both logged; returns how many those are."""
    by_step = {line["step"]: line for line in a}
    common = [(by_step[line["step"]], line) for line in b if line["step"] in by_step]
    for mine, other in common:
        for key in (*MUST_AGREE, *(k for k in ("weights", "stopping") if k in mine)):
            assert mine[key] == other[key], (
                f"step {mine['step']}: {key} is {mine[key]!r} and {other[key]!r}"
            )
    return len(common)
