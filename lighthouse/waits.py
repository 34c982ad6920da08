"""When a wait is over: not by the clock alone.

A process that is stopped (SIGSTOP, a frozen control group), or that gets no processor time, wakes when its
deadlines have passed, with all that it waits for in its kernel. It reads that first. So each wait that
gives something up asks here, in a loop that looks (`Overdue`), or for what another thread sets (`in_time`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

ABSENT_S = 0.1
"""A thread that wakes so late was away itself."""
READ_S = 0.3
"""It then waits as long for what other threads of its process have to hand over."""
PUT_OFF_S = 1.0
"""How long what keeps arriving may put off what is due. A server reads in turn, one frame of each
connection, so that no flood keeps those of a member unread for longer."""


class Overdue:
    """Decides for a loop that reads what comes when something is due: not by the clock alone. It is once
    the loop has looked after that time and found nothing to read; what has arrived is in time.

    A loop that wakes late was away itself (its process was stopped, or the machine is very busy), and so
    were the threads that hand over to it: it looks for `look_s` more. What keeps coming puts off what is
    due for `PUT_OFF_S` at most. One thread.
    """

    __slots__ = ("_look_s", "_noticed")

    def __init__(self, look_s: float = READ_S) -> None:
        self._look_s = look_s
        self._noticed: float | None = None

    def passed(self, due: float | None, now: float, dry: bool = True) -> bool:
        """Whether `due` has passed. `dry`: the look that has just ended left nothing unread. Call it after
        each look; once it was True, it is asked about something else."""
        if due is None or due > now:
            self._noticed = None
        elif self._noticed is None:
            self._noticed = now + self._look_s if now > due + ABSENT_S else now
        elif (dry and now >= self._noticed) or now >= self._noticed + PUT_OFF_S:
            self._noticed = None
            return True
        return False

    def look_at(self, due: float) -> float:
        """When to look next, unless something comes earlier."""
        return due if self._noticed is None else self._noticed


def in_time(wait: Callable[[float | None], object], deadline: float | None) -> bool:
    """Whether what another thread of this process sets comes by `deadline` (`time.monotonic()`; None: no limit).
    `wait(seconds)`: of an event, a condition; true if it has come. Any thread."""
    if deadline is None:
        return bool(wait(None))
    overdue = Overdue()
    while not wait(max(0.0, overdue.look_at(deadline) - time.monotonic())):
        if overdue.passed(deadline, time.monotonic()):
            return False
    return True
