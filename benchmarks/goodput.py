"""python benchmarks/goodput.py [--json FILE] [--kill-every S --step S --groups N --seconds S]
                               [--kills N [--gib G]]

What is left of a training while its processes are killed at regular intervals: steps that were
committed, and samples that counted in them, against what the same job makes without a fault, and the
longest time between two commits. Each case kills a replica group that runs, taken at random, by
SIGKILL every so many seconds. Ours are started again by the supervisor, from a template, as under
Lightning and Accelerate; torchft's (if installed) by this script, at once. Both run in turn.

The ideal is the mean pace of the job's own calm steps: all groups take part, and the last kill is more
than 2 s ago. (Not that of the first steps: beside them the template imports.) Where a job has hardly any,
its steps before the first kill. A step is forward and backward of a fixed time, an all-reduce of 340 kB, the
vote, and an update; one sample a group and step.

`--kills N`: what each of N kills costs the survivors instead: the longer of the first two intervals
between commits that end after it, beyond a step. The group that has trained longest is killed once it
has for 6 s (before, its pause would grow) and all groups contribute. `--gib G`: group 0 has so much memory
resident, and is killed each time.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report, torchft_version
from recovery import NUMEL, Case, ours, say, start_lighthouse, step, torchft

BASELINE_STEPS = 60
START_LIMIT_S = 90.0
"""For the groups to come together; also after a kill, with `--kills`."""
LIFE_S = 6.0
CALM_S = 2.0
"""After a kill."""


@dataclass(frozen=True)
class Load:
    """What is killed how often. `kill_every_s` and `step_s` in seconds. `spares`: hot ones, beside
    `groups`."""

    peer: str
    groups: int
    kill_every_s: float
    step_s: float
    seconds: float
    spares: int = 0


CASES = [
    Load(peer, 3, kill_every_s, step_s, seconds)
    for kill_every_s, step_s, seconds in ((5.0, 0.1, 60.0), (15.0, 0.5, 90.0))
    for peer in ("ours", "torchft")
]


# ---------------------------------------------------------------- the replica groups


def work(kind: str, group: str, lighthouse: str, step_s: float, spares: int) -> None:
    """One replica group of one rank, until it is killed."""
    import torch

    torch.set_num_threads(1)
    gib = int(os.environ.get("GOODPUT_GIB", "0")) if group == "0" else 0
    resident = torch.ones(gib << 28)  # noqa: F841 - memory that its end has to free
    weights = torch.zeros(NUMEL)
    about = {"group": int(group), "pid": os.getpid()}
    say("start", **about)
    name = f"group_{group}" + (f"_{os.getpid()}" if kind == "torchft" else "")
    if kind == "ours":
        from ft_core.launch.supervisor import die_with

        die_with(int(os.environ["GOODPUT_SUPERVISOR"]))
        expected = int(os.environ["GOODPUT_EXPECTED"])
        manager, allreduce = ours(
            name, lighthouse, weights, "", spares=spares, expected_replicas=expected
        )
    else:
        manager, allreduce = torchft(name, lighthouse, weights, "")
    while True:
        if step(manager, allreduce, weights, step_s):
            is_ours = kind == "ours"
            participants = (
                manager.last_outcome().participants if is_ours else manager.num_participants()
            )
            say("commit", **about, step=manager.current_step(), participants=participants)


def supervised(load: Load, lighthouse: str) -> int:
    """All groups of `load` under the supervisor; this process' exit code."""
    from ft_core.launch.supervisor import supervise
    from ft_core.launch.warm.starter import warm_starts

    def environment(index: int) -> dict[str, str]:
        its = {"GROUP": index, "EXPECTED": load.groups + load.spares, "SUPERVISOR": os.getpid()}
        return {**os.environ, **{f"GOODPUT_{name}": str(value) for name, value in its.items()}}

    values = str(load.step_s), str(load.spares)
    command = [sys.executable, __file__, "--worker", "ours", lighthouse, *values]
    warm = warm_starts(True, places=["GOODPUT_"])
    return supervise(
        command,
        environment,
        count=load.groups + load.spares,
        min_alive=1,
        max_restarts=None,
        warm=warm,
    )


# ---------------------------------------------------------------- the experiment


@dataclass
class Watched:
    """What the groups of a job have said. Filled by the threads that read their output."""

    groups: int
    commits: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By step: when its first member reported it, and how many groups contributed."""
    pids: dict[int, int] = field(default_factory=dict)
    """Of the groups whose process runs."""
    trains_since: dict[int, float] = field(default_factory=dict)
    """By group: when its process reported its first commit."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self, output: Any) -> None:
        """Until its end."""
        for line in output:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            with self.changed:
                if said["kind"] == "start":
                    self.pids[said["group"]] = said["pid"]
                    self.trains_since.pop(said["group"], None)
                elif said["kind"] == "commit":
                    self.trains_since.setdefault(said["group"], said["t"])
                    at, most = self.commits.get(said["step"], (said["t"], 0))
                    self.commits[said["step"]] = at, max(most, said["participants"])
                self.changed.notify_all()

    def full_steps(self) -> list[float]:
        """When the steps were committed in which all groups have taken part, in order."""
        return [at for _, (at, all_) in sorted(self.commits.items()) if all_ == self.groups]

    def await_start(self) -> None:
        """Until all groups have made some steps together."""
        with self.changed:
            enough = lambda: len(self.full_steps()) > BASELINE_STEPS  # noqa: E731
            if not self.changed.wait_for(enough, START_LIMIT_S):
                raise TimeoutError(f"the groups did not come together within {START_LIMIT_S:g} s")

    def pace_s(self, killed: list[float]) -> float:
        """Seconds that a step of the whole job takes when nothing happens, on average: so many steps make the
        time that they take. `killed`: when groups were."""
        times = self.full_steps()
        before = times[: bisect.bisect_right(times, killed[0])] if killed else times
        calm = [b - a for a, b in itertools.pairwise(times) if not _near(a, b, killed)]
        if len(calm) < BASELINE_STEPS:
            calm = [b - a for a, b in itertools.pairwise(before)]
        return statistics.fmean(calm)

    def await_victim(self, among: range) -> int:
        """The one of these groups that has trained longest, when it may be killed."""

        def found() -> int | None:
            newest = max(self.commits, default=None)
            full = newest is not None and self.commits[newest][1] == self.groups
            if not full or len(self.pids) < self.groups or len(self.trains_since) < self.groups:
                return None
            oldest = min(among, key=lambda group: self.trains_since[group])
            long = time.monotonic() - self.trains_since[oldest] > LIFE_S
            return oldest if long else None

        with self.changed:
            if not self.changed.wait_for(lambda: found() is not None, START_LIMIT_S):
                raise TimeoutError(f"not at full strength within {START_LIMIT_S:g} s of a kill")
            victim = found()
            assert victim is not None
            return victim

    def kill(self, group: int) -> float:
        """SIGKILL to its process, which has no number until it has said the next; returns when."""
        with self.changed:
            pid = self.pids.pop(group)
            self.trains_since.pop(group, None)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at


def _near(began: float, ended: float, killed: list[float]) -> bool:
    """Whether a kill is within this interval, or shortly before it; before the first one: yes."""
    last = bisect.bisect_right(killed, ended) - 1
    return last < 0 or began < killed[last] + CALM_S


@contextmanager
def running(load: Load, lighthouse: str) -> Iterator[Watched]:
    """The job of `load`: its groups are started again when they die, until the block is over."""
    watched, over = Watched(load.groups), threading.Event()
    if load.peer == "ours":
        values = (load.groups, load.kill_every_s, load.step_s, load.seconds, load.spares)
        command = [sys.executable, __file__, "--supervise", lighthouse, *map(str, values)]
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=_errors(), text=True, process_group=0
        )
        threading.Thread(target=watched.read, args=(job.stdout,), daemon=True).start()
        try:
            yield watched
        finally:
            job.kill()  # its groups end with it (`die_with`)
            job.wait()
        return
    lives: dict[int, subprocess.Popen[str]] = {}

    def restart(group: int) -> None:
        while not over.is_set():
            command = [
                sys.executable,
                __file__,
                "--worker",
                load.peer,
                lighthouse,
                str(load.step_s),
                "0",
            ]
            lives[group] = life = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=_errors(),
                text=True,
                env={**os.environ, "GOODPUT_GROUP": str(group)},
            )
            watched.read(life.stdout)
            life.wait()

    keepers = [threading.Thread(target=restart, args=(g,), daemon=True) for g in range(load.groups)]
    for keeper in keepers:
        keeper.start()
    try:
        yield watched
    finally:
        over.set()
        for group, keeper in enumerate(keepers):
            while keeper.is_alive():  # it may just have started another
                lives[group].kill()
                keeper.join(0.2)


def _errors() -> int | None:
    return None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL


def coordinator(load: Load) -> tuple[Any, str]:
    """(what ends it, its address)."""
    if load.peer == "ours":
        return start_lighthouse(Case("", load.groups + load.spares, ""))
    import socket

    from torchft.coordination import LighthouseServer

    # It waits so long for members that are in their steps: shorter than these, no two ever meet.
    join_ms = max(100, round(1.2e3 * load.step_s))
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=join_ms)
    return server.shutdown, server.address().replace(socket.gethostname(), "127.0.0.1")


def experiment(load: Load) -> dict[str, Any]:
    """The figures of one case."""
    stop_server, lighthouse = coordinator(load)
    chance, killed = random.Random(0), list[float]()
    try:
        with running(load, lighthouse) as watched:
            watched.await_start()
            began = time.monotonic()
            while (left_s := began + load.seconds - time.monotonic()) > 0:
                time.sleep(min(left_s, load.kill_every_s))
                if left_s > load.kill_every_s and watched.pids:
                    killed.append(watched.kill(chance.choice(sorted(watched.pids))))
            ended = time.monotonic()
            commits, pace_s = dict(watched.commits), watched.pace_s(killed)
    finally:
        stop_server()
    made = sorted((at, n) for at, n in commits.values() if began <= at <= ended)
    gaps = [b - a for a, b in itertools.pairwise([began, *(at for at, _ in made), ended])]
    ideal = (ended - began) / pace_s
    return {
        "kills": len(killed),
        "pace_ms": round(pace_s * 1e3, 1),
        "steps": round(len(made) / ideal, 4),
        "samples": round(sum(n for _, n in made) / (ideal * load.groups), 4),
        "longest_gap_ms": round(max(gaps) * 1e3),
        "p99_gap_ms": round(sorted(gaps)[int(0.99 * (len(gaps) - 1))] * 1e3),
    }


def each_kill(load: Load, kills: int, gib: int) -> dict[str, Any]:
    """What each of `kills` deaths costs the survivors, in ms beyond a step. `gib`: resident in group 0, the
    victim; 0: all are, in turn."""
    os.environ["GOODPUT_GIB"] = str(gib)
    stop_server, lighthouse = coordinator(load)
    chance, killed = random.Random(0), []
    try:
        with running(load, lighthouse) as watched:
            watched.await_start()
            for _ in range(kills):
                victim = watched.await_victim(range(1 if gib else load.groups))
                time.sleep(chance.random() * load.step_s)  # any phase of a step
                killed.append(watched.kill(victim))
            time.sleep(10 * load.step_s)
            times = sorted(at for at, _ in watched.commits.values())
            pace_s = watched.pace_s(killed)
    finally:
        stop_server()
    beyond = []
    for at in killed:
        first = bisect.bisect_right(times, at)
        gaps = [b - a for a, b in itertools.pairwise(times[first - 1 : first + 2])]
        beyond.append((max(gaps) - pace_s) * 1e3)
    beyond.sort()
    return {
        "kills": kills,
        "pace_ms": round(pace_s * 1e3, 1),
        **{f"p{p}_ms": round(beyond[min(kills - 1, kills * p // 100)], 1) for p in (50, 90, 99)},
        "worst_ms": round(beyond[-1], 1),
    }


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    for name, of in (("--kill-every", float), ("--step", float), ("--seconds", float)):
        parser.add_argument(
            name, type=of, default=None, help="of one case instead of the usual two"
        )
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--spares", type=int, default=0, help="hot ones of ours, beside the groups")
    parser.add_argument("--kills", type=int, default=None, help="what each of so many costs")
    parser.add_argument("--gib", type=int, default=0, help="resident in those that are killed")
    options = parser.parse_args()
    if options.kills:
        load = Load("ours", options.groups, 0.0, options.step or 0.05, 0.0)
        found = each_kill(load, options.kills, options.gib)
        title = f"{options.kills} kills, {load.groups} groups, steps of {load.step_s:g} s: beyond a step"
        title += f", {options.gib} GiB resident" if options.gib else ""
        report(title, list(found), [list(found.values())], {title: found}, options.json)
        return
    cases = CASES
    if options.kill_every or options.step or options.seconds:
        given = options.kill_every or 5.0, options.step or 0.1, options.seconds or 60.0
        peers = ("ours",) if options.spares else ("ours", "torchft")
        cases = [Load(peer, options.groups, *given, options.spares) for peer in peers]
    rows, figures = [], {}
    for load in cases:
        if load.peer == "torchft" and torchft_version() is None:
            print("torchft is not installed: pip install -e '.[bench]' measures it, too")
            continue
        spares = f" and {load.spares} spare" if load.spares else ""
        name = f"{load.peer}, {load.groups} groups{spares}, a kill every {load.kill_every_s:g} s"
        try:
            found = experiment(load)
        except TimeoutError as error:
            print(f"{name}: {error}", flush=True)
            continue
        figures[f"{name}, steps of {load.step_s:g} s"] = found
        rows.append(
            [
                name,
                found["pace_ms"],
                found["kills"],
                f"{found['steps']:.1%}",
                f"{found['samples']:.1%}",
                found["longest_gap_ms"],
                found["p99_gap_ms"],
            ]
        )
        print(f"{name}: {found}", flush=True)
    columns = ["case", "step ms", "kills", "steps", "samples", "longest gap ms", "p99 gap ms"]
    report("Goodput", columns, rows, figures, options.json)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        step_s, spares = float(sys.argv[4]), int(sys.argv[5])
        work(sys.argv[2], os.environ["GOODPUT_GROUP"], sys.argv[3], step_s, spares)
    elif len(sys.argv) > 1 and sys.argv[1] == "--supervise":
        groups, *numbers, spares = sys.argv[3:8]
        kill_every_s, step_s, seconds = map(float, numbers)
        load = Load("ours", int(groups), kill_every_s, step_s, seconds, int(spares))
        sys.exit(supervised(load, sys.argv[2]))
    else:
        main()
