"""msgpack wire format: strict and versioned.

A frame is `[VERSION, tag, field, field, ...]` with the fields of the dataclass in order. Strict:
an unknown tag, a missing or surplus field, a wrong type or a value that the message's own check
refuses raises `ProtocolError`. Another version raises `VersionMismatch`, whatever else it holds,
so that both sides can say so. No Python object is ever built from the wire but these.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import msgpack

from lighthouse import messages
from lighthouse.errors import ProtocolError, VersionMismatch

VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest frame that is read: a full member list of 16,384 replica groups of one rank fits."""

_TAGS: dict[str, type] = {
    "join": messages.Join,
    "vote": messages.Vote,
    "beat": messages.Beat,
    "leave": messages.Leave,
    "obit": messages.Obituary,
    "stat?": messages.StatusRequest,
    "quorum": messages.Quorum,
    "decide": messages.Decision,
    "revoke": messages.Revoke,
    "wait": messages.Waiting,
    "expel": messages.Expelled,
    "refuse": messages.Refused,
    "stat": messages.Status,
}
_TAG_OF = {kind: tag for tag, kind in _TAGS.items()}

Decoder = Callable[[Any], Any]


def encode(message: messages.Message) -> bytes:
    """Bytes of one message. Any thread."""
    packed: bytes = msgpack.packb(
        [VERSION, _TAG_OF[type(message)], *_fields(message)], use_bin_type=True
    )
    return packed


def decode(frame: bytes | memoryview) -> messages.Message:
    """The message in `frame`. Raises `ProtocolError` (or `VersionMismatch`) and nothing else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        raw = msgpack.unpackb(frame, raw=False, use_list=True, strict_map_key=True)
    except Exception as error:  # msgpack raises many kinds; all mean "no msgpack here"
        raise ProtocolError(f"not msgpack: {error}") from error
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[0], int):
        raise ProtocolError("not a message: expected [version, tag, ...]")
    if raw[0] != VERSION:
        raise VersionMismatch(
            f"the other side speaks protocol version {raw[0]}, this one {VERSION}: "
            "install the same release on all hosts"
        )
    kind = _TAGS.get(raw[1]) if isinstance(raw[1], str) else None
    if kind is None:
        raise ProtocolError(f"unknown message tag {str(raw[1])[:40]!r}")
    message: messages.Message = _decoder_of(kind)(raw[2:])
    return message


def _fields(value: Any) -> list[Any]:
    return [_plain(getattr(value, name)) for name in _field_names(type(value))]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (int, str, bytes)):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _fields(value)


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _decoder_of(kind: type) -> Decoder:
    """Decoder of a dataclass from the list of its fields."""
    hints = typing.get_type_hints(kind)
    decoders = tuple(_decoder(hints[name], f"{kind.__name__}.{name}") for name in _field_names(kind))

    def decode_fields(raw: Any) -> Any:
        if not isinstance(raw, list) or len(raw) != len(decoders):
            raise ProtocolError(f"{kind.__name__}: expected {len(decoders)} fields")
        values = [read(item) for read, item in zip(decoders, raw, strict=True)]
        try:
            return kind(*values)
        except ValueError as error:
            raise ProtocolError(f"{kind.__name__}: {error}") from error

    return decode_fields


def _decoder(hint: Any, where: str) -> Decoder:
    if hint in (int, str, bytes, bool):
        return _scalar(hint, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = _decoder(typing.get_args(hint)[0], where)

        def read_tuple(raw: Any) -> Any:
            if not isinstance(raw, list):
                raise ProtocolError(f"{where}: expected a list")
            return tuple([item(entry) for entry in raw])

        return read_tuple
    if origin in (types.UnionType, typing.Union):
        inner = _decoder(typing.get_args(hint)[0], where)
        return lambda raw: None if raw is None else inner(raw)
    assert dataclasses.is_dataclass(hint), f"{where}: no decoder for {hint}"
    return _decoder_of(typing.cast(type, hint))


def _scalar(kind: type, where: str) -> Decoder:
    def read(raw: Any) -> Any:
        # type(), not isinstance: bool is an int, and True must not pass for 1.
        if type(raw) is not kind:
            raise ProtocolError(f"{where}: expected {kind.__name__}, got {type(raw).__name__}")
        return raw

    return read
