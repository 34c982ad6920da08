"""What the processes of a supervisor tell it, in memory that they share with it: no message a step.

Each child has a slot: whether it trains, its step, how many steps it has committed, and for each
rank until when its loop must be back, if it hangs. A byte in a pipe wakes the supervisor where it has
to look. The two descriptors and the child's number are in the environment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

ENV_BOARD = "FT_SUPERVISOR_BOARD"
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGABRT
"""Has a process print the stacks of all of its threads."""
_SLOT_BYTES, _RANKS_AT, _RANKS = 2048, 64, 128
_JOINED, _PROGRESS, _HUNG = struct.Struct("<q"), struct.Struct("<qq"), struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a child's slot says.

    Attributes:
        joined: it has taken part in a quorum.
        step: of its last commit; -1: none.
        commits: of this life.
        hung_until: when the first of its ranks that hang must be back (`time.monotonic()`); 0: none
            hangs.
    """

    joined: bool
    step: int
    commits: int
    hung_until: float


class Board:
    """The supervisor's end."""

    def __init__(self, count: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._file.truncate(count * _SLOT_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), count * _SLOT_BYTES)
        self._read, self._write = os.pipe()
        self.descriptors = (self._file.fileno(), self._write)

    def environment(self, child: int) -> dict[str, str]:
        """What `child` needs to find its slot."""
        shared, wake = self.descriptors
        return {ENV_BOARD: f"{shared}:{wake}:{child}:{_node(shared)}:{_node(wake)}"}

    def clear(self, child: int) -> None:
        """A new life begins."""
        at = child * _SLOT_BYTES
        self._memory[at : at + _SLOT_BYTES] = bytes(_SLOT_BYTES)
        _PROGRESS.pack_into(self._memory, at + _JOINED.size, -1, 0)

    def look(self, child: int) -> Seen:
        """A child's slot."""
        at = child * _SLOT_BYTES
        (joined,) = _JOINED.unpack_from(self._memory, at)
        step, commits = _PROGRESS.unpack_from(self._memory, at + _JOINED.size)
        ranks = self._memory[at + _RANKS_AT : at + _RANKS_AT + _RANKS * _HUNG.size]
        hung = min((until for (until,) in _HUNG.iter_unpack(ranks) if until), default=0.0)
        return Seen(bool(joined), step, commits, hung)

    def wait(self) -> bool:
        """Wait until a child asks for a look; False: the board is closed. A thread of its own."""
        with contextlib.suppress(OSError):
            return os.read(self._read, 4096).strip(b"\n") == b""
        return False

    def close(self) -> None:
        """Free all; `wait` ends. Once."""
        os.write(self._write, b"x")
        os.close(self._write)
        self._memory.close()
        self._file.close()


class Slot:
    """A child's end. Any thread; costs no system call but for `joined` and `hung`."""

    def __init__(self, memory: mmap.mmap | None = None, wake: int = -1, child: int = 0) -> None:
        self._memory, self._wake, self._at = memory, wake, child * _SLOT_BYTES
        self._joined, self._commits = False, 0

    def join(self) -> None:
        """This process takes part in a quorum. Call it before the first vote, hence before any peer
        that it trains with can finish."""
        if not self._joined and self._memory is not None:
            self._joined = True
            _JOINED.pack_into(self._memory, self._at, 1)
            self._tell()

    def committed(self, step: int) -> None:
        """A step was committed. Counts from `join` on: what comes before is no training."""
        if self._joined and self._memory is not None:
            self._commits += 1
            _PROGRESS.pack_into(self._memory, self._at + _JOINED.size, step, self._commits)

    def hangs(self, rank: int, until: float) -> None:
        """The loop of `rank` hangs, and is to be back by `until` (`time.monotonic()`); 0: it is."""
        if self._memory is not None:
            at = self._at + _RANKS_AT + rank % _RANKS * _HUNG.size
            _HUNG.pack_into(self._memory, at, until)
            if until:
                self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and so will be this process
            os.write(self._wake, b"\n")


def inherited(env: Mapping[str, str]) -> tuple[int, ...]:
    """The descriptors that a process with this environment must pass on to its children."""
    told = env.get(ENV_BOARD, "")
    return tuple(map(int, told.split(":")[:2])) if told else ()


@cache
def slot() -> Slot:
    """This process's slot; one that does nothing where no supervisor has started it.

    From the first call on the process prints its stacks when the supervisor asks for them.
    """
    told = os.environ.get(ENV_BOARD, "")
    if not told:
        return Slot()
    shared, wake, child, *nodes = map(int, told.split(":"))
    try:
        if [_node(shared), _node(wake)] != nodes:
            return Slot()
        memory = mmap.mmap(shared, 0)
    except OSError:  # a process that this one's process has started: it has no such descriptors
        return Slot()
    with contextlib.suppress(AttributeError, ValueError, OSError, RuntimeError):
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True, chain=False)
    return Slot(memory, wake, child)


def _node(descriptor: int) -> int:
    """The number of the file behind it: a process that inherits only the environment has others."""
    return os.fstat(descriptor).st_ino
