"""The tests' end of the worker processes: start, hold, kill, wait for events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lighthouse import LighthouseServer
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, children_of, until

ROOT = Path(__file__).resolve().parents[2]
ALIGN_STEPS = 20
"""So many steps take longer than a command takes to arrive."""

Report = dict[str, Any]


class Worker:
    """One run in a process of its own: `worker.RunOptions`; `holds`: phases to hold from the start.

    Reports are kept in order; `await_*` wait for one, without polling.
    """

    def __init__(self, *, holds: Sequence[str] = (), **options: Any) -> None:
        words = [json.dumps(options), *holds]
        self.process = workers.start(
            "torch",
            ["-m", "tests.process.worker", *words],
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            supervises=False,
        )
        self.reports: list[Report] = []
        self.name = options["name"]
        self.rank = options.get("rank", 0)
        self.running = True
        self._seen = 0
        self._over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="reports", daemon=True)
        self._reader.start()

    # ------------------------------------------------------------------ commands

    def hold(self, phase: str, *, step: int = 0) -> None:
        """Stop in `phase` the next time it is reached, in `step` or later."""
        self._say("hold", phase=phase, step=step)

    def watch(self, phase: str, *, step: int = 0) -> None:
        """Report `phase` the next time it is reached, in `step` or later."""
        self._say("watch", phase=phase, step=step)

    def go(self) -> None:
        """Go on where the worker is held."""
        self._say("go")

    def tell_to_stop(self) -> None:
        """The run ends after its step."""
        self._say("stop")

    def stop(self, *, end_of_group: bool = False, told: bool = False) -> None:
        """End the run after its step, and wait for that. `end_of_group`: this rank may learn of
        its end from another rank's. `told`: by `tell_to_stop`."""
        if not told:
            # Its process may be gone by then, and has reported its end.
            with suppress(*(BrokenPipeError,) if end_of_group else ()):
                self.tell_to_stop()
        error = self.await_end()
        assert not error or (end_of_group and error.startswith("GroupBroken")), error

    def await_end(self) -> str:
        """Wait until the run has ended by itself; its error, or ""."""
        ended = self.await_report(lambda r: r["kind"] == "ended", fatal=False)
        self.running = False
        return str(ended["error"])

    def send_signal(self, signum: int) -> None:
        """To this process; SIGKILL is waited for (a dead process reports nothing any more)."""
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait()
            self.running = False

    def _say(self, what: str, **data: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"do": what, **data}) + "\n").encode())
        self.process.stdin.flush()

    # ------------------------------------------------------------------ waiting

    def mark(self) -> None:
        """Let the next `await_*` look at later reports only."""
        with self._changed:
            self._seen = len(self.reports)

    def await_report(
        self,
        matches: Callable[[Report], bool],
        timeout_s: float = PATIENCE_S,
        *,
        fatal: bool = True,
    ) -> Report:
        """The next report that matches, later than the one that the last call returned.

        `fatal`: a run that ends with an error meanwhile fails the test.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                while self._seen < len(self.reports):
                    report = self.reports[self._seen]
                    self._seen += 1
                    if matches(report):
                        return report
                    if fatal and report["kind"] == "ended" and report["error"]:
                        raise AssertionError(f"{self.name} ended: {report['error']}")
                if self._over:
                    raise AssertionError(f"{self.name} is gone, code {self.process.poll()}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(
                        f"{self.name}: nothing in {timeout_s:g} s; last: {self.reports[-6:]}"
                    )
                self._changed.wait(left)

    def await_at(self, phase: str) -> Report:
        return self.await_report(lambda r: r["kind"] == "at" and r["phase"] == phase)

    def await_event(self, event: str) -> Report:
        """The next telemetry event of this kind."""
        return self.await_report(lambda r: r["kind"] == "event" and r["event"] == event)

    def await_commit(self, after_step: int = -1) -> Report:
        """The next committed step whose number of steps is over `after_step`."""
        return self.await_report(
            lambda r: r["kind"] == "step" and r["committed"] and r["step"] > after_step
        )

    def await_commits(self, count: int) -> Report:
        """`count` more commits; the last one."""
        report: Report = {}
        for _ in range(count):
            report = self.await_commit()
        return report

    def since(self, kind: str, start: int) -> list[Report]:
        """Reports of this kind from number `start` (see `count`) on."""
        with self._changed:
            return [r for r in self.reports[start:] if r["kind"] == kind]

    def count(self) -> int:
        """How many reports there are."""
        with self._changed:
            return len(self.reports)

    def discards_since(self, start: int) -> list[Report]:
        return [r for r in self.since("step", start) if not r["committed"]]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # half a line of a killed process
                with self._changed:
                    self.reports.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.end()
        self._reader.join()


class Job:
    """The replica groups of one test, by name; knows all that they ever reported."""

    def __init__(self, lighthouse: str, **options: Any) -> None:
        self.lighthouse, self._options = lighthouse, options
        self._workers: list[Worker] = []
        self._stores: list[Any] = []

    def start(self, name: str, **options: Any) -> Worker:
        """Start (or restart) a replica group, or with rank=... one of its ranks."""
        given = {**self._options, **options}
        self._workers.append(Worker(lighthouse=self.lighthouse, name=name, **given))
        return self._workers[-1]

    def start_ranks(self, name: str, **options: Any) -> list[Worker]:
        """Start both ranks of one of two groups, with a rendezvous store of their own, as a launcher
        does."""
        from torch.distributed import TCPStore

        limit = timedelta(seconds=PATIENCE_S)
        store = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        self._stores.append(store)
        given = {
            "store_addr": "127.0.0.1",
            "store_port": store.port,
            "world_size": 2,
            "expected_replicas": 2,
        }
        given |= options
        return [self.start(name, rank=rank, **given) for rank in (0, 1)]

    def start_all(self, count: int) -> list[Worker]:
        """`count` replica groups named 0, 1, ...; returns when all have committed twice."""
        workers = [self.start(str(i), expected_replicas=count) for i in range(count)]
        for worker in workers:
            worker.await_commits(2)
        return workers

    def finish(self, *, end_of_group: bool = False, together: bool = False) -> None:
        """End all runs (`together`: none waits for another's end); then: equal (step, lineage) means equal bits, over all that was ever
        reported (S3), and each step has one lineage among the commits (S2).

        Ranks of one group hold shards here: each rank number is a world of its own.
        """
        running = [worker for worker in self._workers if worker.running]
        for worker in running if together else ():
            worker.tell_to_stop()
        for worker in running:
            worker.stop(end_of_group=end_of_group, told=together)
        for rank in {worker.rank for worker in self._workers}:
            check_states(self.all_steps(rank))

    def all_steps(self, rank: int = 0) -> list[Report]:
        """What the processes of this rank have said of their steps."""
        said = [w.since("step", 0) for w in self._workers if w.rank == rank]
        return [report for reports in said for report in reports]

    def close(self) -> None:
        """No process is left."""
        for worker in self._workers:
            worker.close()
        self._stores.clear()


def all_commit(workers: list[Worker], steps: int = 3) -> None:
    """Wait until each of `workers` has committed that many steps from now on."""
    for worker in workers:
        worker.mark()
    for worker in workers:
        worker.await_commits(steps)


def check_states(steps: list[Report]) -> None:
    """S3 and S2 over all reports of one rank number of a job."""
    digests: dict[tuple[int, str], str] = {}
    lineages: dict[int, str] = {}
    for report in steps:
        key = (report["step"], report["lineage"])
        assert digests.setdefault(key, report["digest"]) == report["digest"], f"S3 broken at {key}"
        if report["committed"]:
            known = lineages.setdefault(report["step"], report["lineage"])
            assert known == report["lineage"], f"S2 broken at step {report['step']}"


class LighthouseProcess:
    """The command `lighthouse` as a process of its own, so that it can be killed."""

    def __init__(self, *, port: int = 0, arguments: tuple[str, ...] = ()) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lighthouse", "--bind", f"tcp://127.0.0.1:{port}", *arguments],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=env,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline().decode()  # blocks until it listens
        assert "listening on" in first, first
        self.address = first.split()[-1]
        self.port = int(self.address.rpartition(":")[2])
        self._drain = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._drain.start()

    @property
    def serving(self) -> int:
        """The process that serves: a child of the command's."""
        return children_of(self.process.pid)[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._drain.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def await_voted(lighthouse: LighthouseServer, *names: str) -> None:
    """Until the lighthouse has these members' votes. It announces no such thing, hence the looks."""

    def all_have() -> bool:
        members = [m for job in lighthouse.status()["jobs"] for m in job["members"]]
        return set(names) <= {m["name"] for m in members if m["voted"]}

    until(all_have, f"the votes of {', '.join(names)}")


def align(*workers: Worker) -> None:
    """Hold all of them in "begin" of the same step: what is armed now counts for that step."""
    step = workers[0].await_commit()["step"] + ALIGN_STEPS
    for worker in workers:
        worker.hold("begin", step=step)
    held = [worker.await_at("begin") for worker in workers]
    assert {report["step"] for report in held} == {step}


@contextmanager
def frozen(worker: Worker) -> Iterator[None]:
    """The process is stopped (SIGSTOP) within the block."""
    worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send_signal(signal.SIGCONT)
