"""Has the death of a process reported to the lighthouse before the kernel closes its sockets.

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
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from lighthouse.client import SERVICE
from lighthouse.config import Timeouts
from lighthouse.endpoint import HELLO
from lighthouse.robust_mutex import RobustMutex
from lighthouse.sockets import dealer_options
from lighthouse.wire import codec
from lighthouse.wire.messages import NO_QUORUM, NO_TERM, DeathNotice, JobKey, Term

log = logging.getLogger("lighthouse.watcher")

CAUSE = "process died"
CLOSE_TIMEOUT_S = 2.0


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
        self._mutex: RobustMutex | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._given_up = False

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
            mutex = RobustMutex.create()
            mutex.lock()
            self._mutex = mutex

    def start(self, reports: Iterable[Report]) -> bool:
        """Start watching; returns at once. False, after one log line, if the platform can't."""
        try:
            self.hold()
            self._spawn()
            options = dealer_options(self._address, SERVICE, self._identity, self._timeouts)
            self._write(
                address=self._address, options=options, hello=HELLO, notices=_notices(reports)
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
        """Replace what is to be reported. Never raises, and never waits for the watcher."""
        if self._child is None or self._given_up:
            return
        try:
            self._write(notices=_notices(reports))
        except OSError as error:
            log.warning("the process watcher is gone (%s)", error)
            self._given_up = True
            self._child.kill()

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
        fd = self._mutex.fd
        # All that it imports. What else the interpreter would look for takes a third of its start.
        paths = [str(Path(file).resolve().parent.parent) for file in (__file__, zmq.__file__)]
        self._child = subprocess.Popen(
            [sys.executable, "-SP", "-m", "lighthouse.watcher", str(fd), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C and hang-ups of the terminal must not reach it
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)

    def _write(self, **fields: Any) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        line = json.dumps(fields, default=_as_text).encode() + b"\n"
        if self._child.stdin.write(line) != len(line):
            raise OSError("it does not read what it is told")


def _notices(reports: Iterable[Report]) -> list[bytes]:
    """The frames in which the watcher reports, as they are sent: it knows none of our messages."""
    return [
        codec.encode(DeathNotice(r.job, r.replica_id, CAUSE, r.promised, r.quorum_id))
        for r in reports
    ]


def _as_text(data: bytes) -> str:
    return data.decode("latin-1")
