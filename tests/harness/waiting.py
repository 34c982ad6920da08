"""How long tests wait, and how they wait for what announces nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0
"""For what must happen: a test that is right never waits so long, however busy the machine is."""


def until(condition: Callable[[], object], what: str = "", *, pause_s: float = 0.005) -> None:
    """Look until `condition()` holds. Fails with `what` was waited for."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        time.sleep(pause_s)


def gone(pid: int) -> bool:
    """Whether this process has ended, waited for or not."""
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return True


def children_of(pid: int) -> list[int]:
    """The processes that the main thread of this one has started, and that were not waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def children_of_all_threads(pid: int | str) -> set[int]:
    """The processes that any thread of this one has started, and that were not waited for."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def template_of(supervisor: int) -> int:
    """Process id of a supervisor's template of warm starts, if it is ready; else 0."""
    for child in children_of_all_threads(supervisor):
        with contextlib.suppress(OSError):
            if b"(template of warm starts, ready)" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return 0
