"""Scripted clients of a real lighthouse, for tests and for processes that tests kill."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import pytest
import zmq

from lighthouse.client import SERVICE, Connection
from lighthouse.config import Timeouts
from lighthouse.endpoint import Endpoint
from lighthouse.wire.messages import (
    NO_TERM,
    Basis,
    Decision,
    JobKey,
    Join,
    Message,
    Quorum,
    Request,
    Vote,
    Waiting,
    next_lineage,
)
from tests.harness.waiting import PATIENCE_S

FAST = Timeouts.derive(
    10.0, join_timeout_s=5.0, heartbeat_timeout_s=2.0, resend_s=0.2, revoke_timeout_s=5.0
)
JOB = JobKey("job", "room")

M = TypeVar("M", bound=Message)
_serial = itertools.count(1)


class Player:
    """A replica group as the lighthouse sees it: says what it is told to, remembers what it hears."""

    def __init__(
        self, address: str, name: str, context: zmq.Context[Any], job: JobKey = JOB
    ) -> None:
        self.name = name
        self.replica_id = f"{name}-{os.getpid()}-{next(_serial)}"
        self.job = job
        self.connection = Connection(
            address, identity=self.replica_id.encode(), timeouts=FAST, context=context
        )
        self.heard: list[Message] = []
        self.events: list[str] = []
        self.step, self.lineage = 0, "init"
        self.promised = NO_TERM
        self._join: Join | None = None
        self.quorum: Quorum | None = None
        self._poller = zmq.Poller()
        for each in self.connection.sockets:
            self._poller.register(each, zmq.POLLIN)

    def say(self, message: Request) -> None:
        assert self.connection.send(message)

    def join(self, **fields: Any) -> None:
        """Ask to join, and follow the lighthouse that answers: returns once it has been heard.

        The last quorum, if there is one, rests on its own members, unless `basis` is given."""
        if "last_members" in fields:
            bases, genesis = (fields["last_members"],), fields.get("genesis", 0)
            basis = Basis(self.step, self.lineage, bases=bases, genesis=genesis)
            fields.setdefault("basis", basis)
        self._join = join = Join(
            self.job,
            self.name,
            self.replica_id,
            self.step,
            self.lineage,
            (b"a",),
            promised=self.promised,
            **fields,
        )
        self.say(join)
        deadline, heard = time.monotonic() + PATIENCE_S, len(self.heard)
        while self.promised == join.promised and len(self.heard) == heard:
            self._turn(deadline, "no answer to a join")

    def vote(self, ok: bool = True, **fields: Any) -> None:
        assert self.quorum is not None
        quorum_id = self.quorum.quorum_id
        self.say(Vote(self.job, self.replica_id, quorum_id, self.step, self.lineage, ok, **fields))

    def await_message(self, kind: type[M], timeout_s: float = PATIENCE_S) -> M:
        """The next message of this kind; earlier ones of other kinds are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self.heard:
                message = self.heard.pop(0)
                if isinstance(message, kind):
                    return message
            self._turn(deadline, f"no {kind.__name__}")

    def await_event(self, event: str, timeout_s: float = PATIENCE_S) -> None:
        """ "connected" or "disconnected"."""
        deadline = time.monotonic() + timeout_s
        while event not in self.events:
            self._turn(deadline, f"not {event}")
        del self.events[: self.events.index(event) + 1]

    def await_quorum(self) -> Quorum:
        self.quorum = self.await_message(Quorum)
        return self.quorum

    def await_decision(self) -> Decision:
        """The next decision, acted on as a replica group would."""
        decision = self.await_message(Decision)
        if decision.committed:
            nonce = self.promised.nonce
            self.lineage = next_lineage(self.lineage, nonce, decision.quorum_id, decision.step)
            self.step += 1
        if decision.next_quorum is not None:
            self.quorum = decision.next_quorum
        return decision

    def close(self) -> None:
        self.connection.close()

    def _turn(self, deadline: float, complaint: str) -> None:
        left_ms = (deadline - time.monotonic()) * 1000
        if left_ms <= 0 or not self._poller.poll(left_ms):
            raise AssertionError(f"{self.name}: {complaint} in time")
        self.events += self.connection.events()
        for message in self.connection.receive():
            if isinstance(message, Waiting) and message.offer is not None:
                assert self._join is not None
                self.promised = message.offer
                self._join = replace(self._join, promised=message.offer)
                self.say(self._join)
            else:
                self.heard.append(message)


def dealer(context: zmq.Context[Any], identity: bytes = b"somebody") -> zmq.Socket[bytes]:
    """A bare socket that a lighthouse lets in; the caller connects and closes it."""
    made: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    made.setsockopt(zmq.PLAIN_USERNAME, SERVICE.encode())
    made.setsockopt(zmq.PLAIN_PASSWORD, identity)
    return made


def await_frame(endpoint: Endpoint) -> tuple[bytes, memoryview]:
    """The next frame that an endpoint without a thread receives."""
    poller = zmq.Poller()
    for each in endpoint.polled:
        poller.register(each, zmq.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        endpoint.attend()
        if (entry := endpoint.receive()) is not None:
            return entry
        left_ms = (deadline - time.monotonic()) * 1000
        assert left_ms > 0
        poller.poll(left_ms)


def commit_together(players: list[Player]) -> list[Decision]:
    """All vote yes; all hear that the step is committed."""
    for player in players:
        player.vote()
    decisions = [player.await_decision() for player in players]
    assert all(decision.committed for decision in decisions)
    return decisions


def main() -> None:
    """A replica group in a process of its own: joins, says "ready", waits to be killed.

    Arguments: address, name, expected_replicas, "watch" or "plain".
    """
    from lighthouse.process_watch import ProcessWatch, Report

    address, name, expected, how = sys.argv[1:]
    player = Player(address, name, zmq.Context())
    watch = ProcessWatch(address, FAST, player.replica_id.encode())
    if how == "watch":
        assert watch.start([Report(JobKey("somebody", "else"), "x")])
        watch.update([Report(player.job, player.replica_id)])
        assert watch.wait_ready(PATIENCE_S)
    player.join(expected_replicas=int(expected))
    player.await_quorum()
    print("ready", flush=True)
    sys.stdin.read()  # ends, too, if the test is gone


if __name__ == "__main__":
    main()


@contextmanager
def refused_a(what: str, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Once an endpoint is bound, no "thread" is started, or no "descriptor" is left for a pair of sockets. The addresses
    of the endpoints."""
    opened: list[str] = []
    bind, start = Endpoint.__init__, threading.Thread.start

    def note(endpoint: Endpoint, *args: Any, **options: Any) -> None:
        bind(endpoint, *args, **options)
        opened.append(endpoint.address)

    def start_none(thread: threading.Thread) -> None:
        if opened:
            raise RuntimeError("no more")
        start(thread)

    def no_pair(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "no more")

    patch.setattr(Endpoint, "__init__", note)
    if what == "thread":
        patch.setattr(threading.Thread, "start", start_none)
    else:
        patch.setattr(socket, "socketpair", no_pair)
    yield opened
