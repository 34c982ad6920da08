"""One process for each replica group of this machine, restarted when it dies.

The supervisor trains nothing: it holds the lighthouse and waits for its children. It does not poll.
A thread per child waits for the child's end, signals arrive as events, and the main thread sleeps
until an event or until the next restart is due. Children end with the supervisor (`die_with`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STOP_TIMEOUT_S = 30.0
TELL_AGAIN_S, TELL_TIMEOUT_S = 0.5, 5.0
ENV_JOINED = "FT_SUPERVISOR_JOINED"
_PR_SET_PDEATHSIG = 1

Environment = Callable[[int, int], dict[str, str]]


@dataclass(slots=True)
class Child:
    """The process of one replica group, and its predecessors.

    Attributes:
        index: among the children of this supervisor.
        number: of the replica group in the whole job, for messages; -1 means `index`.
        restarts: how often it was restarted.
        restart_at: when it is restarted (`time.monotonic()`), or None.
        joined: whether the process that runs (or ended last) has taken part in a quorum.
        exit_code: of the last process that ended, as Popen's: negative for a signal.
        given_up: it will not run again, and that was told.
    """

    index: int
    number: int = -1
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    restart_at: float | None = None
    joined: bool = False
    exit_code: int | None = None
    given_up: bool = False

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.index

    @property
    def running(self) -> bool:
        """Whether its process has not been reported as ended."""
        return self.process is not None


@dataclass(frozen=True, slots=True)
class _Ended:
    index: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class _Signalled:
    number: int


@dataclass(slots=True)
class Policy:
    """What follows the end of a child. Pure: times are given, and nothing is started here.

    Attributes:
        max_restarts: of each child.
        min_alive: with fewer children that run or will run, the rest cannot go on.
        elsewhere: other supervisors have replica groups of this job.
    """

    max_restarts: int
    min_alive: int
    children: list[Child] = field(default_factory=list)
    elsewhere: bool = False

    def ended(self, child: Child, exit_code: int, now: float) -> str:
        """Record the end of a child's process; returns a sentence: what happened, what follows."""
        child.process, child.exit_code = None, exit_code
        how = _how(exit_code)
        if exit_code == 0:
            return f"replica group {child.number} has finished"
        if any(c.exit_code == 0 and not c.running for c in self.children):
            return (
                f"replica group {child.number} {how}; it is not started again, since another has "
                "finished and would not be there to heal from"
            )
        alone = not any(c.running for c in self.children)
        if exit_code > 0 and alone and not (self.elsewhere and child.joined):
            for other in self.children:
                other.restart_at = None
            return (
                f"replica group {child.number} {how} and no other is alive: an error of the "
                "script, so nothing is started again"
            )
        if child.restarts >= self.max_restarts:
            return (
                f"replica group {child.number} {how}; it is given up after "
                f"{self.max_restarts} restarts"
            )
        pause_s = min(FIRST_PAUSE_S * 2**child.restarts, LONGEST_PAUSE_S)
        child.restart_at = now + pause_s
        return f"replica group {child.number} {how}; it is started again in {pause_s:g} s"

    def too_late(self) -> list[Child]:
        """Children that run in vain: others have trained to the end before these joined, so that
        these would start from scratch, alone."""
        if not any(c.exit_code == 0 and not c.running and c.joined for c in self.children):
            return []
        for child in self.children:
            child.restart_at = None
        return [c for c in self.children if c.running and not c.joined]

    def due(self, now: float) -> list[Child]:
        """Children to restart now; marks them as restarted."""
        due = [c for c in self.children if c.restart_at is not None and now >= c.restart_at]
        for child in due:
            child.restart_at = None
            child.restarts += 1
            child.joined = False
        return due

    def next_due(self) -> float | None:
        """When `due` returns a child next, or None."""
        return min((c.restart_at for c in self.children if c.restart_at is not None), default=None)

    def given_up(self) -> list[Child]:
        """Children that will not run again, and have not trained to the end; each is named once."""
        lost = [c for c in self.children if c.exit_code is not None and not c.given_up]
        lost = [c for c in lost if not c.running and c.restart_at is None]
        lost = [c for c in lost if c.exit_code != 0 or not c.joined]
        for child in lost:
            child.given_up = True
        return lost

    def over(self) -> bool:
        """Whether no child runs or will run."""
        return not any(c.running or c.restart_at is not None for c in self.children)

    def stuck(self) -> bool:
        """Whether too few children are left to go on, and none has finished."""
        alive = sum(c.running or c.restart_at is not None for c in self.children)
        finished = any(c.exit_code == 0 and not c.running for c in self.children)
        return 0 < alive < self.min_alive and not finished

    def exit_code(self) -> int:
        """The exit code of the supervisor: 0 if the training finished and no script failed.

        A process that was killed after others had finished has lost nothing.
        """
        codes = [c.exit_code or 0 for c in self.children]
        failed = [code for code in codes if code > 0]
        if failed:
            return failed[0]
        if any(code == 0 for code in codes):
            return 0
        return 128 - codes[0]


def supervise(
    command: Sequence[str],
    environment: Environment,
    *,
    count: int,
    min_alive: int,
    max_restarts: int,
    first: int = 0,
    elsewhere: bool = False,
    speaker: str = "ft",
    on_given_up: Callable[[int], None] | None = None,
) -> int:
    """Run `count` processes of `command` until all have ended; returns this process's exit code.

    SIGINT and SIGTERM are passed on to the children; those that have not ended `STOP_TIMEOUT_S`
    later are killed. Each event is one line on stderr. Main thread only.

    Args:
        command: of every child.
        environment: called as `environment(index, restarts)`; returns a child's environment.
        count, min_alive, max_restarts, elsewhere: see `Policy`.
        first: the replica group number of the first child.
        speaker: what the lines on stderr begin with.
        on_given_up: called, in a thread of its own, with the number of a replica group of which no
            process will run again, unless its training is complete. `tell_lighthouse` makes one.
    """
    say = partial(_say, speaker)
    events: queue.SimpleQueue[_Ended | _Signalled] = queue.SimpleQueue()
    joined, tell_joined = os.pipe()
    os.set_blocking(joined, False)
    children = [Child(i, first + i) for i in range(count)]
    policy = Policy(max_restarts, min_alive, children, elsewhere)

    def start(child: Child) -> None:
        # A process group of its own, so that the terminal's Ctrl-C reaches it only through us.
        env = {**environment(child.index, child.restarts), ENV_JOINED: str(tell_joined)}
        child.process = subprocess.Popen(command, env=env, process_group=0, pass_fds=(tell_joined,))
        waiter = threading.Thread(
            target=_wait, args=(child.index, child.process, events), daemon=True
        )
        waiter.start()

    def on_signal(number: int, frame: FrameType | None) -> None:
        events.put(_Signalled(number))

    tellers: list[threading.Thread] = []

    def given_up(number: int) -> None:
        if on_given_up is not None:
            tellers.append(threading.Thread(target=on_given_up, args=(number,), daemon=True))
            tellers[-1].start()

    handlers = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for child in policy.children:
            start(child)
        return _loop(policy, events, start, joined, say, given_up)
    finally:
        if elsewhere:
            for teller in tellers:
                teller.join(TELL_TIMEOUT_S)
        _signal_all(policy, signal.SIGKILL)
        os.close(joined)
        os.close(tell_joined)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _loop(
    policy: Policy,
    events: queue.SimpleQueue[_Ended | _Signalled],
    start: Callable[[Child], None],
    joined: int,
    say: Callable[[str], None],
    given_up: Callable[[int], None],
) -> int:
    stopped_by: int | None = None
    kill_at: float | None = None
    while not policy.over():
        wake_at = kill_at if stopped_by is not None else policy.next_due()
        try:
            wait_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            event = events.get(timeout=wait_s)
        except queue.Empty:
            if stopped_by is not None:
                _signal_all(policy, signal.SIGKILL)
                kill_at = None
            else:
                for child in policy.due(time.monotonic()):
                    start(child)
            continue
        if isinstance(event, _Signalled):
            stopped_by = event.number
            kill_at = time.monotonic() + STOP_TIMEOUT_S
            _signal_all(policy, event.number)
            for child in policy.children:
                child.restart_at = None
            continue
        child = policy.children[event.index]
        if stopped_by is not None:
            child.process, child.exit_code = None, event.exit_code
            continue
        _read_joined(policy, joined)
        say(policy.ended(child, event.exit_code, time.monotonic()))
        for lost in policy.given_up():
            given_up(lost.number)
        for late in policy.too_late():
            say(f"replica group {late.number} comes too late: the training is over")
            assert late.process is not None
            late.process.kill()
        if policy.stuck():
            say(f"fewer than min_replicas={policy.min_alive} replica groups are left: stopping")
            stopped_by, kill_at = signal.SIGTERM, time.monotonic() + STOP_TIMEOUT_S
            _signal_all(policy, signal.SIGTERM)
            for other in policy.children:
                other.restart_at = None
    if stopped_by is not None:
        return policy.exit_code() or 128 + stopped_by
    return policy.exit_code()


def tell_lighthouse(address: str, job_id: str) -> Callable[[int], None]:
    """For `on_given_up`: the job's other replica groups wait no longer for one that will not come."""

    def tell(number: int) -> None:
        from lighthouse.client import LighthouseClient
        from lighthouse.errors import LighthouseError

        with LighthouseClient(address) as client, contextlib.suppress(LighthouseError):
            # The lighthouse may still see the connection of the process that has ended.
            while not client.declare_dead(str(number), job_id=job_id)[0]:
                time.sleep(TELL_AGAIN_S)

    return tell


def report_joined(index: int) -> None:
    """Tell the supervisor, if there is one, that child `index` takes part in a quorum.

    Call it before the first vote.
    """
    if ENV_JOINED in os.environ:
        try:
            os.write(int(os.environ[ENV_JOINED]), b"%d\n" % index)
        except OSError:  # the supervisor is gone, and so will be this process
            pass


def _read_joined(policy: Policy, joined: int) -> None:
    """A child reports before its first vote, hence before any peer that it trained with can finish."""
    try:
        for text in os.read(joined, 4096).split():
            policy.children[int(text)].joined = True
    except BlockingIOError:
        pass


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, even if the parent is killed.

    Exits if the parent `parent_pid` is gone already. Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _wait(
    index: int, process: subprocess.Popen[bytes], events: queue.SimpleQueue[_Ended | _Signalled]
) -> None:
    events.put(_Ended(index, process.wait()))


def _signal_all(policy: Policy, number: int) -> None:
    for child in policy.children:
        if child.process is not None:
            child.process.send_signal(number)


def _how(exit_code: int) -> str:
    if exit_code < 0:
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    return f"failed with exit code {exit_code}"


def _say(speaker: str, text: str) -> None:
    print(f"{speaker}: {text}", file=sys.stderr, flush=True)
