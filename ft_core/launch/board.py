"""What the processes of a supervisor tell it, in memory that they share with it: no message per step.

Each child has a slot: whether it trains, its step, how many steps it has committed, and for each
rank until when its loop must be back, if it hangs. A byte in a pipe wakes the supervisor when it has
to look. The two descriptors and the child's number are in the environment.

Behind the slots each rank has room for the stacks that it prints when the supervisor asks for them: those
of several ranks on one stderr would be mixed.

The last slot is the keeper's (`state_keeper.py`). It and the children tell each other on *cards* which
states they serve: a card per rank, where each rank has a part of the state.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

ENV_BOARD = "FT_SUPERVISOR_BOARD"
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGABRT
"""Has a process print the stacks of all of its threads."""
LEADER_LOOK_S = 0.05
"""How often a process that waits for the leader looks at the board: only the supervisor is woken."""
SCRIPT = 1 << 62
"""As the number of a training: all of the script, and what it writes."""
LEAVES = 2
"""In place of 1: it takes part for the last time."""
_RANKS_AT, _RANKS = 64, 128
_WRITES_AT, _LOST_AT, _PLACE_BYTES = 1088, 1184, 96
_ROWS_AT = 1280
_TRAINED_AT = 1288
_ERROR_AT, _ERROR_BYTES = 1296, 752
_CARDS_AT, _CARD_BYTES = 2048, 2048
_SLOT_BYTES = _CARDS_AT + _RANKS * _CARD_BYTES
_CARD = struct.Struct("<II")  # length and checksum of the JSON text that follows
_STACKS_BYTES = 1 << 20  # of one rank, in a sparse file; faulthandler writes 100 threads at most
_CHILD_BYTES = _SLOT_BYTES + _RANKS * _STACKS_BYTES
_FLAG, _PROGRESS, _HUNG = struct.Struct("<q"), struct.Struct("<qq"), struct.Struct("<d")
_JOINED_AT, _PROGRESS_AT, _LEADS_AT, _TRAINING_AT = 0, 8, 24, 32
_ENDED_AT, _DISOWNED_AT, _REWRITTEN_AT = 40, 48, 56
_DIED, _FINISHED = 1, 2


@dataclass(slots=True)
class Seen:
    """What a child's slot says, and what its supervisor goes by.

    Attributes:
        joined: it has taken part in a quorum.
        step: of its last commit; -1: none.
        commits: of this life.
        trained: step of its last commit that was a step of the training (`State.trains`); -1: none.
        leads: it writes for all.
        over: its training has ended, and it goes on with what follows.
        hung_until: when the first of its ranks that hang must be back (`time.monotonic()`); 0: none
            hangs.
        error: with which it ends, in one line; "": it has told none.
        writes: where its script may be writing by itself, for all; "": nowhere.
        lost: where a life of this child has died in that, and no process has come since; "": nowhere.
        done: its script has ended, and has written all, unless the exit code is an error.
    """

    joined: bool = False
    step: int = -1
    commits: int = 0
    trained: int = -1
    leads: bool = False
    over: bool = False
    hung_until: float = 0.0
    error: str = ""
    writes: str = ""
    lost: str = ""
    done: bool = False


class Board:
    """The supervisor's end. `whole`: its children are the whole job. `told`: what else they find in
    their environment."""

    def __init__(
        self, count: int, *, whole: bool = True, told: Mapping[str, str] | None = None
    ) -> None:
        self._whole, self._told = whole, dict(told or {})
        self.keeper = count
        """The number of the keeper's slot. Read only."""
        self._file = _in_memory()
        self._file.truncate((count + 1) * _CHILD_BYTES)
        self._memory = mmap.mmap(self._file.fileno(), (count + 1) * _SLOT_BYTES)
        self._read, self._write = os.pipe()
        self.descriptors = (self._file.fileno(), self._write)

    def environment(self, child: int) -> dict[str, str]:
        """What `child` needs to find its slot."""
        shared, wake = self.descriptors
        nodes = f"{_node(shared)}:{_node(wake)}"
        return {**self._told, ENV_BOARD: f"{shared}:{wake}:{child}:{self._whole:d}:{nodes}"}

    def clear(self, child: int) -> None:
        """A new life begins."""
        at = child * _SLOT_BYTES
        kept, rest = at + _LOST_AT, at + _ERROR_AT  # others may be at `wrote` or `last_row` now
        self._memory[at:kept] = bytes(_LOST_AT)
        self._memory[rest : at + _SLOT_BYTES] = bytes(at + _SLOT_BYTES - rest)
        _PROGRESS.pack_into(self._memory, at + _PROGRESS_AT, -1, 0)
        _FLAG.pack_into(self._memory, at + _TRAINED_AT, -1)

    def finished(self, child: int) -> None:
        """Its process has ended well, so its script has: the others see it."""
        at = child * _SLOT_BYTES
        _FLAG.pack_into(self._memory, at + _TRAINING_AT, SCRIPT)
        _FLAG.pack_into(self._memory, at + _ENDED_AT, _FINISHED)

    def died(self, child: int) -> None:
        """Its process has ended, and not well: the others see it."""
        at = child * _SLOT_BYTES
        _FLAG.pack_into(self._memory, at + _ENDED_AT, _DIED)
        if place := _text_in(self._memory, at + _WRITES_AT, _PLACE_BYTES):
            _put_text(self._memory, at + _LOST_AT, _PLACE_BYTES, place)
            if _FLAG.unpack_from(self._memory, at + _REWRITTEN_AT)[0]:  # read last: see `wrote`
                _put_text(self._memory, at + _LOST_AT, _PLACE_BYTES, "")

    def look(self, child: int) -> Seen:
        """A child's slot."""
        at = child * _SLOT_BYTES
        joined, leads, training, trained = (
            _FLAG.unpack_from(self._memory, at + flag)[0]
            for flag in (_JOINED_AT, _LEADS_AT, _TRAINING_AT, _TRAINED_AT)
        )
        step, commits = _PROGRESS.unpack_from(self._memory, at + _PROGRESS_AT)
        ranks = self._memory[at + _RANKS_AT : at + _RANKS_AT + _RANKS * _HUNG.size]
        hung = min((until for (until,) in _HUNG.iter_unpack(ranks) if until), default=0.0)
        error = _text_in(self._memory, at + _ERROR_AT, _ERROR_BYTES)
        writes, lost = (
            _text_in(self._memory, at + text_at, _PLACE_BYTES) for text_at in (_WRITES_AT, _LOST_AT)
        )
        over, done = training > 0, training == SCRIPT
        return Seen(
            bool(joined), step, commits, trained, bool(leads), over, hung, error, writes, lost, done
        )

    def card(self, child: int) -> dict[str, Any] | None:
        """What a child has said about its state; None: nothing, or it is just being written."""
        return _card_in(self._memory, child * _SLOT_BYTES)

    def stacks(self, child: int) -> dict[int, str]:
        """The stacks that ranks of a child have printed since the last call, by local rank."""
        found, shared = {}, self._file.fileno()
        for rank in range(_RANKS):
            at = _stacks_at(shared, child, rank)
            if os.pread(shared, 1, at).strip(b"\0"):
                text = os.pread(shared, _STACKS_BYTES, at).rstrip(b"\0")
                os.pwrite(shared, bytes(len(text)), at)
                found[rank] = text.decode(errors="replace")
        return found

    def wait(self) -> bool:
        """Wait until a child asks for a look; False, once: the board is closed. A thread of its own."""
        if os.read(self._read, 4096).strip(b"\n") == b"":
            return True
        os.close(self._read)
        return False

    def close(self) -> None:
        """Free all; `wait` ends, and frees what it has read. Once."""
        os.write(self._write, b"x")
        os.close(self._write)
        self._memory.close()
        self._file.close()


class Slot:
    """A child's end. Any thread; costs no system call but for `joined` and `hung`.

    Without arguments: of a process that no supervisor has started. What it says is then in memory of its own.
    """

    def __init__(
        self,
        memory: mmap.mmap | None = None,
        wake: int = -1,
        child: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        self._memory = memory or mmap.mmap(-1, 2 * _SLOT_BYTES)  # its own slot, and the keeper's
        self._wake, self._at, self._whole = wake, child * _SLOT_BYTES, whole
        self._keepers_at = len(self._memory) - _SLOT_BYTES
        self.there = memory is not None
        """Whether a supervisor has started this process. Read only."""
        self._joined, self._over, self._commits = False, False, 0
        self._row = 0

    def leave_to_parent(self) -> None:
        """This process was forked from the slot's. No supervisor has started it, and what it says is not told."""
        Slot.__init__(self)

    def join(self) -> None:
        """This process takes part in a quorum of the training. Call it before the first vote, hence
        before any peer that it trains with can finish. Idempotent."""
        if not self._joined:
            self._joined = True
            self._set(_JOINED_AT, True)
            self._tell()

    def leaves(self) -> None:
        """This process takes part for the last time. Call it before the vote that says so."""
        self._set(_JOINED_AT, LEAVES)

    def others_leave(self) -> bool:
        """Whether all others that take part, of which there is one at least, do so for the last time."""
        joined = [self._get(at + _JOINED_AT) for at in self._not_dead() if at != self._at]
        return self.whole and set(joined) - {0} == {LEAVES}

    def committed(self, step: int, *, trains: bool = True) -> None:
        """A step was committed. `trains`: it is one of the training, and no operation of the script's."""
        self._commits += 1
        if trains:
            self._set(_TRAINED_AT, step)
        _PROGRESS.pack_into(self._memory, self._at + _PROGRESS_AT, step, self._commits)

    def leads(self, yes: bool) -> None:
        """Whether this process writes for all. Rank 0 of a replica group calls it."""
        self._set(_LEADS_AT, yes)

    def training(self, number: int, *, over: bool) -> None:
        """This process begins training `number` of its script, counted from 1; or that has ended, and it
        goes on with what follows."""
        self._over = over
        if not over:
            self._row = number << 40
        self._set(_TRAINING_AT, number if over else -number)
        self._tell()  # too few may be left for another training

    def shut_down(self) -> None:
        """Python shuts down, and this process may be killed in that. If its training is over, the script
        has written all, unless it ends with an error. (`sys.exit(3)` is seen here only within `reported`; else the exit
        code tells.)"""
        if self._over and not hasattr(sys, "last_value"):
            self.training(SCRIPT, over=True)

    def has_passed(self, number: int) -> bool:
        """Whether another process of this supervisor has ended training `number` of the script that both
        run, or is in a later one. Never where other machines train, too: it can't see them."""
        return self.whole and any(self._is_past(at, number) for at in self._others())

    def others_are_past(self) -> bool:
        """Whether all others that have not died, of which there is one at least, have ended the training that
        this process is in. So none will come to train with it."""
        others, number = self._others(), self._number()
        return self.whole and bool(others) and all(self._is_past(at, number) for at in others)

    def another_is_past(self) -> bool:
        """Whether one of them has."""
        return self.has_passed(self._number())

    def _number(self) -> int:
        """Of the training that this process is in."""
        return max(1, -self._get(self._at + _TRAINING_AT))

    def _others(self) -> list[int]:
        return [at for at in self._not_dead() if at not in (self._at, self._keepers_at)]

    def _is_past(self, at: int, training: int) -> bool:
        told = self._get(at + _TRAINING_AT)
        return told >= training or -told > training

    def failed(self, error: str) -> None:
        """This process ends with `error`, which the supervisor repeats in its last line."""
        line = " ".join(error.split())
        _put_text(self._memory, self._at + _ERROR_AT, _ERROR_BYTES, line)

    def evaluates(self) -> None:
        """This process's script begins an evaluation after a training. Rows are counted in each anew: some
        processes may log more of one."""
        self._row = ((self._row >> 20) + 1) << 20

    def next_row(self) -> int:
        """The number of the row that the script logs now. It is the same in all processes, and grows."""
        self._row += 1
        return self._row

    def logged(self, row: int) -> None:
        """This process, which writes for all, has logged this row, or a life before it has, which was further."""
        self._set(_ROWS_AT, max(row, self._get(self._at + _ROWS_AT)))

    def evaluated(self) -> None:
        """This process, which writes for all, has ended the evaluation that it has begun last."""
        self.logged(self._last_of_evaluation)

    def await_evaluated(self) -> None:
        """Wait until the process that writes for all has ended the evaluation that this one is in, is dead, or
        is elsewhere in its script: behind it, or in a later training."""
        while self.last_row < self._last_of_evaluation and self._leader_follows():
            time.sleep(LEADER_LOOK_S)

    @property
    def _last_of_evaluation(self) -> int:
        return self._row | (1 << 20) - 1

    def _leader_follows(self) -> bool:
        """Whether it is between the same two trainings as this process."""
        leads = [at for at in self._others() if self._get(at + _LEADS_AT)]
        return any(
            self._get(at + _TRAINING_AT) == self._get(self._at + _TRAINING_AT) for at in leads
        )

    @property
    def last_row(self) -> int:
        """The last of these rows that any process has logged, dead or not; 0: none."""
        slots = range(0, len(self._memory), _SLOT_BYTES)
        return max(self._get(at + _ROWS_AT) for at in slots)

    def writes(self, place: str) -> None:
        """Where the script may be writing by itself now, for all; "": nowhere."""
        self._set(_REWRITTEN_AT, False)
        _put_text(self._memory, self._at + _WRITES_AT, _PLACE_BYTES, place)

    def wrote(self, places: Collection[str]) -> None:
        """The script has been at these places, for all: what was lost there is written again.

        Also by a process whose death the supervisor has not seen yet. It puts down what is lost and then reads
        the flag, and here the flag comes first, so one of the two finds the other's.
        """
        cut = {_cut(place, _PLACE_BYTES) for place in places}
        for at in range(0, len(self._memory), _SLOT_BYTES):
            if _text_in(self._memory, at + _WRITES_AT, _PLACE_BYTES).encode() in cut:
                _FLAG.pack_into(self._memory, at + _REWRITTEN_AT, True)
            if _text_in(self._memory, at + _LOST_AT, _PLACE_BYTES).encode() in cut:
                _put_text(self._memory, at + _LOST_AT, _PLACE_BYTES, "")

    @property
    def whole(self) -> bool:
        """Whether one supervisor has all replica groups of the job."""
        return self.there and self._whole

    def takes_over(self) -> bool:
        """Whether this process, whose training is over, has to write now: the one that did is dead,
        and this is the first that is left. Never where other machines train, too: it can't see them."""
        if not self.whole:
            return False
        left = self._not_dead()
        if any(self._get(at + _LEADS_AT) for at in left):
            return False
        running = (at for at in left if not self._get(at + _ENDED_AT))
        over = (at for at in running if self._get(at + _TRAINING_AT) > 0)
        return self._at == min(over, default=-1)

    def none_has_trained(self) -> bool:
        """Whether no other process that lives has come to a training of the script: none has become the leader.
        Never where other machines train, too."""
        return self.whole and not any(
            self._get(at + _JOINED_AT) or self._get(at + _TRAINING_AT) not in (0, SCRIPT)
            for at in self._others()  # one that has `finished` need not have trained
        )

    def await_leader(self, number: int) -> None:
        """Wait until the process that writes for all has come to the end of training `number`, or is dead.
        Not where other machines train, too."""
        while self._leader_writes(number):
            time.sleep(LEADER_LOOK_S)

    def _leader_writes(self, number: int) -> bool:
        leads = [at for at in self._not_dead() if self._get(at + _LEADS_AT)]
        # One that was stopped is still down as the leader beside its successor.
        return self.whole and bool(leads) and not any(self._is_past(at, number) for at in leads)

    def tell(self, card: Mapping[str, Any], rank: int = 0) -> bool:
        """Put the card of a rank of this child on the board; False: there is no board, or it does not fit."""
        text = json.dumps(card).encode()
        if not self.there or _CARD.size + len(text) > _CARD_BYTES or rank >= _RANKS:
            return False
        at = self._at + _CARDS_AT + rank * _CARD_BYTES
        self._memory[at + _CARD.size : at + _CARD.size + len(text)] = text
        _CARD.pack_into(self._memory, at, len(text), zlib.crc32(text))
        return True

    def cards(self) -> dict[int, dict[str, Any]]:
        """The cards of the first ranks of children that are not known to be dead, by their number."""
        found = {child: self.card(child) for child in range(self._keepers_at // _SLOT_BYTES)}
        return {child: card for child, card in found.items() if card is not None}

    def card(self, child: int, rank: int = 0) -> dict[str, Any] | None:
        """The card of a rank of a child; None: it has none, is known to be dead, or is just being written."""
        at = child * _SLOT_BYTES
        return None if self._get(at + _ENDED_AT) == _DIED else _card_in(self._memory, at, rank)

    def progress_of(self, child: int) -> tuple[int, int]:
        """The step of a child's last commit (-1: none), and how many it has made."""
        step, commits = _PROGRESS.unpack_from(self._memory, child * _SLOT_BYTES + _PROGRESS_AT)
        return step, commits

    def keepers_card(self, rank: int = 0) -> dict[str, Any] | None:
        """What the keeper has said about a rank's part; None: nothing, or it is just being written."""
        return _card_in(self._memory, self._keepers_at, rank)

    def forget_kept(self, parts: int) -> None:
        """K4: no process begins with what the keeper holds, until it has shown another version. Any
        process; `disowned` has changed before what it holds is gone."""
        _FLAG.pack_into(self._memory, self._keepers_at + _DISOWNED_AT, self.disowned + 1)
        for rank in range(parts):
            _CARD.pack_into(self._memory, self._keepers_at + _CARDS_AT + rank * _CARD_BYTES, 0, 0)

    @property
    def disowned(self) -> int:
        """Changes with each `forget_kept`."""
        return self._get(self._keepers_at + _DISOWNED_AT)

    def others_train(self) -> bool:
        """Whether another process of this supervisor takes part in a quorum, as far as is known."""
        return any(self._get(at + _JOINED_AT) for at in self._not_dead() if at != self._at)

    def _not_dead(self) -> list[int]:
        """Where the slots begin of processes that live, as far as is known, or have finished."""
        slots = range(0, len(self._memory), _SLOT_BYTES)
        return [at for at in slots if self._get(at + _ENDED_AT) != _DIED]

    def _get(self, at: int) -> int:
        number: int = _FLAG.unpack_from(self._memory, at)[0]
        return number

    def _set(self, flag: int, number: int) -> None:
        _FLAG.pack_into(self._memory, self._at + flag, number)

    def hangs(self, rank: int, until: float) -> None:
        """The loop of `rank` hangs, and is to be back by `until` (`time.monotonic()`); 0: it is."""
        _HUNG.pack_into(self._memory, self._at + _RANKS_AT + rank % _RANKS * _HUNG.size, until)
        if until:
            self._tell()

    def _tell(self) -> None:
        # There is no supervisor, or it is gone, and so will be this process.
        with contextlib.suppress(OSError):
            os.write(self._wake, b"\n")


def inherited(env: Mapping[str, str]) -> tuple[int, ...]:
    """The descriptors that a process with this environment must pass on to its children."""
    told = env.get(ENV_BOARD, "")
    return tuple(map(int, told.split(":")[:2])) if told else ()


@cache
def slot() -> Slot:
    """This process's slot; one that does nothing where no supervisor has started it.

    From the first call on the process prints its stacks on the board when the supervisor asks for them, and
    says there when it has come to its end. A process that is forked from it later says nothing.
    """
    told = os.environ.get(ENV_BOARD, "")
    if not told:
        return Slot()
    shared, wake, child, whole, *nodes = map(int, told.split(":"))
    try:
        if [_node(shared), _node(wake)] != nodes:
            return Slot()
        memory = mmap.mmap(shared, os.fstat(shared).st_size // _CHILD_BYTES * _SLOT_BYTES)
    except OSError:  # a process that this one's process has started: it has no such descriptors
        return Slot()
    with contextlib.suppress(AttributeError, ValueError, OSError, RuntimeError):
        # Opened again: it is written at a place of its own.
        stacks = os.open(f"/proc/self/fd/{shared}", os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(
            stacks, _stacks_at(shared, child, int(os.environ.get("LOCAL_RANK", 0))), os.SEEK_SET
        )
        faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True, chain=False)
    found = Slot(memory, wake, child, whole=bool(whole))
    atexit.register(found.shut_down)
    os.register_at_fork(after_in_child=found.leave_to_parent)
    return found


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """The supervisor is told the error that leaves this, and exit hooks are (`sys.last_value`)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit):
            slot().failed(f"{type(error).__name__}: {error}")
        elif error.code not in (None, 0):
            sys.last_value = error  # which Python leaves of all errors but this one
            if isinstance(error.code, str):
                slot().failed(error.code)
        raise


def _text_in(memory: mmap.mmap, at: int, size: int) -> str:
    """What `_put_text` has put there."""
    return memory[at : at + size].partition(b"\0")[0].decode(errors="ignore")


def _put_text(memory: mmap.mmap, at: int, size: int, text: str) -> None:
    """Put as much of a text there as has room."""
    line = _cut(text, size)
    memory[at : at + len(line) + 1] = line + b"\0"


def _cut(text: str, size: int) -> bytes:
    """As much of it as has room before the zero byte, in whole characters."""
    return text.encode()[: size - 1].decode(errors="ignore").encode()


def _card_in(memory: mmap.mmap, at: int, rank: int = 0) -> dict[str, Any] | None:
    """The card of a rank in the slot that begins there."""
    at += _CARDS_AT + rank * _CARD_BYTES
    length, checksum = _CARD.unpack_from(memory, at)
    begin = at + _CARD.size
    text = memory[begin : begin + length]
    if not length or zlib.crc32(text) != checksum:
        return None
    card: dict[str, Any] = json.loads(text)
    return card


def _stacks_at(shared: int, child: int, rank: int) -> int:
    """Where in the board's file the stacks of a rank are."""
    count = os.fstat(shared).st_size // _CHILD_BYTES
    return count * _SLOT_BYTES + (child * _RANKS + rank % _RANKS) * _STACKS_BYTES


def _in_memory() -> IO[bytes]:
    """A file of no disk: a write to memory that is mapped from a full one ends the process (SIGBUS)."""
    if sys.platform.startswith("linux"):
        return os.fdopen(os.memfd_create("ft-board", os.MFD_CLOEXEC), "r+b", buffering=0)
    return tempfile.TemporaryFile()


def _node(descriptor: int) -> int:
    """The number of the file behind it: a process that inherits only the environment has others."""
    return os.fstat(descriptor).st_ino
