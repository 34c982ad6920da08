"""One run: replica groups of real processes, a lighthouse, and what happens to them."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_core.shell.group_server import IN_GROUP_SILENCE_S
from tests.harness import workers
from tests.harness.networks import Networks, networks
from tests.harness.waiting import PATIENCE_S, children_of
from tests.process.driver import ROOT
from tests.soak.checks import AFTERMATH_S, Checker, Report
from tests.soak.schedule import ASYNC, DILOCO, GROUP, Fault, Shape

TIMEOUT_S = 20.0
HEARTBEAT_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 5.0
CHECKPOINT_EVERY = 50
RESTART_S = (0.0, 3.0)
"""How long a supervisor takes to start a replica group again."""
RANK_GRACE_S = 10.0
"""How long the other ranks of a group have to notice the end of one."""
SETTLE_COMMITS = 5
TICK_S, STILL_S = 0.05, 0.25
"""A thread that sleeps for the one, and comes back the other later, was kept by the machine."""
STRAY = (
    b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32),
    b"",
)
OUTER = {"kind": "DiLoCo", "sync_every": 8}


@dataclass(slots=True)
class Rank:
    """A process of a replica group."""

    group: int
    number: int
    process: workers.Worker
    error: str | None = None
    over: bool = False


@dataclass(slots=True)
class Group:
    """A replica group under its supervisor, which is this process."""

    number: int
    ranks: list[Rank] = field(default_factory=list)
    lives: int = 0
    hit: bool = False
    """A fault that ends it has struck it since it was started."""
    ready: bool = False
    """It has committed since it was started: it knows what the job has done."""
    unheard_until: float = 0.0
    """It was stopped, or cut off from the lighthouse, and needs a while to be back."""


class Soak:
    """Runs `faults`, then lets all groups settle; `checker` and `endings` say what was seen.

    Args:
        shape: what is trained.
        faults: in the order of time.
        seconds: how long, before they settle.
        pause_s: pretended work of each step.
        timeout_s: of the members and the lighthouse; most other durations derive from it.
        say: called with each line for a person.
        log: where what the processes print is kept; None: nowhere.
    """

    def __init__(
        self,
        shape: Shape,
        faults: list[Fault],
        seconds: float,
        *,
        pause_s: float = 0.02,
        timeout_s: float = TIMEOUT_S,
        say: Callable[[str], None] = lambda line: None,
        log: Path | None = None,
    ) -> None:
        self.shape, self.faults, self.seconds = shape, faults, seconds
        self._pause_s, self._timeout_s, self._say = pause_s, timeout_s, say
        self._log_path = log
        self.checker = Checker(one_lineage=shape.mode != GROUP, ranks=shape.ranks)
        self.endings: dict[str, int] = {}
        """Ends that no fault explains, by what was said."""
        self.settled = False
        self._chance = random.Random(f"{shape} {len(faults)}")
        self._groups = [Group(number) for number in range(shape.groups)]
        self._news: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._ports = itertools.count(20_000 + os.getpid() % 8_000)
        self._finished = threading.Event()
        self._settling = False
        self._networks: Networks | None = None

    def run(self) -> None:
        """Blocks; at the end no process is left. Main thread."""
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if self.shape.networks:
                self._networks = stack.enter_context(networks(self.shape.groups))
            self._log = stack.enter_context((self._log_path or self._folder / "log").open("ab"))
            stack.callback(self._end_all)
            clock = threading.Thread(target=self._watch_clock)
            clock.start()
            stack.callback(clock.join)
            stack.callback(self._finished.set)
            self._start_lighthouse()
            stack.callback(self._stop_lighthouse)
            for group in self._groups:
                self._start(group)
            self._turn_until(lambda: all(g.ready for g in self._groups), PATIENCE_S)
            began = time.monotonic()
            for fault in self.faults:
                self._at(began + fault.at_s, lambda fault=fault: self._strike(fault))
            self._turn_until(lambda: False, self.seconds)
            self._settle()

    # ------------------------------------------------------------------ the loop

    def _watch_clock(self) -> None:
        """Notice when this process stands still."""
        due = time.monotonic() + TICK_S
        while not self._finished.wait(TICK_S):
            now = time.monotonic()
            if now > due + STILL_S:
                self._news.put((due, now))
            due = now + TICK_S

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._serial), what))

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, what)

    def _turn_until(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Handle news and what is due until `over()`; False after `limit_s`."""
        until_s = time.monotonic() + limit_s
        while not over():
            now = time.monotonic()
            if now >= until_s:
                return False
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            wake_at = min(until_s, self._due[0][0] if self._due else until_s)
            with suppress(queue.Empty):
                what, report = self._news.get(timeout=max(0.0, wake_at - time.monotonic()))
                if isinstance(what, Rank):
                    self._hear(what, report)
                else:
                    self.checker.stood_still(what, report)
        return True

    def _hear(self, rank: Rank, report: Report | None) -> None:
        group = self._groups[rank.group]
        if report is None:
            self._ended(group, rank)
        elif report["kind"] == "step":
            known = len(self.checker.violations)
            now = report["at"]
            unheard = {g.number for g in self._groups if now < g.unheard_until}
            self.checker.step(rank.group, rank.number, report, now, unheard)
            for found in self.checker.violations[known:][:5]:
                self._say(found)
            if any(each.over for each in group.ranks):
                self.checker.gone(rank.group)
            group.ready = group.ready or (report["committed"] and rank in group.ranks)
        elif report["kind"] == "event":
            if report["event"] in ("heal_done", "revoked"):
                self.checker.counts[report["event"]] += 1
        elif report["kind"] == "ended":
            rank.error = report["error"]

    def _ended(self, group: Group, rank: Rank) -> None:
        rank.over = True
        if rank in group.ranks:
            self.checker.gone(rank.group)
        code = rank.process.wait()
        if not group.hit and not self._settling:
            said = (rank.error or f"exit code {code}")[:200]
            self.endings[said] = self.endings.get(said, 0) + 1
            self._say(f"group {group.number} rank {rank.number} ended by itself: {said}")
        group.hit = True
        if rank in group.ranks and all(each.over for each in group.ranks):
            self._over(group)
        elif rank in group.ranks:
            ranks = list(group.ranks)
            self._after(RANK_GRACE_S, lambda: [each.process.kill() for each in ranks] and None)

    def _over(self, group: Group) -> None:
        for rank in group.ranks:
            rank.process.end()
        group.ranks, group.ready = [], False
        self._after(self._chance.uniform(*RESTART_S), lambda: self._start(group))

    # ------------------------------------------------------------------ processes

    def _start(self, group: Group) -> None:
        if group.ranks:
            return
        group.lives += 1
        group.hit, group.ready = False, False
        port = next(self._ports)
        for number in range(self.shape.ranks):
            group.ranks.append(self._start_rank(group, number, port))

    def _start_rank(self, group: Group, number: int, port: int) -> Rank:
        shape, index = self.shape, group.number
        options: dict[str, Any] = {
            "lighthouse": self._address,
            "name": str(index),
            "says": self._log_path is not None,
            "seed": index + 1,
            "pause_s": self._pause_s,
            "timeout_s": self._timeout_s,
            "heartbeat_s": HEARTBEAT_TIMEOUT_S / 3,
            "expected_replicas": shape.groups,
            "use_async_quorum": shape.mode == ASYNC,
            "commit": "group" if shape.mode == GROUP else "quorum",
            "rank": number,
            "world_size": shape.ranks,
        }
        if shape.ranks > 1:
            host = "127.0.0.1" if self._networks is None else self._networks.host(index)
            options |= {"store_addr": host, "store_port": port}
        if self._networks is not None:
            options["network"] = self._networks.name(index)
        if shape.mode == DILOCO:
            options["outer"] = OUTER
        else:
            options["checkpoints"] = str(self._folder)
            options["checkpoint_every"] = CHECKPOINT_EVERY
            options["resume_at"] = self._newest_checkpoint(index)
        process = workers.start(
            "torch",
            ["-m", "tests.process.worker", json.dumps(options)],
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        rank = Rank(index, number, process)
        threading.Thread(target=self._read, args=(rank,), daemon=True).start()
        return rank

    def _newest_checkpoint(self, index: int) -> int:
        """The newest step that all ranks of a group have saved; 0: none."""
        found = [
            {int(path.name.split(".")[0]) for path in self._folder.glob(f"*.{rank}.{index}")}
            for rank in range(self.shape.ranks)
        ]
        return max(set.intersection(*found), default=0)

    def _read(self, rank: Rank) -> None:
        assert rank.process.stdout is not None
        with suppress(ValueError, OSError):
            for line in rank.process.stdout:
                if line.endswith(b"\n"):  # else half a line of a killed process
                    self._news.put((rank, {**json.loads(line), "at": time.monotonic()}))
        self._news.put((rank, None))

    def _end_all(self) -> None:
        for group in self._groups:
            for rank in group.ranks:
                rank.process.end()

    def _start_lighthouse(self, port: int = 0) -> None:
        inside = (
            []
            if self._networks is None
            else ["ip", "netns", "exec", self._networks.name(self.shape.groups)]
        )
        host = "127.0.0.1" if self._networks is None else self._networks.host(self.shape.groups)
        self._lighthouse = subprocess.Popen(
            [
                *inside,
                sys.executable,
                "-m",
                "lighthouse",
                "--bind",
                f"tcp://{host}:{port}",
                "--timeout",
                str(self._timeout_s),
                "--heartbeat-timeout",
                str(HEARTBEAT_TIMEOUT_S),
                "--join-timeout",
                str(JOIN_TIMEOUT_S),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._lighthouse.stdout is not None
        first = self._lighthouse.stdout.readline().decode()
        assert "listening on" in first, first
        self._address = first.split()[-1]
        stdout = self._lighthouse.stdout
        threading.Thread(target=lambda: self._log.write(stdout.read()), daemon=True).start()

    def _stop_lighthouse(self) -> None:
        for pid in self._serving():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._lighthouse.kill()
        self._lighthouse.wait()

    def _serving(self) -> list[int]:
        return [] if self._lighthouse.poll() is not None else children_of(self._lighthouse.pid)

    # ------------------------------------------------------------------ faults

    def _strike(self, fault: Fault) -> None:
        self._say(f"{fault.at_s:8.1f} s  {fault.kind} {fault.groups} {fault.for_s:.1f} s")
        self.checker.fault(fault.kind, time.monotonic(), fault.for_s)
        getattr(self, f"_do_{fault.kind}")(fault)

    def _signal(
        self, index: int, number: int, rank: int | None = None, *, ends: bool = True
    ) -> None:
        """`ends`: the group may end of it."""
        group = self._groups[index]
        group.hit = group.hit or ends
        for each in group.ranks:
            if rank is None or each.number == rank:
                each.process.send_signal(number)

    def _unheard(self, index: int, fault: Fault) -> None:
        until = time.monotonic() + fault.for_s + AFTERMATH_S
        self._groups[index].unheard_until = max(self._groups[index].unheard_until, until)

    def _do_kill(self, fault: Fault) -> None:
        self._signal(fault.groups[0], signal.SIGKILL, fault.rank)

    def _do_stop(self, fault: Fault) -> None:
        index = fault.groups[0]
        processes = [r.process for r in self._groups[index].ranks if r.number == fault.rank]
        long = self.shape.ranks > 1 and fault.for_s > IN_GROUP_SILENCE_S / 2
        self._signal(index, signal.SIGSTOP, fault.rank, ends=long)
        self._unheard(index, fault)
        self._after(
            fault.for_s, lambda: [p.send_signal(signal.SIGCONT) for p in processes] and None
        )

    def _do_term(self, fault: Fault) -> None:
        self._signal(fault.groups[0], signal.SIGTERM, fault.rank)

    def _do_storm(self, fault: Fault) -> None:
        chance = random.Random(fault.seed)
        for index in fault.groups:
            for _ in range(chance.randint(1, 3)):  # also while it starts again
                self._after(
                    chance.uniform(0.0, 4.0), lambda i=index: self._signal(i, signal.SIGKILL)
                )

    def _do_kill_all(self, fault: Fault) -> None:
        for group in self._groups:
            self._signal(group.number, signal.SIGKILL)

    def _do_lighthouse_kill(self, fault: Fault) -> None:
        """Its process, which is started again at once; or the command, which a person starts."""
        if fault.both_ways:
            for pid in self._serving():
                os.kill(pid, signal.SIGKILL)
            return
        if self._lighthouse.poll() is not None:
            return  # it is down already, and about to be started
        port = int(self._address.rpartition(":")[2])
        self._lighthouse.kill()
        self._lighthouse.wait()
        self._after(fault.for_s, lambda: self._start_lighthouse(port))

    def _do_lighthouse_stop(self, fault: Fault) -> None:
        serving = self._serving()
        for pid in serving:
            os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in serving:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        self._after(fault.for_s, go_on)

    def _do_cut_pair(self, fault: Fault) -> None:
        self._cut(*fault.groups, fault)

    def _do_cut_lighthouse(self, fault: Fault) -> None:
        self._cut(fault.groups[0], self.shape.groups, fault)
        self._unheard(fault.groups[0], fault)

    def _cut(self, one: int, other: int, fault: Fault) -> None:
        net = self._networks
        assert net is not None
        ways = [(one, other), (other, one)] if fault.both_ways else [(one, other)]
        for way in ways:
            net.cut(*way)
            self._after(fault.for_s, lambda way=way: net.mend(*way))

    def _do_stray(self, fault: Fault) -> None:
        """Traffic that is not meant: at the lighthouse, and at all ports of one group."""
        chance, index = random.Random(fault.seed), fault.groups[0]
        thread = threading.Thread(target=self._stray, args=(chance, index), daemon=True)
        thread.start()

    def _stray(self, chance: random.Random, index: int) -> None:
        net = self._networks
        lighthouse = int(self._address.rpartition(":")[2])
        places = [(self.shape.groups, [lighthouse])]
        with suppress(OSError):
            places.append((index, _listening([r.process.pid for r in self._groups[index].ranks])))
        for place, ports in places:
            with nullcontext("127.0.0.1") if net is None else net.inside(place) as host:
                for port in ports:
                    for _ in range(3):
                        _disturb(chance, host, port)

    # ------------------------------------------------------------------ the end

    def _settle(self) -> None:
        """No more faults: all groups commit together, then all are told to stop."""
        self._say("settling")
        if not self._turn_until(lambda: not self._due, PATIENCE_S):
            return
        counted = dict.fromkeys(range(self.shape.groups), 0)
        hear = self._hear

        def count(rank: Rank, report: Report | None) -> None:
            hear(rank, report)
            if report is not None and report["kind"] == "step" and rank.number == 0:
                counted[rank.group] = counted[rank.group] + 1 if report["committed"] else 0

        self._hear = count  # type: ignore[method-assign]
        enough = self._turn_until(
            lambda: min(counted.values()) >= SETTLE_COMMITS and self._equal_versions(), PATIENCE_S
        )
        self._settling = True
        self.settled = enough

    def _equal_versions(self) -> bool:
        return self.checker.equal_at_the_end(self.shape.ranks)


def _listening(pids: list[int]) -> list[int]:
    """TCP ports at which these processes listen."""
    ports = set()
    for pid in pids:
        sockets = {os.readlink(path) for path in _descriptors(pid)}
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return sorted(ports)


def _descriptors(pid: int) -> list[str]:
    with suppress(OSError):
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return []


def _disturb(chance: random.Random, host: str, port: int) -> None:
    """Connect, send what is no message, and close or reset."""
    import struct

    with suppress(OSError), socket.create_connection((host, port), 2.0) as stranger:
        stranger.settimeout(2.0)
        data = chance.choice([*STRAY, chance.randbytes(chance.randint(1, 200_000))])
        stranger.sendall(data)
        if chance.random() < 0.5:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
