"""The simulated cluster: lighthouses, their network, processes that come and go."""

from __future__ import annotations

import math
import random
from typing import Any

from ft_core.replica.events import Transmit
from ft_core.replica.machine import Replica
from ft_core.replica.status import ParticipationRule
from lighthouse.config import LighthouseConfig
from lighthouse.machine.job import Remember
from lighthouse.wire.messages import (
    NO_TERM,
    DeathNotice,
    DeclareDead,
    JobKey,
    Join,
    Quorum,
    Request,
    Term,
    epoch_of,
)
from tests.sim.checker import Checker
from tests.sim.clock import Clock
from tests.sim.keeper import Keeper
from tests.sim.lighthouses import Lighthouses
from tests.sim.network import UP, Network
from tests.sim.plane import Plane
from tests.sim.process import Habits, Position, Process, shares_of_states
from tests.sim.profile import Profile

Start = tuple[Position, int, tuple[int, int]]
START: Start = ((0, "root"), 0, (0, 0))
TOGETHER_S = 1.0
"""Where a training may be complete the processes of the next one are started together, at multiples of a time
that is so much longer than it takes to be refused and started again: or they would never meet."""


class Cluster:
    """`make_replica` and `lighthouses.make` may be replaced (by broken machines)."""

    def __init__(self, seed: int | str, profile: Profile, *, tracing: bool = False) -> None:
        self.profile, self.tracing = profile, tracing
        self.clock = Clock()
        self.net_rng = random.Random(f"net {seed}")
        self.work_rng = random.Random(f"work {seed}")
        self.fault_rng = random.Random(f"faults {seed}")
        self.network = Network(self.clock, self.net_rng, profile.network, profile.lighthouses)
        self.jobs = [JobKey("job", f"room{i}") for i in range(profile.jobs)]
        self.checkers = {job: self._make_checker(job) for job in self.jobs}
        self.planes = {
            job: Plane(self.clock, self.work_rng, self.checkers[job]) for job in self.jobs
        }
        self.running: dict[str, Process] = {}
        self.checkpoints: dict[str, Start] = {}
        self.shares = shares_of_states(profile)
        self.trace: list[str] = []
        self.lighthouses = self._make_lighthouses(random.Random(f"clocks {seed}"))
        self.keepers = [Keeper(self, job, profile.keep_every_s) for job in self.jobs]
        self._lives: dict[str, int] = {}
        self._cut_until: dict[str, float] = {}
        self._joined: dict[str, Term] = {}  # the term of its last Join that has arrived
        self._term = NO_TERM  # of the newest quorum
        self._habits: dict[str, Habits] = {}

    def _make_lighthouses(self, clocks: random.Random) -> Lighthouses:
        profile = self.profile
        config = LighthouseConfig(
            min_replicas=profile.min_replicas,
            expected_replicas=profile.expected_replicas,
            timeouts=profile.timeouts,
        )
        skews_s = [0.0, *(clocks.uniform(-1e6, 1e6) for _ in range(1, profile.lighthouses))]
        return Lighthouses(
            self.clock, self.network, config, self, self.net_rng, skews_s, journal=profile.journal
        )

    def _make_checker(self, job: JobKey) -> Checker:
        profile = self.profile
        return Checker(
            now=lambda: self.clock.now,
            unreachable=lambda: self._unreachable(job),
            living=lambda: frozenset(r for r, p in self.running.items() if p.job == job),
            cut_since=lambda since: frozenset(
                r for r, until in self._cut_until.items() if until >= since
            ),
            life=lambda: sum(self.network.lives),
            group_commit=profile.group_commit,
            lighthouses=profile.lighthouses,
            heals_first=profile.heals_first,
        )

    # ------------------------------------------------------------------ processes

    def job_of(self, slot: str) -> JobKey:
        return self.jobs[self.profile.slots.index(slot) % len(self.jobs)]

    def expected(self, job: JobKey) -> int:
        """How many processes `job` is meant to have; 0: it does not say."""
        known = self.profile.expected_replicas > 0
        return sum(self.job_of(slot) == job for slot in self.profile.slots) if known else 0

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
        if profile.own_checkpoints:
            habits.checkpoint_every = 2 + profile.slots.index(slot)
        start = self.keeper(self.job_of(slot)).start_of(self.checkpoints.get(slot, START))
        process = Process(self, slot, self.job_of(slot), self._lives[slot], habits, start)
        self.running[process.replica_id] = process
        self.cut(process, self.clock.now)  # no process can have heard of it yet
        self.log(f"{process.replica_id} starts at step {start[0][0]}")
        process.start()

    def keeper(self, job: JobKey) -> Keeper:
        return next(keeper for keeper in self.keepers if keeper.job == job)

    def observed(self, process: Process, shown: Start) -> None:
        """A process has committed a step from `shown`, as which an observer could have fetched it."""
        self.keeper(process.job).sees(shown)

    def disowned(self, process: Process) -> None:
        """A process has learnt that its state is a different one."""
        self.keeper(process.job).disowned()

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
            self.clock.after(
                0.001, self.death_notice, process.job, process.replica_id, process.place
            )

    def process_ended(self, process: Process) -> None:
        """The process has left by itself."""
        if process.alive:
            self.log(f"{process.replica_id} ends")
            process.alive = False
            self._end(process)
            self.network.break_link(process.link, lighthouse_s=0.002, process_s=0.0)
            back_at = self.clock.now + self.profile.restart_s + process.stays_away_s
            if any(fault.kind == "finish" for fault in self.profile.faults):
                together_s = (
                    TOGETHER_S + self.profile.restart_s + self.profile.timeouts.connect_timeout_s
                )
                back_at = math.ceil(back_at / together_s) * together_s
            self.clock.at(back_at, self.spawn, process.slot)  # by its supervisor

    def _end(self, process: Process) -> None:
        self.running.pop(process.replica_id, None)
        if not any(p.job == process.job for p in self.running.values()):
            self.keeper(process.job).alone()
        self.checkers[process.job].ended(process.replica_id)

    def cut(self, process: Process, until: float) -> None:
        """For the checker: what `process` and the lighthouse say to each other may be lost until both
        have noticed that `until` is over."""
        profile = self.profile
        noticed = until + profile.timeouts.heartbeat_timeout_s + profile.network.reconnect_s
        known = self._cut_until.get(process.replica_id, 0.0)
        self._cut_until[process.replica_id] = max(known, noticed)

    def _unreachable(self, job: JobKey) -> frozenset[str]:
        """Those that the lighthouse need not wait for: they may be back later than the join timeout. So may
        one that has not joined the term since messages between the two were lost, or whose join a lighthouse
        that was stopped has yet to read."""
        since = self.clock.now - self.profile.timeouts.join_timeout_s
        joins_s = self.profile.timeouts.resend_s  # it takes to follow a lighthouse and to join
        unread = {
            m.replica_id
            for host in self.lighthouses.hosts
            for _, _, m in host.missed
            if isinstance(m, Join)
        }
        return frozenset(
            r
            for r, p in self.running.items()
            if p.job == job
            and (
                p.paused
                or p.habits.hung
                or p.link.blocked
                or p.left
                or p.link.state != UP
                or p.link.since > self.clock.now - joins_s
                or self._cut_until.get(r, 0.0) > since
                or r in unread
                or (p.link.lost_at > since and self._joined.get(r) != self._term)
            )
        )

    # ------------------------------------------------------------------ the lighthouses

    def start_lighthouse(self) -> None:
        """First start, or a restart, maybe on another host."""
        host = self.lighthouses.hosts[0]
        if host.machine is None:
            if self.profile.other_clocks:
                host.skew_s = self.fault_rng.uniform(-1e6, 1e6)
            if self.profile.old_journal:
                host.journal = dict(host.old)
        self.lighthouses.start()

    def death_notice(self, job: JobKey, replica_id: str, place: tuple[Term, int]) -> None:
        """Its watcher tells the lighthouse that its process had reached."""
        link = next((each for each in self.network.links if each.name == replica_id), None)
        home = link.home if link is not None else 0
        watcher = f"{replica_id}#watcher".encode()
        notice = DeathNotice(job, replica_id, "watched it die", *place)
        self.lighthouses.request(home, watcher, notice)

    def declare_dead(self, job: JobKey, slot: str) -> None:
        """A person does what the reason of the wait asks for."""
        self.lighthouses.request(0, b"tool", DeclareDead(job.job_id, slot))

    def make_replica(self, template: Join, *, resend_s: float, revoke_grace_s: float) -> Replica:
        rule = ParticipationRule(heals_first=self.profile.heals_first)
        return Replica(template, resend_s=resend_s, revoke_grace_s=revoke_grace_s, rule=rule)

    def arrives(self, home: int, peer: bytes, message: Request) -> None:
        if isinstance(message, Join):
            self._joined[message.replica_id] = message.promised
        if self.tracing:
            self.log(f"lighthouse {home} <- {peer.decode()}: {self.short(message)}")

    def shows(self, quorum: Quorum) -> None:
        self.checkers[quorum.job].starts(quorum)
        self.keeper(quorum.job).hears(quorum)

    def evicts(self, job: JobKey, replica_id: str) -> None:
        self.checkers[job].evicts(replica_id)

    def forms(self, effect: Remember) -> None:
        self._term = Term(epoch_of(effect.quorum_id), effect.nonce)
        self.checkers[effect.job].announced(effect.nonce, effect.quorum_id, effect.members)

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
