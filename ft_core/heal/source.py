"""The source's end of a heal: it serves one published version.

The training thread publishes, freezes and retires versions. The server thread owns a ROUTER socket and
answers readers there; the bytes go over a `BulkServer`, in a thread for each reader. They share the fields
that `HealServer._lock` guards; a byte on a socket pair wakes the server thread after each change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from ft_core.config import UNNAMED, JobOptions
from ft_core.heal import protocol as wire
from ft_core.heal.bulk import BulkServer
from ft_core.heal.protocol import (
    ANY,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    SESSION_BYTES,
    Chunk,
    HealKey,
    ServerStats,
)
from ft_core.heal.same_host import host_identity
from ft_core.heal.snapshot import Arena, Outlet, Publication, Reading
from ft_core.heal.transport import QUEUED_REPLIES, HealAddress, serving_endpoint
from lighthouse.errors import ProtocolError
from lighthouse.wire.messages import Peer

_log = logging.getLogger(__name__)
_MAX_RETIRED = 64  # keys remembered, so that a late reader is told "gone" instead of left waiting
_MAX_HOLD_S = 24 * 3600.0
_DEVICE_POLL_S = 0.005
_REPUBLISH_GRACE_S = 2.0  # a reader of a retired version may be early for its next publication


@dataclass(slots=True)
class Reader:
    """One target's connection. Times are `time.monotonic()` seconds, given from outside."""

    key: HealKey
    chunk_bytes: int
    opened: float
    expires: float
    same_host: bool
    publication: Publication | None = None  # None: it waits for one
    chunks: list[Chunk] = field(default_factory=list)
    missing: tuple[int, ...] | None = None  # [lo, hi, lo, hi, ...); None: not reported yet
    session: bytes = b""  # what its bulk connection presents
    addresses: tuple[int, ...] = ()  # of the segments, if it may read this process's memory
    lost: bool = False  # it wants bytes that were dropped

    def missing_segments(self) -> set[int]:
        """Segments of which this reader still lacks something."""
        assert self.publication is not None
        spans = (0, len(self.chunks)) if self.missing is None else self.missing
        return {
            extent.segment
            for lo, hi in zip(spans[::2], spans[1::2], strict=True)
            for chunk in self.chunks[lo:hi]
            for extent in self.publication.layout.extents(chunk)
        }

    def next_deadline(self, retired: Mapping[HealKey, str]) -> float:
        """When to review this reader even if no message arrives."""
        if self.publication is None and self.key in retired:
            return min(self.expires, self.opened + _REPUBLISH_GRACE_S)
        return self.expires

    def gone_reason(
        self, current: Publication | None, retired: Mapping[HealKey, str], now: float
    ) -> str:
        """Why this reader cannot be served (any more), or an empty string."""
        if self.publication is not None:
            if self.publication is current:
                return f"{self.key} is gone: the source trained on" if self.lost else ""
        elif self.key.lineage == ANY or (current is not None and self.key == current.key):
            return ""
        elif current is None or current.key.step <= self.key.step:
            # It may still be published, or published again.
            if self.key not in retired or now < self.opened + _REPUBLISH_GRACE_S:
                return ""
        reason = retired.get(self.key)
        if reason is None:
            reason = f"the source is at {current.key}" if current is not None else "it was replaced"
        return f"{self.key} is gone: {reason}"


class _Session:
    """What one reader's bulk connection may have. In that connection's thread."""

    def __init__(self, server: HealServer, reader: Reader, publication: Publication) -> None:
        self._server, self._reader, self._publication = server, reader, publication
        self._outlet = Outlet()

    def begin(self, index: int, missing: tuple[int, ...]) -> Reading | None:
        """See `bulk.BulkSession`."""
        if index >= len(self._reader.chunks):
            return None
        self._server.hear(self._reader, missing)
        reading = self._publication.read(self._reader.chunks[index], self._outlet)
        if reading is None:
            self._server.hear(self._reader, missing, lost=True)
        return reading

    def end(self, reading: Reading, total: int) -> bool:
        """See `bulk.BulkSession`."""
        valid = self._publication.seal(reading, total)
        if valid:
            self._server.count_sent(reading.chunk.nbytes)
        return valid


class HealServer:
    """Serves snapshots of this rank's state to ranks that heal.

    `publish`, `freeze`, `retire` and `close` belong to one thread, the training thread,
    and never wait for a reader. `disown`, `stats`, `address` and `observed_from` are for any thread.

    Args:
        host: the address to bind and to advertise.
        options: of the job; those of heals are used.
        max_clients: how many readers are admitted at a time.
        same_host: let readers on this machine read this process's memory.

    Raises ValueError if `host` is not an address that peers can reach, or cannot be bound.
    """

    def __init__(
        self,
        *,
        host: str,
        options: JobOptions = UNNAMED,
        max_clients: int = 256,
        same_host: bool = True,
    ) -> None:
        if not host or host in ("*", "0.0.0.0", "::"):
            raise ValueError(
                f"host is {host!r}; name the address of the interface that peers can reach."
            )
        if max_clients < 1:
            raise ValueError(f"max_clients is {max_clients}; it must be at least 1.")
        self._options = options
        self._max_clients = max_clients
        self._identity = host_identity() if same_host else b""
        self._lock = threading.Lock()  # guards the fields up to the blank line
        self._publication: Publication | None = None
        self._disowned: list[Publication] = []  # the training thread frees them
        self._retired: OrderedDict[HealKey, str] = OrderedDict()
        self._withheld: tuple[HealKey, str] | None = None
        self._readers: dict[Peer, Reader] = {}
        self._away: list[Reader] = []  # of this version; they have lost their connections
        self._back = 0  # how many have opened it since: it isn't known which of those that is
        self._stats = ServerStats()
        self._expected_targets = 0
        self._finished_targets = 0

        self._is_shown = False
        self.observed_from: int | None = None
        """The step from which on an observer waits for a version; None: none waits. Read only."""
        self._arena = Arena()
        self._closed = False
        try:
            self._bind(host, options.heal_port)
        except ValueError as error:
            # A launcher may give all ranks of a group the same arguments, and so the same port. And workers
            # of a loader that are forks outlive a process that is killed, with copies of what it listened at.
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            _log.info("port %d is in use: this rank serves heals at another one", options.heal_port)
            self._bind(host, 0)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="ft-heal-server", daemon=True)
        self._thread.start()

    def _bind(self, host: str, port: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        word = secrets.token_hex(8)
        try:
            self._endpoint, where = serving_endpoint(
                self._context, host, port, word, self._max_clients
            )
            try:
                self._bulk = BulkServer(host, word, self._find)
            except (OSError, ValueError, RuntimeError) as error:  # no descriptors, name or threads
                self._endpoint.close()
                raise ValueError(f"Cannot serve heals on {host}: {error}.") from error
        except ValueError:
            self._context.term()
            raise
        self._address = HealAddress(where, self._bulk.port, word)

    @property
    def address(self) -> str:
        """Where targets reach this server: tcp://host:port/bulk port/word."""
        return str(self._address)

    def stats(self) -> ServerStats:
        """Counters since the start."""
        with self._lock:
            stats = self._stats
        return dataclasses.replace(stats, dropped=stats.dropped + self._endpoint.malformed)

    @property
    def quiet(self) -> bool:
        """Whether no reader reads what is published, or is about to. Any thread."""
        with self._lock:
            return not any(
                reader.publication is not None or self._is_for(reader)
                for reader in self._readers.values()
            )

    def publish(
        self,
        key: HealKey,
        tree: Any,
        *,
        copy: bool = True,
        expected_targets: int = 0,
        holds: Callable[[], bool] = lambda: True,
        shown: bool = False,
    ) -> None:
        """Serve the state `tree` as version `key` from now on, and the one before no longer: to members, or
        `shown` to observers, for which a state travels in another form.

        With `copy`, takes a snapshot: the tree may change as soon as this returns. A snapshot of
        the same version that is served already stays in use. Without `copy`, large tensors are
        served from the tree's own memory, on the host or on a device: call `freeze` before they change. Of
        tensors on a device it is the order in this thread's stream that counts. `expected_targets` is
        how many readers will come, so that `freeze` also keeps the bytes of late ones. `holds`: whether
        the tree is still that version; nothing is published if it is not. It turns false before
        `disown` is called, so that neither can miss the other. Training thread. Raises
        UnsupportedObjectError or HealError; then nothing is published.
        """
        self._check_open()
        start = time.perf_counter()
        current = self._publication
        same = current is not None and (current.key, self._is_shown) == (key, shown)
        if current is not None and same and current.complete():
            with self._lock:  # equal keys are equal states: readers that are half done go on
                self._expected_targets = expected_targets
                self._finished_targets = 0
            return
        self.retire(f"the source published {key}")
        publication = Publication(
            key, tree, self._arena, copy=copy, allow_objects=self._options.heal_allow_objects
        )
        with self._lock:
            if not holds():
                self._disowned.append(publication)
                return
            self._publication, self._withheld, self._is_shown = publication, None, shown
            self._retired.pop(key, None)
            self._expected_targets = expected_targets
            self._finished_targets = 0
            self._count(published=1, snapshot_seconds=time.perf_counter() - start)
        self._notify()

    def disown(self, reason: str) -> None:
        """What is published is withdrawn: tell its readers `reason`. What they have half
        read does not count. Any thread; never waits."""
        with self._lock:
            publication = self._take(reason)
            if publication is None:
                return
            publication.disown()
            self._disowned.append(publication)
        self._notify()

    def withhold(self, key: HealKey, reason: str) -> None:
        """Refuse version `key` to its readers, and tell them `reason`: this source can't pack it.
        Training thread."""
        self._check_open()
        self.retire(reason)
        with self._lock:
            self._withheld = key, reason
        self._notify()

    def freeze(self) -> float:
        """Make the published version independent of the tree's memory; returns seconds spent.

        Copies the tensors that some reader still lacks (all of them while expected readers have
        not come) and drops the rest. If no reader lacks any, retires the version without a copy.
        Takes microseconds if nothing is served from the tree's memory. Training thread.
        """
        start = time.perf_counter()
        publication = self._publication
        if publication is None or not publication.live:
            return 0.0
        with self._lock:
            readers = [r for r in self._readers.values() if r.publication is publication]
            readers += self._away
            came = self._finished_targets + len(readers) - self._back
            awaited = self._expected_targets - came
            waiting = any(map(self._is_for, self._readers.values()))
        if awaited > 0 or waiting:
            needed = set(publication.live)
        else:
            needed = {segment for reader in readers for segment in reader.missing_segments()}
        if needed or awaited > 0:
            publication.freeze(needed)
        else:
            self.retire("the source trained on")
        took = time.perf_counter() - start
        with self._lock:
            self._count(snapshot_seconds=took)
        return took

    def retire(self, reason: str = "the source retired it") -> None:
        """Stop serving the published version and tell its readers `reason`. Training thread."""
        with self._lock:
            publication = self._take(reason)
            over, self._disowned = self._disowned, []
        for each in (*over, publication):
            if each is not None:
                each.close()
        if publication is not None:
            self._notify()

    def _take(self, reason: str) -> Publication | None:
        """What is published, which is not from here on; `_lock` is held."""
        publication, self._publication = self._publication, None
        if publication is not None:
            self._forget_away()
            self._retired[publication.key] = reason
            while len(self._retired) > _MAX_RETIRED:
                self._retired.popitem(last=False)
        return publication

    def _forget_away(self) -> None:
        """`_lock` is held."""
        self._away.clear()
        self._back = 0

    def close(self) -> None:
        """End the thread, close the socket, free the memory. Idempotent. Training thread."""
        if self._closed:
            return
        self.retire("the source shut down")
        self._closed = True
        self._notify()
        self._thread.join()
        self._bulk.close()
        self._wake.close()
        self._woken.close()
        self._arena.give(None)
        self._context.term()

    def __enter__(self) -> HealServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ bulk connections' threads

    def _find(self, session: bytes) -> _Session | None:
        with self._lock:
            for reader in self._readers.values():
                if hmac.compare_digest(reader.session, session) and reader.publication is not None:
                    return _Session(self, reader, reader.publication)
        return None

    def hear(self, reader: Reader, missing: tuple[int, ...], *, lost: bool = False) -> None:
        """`reader` lacks these ranges of chunks; `lost`: of one that this source has dropped."""
        with self._lock:
            reader.missing, reader.lost = missing, lost
        if lost:
            self._notify()

    def count_sent(self, nbytes: int) -> None:
        """This many bytes have been sent, and are valid."""
        with self._lock:
            self._count(bytes_sent=nbytes)

    # ------------------------------------------------------------ the training thread, again

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("This HealServer is closed; make a new one.")

    def _count(self, **more: float) -> None:
        """Add to counters; `_lock` is held."""
        changed: dict[str, Any] = {k: getattr(self._stats, k) + v for k, v in more.items()}
        self._stats = dataclasses.replace(self._stats, **changed)

    def _is_for(self, reader: Reader) -> bool:
        """Whether `reader` waits for the version that is published; `_lock` is held."""
        current = self._publication
        if current is None or reader.publication is not None:
            return False
        if self._is_shown:
            return reader.key.lineage == ANY and reader.key.step <= current.key.step
        return reader.key == current.key

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread will wake up anyway
            self._wake.send(b"\0")

    # ------------------------------------------------------------ the server thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (*self._endpoint.polled, self._woken):
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._next_wait_ms()))
                if self._woken.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                self._endpoint.attend()
                self._review_readers()
                if self._closed:
                    return
                self._hang_up(dry=self._receive())
                with self._lock:
                    sessions = {reader.session for reader in self._readers.values()}
                self._bulk.keep(sessions)
        except Exception:  # the thread's outer edge: a failing source must not end the training
            _log.exception("The heal server failed; targets will use other sources.")
        finally:
            self._endpoint.close(linger_ms=200 if self._closed else 0)

    def _next_wait_ms(self) -> int | None:
        with self._lock:
            times = [r.next_deadline(self._retired) for r in self._readers.values()]
            if any(map(self._is_for, self._readers.values())):
                times.append(time.monotonic() + _DEVICE_POLL_S)
            soonest = min(times, default=None)
        return self._endpoint.sleep_ms(soonest)

    def _receive(self) -> bool:
        """Handle requests that have arrived; True if none is left."""
        for _ in range(QUEUED_REPLIES):  # a limit, so that the wake-up socket gets its turn
            if (entry := self._endpoint.receive()) is None:
                return True
            peer, data = entry
            try:
                request = wire.requests.decode(data)
            except ProtocolError as error:
                _log.debug("Dropped what is no request: %s", error)
                self._endpoint.blame(peer)
                continue
            try:
                self._handle(peer, request)
            except ProtocolError as error:  # it may be late, of a version that was retired
                _log.debug("Dropped a request: %s", error)
                with self._lock:
                    self._count(dropped=1)
        return False

    def _hang_up(self, dry: bool) -> None:
        """Free the places of readers whose connections have ended.

        What such a reader still lacks is kept for it until the version is retired, or all are back.
        """
        for peer in self._endpoint.take_lost(dry):
            with self._lock:
                reader = self._readers.pop(peer, None)
                if reader is not None and reader.publication is self._publication is not None:
                    self._away.append(reader)

    def _handle(self, identity: Peer, request: wire.Request) -> None:
        if isinstance(request, wire.Open):
            self._on_open(identity, request)
            return
        with self._lock:
            reader = self._readers.get(identity)
            if reader is None:
                raise ProtocolError("a request before open")
            if isinstance(request, wire.Done):
                del self._readers[identity]
                # One of an earlier version may say so late.
                self._finished_targets += reader.publication is self._publication
                self._count(finished=1)
                return
            reader.missing = request.missing
        if reader.publication is None or any(c >= len(reader.chunks) for c in request.chunks):
            raise ProtocolError("a chunk that does not exist")
        self._confirm(identity, reader, request.chunks)

    def _on_open(self, identity: Peer, request: wire.Open) -> None:
        now = time.monotonic()
        refusal = busy = ""
        if not hmac.compare_digest(request.token.encode(), self._options.token.encode()):
            refusal = "wrong token; set the same heal token on every member"
        elif not MIN_CHUNK_BYTES <= request.chunk_bytes <= MAX_CHUNK_BYTES:
            refusal = f"chunk_bytes must be between {MIN_CHUNK_BYTES} and {MAX_CHUNK_BYTES}"
        with self._lock:
            if not refusal and identity not in self._readers:
                if len(self._readers) >= self._max_clients:
                    busy = f"it serves {self._max_clients} readers already"
            if not refusal and not busy:
                self._readers[identity] = Reader(
                    HealKey(request.step, request.lineage),
                    request.chunk_bytes,
                    now,
                    now + min(request.timeout_s, _MAX_HOLD_S),
                    bool(self._identity) and request.host == self._identity,
                )
                if self._away and self._readers[identity].key == self._away[-1].key:
                    self._back += 1
                    if self._back == len(self._away):  # all of them are
                        self._forget_away()
                self._count(opened=1)
            else:
                self._count(refused=1)
        if refusal:
            self._send(identity, wire.HealRefused(refusal))
        elif busy:
            self._send(identity, wire.Gone(busy))
        else:
            self._review_readers()

    def _review_readers(self) -> None:
        """Start readers whose version is here, tell those whose version is gone, drop the expired.

        A version is here when its devices have come to it. Were a reader started before, the rest of their
        step would count as a part of the transfer, and the reader would give it up as too slow.
        """
        now = time.monotonic()
        with self._lock:
            current = self._publication
            # By the clock alone: by then the reader has given up, whichever process was stopped.
            for identity in [i for i, r in self._readers.items() if r.expires <= now]:
                del self._readers[identity]
            here = [
                (identity, reader)
                for identity, reader in self._readers.items()
                if self._is_for(reader)
            ]
            begun = {identity for identity, _ in here}
            waiting = (r.key for i, r in self._readers.items() if i not in begun)
            self.observed_from = min(
                (key.step for key in waiting if key.lineage == ANY), default=None
            )
            replies: list[tuple[Peer, wire.Reply]] = []
            for identity, reader in self._readers.items():
                if self._withheld is not None and _same(reader.key, self._withheld[0]):
                    refusal = f"{wire.WITHHELD}{self._withheld[1]}"
                    replies.append((identity, wire.HealRefused(refusal)))
                elif reason := reader.gone_reason(current, self._retired, now):
                    replies.append((identity, wire.Gone(reason)))
            for identity, _ in replies:
                del self._readers[identity]
        for identity, reply in replies:
            self._send(identity, reply)
        if current is not None and current.ready:
            for identity, reader in here:
                self._start(identity, reader, current)

    def _start(self, identity: Peer, reader: Reader, current: Publication) -> None:
        reader.chunks = current.layout.chunks(reader.chunk_bytes)
        reader.session = secrets.token_bytes(SESSION_BYTES)
        reader.publication, reader.key = current, current.key
        reader.addresses, blocks = current.lent() if reader.same_host else ((), ())
        reply = wire.ManifestReply(
            step=current.key.step,
            lineage=current.key.lineage,
            layout_digest=current.layout_digest,
            session=reader.session,
            pid=os.getpid() if reader.addresses else 0,
            addresses=reader.addresses,
            blocks=blocks,
        )
        self._send(identity, reply, current.manifest)

    def _confirm(self, identity: Peer, reader: Reader, indexes: tuple[int, ...]) -> None:
        """The reader has read these chunks from this process's memory: tell which of them are valid."""
        publication = reader.publication
        assert publication is not None
        if not reader.addresses:
            raise ProtocolError("it was told no addresses")
        valid = tuple(
            i for i in indexes if publication.untouched(reader.chunks[i], reader.addresses)
        )
        if publication.closed:
            self._drop_reader(identity, reader)
            return
        if self._send(identity, wire.ValidReply(valid, tuple(set(indexes).difference(valid)))):
            with self._lock:
                self._count(bytes_lent=sum(reader.chunks[i].nbytes for i in valid))

    def _drop_reader(self, identity: Peer, reader: Reader) -> None:
        """Tell a reader that its version is no longer served."""
        with self._lock:
            self._readers.pop(identity, None)
        reason = self._retired.get(reader.key, "the source trained on")
        self._send(identity, wire.Gone(f"{reader.key} is gone: {reason}"))

    def _send(self, identity: Peer, reply: wire.Reply, payload: bytes | None = None) -> bool:
        """Send without waiting. False if the reader is gone, or so slow that its queue is full."""
        data = wire.replies.encode(reply)
        if payload is None:
            return self._endpoint.send([identity], data) == 1
        return self._endpoint.send_payload(identity, data, payload)


def _same(key: HealKey, withheld: HealKey) -> bool:
    """Whether a reader that asks for `key` is to hear of what is withheld."""
    return key == withheld or key.lineage == withheld.lineage == ANY
