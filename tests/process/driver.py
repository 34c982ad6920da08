"""The tests' end of the worker processes: start, hold, kill, wait for events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lighthouse import LighthouseServer
from tests.leaks import SHARED_THREADS, shared_children

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
MAX_PROCESSES = 4
ALIGN_STEPS = 20
"""So many steps take longer than a command takes to arrive."""

Report = dict[str, Any]


class Worker:
    """One worker process. Reports are kept in order; `await_*` wait for one, without polling."""

    def __init__(self) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        env["OMP_NUM_THREADS"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=env,
        )
        shared_children.add(self.process.pid)
        self.reports: list[Report] = []
        self.name = ""
        self.busy = False
        self._seen = 0
        self._over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(
            target=self._read, name=f"{SHARED_THREADS}reader", daemon=True
        )
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and not self._over

    # ------------------------------------------------------------------ commands

    def run(self, **options: Any) -> None:
        """Start a run; see `worker.RunOptions`. `holds`: phases to hold from the start."""
        self.name, self.busy = options["name"], True
        self.mark()
        self._say("run", **options)

    def hold(self, phase: str, *, step: int = 0) -> None:
        """Stop in `phase` the next time it is reached, in `step` or later."""
        self._say("hold", phase=phase, step=step)

    def watch(self, phase: str, *, step: int = 0) -> None:
        """Report `phase` the next time it is reached, in `step` or later."""
        self._say("watch", phase=phase, step=step)

    def go(self) -> None:
        """Go on where the worker is held."""
        self._say("go")

    def stop(self, *, end_of_group: bool = False) -> None:
        """End the run after its step, and wait for that. `end_of_group`: this rank may learn of
        its end from another rank's."""
        self._say("stop")
        error = self.await_end()
        assert not error or (end_of_group and error.startswith("GroupBroken")), error

    def await_end(self) -> str:
        """Wait until the run has ended by itself; its error, or "". The worker is idle then."""
        ended = self.await_report(lambda r: r["kind"] == "ended", fatal=False)
        self.busy = False
        return str(ended["error"])

    def send_signal(self, signum: int) -> None:
        """To this process; SIGKILL is waited for (a dead process reports nothing any more)."""
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait()
            self.busy = False

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
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self._reader.join()
        shared_children.discard(self.process.pid)


class Pool:
    """At most `MAX_PROCESSES` workers, kept warm between tests."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def take(self) -> Worker:
        """A worker that is ready to run; started if need be."""
        self._drop_dead()
        for worker in self._workers:
            if not worker.busy:
                return self._ready(worker)
        assert len(self._workers) < MAX_PROCESSES, "more worker processes than allowed"
        self._workers.append(Worker())
        return self._ready(self._workers[-1])

    def warm(self) -> None:
        """Start a spare in the background, if there is room."""
        self._drop_dead()
        idle = any(not worker.busy for worker in self._workers)
        if not idle and len(self._workers) < MAX_PROCESSES:
            self._workers.append(Worker())

    def _ready(self, worker: Worker) -> Worker:
        if not worker.name:
            worker.await_report(lambda r: r["kind"] == "ready")
        return worker

    def _drop_dead(self) -> None:
        for worker in [w for w in self._workers if not w.alive]:
            worker.close()
            self._workers.remove(worker)

    def discard(self, worker: Worker) -> None:
        """A worker that a test is done with and that is not idle: end it."""
        worker.close()
        if worker in self._workers:
            self._workers.remove(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class Job:
    """The replica groups of one test, by name; knows all that they ever reported."""

    def __init__(self, pool: Pool, lighthouse: str, **options: Any) -> None:
        self._pool, self.lighthouse, self._options = pool, lighthouse, options
        self.workers: dict[str, Worker] = {}
        self._runs: list[tuple[int, Worker, int]] = []  # rank, whose reports, from which on

    def start(self, name: str, **options: Any) -> Worker:
        """Start (or restart) a replica group, or with rank=... one of its ranks."""
        worker = self._pool.take()
        self._runs.append((options.get("rank", 0), worker, len(worker.reports)))
        key = f"{name}.{options['rank']}" if "rank" in options else name
        self.workers[key] = worker
        worker.run(lighthouse=self.lighthouse, name=name, **{**self._options, **options})
        return worker

    def start_all(self, count: int) -> list[Worker]:
        """`count` replica groups named 0, 1, ...; returns when all have committed twice."""
        workers = [self.start(str(i), expected_replicas=count) for i in range(count)]
        for worker in workers:
            worker.await_commits(2)
        return workers

    def finish(self, *, end_of_group: bool = False) -> None:
        """End all runs; then: equal (step, lineage) means equal bits, over all that was ever
        reported (S3), and each step has one lineage among the commits (S2).

        Ranks of one group hold shards here: each rank number is a world of its own.
        """
        living = [w for w in self.workers.values() if w.alive and w.busy]
        for worker in living:
            worker.stop(end_of_group=end_of_group)
        for rank in {rank for rank, _, _ in self._runs}:
            check_states(self.all_steps(rank))

    def all_steps(self, rank: int = 0) -> list[Report]:
        """What the processes of this rank have said of their steps."""
        found: list[Report] = []
        for number, (its_rank, worker, start) in enumerate(self._runs):
            later = [s for _, other, s in self._runs[number + 1 :] if other is worker]
            if its_rank == rank:  # a process may be used again, for another rank
                found += worker.reports[start : later[0] if later else None]
        return [report for report in found if report["kind"] == "step"]

    def abandon(self) -> None:
        """After a failed test: no process is left in a run."""
        for worker in self.workers.values():
            if worker.busy or not worker.alive:
                self._pool.discard(worker)


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

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._drain.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def await_voted(lighthouse: LighthouseServer, *names: str) -> None:
    """Until the lighthouse has these members' votes. It announces no such thing, hence the looks."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        members = [m for room in lighthouse.status()["jobs"] for m in room["members"]]
        missing = set(names) - {m["name"] for m in members if m["voted"]}
        if not missing:
            return
        time.sleep(0.005)
    raise AssertionError(f"{', '.join(sorted(missing))} did not vote")


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
