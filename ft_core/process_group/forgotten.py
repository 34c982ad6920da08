"""Operations that Gloo has forgotten, and the end of the process.

A message that was half received or half sent when its connection ended stays with Gloo until the
timeout of its operation (`device_sockets` says why). If that comes while the interpreter ends, a thread
of Gloo reports the failure to an interpreter that is no more, and the process aborts (SIGABRT, SIGSEGV)
after all its work was done: a launcher takes it for a crash. So the end waits for what would come
in the midst of it; what comes later finds no process.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time

_log = logging.getLogger(__name__)

_ENDING_S = 10.0
"""More than an interpreter with torch in it takes to end (1 s here)."""
_REPORTED_S = 0.5
"""More than Gloo's thread takes from the timeout to its own end."""

_lock = threading.Lock()
_due: list[float] = []


def remember(due: float) -> None:
    """An operation was let go of that Gloo ends at `due` (`time.monotonic()`) by itself. Any thread."""
    now = time.monotonic()
    with _lock:
        _due[:] = [each for each in _due if each > now - _REPORTED_S] + [due]


def in_the_way(now: float) -> float:
    """How long the end of the process should wait, seconds."""
    with _lock:
        soon = [due for due in _due if now - _REPORTED_S < due < now + _ENDING_S]
    return max(soon) + _REPORTED_S - now if soon else 0.0


@atexit.register
def _see_them_out() -> None:
    wait_s = in_the_way(time.monotonic())
    if wait_s > 0:
        _log.info("waiting %.1f s for an operation that Gloo has forgotten", wait_s)
        time.sleep(wait_s)
