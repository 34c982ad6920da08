"""One process for each replica group of this machine, restarted when it dies.

The supervisor trains nothing: it holds the lighthouse and waits for its children. It does not poll.
A thread per child waits for the child's end, signals arrive as events, and the main thread sleeps
until an event or until the next restart is due. Children end with the supervisor (`die_with`).

What follows the end of a child is decided by `RestartPolicy`. A child that was evicted because its
loop hangs, and is not back in time, has to print its stacks; then it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

from ft_core.environment import Supervision
from ft_core.launch import kept_files
from ft_core.launch.board import DUMP_SIGNAL, Board, Seen
from ft_core.launch.keeping import Keeping
from ft_core.launch.kept import Card
from ft_core.launch.restarts import (
    EXTERNAL_SIGNALS,
    NOT_AT_FAULT,
    OVER_EXIT_CODE,
    REMEMBERED,
    Again,
    Death,
    GiveUp,
    History,
    RestartPolicy,
)
from ft_core.launch.warm.orders import Started
from ft_core.launch.warm.starter import WarmStarter
from lighthouse.files import hold_standard_streams, write_out
from lighthouse.waits import Overdue

STOP_TIMEOUT_S = 30.0
DUMP_S = 1.0
"""How long a process that hangs has to print its stacks."""
SIGNAL_LOOK_S = 1.0
"""No wait lasts longer, as in `lighthouse.keeper`, which is not imported here: this is imported with torch."""
TELL_AGAIN_S, TELL_TIMEOUT_S = 0.5, 5.0
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")
Environment = Callable[[int], dict[str, str]]


@dataclass(slots=True)
class Child:
    """The process of one replica group, and its predecessors.

    Attributes:
        index: among the children of this supervisor.
        number: of the replica group in the whole job, for messages; -1 means `index`.
        restarts: how often it was restarted.
        restart_at: when it is restarted (`time.monotonic()`), or None.
        seen: what the process that runs (or ended last) has told.
        joined_at: since when that has taken part in a quorum; None: it has not.
        kill_at: when it is killed, having printed its stacks.
        exit_code: of the last process that ended, as Popen's: negative for a signal.
        forked: whether the process that runs (or ended last) was forked from a template.
        given_up: it will not run again, and that was told.
        sent_away: it is killed, since it runs in vain, and that was told.
        history: how its processes ended that failed.
    """

    index: int
    number: int = -1
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    restart_at: float | None = None
    seen: Seen = field(default_factory=Seen)
    joined_at: float | None = None
    kill_at: float | None = None
    exit_code: int | None = None
    forked: bool = False
    given_up: bool = False
    sent_away: bool = False
    history: History = ()

    def begin(
        self,
        popen: Callable[..., subprocess.Popen[bytes]],
        command: Sequence[str],
        env: dict[str, str],
        descriptors: Sequence[int],
    ) -> None:
        """Start its next process. Cold, if the last one was forked and has ended by an error: that may be one of what
        was imported ahead. Lightning, for one, treats a class of loaders otherwise that was there before."""
        code = self.exit_code or 0
        external = code in NOT_AT_FAULT or -code in EXTERNAL_SIGNALS
        if self.forked and code and not external:
            popen = subprocess.Popen
        # A process group of its own, so that the terminal's Ctrl-C reaches it only through us.
        self.process = popen(command, env=env, process_group=0, pass_fds=descriptors)
        self.forked = isinstance(self.process, Started) and self.process.warm

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.index

    @property
    def running(self) -> bool:
        """Whether its process has not been reported as ended."""
        return self.process is not None

    def supervision(self, children: int) -> Supervision:
        """What its next process is told of itself. `children`: how many there are."""
        pid, restarts = os.getpid(), self.restarts
        return Supervision(pid=pid, restarts=restarts, child=self.index, children=children)


@dataclass(frozen=True, slots=True)
class _Ended:
    index: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class _Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class _Look:
    """A child asks for a look at the board."""


_Event = _Ended | _Signalled | _Look


@dataclass(slots=True)
class Roster:
    """The children, and what has become of them. Times are given, and nothing is started here.

    Attributes:
        policy: what follows the death of one.
        min_alive: with fewer children that run or will run, the rest cannot go on.
        commits: of all processes that have ended.
        fault: the child whose end was an error of the script.
        unwritten: (number, exit code) of the child that wrote for all and died last, if none has done so to its end since.
        witnesses: children that trained with it then, and have not died in their training since.
    """

    policy: RestartPolicy
    min_alive: int
    children: list[Child] = field(default_factory=list)
    commits: int = 0
    fault: Child | None = None
    unwritten: tuple[int, int] | None = None
    witnesses: list[Child] = field(default_factory=list)

    def ended(self, child: Child, exit_code: int, now: float, kept: int = -1) -> str:
        """Record the end of a child's process; returns a sentence: what happened, what follows; "": that was
        told, by itself or when it was killed.

        What the child has `seen` is of the process that has ended. `kept`: see `Death`.
        """
        hung, child.kill_at = child.kill_at is not None, None
        child.process, child.exit_code, child.seen.hung_until = None, exit_code, 0.0
        how = f"replica group {child.number} {_how(exit_code, hung)}"
        if exit_code and child.seen.writes:
            how += f" where the script itself may have been writing ({child.seen.writes})"
        if self.fault is not None:
            return how
        if exit_code == OVER_EXIT_CODE or (exit_code and child.sent_away):
            return ""
        self.commits += child.seen.commits
        trained_s = 0.0 if child.joined_at is None else now - child.joined_at
        kept = -1 if child.seen.over else kept
        seen, commits = child.seen, self._all_commits()
        death = Death(now, exit_code, seen.step, trained_s, seen.trained, commits, kept=kept)
        seen.commits = 0
        others = [c for c in self.children if c is not child]
        if exit_code and not child.seen.over and child in self.witnesses:
            self.witnesses.remove(child)
        # A script that exits with an error shuts Python down, too.
        whole = exit_code == 0 or (exit_code < 0 and child.seen.done)
        if child.seen.leads and whole:
            self.unwritten = None
        elif child.seen.leads and not self.policy.elsewhere:
            self.unwritten = child.number, exit_code
            self.witnesses = [
                c
                for c in others
                if c.seen.over or (c.seen.joined and (c.running or c.exit_code == 0))
            ]
        child.seen.leads = child.seen.leads and whole
        if exit_code == 0:
            return f"replica group {child.number} has finished"
        child.history = (*child.history[-REMEMBERED:], death)
        if self._finished():
            return (
                f"{how}; it is not started again, since another has finished and would not be there "
                "to heal from"
            )
        histories = [c.history for c in self.children]
        lives = [c.seen.trained >= 0 if c.running else None for c in self.children]
        verdict = self.policy.after(histories, self.children.index(child), lives)
        if isinstance(verdict, Again):
            child.history = (*child.history[:-1], replace(death, level=verdict.level))
            child.restart_at = now + verdict.pause_s
            alive = sum(c.running for c in self.children)
            latest = now + self.policy.longest_wait_s(len(self.children), alive)
            for other in others:
                if other.restart_at is not None:
                    other.restart_at = min(other.restart_at, latest)
            when = f"in {verdict.pause_s:g} s" if verdict.pause_s else "at once"
            return f"{how}; it is started again {when}"
        if isinstance(verdict, GiveUp):
            return f"{how}; it is {verdict.why}"
        for other in self.children:
            other.restart_at = None
        self.fault = child
        return f"{how}, and {verdict.why}, so nothing is started again"

    def _finished(self) -> bool:
        """Whether one has trained to the end."""
        return any(c.exit_code == 0 and not c.running for c in self.children)

    def _all_commits(self) -> int:
        return self.commits + sum(c.seen.commits for c in self.children if c.running)

    def too_late(self) -> list[Child]:
        """Children that run in vain, to be killed; each once. Others have trained to the end before these
        joined, so that these would start from scratch, alone. Not those that have found their training over."""
        if not any(c.exit_code == 0 and not c.running and c.seen.joined for c in self.children):
            return []
        for child in self.children:
            child.restart_at = None
        running = [c for c in self.children if c.running and not c.sent_away]
        late = [c for c in running if not (c.seen.joined or c.seen.over)]
        for child in late:
            child.sent_away = True
        return late

    def due(self, now: float) -> list[Child]:
        """Children to restart now; marks them as restarted."""
        due = [c for c in self.children if c.restart_at is not None and now >= c.restart_at]
        for child in due:
            child.restart_at = None
            child.restarts += 1
            child.seen, child.joined_at = Seen(lost=child.seen.lost), None
        return due

    def hanging(self, now: float) -> list[Child]:
        """Children that hang and are not back in time; each once: they are killed at `kill_at`."""
        found = [c for c in self.children if self._back_by(c) <= now]
        for child in found:
            child.kill_at = now + DUMP_S
        return found

    def _back_by(self, child: Child) -> float:
        """When the loop of a child must be back, if it hangs: at once, if another has trained to the end,
        since it would find the training over."""
        if not (child.running and child.seen.hung_until and child.kill_at is None):
            return math.inf
        return 0.0 if self._finished() and not child.seen.over else child.seen.hung_until

    def doomed(self, now: float) -> list[Child]:
        """Children to kill now, since they hang; each once."""
        found = [c for c in self.children if c.running and c.kill_at is not None]
        found = [c for c in found if c.kill_at is not None and c.kill_at <= now]
        for child in found:
            child.kill_at = math.inf
        return found

    def next_due(self) -> float | None:
        """When `due`, `hanging` or `doomed` returns a child next, or None."""
        times = [c.restart_at for c in self.children]
        times += [self._back_by(c) for c in self.children]
        times += [c.kill_at for c in self.children if c.running]
        return min((each for each in times if each not in (None, math.inf)), default=None)

    def given_up(self) -> list[Child]:
        """Children that will not run again, and have not trained to the end; each is named once."""
        lost = [c for c in self.children if c.exit_code is not None and not c.given_up]
        lost = [c for c in lost if not c.running and c.restart_at is None]
        lost = [c for c in lost if c.exit_code not in (0, OVER_EXIT_CODE) or not c.seen.joined]
        for child in lost:
            child.given_up = True
        return lost

    def over(self) -> bool:
        """Whether no child runs or will run."""
        return not any(c.running or c.restart_at is not None for c in self.children)

    def stuck(self) -> bool:
        """Whether too few children are left to go on. Not where one has finished, or has ended its training and
        goes on with what follows, which it does alone."""
        alive = sum(c.running or c.restart_at is not None for c in self.children)
        over = any(c.running and c.seen.over for c in self.children)
        return 0 < alive < self.min_alive and not over and not self._finished()

    def missing(self) -> str:
        """A sentence, if what one process had to write for all may be missing; else ""."""
        return self._missing()[0]

    def _missing(self) -> tuple[str, int]:
        """... and the exit code of that process.

        Others have trained to the end after its death, and none of them wrote for all since, so they made
        no step without it. Or it died where the script itself writes, and no other came there again.
        """
        if self.policy.elsewhere or self.fault is not None:
            return "", 0
        lost = next((c for c in self.children if c.seen.lost), None)
        if lost is not None and self._finished():
            return (
                f"replica group {lost.number} died where the script itself writes in the main process "
                f"({lost.seen.lost}), and no main process came there again: what it wrote there is missing "
                "or not whole"
            ), lost.history[-1].exit_code
        if self.unwritten is None or not self.witnesses or any(c.seen.leads for c in self.children):
            return "", 0
        number, code = self.unwritten
        return (
            f"replica group {number} {_how(code, False)} when it wrote for all, at the end of the "
            "training, and no other has taken over: what it had not written is missing"
        ), code

    def exit_code(self) -> int:
        """The exit code of the supervisor: 0 if the training finished and no script failed.

        A process that was killed, or has asked to be started again, and is not, since others have finished,
        has lost nothing, unless it wrote for all.
        """
        if self.fault is not None:
            code = self.fault.exit_code or 0
            return code if code > 0 else 128 - code
        codes = [c.exit_code or 0 for c in self.children]
        failed = [code for code in codes if code > 0 and code not in NOT_AT_FAULT]
        if failed:
            return failed[0]
        sentence, code = self._missing()
        if sentence:
            return code if code > 0 else 128 - code
        if any(code in (0, OVER_EXIT_CODE) for code in codes):
            return 0
        return next((code for code in codes if code > 0), 128 - codes[0])


def supervise(
    command: Sequence[str],
    environment: Environment,
    *,
    count: int,
    min_alive: int,
    max_restarts: int | None,
    first: int = 0,
    elsewhere: bool = False,
    speaker: str = "ft",
    on_given_up: Callable[[int], None] | None = None,
    warm: WarmStarter | None = None,
    keep_state_s: float = 0.0,
    keep_state_dir: str = "",
) -> int:
    """Run `count` processes of `command` until all have ended; returns this process's exit code.

    SIGINT and SIGTERM are passed on to the children; those that have not ended `STOP_TIMEOUT_S`
    later are killed. Each event is one line on stderr. Main thread only.

    Args:
        command: of every child.
        environment: called with a child's index at each start; its environment, but for `Supervision`.
        count: of children.
        min_alive, max_restarts, elsewhere: see `Roster` and `RestartPolicy`.
        first: the replica group number of the first child.
        speaker: what the lines on stderr begin with.
        on_given_up: called, in a thread of its own, with the number of a replica group that will not run
            again, unless its training is complete. `tell_lighthouse` makes one.
        warm: starts the processes, and is closed; None: they are started cold.
        keep_state_s: the keeper, a further process, fetches the state at this interval, with which
            children begin when all have died; 0: there is none.
        keep_state_dir: where it writes that, too, for a supervisor that is started again; "": nowhere.
    """
    hold_standard_streams()
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    board = Board(count, whole=not elsewhere, told=kept_files.environment(keep_state_dir))
    children = [Child(i, first + i) for i in range(count)]
    roster = Roster(RestartPolicy(max_restarts, elsewhere), min_alive, children)
    popen = subprocess.Popen if warm is None else warm.popen

    def start(child: Child) -> None:
        board.clear(child.index)
        told = child.supervision(count).environment() | board.environment(child.index)
        env = environment(child.index) | told
        child.begin(popen, command, env, board.descriptors)
        ends = child.index, child.process, events
        threading.Thread(target=_wait, args=ends, daemon=True).start()

    keeping = Keeping(board, popen, environment, keep_state_s, speaker, keep_state_dir)
    tellers: list[threading.Thread] = []
    given_up = partial(_tell, on_given_up, tellers)
    threading.Thread(target=_watch, args=(board, events), daemon=True).start()
    signals = hear_endings(lambda number, frame: events.put(_Signalled(number)))
    try:
        for child in roster.children:
            start(child)
        code = _Run(roster, board, events, start, partial(say, speaker), given_up).to_the_end()
        keeping.close(over=code == 0)
        return code
    finally:
        for teller in tellers if elsewhere else ():
            teller.join(TELL_TIMEOUT_S)
        _kill_all(roster)
        keeping.close(over=False)
        if warm is not None:
            warm.close()
        board.close()
        _restore(signals)


def _tell(
    on_given_up: Callable[[int], None] | None, tellers: list[threading.Thread], number: int
) -> None:
    """See `supervise`. `tellers`: gets the thread."""
    if on_given_up is not None:
        teller = threading.Thread(target=on_given_up, args=(number,), daemon=True)
        with contextlib.suppress(RuntimeError):  # no threads are left: the others wait for longer
            teller.start()
            tellers.append(teller)


@dataclass(slots=True)
class _Run:
    """The supervisor's loop.

    Attributes:
        stopped: none is started again: those that run are to end, and are killed at `kill_at`.
        stopped_by: the signal for which.
    """

    roster: Roster
    board: Board
    events: queue.SimpleQueue[_Event]
    start: Callable[[Child], None]
    say: Callable[[str], None]
    given_up: Callable[[int], None]
    stopped: bool = False
    stopped_by: int | None = None
    kill_at: float | None = None

    def to_the_end(self) -> int:
        """Until all children have ended; returns the exit code."""
        roster = self.roster
        while not roster.over():
            wake_at = self.kill_at if self.stopped else roster.next_due()
            event = take(self.events, wake_at)
            if event is None:
                self._time_is_up()
            elif isinstance(event, _Signalled):
                self._stop(event.number)
            elif isinstance(event, _Look):
                self._look()
            else:
                self._ended(roster.children[event.index], event.exit_code)
            if not self.stopped and roster.stuck():
                self.say(
                    f"fewer than min_replicas={roster.min_alive} replica groups are left, and no other comes "
                    "back, so no step can be made: stopping. With a smaller min_replicas the others would go on"
                )
                self._stop(signal.SIGTERM)
        if self.stopped_by is not None:
            return roster.exit_code() or 128 + self.stopped_by
        self._look()
        if sentence := roster.missing():
            self.say(sentence)
        return roster.exit_code()

    def _time_is_up(self) -> None:
        if self.stopped:
            _kill_all(self.roster)
            self.kill_at = None
            return
        now = time.monotonic()
        self._look()  # it may be back
        for child in self.roster.hanging(now):
            self.say(
                f"replica group {child.number} was evicted, since its training loop hangs; it prints "
                "its stacks and is killed"
            )
            _signal(child, DUMP_SIGNAL)
        for child in self.roster.doomed(now):
            _kill(child)
        for child in self.roster.due(now):
            try:
                self.start(child)
            except (OSError, RuntimeError) as error:  # no process, memory or thread is left
                self._not_started(child, error)

    def _not_started(self, child: Child, error: Exception) -> None:
        """As if it had been killed, so that it is tried again: the others have no part in it."""
        self.say(
            f"replica group {child.number} can't be started ({error}), which counts as its end"
        )
        if child.process is not None:  # and nobody waits for its end
            _kill(child)
            child.process.wait()
        self._ended(child, -signal.SIGKILL)

    def _stop(self, number: int) -> None:
        self.stopped, self.stopped_by = True, number
        self.kill_at = time.monotonic() + STOP_TIMEOUT_S
        for child in self.roster.children:
            _signal(child, number)
            child.restart_at = None

    def _look(self) -> None:
        """Take over what the children that run have told."""
        for child in self.roster.children:
            seen = self.board.look(child.index)
            if child.running:
                if seen.joined and not child.seen.joined:
                    child.joined_at = time.monotonic()
                child.seen = seen
            else:
                child.seen.lost = seen.lost

    def _ended(self, child: Child, exit_code: int) -> None:
        self._look()
        for rank, stacks in self.board.stacks(child.index).items():
            self.say(f"replica group {child.number}, the stacks of local rank {rank}:\n{stacks}")
        if self.stopped:
            child.process, child.exit_code = None, exit_code
            return
        roster = self.roster
        if exit_code:
            self.board.died(child.index)
            child.seen.lost = self.board.look(child.index).lost
        else:
            self.board.finished(child.index)
        held = self.board.card(self.board.keeper)
        version = None if held is None else Card.of(held).version
        kept = -1 if version is None else version.step
        if sentence := roster.ended(child, exit_code, time.monotonic(), kept):
            self.say(sentence)
        for lost in roster.given_up():
            self.given_up(lost.number)
            if lost is child and child.seen.error:
                self.say(child.seen.error)
        if roster.fault is not None:
            self.stopped = True
            _kill_all(roster)
            return
        for late in roster.too_late():
            self.say(f"replica group {late.number} comes too late: the training is over")
            _kill(late)


def take(events: queue.SimpleQueue[T], until: float | None = None) -> T | None:
    """The next one; None: there was none by `until` (`time.monotonic()`). Signals are handled meanwhile,
    also one that interrupts no wait. Main thread."""
    overdue = Overdue()
    while True:
        left_s = SIGNAL_LOOK_S if until is None else overdue.look_at(until) - time.monotonic()
        try:
            return events.get(timeout=min(max(0.0, left_s), SIGNAL_LOOK_S))
        except queue.Empty:
            if overdue.passed(until, time.monotonic()):
                return None


def tell_lighthouse(address: str, job_id: str) -> Callable[[int], None]:
    """For `on_given_up`: the job's other replica groups wait no longer for one that will not come."""

    def tell(number: int) -> None:
        from lighthouse.client import LighthouseClient
        from lighthouse.errors import LighthouseError

        unheard = contextlib.suppress(LighthouseError, ValueError, OSError)
        with unheard, LighthouseClient(address) as client:
            # The lighthouse may still see the connection of the process that has ended.
            while not client.declare_dead(str(number), job_id=job_id)[0]:
                time.sleep(TELL_AGAIN_S)

    return tell


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, even if the parent is killed.

    Exits if the parent `parent_pid` is gone already. Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def hear_endings(on_signal: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Call `on_signal` for SIGINT, for SIGTERM, and with SIGTERM for SIGHUP (the terminal is closed); returns the
    handlers that they had. Not for one that this process was started to ignore (a shell starts commands in the
    background with SIGINT ignored, nohup with SIGHUP): so were its children. Main thread.

    SIGCHLD gets its default: how a child has ended is lost where it is ignored, or where a handler waits for
    all children, and `Popen` would say 0."""

    def heard(number: int, frame: FrameType | None) -> None:
        on_signal(signal.SIGTERM if number == signal.SIGHUP else number, frame)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
    before: dict[int, Any] = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
    return before | {n: signal.signal(n, heard) for n in heeded}


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _wait(index: int, process: subprocess.Popen[bytes], events: queue.SimpleQueue[_Event]) -> None:
    """With a process that dies of a signal goes what it has started in its process group: a loader's workers that
    are forked by a server (`forkserver`) do not see their parent's death, and keep their memory."""
    # Not reaped yet, so that its number is no other group's. Where another thread was first, `_kill` has seen to it.
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_code != os.CLD_EXITED:
            os.killpg(process.pid, signal.SIGKILL)
    events.put(_Ended(index, process.wait()))


def _watch(board: Board, events: queue.SimpleQueue[_Event]) -> None:
    while board.wait():
        events.put(_Look())


def _signal(child: Child, number: int) -> None:
    if child.process is not None:
        child.process.send_signal(number)


def _kill(child: Child) -> None:
    """With all that it has started in its process group: a data loader's worker that hangs does not look
    whether its parent is gone, and holds memory, and the streams of this process."""
    if child.process is not None and child.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.send_signal(signal.SIGKILL)


def _kill_all(roster: Roster) -> None:
    for child in roster.children:
        _kill(child)


def _how(exit_code: int, hung: bool) -> str:
    if hung:
        return "hung, and was killed"
    if exit_code < 0:
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    return f"failed with exit code {exit_code}"


def say(speaker: str, text: str, stream: TextIO | None = None) -> None:
    """A line for the person who has started this. `stream`: None: stderr, if there is one. Any thread."""
    # In one piece also with PYTHONUNBUFFERED, beside the lines of other processes: `print` writes two.
    write_out(stream or sys.stderr, f"{speaker}: {text}\n")


def age_s() -> float:
    """How long ago this process was started; infinity where that is not known."""
    try:
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        # Not /proc/uptime, which a container may have of its own.
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return math.inf
    return age_s if age_s >= 0 else math.inf


def after(seconds: float) -> str:
    """ " after 3.1 s"; "" where it is not known (infinity), or rounds to nothing."""
    return f" after {seconds:.1f} s" if 0.05 <= seconds < math.inf else ""
