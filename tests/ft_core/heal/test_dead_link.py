"""A link to a source that dies before the state is described. The source may just not have begun."""

from __future__ import annotations

import threading
import time

import pytest

from ft_core.heal import HealError, HealServer, fetch, transport
from tests.ft_core.heal.support import KEY
from tests.harness import networks
from tests.harness.waiting import PATIENCE_S, until


def test_a_link_that_dies_is_told_from_a_source_that_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine of a slow source confirms what it is sent."""
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    long_ms = int(2_000 * PATIENCE_S)
    monkeypatch.setattr(transport, "_HEARTBEAT_TIMEOUT_MS", long_ms)  # it does not end the link
    failures: list[HealError] = []
    with networks.networks(1) as made:
        with made.inside(1) as host:
            server = HealServer(host=host)

        def target() -> None:
            with made.inside(0), pytest.raises(HealError) as caught:
                fetch([server.address], KEY, deadline=time.monotonic() + PATIENCE_S)
            failures.append(caught.value)

        with server:
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            until(lambda: server.stats().opened == 1)
            made.cut(0, 1)
            made.cut(1, 0)
            thread.join(PATIENCE_S)
    assert "no connection for" in str(failures[0])
