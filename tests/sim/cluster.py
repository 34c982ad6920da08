"""The simulated cluster: one lighthouse, its network, processes that come and go."""

from __future__ import annotations

import random
from typing import Any

from ft_core.replica.events import Transmit
from ft_core.replica.machine import Replica
from ft_core.replica.status import Stage
from lighthouse.config import LighthouseConfig
from lighthouse.machine.job import Effect, Note, Remember, Send, first_quorum_id
from lighthouse.machine.jobs import Lighthouse
from lighthouse.wire.messages import DeathNotice, JobKey, Join, Request
from tests.sim.checker import Checker
from tests.sim.clock import Clock
from tests.sim.network import UP, Network
from tests.sim.plane import Plane
from tests.sim.process import Habits, Position, Process
from tests.sim.profile import Profile

WALL_CLOCK_S = 1_700_000_000.0
START: tuple[Position, int] = ((0, "root"), 0)


class Cluster:
    """`make_lighthouse` and `make_replica` may be replaced (by broken machines)."""

    def __init__(self, seed: int | str, profile: Profile, *, tracing: bool = False) -> None:
        self.profile, self.tracing = profile, tracing
        self.clock = Clock()
        self.net_rng = random.Random(f"net {seed}")
        self.work_rng = random.Random(f"work {seed}")
        self.fault_rng = random.Random(f"faults {seed}")
        self.network = Network(self.clock, self.net_rng, profile.network)
        self.network.to_lighthouse = self._request
        self.network.lighthouse_lost = self._lost
        self.jobs = [JobKey("job", f"room{i}") for i in range(profile.jobs)]
        self.checkers = {job: self._make_checker(job) for job in self.jobs}
        self.planes = {
            job: Plane(self.clock, self.work_rng, self.checkers[job]) for job in self.jobs
        }
        self.running: dict[str, Process] = {}
        self.checkpoints: dict[str, tuple[Position, int]] = {}
        self.trace: list[str] = []
        self.lighthouse: Lighthouse | None = None
        self._lives: dict[str, int] = {}
        self._wake: float | None = None
        self._journal: dict[JobKey, tuple[int, tuple[str, ...]]] = {}
        self._cut_until: dict[str, float] = {}
        self._habits: dict[str, Habits] = {}

    def _make_checker(self, job: JobKey) -> Checker:
        profile = self.profile
        return Checker(
            now=lambda: self.clock.now,
            unreachable=lambda: self._unreachable(job),
            living=lambda: frozenset(r for r, p in self.running.items() if p.job == job),
            cut_since=lambda since: frozenset(
                r for r, until in self._cut_until.items() if until >= since
            ),
            life=lambda: self.network.lighthouse_life,
            group_commit=profile.group_commit,
            lossy=profile.network.harsh,
        )

    # ------------------------------------------------------------------ processes

    def job_of(self, slot: str) -> JobKey:
        return self.jobs[self.profile.slots.index(slot) % len(self.jobs)]

    def spawn(self, slot: str) -> None:
        """Start a process, unless the slot has one."""
        if self.process_in(slot) is not None:
            return
        self._lives[slot] = self._lives.get(slot, 0) + 1
        profile = self.profile
        habits = Habits(
            forward_s=profile.forward_s * self.work_rng.uniform(0.8, 1.2),
            buckets=profile.buckets,
            asynchronous=profile.asynchronous,
            checkpoint_every=profile.checkpoint_every,
        )
        start = self.checkpoints.get(slot, START)
        process = Process(self, slot, self.job_of(slot), self._lives[slot], habits, start)
        self.running[process.replica_id] = process
        self.cut(process, self.clock.now)  # no process can have heard of it yet
        self.log(f"{process.replica_id} starts at step {start[0][0]}")
        process.start()

    def process_in(self, slot: str) -> Process | None:
        return next((p for p in self.running.values() if p.slot == slot), None)

    def crash(self, process: Process) -> None:
        """SIGKILL: the socket closes at once or with a delay; a watcher may be faster."""
        if not process.alive:
            return
        self.log(f"{process.replica_id} crashes")
        process.crash()
        self._end(process)
        late = self.fault_rng.choice((0.002, 0.1, self.profile.timeouts.heartbeat_timeout_s))
        self.network.break_link(process.link, lighthouse_s=late, process_s=0.0)
        if self.fault_rng.random() < self.profile.death_notices:
            self.clock.after(0.001, self.death_notice, process.job, process.replica_id)

    def process_ended(self, process: Process) -> None:
        """The process has left by itself."""
        if process.alive:
            self.log(f"{process.replica_id} ends")
            process.alive = False
            self._end(process)
            self.network.break_link(process.link, lighthouse_s=0.002, process_s=0.0)
            if process.replica.stage is Stage.REFUSED:  # a supervisor starts it again
                self.clock.after(self.profile.restart_s, self.spawn, process.slot)

    def _end(self, process: Process) -> None:
        self.running.pop(process.replica_id, None)
        self.checkers[process.job].ended(process.replica_id)

    def cut(self, process: Process, until: float) -> None:
        """For the checker: the lighthouse can't rely on `process` before `until`."""
        grace = self.profile.timeouts.join_timeout_s + self.profile.timeouts.heartbeat_timeout_s
        known = self._cut_until.get(process.replica_id, 0.0)
        self._cut_until[process.replica_id] = max(known, until + grace)

    def _unreachable(self, job: JobKey) -> frozenset[str]:
        now = self.clock.now
        return frozenset(
            r for r, p in self.running.items()
            if p.job == job
            and (p.paused or p.habits.hung or p.link.blocked or p.left
                 or self._cut_until.get(r, 0.0) > now)
        )  # fmt: skip

    # ------------------------------------------------------------------ the lighthouse

    def start_lighthouse(self) -> None:
        """First start, or a restart with whatever the journal kept."""
        if self.lighthouse is not None:
            return
        profile = self.profile
        config = LighthouseConfig(
            min_replicas=profile.min_replicas,
            expected_replicas=profile.expected_replicas,
            timeouts=profile.timeouts,
        )
        first_id = first_quorum_id(int((WALL_CLOCK_S + self.clock.now) * 1000))
        self.lighthouse = self.make_lighthouse(config, first_id, dict(self._journal))
        self.log("lighthouse starts")
        self.network.lighthouse_started()

    def crash_lighthouse(self) -> None:
        if self.lighthouse is not None:
            self.log("lighthouse crashes")
            self.lighthouse = None
            self.network.lighthouse_down()

    def death_notice(self, job: JobKey, replica_id: str) -> None:
        if self.lighthouse is not None:
            watcher = f"{replica_id}#watcher".encode()
            self._request(watcher, DeathNotice(job, replica_id, "watched it die"))

    def make_lighthouse(
        self,
        config: LighthouseConfig,
        first_id: int,
        remembered: dict[JobKey, tuple[int, tuple[str, ...]]],
    ) -> Lighthouse:
        return Lighthouse(config, first_id, remembered)

    def make_replica(self, template: Join, *, resend_s: float, revoke_grace_s: float) -> Replica:
        return Replica(template, resend_s=resend_s, revoke_grace_s=revoke_grace_s)

    def _request(self, peer: bytes, message: Request) -> None:
        if self.lighthouse is not None:
            if self.tracing:
                self.log(f"lighthouse <- {peer.decode()}: {self.short(message)}")
            self._carry_out(self.lighthouse.handle(peer, message, self.clock.now))

    def _lost(self, peer: bytes) -> None:
        if self.lighthouse is not None:
            self.log(f"lighthouse loses {peer.decode()}")
            self._carry_out(self.lighthouse.disconnected(peer, self.clock.now))

    def _expire(self, planned: float) -> None:
        if self._wake == planned:
            self._wake = None
        lighthouse = self.lighthouse
        if lighthouse is None:
            return
        wanted = lighthouse.deadline()
        effects = []
        if wanted is not None and wanted <= self.clock.now:
            effects = lighthouse.expire(self.clock.now)
            again = lighthouse.deadline()
            assert again is None or again > self.clock.now, "the deadline did not move"
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        lighthouse = self.lighthouse
        assert lighthouse is not None
        for effect in effects:
            if isinstance(effect, Send):
                for peer in effect.peers:
                    self.network.send_down(peer, effect.message)
            elif isinstance(effect, Remember):
                self.checkers[effect.job].announced(effect.quorum_id, effect.members)
                if self.profile.journal:
                    self._journal[effect.job] = (effect.quorum_id, effect.members)
            else:
                assert isinstance(effect, Note)
                self.log(f"lighthouse: {effect.text}")
        lighthouse.check()
        wanted = lighthouse.deadline()
        if wanted is not None and (self._wake is None or wanted < self._wake):
            self._wake = wanted
            self.clock.at(wanted, self._expire, wanted)

    # ------------------------------------------------------------------ the trace

    def log(self, text: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.clock.now:9.4f} {text}")

    @staticmethod
    def short(message: Any) -> str:
        """One line for a message or an effect."""
        inner = message.message if isinstance(message, Transmit) else message
        shown = []
        for name in type(inner).__dataclass_fields__:
            value = getattr(inner, name)
            if name in ("job", "addresses", "schema", "schema_text") or value in (
                "",
                (),
                None,
                b"",
            ):
                continue
            if name in ("members", "changed", "sources"):
                value = "[" + " ".join(m.replica_id + "*" * m.healing for m in value) + "]"
            elif name == "next_quorum":
                value = f"({Cluster.short(value)})"
            shown.append(f"{name}={value}")
        return f"{type(inner).__name__} {' '.join(shown)}"

    def linked(self, process: Process) -> bool:
        return process.link.state == UP
