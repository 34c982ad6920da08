"""Where a manager's attempt at a step stands: what algorithms above it need to see and do."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.errors import QuorumUnavailable
from ft_core.replica.status import Attempt, Stage

if TYPE_CHECKING:
    from ft_core.manager import Manager
    from ft_core.replica.participation import Participation


def bind(manager: Manager) -> int | None:
    """Tie the manager's step to its quorum now, as its first collective does.

    The step that the quorum works on, also for a member that is behind; None: the attempt has
    failed, `errored` says why, and nothing was reduced by this member.
    """
    if manager.step.bind() is None or manager._session is None:
        return None
    found: list[int] = []

    def look(replica: Any, now: float) -> None:
        if replica.attempt is Attempt.PINNED and replica.view is not None:
            found.append(replica.view.step)

    manager._session.control.call(look)
    return found[0] if found else None


def attempt_failed(manager: Manager) -> bool:
    """Whether the attempt under way can't commit any more, whoever is to blame. Any thread."""
    session = manager._session
    return session is not None and session.replica.attempt is Attempt.FAILED


def participation_of(manager: Manager) -> Participation:
    """Of the step that is bound."""
    part = manager.step.part
    assert part is not None, "bind first"
    return part


def start(manager: Manager, *, patient: bool) -> bool:
    """Open an attempt; whether it is open. Raises as `start_quorum` if `patient`.

    Not `patient`: only if this rank is a member of a quorum and stays one. At the end of a training
    members leave one after the other: no quorum may come any more, and whoever asks for one after
    its last step would wait for ever.
    """
    if manager.left():
        return False
    if patient:
        manager.start_quorum()
        return True
    session = manager._session
    if session is None:
        return False
    limit_s = manager._options.timeouts.timeout_s
    session.control.wait(
        lambda replica: replica.ready or replica.stage is not Stage.MEMBER,
        time.monotonic() + limit_s,
    )
    if not session.replica.ready:
        return False
    try:
        manager.start_quorum(timeout=timedelta(seconds=limit_s))
    except QuorumUnavailable:  # lost in this very moment
        return False
    return True
