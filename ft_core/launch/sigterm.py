"""SIGTERM in a training loop (a preemption): the current step is finished, and is the last one.

The vote on that step announces the departure, so that the other members lose nothing. The next step
that the loop begins ends the process, as SIGTERM would have. A second SIGTERM ends it at once. This
module only notes the signal; its owner does the rest.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM


class Sigterm:
    """Notes the signal in `noted`. A handler that was set before is called first.

    Args:
        is_waiting: a method, held weakly. It returns whether the loop waits for its quorum, so that
            there is no step to finish; the signal handler raises SystemExit then.
    """

    def __init__(self, is_waiting: Callable[[], bool]) -> None:
        self._is_waiting = weakref.WeakMethod(is_waiting)
        self._before: Any = None
        self._installed: Any = None
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

    def unwatch(self) -> None:
        """Restore the former handler, unless another one has been set since."""
        installed, self._installed = self._installed, None
        if installed is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == installed:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.noted or self._installed is None  # reinstalled after `unwatch`
        self.noted = True
        if callable(self._before):
            self._before(number, frame)
        elif again:
            signal.signal(signal.SIGTERM, self._before)
            os.kill(os.getpid(), number)
        is_waiting = self._is_waiting()
        if is_waiting is None or is_waiting():
            self.end()

    def end(self) -> None:
        """End the process with SIGTERM's exit code, by SystemExit, so that `finally` clauses run."""
        raise SystemExit(EXIT_CODE)
