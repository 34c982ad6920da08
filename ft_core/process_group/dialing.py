"""Opening connections to members, within a limit that does not depend on their processes.

The kernels make a connection; the other process may be busy or stopped meanwhile. So one that is
not made within the limit means that packets do not arrive, or that the address leads to no machine:
the member can't be reached from here. A member that is slow is another matter: it answers late.

A packet that is lost is sent again by the kernel after a second at the earliest. Hence every attempt
is begun a few times within the limit, each time with a socket of its own, and the first one counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ft_core.environment import ENV_INTERFACE
from lighthouse.own_address import is_loopback

ATTEMPTS = 3
MIN_LIMIT_S, MAX_LIMIT_S = 0.5, 2.0
_IN_PROGRESS = (0, errno.EINPROGRESS)


def connect_limit_s(timeout_s: float) -> float:
    """How long a connection may take to be made, for a group whose timeout is `timeout_s`."""
    return min(max(timeout_s / 60, MIN_LIMIT_S), MAX_LIMIT_S)


class Reachable(Protocol):
    """Where a member listens."""

    @property
    def host(self) -> str:
        """Name or IP address."""

    @property
    def port(self) -> int:
        """TCP port."""


@dataclass(eq=False, slots=True)
class Dial:
    """The attempts to reach one member. `began`: `time.monotonic()`."""

    peer: int
    endpoint: Reachable
    began: float
    test: bool  # the connection itself is not wanted
    sockets: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Close the sockets of all attempts."""
        for each in self.sockets:
            each.close()
        self.sockets.clear()


class Dialer:
    """Makes connections for a loop that waits in `selector`, whose data is a pair (`Dial`, socket).

    `failed`: why a member can't be reached, by its number. `own`: this member's host, as the others
    know it. One thread.
    """

    def __init__(
        self, selector: selectors.BaseSelector, limit_s: float, own: str = "127.0.0.1"
    ) -> None:
        self._selector = selector
        self._limit_s = limit_s
        self._own = own
        self._dials: list[Dial] = []
        self.failed: dict[int, str] = {}

    def dial(self, peer: int, endpoint: Reachable, *, test: bool = False) -> None:
        """Begin to connect."""
        dial = Dial(peer, endpoint, time.monotonic(), test)
        self._dials.append(dial)
        self._attempt(dial)

    def serve(self, dial: Dial, attempt: socket.socket) -> socket.socket | None:
        """A socket of `dial` is ready; returns it if it is connected. The caller owns it then."""
        if dial not in self._dials or attempt not in dial.sockets:
            return None
        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._refused(dial, code)
            return None
        dial.sockets.remove(attempt)
        self._selector.unregister(attempt)
        self._end(dial)
        return attempt

    def look(self, now: float) -> None:
        """Begin the attempts that are due, and give up what is over its limit.

        `now` is from before the caller's `select`: what was ready then has been served.
        """
        for dial in list(self._dials):
            if now >= dial.began + self._limit_s:
                self._fail(dial, f"no connection within {self._limit_s:g} s")
            elif now >= self._next_attempt(dial):
                self._attempt(dial)

    def next_look(self) -> float:
        """When `look` is due (`time.monotonic()`); infinity if nothing is under way."""
        return min(
            (min(self._next_attempt(d), d.began + self._limit_s) for d in self._dials),
            default=float("inf"),
        )

    def late(self, now: float) -> list[int]:
        """Members that have not been reached for at least half of the limit."""
        return [dial.peer for dial in self._dials if now - dial.began >= self._limit_s / 2]

    @property
    def busy(self) -> bool:
        """Whether a connection is under way."""
        return bool(self._dials)

    def close(self) -> None:
        """Give up all that is under way."""
        for dial in self._dials:
            dial.close()
        self._dials.clear()

    def _next_attempt(self, dial: Dial) -> float:
        made = len(dial.sockets)
        return dial.began + self._limit_s * made / ATTEMPTS if made < ATTEMPTS else float("inf")

    def _attempt(self, dial: Dial) -> None:
        host, port = dial.endpoint.host, dial.endpoint.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        attempt = socket.socket(family, socket.SOCK_STREAM)
        attempt.setblocking(False)
        give_up_unacknowledged(attempt, 2 * self._limit_s)
        dial.sockets.append(attempt)
        try:
            code = attempt.connect_ex((host, port))
        except (OSError, ValueError) as error:  # a name that does not resolve
            self._fail(dial, f"{host!r} is no address: {error}")
            return
        if code not in _IN_PROGRESS:
            self._refused(dial, code)
            return
        self._selector.register(attempt, selectors.EVENT_WRITE, (dial, attempt))

    def _refused(self, dial: Dial, code: int) -> None:
        reason, host = os.strerror(code), dial.endpoint.host
        if code == errno.ECONNREFUSED:
            reason += "; its process is gone"
            if is_loopback(host) and not is_loopback(self._own):
                reason += f", or it is on another host and tells {host}: set {ENV_INTERFACE} there"
        self._fail(dial, reason)

    def _fail(self, dial: Dial, reason: str) -> None:
        self.failed[dial.peer] = reason
        self._end(dial)

    def _end(self, dial: Dial) -> None:
        self._dials.remove(dial)
        for attempt in dial.sockets:
            with contextlib.suppress(KeyError):
                self._selector.unregister(attempt)
        dial.close()


def give_up_unacknowledged(connection: socket.socket, limit_s: float) -> None:
    """End `connection` with ETIMEDOUT if the other machine does not acknowledge bytes for this long.

    Kernels acknowledge, so a process that is stopped or busy does no harm.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def unreachable(endpoints: Mapping[int, Reachable], limit_s: float) -> dict[int, str]:
    """Those of `endpoints` that can't be connected to, and why. Blocks for `limit_s` at most."""
    with selectors.DefaultSelector() as selector:
        dialer = Dialer(selector, limit_s)
        for number, endpoint in endpoints.items():
            dialer.dial(number, endpoint, test=True)
        while dialer.busy:
            now = time.monotonic()
            for key, _ in selector.select(max(0.0, dialer.next_look() - now)):
                connected = dialer.serve(*key.data)
                if connected is not None:
                    connected.close()
            dialer.look(now)
        return dialer.failed
