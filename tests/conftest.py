"""For all tests: who leaves something behind fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.leaks import Snapshot, leaks_since


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


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A thread, socket, env variable, process group or process left over fails the test.

    Set up before and torn down after all other fixtures of the test; what fixtures of a wider
    scope hold (a session's worker processes) is there already and does not count.
    """
    before = Snapshot.take()
    yield
    found = leaks_since(before)
    if found:
        pytest.fail("the test left something behind: " + "; ".join(found), pytrace=False)
