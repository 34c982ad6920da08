"""A bound ROUTER socket that no peer can end, block or fill, and that knows which process speaks.

Theory. A port is found by processes that seek something else (probes, scrapes, scans, browsers), and a
peer may be broken or hostile. ZeroMQ 4.3.5 aborts the process (`!_io_error` in
stream_engine_base.cpp) if a connection that it has stopped reading is reset. It stops reading one
whose queue is full, and one whose identity another connection has taken over. So:

- Connections authenticate (PLAIN): a peer must speak ZMTP 3, name the service, and present an
  identity. ZeroMQ's own threads turn all others away, before they can send a message.
- A peer's queue has no limit, and no connection takes over another's identity. What limits a peer
  is what it may cost: one that sends more is disconnected (`_spend`), and so is one that does not
  read its answers.
- A connection that says nothing makes way when descriptors run short, and then one that is nobody's
  (`keeps`). Where a process does more than serve, it does so before: a training has other uses for its descriptors.
- ZeroMQ keeps what it can't hand over: the parts of a message whose last one does not come, and all that a
  connection sends which has chosen a routing id that another one has. One that sends much and is not heard is
  disconnected (`_look_at_unheard`). A routing id that is guessed right, of 2**32, makes ZeroMQ abort: whatever
  runs a server starts its process again.

A `Peer` is one connection: the identity, "#", and a number. `messages.same_process` compares them.
"""

from __future__ import annotations

import logging
import math
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from lighthouse import dealer, sockets
from lighthouse.config import Timeouts
from lighthouse.routes import Routes
from lighthouse.wire import codec
from lighthouse.wire.messages import Peer

log = logging.getLogger("lighthouse")

COST_A_SECOND = 20_000
"""What one connection may cost in a second: one for each frame and each 256 bytes. A member costs two for
each step; the largest request, which takes a tenth of a second to decode if it is made for that, costs 8,192."""
MALFORMED_COST = 1_000
"""Of a frame that no process of this suite sends."""
SHARE_FROM_BYTES = 4_096
"""Frames of this size and more are shared by all receivers instead of copied to each."""
DESCRIPTORS_KEPT = 64
"""For files and for the connections of this process itself."""
UNHEARD_BYTES = 2 * codec.MAX_REQUEST_BYTES
"""What a connection may send while ZeroMQ hands over nothing of it: more than the first part of the
largest request. Heartbeats alone take hours."""
LOOK_S = 0.1
"""Between two looks at what connections have sent, while there are any."""
LOOK_AT = 16
"""Of them at a time."""
ROOM_S = 0.01
"""Between two times at which room is made for a connection that could not be accepted: ZeroMQ tries, and says so,
without a pause."""
COMPLAIN_S = 60.0
"""One line in the log in this time about each kind of trouble with strangers."""

HELLO = b"\0"
"""The frame of a process that connects and has nothing to say yet."""

# As plain numbers: combining zmq's flags takes longer than some calls that they go into.
_NOBLOCK = dealer.NOBLOCK
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_SRCFD = int(zmq.SRCFD)
_BYTES_RECEIVED = 128
"""Where Linux's `struct tcp_info` has that count."""


class Complaints:
    """Writes a line about trouble at most once a minute for each kind. One thread."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def say(self, text: str, *values: object) -> None:
        """Log `text` with `values` as a warning, unless `text` was logged a short while ago."""
        now = time.monotonic()
        if now - self._last.get(text, -math.inf) >= COMPLAIN_S:
            self._last[text] = now
            log.warning(text, *values)


class Endpoint:
    """See the module's docstring. One thread, but for the attributes.

    Args:
        context: ZeroMQ context of the caller; one endpoint per context.
        address: "tcp://host:port" to bind.
        timeouts: its heartbeats are used.
        service: what connections must ask for.
        admits: whether a connection that presents this identity is let in.
        keeps: whether a peer is more than one that asks, and is not ended to make room.
        limits: of its frames and queues.

    Raises OSError with a sentence for a person if the address can't be bound.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        timeouts: Timeouts,
        *,
        service: str,
        admits: Callable[[str], bool] = bool,
        keeps: Callable[[Peer], bool] = bool,
        limits: sockets.ServerLimits = sockets.LIMITS,
    ) -> None:
        self._service, self._admits, self._keeps = service.encode(), admits, keeps
        self._ends_slow, self._most_strangers = limits.ends_slow, limits.strangers
        self._authenticator = sockets.open_authenticator(context)
        try:
            self._router, self._monitor = sockets.open_router(context, address, timeouts, limits)
        except BaseException:
            self._authenticator.close(linger=0)
            raise
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """Where it is bound."""
        self._port = int(self.address.rpartition(":")[2])
        self.polled = (self._router, self._monitor, self._authenticator)
        """Sockets that the owner polls for POLLIN; when one is readable it calls `attend`, and
        `receive` until that returns None."""
        self.refused = self.malformed = self.disconnected = self.slow = self.unrouted = 0
        self.received = 0
        self.complaints = Complaints()
        self._routes = Routes()
        self._peer_of: dict[bytes, Peer] = {}
        self._route_of: dict[Peer, bytes] = {}
        self._cut: set[bytes] = set()
        self._spent: dict[bytes, int] = {}
        self._window_s = 0.0
        self._met = 0
        self._most = _most_connections()
        self._looked = 0
        self._seen: dict[int, tuple[int, int]] = {}  # of a descriptor: what it had cost, and sent
        self._ending: set[int] = set()
        self._room_at = 0.0
        self.look_at = math.inf
        """When the owner is to call `attend`, also if nothing is readable; of `time.monotonic`."""

    @property
    def connections(self) -> int:
        """How many connections are open, strangers' too."""
        return self._routes.connections

    def sleep_ms(self, until: float | None) -> int | None:
        """How long the owner may wait for events if it has nothing to do before `until` (None: ever)."""
        wake_at = self.look_at if until is None else min(until, self.look_at)
        if wake_at == math.inf:
            return None
        return max(0, math.ceil((wake_at - time.monotonic()) * 1000))

    # ------------------------------------------------------------------ connections

    def attend(self) -> None:
        """Answer handshakes, and take notice of connections that were made or have ended."""
        while (request := sockets.read_request(self._authenticator)) is not None:
            admitted = (
                request.service == self._service
                and request.identity.isascii()
                and request.identity.isprintable()
                and self._admits(request.identity)
            )
            self.refused += not admitted
            sockets.answer_request(self._authenticator, request, admitted)
        self._read_monitor()
        if self._routes.connections:
            self._look_at_unheard(time.monotonic())
        else:
            self.look_at = math.inf

    def _read_monitor(self) -> None:
        while (entry := dealer.read_monitor(self._monitor)) is not None:
            event, value = entry
            if event == sockets.ACCEPTED:
                self._forget(value)
                self._routes.accepted(value)
                if self._routes.connections - len(self._ending) > self._most:
                    self._make_room(value)
                elif self._routes.strange - len(self._ending) > self._most_strangers:
                    self._end_strangers()
            elif event == dealer.DISCONNECTED:
                self._forget(value)
                self._routes.closed(value, time.monotonic())
            elif event == sockets.ACCEPT_FAILED and (now := time.monotonic()) >= self._room_at:
                self._room_at = now + ROOM_S
                self._make_room()

    def _forget(self, fd: int) -> None:
        self._seen.pop(fd, None)
        self._ending.discard(fd)

    def _make_room(self, newest: int | None = None) -> None:
        """Too many connections: end the oldest of those that have said nothing; where there is none, of those that
        are nobody's; else the newest."""
        self.complaints.say(
            "%d connections are open, and this process may have %d: those that say nothing, or have only asked, are "
            "ended; raise the limit of open files (ulimit -n) if they are meant",
            self._routes.connections,
            self._most,
        )
        if not self._end_oldest([fd for fd in self._routes.strangers() if fd != newest]):
            fds = (fd for peer, fd in self._routes.fd_of.items() if not self._keeps(peer))
            if not self._end_oldest(list(fds)) and newest is not None:
                self._hang_up(newest)

    def _end_strangers(self) -> None:
        """Too many connections have said nothing."""
        self.complaints.say(
            "more than %d connections to %s say nothing: the oldest are ended",
            self._most_strangers,
            self.address,
        )
        self._end_oldest(self._routes.strangers())

    def _end_oldest(self, fds: list[int]) -> bool:
        """End a quarter of these connections; whether there are any."""
        left = [fd for fd in fds if fd not in self._ending]
        for fd in left[: max(1, len(left) // 4)]:
            self._hang_up(fd)
        return bool(left)

    def _look_at_unheard(self, now: float) -> None:
        """End connections that send, and are not heard."""
        if self.look_at == math.inf:
            self.look_at = now + LOOK_S
        if now < self.look_at:
            return
        self.look_at = now + LOOK_S
        fds = self._routes.open()
        self._looked = 0 if self._looked >= len(fds) else self._looked
        for fd in fds[self._looked : self._looked + LOOK_AT]:
            routes = [self._route_of[peer] for peer in self._routes.peers_of(fd)]
            cost = sum(self._spent.get(route, 0) for route in routes)
            received, before = self._received_by(fd), self._seen.get(fd, (0, 0))
            if cost != before[0]:  # it was heard since: what it had sent before that is handed over
                self._seen[fd] = cost, received
            elif received - before[1] > UNHEARD_BYTES:
                self.complaints.say("disconnected a peer that sends what can't be read")
                self.disconnected += 1
                self._hang_up(fd)
        self._looked += LOOK_AT

    def take_lost(self, dry: bool) -> list[Peer]:
        """Peers whose connections have ended. `dry`: `receive` has returned None."""
        if not self._routes.lost:
            return []
        lost = self._routes.take_lost(dry, time.monotonic())
        for peer in lost:
            route = self._route_of.pop(peer)
            del self._peer_of[route]
            self._cut.discard(route)
            self._spent.pop(route, None)
        return lost

    @property
    def losing(self) -> bool:
        """Whether `take_lost` has peers to report soon."""
        return bool(self._routes.lost)

    def disconnect(self, peer: Peer) -> None:
        """End the connection of `peer`; nothing more that it has sent is handled."""
        route = self._route_of.get(peer)
        if route is None or route in self._cut:
            return
        self._cut.add(route)
        self.disconnected += 1
        fd = self._routes.fd_of.get(peer)
        if fd is not None:
            self._hang_up(fd)

    def _hang_up(self, fd: int) -> None:
        """Shut the connection behind `fd` down; ZeroMQ's thread then closes it."""
        self._ending.add(fd)
        with self._connection(fd) as connection:
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)

    def _received_by(self, fd: int) -> int:
        """How many bytes have arrived on the connection behind `fd`; 0 where the system does not say."""
        received = 0
        with self._connection(fd) as connection:
            if connection is not None and hasattr(socket, "TCP_INFO"):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                received = int.from_bytes(info[_BYTES_RECEIVED:], sys.byteorder)
        return received

    @contextmanager
    def _connection(self, fd: int) -> Iterator[socket.socket | None]:
        """The connection behind `fd`; None if that number has another user by now. What fails
        within the block fails because the connection has ended."""
        try:
            connection = socket.socket(fileno=fd)
        except OSError:
            yield None
            return
        try:
            ours = connection.getsockname()[1] == self._port
        except (OSError, IndexError, TypeError):
            ours = False
        try:
            yield connection if ours else None
        except OSError:
            pass
        finally:
            connection.detach()

    # ------------------------------------------------------------------ frames

    def receive(self) -> tuple[Peer, memoryview] | None:
        """The next frame and its sender; None if no more have arrived. Never blocks."""
        receive, option = self._router.recv, self._router.getsockopt
        # Asking first is a microsecond; an exception where nothing is there costs several.
        while int(option(dealer.EVENTS)) & dealer.POLLIN:
            try:
                route = receive(_NOBLOCK)
            except zmq.Again:
                return None
            frame = receive(_NOBLOCK, copy=False)
            peer = self._peer_of.get(route) or self._meet(route, frame)
            data = frame.buffer
            if frame.more:
                self._drop_rest()
                if peer is not None:
                    self.blame(peer)
                continue
            size = len(data)
            if peer is None or route in self._cut or (size == 1 and data == HELLO):
                continue
            self.received += 1
            spent = self._spent[route] = self._spent.get(route, 0) + 1 + (size >> 8)
            if spent > COST_A_SECOND and self._overspent(peer):
                continue
            return peer, data
        return None

    def _meet(self, route: bytes, frame: zmq.Frame) -> Peer | None:
        """The peer behind the first frame of a connection."""
        try:
            fd, identity = frame.get(_SRCFD), frame.get("User-Id")
        except (zmq.ZMQError, UnicodeDecodeError):
            self.malformed += 1  # the handshake lets none of these through
            return None
        self._read_monitor()
        self._met += 1
        peer = f"{identity}#{self._met}".encode()
        self._peer_of[route], self._route_of[peer] = peer, route
        self._routes.meet(peer, int(fd), time.monotonic())
        if not route.startswith(b"\0"):  # it has chosen its routing id: ours never do
            self.disconnect(peer)
        return peer

    def _drop_rest(self) -> None:
        # All parts of a message arrive together, so that this cannot raise Again.
        while self._router.getsockopt(zmq.RCVMORE):
            self._router.recv(_NOBLOCK)

    def blame(self, peer: Peer) -> None:
        """`peer` has sent a frame that no process of this suite sends."""
        self.malformed += 1
        self.complaints.say("dropped frames that are no message of this protocol")
        self.charge(peer, MALFORMED_COST)

    def charge(self, peer: Peer, cost: int) -> None:
        """`peer` has cost this much beyond what it has sent."""
        route = self._route_of.get(peer)
        if route is None:
            return
        spent = self._spent[route] = self._spent.get(route, 0) + cost
        if spent > COST_A_SECOND:
            self._overspent(peer)

    def _overspent(self, peer: Peer) -> bool:
        """Disconnect `peer` if all that it has cost was within a second."""
        now = time.monotonic()
        if now >= self._window_s:
            self._window_s = now + 1.0
            self._spent.clear()
            return False
        self.complaints.say("disconnected a peer that floods: %s", peer.decode())
        self.disconnect(peer)
        return True

    def send(self, peers: Iterable[Peer], data: bytes) -> int:
        """Queue `data` for each of `peers`; how many it was queued for. Never blocks."""
        send, route_of, sent = self._router.send, self._route_of, 0
        shared = len(data) >= SHARE_FROM_BYTES
        payload: Any = zmq.Frame(data) if shared else data
        for peer in peers:
            route = route_of.get(peer)
            if route is None:
                self.unrouted += 1
                continue
            try:
                send(route, _MORE)
                send(payload, _NOBLOCK, copy=not shared)
                sent += 1
            except zmq.Again:
                self.slow += 1
                if self._ends_slow:
                    self.complaints.say(
                        "disconnected a peer that reads no answers: %s", peer.decode()
                    )
                    self.disconnect(peer)
            except zmq.ZMQError as error:
                self.unrouted += 1
                if error.errno != zmq.EHOSTUNREACH:
                    self.complaints.say("could not send an answer: %s", error)
                self._routes.no_route(peer, time.monotonic())
        return sent

    def send_payload(self, peer: Peer, head: bytes, payload: bytes) -> bool:
        """Queue a message of two frames for `peer`, the second one without a copy.

        False: it has gone, or its queue is full.
        """
        route, send = self._route_of.get(peer), self._router.send
        if route is None:
            self.unrouted += 1
            return False
        try:
            send(route, _MORE)
            send(head, _MORE)
            send(payload, _NOBLOCK, copy=False)
            return True
        except zmq.Again:
            self.slow += 1
        except zmq.ZMQError:
            self.unrouted += 1
            self._routes.no_route(peer, time.monotonic())
        return False

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets; queued messages get `linger_ms` in the background."""
        dealer.close(self._router, self._monitor, linger_ms)
        self._authenticator.close(linger=0)


def raise_descriptor_limit() -> None:
    """Let this process have as many open files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # what it has must do


def _most_connections() -> int:
    """How many connections this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, soft - DESCRIPTORS_KEPT)
