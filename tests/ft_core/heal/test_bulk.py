"""The bulk connection against scripted peers over real sockets: each end alone, whatever the other does."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import zmq

from ft_core.heal import HealError, HealKey, HealServer, bulk, fetch, pack, transfer_plan
from ft_core.heal import protocol as wire
from ft_core.heal import target as target_module
from ft_core.heal.bulk import BulkReport, BulkStream, Inbox, News
from ft_core.heal.digests import checksum
from ft_core.heal.format import Manifest
from ft_core.heal.receive import Receiver
from ft_core.heal.transport import HealAddress, reading_socket
from ft_core.launch.rank_group import free_port
from lighthouse.config import MOST_STRANGERS
from tests.ft_core.heal.support import KEY, same, soon, state
from tests.harness.waiting import PATIENCE_S, until

MakeServer = Callable[..., HealServer]
MAGIC = struct.pack("<6sH", b"FTHEAL", wire.VERSION)
ASK = struct.Struct(f"<II{2 * wire.MAX_RANGES}I")
TRAILER = struct.Struct("<IIQ")
WORD = "0123456789abcdef"


def ask(chunk: int, *missing: int, count: int | None = None) -> bytes:
    """The frame that asks for a chunk."""
    padded = (*missing, *([0] * (2 * wire.MAX_RANGES - len(missing))))
    return ASK.pack(chunk, len(missing) if count is None else count, *padded)


def sum_of(data: bytes) -> int:
    """The checksum that a trailer holds."""
    return checksum([memoryview(data)])


def exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fewer where the connection ends."""
    found = bytearray()
    try:
        while len(found) < count and (data := connection.recv(count - len(found))):
            found += data
    except ConnectionResetError:
        pass
    return bytes(found)


# ---------------------------------------------------------------- the source's end


class Reader:
    """A scripted target: it has opened the version, and holds a session."""

    def __init__(
        self, server: HealServer, *, key: HealKey = KEY, chunk_bytes: int = 1 << 20
    ) -> None:
        self.address = HealAddress.parse(server.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self.control = reading_socket(self._context, self.address)
        self.control.connect(self.address.where)
        opening = wire.Open("", key.step, key.lineage, chunk_bytes, 3600.0, b"")
        self.control.send(wire.requests.encode(opening))
        reply = wire.replies.decode(self.control.recv_multipart()[0])
        assert isinstance(reply, wire.ManifestReply)
        self.session = reply.session
        self._open: list[socket.socket] = []

    def connect(self, hello: bytes | None = None) -> socket.socket:
        """A bulk connection that has said hello."""
        connection = socket.create_connection(("127.0.0.1", self.address.bulk_port))
        connection.settimeout(PATIENCE_S)
        self._open.append(connection)
        own = MAGIC + self.address.word.encode() + self.session
        connection.sendall(own if hello is None else hello)
        return connection

    def admitted(self) -> socket.socket:
        """A bulk connection that may ask."""
        connection = self.connect()
        assert exactly(connection, len(MAGIC)) == MAGIC
        return connection

    def hang_up(self) -> None:
        """End the control connection."""
        self.control.close(linger=0)
        self._context.term()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            connection.close()
        self.hang_up()


@pytest.fixture
def server(make_server: MakeServer) -> HealServer:
    """It serves `state(8)`."""
    made = make_server()
    made.publish(KEY, state(8))
    return made


def assert_it_serves_on(server: HealServer) -> None:
    back, _ = fetch([server.address], KEY, deadline=soon(), same_host=False)
    assert same(back, state(8))


def test_a_session_gets_what_it_asks_for(server: HealServer) -> None:
    with Reader(server) as reader, reader.admitted() as connection:
        connection.sendall(ask(1, 0, 9) + ask(0, 0, 9))
        for index in (1, 0):
            data = exactly(connection, 1 << 20)
            number, valid, total = TRAILER.unpack(exactly(connection, TRAILER.size))
            assert (number, valid, total) == (index, 1, sum_of(data))


@pytest.mark.parametrize(
    "forge",
    [
        lambda word, session: b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + bytes(64),
        lambda word, session: MAGIC + b"0" * 16 + session,
        lambda word, session: MAGIC + word + b"0" * 16,
        lambda word, session: MAGIC + word + bytes(16),
        lambda word, session: struct.pack("<6sH", b"FTHEAL", 99) + word + session,
        lambda word, session: os.urandom(40),
    ],
    ids=["http", "word", "session", "no session", "version", "random"],
)
def test_a_stranger_is_turned_away(
    server: HealServer, forge: Callable[[bytes, bytes], bytes]
) -> None:
    with Reader(server) as reader:
        connection = reader.connect(forge(reader.address.word.encode(), reader.session))
        assert exactly(connection, 1) == b""
    assert_it_serves_on(server)


def test_strangers_that_say_nothing_make_way(server: HealServer) -> None:
    with Reader(server) as reader:
        first = reader.connect(b"")
        for _ in range(MOST_STRANGERS):
            reader.connect(b"")
        assert exactly(first, 1) == b""
        reader.admitted()
    assert_it_serves_on(server)


@pytest.mark.parametrize(
    "frame",
    [ask(999), ask(2**32 - 1), ask(0, count=65), ask(0, count=2**32 - 1), ask(0, count=1)],
    ids=["no such chunk", "largest", "too many ranges", "most ranges", "half a range"],
)
def test_what_is_no_request_ends_its_connection(server: HealServer, frame: bytes) -> None:
    with Reader(server) as reader:
        connection = reader.admitted()
        connection.sendall(frame)
        assert exactly(connection, 1) == b""
        reader.admitted()  # the session is as good as before
    assert_it_serves_on(server)


def test_a_target_that_ends_in_a_request_or_in_a_chunk(server: HealServer) -> None:
    with Reader(server, chunk_bytes=8 << 20) as reader:
        with reader.admitted() as half:
            half.sendall(ask(0)[:100])
        with reader.admitted() as unread:
            unread.sendall(ask(0) * 4)
            assert exactly(unread, 10)
    assert_it_serves_on(server)


def test_a_session_has_so_many_connections(server: HealServer) -> None:
    """So readers limit connections. The oldest makes way: its target may have lost it."""
    with Reader(server) as reader:
        first, *others = [reader.admitted() for _ in range(bulk.STREAMS + 1)]
        assert exactly(first, 1) == b""
        for connection in others:
            connection.sendall(ask(0))
            assert len(exactly(connection, 1 << 20)) == 1 << 20


def test_a_session_ends_with_its_control_connection(server: HealServer) -> None:
    with Reader(server) as reader:
        connection = reader.admitted()
        reader.hang_up()
        assert exactly(connection, 1) == b""


def test_a_server_that_closes_ends_all_connections(server: HealServer) -> None:
    with Reader(server) as reader:
        stranger, connection = reader.connect(b""), reader.admitted()
        server.close()
        assert exactly(stranger, 1) == exactly(connection, 1) == b""


def test_memory_that_changes_while_it_is_sent_is_void(make_server: MakeServer) -> None:
    """The chunk is larger than what the kernel takes, so that it is on its way until it is read."""
    numel = 64 << 20
    tree = {"w": torch.ones(numel, dtype=torch.uint8)}
    server = make_server()
    server.publish(KEY, tree, copy=False)
    with Reader(server, chunk_bytes=numel) as reader:
        connection = reader.admitted()
        connection.sendall(ask(0, 0, 1))
        assert exactly(connection, 1) == b"\1"
        server.freeze()
        tree["w"].fill_(2)
        exactly(connection, numel - 1)
        assert TRAILER.unpack(exactly(connection, TRAILER.size)) == (0, 0, 0)
        connection.sendall(ask(0, 0, 1))
        data = exactly(connection, numel)
        _, valid, total = TRAILER.unpack(exactly(connection, TRAILER.size))
        assert valid == 1
        assert data == b"\1" * numel
        assert total == sum_of(data)


def test_memory_of_the_next_snapshot_is_void_for_readers_of_the_last(
    make_server: MakeServer,
) -> None:
    numel = 64 << 20
    server = make_server()
    server.publish(KEY, {"w": torch.ones(numel, dtype=torch.uint8)})
    with Reader(server, chunk_bytes=numel) as reader:
        connection = reader.admitted()
        connection.sendall(ask(0, 0, 1))
        assert exactly(connection, 1) == b"\1"
        server.publish(HealKey(8, "next"), {"w": torch.zeros(numel, dtype=torch.uint8)})
        rest = exactly(connection, numel - 1 + TRAILER.size)
        whole = len(rest) == numel - 1 + TRAILER.size  # it may hang up before
        assert not whole or TRAILER.unpack(rest[-TRAILER.size :]) == (0, 0, 0)


def test_bytes_that_were_dropped_are_not_served(make_server: MakeServer) -> None:
    """The reader has said that it lacks nothing, and asks nonetheless."""
    server = make_server()
    server.publish(KEY, state(8), copy=False, expected_targets=0)
    with Reader(server) as reader, Reader(server) as other:
        connection = reader.admitted()
        connection.sendall(ask(0))  # lacks: nothing
        exactly(connection, (1 << 20) + TRAILER.size)
        asking = other.admitted()
        asking.sendall(ask(0, 0, 1))
        exactly(asking, (1 << 20) + TRAILER.size)
        server.freeze()  # the other one lacks the first chunk, still
        connection.sendall(ask(7))
        assert exactly(connection, 1) == b""
        reply = wire.replies.decode(reader.control.recv())
        assert isinstance(reply, wire.Gone)


# ---------------------------------------------------------------- the target's end


TREE = {"w": torch.arange(3_000_000, dtype=torch.int32), "small": torch.ones(10)}
MANIFEST, TENSORS = pack(TREE)
LAYOUT = Manifest(MANIFEST).layout
CHUNKS = LAYOUT.chunks(4 << 20)


def content(index: int) -> bytes:
    """The bytes of a chunk of TREE."""
    small = TENSORS[1].numpy().tobytes()
    pool = small.ljust(LAYOUT.segment_bytes[0], b"\0")
    chunk = CHUNKS[index]
    return (pool + TENSORS[0].numpy().tobytes())[chunk.start : chunk.start + chunk.nbytes]


def sealed(index: int, data: bytes | None = None, *, valid: int = 1) -> bytes:
    """A chunk as a source sends it; `data`: what was sent in its place."""
    true = content(index)
    total = sum_of(true)
    return (true if data is None else data) + TRAILER.pack(index, valid, total)


class Target:
    """A stream to a scripted source, and its reports."""

    def __init__(self, port: int) -> None:
        self.memory: Future[Receiver] = Future()
        self.inbox = Inbox()
        self.stream = BulkStream(
            ("127.0.0.1", port), WORD, b"s" * 16, CHUNKS, self.memory, self.inbox
        )
        self._reports: list[BulkReport] = []

    def next(self) -> BulkReport:
        """The next report; parts of chunks are left out, and memory is given when it is needed."""
        while (report := self.any()).news in (News.FIRST, News.MOVING):
            if report.news is News.FIRST:
                self.memory.set_result(Receiver(Manifest(MANIFEST), None, 4 << 20))
        return report

    def any(self) -> BulkReport:
        """The next report."""
        while not self._reports:
            zmq.select([self.inbox.fileno()], [], [], timeout=PATIENCE_S)
            self._reports = self.inbox.take()
        return self._reports.pop(0)

    def close(self) -> None:
        self.memory.cancel()
        self.stream.end()
        self.stream.join()
        self.inbox.close()


@contextmanager
def scripted(script: Callable[[socket.socket], None], *, enter: bool = True) -> Iterator[Target]:
    """A target of a source that runs `script` once it has admitted it (`enter`)."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                hello = exactly(connection, len(MAGIC) + 32)
                assert hello == MAGIC + WORD.encode() + b"s" * 16
                if enter:
                    connection.sendall(MAGIC)
                script(connection)

        target = Target(listener.getsockname()[1])
        done = pool.submit(serve)
        try:
            if enter:
                assert target.next().news is News.READY
            yield target
        finally:
            target.close()
        done.result(PATIENCE_S)


def test_chunks_arrive_in_place() -> None:
    def script(connection: socket.socket) -> None:
        assert exactly(connection, 3 * ASK.size) == b"".join(ask(i, 0, 3) for i in (2, 0, 1))
        connection.sendall(b"".join(sealed(index) for index in (2, 0, 1)))
        exactly(connection, 1)

    with scripted(script) as target:
        for index in (2, 0, 1):
            target.stream.ask(index, (0, 3))
        assert [target.next().chunk for _ in range(3)] == [2, 0, 1]
        assert same(target.memory.result().finish(allow_objects=False), TREE)


def test_short_reads() -> None:
    """Parts of any size, some smaller than a trailer, with pauses that a target looks into."""
    told = threading.Event()

    def script(connection: socket.socket) -> None:
        exactly(connection, ASK.size)
        data = sealed(0)
        for start, stop in ((0, 1), (1, 5), (5, 640), (640, 641)):
            connection.sendall(data[start:stop])
        assert told.wait(PATIENCE_S)
        connection.sendall(data[641:-7])
        connection.sendall(data[-7:])
        exactly(connection, 1)

    with scripted(script) as target:
        target.stream.ask(0, ())
        assert target.any().news is News.FIRST
        target.memory.set_result(Receiver(Manifest(MANIFEST), None, 4 << 20))
        report = target.any()
        assert report.news is News.MOVING, "a pause within a chunk is no silence"
        told.set()
        assert target.next().news is News.RECEIVED


def test_memory_is_asked_for_when_the_first_byte_is_here() -> None:
    go_on = threading.Event()

    def script(connection: socket.socket) -> None:
        exactly(connection, ASK.size)
        assert go_on.wait(PATIENCE_S)
        connection.sendall(sealed(1)[:1])
        exactly(connection, 1)

    with scripted(script) as target:
        target.stream.ask(1, ())
        assert target.inbox.take() == []
        go_on.set()
        assert target.any().news is News.FIRST


@pytest.mark.parametrize(
    ("answer", "news"),
    [
        (sealed(1, b"\0" + content(1)[1:]), News.CORRUPTED),
        (sealed(1, content(1)[:-1] + bytes([content(1)[-1] ^ 64])), News.CORRUPTED),
        (content(1) + TRAILER.pack(1, 1, 7), News.CORRUPTED),
        (sealed(1, valid=0), News.VOID),
        (sealed(1, bytes(len(content(1))), valid=0), News.VOID),
        (sealed(1), News.RECEIVED),
    ],
    ids=["first byte", "last bit", "checksum", "void", "void and torn", "good"],
)
def test_what_is_said_of_a_chunk(answer: bytes, news: News) -> None:
    def script(connection: socket.socket) -> None:
        exactly(connection, ASK.size)
        connection.sendall(answer)
        exactly(connection, 1)

    with scripted(script) as target:
        target.stream.ask(1, ())
        report = target.next()
        assert (report.news, report.chunk) == (news, 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed the connection"),
        (sealed(1)[:1000], "closed the connection"),
        (sealed(1)[:-1], "closed the connection"),
        (content(1) + TRAILER.pack(0, 1, sum_of(content(1))), "another chunk"),
    ],
    ids=["at once", "within a chunk", "within a trailer", "an older chunk"],
)
def test_a_source_that_ends_or_lies_is_left(answer: bytes, reason: str) -> None:
    def script(connection: socket.socket) -> None:
        exactly(connection, ASK.size)
        connection.sendall(answer)

    with scripted(script) as target:
        target.stream.ask(1, ())
        report = target.next()
        assert report.news is News.ENDED
        assert reason in report.reason


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1", b"\xff" * 100])
def test_a_port_that_is_no_source(answer: bytes) -> None:
    with scripted(lambda connection: connection.sendall(answer), enter=False) as target:
        assert target.next().news is News.UNREACHABLE


def test_a_stream_ends_at_once_when_it_is_told() -> None:
    """Whatever it waits for: an admission, a request, a chunk's first byte or its last."""
    for sends in (None, b"", b"x"):
        waits = (
            threading.Event()
        )  # for its admission: else it may be told before it has said a word

        def script(
            connection: socket.socket,
            sends: bytes | None = sends,
            waits: threading.Event = waits,
        ) -> None:
            waits.set()
            if sends is not None:
                connection.sendall(MAGIC)
                connection.sendall(sends)
            assert len(exactly(connection, 10 * ASK.size)) % ASK.size == 0

        with scripted(script, enter=False) as target:
            assert waits.wait(PATIENCE_S)
            if sends is not None:
                assert target.next().news is News.READY
                target.stream.ask(0, ())
            if sends:
                assert target.any().news is News.FIRST
                target.memory.cancel()
            target.stream.end()
            last = News.UNREACHABLE if sends is None else News.ENDED
            assert target.next().news is last


def test_a_port_that_refuses() -> None:
    port = free_port()
    target = Target(port)
    assert target.next().news is News.UNREACHABLE
    target.close()


# ---------------------------------------------------------------- both ends


def test_a_bulk_port_behind_a_firewall_is_named(server: HealServer) -> None:
    address = HealAddress.parse(server.address)
    port = free_port()
    blocked = str(HealAddress(address.where, port, address.word))
    with pytest.raises(HealError, match=rf"its port {port} can't be reached \(.*refused"):
        fetch([blocked], KEY, deadline=soon(), same_host=False)


def test_a_bulk_port_that_swallows_what_it_is_told_is_named(
    server: HealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections are made, and confirmed."""
    monkeypatch.setattr(bulk, "CONNECT_S", 0.2)
    address = HealAddress.parse(server.address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        swallows = str(HealAddress(address.where, port, address.word))
        with pytest.raises(
            HealError, match=rf"its port {port} can't be reached \(it does not answer"
        ):
            fetch([swallows], KEY, deadline=soon(), same_host=False)


def test_a_bulk_port_that_admits_and_sends_nothing_is_named(
    server: HealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk is missing, so that no pace tells it from a slow one."""
    monkeypatch.setattr(target_module, "longest_silence_s", lambda left_s: 1.0)
    monkeypatch.setattr(transfer_plan, "FIRST_STALL_S", 0.3)
    address = HealAddress.parse(server.address)
    open_ones: list[socket.socket] = []

    def admit(listener: socket.socket) -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                open_ones.append(connection)
                connection.sendall(MAGIC)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(admit, listener)
        port = listener.getsockname()[1]
        mute = str(HealAddress(address.where, port, address.word))
        try:
            with pytest.raises(HealError, match=rf"nothing came from its port {port} for"):
                fetch([mute], KEY, deadline=soon(), same_host=False)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    for connection in open_ones:
        connection.close()


def test_sessions_end_with_their_fetches(server: HealServer) -> None:
    for _ in range(3):
        assert_it_serves_on(server)
    until(lambda: not [t for t in threading.enumerate() if t.name == "ft-heal-bulk"])
    assert not [t for t in threading.enumerate() if t.name == "ft-heal-stream"]
