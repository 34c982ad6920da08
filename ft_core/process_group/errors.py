"""The one error of this package.

A caller reacts in the same way to every failure of a process group: it gives up the step, votes no
and waits for the next quorum. So there is one class. Its message says what happened, and `__cause__`
holds the original exception.
"""

from __future__ import annotations

from ft_core.errors import FaultToleranceError


class ProcessGroupError(FaultToleranceError, RuntimeError):
    """A process group could not be configured, was revoked, or lost a member in a collective."""
