"""The target's end of a heal: fetch one version from several sources at once.

A shell around TransferPlan, which holds the policy: this file owns the sockets and the clock. The
calling thread sleeps until a message, the end of a connection, or the plan's next deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ft_core.config import UNNAMED, JobOptions
from ft_core.heal import protocol as wire
from ft_core.heal.format import Manifest
from ft_core.heal.protocol import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Chunk,
    HealDenied,
    HealError,
    HealKey,
    HealProgress,
    HealStats,
)
from ft_core.heal.receive import Receiver, as_memory
from ft_core.heal.transfer_plan import PACE_AFTER_S, TransferPlan
from ft_core.heal.transport import (
    Interrupt,
    host_identity,
    listens,
    longest_silence_s,
    raise_malloc_threshold,
    read_memory,
    reading_socket,
    split_word,
)
from lighthouse.errors import ProtocolError

DEFAULT_CHUNK_BYTES = 1 << 20  # measured: larger frames cost page faults, smaller ones Python
MAX_SOURCES = 1024
_CONNECT_GRACE_S = 5.0  # a source that is not connected for this long is given up
_MAX_FAILED_CONNECTS = 4  # as is one that refuses this many connections in a row
_MESSAGES_A_TURN = 2
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


def fetch(
    sources: Sequence[str],
    key: HealKey,
    *,
    deadline: float,
    into: Any = None,
    options: JobOptions = UNNAMED,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    same_host: bool = True,
    progress: Callable[[HealProgress], None] | None = None,
    interrupt: Interrupt | None = None,
) -> tuple[Any, HealStats]:
    """Fetch the state of version `key`; returns the tree and what the transfer cost. Any thread.

    Args:
        sources: addresses of HealServers, tcp://host:port; duplicates are ignored.
        key: the version. One that is not published yet is waited for.
        deadline: when to give up (`time.monotonic()`).
        into: this rank's own tree, or a function that returns it, called in this thread when the
            first bytes are about to be written. Tensors of equal dtype and shape at the same place are received
            in place and are the leaves of the result; after a HealError their contents are
            undefined. Nothing is written to them after this has returned or raised.
        options: of the job; those of heals are used.
        chunk_bytes: the unit of transfer, 64 KiB to 64 MiB.
        same_host: read a source's memory where it runs on this machine.
        progress: called in this thread at the first answer and after every chunk; an exception
            that it raises ends the fetch.
        interrupt: ends the fetch from another thread.

    Raises HealError, which names every source and its reason (HealDenied if all of them refuse this
    target for good), and ValueError for bad arguments.
    """
    if not sources:
        raise ValueError("sources is empty; a heal needs at least one healthy member's address.")
    if len(sources) > MAX_SOURCES:
        raise ValueError(f"{len(sources)} sources are too many; name at most {MAX_SOURCES}.")
    if type(chunk_bytes) is not int or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes!r}; it must be from 64 KiB to 64 MiB.")
    raise_malloc_threshold()
    run = _Fetch(key, into, deadline, options, chunk_bytes, same_host, progress, interrupt)
    try:
        run.connect(list(dict.fromkeys(sources)))
        return run.run()
    finally:
        run.close()


@dataclass(slots=True)
class _Link:
    """The connection to one source."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    up: bool = False
    up_since: float = 0.0
    down_since: float = 0.0
    failed_connects: int = 0
    ready: bool = False  # it serves our version, and the plan may use it
    served: bool = False  # it was ready once; what a lost connection still delivers is welcome
    direct: bool = False  # read its memory instead of the socket
    pid: int = 0
    addresses: tuple[int, ...] = ()  # of its segments, in its memory
    failure: str = ""  # why it was given up
    refused: bool = False  # for good
    received_bytes: int = 0

    def status(self) -> str:
        """What the error message says of this source."""
        if self.failure:
            return self.failure
        if not self.up:
            return "no connection"
        return f"sent {self.received_bytes} bytes" if self.ready else "not published there yet"


class _Fetch:
    """One call of fetch. Owns a context and two sockets for each source until `close`."""

    def __init__(
        self,
        key: HealKey,
        into: Any,
        deadline: float,
        options: JobOptions,
        chunk_bytes: int,
        same_host: bool,
        progress: Callable[[HealProgress], None] | None,
        interrupt: Interrupt | None,
    ) -> None:
        self._key = key
        self._into = into
        self._deadline = deadline
        self._options = options
        self._chunk_bytes = chunk_bytes
        self._host = host_identity() if same_host else b""
        self._progress = progress
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._interrupt = interrupt
        if interrupt is not None:
            self._poller.register(interrupt.fileno(), zmq.POLLIN)
        self._links: list[_Link] = []
        self._started = time.perf_counter()
        self._plan: TransferPlan | None = None
        self._manifest: Manifest | None = None
        self._receiver: Receiver | None = None
        self._layout_digest = b""
        self._chunks: list[Chunk] = []
        self._total_bytes = 0
        self._done_bytes = 0
        self._direct_bytes = 0
        self._corrupted = 0
        left_s = deadline - time.monotonic()
        self._silence_s = longest_silence_s(left_s, chunk_bytes)

    def connect(self, sources: list[str]) -> None:
        """Begin to connect to all sources. Each is asked for the version once it is connected."""
        now = time.monotonic()
        for address in sources:
            link_socket = reading_socket(
                self._context, address, self._chunk_bytes, self._silence_s
            )
            monitor = link_socket.get_monitor_socket(_MONITORED)
            link = _Link(address, link_socket, monitor, down_since=now)
            self._links.append(link)
            self._poller.register(monitor, zmq.POLLIN)
            self._poller.register(link_socket, zmq.POLLIN)
            try:
                link_socket.connect(split_word(address)[0])
            except zmq.ZMQError as error:
                self._give_up(link, f"not an address that can be connected to ({error})")

    def close(self) -> None:
        """Close everything. Connected sources are told that this reader has finished."""
        for link in self._links:
            link.socket.disable_monitor()
            link.monitor.close(linger=0)
            if link.up and not link.failure:
                try:
                    link.socket.send(wire.requests.encode(wire.Done()), zmq.NOBLOCK)
                except zmq.ZMQError:
                    pass  # the source drops this reader when it expires
            link.socket.close(linger=100 if link.up else 0)
        self._links.clear()
        self._context.term()

    def run(self) -> tuple[Any, HealStats]:
        """Transfer until the tree is complete. Raises HealError."""
        while self._plan is None or not self._plan.finished:
            now = time.monotonic()
            self._check_alive(now)
            self._request(now)
            ready = dict(self._poller.poll(self._wait_ms(now)))
            for link in self._links:
                if link.monitor in ready:
                    self._read_monitor(link)
                if link.socket in ready and not link.failure:
                    self._read(link)
        tree = self._memory().finish(allow_objects=self._options.heal_allow_objects)
        return tree, HealStats(
            bytes=self._done_bytes,
            seconds=time.perf_counter() - self._started,
            source_bytes={link.address: link.received_bytes for link in self._links},
            retries=self._plan.retries,
            corrupted=self._corrupted,
            same_host_bytes=self._direct_bytes,
            failed_sources={link.address: link.failure for link in self._links if link.failure},
        )

    def _wait_ms(self, now: float) -> int:
        times = [self._deadline]
        times += [
            link.down_since + _CONNECT_GRACE_S
            for link in self._links
            if not link.up and not link.failure
        ]
        if self._plan is not None:
            times.append(now + PACE_AFTER_S)
            due = self._plan.next_deadline()
            times += [] if due is None else [due]
        return max(0, int((min(times) - now) * 1000) + 1)

    def _check_alive(self, now: float) -> None:
        for link in self._links:
            if not link.failure and not link.up and now >= link.down_since + _CONNECT_GRACE_S:
                self._give_up(link, f"no connection for {_CONNECT_GRACE_S:g} s")
        if all(link.failure for link in self._links):
            raise self._error("no source is left")
        if now >= self._deadline:
            raise self._error("the deadline passed")
        rest_s = self._plan.hopeless_s(now, self._deadline) if self._plan is not None else 0.0
        if rest_s == math.inf:
            raise self._error("its sources have fallen silent")
        if rest_s:
            left_s = self._deadline - now
            raise self._error(f"too slow, the rest would take {rest_s:.0f} s of {left_s:.0f} s left")
        if self._interrupt is not None and self._interrupt.is_set:
            raise self._error("it was interrupted")

    def _error(self, what: str) -> HealError:
        missing = ""
        if self._plan is not None:
            missing = f" with {self._plan.remaining} of {len(self._chunks)} chunks missing"
        sources = "; ".join(
            f"{split_word(link.address)[0]}: {link.status()}" for link in self._links
        )
        kind = HealDenied if all(link.refused for link in self._links) else HealError
        return kind(f"Could not heal to {self._key}: {what}{missing}. Sources: {sources}.")

    def _give_up(self, link: _Link, reason: str) -> None:
        link.failure = reason
        link.ready = False
        if self._plan is not None:
            self._plan.drop_source(link.address)

    def _read_monitor(self, link: _Link) -> None:
        while True:
            try:
                event = parse_monitor_message(link.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if link.failure:
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.up, link.up_since = True, time.monotonic()
                link.failed_connects = 0
                self._send_open(link)
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnected(link, time.monotonic())
            elif event == zmq.EVENT_CONNECT_RETRIED and not link.up:
                link.failed_connects += 1
                if link.failed_connects >= _MAX_FAILED_CONNECTS:
                    self._give_up(link, "the connection is refused, the process seems to be gone")

    def _on_disconnected(self, link: _Link, now: float) -> None:
        silent = link.up and not link.served and now >= link.up_since + self._silence_s
        link.up = link.ready = False
        link.down_since = now
        if self._plan is not None:
            self._plan.drop_source(link.address)
        if silent:  # the next connection would be made, too
            self._give_up(link, f"connected, and silent for {self._silence_s:.1f} s")

    def _send_open(self, link: _Link) -> None:
        timeout_s = max(0.001, self._deadline - time.monotonic())
        opening = wire.Open(
            self._options.token,
            self._key.step,
            self._key.lineage,
            self._chunk_bytes,
            timeout_s,
            self._host,
        )
        link.socket.send(wire.requests.encode(opening), zmq.NOBLOCK)

    def _request(self, now: float) -> None:
        """Send the plan's requests, one message to each source."""
        if self._plan is None:
            return
        wanted: dict[str, list[int]] = {}
        for address, chunk in self._plan.next_requests(now):
            wanted.setdefault(address, []).append(chunk)
        if not wanted:
            return
        ranges = self._plan.missing(wire.MAX_RANGES)
        missing = tuple(edge for span in ranges for edge in span)
        for link in self._links:
            chunks = wanted.get(link.address, [])
            read = self._read_directly(link, chunks) if link.direct else []
            asked = [chunk for chunk in chunks if chunk not in read]
            for direct, indexes in ((True, read), (False, asked)):
                if indexes:
                    message = wire.Get(direct, tuple(indexes), missing)
                    try:
                        link.socket.send(wire.requests.encode(message), zmq.NOBLOCK)
                    except zmq.Again:  # lost; the plan's rule for stalled sources covers it
                        continue

    def _read_directly(self, link: _Link, chunks: list[int]) -> list[int]:
        """Copy chunks from the source's memory; returns those that the source must confirm."""
        assert self._plan is not None
        read, receiver = [], self._memory()
        for index in chunks:
            chunk = self._chunks[index]
            remote = link.addresses[chunk.segment]
            if not remote or self._plan.is_done(index):
                continue
            slot = receiver.slot(chunk)
            try:
                read_memory(link.pid, remote + chunk.offset, slot.data_ptr(), chunk.nbytes)
            except OSError:  # refused by the kernel, or the process is gone
                link.direct = False
                break
            receiver.place(chunk)
            read.append(index)
        return read

    def _read(self, link: _Link) -> None:
        """Handle what one source sent, and request more after every chunk to keep it busy."""
        for _ in range(_MESSAGES_A_TURN):  # a limit, so that no source starves the others
            try:
                header = link.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(link, wire.replies.decode(header))
            except ProtocolError as error:
                self._give_up(link, f"it sent a malformed message ({error})")
            while link.socket.getsockopt(zmq.RCVMORE):  # parts that no handler has read
                link.socket.recv()
            if link.failure:  # it must not fill our memory
                link.socket.disconnect(split_word(link.address)[0])
                return
            if self._plan is not None:
                if self._plan.finished:
                    return
                self._request(time.monotonic())

    def _handle(self, link: _Link, reply: wire.Reply) -> None:
        if isinstance(reply, wire.ManifestReply):
            self._on_manifest(link, reply)
        elif isinstance(reply, wire.Gone | wire.HealRefused):
            link.refused = isinstance(reply, wire.HealRefused)
            self._give_up(link, f"{'it refused: ' if link.refused else ''}{reply.reason[:500]}")
        elif isinstance(reply, wire.ChunkReply):
            self._check_asked(link, (reply.index,))
            self._on_chunk(link, reply)
        else:
            self._check_asked(link, (*reply.valid, *reply.moved))
            self._on_valid(link, reply)

    def _check_asked(self, link: _Link, indexes: tuple[int, ...]) -> None:
        if not link.served or any(not 0 <= index < len(self._chunks) for index in indexes):
            raise ProtocolError("a chunk that was not asked for")

    def _on_manifest(self, link: _Link, reply: wire.ManifestReply) -> None:
        if not link.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError("a manifest without its bytes")
        data = link.socket.recv()
        if (reply.step, reply.lineage) != (self._key.step, self._key.lineage):
            raise ProtocolError("a manifest of another version")
        if link.ready:
            return
        if self._plan is None:
            manifest = Manifest(data)
            self._manifest = manifest
            self._chunks = manifest.layout.chunks(self._chunk_bytes)
            self._layout_digest = manifest.layout_digest
            self._total_bytes = manifest.layout.total_bytes
            self._plan = TransferPlan(len(self._chunks))
        if reply.layout_digest != self._layout_digest:
            self._give_up(link, "its tensors differ in shape or dtype under the same version")
            return
        link.ready = link.served = True
        link.pid, link.addresses = reply.pid, reply.addresses
        segments = len({chunk.segment for chunk in self._chunks} | {0})
        # A source can't make this process read another one's memory: the process must be the one
        # that this connection has reached.
        where = split_word(link.address)[0]
        link.direct = (
            link.pid > 0
            and len(link.addresses) == segments
            and bool(self._host)
            and listens(link.pid, where)
        )
        self._plan.add_source(link.address, time.monotonic())
        self._report()

    def _memory(self) -> Receiver:
        """Where bytes go: found when the first ones are about to be written. Until then this rank's
        own state is whole, whatever becomes of the sources."""
        if self._receiver is None:
            assert self._manifest is not None
            into = self._into() if callable(self._into) else self._into
            self._receiver = Receiver(self._manifest, into, self._chunk_bytes)
        return self._receiver

    def _on_chunk(self, link: _Link, reply: wire.ChunkReply) -> None:
        assert self._plan is not None
        chunk = self._chunks[reply.index]
        if not link.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError("a chunk without its bytes")
        if self._plan.is_done(reply.index):  # a duplicate: another source was faster
            link.socket.recv(copy=False)
            self._plan.received(link.address, reply.index, time.monotonic())
            return
        receiver = self._memory()
        slot = receiver.slot(chunk)
        size = link.socket.recv_into(as_memory(slot))
        if size == chunk.nbytes and receiver.accept(chunk, slot, reply.checksum):
            self._accept(link, reply.index, chunk)
            return
        self._corrupted += 1
        blamed = self._plan.corrupted(link.address, reply.index, time.monotonic())
        if blamed is not None:
            raise self._error(
                f"chunk {reply.index} came corrupted twice (from {', '.join(blamed)})"
            )

    def _on_valid(self, link: _Link, reply: wire.ValidReply) -> None:
        """The source tells which of the chunks that were read from its memory are valid."""
        assert self._plan is not None
        for index in reply.valid:
            chunk = self._chunks[index]
            if not self._plan.is_done(index):
                self._direct_bytes += chunk.nbytes
            self._accept(link, index, chunk)
        for index in reply.moved:  # its memory changes: from now on through the socket
            link.direct = False
            self._plan.returned(link.address, index, time.monotonic())

    def _accept(self, link: _Link, index: int, chunk: Chunk) -> None:
        assert self._plan is not None
        if self._plan.received(link.address, index, time.monotonic()):
            self._done_bytes += chunk.nbytes
            link.received_bytes += chunk.nbytes
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            ready = sum(link.ready for link in self._links)
            self._progress(HealProgress(self._key, self._done_bytes, self._total_bytes, ready))
