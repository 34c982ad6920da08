"""PURE. What both ends of a heal agree on: versions, the layout of a state, messages, errors.

HealError                   the state could not be fetched; the target stays behind and may retry
├── HealDenied              the target's options differ from the sources': it will never get a state
└── UnsupportedObjectError  the state itself holds something that cannot travel: change the state

Layout. Small tensors share one pool, so that ten thousand scalars of an optimizer are one run of memory.
Every large tensor is a segment of its own. The segments, one after another, are the bytes of the state;
a chunk is a run of these bytes, and may span several segments. Both ends compute the same layout from the
same sizes.

Control messages between HealServer and fetch, version 5. PURE: bytes in, frozen values out. The bytes of
the state take another way (`ft_core.heal.bulk`), or are read from the source's memory.

Target to source, one frame (`lighthouse.wire.codec`):

    open     token, step, lineage, chunk_bytes, timeout_s, host     held until it is published
    confirm  [chunk indexes], [lo, hi, lo, hi, ...]     these were read from the source's memory: are they
                                                        valid? And all that the target still lacks
    done                                                the reader has everything

Source to target, one frame, for `manifest` followed by one raw frame:

    manifest  step, lineage, layout digest, session, pid, [addresses], [blocks]  + manifest    pid 0: no same-host path
    valid     [indexes], [indexes]    read directly: of this version; perhaps changed since
    gone      reason                  this version is not served (any more), or not to one more reader
    refused   reason                  this reader will never be served

Anything else raises `lighthouse.errors.ProtocolError`; the source drops and counts it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from lighthouse.wire.codec import MessageCodec


class HealError(Exception):
    """A heal failed. The message names every source that was asked, and why it did not help."""


WITHHELD = "its state can be given to no process: "
"""Start of a source's refusal that says nothing of the target."""


class HealDenied(HealError):
    """Every source refuses this target, or it refuses what they send; trying again changes nothing."""


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


ANY = "*"
NEXT = HealKey(0, ANY)
"""What an observer asks for: the version that the source shows next, whichever it is. With another step: the
next one from that step on."""


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
    bytes_sent: int = 0  # raw bytes handed to the kernel
    bytes_lent: int = 0  # bytes that readers on this host read from this process's memory
    dropped: int = 0  # malformed or unexpected requests
    refused: int = 0  # wrong token, too many clients


# ---------------------------------------------------------------- the layout of a state


SMALL_BYTES = 1 << 20  # tensors below this go into the pool
ALIGN_BYTES = 64
MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 64 << 20


def align(offset: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


class Extent(NamedTuple):
    """Bytes of a segment: its index, and where they begin in it."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of the state's bytes: the unit that is requested, checked and counted."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Segment 0 is the pool (maybe empty). `places`: (segment, offset in it, bytes) of each tensor, in their order.

    `starts`: where each segment begins in the bytes of the whole state.
    """

    segment_bytes: tuple[int, ...]
    starts: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return self.starts[-1] + self.segment_bytes[-1]

    def chunks(self, chunk_bytes: int) -> list[Chunk]:
        """All bytes in order, in pieces of `chunk_bytes`. Raises ValueError for a bad size."""
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}; it must be between {MIN_CHUNK_BYTES} and "
                f"{MAX_CHUNK_BYTES}."
            )
        total = self.total_bytes
        return [
            Chunk(start, min(chunk_bytes, total - start)) for start in range(0, total, chunk_bytes)
        ]

    def extents(self, chunk: Chunk) -> list[Extent]:
        """Where the bytes of `chunk` lie, in order.

        There are at most 66, since only the pool is shorter than SMALL_BYTES: one system call moves
        them all.
        """
        found = []
        segment = bisect_right(self.starts, chunk.start) - 1
        start, stop = chunk.start, chunk.start + chunk.nbytes
        while start < stop:
            offset = start - self.starts[segment]
            nbytes = min(self.segment_bytes[segment] - offset, stop - start)
            if nbytes:
                found.append(Extent(segment, offset, nbytes))
            start += nbytes
            segment += 1
        return found


def lay_out(tensor_bytes: Sequence[int]) -> Layout:
    """The layout of tensors of these sizes in bytes."""
    pool = 0
    segments = [0]
    places: list[
        tuple[int, int, int]
    ] = []  # plain ones: an Extent takes five times as long to make
    for nbytes in tensor_bytes:
        if nbytes < SMALL_BYTES:
            places.append((0, pool, nbytes))
            # A call of `align` would take a fifth of this loop.
            pool += nbytes + -nbytes % ALIGN_BYTES
        else:
            places.append((len(segments), 0, nbytes))
            segments.append(nbytes)
    segments[0] = pool
    starts = tuple(accumulate(segments, initial=0))[:-1]
    return Layout(tuple(segments), starts, tuple(places))


# ---------------------------------------------------------------- messages


VERSION = 5
MAX_REQUEST_BYTES = 64 << 10
MAX_MANIFEST_BYTES = 256 << 20
MAX_CHUNKS_A_REQUEST = 64
MAX_RANGES = 32  # `missing` holds at most this many ranges
SESSION_BYTES = 16
MAX_HANDLE_BYTES = 256


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _check_ints(values: tuple[int, ...], limit: int, what: str) -> None:
    _check(len(values) <= limit, f"too many {what}")
    _check(all(0 <= value < 2**64 for value in values), what)


@dataclass(frozen=True, slots=True)
class Open:
    """A target asks for a version; the source answers when it is published. An observer, which is not a
    member, asks for `NEXT`."""

    token: str
    step: int
    lineage: str
    chunk_bytes: int
    timeout_s: float
    host: bytes

    def __post_init__(self) -> None:
        _check(0 <= self.step < 2**63 and self.chunk_bytes > 0, "open")
        _check(math.isfinite(self.timeout_s) and self.timeout_s > 0, "timeout_s")
        _check(len(self.token) <= 4096 and len(self.lineage) <= 256, "open")


@dataclass(frozen=True, slots=True)
class Confirm:
    """Chunks that the target has read directly, and ranges of all that it lacks."""

    chunks: tuple[int, ...]
    missing: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints(self.chunks, MAX_CHUNKS_A_REQUEST, "chunks")
        _check_ints(self.missing, 2 * MAX_RANGES, "missing")
        _check(len(self.missing) % 2 == 0, "missing")


@dataclass(frozen=True, slots=True)
class Done:
    """The target has everything, or has given up."""


@dataclass(frozen=True, slots=True)
class Block:
    """An allocation of a device, which may hold many segments. `address`: in the source's process. `handle`: with
    which another process opens it."""

    address: int
    nbytes: int
    handle: bytes

    def __post_init__(self) -> None:
        _check(0 < self.address < 2**64 and 0 < self.nbytes < 2**63, "block")
        _check(len(self.handle) <= MAX_HANDLE_BYTES, "block")


@dataclass(frozen=True, slots=True)
class ManifestReply:
    """This source serves the version. The manifest itself is the second frame.

    `session`: what the target presents on its bulk connection. `addresses`: of its segments, in its process
    `pid`; `blocks`: those of devices.
    """

    step: int
    lineage: str
    layout_digest: bytes
    session: bytes
    pid: int
    addresses: tuple[int, ...]
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        _check(len(self.session) == SESSION_BYTES, "session")
        _check_ints(self.addresses, 1 << 20, "addresses")
        _check(len(self.blocks) <= 1 << 16, "blocks")


@dataclass(frozen=True, slots=True)
class ValidReply:
    """Which of the chunks that were read directly are valid, and which must be sent."""

    valid: tuple[int, ...]
    moved: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints(self.valid, MAX_CHUNKS_A_REQUEST, "chunks")
        _check_ints(self.moved, MAX_CHUNKS_A_REQUEST, "chunks")


@dataclass(frozen=True, slots=True)
class Gone:
    """The version is not served (any more), or not to one more reader."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealRefused:
    """This target will never be served (`WITHHELD`: nor is another one, with this version)."""

    reason: str


Request = Open | Confirm | Done
Reply = ManifestReply | ValidReply | Gone | HealRefused
requests = MessageCodec(VERSION, {"open": Open, "confirm": Confirm, "done": Done})
replies = MessageCodec(
    VERSION,
    {"manifest": ManifestReply, "valid": ValidReply, "gone": Gone, "refused": HealRefused},
)
