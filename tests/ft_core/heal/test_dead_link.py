"""A link to a source that dies before the state is described. The source may just not have begun."""

from __future__ import annotations

import threading
import time

import pytest

from ft_core.heal import HealError, HealServer, fetch, target, transport
from tests.ft_core.heal.support import KEY, FaultyLink, soon
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


def test_a_source_behind_a_port_that_swallows_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection is made and confirmed, so that only the silence of ZeroMQ's threads tells it from a
    source that is slow."""
    monkeypatch.setattr(transport, "_HEARTBEAT_MS", 100)
    monkeypatch.setattr(target, "longest_silence_s", lambda left_s: 1.0)
    made = [0]  # bytes until a connection is made

    with HealServer(host="127.0.0.1") as server:

        def swallow(offset: int, data: bytearray) -> bytearray:
            if not server.stats().opened:
                made[0] = max(made[0], offset + len(data))
                return data
            return data[: max(0, made[0] - offset)]

        with (
            FaultyLink(server.address, swallow) as link,
            pytest.raises(HealError, match=r"connected, and silent for 1\.0 s"),
        ):
            fetch([link.address], KEY, deadline=soon())


def test_how_long_a_source_may_be_silent() -> None:
    assert transport.longest_silence_s(30.0) == 5.0
    assert transport.longest_silence_s(6.0) == 3.0
    assert transport.longest_silence_s(1_000.0) == 30.0
