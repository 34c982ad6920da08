"""The simulated network between processes and lighthouses.

All lighthouses share one address. `front` says which of them a new connection reaches, as a load
balancer or a rolling update does; the connection then stays with it. `cuts` holds the pairs of
a process and a lighthouse that can't reach each other.

Faithful mode is ZeroMQ over TCP: within one connection messages keep their order and none is lost;
when a connection breaks, what is on its way is gone; each side notices on its own, at once or after
the heartbeat timeout; what a process sends while it knows itself disconnected waits in its socket
and leaves when it is connected again. Harsh mode on top loses, repeats and reorders single messages,
which ZeroMQ never does and the protocol survives all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lighthouse.wire.messages import Reply, Request
from tests.sim.clock import Clock

UP, SILENT, DOWN = "up", "silent", "down"
RECONNECT_S = 0.1


def owner_of(peer: bytes) -> str:
    """The process behind a connection."""
    return peer.decode().partition("#")[0]


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """Durations in seconds, rates per message."""

    delay_s: float = 0.002
    jitter_s: float = 0.004
    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.3
    stable_peers: bool = False
    heartbeat_timeout_s: float = 0.3
    reconnect_s: float = 0.02

    @property
    def harsh(self) -> bool:
        return self.loss > 0 or self.repeat > 0 or self.reorder > 0


class Link:
    """One process's connection to the lighthouse, over all its reconnects."""

    __slots__ = (
        "blocked",
        "connection",
        "down_at",
        "home",
        "lost_at",
        "name",
        "outbox",
        "owner",
        "peer",
        "since",
        "state",
        "up_at",
    )

    def __init__(self, name: str, owner: Endpoint) -> None:
        self.name = name
        self.owner = owner
        self.state = DOWN
        self.connection = 0
        self.home = 0  # the lighthouse at the other end
        self.peer = b""
        self.outbox: list[Request] = []
        self.blocked = False
        self.up_at = self.down_at = 0.0
        self.lost_at = float("-inf")  # a message, last
        self.since = 0.0  # when it was connected last


class Endpoint(Protocol):
    """What a process must offer to a link."""

    alive: bool

    def link_up(self) -> None: ...
    def link_down(self) -> None: ...
    def hear(self, message: Reply) -> None: ...


class Network:
    """All links. `to_lighthouse` and `lighthouse_lost` are the ears of the lighthouse whose number
    they are given."""

    def __init__(
        self, clock: Clock, rng: random.Random, profile: NetworkProfile, lighthouses: int = 1
    ) -> None:
        self._clock = clock
        self._rng = rng
        self.profile = profile
        self.links: list[Link] = []
        self._peers: dict[bytes, tuple[Link, int]] = {}
        self.up = [False] * lighthouses
        self.lives = [0] * lighthouses
        self.cuts: set[tuple[str, int]] = set()
        self.front: Callable[[Link], int] = lambda link: 0
        self.to_lighthouse: Callable[[int, bytes, Request], None] = lambda home, peer, message: None
        self.lighthouse_lost: Callable[[int, bytes], None] = lambda home, peer: None

    # ------------------------------------------------------------------ connections

    def attach(self, link: Link) -> None:
        self.links.append(link)
        self.connect(link)

    def connect(self, link: Link) -> None:
        """Connect soon, if nothing is in the way; a later `unblock` or lighthouse start retries."""
        self._clock.after(self._rng.uniform(0.001, self.profile.reconnect_s), self._connected, link)

    def _connected(self, link: Link) -> None:
        if link.state != DOWN or link.blocked or not link.owner.alive:
            return
        home = self.front(link)
        if not self.up[home] or (link.name, home) in self.cuts:
            if any(self.up):  # the next attempt may reach another one
                self._clock.after(RECONNECT_S, self._connected, link)
            return
        link.state, link.home = UP, home
        link.connection += 1
        text = link.name if self.profile.stable_peers else f"{link.name}#{link.connection}"
        link.peer = text.encode()
        link.up_at = link.down_at = link.since = self._clock.now
        self._peers[link.peer] = (link, link.connection)
        waiting, link.outbox = link.outbox, []
        for message in waiting:
            self.send_up(link, message)
        link.owner.link_up()

    def break_link(self, link: Link, *, lighthouse_s: float, process_s: float) -> None:
        """The connection is over; each side notices after its own delay."""
        if link.state != UP:
            return
        link.state = SILENT
        connection, peer, life = link.connection, link.peer, self.lives[link.home]
        self._clock.after(lighthouse_s, self._lighthouse_notices, link.home, peer, life)
        self._clock.after(process_s, self._process_notices, link, connection)

    def _lighthouse_notices(self, home: int, peer: bytes, life: int) -> None:
        if self.up[home] and self.lives[home] == life:
            self.lighthouse_lost(home, peer)

    def _process_notices(self, link: Link, connection: int) -> None:
        if link.connection != connection or link.state != SILENT:
            return
        link.state = DOWN
        if link.owner.alive:
            link.owner.link_down()
            self.connect(link)

    def block(self, link: Link) -> None:
        """Partition: silence in both directions, noticed by heartbeats."""
        link.blocked = True
        limit = self.profile.heartbeat_timeout_s
        self.break_link(link, lighthouse_s=limit, process_s=limit * self._rng.uniform(1.0, 1.5))

    def unblock(self, link: Link) -> None:
        link.blocked = False
        self.connect(link)

    def cut(self, link: Link, home: int) -> None:
        """`link` and one lighthouse can't reach each other."""
        self.cuts.add((link.name, home))
        if link.home == home:
            limit = self.profile.heartbeat_timeout_s
            self.break_link(link, lighthouse_s=limit, process_s=limit * self._rng.uniform(1.0, 1.5))

    def mend(self) -> None:
        """No pair is cut any more."""
        self.cuts.clear()

    def lighthouse_down(self, home: int = 0) -> None:
        """A lighthouse crashed: most processes see it at once, some by heartbeats."""
        self.up[home] = False
        limit = self.profile.heartbeat_timeout_s
        for link in self.links:
            if link.home != home:
                continue
            late = limit if self._rng.random() < 0.2 else self._rng.uniform(0.0, 0.01)
            self.break_link(link, lighthouse_s=0.0, process_s=late)

    def lighthouse_silent(self, home: int) -> None:
        """A lighthouse stands still: processes notice by heartbeats."""
        limit = self.profile.heartbeat_timeout_s
        for link in self.links:
            if link.home == home:
                self.break_link(link, lighthouse_s=limit, process_s=limit)

    def lighthouse_started(self, home: int = 0) -> None:
        self.up[home] = True
        self.lives[home] += 1
        for link in self.links:
            self.connect(link)

    # ------------------------------------------------------------------ messages

    def send_up(self, link: Link, message: Request) -> None:
        if link.state == DOWN:
            if len(link.outbox) < 1_000:
                link.outbox.append(message)
            return
        if link.state == SILENT:
            return
        for delay_s in self._fates(link):
            when = self._clock.now + delay_s
            if not self.profile.harsh:
                when = link.up_at = max(when, link.up_at)
            self._clock.at(when, self._arrive_up, link, link.connection, message)

    def send_down(self, peer: bytes, message: Reply) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        link, connection = known
        if link.state != UP or link.connection != connection:
            return
        for delay_s in self._fates(link):
            when = self._clock.now + delay_s
            if not self.profile.harsh:
                when = link.down_at = max(when, link.down_at)
            self._clock.at(when, self._arrive_down, link, connection, message)

    def _fates(self, link: Link) -> tuple[float, ...]:
        """Delays after which copies of a message over `link` arrive; empty: it is lost."""
        profile, rng = self.profile, self._rng
        delay_s = profile.delay_s + profile.jitter_s * rng.random()
        if not profile.harsh:
            return (delay_s,)
        if rng.random() < profile.loss:
            link.lost_at = self._clock.now
            return ()
        if rng.random() < profile.reorder:
            delay_s += profile.reorder_s * rng.random()
        if rng.random() < profile.repeat:
            return (delay_s, delay_s + profile.reorder_s * rng.random())
        return (delay_s,)

    def _arrive_up(self, link: Link, connection: int, message: Request) -> None:
        if self.up[link.home] and link.state == UP and link.connection == connection:
            self.to_lighthouse(link.home, link.peer, message)

    def _arrive_down(self, link: Link, connection: int, message: Reply) -> None:
        if link.state == UP and link.connection == connection and link.owner.alive:
            link.owner.hear(message)
