"""The one error of this package.

A caller does the same thing whatever went wrong in a process group: it gives up the step, votes no
and waits for the next quorum. So there is one class; the sentence says what happened and the cause
(`__cause__`) holds the original exception.
"""

from __future__ import annotations

from ft_core.errors import FaultToleranceError


class ProcessGroupError(FaultToleranceError, RuntimeError):
    """A process group could not be configured, was revoked, or lost a member in a collective."""
