"""The target's end of a heal: fetch one version from several sources at once.

A shell around TransferPlan, which holds the policy: this file owns the sockets and the clock. The
calling thread sleeps until a message, the report of a bulk stream, the end of a connection, or the plan's
next deadline.

A source is in the plan while its memory is read directly, by its name; so is, or instead, each of its bulk streams
while it is admitted. One whose memory can be read in part has one stream besides, for the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ft_core.config import UNNAMED, JobOptions
from ft_core.heal import protocol as wire
from ft_core.heal.bulk import STREAMS, BulkReport, BulkStream, Inbox, News
from ft_core.heal.format import Manifest
from ft_core.heal.protocol import (
    ANY,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Chunk,
    HealDenied,
    HealError,
    HealKey,
    HealProgress,
    HealStats,
    Layout,
)
from ft_core.heal.receive import Lane, Receiver
from ft_core.heal.same_host import SourceMemory, host_identity, listens
from ft_core.heal.transfer_plan import PACE_AFTER_S, TransferPlan
from ft_core.heal.transport import (
    HealAddress,
    Interrupt,
    longest_silence_s,
    reading_socket,
)
from ft_core.process_group.device_memory import synchronize
from lighthouse.config import split_address
from lighthouse.errors import ProtocolError
from lighthouse.waits import Overdue

DEFAULT_CHUNK_BYTES = 16 << 20  # measured: calls are few enough for a busy interpreter
MAX_SOURCES = 1024
_CHUNKS_A_STREAM = 2  # a smaller state is not worth more connections
_CONNECT_GRACE_S = 5.0  # a source that is not connected for this long is given up
_MAX_FAILED_CONNECTS = 4  # as is one that refuses this many connections in a row
_RETRY_S = 0.1
_MAX_RETRY_S = 4.0
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
        sources: `address`es of HealServers; duplicates are ignored.
        key: the version. One that is not published yet is waited for. `NEXT` for an observer, which has
            one source; `progress` tells which version that is.
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
    run = _Fetch(key, into, deadline, options, chunk_bytes, same_host, progress, interrupt)
    try:
        run.connect(list(dict.fromkeys(sources)))
        return run.run()
    finally:
        run.close()


@dataclass(slots=True)
class _Link:
    """The connections to one source."""

    name: str  # as `fetch` was told it
    address: HealAddress
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    up: bool = False  # the control connection
    up_since: float = 0.0
    down_since: float = 0.0
    failed_connects: int = 0
    session: bytes = b""  # it serves our version; empty: not (yet)
    served: bool = False  # it had a session once
    memory: SourceMemory | None = None  # which is read directly
    partly: bool = False  # not all of it can be
    reading: set[int] = field(default_factory=set)  # chunks that were, and are not confirmed yet
    streams: dict[str, BulkStream] = field(default_factory=dict)  # by their names in the plan
    streams_at: float = 0.0  # when to open those that are not there
    retry_s: float = _RETRY_S
    unreachable: int = 0  # attempts in a row that were not admitted
    mute_since: float = 0.0  # when a stream brought its last bytes, or the first one was opened
    failure: str = ""  # why it was given up
    refused: bool = False  # for good
    received_bytes: int = 0

    def status(self) -> str:
        """What the error message says about this source."""
        if self.failure:
            return self.failure
        if not self.up:
            return "no connection"
        return f"sent {self.received_bytes} bytes" if self.session else "not published there yet"


class _Fetch:
    """One call of fetch. Owns the sockets and streams of all sources until `close`."""

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
        self._pace_at = 0.0  # when to look at the pace
        self._options = options
        self._chunk_bytes = chunk_bytes
        self._host = host_identity() if same_host else b""
        self._progress = progress
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._interrupt = interrupt
        if interrupt is not None:
            self._poller.register(interrupt.fileno(), zmq.POLLIN)
        self._inbox = Inbox()
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)
        self._links: list[_Link] = []
        self._streams: list[BulkStream] = []
        self._streams_each = 1
        self._memory: Future[Receiver] = Future()
        self._lane: Lane | None = None  # for what this thread reads itself
        self._lent: list[SourceMemory] = []
        self._started = time.perf_counter()
        self._plan: TransferPlan | None = None
        self._manifest: Manifest | None = None
        self._layout_digest = b""
        self._chunks: list[Chunk] = []
        self._total_bytes = 0
        self._done_bytes = 0
        self._direct_bytes = 0
        self._corrupted = 0
        left_s = deadline - time.monotonic()
        self._silence_s = longest_silence_s(left_s)

    def connect(self, sources: list[str]) -> None:
        """Begin to connect to all sources. Each is asked for the version once it is connected."""
        now = time.monotonic()
        for name in sources:
            address = HealAddress.parse(name)
            link_socket = reading_socket(self._context, address, self._silence_s)
            monitor = link_socket.get_monitor_socket(_MONITORED)
            link = _Link(name, address, link_socket, monitor, down_since=now)
            self._links.append(link)
            self._poller.register(monitor, zmq.POLLIN)
            self._poller.register(link_socket, zmq.POLLIN)
            try:
                link_socket.connect(address.where)
            except zmq.ZMQError as error:
                self._give_up(link, f"not an address that can be connected to ({error})")

    def close(self) -> None:
        """Close everything; nothing is written after it. Connected sources are told that this reader
        has finished."""
        self._memory.cancel()
        for stream in self._streams:
            stream.end()
        for stream in self._streams:
            stream.join()
        self._inbox.close()
        if self._lane is not None:
            self._lane.finish()
        for memory in self._lent:
            memory.close()
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
        overdue = Overdue()
        while self._plan is None or not self._plan.finished:
            self._check_possible()
            now = time.monotonic()
            self._open_streams(now)
            self._request(now)
            due = self._due(now)
            wait_s = max(0.0, overdue.look_at(due) - now)
            ready = dict(self._poller.poll(int(wait_s * 1000) + 1))
            if self._inbox.fileno() in ready:
                for report in self._inbox.take():
                    self._on_report(report)
            for link in self._links:
                if link.monitor in ready:
                    self._read_monitor(link)
                if link.socket in ready and not link.failure:
                    self._read(link)
            now = time.monotonic()
            if overdue.passed(due, now, dry=not ready):
                self._check_alive(now)
                self._end_late(now)
                self._pace_at = now + PACE_AFTER_S
        tree = self._receiver().finish(allow_objects=self._options.heal_allow_objects)
        return tree, HealStats(
            bytes=self._done_bytes,
            seconds=time.perf_counter() - self._started,
            source_bytes={link.name: link.received_bytes for link in self._links},
            retries=self._plan.retries,
            corrupted=self._corrupted,
            same_host_bytes=self._direct_bytes,
            failed_sources={link.name: link.failure for link in self._links if link.failure},
        )

    def _due(self, now: float) -> float:
        """When to look at what has not come."""
        times = [self._deadline]
        times += [
            link.down_since + _CONNECT_GRACE_S
            for link in self._links
            if not link.up and not link.failure
        ]
        if self._plan is None:
            self._pace_at = now + PACE_AFTER_S
        else:
            times.append(self._pace_at)
            due = self._plan.next_deadline()
            times += [] if due is None else [due]
            times += [link.streams_at for link in self._links if self._wants_stream(link)]
        return min(times)

    def _check_possible(self) -> None:
        if all(link.failure for link in self._links):
            raise self._error("no source is left")
        if self._interrupt is not None and self._interrupt.is_set:
            raise self._error("it was interrupted")

    def _check_alive(self, now: float) -> None:
        for link in self._links:
            if not link.failure and not link.up and now >= link.down_since + _CONNECT_GRACE_S:
                self._give_up(link, f"no connection for {_CONNECT_GRACE_S:g} s")
        self._check_possible()
        if now >= self._deadline:
            raise self._error("the deadline passed")
        rest_s = self._plan.hopeless_s(now, self._deadline) if self._plan is not None else 0.0
        if rest_s == math.inf:
            raise self._error("its sources have fallen silent")
        if rest_s:
            left_s = self._deadline - now
            raise self._error(
                f"too slow, the rest would take {rest_s:.0f} s of {left_s:.0f} s left"
            )

    def _error(self, what: str) -> HealError:
        missing = ""
        if self._plan is not None:
            missing = f" with {self._plan.remaining} of {len(self._chunks)} chunks missing"
        sources = "; ".join(f"{link.address.where}: {link.status()}" for link in self._links)
        kind = HealDenied if all(link.refused for link in self._links) else HealError
        return kind(f"Could not heal to {self._key}: {what}{missing}. Sources: {sources}.")

    def _give_up(self, link: _Link, reason: str) -> None:
        link.failure = reason
        self._leave(link)

    def _leave(self, link: _Link) -> None:
        """Receive no more from it. What it owes is handed out when nothing of it can be written."""
        link.session = b""
        for stream in link.streams.values():
            stream.end()
        self._stop_reading(link)

    def _stop_reading(self, link: _Link) -> None:
        """Read its memory no more."""
        link.reading.clear()
        if link.memory is not None and self._plan is not None:
            self._plan.drop_source(link.name)
        link.memory = None

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
        link.up = False
        link.down_since = now
        self._leave(link)
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

    # ------------------------------------------------------------ what is asked of which source

    def _wants_stream(self, link: _Link) -> bool:
        # One at first: a slow source must not hold most of the state.
        most = self._streams_each if link.received_bytes and link.memory is None else 1
        wanted = link.memory is None or link.partly
        return bool(link.session) and wanted and len(link.streams) < most

    def _open_streams(self, now: float) -> None:
        for link in self._links:
            host, _ = split_address(link.address.where)
            where, word = (host, link.address.bulk_port), link.address.word
            while self._wants_stream(link) and now >= link.streams_at:
                try:
                    stream = BulkStream(
                        where, word, link.session, self._chunks, self._memory, self._inbox
                    )
                except (OSError, ValueError) as error:
                    self._give_up(link, f"no bulk connection to {host}:{where[1]} ({error})")
                    break
                names = (f"{link.name} {number}" for number in range(self._streams_each))
                link.streams[next(name for name in names if name not in link.streams)] = stream
                link.mute_since = link.mute_since or now
                self._streams.append(stream)

    def _end_late(self, now: float) -> None:
        """End the connections to sources that hold up the transfer. They are made again."""
        late = self._plan.late(now) if self._plan is not None else []
        for link in self._links:
            for name in link.streams.keys() & late:
                link.streams[name].end()
            if link.name in late:
                self._stop_reading(link)

    def _request(self, now: float) -> None:
        """Ask for what the plan says."""
        if self._plan is None:
            return
        wanted: dict[str, list[int]] = {}
        for name, chunk in self._plan.next_requests(now):
            wanted.setdefault(name, []).append(chunk)
        if not wanted:
            return
        ranges = self._plan.missing(wire.MAX_RANGES)
        missing = tuple(edge for span in ranges for edge in span)
        for link in self._links:
            chunks = wanted.get(link.name, [])
            if link.memory is not None and chunks:
                self._read_directly(link, link.memory, chunks, missing)
            for name, stream in link.streams.items():
                for chunk in wanted.get(name, []):
                    stream.ask(chunk, missing)

    def _read_directly(
        self, link: _Link, memory: SourceMemory, chunks: list[int], missing: tuple[int, ...]
    ) -> None:
        """Read chunks from the source's memory, and ask whether they are valid."""
        receiver = self._receiver()
        if self._lane is None:
            self._lane = receiver.lane()
        try:
            for index in chunks:
                memory.read(receiver.extents(self._chunks[index]), self._lane)
            self._lane.finish()
            link.socket.send(
                wire.requests.encode(wire.Confirm(tuple(chunks), missing)), zmq.NOBLOCK
            )
            link.reading.update(chunks)
        except (OSError, zmq.Again):  # refused by the kernel, or the process is gone
            self._lane.finish()  # no copy comes later than what is sent instead
            self._stop_reading(link)

    # ------------------------------------------------------------ what comes

    def _on_report(self, report: BulkReport) -> None:
        assert self._plan is not None
        link, name = next(
            (link, name)
            for link in self._links
            for name, stream in link.streams.items()
            if stream is report.stream
        )
        now, index = time.monotonic(), report.chunk
        if report.news not in (News.READY, News.UNREACHABLE, News.ENDED):
            link.mute_since = now
        match report.news:
            case News.READY if link.session:
                link.unreachable = 0
                self._plan.add_source(name, now, of=link.name)
                self._report()
            case News.FIRST:
                self._receiver()  # may take long, and all streams wait for it
                for each in self._links:
                    for waiting in each.streams:
                        self._plan.progress(waiting, time.monotonic())
            case News.MOVING:
                self._plan.progress(name, now, report.part)
            case News.RECEIVED:
                link.retry_s = _RETRY_S
                self._accept(link, name, index)
            case News.CORRUPTED:
                self._corrupted += 1
                blamed = self._plan.corrupted(name, index, now)
                if blamed is not None:
                    names = ", ".join(HealAddress.parse(each).where for each in blamed)
                    raise self._error(f"chunk {index} came corrupted twice (from {names})")
            case News.VOID:
                self._plan.returned(name, index, now)
            case News.UNREACHABLE | News.ENDED:
                self._on_stream_end(link, name, report, now)

    def _on_stream_end(self, link: _Link, name: str, report: BulkReport, now: float) -> None:
        assert self._plan is not None
        del link.streams[name]
        self._streams.remove(report.stream)
        report.stream.join()
        self._plan.drop_source(name)
        link.streams_at = now + link.retry_s
        link.retry_s = min(_MAX_RETRY_S, 2 * link.retry_s)
        if link.failure:
            return
        mute_s = now - link.mute_since
        port = link.address.bulk_port
        if report.news is News.UNREACHABLE:
            link.unreachable += 1
            if link.unreachable >= _MAX_FAILED_CONNECTS or mute_s >= self._silence_s:
                self._give_up(link, f"its port {port} can't be reached ({report.reason})")
        elif mute_s >= self._silence_s:
            self._give_up(link, f"nothing came from its port {port} for {mute_s:.1f} s")

    def _read(self, link: _Link) -> None:
        """Handle what one source sent."""
        while not link.failure:
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
        link.socket.disconnect(link.address.where)  # it must not fill our memory

    def _handle(self, link: _Link, reply: wire.Reply) -> None:
        if isinstance(reply, wire.ManifestReply):
            self._on_manifest(link, reply)
        elif isinstance(reply, wire.Gone | wire.HealRefused):
            link.refused = isinstance(reply, wire.HealRefused)
            self._give_up(link, f"{'it refused: ' if link.refused else ''}{reply.reason[:500]}")
        else:
            self._on_valid(link, reply)

    def _on_manifest(self, link: _Link, reply: wire.ManifestReply) -> None:
        if not link.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError("a manifest without its bytes")
        data = link.socket.recv()
        if self._key.lineage == ANY:
            self._key = HealKey(reply.step, reply.lineage)
        if (reply.step, reply.lineage) != (self._key.step, self._key.lineage):
            raise ProtocolError("a manifest of another version")
        if link.session:
            return
        now = time.monotonic()
        if self._plan is None:
            manifest = Manifest(data)
            self._manifest = manifest
            self._chunks = manifest.layout.chunks(self._chunk_bytes)
            self._layout_digest = manifest.layout_digest
            self._total_bytes = manifest.layout.total_bytes
            self._plan = TransferPlan(len(self._chunks), first=1, began=now)
            self._streams_each = min(STREAMS, max(1, len(self._chunks) // _CHUNKS_A_STREAM))
        if reply.layout_digest != self._layout_digest:
            self._give_up(link, "its tensors differ in shape or dtype under the same version")
            return
        assert self._manifest is not None
        link.session, link.served, link.streams_at = reply.session, True, now
        self._read_its_memory(link, reply, self._manifest.layout, now)
        self._report()

    def _read_its_memory(
        self, link: _Link, reply: wire.ManifestReply, layout: Layout, now: float
    ) -> None:
        """Read the source's memory from now on, as far as that is possible."""
        assert self._plan is not None
        # A source can't make this process read another one's memory: the process must be the one
        # that this connection has reached.
        if (
            reply.pid <= 0
            or len(reply.addresses) != len(layout.segment_bytes)
            or not self._host
            or not listens(reply.pid, link.address.where)
        ):
            return
        memory = SourceMemory(reply.pid, reply.addresses, reply.blocks, layout)
        unable = {
            index
            for index, chunk in enumerate(self._chunks if memory.out_of_reach else ())
            if any(each.segment in memory.out_of_reach for each in layout.extents(chunk))
        }
        if len(unable) == len(self._chunks):
            return
        link.memory, link.partly = memory, bool(unable)
        self._lent.append(memory)
        self._plan.add_source(link.name, now, of=link.name, unable=unable)

    def _receiver(self) -> Receiver:
        """Where bytes go: found when the first ones are about to be written. Until then this rank's
        own state is whole, whatever becomes of the sources."""
        if not self._memory.done():
            assert self._manifest is not None
            if callable(self._into):
                into = self._into()
            else:
                into = self._into
                synchronize(into)
            self._memory.set_result(Receiver(self._manifest, into, self._chunk_bytes))
        return self._memory.result()

    def _on_valid(self, link: _Link, reply: wire.ValidReply) -> None:
        """The source tells which of the chunks that were read from its memory are valid."""
        for index in link.reading.intersection(reply.valid):
            link.reading.remove(index)
            self._direct_bytes += self._chunks[index].nbytes
            self._accept(link, link.name, index)
        if link.reading.intersection(reply.moved):  # its memory changes: over a stream from now on
            self._stop_reading(link)

    def _accept(self, link: _Link, name: str, index: int) -> None:
        assert self._plan is not None
        if self._plan.received(name, index, time.monotonic()):
            self._done_bytes += self._chunks[index].nbytes
            link.received_bytes += self._chunks[index].nbytes
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            ready = sum(bool(link.session) for link in self._links)
            self._progress(HealProgress(self._key, self._done_bytes, self._total_bytes, ready))
