"""msgpack wire format: strict and versioned.

A frame is `[version, tag, field, field, ...]` with the fields of the dataclass in order. Strict:
an unknown tag, a missing or surplus field, a wrong type or a value that the message's own check
refuses raises `ProtocolError`. A frame of another version raises `VersionMismatch`, whatever else
it holds, so that both sides can say so. Only these dataclasses are ever built from a frame.

`MessageCodec` serves any protocol of frozen dataclasses: the lighthouse's here, those of ft_core there.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import msgpack

from lighthouse.errors import ProtocolError, VersionMismatch
from lighthouse.wire import messages

VERSION = 7
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest frame that is read; a full list of 16,384 replica groups of one rank fits."""
MAX_REQUEST_BYTES = 2 * 1024 * 1024
"""Largest request: a `Join` with the addresses of some thousand ranks."""
MAX_SMALL_BYTES = 16 * 1024
"""Largest frame of a kind that carries no list."""

_TAGS: dict[str, type] = {
    "join": messages.Join,
    "vote": messages.Vote,
    "heartbeat": messages.Heartbeat,
    "leave": messages.Leave,
    "reach": messages.ReachReport,
    "death": messages.DeathNotice,
    "dead": messages.DeclareDead,
    "stat?": messages.StatusRequest,
    "quorum": messages.Quorum,
    "decide": messages.Decision,
    "revoke": messages.Revoke,
    "wait": messages.Waiting,
    "expel": messages.Expelled,
    "reach?": messages.ReachQuery,
    "refuse": messages.Refused,
    "declared": messages.Declared,
    "stat": messages.Status,
}
_LARGE = {
    "join": MAX_REQUEST_BYTES,
    "quorum": MAX_FRAME_BYTES,
    "decide": MAX_FRAME_BYTES,
    "reach?": MAX_FRAME_BYTES,
    "stat": MAX_FRAME_BYTES,
}
_TAG_OF = {kind: tag for tag, kind in _TAGS.items()}
_SCALARS = (int, str, bytes, bool, float)

_HEAD_BYTES = 64
"""Holds version and tag of every message."""

Decoder = Callable[[Any], Any]


class Encoder:
    """Turns batches of messages into frames. One thread at a time.

    The messages of a new quorum differ in little and hold the same member list. A list (the same
    object, not an equal one) is packed once a batch.
    """

    def __init__(self) -> None:
        self._packer = msgpack.Packer(use_bin_type=True, default=_plain)
        # By id(); the value holds the list, so that no other object can get its id meanwhile.
        self._packed: dict[int, tuple[object, bytes]] = {}

    def encode_all(self, batch: Iterable[messages.Message]) -> list[bytes]:
        """One frame for each message of `batch`, in order."""
        frames = [self._encode(message) for message in batch]
        self._packed.clear()
        return frames

    def _encode(self, message: messages.Message) -> bytes:
        kind: Any = type(message)
        if kind is messages.Quorum or getattr(message, "next_quorum", None) is not None:
            parts = [self._pack(VERSION), self._pack(_TAG_OF[kind]), *self._packed_fields(message)]
            return b"".join((self._packer.pack_array_header(len(parts)), *parts))
        return self._pack((VERSION, _TAG_OF[kind], *_values(message)))

    def _pack(self, value: Any) -> bytes:
        packed: bytes = self._packer.pack(value)
        return packed

    def _packed_fields(self, message: Any) -> list[bytes]:
        parts: list[bytes] = []
        for value in _values(message):
            if type(value) is messages.Quorum:
                fields = self._packed_fields(value)
                header = self._packer.pack_array_header(len(fields))
                parts.append(b"".join((header, *fields)))
            elif type(value) is tuple and len(value) > 1:
                parts.append(self._pack_once(value))
            else:
                parts.append(self._pack(value))
        return parts

    def _pack_once(self, values: tuple[Any, ...]) -> bytes:
        known = self._packed.get(id(values))
        if known is None:
            known = self._packed[id(values)] = (values, self._pack(values))
        return known[1]


def encode(message: messages.Message) -> bytes:
    """The frame of one message. Any thread."""
    return Encoder().encode_all([message])[0]


def decode(frame: bytes | memoryview) -> messages.Message:
    """The message in `frame`. Raises only `ProtocolError` (`VersionMismatch` is one)."""
    message: messages.Message = _LIGHTHOUSE.decode(frame)
    return message


# ---------------------------------------------------------------- compiled from the dataclasses


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _getter_of(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all fields of a dataclass at once."""
    names = _field_names(kind)
    if len(names) > 1:
        return attrgetter(*names)  # a tuple, but of a single name
    return lambda value: tuple(getattr(value, name) for name in names)


def _values(value: Any) -> tuple[Any, ...]:
    kind: Any = type(value)
    return _getter_of(kind)(value)


def _plain(value: Any) -> Any:
    """What msgpack can't pack by itself: our dataclasses travel as the list of their fields."""
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} can't be sent")
    return _values(value)


@cache
def _decoder_of(kind: type) -> Decoder:
    """Decoder of a dataclass from the list of its fields."""
    hints = typing.get_type_hints(kind)
    names = _field_names(kind)
    count = len(names)
    scalars = tuple((i, hints[name]) for i, name in enumerate(names) if hints[name] in _SCALARS)
    nested = tuple(
        (i, _decoder(hints[name], f"{kind.__name__}.{name}"))
        for i, name in enumerate(names)
        if hints[name] not in _SCALARS
    )
    build = lru_cache(4_096)(kind) if kind is messages.JobKey else kind

    def decode_fields(raw: Any) -> Any:
        if type(raw) is not tuple or len(raw) != count:
            raise ProtocolError(f"{kind.__name__}: expected {count} fields")
        for i, wanted in scalars:
            # type(), not isinstance: bool is an int, and True must not pass for 1.
            if type(raw[i]) is not wanted:
                raise _wrong_type(f"{kind.__name__}.{names[i]}", wanted, raw[i])
        values = list(raw)
        for i, read in nested:
            values[i] = read(raw[i])
        try:
            return build(*values)
        except ValueError as error:
            raise ProtocolError(f"{kind.__name__}: {error}") from error

    return decode_fields


def _decoder(hint: Any, where: str) -> Decoder:
    if hint in _SCALARS:
        return _scalar(hint, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = _decoder(typing.get_args(hint)[0], where)

        def read_tuple(raw: Any) -> Any:
            if type(raw) is not tuple:
                raise _wrong_type(where, tuple, raw)
            return tuple([item(entry) for entry in raw])

        return read_tuple
    if origin in (types.UnionType, typing.Union):
        inner = _decoder(typing.get_args(hint)[0], where)
        return lambda raw: None if raw is None else inner(raw)
    assert dataclasses.is_dataclass(hint), f"{where}: no decoder for {hint}"
    return _decoder_of(typing.cast(type, hint))


def _scalar(kind: type, where: str) -> Decoder:
    def read(raw: Any) -> Any:
        if type(raw) is not kind:
            raise _wrong_type(where, kind, raw)
        return raw

    return read


def _wrong_type(where: str, wanted: type, raw: Any) -> ProtocolError:
    return ProtocolError(f"{where}: expected {wanted.__name__}, got {type(raw).__name__}")


# ---------------------------------------------------------------- any protocol


class MessageCodec:
    """The frames of one protocol. Any thread.

    Args:
        version: of the protocol; a frame of another one raises `VersionMismatch`.
        kinds: the dataclass of each tag. Fields are int, str, bytes, bool, float, other
            dataclasses, tuples of one of these, or one of these or None. A `ValueError` of
            `__post_init__` becomes a `ProtocolError`.
        large: most bytes of kinds that carry lists; all others have `MAX_SMALL_BYTES`. None: every
            kind may have `MAX_FRAME_BYTES`. A frame that is larger is refused before it is decoded.
    """

    def __init__(
        self, version: int, kinds: dict[str, type], large: dict[str, int] | None = None
    ) -> None:
        self._version = version
        self._kinds = kinds
        self._large = large
        self._tags = {kind: tag for tag, kind in kinds.items()}

    def encode(self, message: Any) -> bytes:
        """The frame of one message."""
        fields = (self._version, self._tags[type(message)], *_values(message))
        frame: bytes = msgpack.packb(fields, default=_plain)
        return frame

    def decode(self, frame: bytes | memoryview) -> Any:
        """The message in `frame`. Raises only `ProtocolError` (`VersionMismatch` is one)."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}"
            )
        if len(frame) > MAX_SMALL_BYTES and self._large is not None:
            self._check_size(frame, self._large)
        try:
            # Tuples: a frame of a million small lists keeps the collector of cycles busy for a second.
            raw = msgpack.unpackb(frame, raw=False, use_list=False, strict_map_key=True)
        except Exception as error:  # msgpack raises many kinds; all mean "no msgpack here"
            raise ProtocolError(f"not msgpack: {error}") from error
        if not isinstance(raw, tuple) or len(raw) < 2 or not isinstance(raw[0], int):
            raise ProtocolError("not a message: expected [version, tag, ...]")
        if raw[0] != self._version:
            raise VersionMismatch(
                f"the other side speaks protocol version {raw[0]}, this one {self._version}: "
                "install the same release on all hosts"
            )
        kind = self._kinds.get(raw[1]) if isinstance(raw[1], str) else None
        if kind is None:
            raise ProtocolError(f"unknown message tag {str(raw[1])[:40]!r}")
        return _decoder_of(kind)(raw[2:])

    def _check_size(self, frame: bytes | memoryview, large: dict[str, int]) -> None:
        """Raise ProtocolError if `frame` is too large for its kind, which its first bytes tell."""
        # Else it takes a megabyte.
        reader = msgpack.Unpacker(raw=False, max_buffer_size=_HEAD_BYTES)
        reader.feed(frame[:_HEAD_BYTES])
        try:
            reader.read_array_header()
            version, tag = reader.unpack(), reader.unpack()
        except Exception as error:
            raise ProtocolError(f"not a message: {error}") from error
        most = large.get(tag, MAX_SMALL_BYTES) if isinstance(tag, str) else MAX_SMALL_BYTES
        if version == self._version and len(frame) > most:
            raise ProtocolError(f"a {tag!r} of {len(frame)} bytes is over its limit of {most}")


_LIGHTHOUSE = MessageCodec(VERSION, _TAGS, _LARGE)
