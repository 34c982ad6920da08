"""What crosses the heal transport's public interface: values, errors, and the interrupt.

HealError                   the state could not be fetched; the target stays behind and may retry
UnsupportedObjectError      the state itself holds something that cannot travel: change the state
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


class HealError(Exception):
    """A heal failed. The message names every source that was asked, and why it did not help."""


class UnsupportedObjectError(HealError, TypeError):
    """A state dict holds an object that cannot travel; the message names its path and a remedy."""


@dataclass(frozen=True, slots=True)
class HealKey:
    """The version of a state: the number of committed steps, and a hash of those commits.

    Two states with equal keys are bitwise equal. A step alone never identifies a state.
    Raises ValueError for a negative step or a lineage of more than 256 characters.
    """

    step: int
    lineage: str

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step must be an int of at least 0, not {self.step!r}.")
        if type(self.lineage) is not str or len(self.lineage) > 256:
            raise ValueError("lineage must be a str of at most 256 characters.")

    def __str__(self) -> str:
        return f"(step {self.step}, lineage {self.lineage or '-'})"


@dataclass(frozen=True, slots=True)
class HealProgress:
    """How far a heal is. Passed to the `progress` callback in the thread that called `fetch`."""

    key: HealKey
    bytes_done: int
    bytes_total: int
    sources: int  # sources that serve this version at present


@dataclass(frozen=True, slots=True)
class HealStats:
    """What a finished heal cost the target."""

    bytes: int  # tensor bytes received, without headers and duplicates
    seconds: float  # from the call of fetch to the tree in place
    source_bytes: Mapping[str, int] = field(default_factory=dict)  # per address, valid chunks only
    retries: int = 0  # chunks requested again: late, lost or corrupted
    corrupted: int = 0  # chunks whose checksum did not match
    same_host_bytes: int = 0  # of `bytes`, read straight from a source's memory
    failed_sources: Mapping[str, str] = field(default_factory=dict)  # address to reason


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counters of a HealServer since it started."""

    published: int = 0
    snapshot_seconds: float = 0.0  # time that the training thread spent in publish and freeze
    opened: int = 0  # readers admitted
    finished: int = 0  # readers that reported that they have everything
    bytes_sent: int = 0  # raw bytes handed to ZeroMQ
    bytes_lent: int = 0  # bytes that readers on this host read from this process's memory
    dropped: int = 0  # malformed or unexpected requests
    refused: int = 0  # wrong token, too many clients


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
