"""The lighthouse's options: addresses, timeouts (which derive from one), limits. PURE."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MOST_STRANGERS = 64
"""How many connections to a training's port may say nothing, besides one for each process that it is
for. With more, the oldest makes way."""
_ADDRESS = re.compile(
    r"(?:(?:tcp|https?)://)?(?P<host>\[[\w:.%]+\]|[\w.\-*]+):(?P<port>\d{1,5})/?", re.ASCII
)


def normalize_address(address: str, *, to_connect: bool = True) -> str:
    """`address` as "tcp://host:port". Raises ValueError with a sentence for a person.

    Accepts "tcp://host:port", "host:port" and, because other launchers put it into the
    environment, "http://host:port". `to_connect` False: an address to bind, where port 0 (any free
    port) and the host "*" (all interfaces) are allowed too.
    """
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        raise ValueError(f"{address!r} is no lighthouse address: write it as tcp://host:port")
    host, port = match["host"], int(match["port"])
    if port > 65_535 or (to_connect and port == 0):
        raise ValueError(f"{address!r} has no usable port: write one from 1 to 65535")
    if to_connect and host == "*":
        raise ValueError(f"{address!r} names no host: write the lighthouse's host name or IP")
    return f"tcp://{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host without brackets, port) of a normalized address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every duration of the protocol. `Timeouts.derive(timeout_s)` fills what is not set.

    Attributes:
        timeout_s: the one knob: how long one step's communication may take before the members
            that are late are given up.
        heartbeat_s: how often ZeroMQ's own threads prove that a connected host lives.
        heartbeat_timeout_s: a host that is silent for this long is gone.
        connect_timeout_s: how long a replica looks for the lighthouse before it gives up; after a
            training has finished, how long the first process of the next one waits for the others.
        join_timeout_s: how long the first quorum waits for stragglers once `min_replicas` are
            there; also how long a restarted lighthouse waits for the members it knew.
        step_timeout_s: after the first vote on a step (or a stall report), members that have
            not voted within this are evicted.
        revoke_timeout_s: after a revoke, members that have not voted within this are evicted.
        heal_timeout_s: a healing member that keeps its peers' collectives waiting for longer
            is evicted, and tries again later.
        resend_s: a request without an answer is sent again after this.
    """

    timeout_s: float = 60.0
    heartbeat_s: float = 0.2
    heartbeat_timeout_s: float = 0.6
    connect_timeout_s: float = 60.0
    join_timeout_s: float = 5.0
    step_timeout_s: float = 60.0
    revoke_timeout_s: float = 10.0
    heal_timeout_s: float = 30.0
    resend_s: float = 1.0

    @classmethod
    def derive(cls, timeout_s: float = 60.0, **given: float | None) -> Timeouts:
        """All durations from `timeout_s`; each may be set alone. Raises ValueError.

        | name | derived | bounds |
        |---|---|---|
        | heartbeat_timeout_s | timeout / 100 | 0.3 to 5 |
        | heartbeat_s | heartbeat_timeout / 3 | |
        | connect_timeout_s | timeout | |
        | join_timeout_s | timeout / 12 | at least 0.5 |
        | step_timeout_s | timeout | |
        | revoke_timeout_s | timeout / 6 | at least twice heartbeat_timeout |
        | heal_timeout_s | timeout / 2 | |
        | resend_s | timeout / 60 | 0.2 to 2 |
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        chosen = {name: value for name, value in given.items() if value is not None}
        heartbeat_timeout_s = chosen.get("heartbeat_timeout_s", _clamp(timeout_s / 100, 0.3, 5.0))
        derived = {
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "heartbeat_s": heartbeat_timeout_s / 3,
            "connect_timeout_s": timeout_s,
            "join_timeout_s": max(timeout_s / 12, 0.5),
            "step_timeout_s": timeout_s,
            "revoke_timeout_s": max(timeout_s / 6, 2 * heartbeat_timeout_s),
            "heal_timeout_s": timeout_s / 2,
            "resend_s": _clamp(timeout_s / 60, 0.2, 2.0),
        }
        return cls(timeout_s=timeout_s, **{**derived, **chosen})

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        _require_less(self, "heartbeat_s", "heartbeat_timeout_s", "or every host looks silent")
        _require_less(
            self, "heartbeat_timeout_s", "revoke_timeout_s", "or a silent host is evicted as hung"
        )
        _require_less(
            self, "heartbeat_timeout_s", "step_timeout_s", "or a slow host is evicted as hung"
        )
        _require_less(self, "resend_s", "step_timeout_s", "or a lost vote is never sent again")


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _require_less(timeouts: Timeouts, small: str, large: str, why: str) -> None:
    a, b = getattr(timeouts, small), getattr(timeouts, large)
    if not a < b:
        raise ValueError(f"{small} ({a:g} s) must be less than {large} ({b:g} s), {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseConfig:
    """Options of one lighthouse. Raises ValueError for options that contradict each other.

    Attributes:
        min_replicas: no quorum forms with fewer replica groups.
        expected_replicas: the first quorum waits for this many, but not for those that are known to
            be dead; 0 (not known): it waits out the join timeout.
        go_on_after_s: the first quorum waits no longer than this for replica groups that are
            expected; at least the join timeout.
        timeouts: see `Timeouts`.
        max_jobs: a `Join` to one more is refused, unless all members have left some job.
        max_replicas_per_job: more replica groups are refused.
    """

    min_replicas: int = 1
    expected_replicas: int = 0
    go_on_after_s: float = math.inf
    timeouts: Timeouts = Timeouts()
    max_jobs: int = 1_024
    max_replicas_per_job: int = 16_384

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ValueError(f"min_replicas must be at least 1, got {self.min_replicas}")
        if not self.go_on_after_s >= self.timeouts.join_timeout_s:
            raise ValueError(
                f"go_on_after_s ({self.go_on_after_s:g} s) must be at least join_timeout_s "
                f"({self.timeouts.join_timeout_s:g} s), for which the first quorum waits in any case"
            )
        if self.expected_replicas and self.expected_replicas < self.min_replicas:
            raise ValueError(
                f"expected_replicas ({self.expected_replicas}) must be 0 or at least "
                f"min_replicas ({self.min_replicas})"
            )
