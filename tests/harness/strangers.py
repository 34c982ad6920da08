"""Connections of processes that do not mean the port: they stay, and say little or nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from lighthouse.config import split_address
from tests.harness.waiting import PATIENCE_S

HALF_A_GREETING = b"\xff\0\0\0"
"""Of ZeroMQ's first ten bytes."""


@contextlib.contextmanager
def crowd(address: str, count: int) -> Iterator[Callable[[], int]]:
    """So many connections to `address`; every second one has begun to speak. The value tells how many of
    them the other end has ended."""
    with ExitStack() as stack:
        strangers = []
        for number in range(count):
            stranger = socket.create_connection(split_address(address), PATIENCE_S)
            strangers.append(stack.enter_context(stranger))
            with contextlib.suppress(ConnectionError):  # it is ended already
                stranger.sendall(HALF_A_GREETING[: 4 * (number % 2)])
        yield lambda: sum(map(_is_over, strangers))


def _is_over(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True
