"""Messages between HealServer and fetch, version 3. PURE: bytes in, frozen values out.

Target to source, one frame (`lighthouse.wire.codec`):

    open    token, step, lineage, chunk_bytes, timeout_s, host      held until it is published
    get     direct, [chunk indexes], [lo, hi, lo, hi, ...]          what it wants; all it still lacks
                direct: the chunks were read from the source's memory; are they valid?
    done                                                            the reader has everything

Source to target, one frame, for some kinds followed by one raw frame:

    manifest  step, lineage, layout digest, pid, [addresses]   + manifest   pid 0: no same-host path
    chunk     index, checksum                                  + raw bytes
    valid     [indexes], [indexes]    read directly: of this version; perhaps changed since
    gone      reason                  this version is not served (any more)
    refused   reason                  this reader will never be served

Anything else raises `lighthouse.errors.ProtocolError`; the source drops and counts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lighthouse.wire.codec import MessageCodec

VERSION = 3
MAX_REQUEST_BYTES = 64 << 10
MAX_MANIFEST_BYTES = 256 << 20
MAX_CHUNKS_A_REQUEST = 64
MAX_RANGES = 32  # `missing` holds at most this many ranges


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _check_ints(values: tuple[int, ...], limit: int, what: str) -> None:
    _check(len(values) <= limit, f"too many {what}")
    _check(all(0 <= value < 2**64 for value in values), what)


@dataclass(frozen=True, slots=True)
class Open:
    """A target asks for a version; the source answers when it is published."""

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
class Get:
    """Chunks that the target wants (or has read directly), and ranges of all that it lacks."""

    direct: bool
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
class ManifestReply:
    """This source serves the version. The manifest itself is the second frame."""

    step: int
    lineage: str
    layout_digest: bytes
    pid: int
    addresses: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints(self.addresses, 1 << 20, "addresses")


@dataclass(frozen=True, slots=True)
class ChunkReply:
    """The bytes of a chunk are the second frame."""

    index: int
    checksum: bytes


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
    """The version is not served any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealRefused:
    """This target will never be served."""

    reason: str


Request = Open | Get | Done
Reply = ManifestReply | ChunkReply | ValidReply | Gone | HealRefused
requests = MessageCodec(VERSION, {"open": Open, "get": Get, "done": Done})
replies = MessageCodec(
    VERSION,
    {
        "manifest": ManifestReply,
        "chunk": ChunkReply,
        "valid": ValidReply,
        "gone": Gone,
        "refused": HealRefused,
    },
)
