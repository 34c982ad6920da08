"""What takes long to open is opened beside the training: calls to it wait, and are done in order.

A tracker of a process that has just become the leader: it may take seconds until it is there, and all
others would wait for that in their next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Opening:
    """Opens something in a thread of its own, which ends when that is open and no call waits.

    `call` and `wait` from one thread.

    Args:
        name: of the thread.
        opens: opens it.
        failed: called in that thread with what `opens`, or a call that has waited, has raised. The
            calls that wait are dropped then.
    """

    def __init__(
        self, name: str, opens: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._opens, self._failed = opens, failed
        self._later: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it is open, or has failed, and no call waits any more."""
        return self._over

    @property
    def here(self) -> bool:
        """Whether this is the thread that opens it."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], object]) -> bool:
        """Call `function` in that thread when its turn comes. False: it is `over`, and nothing is called."""
        with self._lock:
            if not self._over:
                self._later.append(function)
            return not self._over

    def wait(self) -> None:
        """Until it is `over`. In that thread itself: not at all."""
        if not self.here:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._opens()
            while (function := self._next()) is not None:
                function()
        except Exception as error:  # a tracker's own errors are of any kind
            with self._lock:
                self._later.clear()
                self._over = True
            self._failed(error)

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            self._over = not self._later
            return self._later.popleft() if self._later else None
