"""The simulated cluster: lighthouses, their network, processes that come and go."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ft_core.replica.events import Transmit
from ft_core.replica.machine import Replica
from lighthouse.config import LighthouseConfig
from lighthouse.machine.job import Effect, Note, Remember, Send
from lighthouse.machine.jobs import Lighthouse
from lighthouse.wire.messages import (
    NO_TERM,
    DeathNotice,
    Decision,
    DeclareDead,
    Expelled,
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
from tests.sim.network import UP, Link, Network, owner_of
from tests.sim.plane import Plane
from tests.sim.process import Habits, Position, Process, shares_of_states
from tests.sim.profile import Profile

Start = tuple[Position, int, tuple[int, int]]
START: Start = ((0, "root"), 0, (0, 0))
Journal = dict[JobKey, tuple[int, tuple[str, ...]]]
TOGETHER_S = 1.0
"""Where a training may be complete the processes of the next one are started together, at multiples of a time
that is so much longer than it takes to be refused and started again: or they would never meet."""
CLOCK_ERROR_S = 1e-6
"""What a float loses when a lighthouse's clock is far ahead."""


@dataclass(slots=True)
class LighthouseHost:
    """Where one of the lighthouses runs: its machine (None: it is down), and what outlives it."""

    skew_s: float = 0.0
    machine: Lighthouse | None = None
    journal: Journal = field(default_factory=dict)
    old: Journal = field(default_factory=dict)  # some quorums ago
    wake: float | None = None
    paused: bool = False
    timers_first: bool = False  # when it goes on; else what it was sent
    missed: list[tuple[Callable[..., None], bytes, Request | None]] = field(default_factory=list)


class Cluster:
    """`make_lighthouse` and `make_replica` may be replaced (by broken machines)."""

    def __init__(self, seed: int | str, profile: Profile, *, tracing: bool = False) -> None:
        self.profile, self.tracing = profile, tracing
        self.clock = Clock()
        self.net_rng = random.Random(f"net {seed}")
        self.work_rng = random.Random(f"work {seed}")
        self.fault_rng = random.Random(f"faults {seed}")
        self.network = Network(self.clock, self.net_rng, profile.network, profile.lighthouses)
        self.network.front = self._front
        self.network.to_lighthouse = self._request
        self.network.lighthouse_lost = self._lost
        self.jobs = [JobKey("job", f"room{i}") for i in range(profile.jobs)]
        self.checkers = {job: self._make_checker(job) for job in self.jobs}
        self.planes = {
            job: Plane(self.clock, self.work_rng, self.checkers[job]) for job in self.jobs
        }
        self.running: dict[str, Process] = {}
        self.checkpoints: dict[str, Start] = {}
        self.shares = shares_of_states(profile)
        self.trace: list[str] = []
        skews = random.Random(f"clocks {seed}")
        self.lighthouses = [
            LighthouseHost(skew_s=0.0 if home == 0 else skews.uniform(-1e6, 1e6))
            for home in range(profile.lighthouses)
        ]
        self.keepers = [Keeper(self, job, profile.keep_every_s) for job in self.jobs]
        self.open = list(range(profile.lighthouses))
        """The lighthouses to which the shared address leads now."""
        self._nonces = itertools.count(1)
        self._lives: dict[str, int] = {}
        self._cut_until: dict[str, float] = {}
        self._joined: dict[str, Term] = {}  # the term of its last Join that has arrived
        self._term = NO_TERM  # of the newest quorum
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
            life=lambda: sum(self.network.lives),
            group_commit=profile.group_commit,
            lighthouses=profile.lighthouses,
        )

    def _front(self, link: Link) -> int:
        """What the shared address leads to: any lighthouse behind it that is up, if there is one."""
        up = [home for home in self.open if self.network.up[home]]
        return self.net_rng.choice(up) if len(up) > 1 else (up or self.open)[0]

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
            for place in self.lighthouses
            for _, _, m in place.missed
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

    def start_lighthouse(self, home: int = 0) -> None:
        """First start, or a restart with whatever the journal kept."""
        place = self.lighthouses[home]
        if place.machine is not None:
            return
        profile = self.profile
        if profile.other_clocks:
            place.skew_s = self.fault_rng.uniform(-1e6, 1e6)
        if profile.old_journal:
            place.journal = dict(place.old)
        config = LighthouseConfig(
            min_replicas=profile.min_replicas,
            expected_replicas=profile.expected_replicas,
            timeouts=profile.timeouts,
        )
        place.machine = self.make_lighthouse(
            config, lambda: next(self._nonces), dict(place.journal)
        )
        place.wake = None
        self.log(f"lighthouse {home} starts")
        self.network.lighthouse_started(home)

    def crash_lighthouse(self, home: int = 0) -> None:
        place = self.lighthouses[home]
        if place.machine is not None:
            self.log(f"lighthouse {home} crashes")
            place.machine, place.missed = None, []
            self.network.lighthouse_down(home)

    def pause_lighthouse(self, home: int, for_s: float) -> None:
        """SIGSTOP: it finds all it missed when it goes on, the ends of its connections last."""
        place = self.lighthouses[home]
        if place.machine is None or place.paused:
            return
        self.log(f"lighthouse {home} stands still")
        place.paused = True
        if for_s > self.profile.timeouts.heartbeat_timeout_s:
            self.network.lighthouse_silent(home)
        self.clock.after(for_s, self.resume_lighthouse, home)

    def resume_lighthouse(self, home: int) -> None:
        place = self.lighthouses[home]
        place.paused = False
        if place.timers_first:
            place.timers_first = False
            self._expire(home, math.nan)
        missed, place.missed = place.missed, []
        for call, peer, message in missed:
            call(home, peer, message)
        if place.machine is not None:
            self._carry_out(home, [])

    def death_notice(self, job: JobKey, replica_id: str, place: tuple[Term, int]) -> None:
        """Its watcher tells the lighthouse that its process had reached."""
        link = next((each for each in self.network.links if each.name == replica_id), None)
        home = link.home if link is not None else 0
        watcher = f"{replica_id}#watcher".encode()
        self._request(home, watcher, DeathNotice(job, replica_id, "watched it die", *place))

    def declare_dead(self, job: JobKey, slot: str) -> None:
        """A person does what the reason of the wait asks for."""
        self._request(0, b"tool", DeclareDead(job.job_id, slot))

    def make_lighthouse(
        self,
        config: LighthouseConfig,
        nonces: Callable[[], int],
        remembered: dict[JobKey, tuple[int, tuple[str, ...]]],
    ) -> Lighthouse:
        return Lighthouse(config, nonces, remembered)

    def make_replica(self, template: Join, *, resend_s: float, revoke_grace_s: float) -> Replica:
        return Replica(template, resend_s=resend_s, revoke_grace_s=revoke_grace_s)

    def _request(self, home: int, peer: bytes, message: Request) -> None:
        place = self.lighthouses[home]
        if place.paused:
            place.missed.append((self._request, peer, message))
        elif place.machine is not None:
            if isinstance(message, Join):
                self._joined[message.replica_id] = message.promised
            if self.tracing:
                self.log(f"lighthouse {home} <- {peer.decode()}: {self.short(message)}")
            self._carry_out(home, place.machine.handle(peer, message, self._time_at(home)))

    def _lost(self, home: int, peer: bytes, _: Request | None = None) -> None:
        place = self.lighthouses[home]
        if place.paused:
            place.missed.append((self._lost, peer, None))
        elif place.machine is not None:
            self.log(f"lighthouse {home} loses {peer.decode()}")
            self._carry_out(home, place.machine.disconnected(peer, self._time_at(home)))

    def _time_at(self, home: int) -> float:
        """Clocks of lighthouses differ by anything."""
        return self.clock.now + self.lighthouses[home].skew_s

    def _expire(self, home: int, planned: float) -> None:
        place = self.lighthouses[home]
        if place.wake == planned:
            place.wake = None
        machine, now = place.machine, self._time_at(home)
        if machine is None or place.paused:
            return
        wanted = machine.deadline()
        effects = []
        if wanted is not None and wanted <= now + CLOCK_ERROR_S:
            now = max(now, wanted)
            effects = machine.expire(now)
            again = machine.deadline()
            assert again is None or again > now, "the deadline did not move"
        self._carry_out(home, effects)

    def _carry_out(self, home: int, effects: list[Effect]) -> None:
        place = self.lighthouses[home]
        machine = place.machine
        assert machine is not None
        for effect in effects:
            if isinstance(effect, Send):
                message = effect.message
                quorum = message.next_quorum if isinstance(message, Decision) else message
                if isinstance(quorum, Quorum):
                    self.checkers[quorum.job].starts(quorum)
                    self.keeper(quorum.job).hears(quorum)
                for peer in effect.peers:
                    if isinstance(message, Expelled) and message.hung:
                        self.checkers[message.job].evicts(owner_of(peer))
                    self.network.send_down(peer, message)
            elif isinstance(effect, Remember):
                checker = self.checkers[effect.job]
                self._term = Term(epoch_of(effect.quorum_id), effect.nonce)
                checker.announced(effect.nonce, effect.quorum_id, effect.members)
                if self.profile.journal:
                    if effect.quorum_id % 3 == 0:
                        place.old = dict(place.journal)
                    place.journal[effect.job] = (effect.quorum_id, effect.members)
            else:
                assert isinstance(effect, Note)
                self.log(f"lighthouse {home}: {effect.text}")
        if effects:  # what a silent event leaves behind, the next one finds
            machine.check()
        wanted = machine.deadline()
        if wanted is not None and (place.wake is None or wanted < place.wake):
            place.wake = wanted
            self.clock.at(max(self.clock.now, wanted - place.skew_s), self._expire, home, wanted)

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
