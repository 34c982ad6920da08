"""Fixtures of the lighthouse's tests. Whatever a test opens must be closed at its end."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from lighthouse.config import LighthouseConfig
from lighthouse.server import LighthouseServer
from lighthouse.wire.messages import JobKey
from tests.lighthouse.support import FAST, JOB, Player

PlayerFactory = Callable[..., Player]


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    """A descriptor left over fails the test: files and pipes too, not only sockets."""
    before = _descriptors()
    yield
    # The kernel and ZeroMQ's own thread take a moment to let go of what was closed.
    deadline = time.monotonic() + 5.0
    while (left := _descriptors() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left


def _descriptors() -> set[tuple[int, str]]:
    """Open descriptors of this process and what they are."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            continue  # the one that listed them
    return found


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[LighthouseServer]:
    with LighthouseServer(config=LighthouseConfig(timeouts=FAST)) as server:
        yield server


@pytest.fixture
def player(server: LighthouseServer, context: zmq.Context[Any]) -> Iterator[PlayerFactory]:
    """Makes players that are closed at the end."""
    made: list[Player] = []

    def make(name: str, job: JobKey = JOB, address: str | None = None) -> Player:
        made.append(Player(address or server.address(), name, context, job))
        return made[-1]

    yield make
    for each in made:
        each.close()
