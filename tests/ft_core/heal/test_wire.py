"""Messages: what is sent is what is read, and nothing else is."""

from __future__ import annotations

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from ft_core.heal import protocol as wire
from lighthouse.errors import ProtocolError

MESSAGES = [
    wire.Open("secret", 3, "ab", 1 << 20, 2.5, b"host"),
    wire.Confirm((1, 2), (0, 4, 6, 9)),
    wire.Done(),
    wire.ManifestReply(3, "ab", b"x" * 16, b"s" * 16, 0, (), ()),
    wire.ManifestReply(3, "ab", b"x" * 16, b"s" * 16, 9, (64,), (wire.Block(32, 64, b"h"),)),
    wire.ValidReply((5, 6), (7,)),
    wire.Gone("why"),
    wire.HealRefused("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: wire.Request | wire.Reply) -> None:
    both = [wire.requests, wire.replies]
    good, bad = both if isinstance(message, wire.Request) else both[::-1]
    frame = good.encode(message)
    assert good.decode(frame) == message
    with pytest.raises(ProtocolError, match="unknown message tag"):
        bad.decode(frame)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_junk_is_a_protocol_error(data: bytes) -> None:
    for codec in (wire.requests, wire.replies):
        with pytest.raises(ProtocolError):
            codec.decode(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_damage_is_a_protocol_error_or_a_message(
    message: wire.Request | wire.Reply, at: int, byte: int
) -> None:
    codec = wire.requests if isinstance(message, wire.Request) else wire.replies
    data = bytearray(codec.encode(message))
    data[at % len(data)] = byte
    for decoder in (wire.requests, wire.replies):
        try:
            decoder.decode(bytes(data))
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "fields",
    [
        ["confirm", [-1], []],
        ["confirm", [2**63] * 100, []],
        ["confirm", [1], [1]],
        ["confirm", ["x"], []],
        ["confirm", 1, []],
        ["open", "t", -1, "", 1 << 20, 1.0, b""],
        ["open", "t", 1, "", 1 << 20, float("nan"), b""],
        ["open", "t", 1, "", 1 << 20, -1.0, b""],
        ["open", "t" * 5000, 1, "", 1 << 20, 1.0, b""],
        ["open", "t", 1],
        [[1]],
    ],
)
def test_values_out_of_bounds(fields: list[object]) -> None:
    with pytest.raises(ProtocolError):
        wire.requests.decode(msgpack.packb([wire.VERSION, *fields]))


def test_a_session_has_its_length() -> None:
    fields = ["manifest", 3, "ab", b"", b"short", 0, [], []]
    with pytest.raises(ProtocolError):
        wire.replies.decode(msgpack.packb([wire.VERSION, *fields]))


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolError, match="version 99, this one 5"):
        wire.requests.decode(msgpack.packb([99, "done"]))
