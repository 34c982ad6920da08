"""Much that comes at once, through a replica group's leader. A lighthouse that was cut off or stopped for
seconds answers all that was asked meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from ft_core.shell.group_server import GroupLink, GroupServer
from lighthouse.client import SERVICE
from lighthouse.endpoint import Endpoint
from lighthouse.sockets import ServerLimits
from lighthouse.wire import codec
from lighthouse.wire.messages import JobKey, Join, Message, Peer, Refused, Waiting
from tests.harness.waiting import PATIENCE_S
from tests.lighthouse.support import FAST, await_frame

JOB = JobKey("job", "room")
RANKS = 2
ANSWERS = 5_000


@pytest.fixture
def lighthouse() -> Iterator[Endpoint]:
    """The test answers for it. It may have any number of answers under way."""
    context: zmq.Context[Any] = zmq.Context()
    endpoint = Endpoint(
        context, "tcp://127.0.0.1:0", FAST, service=SERVICE, limits=ServerLimits(queued=0)
    )
    yield endpoint
    endpoint.close()
    context.term()


@pytest.fixture
def links(lighthouse: Endpoint) -> Iterator[list[GroupLink]]:
    """The ranks' ends of a group that looks for `lighthouse`."""
    server = GroupServer(
        RANKS, host="127.0.0.1", lighthouse=lighthouse.address, replica_id="g-1", timeouts=FAST
    )
    context: zmq.Context[Any] = zmq.Context()
    links = [GroupLink(server.leader, rank, FAST, context) for rank in range(RANKS)]
    yield links
    for link in links:
        link.close()
    context.term()
    server.close()


def _group_of(lighthouse: Endpoint, links: list[GroupLink]) -> Peer:
    """The group's connection, once all of its ranks have joined."""
    for rank, link in enumerate(links):
        link.send(Join(JOB, "g", "g-1", 0, "init", (b"rank %d" % rank,)))
    peer, data = await_frame(lighthouse)
    assert isinstance(codec.decode(data), Join)
    return peer


def _heard(link: GroupLink, count: int) -> list[Message]:
    poller = zmq.Poller()
    for each in link.sockets:
        poller.register(each, zmq.POLLIN)
    heard: list[Message] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(heard) < count and not any(isinstance(m, Refused) for m in heard):
        assert time.monotonic() < deadline
        poller.poll(1_000)
        link.events()
        heard += link.receive()
    return heard


def test_answers_that_come_at_once_end_no_rank(
    lighthouse: Endpoint, links: list[GroupLink]
) -> None:
    group = _group_of(lighthouse, links)
    said = [Waiting(JOB, str(number)) for number in range(ANSWERS)]
    for message in said:
        lighthouse.send([group], codec.encode(message))
    for link in links:
        assert _heard(link, len(said)) == said
