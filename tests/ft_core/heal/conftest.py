"""Fixtures of the heal tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ft_core.heal import HealServer
from tests.ft_core.heal.support import SourceProcess


@pytest.fixture
def make_server() -> Iterator[Callable[..., HealServer]]:
    """Heal servers on loopback, closed at the end."""
    servers: list[HealServer] = []

    def make(**options: object) -> HealServer:
        servers.append(HealServer(host="127.0.0.1", **options))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def make_source() -> Iterator[Callable[..., SourceProcess]]:
    """Source processes, killed at the end."""
    sources: list[SourceProcess] = []

    def make(megabytes: int, **options: int) -> SourceProcess:
        sources.append(SourceProcess(megabytes, **options))
        return sources[-1]

    yield make
    for source in sources:
        source.end()
