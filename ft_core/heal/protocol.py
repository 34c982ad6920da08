"""Messages between HealServer and fetch, version 2. PURE: bytes in, frozen values out.

Target to source, one frame, a msgpack array `[MAGIC, VERSION, kind, ...]`:

    open    token, step, lineage, chunk_bytes, timeout_s, host      may be held until published
    get     direct, [chunk indexes], [lo, hi, lo, hi, ...]          what is asked; all still missing
                                    direct: they were read from the source's memory; do they count?
    done                                                            this reader has everything

Source to target, a msgpack frame, for some kinds followed by one raw frame:

    manifest  step, lineage, layout digest, pid, [addresses]   + manifest   pid 0: no same-host path
    chunk     index, checksum                                  + raw bytes
    valid     [chunk indexes], [indexes]  what was read directly: this version's; may be another's
    gone      reason                      this version is not served (any more)
    refused   reason                      this reader will never be served

A frame that is none of these is dropped and counted; nothing here can raise anything but HealProtocolError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_type_hints

import msgpack

MAGIC = "fth"
VERSION = 2
MAX_REQUEST_BYTES = 64 << 10
MAX_MANIFEST_BYTES = 256 << 20
MAX_CHUNKS_A_REQUEST = 64
MAX_RANGES = 32  # `missing` is merged down to this many ranges


class HealProtocolError(ValueError):
    """A frame that is not a valid message."""


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise HealProtocolError(what)


def _check_ints(values: tuple[int, ...], limit: int, what: str) -> None:
    _check(len(values) <= limit, f"too many {what}")
    _check(all(type(v) is int and 0 <= v < 2**64 for v in values), what)


@dataclass(frozen=True, slots=True)
class Open:
    kind: ClassVar[str] = "open"
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
    kind: ClassVar[str] = "get"
    direct: bool
    chunks: tuple[int, ...]
    missing: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints(self.chunks, MAX_CHUNKS_A_REQUEST, "chunks")
        _check_ints(self.missing, 2 * MAX_RANGES, "missing")
        _check(len(self.missing) % 2 == 0, "missing")


@dataclass(frozen=True, slots=True)
class Done:
    kind: ClassVar[str] = "done"


@dataclass(frozen=True, slots=True)
class ManifestReply:
    kind: ClassVar[str] = "manifest"
    step: int
    lineage: str
    layout_digest: bytes
    pid: int
    addresses: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints(self.addresses, 1 << 20, "addresses")


@dataclass(frozen=True, slots=True)
class ChunkReply:
    kind: ClassVar[str] = "chunk"
    index: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ValidReply:
    kind: ClassVar[str] = "valid"
    valid: tuple[int, ...]
    moved: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints(self.valid, MAX_CHUNKS_A_REQUEST, "chunks")
        _check_ints(self.moved, MAX_CHUNKS_A_REQUEST, "chunks")


@dataclass(frozen=True, slots=True)
class Gone:
    kind: ClassVar[str] = "gone"
    reason: str


@dataclass(frozen=True, slots=True)
class HealRefused:
    kind: ClassVar[str] = "refused"
    reason: str


Request = Open | Get | Done
Reply = ManifestReply | ChunkReply | ValidReply | Gone | HealRefused
_REQUESTS: tuple[type[Any], ...] = (Open, Get, Done)
_REPLIES: tuple[type[Any], ...] = (ManifestReply, ChunkReply, ValidReply, Gone, HealRefused)
_HINTS = {cls: get_type_hints(cls) for cls in _REQUESTS + _REPLIES}


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    values = [getattr(message, f.name) for f in fields(message)]
    data: bytes = msgpack.packb([MAGIC, VERSION, message.kind, *values])
    return data


def decode_request(data: bytes) -> Request:
    """What a target sent, or HealProtocolError."""
    message: Request = _decode(data, _REQUESTS)
    return message


def decode_reply(data: bytes) -> Reply:
    """What a source sent, or HealProtocolError."""
    message: Reply = _decode(data, _REPLIES)
    return message


def _decode(data: bytes, known: tuple[type[Any], ...]) -> Any:
    try:
        parsed = msgpack.unpackb(data, use_list=False)
    except Exception as error:  # msgpack has no common base class for what bad input may raise
        raise HealProtocolError(f"not msgpack: {error}") from error
    if type(parsed) is not tuple or len(parsed) < 3 or parsed[0] != MAGIC:
        raise HealProtocolError("not a heal message")
    if parsed[1] != VERSION:
        raise HealProtocolError(f"version {parsed[1]!r}; this side speaks {VERSION}")
    for cls in known:
        if cls.kind == parsed[2]:
            return _build(cls, parsed[3:])
    raise HealProtocolError(f"unknown kind {parsed[2]!r}")


def _build(cls: type[Any], values: tuple[Any, ...]) -> Any:
    names = [f.name for f in fields(cls)]
    _check(len(names) == len(values), f"{cls.kind}: {len(values)} fields")
    for name, value in zip(names, values, strict=True):
        hint = _HINTS[cls][name]
        expected = hint if isinstance(hint, type) else tuple
        good = type(value) is expected or (expected is float and type(value) is int)
        _check(good, f"{cls.kind}.{name} is a {type(value).__name__}")
    return cls(*values)
