"""Members of a quorum find each other: no store, no polling, no server that could die.

Every process group owns one listening socket (`Listener`). To configure, the members of a quorum
open one connection a pair (the lower rank dials), say hello on it, and then use it to hand each
other the keys that a c10d backend puts into its rendezvous store (`RendezvousStore`). A wait for a key
ends when the key arrives, within microseconds. The connections also tell at once when a member
dies or gives up while the others still configure.

Nobody accepts outside a meeting: a member that comes early waits in the kernel's backlog, one of an
older quorum is refused as soon as it is seen, one of a newer quorum is kept for the next meeting.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ft_core.process_group import wire
from ft_core.process_group.errors import ProcessGroupError

_BACKLOG = 4096
_EARLY_CALLERS_MAX = 4096
_READ_BYTES = 1 << 16
_LEAVE_TIMEOUT_S = 1.0


class _Line:
    """One connection to a member, or to a caller who has not said yet who it is."""

    def __init__(self, connection: socket.socket, peer: int | None) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.peer = peer  # the rank, once known
        self.hello: wire.Hello | None = None
        self.received = bytearray()
        self.unsent = bytearray()
        self.dialing = peer is not None
        self.done = False  # the peer said DONE
        self.mask = 0

    def close(self) -> None:
        self.connection.close()


class Listener:
    """The listening socket of one process group and the callers who came too early."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token = secrets.token_bytes(wire.TOKEN_BYTES)
        self.early: list[_Line] = []
        self.listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.listener.setblocking(False)
        self.address = wire.Address(host, self.listener.getsockname()[1], self.token)

    def close(self) -> None:
        self.listener.close()
        for line in self.early:
            line.close()
        self.early.clear()


class Rendezvous:
    """One member's side of one quorum's meeting.

    `gather` and `pump` belong to the configuring thread; `abort`, `wake`, `publish` and `lookup`
    may be called from any thread.
    """

    def __init__(
        self,
        doorbell: Listener,
        quorum_id: int,
        rank: int,
        addresses: Sequence[bytes],
        handle: bytes,
    ) -> None:
        self.quorum_id = quorum_id
        self.rank = rank
        self.handles: list[bytes | None] = [None] * len(addresses)
        self.handles[rank] = handle
        self._doorbell = doorbell
        self._peers = [wire.Address.decode(address) for address in addresses]
        self._digest = wire.members_digest(addresses)
        self._lines: dict[int, _Line] = {}
        self._callers: list[_Line] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._keys: dict[str, bytes] = {}
        self._error: ProcessGroupError | None = None
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarm_button = socket.socketpair()
        self._alarm.setblocking(False)
        self._alarm_button.setblocking(False)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._selector.register(doorbell.listener, selectors.EVENT_READ)

    # --- the configuring thread

    def gather(self, deadline: float) -> None:
        """Say hello to every other member. Raises `ProcessGroupError` on failure or at `deadline`
        (`time.monotonic()`)."""
        for line in self._doorbell.early:
            self._callers.append(line)
            self._listen_to(line)
            self._read_frames(line)
        self._doorbell.early.clear()
        for peer in range(self.rank + 1, len(self._peers)):
            self._dial(peer)
        self.pump(lambda: all(handle is not None for handle in self.handles), deadline)

    def pump(self, finished: Callable[[], bool], deadline: float) -> None:
        """Serve the connections until `finished()`, which is asked after every event."""
        while not finished():
            self._check()
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                raise ProcessGroupError(self._overdue())
            for key, mask in self._selector.select(wait_s):
                if key.fileobj is self._doorbell.listener:
                    self._accept()
                elif key.fileobj is self._alarm:
                    self._alarm.recv(_READ_BYTES)
                else:
                    self._serve(key.data, mask)
        self._check()

    def finish(self) -> None:
        """The communicator is connected: tell the others and hang up."""
        with self._lock:
            for line in self._lines.values():
                line.unsent += wire.frame(wire.DONE)
                self._flush(line)
                # What is left unsent is at most the last bytes for a member that does not read;
                # it notices by the closed line.
        self.close()

    def close(self) -> None:
        """Hang up; callers of a newer quorum are kept for the next meeting. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._selector.close()
            self._alarm.close()
            self._alarm_button.close()
            for line in self._lines.values():
                line.close()
            self._doorbell.early += self._callers
            for line in self._doorbell.early[_EARLY_CALLERS_MAX:]:
                line.close()
            del self._doorbell.early[_EARLY_CALLERS_MAX:]

    def leave_owed(self) -> bool:
        """Whether some members may not have heard that this one was here and gave up."""
        return None in self.handles

    def notify_abort(self) -> None:
        """Tell the members that were not met that this one has given up.

        Lower ranks would dial, and wait in a backlog that nobody reads before the next quorum;
        higher ones may not have been dialed. Each gets a hello and the end of the line: from a
        lower rank that is a member that died, from a higher one (who should have waited to be
        called) a member that gave up. After `close`; takes seconds if members are unreachable.
        """
        for peer, address in enumerate(self._peers):
            if self.handles[peer] is None:
                try:
                    with socket.create_connection(
                        (address.host, address.port), _LEAVE_TIMEOUT_S
                    ) as line:
                        line.sendall(self._hello(peer))
                except OSError:  # gone itself
                    continue

    # --- any thread

    def abort(self, error: ProcessGroupError) -> None:
        """End the meeting with `error` (the first one counts)."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
            self.wake()

    def wake(self) -> None:
        """Have `pump` ask `finished()` again."""
        with self._lock:
            if not self._closed:
                try:
                    self._alarm_button.send(b"!")
                except BlockingIOError:  # it rings already
                    pass

    def publish(self, key: str, value: bytes) -> None:
        """Set a key here and at every other member."""
        with self._changed:
            self._check()
            self._keys[key] = value
            self._changed.notify_all()
            for line in self._lines.values():
                line.unsent += wire.key_frame(key, value)
                self._flush(line)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Set a key here only; returns what it holds afterwards."""
        with self._lock:
            return self._keys.setdefault(key, value)

    def lookup(self, key: str, timeout_s: float | None) -> bytes:
        """The value of a key, when it has arrived. Raises `ProcessGroupError`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._keys or self._ended(), timeout_s)
            if key in self._keys:
                return self._keys[key]
            self._check()
            raise ProcessGroupError(f"quorum {self.quorum_id}: no member published {key!r} in time")

    def knows(self, key: str) -> bool:
        with self._lock:
            return key in self._keys

    # --- inside

    def _ended(self) -> bool:
        return self._error is not None or self._closed

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ProcessGroupError(f"the meeting of quorum {self.quorum_id} is over")

    def _fail(self, text: str) -> None:
        self.abort(ProcessGroupError(f"configure of quorum {self.quorum_id} failed: {text}"))

    def _overdue(self) -> str:
        missing = [str(rank) for rank, handle in enumerate(self.handles) if handle is None]
        if missing:
            what = f"rank(s) {', '.join(missing)} of {len(self._peers)} never came"
        else:
            slow = [str(rank) for rank, line in sorted(self._lines.items()) if not line.done]
            what = f"all came, but the connections were not made (not done: {', '.join(slow)})"
        return f"configure of quorum {self.quorum_id} timed out: {what}"

    def _name(self, peer: int | None) -> str:
        if peer is None:
            return "a caller"
        return f"rank {peer} ({self._peers[peer].host}:{self._peers[peer].port})"

    def _dial(self, peer: int) -> None:
        address = self._peers[peer]
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        line = _Line(socket.socket(family, socket.SOCK_STREAM), peer)
        with self._lock:
            self._lines[peer] = line
            line.unsent += self._hello(peer)
        code = line.connection.connect_ex((address.host, address.port))
        self._listen_to(line)
        if code not in (0, errno.EINPROGRESS):
            self._unreachable(peer, code)

    def _unreachable(self, peer: int | None, code: int) -> None:
        gone = "; its process is gone" if code == errno.ECONNREFUSED else ""
        self._fail(f"{self._name(peer)} can't be reached: {os.strerror(code)}{gone}")

    def _hello(self, peer: int) -> bytes:
        handle = self.handles[self.rank]
        assert handle is not None
        token = self._peers[peer].token
        world_size = len(self._peers)
        return wire.Hello(
            self.quorum_id, self._digest, self.rank, world_size, token, handle
        ).encode()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._doorbell.listener.accept()
            except OSError:  # nobody left, or the caller hung up already
                return
            line = _Line(connection, None)
            self._callers.append(line)
            self._listen_to(line)

    def _listen_to(self, line: _Line) -> None:
        line.mask = selectors.EVENT_READ
        if line.unsent:
            line.mask |= selectors.EVENT_WRITE
        self._selector.register(line.connection, line.mask, line)

    def _serve(self, line: _Line, mask: int) -> None:
        if line.connection.fileno() < 0:
            return
        if line.dialing:
            error = line.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._unreachable(line.peer, error)
                return
            if mask & selectors.EVENT_WRITE:
                line.dialing = False
                line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if mask & selectors.EVENT_WRITE:
            with self._lock:
                self._flush(line)
        if mask & selectors.EVENT_READ:
            self._read(line)

    def _flush(self, line: _Line) -> None:
        """Send what fits; the selector sends the rest. The lock is held."""
        if line.connection.fileno() < 0 or line.dialing:
            return
        try:
            while line.unsent:
                del line.unsent[: line.connection.send(line.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            line.unsent.clear()  # the reading side sees the end of the line and judges it
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        if mask != line.mask and not self._closed:
            line.mask = mask
            self._selector.modify(line.connection, mask, line)

    def _read(self, line: _Line) -> None:
        try:
            data = line.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line.received += data
        self._read_frames(line)
        if not data or len(line.received) > 2 * wire.FRAME_BYTES_MAX:
            self._hung_up(line)

    def _read_frames(self, line: _Line) -> None:
        try:
            while line.connection.fileno() >= 0:
                # A caller of a newer quorum is left unread after its hello: it isn't ours yet.
                if line.peer is None and line.hello is not None:
                    self._admit(line, line.hello)
                    if line.peer is None:
                        return
                taken = wire.take_frame(line.received)
                if taken is None:
                    return
                self._handle(line, *taken)
        except wire.FrameError:
            self._drop(line)

    def _handle(self, line: _Line, kind: int, body: bytes) -> None:
        if kind == wire.HELLO and line.hello is None:
            line.hello = wire.Hello.decode(body)
            if line.peer is not None:
                self._answered(line, line.hello)
        elif line.hello is None and kind != wire.REFUSE:
            raise wire.FrameError("a frame before the hello")
        elif kind == wire.KEY:
            with self._changed:
                key, value = wire.parse_key(body)
                self._keys[key] = value
                self._changed.notify_all()
        elif kind == wire.DONE:
            line.done = True
        elif kind == wire.REFUSE and line.peer is not None:
            text = body.decode(errors="replace")
            self._fail(f"{self._name(line.peer)} refused: {text}")
        else:
            raise wire.FrameError(f"a frame of kind {kind}")

    def _answered(self, line: _Line, hello: wire.Hello) -> None:
        assert line.peer is not None
        if (hello.quorum_id, hello.digest, hello.rank) != (self.quorum_id, self._digest, line.peer):
            self._fail(f"{self._name(line.peer)} answered for another quorum or rank")
            return
        self.handles[line.peer] = hello.handle

    def _admit(self, line: _Line, hello: wire.Hello) -> None:
        """Judge a caller: a member, one of a newer quorum (left waiting), or refused."""
        if hello.quorum_id > self.quorum_id:
            return
        refusal = None
        if hello.token != self._doorbell.token:
            refusal = "this address belongs to another process group now"
        elif hello.quorum_id < self.quorum_id:
            refusal = f"it is in quorum {self.quorum_id}, quorum {hello.quorum_id} is over"
        elif hello.digest != self._digest or hello.world_size != len(self._peers):
            refusal = f"it has another member list for quorum {self.quorum_id}"
        elif hello.rank > self.rank:
            self._fail(f"{self._name(hello.rank)} gave up")
            return
        elif hello.rank == self.rank or hello.rank in self._lines:
            refusal = f"rank {hello.rank} is here already"
        if refusal is not None:
            with self._lock:
                line.unsent += wire.frame(wire.REFUSE, refusal.encode())
                self._flush(line)
            self._drop(line)
            return
        with self._lock:
            line.peer = hello.rank
            self._callers.remove(line)
            self._lines[hello.rank] = line
            self.handles[hello.rank] = hello.handle
            line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.unsent += self._hello(hello.rank)
            self._flush(line)

    def _hung_up(self, line: _Line) -> None:
        if line.peer is not None and not line.done:
            self._fail(f"{self._name(line.peer)} died or gave up")
        self._drop(line)

    def _drop(self, line: _Line) -> None:
        if line.connection.fileno() >= 0:
            self._selector.unregister(line.connection)
            line.close()
        if line in self._callers:
            self._callers.remove(line)
