"""Reports the death of a process to the lighthouse before the kernel closes its sockets.

The kernel frees the memory of a killed process before it closes its sockets, which takes about
75 ms for each GiB. Before both, it marks the robust futexes that the process' threads hold. So the
training process holds a robust mutex in a page that it shares with a small process of its own
(`python -m lighthouse.watcher`). The watcher blocks in locking that mutex. When the lock returns
EOWNERDEAD, it sends a `DeathNotice` over a connection that has been open since the start.

There are two fallbacks: the watcher also polls the parent's pidfd, and the lighthouse notices
closed sockets by itself. Where the platform has no robust mutexes, `ProcessWatch.start` logs one
line, and deaths are detected by closed sockets alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import mmap
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lighthouse.config import Timeouts
from lighthouse.wire.messages import NO_QUORUM, NO_TERM, DeathNotice, JobKey, Term

log = logging.getLogger("lighthouse.watcher")

CAUSE = "process died"
FLUSH_MS = 2_000
"""How long the watcher tries to send the death notice if the lighthouse does not answer."""
CLOSE_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 1024 * 1024

_PAGE_BYTES = mmap.PAGESIZE
_PROCESS_SHARED = 1
_ROBUST = 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_ATTRIBUTE_BYTES = 64  # generous: glibc and musl need 4


@dataclass(frozen=True, slots=True)
class Report:
    """Which replica group, of which job, is dead when this process is; the rest as in `DeathNotice`."""

    job: JobKey
    replica_id: str
    promised: Term = NO_TERM
    quorum_id: int = NO_QUORUM


class ProcessWatch:
    """Training side: lets a small process watch this one. One thread at a time.

        watch = ProcessWatch("tcp://host:29510", timeouts)
        watch.start([Report(job, replica_id)])   # in a thread that lives as long as the process
        ...
        watch.close()                             # a graceful end: no death notice

    Args:
        address: the lighthouse's, normalized.
        timeouts: its heartbeats are used.
        identity: that of this process' connection to the lighthouse: what the watcher says counts
            for what has joined under it, and for nothing else.
    """

    def __init__(self, address: str, timeouts: Timeouts, identity: bytes) -> None:
        self._address = address
        self._timeouts = timeouts
        self._identity = identity
        self._mutex: _RobustMutex | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether a watcher process runs."""
        return self._child is not None and self._child.poll() is None

    def hold(self) -> None:
        """Bind the watch to the calling thread: the thread's end is reported as the process' death.

        `start` does this unless it was done before. Raises OSError, or AttributeError, where the
        platform has no robust mutexes. Idempotent.
        """
        if self._mutex is None:
            mutex = _RobustMutex.create()
            mutex.lock()
            self._mutex = mutex

    def start(self, reports: Iterable[Report]) -> bool:
        """Start watching; returns at once. False, after one log line, if the platform can't."""
        try:
            self.hold()
            self._spawn()
            self._write(
                address=self._address,
                identity=self._identity.decode(),
                heartbeat_s=self._timeouts.heartbeat_s,
                heartbeat_timeout_s=self._timeouts.heartbeat_timeout_s,
                reports=_as_json(reports),
            )
        except (OSError, AttributeError) as error:
            log.warning(
                "no process watcher (%s): the death of this process will be noticed when its"
                " sockets close, which takes about 75 ms for each GiB of its memory",
                error,
            )
            self.close()
            return False
        return True

    def update(self, reports: Iterable[Report]) -> None:
        """Replace what is to be reported. Never raises."""
        if self._child is None:
            return
        try:
            self._write(reports=_as_json(reports))
        except OSError as error:
            log.warning("the process watcher is gone (%s)", error)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the watcher is connected to the lighthouse. For tests and measurements."""
        child = self._child
        if child is None or child.stdout is None:
            return False
        readable, _, _ = select.select([child.stdout], [], [], timeout_s)
        return bool(readable) and child.stdout.read(1) == b"r"

    def close(self) -> None:
        """End the watcher, without a death notice, and reap it. Idempotent; never raises."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(OSError):  # it is gone already
                child.stdin.write(b'{"close": true}\n')
                child.stdin.flush()
            with contextlib.suppress(OSError):
                child.stdin.close()
            child.stdout.close()
            try:
                child.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        mutex, self._mutex = self._mutex, None
        if mutex is not None:
            mutex.discard()

    def _spawn(self) -> None:
        assert self._mutex is not None
        here = str(Path(__file__).resolve().parent.parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        fd = self._mutex.fd
        self._child = subprocess.Popen(
            [sys.executable, "-m", "lighthouse.watcher", str(fd), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C and hang-ups of the terminal must not reach it
        )

    def _write(self, **fields: Any) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(fields).encode() + b"\n")
        self._child.stdin.flush()


def _as_json(reports: Iterable[Report]) -> list[tuple[str, str, str, int, int, int]]:
    return [
        (r.job.job_id, r.job.room_id, r.replica_id, r.promised.epoch, r.promised.nonce, r.quorum_id)
        for r in reports
    ]


class _RobustMutex:
    """A robust, process-shared pthread mutex at the start of a shared page.

    Raises OSError, or AttributeError, where the platform has no robust mutexes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Not through the mmap module: its maps end with their object and hold a descriptor.
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._libc.mmap(None, _PAGE_BYTES, access, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            _check(ctypes.get_errno())
        self._address = ctypes.c_void_p(address)
        self._owner: int | None = None

    @classmethod
    def create(cls) -> _RobustMutex:
        """A new mutex, in an anonymous file that the watcher inherits."""
        if not sys.platform.startswith("linux"):
            raise OSError(f"robust mutexes are not used on {sys.platform}")
        fd = os.memfd_create("lighthouse-watch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _PAGE_BYTES)
            mutex = cls(fd)
            mutex._initialize()
        except BaseException:
            os.close(fd)
            raise
        return mutex

    def _initialize(self) -> None:
        libc = self._libc
        attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _check(libc.pthread_mutexattr_init(attribute))
        _check(libc.pthread_mutexattr_setpshared(attribute, _PROCESS_SHARED))
        _check(libc.pthread_mutexattr_setrobust(attribute, _ROBUST))
        _check(libc.pthread_mutex_init(self._address, attribute))
        _check(libc.pthread_mutexattr_destroy(attribute))

    def lock(self) -> None:
        """Lock it; it stays locked until the calling thread ends. It must be free."""
        _check(self._libc.pthread_mutex_trylock(self._address))
        self._owner = threading.get_ident()

    def wait_for_death(self) -> bool:
        """Block until the mutex is free; True if its owner has died."""
        result: int = self._libc.pthread_mutex_lock(self._address)
        return result == errno.EOWNERDEAD

    def discard(self) -> None:
        """Unlock and release it.

        Only its owner can unlock it. If that is another thread, the page stays mapped for good,
        since the kernel walks the list of held mutexes when that thread ends.
        """
        os.close(self.fd)
        if self._owner is None or self._owner == threading.get_ident():
            if self._owner is not None:
                self._libc.pthread_mutex_unlock(self._address)
            self._libc.munmap(self._address, ctypes.c_size_t(_PAGE_BYTES))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(result, os.strerror(result))


# ---------------------------------------------------------------- the watcher process


class _Watcher:
    """The small process. One thread waits for events, a second one in the mutex."""

    def __init__(self, mutex_fd: int, parent_pid: int) -> None:
        self._parent = _pidfd_of(parent_pid)
        self._reports: list[tuple[str, str, str, int, int, int]] = []
        self._lines = b""
        news, self._news_write = os.pipe()
        self._ends = [news] if self._parent is None else [news, self._parent]
        self._mutex = _RobustMutex(mutex_fd)
        self._connection: Any = None
        self._told_ready = False

    def run(self) -> None:
        """Return when the parent is dead (after the notices), or has told this process to end."""
        if not self._read_lines():
            return  # the parent ended before it sent an address
        waiter = threading.Thread(target=self._wait_for_death, daemon=True)
        waiter.start()
        import zmq

        poller = zmq.Poller()
        for fd in (*self._ends, sys.stdin.fileno()):
            poller.register(fd, zmq.POLLIN)
        _, monitor = self._connection.sockets
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if any(fd in ready for fd in self._ends):
                self._death_notices()
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
                self._reports = said["reports"]
            if not data:
                # The pipe may close first; the pidfd or the mutex tells for certain.
                return self._connection is not None and self._await_end()
            if lines or len(self._lines) > MAX_LINE_BYTES:
                return bool(lines)

    def _await_end(self) -> bool:
        select.select(self._ends, [], [])
        return True

    def _connect(self, said: dict[str, Any]) -> None:
        import zmq

        from lighthouse.client import Connection

        heartbeat = Timeouts.derive(
            heartbeat_s=said["heartbeat_s"], heartbeat_timeout_s=said["heartbeat_timeout_s"]
        )
        identity = said["identity"].encode()
        self._context: zmq.Context[Any] = zmq.Context()
        self._connection = Connection(
            said["address"], identity=identity, timeouts=heartbeat, context=self._context
        )

    def _look_at_connection(self) -> None:
        if "connected" not in self._connection.events():
            return
        self._connection.greet()
        if not self._told_ready:
            self._told_ready = True
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), b"r")

    def _death_notices(self) -> None:
        for job_id, room_id, replica_id, epoch, nonce, quorum_id in self._reports:
            job, promised = JobKey(job_id, room_id), Term(epoch, nonce)
            self._connection.send(DeathNotice(job, replica_id, CAUSE, promised, quorum_id))
        self._connection.close(linger_s=FLUSH_MS / 1000)
        self._context.term()


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
