"""How a process that trains ends where its script is not at fault: a line, and an exit code that says so.
And what SIGTERM does to a training loop.

| exit code | meaning |
|---|---|
| 0 | trained to the end |
| 1 | its replica group is refused, or an option has set a limit to its wait for a quorum or to discarded steps: the line says why |
| 69 | no lighthouse answers, within the connect timeout |
| 75 | another process of its replica group is gone; the cause is in that process. Or the training has ended just as it came back, and its next life passes over it (Lightning's Trainer) |
| 78 | its replica group is refused, since its model or settings are not those of its peers |
| 79 | the training is over, or its script's next one has begun: nothing is left to do |
| 143 | it was told to end by SIGTERM (`Sigterm`), or another process of its group was |
| other | the script's own error |

A traceback would show the loop's own lines, and hide the sentence that helps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from ft_core.environment import ReplicaEnv
from ft_core.errors import (
    GroupBroken,
    GroupLeft,
    QuorumUnavailable,
    StartAgain,
    StepInDoubt,
    TooManyDiscards,
)
from ft_core.launch.board import slot
from ft_core.launch.restarts import (
    AWAY_EXIT_CODE,
    BROKEN_EXIT_CODE,
    OVER_EXIT_CODE,
    SIGTERM_EXIT_CODE,
    UNLIKE_EXIT_CODE,
)
from ft_core.launch.supervisor import say
from lighthouse.errors import JoinRefused, LighthouseUnavailable, SettingsDiffer, TrainingOver
from lighthouse.files import write_out

CODES: dict[type[BaseException], int] = {  # a class before those that it derives from
    LighthouseUnavailable: AWAY_EXIT_CODE,
    StepInDoubt: AWAY_EXIT_CODE,
    GroupLeft: SIGTERM_EXIT_CODE,
    GroupBroken: BROKEN_EXIT_CODE,
    StartAgain: BROKEN_EXIT_CODE,
    TrainingOver: OVER_EXIT_CODE,
    SettingsDiffer: UNLIKE_EXIT_CODE,
    # As errors of the script's own.
    JoinRefused: 1,
    QuorumUnavailable: 1,
    TooManyDiscards: 1,
}
PASSED_ON_S = 5.0
"""A SIGTERM that follows the first within this time is the same one: a scheduler signals all processes of a job, and
the launchers among them pass on what they get."""
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_with_a_line(whose: str, name: str, *, at_once: bool = True) -> None:
    """From now on an error of `CODES` that nothing catches ends this process in this way; idempotent.

    `at_once`: without what waits for the interpreter's end, as it could need the lighthouse. A loop of one's own has
    files that are written then. `whose`: the package that speaks. `name`: of this replica group.
    """
    if not hasattr(sys.excepthook, "ft_core"):
        sys.excepthook = _ending(whose, name, at_once, sys.excepthook)


def unless_forked(hook: Callable[[], object]) -> Callable[[], None]:
    """`hook` for `atexit`, which does nothing where a process ends that was forked from this one."""
    pid = os.getpid()

    def call() -> None:
        if os.getpid() == pid:
            hook()

    return call


class _NotingExit:
    """`sys.exit`, which leaves what it raises in `sys.last_value` if that is an error's."""

    def __init__(self, plain: Callable[[Any], NoReturn]) -> None:
        self._plain = plain

    def __call__(self, code: Any = None, /) -> NoReturn:
        if code not in (None, 0) and threading.current_thread() is threading.main_thread():
            sys.last_value = SystemExit(code)
        self._plain(code)


def note_exit_codes() -> None:
    """From now on `sys.exit` with the code of an error leaves `sys.last_value`, as an error does that nothing catches:
    exit hooks tell by it how the script has ended. Idempotent. They do not see `raise SystemExit(1)`."""
    if not isinstance(sys.exit, _NotingExit):
        sys.exit = _NotingExit(sys.exit)


def end_at_once(whose: str, why: str, code: int, stream: TextIO | None = None) -> NoReturn:
    """Say `why` (nothing, if it is empty) as `say` does, and end this process without what the script would
    do on its way out, which could change the exit code."""
    if why:
        say(whose, why, stream)
    write_out(sys.stdout)
    write_out(sys.stderr)
    # Of what the script has started, a Manager and a loader's workers under `forkserver` do not see its end.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _ending(whose: str, name: str, at_once: bool, otherwise: _Hook) -> _Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = next((code for each, code in CODES.items() if issubclass(kind, each)), None)
        if code is None:
            otherwise(kind, error, trace)
            return
        of_group = issubclass(kind, TrainingOver | StartAgain)
        # The supervisor of several groups adds nothing to these.
        group = f"replica group {name}: " if of_group and slot().there else ""
        silent = of_group and ReplicaEnv.read().group_rank
        # All ranks of the group end so, and one tells. Not on `sys.stderr`: torch.distributed has put a
        # buffer there, which it prints when this returns.
        line = "" if silent else f"{group}{error}"
        if at_once:
            end_at_once(whose, line, code, sys.__stderr__)
        if line:
            say(whose, line, sys.__stderr__)
        # What Python would do where a hook returns, and does not where it raises: an open file in a variable of the
        # script is written when that is cleared.
        traceback.clear_frames(trace)
        raise SystemExit(code)

    hook.ft_core = True  # type: ignore[attr-defined]
    hook.main = sys.modules["__main__"]  # type: ignore[attr-defined] # whose variables are cleared if it is there
    return hook


class Sigterm:
    """SIGTERM in a training loop (a preemption): the current step is finished, and is the last one.

    The vote on that step announces the departure, so that the other members lose nothing. The next step
    that the loop begins ends the process, as SIGTERM would have. A second SIGTERM, more than `PASSED_ON_S`
    later, ends it at once. This class only notes the signal in `noted`; its owner does the rest. A
    handler that was set before is called first. A process that was forked from this one has that handler alone.

    Args:
        is_waiting: a method, held weakly. It returns whether the loop waits for its quorum, so that
            there is no step to finish; the signal handler raises SystemExit then.
    """

    def __init__(self, is_waiting: Callable[[], bool]) -> None:
        self._is_waiting = weakref.WeakMethod(is_waiting)
        self._before: Any = None
        self._installed: Any = None
        self._same_until = 0.0
        self._pid = 0
        self.noted = False

    def watch(self) -> None:
        """Install the handler. Does nothing outside the main thread, or if SIGTERM is ignored."""
        if self._installed is not None or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if before is None or before is signal.SIG_IGN:
            return
        self._before, self._installed = before, self._on_signal
        signal.signal(signal.SIGTERM, self._installed)
        self._pid = os.getpid()

    def unwatch(self) -> None:
        """Restore the former handler, unless another one has been set since."""
        installed, self._installed = self._installed, None
        if installed is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == installed:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # One that the loop has forked, such as a worker of a `Pool`, which is ended so and waited for.
            signal.signal(signal.SIGTERM, self._before)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        watches = self._installed is not None  # else it was reinstalled after `unwatch`
        passed_on = watches and self.noted and now < self._same_until
        again = self.noted or not watches
        if not self.noted:
            self.noted, self._same_until = True, now + PASSED_ON_S
        if callable(self._before):
            self._before(number, frame)
        if passed_on:
            return
        if again and not callable(self._before):
            signal.signal(signal.SIGTERM, self._before)
            os.kill(os.getpid(), number)
        is_waiting = self._is_waiting()
        if is_waiting is None or is_waiting():
            self.end()

    def end(self) -> None:
        """End the process with SIGTERM's exit code, by SystemExit, so that `finally` clauses run."""
        raise SystemExit(SIGTERM_EXIT_CODE)
