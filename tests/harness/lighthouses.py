"""Lighthouses for tests of real processes."""

from __future__ import annotations

from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts


def patient_lighthouse(heartbeat_timeout_s: float = 5.0) -> LighthouseServer:
    """One for processes that import a framework first, two at once on a core."""
    timeouts = Timeouts.derive(heartbeat_timeout_s=heartbeat_timeout_s, join_timeout_s=120.0)
    return LighthouseServer(config=LighthouseConfig(timeouts=timeouts))
