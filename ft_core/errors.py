"""Errors of ft_core, split by their cause.

    FaultToleranceError
    ├── QuorumUnavailable     no quorum within the timeout given; its text says what it waited for
    ├── GroupBroken           a rank of this replica group is gone: exit and let the launcher
    │                         restart the group (the other groups continue)
    │   └── GroupLeft         a rank was told to end, and the group has left with its last vote:
    │                         end normally, nothing is lost
    ├── OutsideStep           a collective of the manager between two steps: move it into one
    ├── StepInDoubt           the lighthouse was unreachable for so long that a vote stays unanswered
    ├── TooManyDiscards       more than `max_retries` steps in a row were discarded
    └── ProcessGroupError     one class for every failure of a process group, since a caller reacts
                              in the same way to all: it gives up the step, votes no and waits for
                              the next quorum. `__cause__` is the original exception

`StartAgain` is none of them: what this process had begun is over, and its next life passes over it.
`lighthouse.errors.JoinRefused` and `LighthouseUnavailable` pass through; those of a heal
(`ft_core.heal`) end in a discard, not in an exception. `ValueError` is raised for options that a
user set wrong.
"""

from __future__ import annotations

from collections.abc import Iterable


class FaultToleranceError(Exception):
    """Base class of the errors that this package raises on purpose."""


class QuorumUnavailable(FaultToleranceError, TimeoutError):
    """No quorum formed within the timeout. The message says what was missing."""


class GroupBroken(FaultToleranceError, RuntimeError):
    """Another rank of this process's replica group is gone: exit, so that the launcher restarts the
    group."""


class GroupLeft(GroupBroken):
    """This process's replica group has left the job, because another of its ranks was told to end:
    end normally."""


class OutsideStep(FaultToleranceError, RuntimeError):
    """A collective of the manager was called between two steps, where no vote covers its errors."""


class UnderCapture(FaultToleranceError, RuntimeError):
    """A collective was called while a CUDA graph is captured."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} while a CUDA graph is captured: a replay would not know the members of its "
            "step; capture the computation, and reduce the gradients after each replay"
        )


class StartAgain(BaseException):
    """This process can't go on from where it is, and its next life can.

    Not an Exception: a script that catches those around its fit (a sweep) would go on without it.
    """


class StepInDoubt(FaultToleranceError):
    """A vote was cast, and the lighthouse was unreachable for too long to learn its outcome."""


class TooManyDiscards(FaultToleranceError, RuntimeError):
    """More than `max_retries` steps in a row were discarded."""


class ProcessGroupError(FaultToleranceError, RuntimeError):
    """A process group could not be configured, was revoked, or lost a member in a collective.

    `missed`: numbers of the members that `configure` could not connect to; this member's own, if no
    group can be made here whatever the others do.
    """

    def __init__(self, *args: object, missed: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.missed = tuple(missed)


class AddressError(ProcessGroupError, ValueError):
    """Members advertise something other than addresses of process groups: `missed` has their numbers."""
