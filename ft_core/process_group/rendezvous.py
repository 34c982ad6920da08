"""How the members of a quorum find each other: no store, no polling, no server that could die.

Every process group owns one listening socket (`Listener`). To configure, the members of a quorum
open one connection for each pair (the lower rank dials) and exchange hellos. Over it they then hand
each other the keys that a c10d backend puts into its store (`RendezvousStore`), so that a wait for a
key ends within microseconds of its arrival. The connections also tell at once when a member dies or
gives up while the others still configure.

No connection is accepted outside a rendezvous: a member that comes early waits in the kernel's
backlog. A hello of an older quorum is rejected; one of a newer quorum is kept for the next
rendezvous, as is the end of its connection.

A member that can't be connected to is *missed*, as is one whose address leads to something else. One
that is slow, or does not come, is not (`dialing` says how the two are told apart). If the backends do
not connect in time although all members have met, the others' listeners are tried from here, too: an
address may be good in one direction only.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ft_core.errors import ProcessGroupError
from ft_core.process_group.dialing import Dial, Dialer, give_up_unacknowledged
from ft_core.process_group.rendezvous_messages import (
    COOKIE_BYTES,
    FRAME_BYTES_MAX,
    Address,
    Hello,
    HelloRejected,
    RendezvousMessage,
    RendezvousOver,
    StoreKey,
    members_digest,
    take_message,
    to_frame,
)
from lighthouse.config import MOST_STRANGERS
from lighthouse.errors import ProtocolError
from lighthouse.waits import Overdue, in_time

_READ_BYTES = 1 << 16
_HELLO_BYTES_MAX = 1 << 18  # what one that has not said hello may send: a hello and some keys
_NOTIFY_TIMEOUT_S = 1.0
_STRANGER = "this address belongs to another process group now"


# ---------------------------------------------------------------- sockets


class _Connection:
    """A connection to one member; `peer` is its rank, None until an incoming hello was accepted."""

    def __init__(self, sock: socket.socket, peer: int | None) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.peer = peer
        self.hello: Hello | None = None
        self.received = bytearray()
        self.unsent = bytearray()
        self.done = False  # the peer said RendezvousOver
        self.since = time.monotonic()
        self.mask = 0

    @property
    def closed(self) -> bool:
        return self.socket.fileno() < 0


class Listener:
    """The listening socket of one process group, and the connections that came too early.

    `address` is what the others connect to. Raises `OSError` if `host` can't be bound.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.cookie = secrets.token_bytes(COOKIE_BYTES)
        self.early: list[_Connection] = []
        self.socket = socket.create_server((host, 0), family=family, backlog=4096)
        self.socket.setblocking(False)
        self.address = Address(host, self.socket.getsockname()[1], self.cookie)

    def close(self) -> None:
        """Close the socket and the early connections."""
        self.socket.close()
        for connection in self.early:
            connection.socket.close()
        self.early.clear()


class Rendezvous:
    """One member's side of the rendezvous of one quorum.

    `gather`, `pump`, `finish` and `close` belong to the configuring thread; `abort`, `wake`,
    `publish`, `set_if_absent`, `lookup` and `knows` may be called from any thread.

    Args:
        listener: of this process group.
        quorum_id, rank: of this member; `rank` is its index in `addresses`.
        addresses: of all members.
        handle: what the other members' backends need to reach this one's, maybe empty.
        limit_s: how long a connection may take to be made.
        on_silence: called once that is over, and then twice as often, with the members that can be
            connected to and have not said hello, also if there are none. Configuring thread.

    `handles` holds every member's handle, None until it said hello.
    """

    def __init__(
        self,
        listener: Listener,
        quorum_id: int,
        rank: int,
        addresses: Sequence[Address],
        handle: bytes,
        limit_s: float = 1.0,
        *,
        on_silence: Callable[[list[int]], object] = lambda silent: None,
    ) -> None:
        self.quorum_id = quorum_id
        self.rank = rank
        self.handles: list[bytes | None] = [None] * len(addresses)
        self.handles[rank] = handle
        self._handle = handle
        self._listener = listener
        self._peers = addresses
        self._digest = members_digest(addresses)
        self._connections: dict[int, _Connection] = {}  # by rank
        self._unidentified: list[_Connection] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._keys: dict[str, bytes] = {}
        self._error: ProcessGroupError | None = None
        self._closed = False
        self._missed: set[int] = set()
        self._limit_s = limit_s
        self._met_at = float("inf")  # when all had said hello
        self._test_at = float("inf")  # when to try the others' listeners, too
        self._on_silence, self._silence_at = on_silence, time.monotonic() + limit_s
        self._selector = selectors.DefaultSelector()
        self._dialer = Dialer(self._selector, limit_s, addresses[rank].host)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(listener.socket, selectors.EVENT_READ)

    # --- the configuring thread

    def gather(self, deadline: float) -> None:
        """Exchange hellos with every other member. Raises `ProcessGroupError` on failure or at
        `deadline` (`time.monotonic()`)."""
        for connection in self._listener.early:
            self._unidentified.append(connection)
            self._register(connection)
            self._read_messages(connection)
        self._listener.early.clear()
        for peer in range(self.rank + 1, len(self._peers)):
            self._dialer.dial(peer, self._peers[peer])
        self._look(time.monotonic())  # some may have failed already: no event reports these
        self.pump(lambda: all(handle is not None for handle in self.handles), deadline)
        self._met_at = time.monotonic()
        self._test_at = self._met_at + self._limit_s

    def pump(self, finished: Callable[[], bool], deadline: float) -> None:
        """Serve the connections until `finished()`, which is called after every event.

        Raises `ProcessGroupError` on failure or at `deadline` (`time.monotonic()`).
        """
        overdue = Overdue()
        while not finished():
            self._check()
            now = time.monotonic()
            due = min(overdue.look_at(deadline), self._test_at, self._silence_at)
            ready = self._selector.select(max(0.0, min(due, self._dialer.next_look()) - now))
            for key, mask in ready:
                if key.fileobj is self._listener.socket:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    self._wake_read.recv(_READ_BYTES)
                elif isinstance(key.data, _Connection):
                    self._serve(key.data, mask)
                else:
                    self._on_dialed(*key.data)
            self._look(now)
            if overdue.passed(deadline, time.monotonic(), dry=not ready) and not finished():
                raise ProcessGroupError(self._too_late())
        self._check()

    def missed(self, timeout_s: float) -> set[int]:
        """After a failure: the members that could not be connected to, as far as is known.

        One that has not said hello is not one: it may be late, or have left the quorum, and its
        kernel accepts connections meanwhile. Once all have met, the backends take milliseconds to
        connect: after half of `timeout_s` the members that have not done so count.
        """
        now = time.monotonic()
        missed = self._missed.union(self._dialer.failed, self._dialer.late(now))
        if now - self._met_at >= timeout_s / 2:
            missed.update(rank for rank, one in self._connections.items() if not one.done)
        return missed

    def finish(self) -> None:
        """The communicator is connected: tell the other members and close."""
        with self._lock:
            for connection in self._connections.values():
                connection.unsent += to_frame(RendezvousOver())
                self._flush(connection)
                # At most these stay unsent, to a member that does not read; the end tells it the same.
        self.close()

    def close(self) -> None:
        """Close the connections; those of a newer quorum are kept for the next rendezvous.
        Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._dialer.close()
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()
            for connection in self._connections.values():
                connection.socket.close()
            self._listener.early += self._unidentified

    def must_notify_abort(self) -> bool:
        """Whether some members may not know that this one was here and gave up."""
        return None in self.handles

    def notify_abort(self) -> None:
        """Tell the members without a connection that this one has given up.

        A lower rank would dial this member, and then wait in a backlog that is not read before the
        next quorum; a higher one may not have been dialed yet. Each gets a hello and the end of the
        connection. From a lower rank that means a member that died; from a higher rank, which
        should have waited to be dialed, a member that gave up. Call it after `close`, in any
        thread; it takes up to a second for each unreachable member.
        """
        for peer, address in enumerate(self._peers):
            if self.handles[peer] is None:
                where = (address.host, address.port)
                try:
                    with socket.create_connection(where, _NOTIFY_TIMEOUT_S) as connection:
                        connection.sendall(self._hello(peer))
                except OSError:  # it is gone itself
                    continue

    # --- any thread

    def abort(self, error: ProcessGroupError) -> None:
        """End the rendezvous with `error`; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            self.wake()

    def wake(self) -> None:
        """Have `pump` call `finished()` again."""
        with self._lock:
            if not self._closed:
                try:
                    self._wake_write.send(b"!")
                except BlockingIOError:  # a wake-up is pending already
                    pass

    def publish(self, key: str, value: bytes) -> None:
        """Set a key here and at every other member. Raises `ProcessGroupError` if it is over."""
        with self._changed:
            self._check()
            self._keys[key] = value
            self._changed.notify_all()
            for connection in self._connections.values():
                connection.unsent += to_frame(StoreKey(key, value))
                self._flush(connection)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Set a key here only; returns its value afterwards."""
        with self._lock:
            return self._keys.setdefault(key, value)

    def lookup(self, key: str, deadline: float | None) -> bytes:
        """The value of a key that comes by `deadline` (None: ever). Raises `ProcessGroupError`."""
        arrives = partial(self._changed.wait_for, lambda: key in self._keys or self._ended())
        with self._changed:
            in_time(arrives, deadline)
            if key in self._keys:
                return self._keys[key]
            self._check()
            raise ProcessGroupError(f"quorum {self.quorum_id}: no member published {key!r} in time")

    def knows(self, key: str) -> bool:
        """Whether a key has arrived."""
        with self._lock:
            return key in self._keys

    # --- inside

    def _ended(self) -> bool:
        return self._error is not None or self._closed

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ProcessGroupError(f"the rendezvous of quorum {self.quorum_id} is over")

    def _fail(self, text: str) -> None:
        self.abort(ProcessGroupError(f"configure of quorum {self.quorum_id} failed: {text}"))

    def _too_late(self) -> str:
        if missing := [str(rank) for rank, one in enumerate(self.handles) if one is None]:
            what = f"rank(s) {', '.join(missing)} of {len(self._peers)} never came"
        else:
            slow = [str(rank) for rank, one in sorted(self._connections.items()) if not one.done]
            what = f"all came, but these have not connected: {', '.join(slow) or 'this process'}"
        return f"configure of quorum {self.quorum_id} timed out: {what}"

    def _name(self, peer: int | None) -> str:
        if peer is None:
            return "an unidentified connection"
        return f"rank {peer} ({self._peers[peer].host}:{self._peers[peer].port})"

    def _on_dialed(self, dial: Dial, attempt: socket.socket) -> None:
        if (connected := self._dialer.serve(dial, attempt)) is None:
            return
        if dial.test:
            connected.close()
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(connected, dial.peer)
        with self._lock:
            self._connections[dial.peer] = connection
            connection.unsent += self._hello(dial.peer)
        self._register(connection)

    def _look(self, now: float) -> None:
        """What is due at `now`, which is from before the last `select`."""
        if now >= self._test_at:
            self._test_at = float("inf")
            late = [rank for rank, one in self._connections.items() if not one.done]
            for peer in late or self._connections:
                self._dialer.dial(peer, self._peers[peer], test=True)
        self._dialer.look(now)
        for peer, why in self._dialer.failed.items():
            self._miss(peer, f"can't be reached: {why}")
        if now >= self._silence_at and self._error is None:
            self._silence_at = now + self._limit_s / 2
            self._on_silence(self._silent(now))

    def _silent(self, now: float) -> list[int]:
        """Members that have not said hello: lower ranks, since they dial; higher ones that were asked."""
        asked = {p for p, one in self._connections.items() if now >= one.since + self._limit_s / 2}
        unheard = [peer for peer, handle in enumerate(self.handles) if handle is None]
        return [peer for peer in unheard if peer < self.rank or peer in asked]

    def _miss(self, peer: int, what: str) -> None:
        """This member can't be reached; `what` says why."""
        self._missed.add(peer)
        self._fail(f"{self._name(peer)} {what}")

    def _hello(self, peer: int) -> bytes:
        return to_frame(
            Hello(
                quorum_id=self.quorum_id,
                digest=self._digest,
                rank=self.rank,
                world_size=len(self._peers),
                cookie=self._peers[peer].cookie,
                handle=self._handle,
            )
        )

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.socket.accept()
            except OSError as error:  # the backlog is empty, or the other end has closed already
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(len(self._peers))
                return
            give_up_unacknowledged(sock, 2 * self._limit_s)
            connection = _Connection(sock, None)
            self._unidentified.append(connection)
            self._register(connection)
            self._make_room(MOST_STRANGERS + len(self._peers))

    def _make_room(self, most: int) -> None:
        """With more connections than these without a hello, the oldest make way."""
        strangers = [each for each in self._unidentified if each.hello is None]
        for each in strangers[: max(0, len(strangers) - most)]:
            self._drop(each)

    def _register(self, connection: _Connection) -> None:
        connection.mask = selectors.EVENT_READ
        if connection.unsent:
            connection.mask |= selectors.EVENT_WRITE
        self._selector.register(connection.socket, connection.mask, connection)

    def _serve(self, connection: _Connection, mask: int) -> None:
        if connection.closed:
            return
        if mask & selectors.EVENT_WRITE:
            with self._lock:
                self._flush(connection)
        if mask & selectors.EVENT_READ:
            self._read(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what fits; the selector sends the rest. The lock is held."""
        if connection.closed:
            return
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            connection.unsent.clear()  # the reading side sees the end of the connection
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if mask != connection.mask and not self._closed:
            connection.mask = mask
            self._selector.modify(connection.socket, mask, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            data = b""
            if error.errno == errno.ETIMEDOUT and connection.peer is not None:
                self._miss(connection.peer, "does not confirm what is sent to it")
        connection.received += data
        self._read_messages(connection)
        most = _HELLO_BYTES_MAX if connection.hello is None else 2 * FRAME_BYTES_MAX
        if not data or len(connection.received) > most:
            self._on_end(connection)

    def _read_messages(self, connection: _Connection) -> None:
        try:
            while not connection.closed:
                # After a hello of a newer quorum the rest stays unread: it is for that rendezvous.
                if connection.peer is None and connection.hello is not None:
                    self._admit(connection, connection.hello)
                    if connection.peer is None:
                        return
                if (message := take_message(connection.received)) is None:
                    return
                self._handle_message(connection, message)
        except ProtocolError:
            if connection.peer is not None:
                self._miss(connection.peer, "is no process group")
            self._drop(connection)

    def _handle_message(self, connection: _Connection, message: RendezvousMessage) -> None:
        if isinstance(message, Hello) and connection.hello is None:
            connection.hello = message
            if connection.peer is not None:
                self._on_answer(connection.peer, message)
        elif isinstance(message, HelloRejected) and connection.peer is not None:
            if message.reason == _STRANGER:
                self._missed.add(connection.peer)
            self._fail(f"{self._name(connection.peer)} refused: {message.reason}")
        elif connection.hello is None:
            raise ProtocolError("a message before the hello")
        elif isinstance(message, StoreKey):
            with self._changed:
                self._keys[message.name] = message.value
                self._changed.notify_all()
        elif isinstance(message, RendezvousOver):
            connection.done = True
        else:
            raise ProtocolError(f"an unexpected {type(message).__name__}")

    def _on_answer(self, peer: int, hello: Hello) -> None:
        if (hello.quorum_id, hello.digest, hello.rank) != (self.quorum_id, self._digest, peer):
            self._fail(f"{self._name(peer)} answered for another quorum or rank")
            return
        self.handles[peer] = hello.handle

    def _admit(self, connection: _Connection, hello: Hello) -> None:
        """Judge an incoming hello: of a member, of a newer quorum (kept waiting), or rejected."""
        reason = None
        if hello.cookie != self._listener.cookie:
            reason = _STRANGER
        elif hello.quorum_id > self.quorum_id:
            return
        elif hello.quorum_id < self.quorum_id:
            reason = f"it is in quorum {self.quorum_id}, quorum {hello.quorum_id} is over"
        elif hello.digest != self._digest or hello.world_size != len(self._peers):
            reason = f"it has another member list for quorum {self.quorum_id}"
        elif not 0 <= hello.rank < len(self._peers):
            reason = f"there is no rank {hello.rank} in quorum {self.quorum_id}"
        elif hello.rank > self.rank:
            self._fail(f"{self._name(hello.rank)} gave up")
            return
        elif hello.rank == self.rank or hello.rank in self._connections:
            reason = f"rank {hello.rank} is here already"
        if reason is not None:
            with self._lock:
                connection.unsent += to_frame(HelloRejected(reason))
                self._flush(connection)
            self._drop(connection)
            return
        with self._lock:
            connection.peer = hello.rank
            self._unidentified.remove(connection)
            self._connections[hello.rank] = connection
            self.handles[hello.rank] = hello.handle
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.unsent += self._hello(hello.rank)
            self._flush(connection)

    def _on_end(self, connection: _Connection) -> None:
        peer = connection.peer
        if peer is None and connection.hello is not None:
            # Of a newer quorum, whose rendezvous is to learn that this member has given it up.
            self._selector.unregister(connection.socket)
            return
        if peer is not None and not connection.done:
            if connection.hello is None:  # something in between, or a process that has just died
                self._missed.add(peer)
            self._fail(f"{self._name(peer)} died or gave up")
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if not connection.closed:
            self._selector.unregister(connection.socket)
            connection.socket.close()
        if connection in self._unidentified:
            self._unidentified.remove(connection)


# ---------------------------------------------------------------- the store


class RendezvousStore(dist.Store):
    """The store that a c10d backend is given: its keys travel through a rendezvous.

    What is set here is set at every member; what is waited for comes from them. Backends keep their
    store, so it outlives a rendezvous: `rendezvous` is the one under way, or None. `on_publish` is
    called with every value that is set, in the backend's thread, before the members get it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rendezvous: Rendezvous | None = None
        self.on_publish: Callable[[bytes], None] | None = None

    def _current(self) -> Rendezvous:
        if self.rendezvous is None:
            raise ProcessGroupError("no quorum is being configured: the store is closed")
        return self.rendezvous

    @staticmethod
    def _canonical(key: str) -> str:
        # torch's native reconfiguration puts "reconfigure/<uuid>/" before the keys that a fresh
        # group uses. A rendezvous knows one quorum only, so members of both kinds can meet.
        parts = key.split("/", 2)
        return parts[2] if parts[0] == "reconfigure" and len(parts) == 3 else key

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self.on_publish is not None:
            self.on_publish(data)
        self._current().publish(self._canonical(key), data)

    def get(self, key: str) -> bytes:
        return self._current().lookup(self._canonical(key), None)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for key in keys:
            self._current().lookup(self._canonical(key), end)

    def check(self, keys: list[str]) -> bool:
        return all(self._current().knows(self._canonical(key)) for key in keys)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        data = desired.encode() if isinstance(desired, str) else bytes(desired)
        return self._current().set_if_absent(self._canonical(key), data)

    def has_extended_api(self) -> bool:
        return False
