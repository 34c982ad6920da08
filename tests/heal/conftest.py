"""Fixtures of the heal tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from ft_core.heal import HealServer
from tests.heal.support import SourceProcess


@pytest.fixture(autouse=True, scope="session")
def pyzmq_thread() -> None:
    """pyzmq starts a thread and two sockets at a process's first zero-copy send, and keeps them:
    not a leak, so let it happen before the tests count."""
    with zmq.Context() as context:
        with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
            pull.bind("inproc://first")
            push.connect("inproc://first")
            tracker = push.send(bytearray(1 << 20), copy=False, track=True)
            pull.recv()
            tracker.wait(10)


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
