"""The wire format: what is sent arrives equal, and nothing else arrives at all."""

from __future__ import annotations

import dataclasses
import tracemalloc
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.errors import ProtocolError, VersionMismatch
from lighthouse.wire import codec, messages
from lighthouse.wire.messages import Decision, JobKey, Member, Quorum, Refused, Status, Vote

KINDS: tuple[type, ...] = typing.get_args(messages.Message)

# msgpack carries integers of 64 bits.
numbers = st.integers(0, 2**63 - 1)
quorum_ids = st.integers(0, (messages.MAX_EPOCH + 1 << messages.TERM_BITS) - 1)
steps = st.integers(0, messages.MAX_STEP)
wishes = st.integers(0, messages.MAX_WISH)
terms = st.builds(
    messages.Term, st.integers(0, messages.MAX_EPOCH), st.integers(0, messages.MAX_NONCE)
)
ids = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
words = st.text(st.characters(codec="utf-8"), max_size=40)
blobs = st.binary(max_size=100)
jobs = st.builds(JobKey, ids, ids)


@st.composite
def members(draw: st.DrawFn) -> Member:
    addresses = tuple(draw(st.lists(blobs, min_size=1, max_size=3)))
    return Member(draw(ids), len(addresses), addresses, draw(st.booleans()))


quorums = st.builds(
    Quorum,
    jobs,
    numbers,
    numbers,
    ids,
    numbers,
    st.lists(ids, max_size=3).map(tuple),
    st.lists(members(), max_size=4).map(tuple),
    words,
    st.sampled_from(["", "commit", "discard"]),
    blobs,
    numbers,
    numbers,
    numbers,
)

anything = st.one_of(
    st.builds(
        messages.Join,
        jobs,
        ids,
        ids,
        steps,
        ids,
        st.lists(blobs, min_size=1, max_size=3).map(tuple),
        quorum_ids,
        st.lists(ids, max_size=3).map(tuple),
        st.none() | st.builds(messages.InDoubt, quorum_ids, steps, ids),
        wishes,
        wishes,
        st.booleans(),
        st.booleans(),
        words,
        words,
        terms,
        st.integers(0, messages.MAX_NONCE),
        quorum_ids,
    ),
    st.builds(
        Vote,
        jobs,
        ids,
        quorum_ids,
        steps,
        ids,
        st.booleans(),
        words,
        st.sampled_from(messages.PHASES),
        st.booleans(),
        st.booleans(),
        blobs,
    ),
    st.builds(messages.Heartbeat, jobs, ids, quorum_ids, steps),
    st.builds(messages.Leave, jobs, ids, words),
    st.builds(messages.DeathNotice, jobs, ids, words),
    st.builds(
        messages.ReachReport,
        jobs,
        ids,
        st.lists(ids, max_size=3).map(tuple),
        st.lists(ids, max_size=3).map(tuple),
    ),
    st.builds(messages.ReachQuery, jobs, st.lists(members(), max_size=3).map(tuple)),
    st.builds(messages.DeclareDead, ids, ids),
    st.just(messages.StatusRequest()),
    quorums,
    st.builds(
        Decision,
        jobs,
        numbers,
        numbers,
        st.booleans(),
        words,
        st.none() | quorums,
        st.booleans(),
        blobs,
    ),
    st.builds(messages.Revoke, jobs, numbers, numbers, words),
    st.builds(messages.Waiting, jobs, words, st.none() | terms),
    st.builds(messages.Expelled, jobs, numbers, words),
    st.builds(Refused, jobs, words),
    st.builds(messages.Declared, ids, ids, st.booleans(), words),
    st.builds(Status, words),
)


def test_the_strategy_knows_every_kind_of_message() -> None:
    seen: set[type] = set()

    @settings(max_examples=700, database=None)
    @given(anything)
    def collect(message: messages.Message) -> None:
        seen.add(type(message))

    collect()
    assert seen == set(KINDS)


@given(anything)
def test_round_trip(message: messages.Message) -> None:
    frame = codec.encode(message)
    assert codec.decode(frame) == message
    assert codec.decode(memoryview(frame)) == message


@given(st.lists(anything, max_size=6))
def test_one_encoder_says_the_same_as_many(batch: list[messages.Message]) -> None:
    """What an encoder keeps of earlier messages of a batch changes no later one."""
    encoder = codec.Encoder()
    for _ in range(2):
        frames = encoder.encode_all([*batch, *batch])
        assert frames == [codec.encode(message) for message in [*batch, *batch]]


def test_member_list_is_packed_once_a_batch() -> None:
    shared = tuple(Member(f"r{n}", 1, (bytes(100),)) for n in range(100))
    encoder = codec.Encoder()
    counted: list[object] = []
    pack = encoder._packer.pack

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(packer, name)

        def pack(self, value: object) -> bytes:
            counted.append(value)
            packed: bytes = pack(value)
            return packed

    packer, encoder._packer = encoder._packer, Counting()
    encoder.encode_all(Quorum(JobKey(), 1, step, "x", 0, (), shared) for step in range(10))
    assert sum(value is shared for value in counted) == 1
    encoder.encode_all([Quorum(JobKey(), 1, 0, "x", 0, (), shared)])
    assert sum(value is shared for value in counted) == 2


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    try:
        codec.decode(frame)
    except ProtocolError:
        pass


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | words | blobs,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(words, inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from(sorted(codec._TAGS)), st.lists(json_like, max_size=12))
def test_any_fields_are_a_message_or_a_protocol_error(tag: str, fields: list[object]) -> None:
    try:
        codec.decode(msgpack.packb([codec.VERSION, tag, *fields]))
    except ProtocolError:
        pass


@settings(max_examples=300)
@given(anything, st.data())
def test_one_changed_field_never_passes_for_another_type(
    message: messages.Message, data: st.DataObject
) -> None:
    """Whatever one field is replaced by, what comes out has fields of the declared types."""
    raw = msgpack.unpackb(codec.encode(message))
    if len(raw) == 2:
        return
    raw[data.draw(st.integers(2, len(raw) - 1))] = data.draw(json_like)
    try:
        decoded = codec.decode(msgpack.packb(raw))
    except ProtocolError:
        return
    assert codec.decode(codec.encode(decoded)) == decoded
    hints = typing.get_type_hints(type(decoded))
    for field in dataclasses.fields(decoded):
        value = getattr(decoded, field.name)
        if hints[field.name] in (int, str, bytes, bool):
            assert type(value) is hints[field.name]


@given(anything, st.data())
def test_cut_frames_are_refused(message: messages.Message, data: st.DataObject) -> None:
    frame = codec.encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolError):
        codec.decode(frame[:cut])
    with pytest.raises(ProtocolError):
        codec.decode(frame + b"\x00")


def test_other_versions_are_named_whatever_they_hold() -> None:
    for rest in (["vote"], [{"new": 1}, b"", None]):
        with pytest.raises(VersionMismatch, match="version 8"):
            codec.decode(msgpack.packb([8, *rest]))


def test_oversized_frame_is_refused_unread() -> None:
    class Endless(bytes):
        def __len__(self) -> int:
            return codec.MAX_FRAME_BYTES + 1

    with pytest.raises(ProtocolError, match="limit"):
        codec.decode(Endless(codec.encode(messages.StatusRequest())))


@pytest.mark.parametrize("deep", [10, 10_000, 1_000_000])
def test_deep_nesting_is_refused(deep: int) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(b"\x91" * deep)


def test_a_list_that_promises_too_much_is_refused() -> None:
    with pytest.raises(ProtocolError):
        codec.decode(b"\xdd\xff\xff\xff\xff")


@pytest.mark.parametrize("entry", [[], [1]], ids=["empty", "of one"])
def test_small_lists_cost_no_more_memory_than_members(entry: list[int]) -> None:
    """Lists that may be changed take 66 bytes for each, and the collector of cycles looks
    at all of them again and again: one frame kept the lighthouse busy for a second."""
    frame = msgpack.packb([codec.VERSION, "join", [entry] * (codec.MAX_SMALL_BYTES // 2)])
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="fields"):
            codec.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 48 * len(frame)
    finally:
        tracemalloc.stop()


def test_steady_messages_are_small() -> None:
    """The cost of a step must not grow with the number of replica groups."""
    vote = Vote(
        JobKey("job", "room"), "replica_12-0123456789abcdef", 2**60 - 1, 10**6, "f" * 16, True
    )
    decision = Decision(JobKey("job", "room"), 2**60 - 1, 10**6, True, "ok")
    assert len(codec.encode(vote)) <= 100
    assert len(codec.encode(decision)) < 50
