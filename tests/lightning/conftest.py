"""A lighthouse for the process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts


@pytest.fixture(scope="module")
def coordinator() -> Iterator[LighthouseServer]:
    """One for all runs of a module: they are kept apart by their job ids."""
    config = LighthouseConfig(
        timeouts=Timeouts.derive(heartbeat_timeout_s=5.0, join_timeout_s=120.0)
    )
    with LighthouseServer(config=config) as server:
        yield server
