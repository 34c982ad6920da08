"""How a heal's ends reach each other: addresses, ZeroMQ sockets for control. And how a transfer is
interrupted.
"""

from __future__ import annotations

import hmac
import os
import threading
from dataclasses import dataclass, replace
from typing import Any

import zmq

from ft_core.heal import protocol as wire
from lighthouse.config import MOST_STRANGERS, Timeouts
from lighthouse.endpoint import Endpoint
from lighthouse.own_address import bracketed
from lighthouse.sockets import ServerLimits

QUEUED_REPLIES = 128  # what ZeroMQ queues for one reader before the reader counts as too slow
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 30_000  # a manifest must fit in: 64 MiB at 2 MB/s
_SHORTEST_SILENCE_S = 3.0
_UNCONFIRMED_MS = 3_000
"""A link ends if the other machine acknowledges nothing of what is sent to it for this long."""
_RECONNECT_MS = 100


_SERVICE = "heal"
_TIMEOUTS = Timeouts.derive(
    heartbeat_s=_HEARTBEAT_MS / 1000, heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_MS / 1000
)
_LIMITS = ServerLimits(
    request_bytes=wire.MAX_REQUEST_BYTES,
    queued=QUEUED_REPLIES,
    ends_slow=False,
)


@dataclass(frozen=True, slots=True)
class HealAddress:
    """Where a heal server is reached: tcp://host:port/bulk port/word.

    Readers present the random word; members know it from the quorum.
    """

    where: str  # tcp://host:port
    bulk_port: int
    word: str

    @classmethod
    def parse(cls, text: str) -> HealAddress:
        """The parts of `text`; never raises: a part that is missing is empty."""
        where, _, rest = text.removeprefix("tcp://").partition("/")
        port, _, word = rest.rpartition("/")
        return cls(f"tcp://{where}", int(port) if port.isdecimal() and len(port) <= 5 else 0, word)

    def __str__(self) -> str:
        return f"{self.where}/{self.bulk_port}/{self.word}"


def serving_endpoint(
    context: zmq.Context[Any], host: str, port: int, word: str, readers: int
) -> tuple[Endpoint, str]:
    """(a bound endpoint that admits those that present `word`, tcp://host:port). Port 0: a free one.
    `readers`: how many may come at once.

    Raises ValueError if it cannot be bound.
    """
    try:
        endpoint = Endpoint(
            context,
            f"tcp://{bracketed(host)}:{port}",
            _TIMEOUTS,
            service=_SERVICE,
            admits=lambda presented: hmac.compare_digest(presented, word),
            limits=replace(_LIMITS, strangers=MOST_STRANGERS + readers),
        )
    except OSError as error:
        raise ValueError(
            f"Cannot serve heals on {host}:{port}: {error}; choose an address of this machine and "
            "a free port."
        ) from error
    return endpoint, f"tcp://{bracketed(host)}:{endpoint.address.rpartition(':')[2]}"


def longest_silence_s(left_s: float) -> float:
    """How long a source may say nothing at all, with `left_s` until the deadline. ZeroMQ's own threads
    answer its heartbeats, also while a source has nothing to send yet."""
    return min(max(left_s / 6, _SHORTEST_SILENCE_S), _HEARTBEAT_TIMEOUT_MS / 1000)


def reading_socket(
    context: zmq.Context[Any],
    address: HealAddress,
    silence_s: float = _HEARTBEAT_TIMEOUT_MS / 1000,
) -> zmq.Socket[bytes]:
    """A DEALER for the source at `address`, not connected yet. Its connection ends if the source says
    nothing, heartbeats included, for `silence_s`."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.PLAIN_USERNAME, _SERVICE.encode())
    dealer.setsockopt(zmq.PLAIN_PASSWORD, address.word.encode() or b"-")
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MANIFEST_BYTES)
    # With a limit, ZeroMQ 4.3.5 aborts the process if a source is reset while its queue is full. What
    # is on its way is what was asked for.
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.SNDHWM, 256)
    dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(silence_s * 1000))
    # A source that is not ready yet is silent, but its machine confirms the heartbeats.
    dealer.setsockopt(zmq.TCP_MAXRT, _UNCONFIRMED_MS)
    dealer.setsockopt(zmq.IPV6, 1 if "[" in address.where else 0)
    return dealer


# ---------------------------------------------------------------- ending a heal


class Interrupt:
    """Lets one thread end a `fetch` that another thread runs.

    Pass it to `fetch`, which raises HealError soon after `set`. An eventfd, so that the fetch waits
    for it and for its sockets in one poll. Call `close` when the fetch is over.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # `set` must not write to a descriptor that `close` gave back
        self._closed = False
        self.is_set = False

    def fileno(self) -> int:
        """A descriptor that is readable once the interrupt is set."""
        return self._fd

    def set(self) -> None:
        """End the fetch. Any thread, any number of times, also after `close`."""
        with self._lock:
            self.is_set = True
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Give the descriptor back. The fetching thread, once."""
        with self._lock:
            self._closed = True
            os.close(self._fd)
