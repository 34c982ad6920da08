"""SIGTERM in a training loop (a preemption): the step under way is finished, and is the last one.

The vote on it says goodbye, so that the others lose nothing; the next step that the loop would begin
ends the process, as SIGTERM would have. A second SIGTERM ends it at once. The signal is noted here;
what follows is its owner's.
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
    """Notes the signal, for the owner of `is_waiting`, a method, which is held weakly.

    `is_waiting()`: the loop waits for its quorum, so that there is no step to finish: the handler
    raises SystemExit then. A handler that the user has set before is called as well, first.
    """

    def __init__(self, is_waiting: Callable[[], bool]) -> None:
        self._is_waiting = weakref.WeakMethod(is_waiting)
        self._before: Any = None
        self._installed: Any = None
        self.noted = False

    def watch(self) -> None:
        """From now on. Does nothing outside of the main thread, or if SIGTERM is ignored."""
        if self._installed is not None or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if before is None or before is signal.SIG_IGN:
            return
        self._before, self._installed = before, self._on_signal
        signal.signal(signal.SIGTERM, self._installed)

    def unwatch(self) -> None:
        """Put the former handler back, unless somebody has set another one since."""
        installed, self._installed = self._installed, None
        if installed is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == installed:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.noted or self._installed is None  # somebody has put us back after our end
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
        """End the process as SIGTERM would have, but for what is to be undone in it."""
        raise SystemExit(EXIT_CODE)
