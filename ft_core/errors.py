"""Errors of ft_core, split by their cause.

    FaultToleranceError
    ├── QuorumUnavailable     no quorum within the timeout given; its text says what it waited for
    ├── GroupBroken           a rank of the own replica group is gone: exit and let the launcher
    │                         restart the group (the others train on)
    │   └── GroupLeft         a rank was told to end, and the group has left with its last vote:
    │                         end as it does, nothing is lost
    ├── StepInDoubt           the lighthouse stayed away for so long that a vote can't be settled
    └── TooManyDiscards       more than `max_retries` steps in a row were discarded

`lighthouse.errors.JoinRefused` and `LighthouseUnavailable` pass through; heal and process-group
errors have homes of their own (`ft_core.heal`, `ft_core.process_group`) and end in a discard, not
in an exception. `ValueError` is raised for options that a user set wrong.
"""

from __future__ import annotations


class FaultToleranceError(Exception):
    """Root of all errors that this package raises on purpose."""


class QuorumUnavailable(FaultToleranceError, TimeoutError):
    """No quorum formed in time."""


class GroupBroken(FaultToleranceError, RuntimeError):
    """The own replica group is incomplete."""


class GroupLeft(GroupBroken):
    """The own replica group has left, because another of its ranks was told to end."""


class StepInDoubt(FaultToleranceError):
    """A vote was cast, and its outcome could not be learned."""


class TooManyDiscards(FaultToleranceError, RuntimeError):
    """Steps are discarded again and again."""
