"""Training scripts that run in processes of their own, and what they logged.

How a suite starts its scripts stands in its `harness.py`. A script writes to one folder: a line of
JSON for each step to `NAME.steps`, its process id to `NAME.ready`, its results to `NAME.end`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ft_core.environment import ENV_HEARTBEAT, ENV_WARM
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

Line = dict[str, Any]
Process = subprocess.Popen[bytes] | workers.Worker


class Run:
    """Scripts of one test; `log` is the folder that they write to."""

    framework = "torch"
    """What a script finds imported: a key of `workers.FRAMEWORKS`."""

    def __init__(self, log: Path, lighthouse: str, script: Path, **options: Any) -> None:
        log.mkdir(parents=True, exist_ok=True)
        self.log, self.lighthouse, self.script = log, lighthouse, script
        self.options = {"log": str(log), **options}
        self.processes: list[Process] = []
        self.waited: list[Process] = []  # and ended as they should

    def launch(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        without: tuple[str, ...],
        supervises: bool = True,
    ) -> Process:
        """Start Python with `arguments` in an environment that has `env`, and nothing whose name
        begins as `without` says; as a fork, if it is to run a script or a module. `supervises`: see
        `workers.start`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(without)}
        # See tests/conftest.py; and a busy machine may let ZeroMQ's threads wait for a second.
        known = {ENV_WARM: "0", ENV_HEARTBEAT: "1"}
        env = {**kept, **known, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        path = self.log / f"output.{len(self.processes)}"
        process: Process
        with path.open("wb") as output:
            streams: Any = {"stdout": output, "stderr": subprocess.STDOUT}
            if arguments[0] == "-c":
                process = subprocess.Popen([sys.executable, *arguments], env=env, **streams)
            else:
                process = workers.start(
                    self.framework,
                    arguments,
                    env=env,
                    cwd=Path.cwd(),
                    supervises=supervises,
                    **streams,
                )
        self.processes.append(process)
        return process

    def lines(self, name: int, kind: str = "steps") -> list[Line]:
        """What replica `name` logged so far, in order, over all its lives."""
        path = self.log / f"{name}.{kind}"
        if not path.exists():
            return []
        with contextlib.suppress(json.JSONDecodeError):
            return [json.loads(text) for text in path.read_text().splitlines()]
        return self.lines(name, kind)  # a line was half written

    def end(self, name: int) -> Line:
        path = self.log / f"{name}.end"
        assert path.exists(), f"replica {name} has not finished:\n{self.output()}"
        result: Line = json.loads(path.read_text())
        return result

    def lives(self, name: int | str) -> list[int]:
        """Process ids of replica `name`, in the order in which their training started."""
        path = self.log / f"{name}.ready"
        return [int(text) for text in path.read_text().split()] if path.exists() else []

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
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

    def until_held(self, name: int, place: str) -> None:
        """Until replica `name` waits at this place (option `holds`, see `script.Holds`)."""
        self.until(lambda: self._is_held(name, place), f"replica {name} at {place}")

    def go(self, place: str) -> None:
        """Let the replicas go on that wait at this place, once one does: one that has not come so
        far would never wait."""
        self.until(
            lambda: any(self._is_held(path.stem, place) for path in self.log.glob("*.holds")),
            f"any replica at {place}",
        )
        (self.log / f"go.{place}").touch()

    def _is_held(self, name: int | str, place: str) -> bool:
        path = self.log / f"{name}.holds"
        return path.exists() and place in path.read_text().splitlines()

    def wait(self, *processes: Process, code: int | None = 0) -> None:
        """Until they have ended, with this exit code. None: whatever it is (torch's own Gloo group
        sometimes aborts a plain process at its exit, when all is done)."""
        for process in processes:
            try:
                got = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._ask_for_stacks()
                raise AssertionError(f"process does not end:\n{self.output()}") from None
            assert code is None or got == code, (
                f"exit code {got} instead of {code}:\n{self.output()}"
            )
            self.waited.append(process)

    def _ask_for_stacks(self) -> None:
        """Only processes that have begun their script handle the signal: it would end a launcher."""
        for path in self.log.glob("*.ready"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.lives(path.stem)[-1], signal.SIGUSR2)
        time.sleep(1.0)  # for them to write

    def output(self) -> str:
        """The ends of what all processes printed."""
        texts = []
        for path in sorted(self.log.glob("output.*")):
            texts.append(f"--- {path.name}\n{path.read_text()[-8000:]}")
        return "\n".join(texts)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


AnyRun = TypeVar("AnyRun", bound=Run)


@contextlib.contextmanager
def ended(run: AnyRun) -> Iterator[AnyRun]:
    """`run`, whose processes are gone at the end."""
    try:
        yield run
    finally:
        run.close()


def compare_steps(
    a: list[Line], b: list[Line], keys: Sequence[str], *, optional: Sequence[str] = ()
) -> int:
    """Assert that two replicas agree at every step that both logged, in `keys` and in those of
    `optional` that are logged; returns how many steps those are."""
    by_step = {line["step"]: line for line in a}
    common = [(by_step[line["step"]], line) for line in b if line["step"] in by_step]
    for mine, other in common:
        for key in (*keys, *(k for k in optional if k in mine)):
            assert mine[key] == other[key], (
                f"step {mine['step']}: {key} is {mine[key]!r} and {other[key]!r}"
            )
    return len(common)
