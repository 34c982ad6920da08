"""The small process that watches a training process: `python -m lighthouse.watcher MEMFD PARENT_PID`.

`ProcessWatch` starts it, and says why. What it says and to whom comes from there as bytes, so that it need not
import what encodes them: there is one for each training process.

On its standard input lines of JSON. Strings stand for bytes (Latin-1):

    address, options, hello   once, first: where to connect, the socket's options, what to say when connected
    notices                   what to send when the parent dies; replaces what was said before
    close                     true: end, and send nothing
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
from typing import Any

import zmq

from lighthouse import dealer
from lighthouse.robust_mutex import RobustMutex

FLUSH_MS = 2_000
"""How long it tries to send the death notices if the lighthouse does not answer."""
MAX_LINE_BYTES = 1024 * 1024


class _Watcher:
    """One thread waits for events, a second one in the mutex."""

    def __init__(self, mutex_fd: int, parent_pid: int) -> None:
        self._parent = _pidfd_of(parent_pid)
        self._notices: list[bytes] = []
        self._lines = self._hello = b""
        news, self._news_write = os.pipe()
        self._ends = [news] if self._parent is None else [news, self._parent]
        self._mutex = RobustMutex(mutex_fd)
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._told_ready = False

    def run(self) -> None:
        """Return when the parent is dead (after the notices), or has told this process to end."""
        if not self._read_lines():
            return  # the parent ended before it sent an address
        assert self._sockets is not None
        waiter = threading.Thread(target=self._wait_for_death, daemon=True)
        waiter.start()
        poller = zmq.Poller()
        for fd in (*self._ends, sys.stdin.fileno()):
            poller.register(fd, zmq.POLLIN)
        _, monitor = self._sockets
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if any(fd in ready for fd in self._ends):
                self._send_notices()
                return
            if monitor in ready:
                self._look_at_connection()
            if sys.stdin.fileno() in ready and not self._read_lines():
                return

    def _wait_for_death(self) -> None:
        if self._mutex.wait_for_death():
            os.write(self._news_write, b"!")

    def _read_lines(self) -> bool:
        """Read what the parent writes; False: end without a death notice."""
        while True:
            data = os.read(sys.stdin.fileno(), 65_536)
            self._lines += data
            *lines, self._lines = self._lines.split(b"\n")
            for line in lines:
                said = json.loads(line)
                if said.get("close"):
                    return False
                if "address" in said:
                    self._connect(said)
                self._notices = [_as_bytes(notice) for notice in said["notices"]]
            if not data:
                # The pipe may close first; the pidfd or the mutex tells for certain.
                return self._sockets is not None and self._await_end()
            if lines or len(self._lines) > MAX_LINE_BYTES:
                return bool(lines)

    def _await_end(self) -> bool:
        select.select(self._ends, [], [])
        return True

    def _connect(self, said: dict[str, Any]) -> None:
        options = [(n, _as_bytes(v) if isinstance(v, str) else v) for n, v in said["options"]]
        self._hello = _as_bytes(said["hello"])
        self._sockets = dealer.connect(self._context, said["address"], options)

    def _look_at_connection(self) -> None:
        """Say that the connection is meant each time when it is made."""
        assert self._sockets is not None
        socket, monitor = self._sockets
        made = False
        while (entry := dealer.read_monitor(monitor)) is not None:
            made = made or entry[0] == dealer.HANDSHAKE_SUCCEEDED
        if not made:
            return
        with contextlib.suppress(zmq.Again):
            socket.send(self._hello, dealer.NOBLOCK)
        if not self._told_ready:
            self._told_ready = True
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), b"r")

    def _send_notices(self) -> None:
        assert self._sockets is not None
        socket, monitor = self._sockets
        for notice in self._notices:
            with contextlib.suppress(zmq.Again):  # so many can't be queued
                socket.send(notice, dealer.NOBLOCK)
        dealer.close(socket, monitor, FLUSH_MS)
        self._context.term()


def _as_bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _pidfd_of(parent_pid: int) -> int | None:
    """A descriptor that is readable when the parent has ended; None before Linux 5.3."""
    try:
        pidfd = os.pidfd_open(parent_pid)
    except OSError:
        return None
    if os.getppid() != parent_pid:  # it is dead, and its number may belong to another process
        os.close(pidfd)
        return None
    return pidfd


def main() -> None:
    """`python -m lighthouse.watcher MEMFD PARENT_PID`; started by `ProcessWatch`."""
    mutex_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _Watcher(mutex_fd, parent_pid).run()
    # Not sys.exit: a thread may still be in the lock.
    os._exit(0)


if __name__ == "__main__":
    main()
