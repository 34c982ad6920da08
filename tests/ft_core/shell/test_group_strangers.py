"""The port of a replica group's leader, and what does not come from its ranks."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import zmq

from ft_core.config import JobOptions
from ft_core.errors import QuorumUnavailable
from ft_core.launch.rank_group import free_port
from ft_core.replica.group_leader import peer_of
from ft_core.shell import group_store
from ft_core.shell.group_server import GroupLink, GroupRendezvous, GroupServer, Leader
from lighthouse.config import MOST_STRANGERS, LighthouseConfig, split_address
from lighthouse.server import LighthouseServer
from lighthouse.wire.messages import JobKey, Join, Leave, Quorum, Waiting
from tests.harness.strangers import crowd
from tests.harness.waiting import PATIENCE_S, until
from tests.lighthouse.support import FAST, refused_a
from tests.lighthouse.test_strangers import STRAY

JOB = JobKey("job", "room")


@pytest.fixture
def group() -> Iterator[GroupServer]:
    with LighthouseServer(config=LighthouseConfig(timeouts=FAST)) as lighthouse:
        server = GroupServer(
            2,
            host="127.0.0.1",
            lighthouse=lighthouse.address(),
            replica_id="g-1",
            timeouts=FAST,
        )
        yield server
        server.close()


@pytest.mark.parametrize("lacks", ["thread", "descriptor"])
def test_a_leader_that_can_not_be_started_leaves_no_port_open(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks would have connected, and waited for an answer."""
    with LighthouseServer(config=LighthouseConfig(timeouts=FAST)) as lighthouse:
        with monkeypatch.context() as patch, refused_a(lacks, patch) as opened:
            with pytest.raises((RuntimeError, OSError), match="no more"):
                GroupServer(
                    2,
                    host="127.0.0.1",
                    lighthouse=lighthouse.address(),
                    replica_id="g-1",
                    timeouts=FAST,
                )
        (address,) = opened
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(split_address(address), PATIENCE_S)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def _await_quorums(links: list[GroupLink]) -> list[Quorum]:
    """What each rank hears; all follow the lighthouse that offers its term."""
    poller = zmq.Poller()
    for each in [one for link in links for one in link.sockets]:
        poller.register(each, zmq.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    found: dict[int, Quorum] = {}
    while len(found) < len(links):
        left_ms = (deadline - time.monotonic()) * 1000
        assert left_ms > 0
        poller.poll(left_ms)
        for rank, link in enumerate(links):
            link.events()
            for message in link.receive():
                if isinstance(message, Quorum):
                    found[rank] = message
                elif isinstance(message, Waiting) and message.offer is not None:
                    link.send(replace(_join(rank), promised=message.offer))
    return [found[rank] for rank in range(len(links))]


def _join(rank: int) -> Join:
    return Join(JOB, "g", "g-1", 0, "init", (b"rank %d" % rank,), expected_replicas=1)


@pytest.mark.parametrize("data", STRAY.values(), ids=STRAY.keys())
def test_strangers_do_not_end_the_group(
    group: GroupServer, context: zmq.Context[Any], data: bytes
) -> None:
    with socket.create_connection(split_address(group.leader.address), PATIENCE_S) as stranger:
        stranger.sendall(data)
        links = [GroupLink(group.leader, rank, FAST, context) for rank in range(2)]
        for rank, link in enumerate(links):
            link.send(_join(rank))
        quorums = _await_quorums(links)
    assert quorums[0] == quorums[1]
    for link in links:
        link.close()


def test_connections_that_say_nothing_make_way_for_ranks(
    group: GroupServer, context: zmq.Context[Any]
) -> None:
    with crowd(group.leader.address, MOST_STRANGERS + 40) as ended:
        until(lambda: ended() >= 38)
        links = [GroupLink(group.leader, rank, FAST, context) for rank in range(2)]
        for rank, link in enumerate(links):
            link.send(_join(rank))
        assert len(_await_quorums(links)) == 2
    for link in links:
        link.close()


def test_a_rank_without_the_groups_secret_is_not_heard(
    group: GroupServer, context: zmq.Context[Any]
) -> None:
    links = [GroupLink(group.leader, rank, FAST, context) for rank in range(2)]
    forged = GroupLink(Leader(group.leader.address, "g-1", "g-1.guessed"), 1, FAST, context)
    forged.send(Leave(JOB, "g-1", "forged"))
    monitor = forged.sockets[1]
    assert monitor.poll(PATIENCE_S * 1000), "it is turned away"
    for rank, link in enumerate(links):
        link.send(_join(rank))
    for quorum in _await_quorums(links):
        assert [m.addresses for m in quorum.changed] == [(b"rank 0", b"rank 1")]
    for link in (*links, forged):
        link.close()
    assert peer_of(1) == b"rank-1"


def test_ranks_that_do_not_come_may_be_those_of_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """WORLD_SIZE is in the environment of a shell in which torchrun has run, say."""
    for name, value in {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    options = JobOptions.resolve(lighthouse="tcp://127.0.0.1:1")
    with pytest.raises(QuorumUnavailable, match="not all 8 ranks.* left over from another job"):
        GroupRendezvous(options).meet("lineage", 0.5, str)


@pytest.mark.parametrize(
    ("rank", "where", "why"),
    [
        ("1", "127.0.0.1", "no store answers at 127.0.0.1:"),
        ("1", "no-such-host.invalid", "'no-such-host.invalid' does not resolve"),
        ("0", "no-such-host.invalid", "'no-such-host.invalid' does not resolve"),
    ],
)
def test_a_store_that_is_not_there_is_waited_for_as_long_as_is_said(
    monkeypatch: pytest.MonkeyPatch, rank: str, where: str, why: str
) -> None:
    """torch takes up to twice its timeout, and what failed said of rank 0's own that a stranger has its port."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if rank == "1" else free_port()
        for name, value in {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": where}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setattr(group_store, "HOSTED", timedelta(seconds=1))
        options = JobOptions.resolve(lighthouse="tcp://127.0.0.1:1")
        with pytest.raises(QuorumUnavailable, match=f"{why}.* left over from another job"):
            GroupRendezvous(options).meet("lineage", 1.0, str)


def test_rank_0_does_not_wait_at_a_port_whose_owner_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It accepts, and is no store: torch waits without end."""
    monkeypatch.setattr(group_store, "HOSTED", timedelta(seconds=1))
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RuntimeError, match="what listens there is no store"),
    ):
        group_store.group_store("127.0.0.1", silent.getsockname()[1], 60.0, hosts=True)


def test_a_forked_worker_does_not_keep_the_leader_from_ending(group: GroupServer) -> None:
    """A data loader's worker has copies of all descriptors of the process that it was forked from."""
    with multiprocessing.get_context("fork").Pool(1):
        group.close()
