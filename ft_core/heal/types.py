"""Plain values that cross the heal transport's public interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HealKey:
    """The version of a state: number of committed steps, and the hash of the commits behind it.

    Two states with equal keys are bitwise equal; a step alone never names a state.
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
    """How far a heal is. Handed to the `progress` callback in the thread that called `fetch`."""

    key: HealKey
    bytes_done: int
    bytes_total: int
    sources: int  # sources that answer at present


@dataclass(frozen=True, slots=True)
class HealStats:
    """What a finished heal cost the target."""

    bytes: int  # tensor bytes received, without headers and duplicates
    seconds: float  # from the call of fetch to the tree in place
    source_bytes: Mapping[str, int] = field(default_factory=dict)  # per source, good chunks only
    retries: int = 0  # chunks asked for a second time: stalled, lost or corrupted
    corrupted: int = 0  # chunks whose checksum did not match
    same_host_bytes: int = 0  # of `bytes`, read straight from a source's memory
    failed_sources: Mapping[str, str] = field(default_factory=dict)  # address to reason


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counters of a HealServer since it started."""

    published: int = 0
    snapshot_seconds: float = 0.0  # time the training thread spent in publish and freeze
    opened: int = 0  # readers admitted
    finished: int = 0  # readers that said they have everything
    bytes_sent: int = 0  # raw bytes handed to ZeroMQ
    bytes_lent: int = 0  # bytes that readers on this host were let read from memory
    dropped: int = 0  # malformed or unexpected requests
    refused: int = 0  # wrong token, too many clients
