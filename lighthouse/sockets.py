"""ZeroMQ sockets as this protocol needs them: bounded, with heartbeats, watched by a monitor."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Self

import zmq

from lighthouse import dealer
from lighthouse.config import Timeouts, split_address
from lighthouse.own_address import (
    bracketed,
    means_this_machine_only,
    outgoing_address,
    resolve,
    uses_ipv6,
)
from lighthouse.wire import codec

log = logging.getLogger("lighthouse")

CLIENT_SEND_QUEUE_MESSAGES = 64
BACKLOG = 4_096
RECONNECT_MS = 50
RECONNECT_MAX_MS = 500
HANDSHAKE_MS = 5_000
FIRST_REPEAT_MS = 1_000
ACCEPTED = int(zmq.EVENT_ACCEPTED)
ACCEPT_FAILED = int(zmq.EVENT_ACCEPT_FAILED)

_AUTHENTICATOR = "inproc://zeromq.zap.01"
"""Where ZeroMQ looks for the thread that answers handshakes (its RFC 27)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Of a server's frames and queues.

    Attributes:
        request_bytes: a larger frame ends its connection.
        queued: answers that one peer may leave unread; 0: any number.
        ends_slow: a peer that leaves more is disconnected. False: they are dropped.
        strangers: connections that may say nothing at a time; the oldest of more are ended. For a server
            that is not all of its process.
    """

    request_bytes: int = codec.MAX_REQUEST_BYTES
    queued: int = 64  # a healthy peer has one answer on its way
    ends_slow: bool = True
    strangers: int = sys.maxsize


LIMITS = ServerLimits()


def open_router(
    context: zmq.Context[Any], endpoint: str, timeouts: Timeouts, limits: ServerLimits = LIMITS
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """(a ROUTER bound to `endpoint`, its monitor). Raises OSError with a sentence for a person.

    Its context needs an authenticator. The monitor exists before the first connection can, so that
    no connection is missed.
    """
    bindable = _bindable(endpoint)
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.PLAIN_SERVER, 1)
    router.setsockopt(zmq.ZAP_DOMAIN, b"lighthouse")
    router.setsockopt(zmq.SNDHWM, limits.queued)
    router.setsockopt(zmq.BACKLOG, BACKLOG)
    router.setsockopt(zmq.MAXMSGSIZE, limits.request_bytes)
    dealer.set_options(router, _common_options(bindable, timeouts))
    monitor = dealer.open_monitor(router, context, ACCEPTED | dealer.DISCONNECTED | ACCEPT_FAILED)
    try:
        router.bind(bindable)
    except zmq.ZMQError as error:
        dealer.close(router, monitor)
        hint = {
            int(zmq.EADDRINUSE): "stop what listens there, or choose another port (0: any)",
            int(zmq.EADDRNOTAVAIL): "this host has no such address; 0.0.0.0 means all of its own",
        }.get(error.errno or 0, "check the address")
        why = os.strerror(error.errno or 0)
        sentence = f"can't listen on {endpoint} ({why}): {hint}"
        raise OSError(error.errno, sentence) from error
    return router, monitor


def _bindable(endpoint: str) -> str:
    """`endpoint` with an address where it has a host name, which ZeroMQ would not resolve."""
    host, port = split_address(endpoint)
    if host == "*":
        return endpoint
    try:
        found = str(resolve(host, port)[0][4][0])
    except ValueError as error:
        raise OSError(errno.EADDRNOTAVAIL, f"can't listen on {endpoint}: {error}") from error
    if means_this_machine_only(host, found):
        log.warning(
            "%r is %s here, an address that leads other machines nowhere: tcp://0.0.0.0:%d listens "
            "for them, too",
            host,
            found,
            port,
        )
    return f"tcp://{bracketed(found)}:{port}"


def open_dealer(
    context: zmq.Context[Any], endpoint: str, service: str, identity: bytes, timeouts: Timeouts
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """(a DEALER that connects to `endpoint`, and reconnects forever; its monitor).

    `identity`: which process this is, 1 to 255 printable ASCII characters. A process that connects
    again presents the same one.
    """
    return dealer.connect(context, endpoint, dealer_options(endpoint, service, identity, timeouts))


def dealer_options(
    endpoint: str, service: str, identity: bytes, timeouts: Timeouts
) -> dealer.Options:
    """Those of `open_dealer`."""
    return [
        (zmq.PLAIN_USERNAME, service.encode()),
        (zmq.PLAIN_PASSWORD, identity),
        (zmq.SNDHWM, CLIENT_SEND_QUEUE_MESSAGES),
        (zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        (zmq.CONNECT_TIMEOUT, _connect_ms(timeouts)),
        *_common_options(endpoint, timeouts),
    ]


def _connect_ms(timeouts: Timeouts) -> int:
    """How long the kernels may take to make a connection, before it is begun again: longer than a link may be
    silent, and else less than the second after which a kernel repeats a packet that is lost. It would repeat
    that after 1 s, 2 s and 4 s, and links that lose packets lose several in a row."""
    return min(max(FIRST_REPEAT_MS - 100, round(1500 * timeouts.heartbeat_timeout_s)), HANDSHAKE_MS)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a connection presents. `envelope` takes the answer back to it."""

    envelope: list[bytes]
    service: bytes
    identity: str


def open_authenticator(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """The socket that all handshakes of this context's servers are asked at. One per context."""
    authenticator: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    authenticator.setsockopt(zmq.LINGER, 0)
    authenticator.setsockopt(zmq.SNDHWM, 0)
    authenticator.setsockopt(zmq.RCVHWM, 0)
    authenticator.bind(_AUTHENTICATOR)
    return authenticator


def read_request(authenticator: zmq.Socket[bytes]) -> Handshake | None:
    """The next handshake; None if there is none. Never blocks."""
    if not int(authenticator.getsockopt(dealer.EVENTS)) & dealer.POLLIN:
        return None  # cheaper than the exception
    try:
        asker, _, version, number, *_, service, identity = authenticator.recv_multipart(
            dealer.NOBLOCK
        )
    except zmq.Again:
        return None
    return Handshake([asker, b"", version, number], service, identity.decode("ascii", "replace"))


def answer_request(authenticator: zmq.Socket[bytes], request: Handshake, admitted: bool) -> None:
    """Let the connection in or not. Frames of it name its identity as "User-Id"."""
    status, user = (b"200", request.identity.encode()) if admitted else (b"400", b"")
    authenticator.send_multipart([*request.envelope, status, b"", user, b""], dealer.NOBLOCK)


def reachable(bound: str) -> str:
    """The address at which other hosts reach a socket that is bound to `bound`.

    For "all interfaces" it is the address of the interface that routes outward. gethostname() is no
    substitute: it often names the loopback interface, or nothing that resolves.
    """
    host, port = split_address(bound)
    if host not in ("0.0.0.0", "::"):
        return bound
    found = outgoing_address(prefer_ipv6=host == "::")
    return f"tcp://{bracketed(found)}:{port}"


Watched = zmq.Socket[bytes] | socket.socket


class Waiter:
    """Waits for sockets, ZeroMQ's and others, as `zmq.Poller` does, with one system call where
    that makes three and builds lists: 0.05 ms less per step. One thread. A context manager.
    """

    def __init__(self, *watched: Watched) -> None:
        self._sockets = [each for each in watched if isinstance(each, zmq.Socket)]
        self._of = {_descriptor(each): each for each in watched}
        self._epoll = select.epoll()
        for fd in self._of:
            self._epoll.register(fd, select.EPOLLIN)

    def wait(self, timeout_ms: int | None, spin_s: float = 0.0) -> set[Watched]:
        """Those that may be readable; empty after `timeout_ms` (None: no limit).

        `spin_s`: see `await_ready`.
        """
        # A ZeroMQ descriptor reports changes only, and any call on the socket may take notice of one.
        ready: set[Watched] = {
            each for each in self._sockets if int(each.getsockopt(dealer.EVENTS)) & dealer.POLLIN
        }
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        found = self._epoll.poll(0) if ready else await_ready(self._epoll, timeout_s, spin_s)
        ready.update(self._of[fd] for fd, _ in found)
        return ready

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._epoll.close()


def await_ready(
    epoll: select.epoll, timeout_s: float | None, spin_s: float
) -> list[tuple[int, int]]:
    """What `epoll` has; empty after `timeout_s` (None: no limit).

    For `spin_s` it looks again and again before it sleeps: a thread that has gone to sleep takes
    longer to come back. Threads with work to do go first.
    """
    if spin_s > 0.0:
        until = time.monotonic() + spin_s
        while not (ready := epoll.poll(0)) and time.monotonic() < until:
            os.sched_yield()
        if ready:
            return ready
    return epoll.poll(timeout_s)


def _descriptor(watched: Watched) -> int:
    if isinstance(watched, socket.socket):
        return watched.fileno()
    return int(watched.getsockopt(zmq.FD))


def _common_options(endpoint: str, timeouts: Timeouts) -> dealer.Options:
    timeout_ms = max(1, round(timeouts.heartbeat_timeout_s * 1000))
    return [
        # With a limit, ZeroMQ would stop reading, and abort the process if that connection is reset.
        (zmq.RCVHWM, 0),
        (zmq.LINGER, 0),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        # Both ends ping each other from ZeroMQ's own threads, which do not need the GIL.
        (zmq.HEARTBEAT_IVL, max(1, round(timeouts.heartbeat_s * 1000))),
        (zmq.HEARTBEAT_TIMEOUT, timeout_ms),
        (zmq.HEARTBEAT_TTL, max(100, timeout_ms)),  # travels in tenths of a second
        *([(int(zmq.IPV6), 1)] if uses_ipv6(endpoint) else []),
    ]
