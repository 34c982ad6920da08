"""The simulated lighthouses: the real machine on each host, what outlives it, its clock and its timer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lighthouse.config import LighthouseConfig
from lighthouse.machine.job import Effect, Note, Remember, Send
from lighthouse.machine.jobs import Lighthouse
from lighthouse.wire.messages import Decision, Expelled, JobKey, Quorum, Request
from tests.sim.clock import Clock
from tests.sim.network import Link, Network, owner_of

Journal = dict[JobKey, tuple[int, tuple[str, ...]]]
CLOCK_ERROR_S = 1e-6
"""What a float loses when a lighthouse's clock is far ahead."""


@dataclass(slots=True)
class Host:
    """Where one of the lighthouses runs: its machine (None: it is down), and what outlives it."""

    skew_s: float = 0.0
    machine: Lighthouse | None = None
    journal: Journal = field(default_factory=dict)
    old: Journal = field(default_factory=dict)  # some quorums ago
    wake: float | None = None
    paused: bool = False
    timers_first: bool = False  # when it goes on; else what it was sent
    missed: list[tuple[Callable[..., None], bytes, Request | None]] = field(default_factory=list)


class Watcher(Protocol):
    """What hears of all that the lighthouses hear and say."""

    def arrives(self, home: int, peer: bytes, message: Request) -> None: ...
    def shows(self, quorum: Quorum) -> None: ...
    def evicts(self, job: JobKey, replica_id: str) -> None: ...
    def forms(self, effect: Remember) -> None: ...
    def log(self, text: str) -> None: ...


class Lighthouses:
    """All that share one address. `make` may be replaced (by a broken machine)."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        config: LighthouseConfig,
        watcher: Watcher,
        rng: random.Random,
        skews_s: Sequence[float] = (0.0,),
        *,
        journal: bool = True,
    ) -> None:
        self.clock, self.network, self.config, self.watcher = clock, network, config, watcher
        self.hosts = [Host(skew_s=skew_s) for skew_s in skews_s]
        self.open = list(range(len(self.hosts)))
        """Those to which the shared address leads now."""
        self.make = Lighthouse
        self._rng, self._journal = rng, journal
        self._nonces = itertools.count(1)
        network.front = self._front
        network.to_lighthouse = self.request
        network.lighthouse_lost = self._lost

    def _front(self, link: Link) -> int:
        """What the shared address leads to: any lighthouse behind it that is up, if there is one."""
        up = [home for home in self.open if self.network.up[home]]
        return self._rng.choice(up) if len(up) > 1 else (up or self.open)[0]

    def lead(self, homes: Sequence[int]) -> None:
        self.open = list(homes)

    def mislead(
        self,
        rng: random.Random,
        until_s: float,
        slots: Sequence[str],
        links: Callable[[str], Iterable[Link]],
    ) -> None:
        """The address leads to one of two lighthouses, the other, or both in turn, and what is in a slot
        (`links` of it) is cut off from one."""
        for _ in range(rng.choice((1, 2, 5))):
            when = rng.uniform(0.0, until_s - 0.1)
            self.clock.at(when, self.lead, rng.choice(((0,), (1,), (0, 1))))
            if rng.random() < 0.3:
                limit_s = self.config.timeouts.heartbeat_timeout_s
                self.clock.at(when, self.pause, 1, rng.choice((0.5, 3.0)) * limit_s)
            if rng.random() < 0.3:
                self.clock.at(when, self._cut, links, rng.choice(slots), rng.randrange(2))

    def _cut(self, links: Callable[[str], Iterable[Link]], slot: str, home: int) -> None:
        for link in links(slot):
            self.network.cut(link, home)

    # ------------------------------------------------------------------ ends and starts

    def start(self, home: int = 0) -> None:
        """First start, or a restart with whatever the journal kept."""
        host = self.hosts[home]
        if host.machine is None:
            host.machine = self.make(self.config, lambda: next(self._nonces), dict(host.journal))
            host.wake = None
            self.watcher.log(f"lighthouse {home} starts")
            self.network.lighthouse_started(home)

    def crash(self, home: int = 0) -> None:
        host = self.hosts[home]
        if host.machine is not None:
            self.watcher.log(f"lighthouse {home} crashes")
            host.machine, host.missed = None, []
            self.network.lighthouse_down(home)

    def pause(self, home: int, for_s: float) -> None:
        """SIGSTOP: it finds all it missed when it goes on, the ends of its connections last."""
        host = self.hosts[home]
        if host.machine is None or host.paused:
            return
        self.watcher.log(f"lighthouse {home} stands still")
        host.paused = True
        if for_s > self.config.timeouts.heartbeat_timeout_s:
            self.network.lighthouse_silent(home)
        self.clock.after(for_s, self.resume, home)

    def resume(self, home: int = 0) -> None:
        host = self.hosts[home]
        host.paused = False
        if host.timers_first:
            host.timers_first = False
            self._expire(home, math.nan)
        missed, host.missed = host.missed, []
        for call, peer, message in missed:
            call(home, peer, message)
        if host.machine is not None:
            self._carry_out(home, [])

    # ------------------------------------------------------------------ events

    def request(self, home: int, peer: bytes, message: Request) -> None:
        host = self.hosts[home]
        if host.paused:
            host.missed.append((self.request, peer, message))
        elif host.machine is not None:
            self.watcher.arrives(home, peer, message)
            self._carry_out(home, host.machine.handle(peer, message, self._time_at(home)))

    def _lost(self, home: int, peer: bytes, _: Request | None = None) -> None:
        host = self.hosts[home]
        if host.paused:
            host.missed.append((self._lost, peer, None))
        elif host.machine is not None:
            self.watcher.log(f"lighthouse {home} loses {peer.decode()}")
            self._carry_out(home, host.machine.disconnected(peer, self._time_at(home)))

    def _time_at(self, home: int) -> float:
        """Clocks of lighthouses differ by anything."""
        return self.clock.now + self.hosts[home].skew_s

    def _expire(self, home: int, planned: float) -> None:
        host = self.hosts[home]
        if host.wake == planned:
            host.wake = None
        machine, now = host.machine, self._time_at(home)
        if machine is None or host.paused:
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
        host = self.hosts[home]
        machine = host.machine
        assert machine is not None
        for effect in effects:
            if isinstance(effect, Send):
                message = effect.message
                quorum = message.next_quorum if isinstance(message, Decision) else message
                if isinstance(quorum, Quorum):
                    self.watcher.shows(quorum)
                for peer in effect.peers:
                    if isinstance(message, Expelled) and message.hung:
                        self.watcher.evicts(message.job, owner_of(peer))
                    self.network.send_down(peer, message)
            elif isinstance(effect, Remember):
                self.watcher.forms(effect)
                if self._journal:
                    if effect.quorum_id % 3 == 0:
                        host.old = dict(host.journal)
                    host.journal[effect.job] = (effect.quorum_id, effect.members)
            else:
                assert isinstance(effect, Note)
                self.watcher.log(f"lighthouse {home}: {effect.text}")
        if effects:  # what a silent event leaves behind, the next one finds
            machine.check()
        wanted = machine.deadline()
        if wanted is not None and (host.wake is None or wanted < host.wake):
            host.wake = wanted
            self.clock.at(max(self.clock.now, wanted - host.skew_s), self._expire, home, wanted)
