"""Messages: what is sent is what is read, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from ft_core.heal import protocol as wire

MESSAGES = [
    wire.Open("secret", 3, "ab", 1 << 20, 2.5, b"host"),
    wire.Get(True, (1, 2), (0, 4, 6, 9)),
    wire.Done(),
    wire.ManifestReply(3, "ab", b"x" * 16, 0, ()),
    wire.ChunkReply(5, b"s" * 16),
    wire.ValidReply((5, 6), (7,)),
    wire.Gone("why"),
    wire.HealRefused("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.kind)
def test_round_trip(message: wire.Request | wire.Reply) -> None:
    decoders: list[Callable[[bytes], object]] = [wire.decode_request, wire.decode_reply]
    good, bad = decoders if isinstance(message, wire.Request) else decoders[::-1]
    assert good(wire.encode(message)) == message
    with pytest.raises(wire.HealProtocolError, match="unknown kind"):
        bad(wire.encode(message))


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_junk_is_a_wire_error(data: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_reply):
        with pytest.raises(wire.HealProtocolError):
            decode(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.kind)
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_damage_is_a_wire_error_or_a_message(
    message: wire.Request | wire.Reply, at: int, byte: int
) -> None:
    data = bytearray(wire.encode(message))
    data[at % len(data)] = byte
    for decode in (wire.decode_request, wire.decode_reply):
        try:
            decode(bytes(data))
        except wire.HealProtocolError:
            pass


@pytest.mark.parametrize(
    "fields",
    [
        ["get", False, [-1], []],
        ["get", False, [2**63] * 100, []],
        ["get", False, [1], [1]],
        ["get", False, ["x"], []],
        ["get", 1, [1], []],
        ["open", "t", -1, "", 1 << 20, 1.0, b""],
        ["open", "t", 1, "", 1 << 20, float("nan"), b""],
        ["open", "t", 1, "", 1 << 20, -1.0, b""],
        ["open", "t" * 5000, 1, "", 1 << 20, 1.0, b""],
        ["open", "t", 1],
        [[1]],
    ],
)
def test_values_out_of_bounds(fields: list[object]) -> None:
    with pytest.raises(wire.HealProtocolError):
        wire.decode_request(msgpack.packb([wire.MAGIC, wire.VERSION, *fields]))


def test_another_version_is_named() -> None:
    with pytest.raises(wire.HealProtocolError, match="version 99; this side speaks 2"):
        wire.decode_request(msgpack.packb([wire.MAGIC, 99, "done"]))
