"""`sockets.Waiter`: nothing that has arrived is slept over."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from lighthouse.dealer import EVENTS, POLLIN
from lighthouse.sockets import Waiter
from tests.harness.waiting import PATIENCE_S

PATIENCE_MS = round(1000 * PATIENCE_S)


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        for each in (one, two):
            each.setsockopt(zmq.LINGER, 0)
        one.bind("inproc://pair")
        two.connect("inproc://pair")
        yield one, two


def readable(watched: zmq.Socket[bytes]) -> bool:
    return bool(int(watched.getsockopt(EVENTS)) & POLLIN)


@pytest.mark.parametrize("spin_s", [0.0, 0.01])
def test_a_message_of_which_another_call_has_taken_notice(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], spin_s: float
) -> None:
    """The descriptor tells of it once; a look at the socket's events swallows that."""
    one, two = pair
    with Waiter(two) as waiter:
        one.send(b"message")
        assert readable(two)
        for _ in range(2):  # it is there until it is read
            assert waiter.wait(PATIENCE_MS, spin_s) == {two}
        two.recv()
        while waiter.wait(0, spin_s):  # what is left of the descriptor's news
            assert not readable(two)
        assert waiter.wait(0, spin_s) == set()


@pytest.mark.parametrize("spin_s", [0.0, 0.01, PATIENCE_S])
def test_what_comes_while_it_waits_wakes_it(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], spin_s: float
) -> None:
    one, two = pair
    with Waiter(two) as waiter:
        sender = threading.Timer(0.05, one.send, (b"message",))
        sender.start()
        while not readable(two):
            assert waiter.wait(PATIENCE_MS, spin_s) == {two}
        sender.join()


def test_other_sockets_are_seen_beside_one_that_is_always_readable(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    """Or a thread whose peers flood it could not be stopped."""
    one, two = pair
    left, right = socket.socketpair()
    with left, right, Waiter(two, left) as waiter:
        one.send(b"message")
        right.send(b"!")
        assert waiter.wait(PATIENCE_MS) == {two, left}
