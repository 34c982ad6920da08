"""The bytes of a heal over plain TCP: straight from the source's tensors into the target's.

    target -> source    hello: magic and version, the address's word, the session    once
    source -> target    the same magic: it is admitted                               once
    target -> source    a chunk's index, and ranges of all that the target lacks     some chunks ahead
    source -> target    the chunk's bytes, then index, valid, checksum               in the order asked

The trailer comes behind the bytes. So a source sends memory that its training thread may change at any
time, without a lock or a copy, and tells afterwards whether it has changed: `valid` is 0, and the target
asks again. A source that has lost the version hangs up; its control connection tells why.

A chunk is moved by one call and summed by another, since a training thread that holds the GIL delays each call by
up to 5 ms. Smaller pieces, each summed at once, cost more: bytes are as slow to read right after the
kernel's copy as they are later.

A target opens `STREAMS` connections to a source: while one end of one is busy with a sum, the others move bytes.

A stranger is turned away: it has to present the word and a session within `HELLO_S`, and the oldest of
more than `MOST_STRANGERS` makes way. So does the oldest of more than `STREAMS` connections of one session.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from ft_core.heal.digests import checksum
from ft_core.heal.protocol import MAX_RANGES, SESSION_BYTES, VERSION, Chunk
from ft_core.heal.receive import Lane, Receiver
from ft_core.heal.snapshot import Reading
from lighthouse.config import MOST_STRANGERS
from lighthouse.own_address import resolve

_log = logging.getLogger(__name__)

STREAMS = 4
HELLO_S = 5.0
CONNECT_S = 2.0
"""How long a target waits for a connection, and then for its admission."""
PROGRESS_S = 0.25
"""A target checks a chunk's progress at least this often: a slow link is not a silent one."""
_UNCONFIRMED_MS = 30_000
"""A connection ends if the other machine acknowledges nothing of what is sent to it for this long."""
_OUT_OF_DESCRIPTORS_S = 0.1
_WORD_BYTES = 16
_MAGIC = struct.pack("<6sH", b"FTHEAL", VERSION)
_HELLO_BYTES = len(_MAGIC) + _WORD_BYTES + SESSION_BYTES
_ASK = struct.Struct(f"<II{2 * MAX_RANGES}I")
_TRAILER = struct.Struct("<IIQ")


def _hello(word: str, session: bytes) -> bytes:
    return _MAGIC + word.encode()[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0") + session


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `parts` after `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _limit_reads(connection: socket.socket, seconds: float) -> None:
    """A read returns what it has after this time; 0: it waits for all."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _prepare(connection: socket.socket, reads_s: float) -> None:
    """Blocking calls, which end if the other machine is gone."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS)
    _limit_reads(connection, reads_s)


# ---------------------------------------------------------------- the source's end


class BulkSession(Protocol):
    """What a source serves to one target. Its methods are for the connection's thread."""

    def begin(self, index: int, missing: tuple[int, ...]) -> Reading | None:
        """The chunk to send; None: hang up. `missing`: [lo, hi, ...) of what the target lacks."""

    def end(self, reading: Reading, total: int) -> bool:
        """It is sent, and this is its checksum. False: its memory has changed meanwhile."""


class BulkServer:
    """Listens, and serves each connection in a thread of its own. Any thread may call its methods.

    Args:
        host: the address to bind.
        word: what a connection must present.
        find: the session of these bytes, or None; called in the connection's thread.

    Raises OSError or ValueError if it can't listen.
    """

    def __init__(self, host: str, word: str, find: Callable[[bytes], BulkSession | None]) -> None:
        self._word, self._find = word, find
        family, _, _, _, where = resolve(host.strip("[]"), 0)[0]
        self._listener = socket.create_server(where, family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards the fields up to the blank line
        self._closed = False
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._served: dict[socket.socket, bytes] = {}  # their sessions; the oldest first
        self._threads: set[threading.Thread] = set()

        self._accepting = threading.Thread(target=self._accept, name="ft-heal-accept", daemon=True)
        self._accepting.start()

    def keep(self, sessions: Collection[bytes]) -> None:
        """Hang up on all other sessions: their readers have gone."""
        with self._lock:
            for connection, session in self._served.items():
                if session not in sessions:
                    _shut(connection)

    def close(self) -> None:
        """End all connections and threads. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in (*self._strangers, *self._served):
                _shut(connection)
            threads = [self._accepting, *self._threads]
        _shut(self._listener)
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                with self._lock:
                    if self._closed:
                        return
                    self._make_room(0)  # most likely no descriptors are left
                time.sleep(_OUT_OF_DESCRIPTORS_S)
                continue
            thread = threading.Thread(
                target=self._run, args=(connection,), name="ft-heal-bulk", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._make_room(MOST_STRANGERS - 1)
                self._strangers[connection] = None
                self._threads.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # no threads are left
                    del self._strangers[connection]
                    self._threads.discard(thread)
                    connection.close()

    def _make_room(self, most: int) -> None:
        """`_lock` is held."""
        for connection in list(self._strangers)[: max(0, len(self._strangers) - most)]:
            _shut(connection)

    def _run(self, connection: socket.socket) -> None:
        """A connection's thread."""
        try:
            session = self._admit(connection)
            if session is not None:
                connection.sendall(_MAGIC)
                while _answer(connection, session):
                    pass
        except OSError:
            pass  # the target has gone, or this connection was ended here
        except Exception:  # the thread's outer edge: one connection's failure affects no other
            _log.exception("A bulk connection failed; its target will use other sources.")
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._served.pop(connection, None)
                self._threads.discard(threading.current_thread())
                connection.close()

    def _admit(self, connection: socket.socket) -> BulkSession | None:
        _prepare(connection, HELLO_S)
        hello = connection.recv(_HELLO_BYTES, socket.MSG_WAITALL)
        key = hello[-SESSION_BYTES:]
        if not hmac.compare_digest(hello, _hello(self._word, key)):
            return None
        session = self._find(key)
        if session is None:
            return None
        _limit_reads(connection, 0)
        with self._lock:
            if self._closed:
                return None
            before = [each for each, its in self._served.items() if its == key]
            for each in before[: max(0, len(before) + 1 - STREAMS)]:
                del self._served[each]
                _shut(each)
            self._strangers.pop(connection, None)
            self._served[connection] = key
        return session


def _answer(connection: socket.socket, session: BulkSession) -> bool:
    """Send the next chunk that is asked for. False: hang up."""
    frame = connection.recv(_ASK.size, socket.MSG_WAITALL)
    if len(frame) < _ASK.size:
        return False
    index, count, *edges = _ASK.unpack(frame)
    if count > len(edges) or count % 2:
        return False
    reading = session.begin(index, tuple(edges[:count]))
    if reading is None:
        return False
    _send(connection, reading.parts)
    total = checksum(reading.parts) if reading.total is None else reading.total
    valid = session.end(reading, total)
    connection.sendall(_TRAILER.pack(index, valid, total if valid else 0))
    return True


def _send(connection: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        parts = _rest(parts, connection.sendmsg(parts))


# ---------------------------------------------------------------- the target's end


class News(enum.Enum):
    """What a stream reports."""

    READY = "it is admitted, and may be asked"
    FIRST = "the first bytes of a chunk are here, and memory is needed"
    MOVING = "a part of a chunk has come"
    RECEIVED = "a chunk has come, and its checksum is right"
    CORRUPTED = "a chunk has come, and its checksum is wrong"
    VOID = "a chunk's memory has changed while it was sent"
    UNREACHABLE = "no connection could be made, or it was not admitted; the last report"
    ENDED = "the connection has ended, nothing is written any more; the last report"


@dataclass(frozen=True, slots=True)
class BulkReport:
    """From a stream's thread to the fetching thread."""

    stream: BulkStream
    news: News
    chunk: int = -1
    reason: str = ""
    part: float = 0.0
    """MOVING: how much of the chunk has come, of 1."""


class Inbox:
    """Reports of all streams of one fetch. `fileno` is readable when there are some."""

    def __init__(self) -> None:
        self._reports: deque[BulkReport] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor to poll."""
        return self._fd

    def put(self, report: BulkReport) -> None:
        """Any thread."""
        self._reports.append(report)
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[BulkReport]:
        """All reports so far. The fetching thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def close(self) -> None:
        """When all streams have ended."""
        os.close(self._fd)


class BulkStream:
    """One connection to one source: a thread receives what is asked for, in that order.

    Args:
        where: host and bulk port of the source.
        word: of its address.
        session: from its manifest.
        chunks: of the state.
        memory: where they go; asked for when the first bytes are here.
        inbox: gets its reports.

    The fetching thread makes it and calls its methods. Raises OSError or ValueError if there is no such
    host.
    """

    def __init__(
        self,
        where: tuple[str, int],
        word: str,
        session: bytes,
        chunks: Sequence[Chunk],
        memory: Future[Receiver],
        inbox: Inbox,
    ) -> None:
        self._hello = _hello(word, session)
        self._chunks, self._memory, self._inbox = chunks, memory, inbox
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._receiver: Receiver | None = None
        self._lane: Lane | None = None
        self._trailer = bytearray(_TRAILER.size)
        self._told_at = 0.0  # when a report was made
        family, kind, proto, _, address = resolve(*where)[0]
        self._socket = socket.socket(family, kind, proto)
        self._socket.setblocking(False)  # so that `end` finds a connection, and ends it
        try:
            self._refused = self._socket.connect_ex(address)
            self._thread = threading.Thread(target=self._run, name="ft-heal-stream", daemon=True)
            self._thread.start()
        except BaseException:
            self._socket.close()
            raise

    def ask(self, chunk: int, missing: tuple[int, ...]) -> None:
        """Request a chunk. Does not block: few requests are on their way."""
        self._asked.put(chunk)
        padded = (*missing, *([0] * (2 * MAX_RANGES - len(missing))))
        with contextlib.suppress(OSError):  # the thread sees the end, and reports it
            self._socket.sendall(_ASK.pack(chunk, len(missing), *padded))

    def end(self) -> None:
        """End the connection; the last report follows at once. Idempotent."""
        _shut(self._socket)
        self._asked.put(None)

    def join(self) -> None:
        """Wait until nothing more is written. After `end` or the last report, and with `memory` set or
        cancelled."""
        self._thread.join()
        self._socket.close()

    def _tell(self, news: News, chunk: int = -1, reason: str = "", part: float = 0.0) -> None:
        self._told_at = time.monotonic()
        self._inbox.put(BulkReport(self, news, chunk, reason, part))

    def _run(self) -> None:
        last, reason = News.UNREACHABLE, ""
        try:
            self._connect()
            self._enter()
            last = News.ENDED
            self._tell(News.READY)
            while (chunk := self._asked.get()) is not None:
                self._receive(chunk)
        except OSError as error:
            reason = error.strerror or str(error)
        except CancelledError:
            reason = "the fetch is over"
        except Exception as error:  # the thread's outer edge: no memory for staging, for example
            _log.debug("A bulk stream failed", exc_info=True)
            reason = str(error) or type(error).__name__
        finally:
            _shut(self._socket)  # `ask` may be in it
            self._tell(last, reason=reason)

    def _connect(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(CONNECT_S * 1000):
            raise TimeoutError(f"no answer within {CONNECT_S:g} s")
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._refused
        if code and code != errno.EINPROGRESS:
            raise OSError(code, os.strerror(code))
        _prepare(self._socket, PROGRESS_S)

    def _enter(self) -> None:
        """Present this target, and wait until it is admitted."""
        self._socket.sendall(self._hello)
        answer = bytearray(len(_MAGIC))
        self._fill([memoryview(answer)], give_up=time.monotonic() + CONNECT_S)
        if answer != _MAGIC:
            raise ConnectionError("it is no bulk port of this version")

    def _fill(self, parts: list[memoryview], *, give_up: float | None = None) -> None:
        """Receive into all of `parts`. The plan limits a silence: see `end`."""
        whole = sum(map(len, parts))
        while parts:
            try:
                count = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # nothing came for PROGRESS_S
                if give_up is not None and time.monotonic() >= give_up:
                    raise TimeoutError("it does not answer") from None
                continue
            if count == 0:
                raise ConnectionError("it closed the connection")
            parts = _rest(parts, count)
            if give_up is None and time.monotonic() >= self._told_at + PROGRESS_S:
                self._tell(News.MOVING, part=1.0 - sum(map(len, parts)) / whole)

    def _receive(self, index: int) -> None:
        if self._receiver is None or self._lane is None:
            if not self._memory.done():
                self._await_bytes()
                self._tell(News.FIRST)
            self._receiver = self._memory.result()
            self._lane = self._receiver.lane()
        lane, extents = self._lane, self._receiver.extents(self._chunks[index])
        parts = [part.numpy().data for part in lane.parts(extents)]
        self._fill(parts)
        summed = checksum(parts)  # while the source sums, too
        self._fill([memoryview(self._trailer)])
        sent, valid, total = _TRAILER.unpack(self._trailer)
        if sent != index:
            raise ConnectionError("it sent another chunk than the one that was asked for")
        if not valid:
            self._tell(News.VOID, index)
        elif summed != total:
            self._tell(News.CORRUPTED, index)
        else:
            lane.place()
            self._tell(News.RECEIVED, index)

    def _await_bytes(self) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):
                if not self._socket.recv(1, socket.MSG_PEEK):
                    raise ConnectionError("it closed the connection")
                return
