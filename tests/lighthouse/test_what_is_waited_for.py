"""Rows of the table "What a job waits for, and what ends it" (docs/protocol.md), at a real lighthouse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from lighthouse.client import LighthouseClient
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.server import LighthouseServer
from lighthouse.wire.messages import DECLARE_DEAD, TORN, Quorum, Refused, Waiting
from tests.lighthouse.support import Player, commit_together

SHORT = Timeouts.derive(
    3.0, join_timeout_s=0.3, heartbeat_timeout_s=2.0, revoke_timeout_s=4.5, step_timeout_s=6.0
)
Lighthouse = Callable[..., LighthouseServer]
Players = Callable[..., list[Player]]


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    with ExitStack() as stack:

        def start(**options: Any) -> LighthouseServer:
            config = LighthouseConfig(timeouts=SHORT, **options)
            return stack.enter_context(LighthouseServer(config=config))

        yield start


@pytest.fixture
def players(context: zmq.Context[Any]) -> Iterator[Players]:
    made: list[Player] = []

    def make(server: LighthouseServer, names: str) -> list[Player]:
        new = [Player(server.address(), name, context) for name in names]
        made.extend(new)
        return new

    yield make
    for each in made:
        each.close()


def _waits(player: Player, *words: str) -> None:
    """Until it is told a reason that holds all `words`."""
    reason = player.await_message(Waiting).reason
    while not all(word in reason for word in words):
        reason = player.await_message(Waiting).reason


def _declare_dead(server: LighthouseServer, player: Player, *members: str) -> None:
    client = LighthouseClient(server.address())
    for member in members:
        client.declare_dead(member, job_id=player.job.job_id)


def _start_from_checkpoints(group: list[Player], expected: int) -> None:
    for each in group:
        each.step, each.lineage = 5, "saved"
        each.join(expected_replicas=expected, genesis=7, held=1)


def _train(group: list[Player]) -> None:
    _start_from_checkpoints(group, len(group))  # they are all waited for
    for each in group:
        each.await_quorum()
    commit_together(group)


def _ids(quorum: Quorum) -> set[str]:
    return {member.replica_id for member in quorum.changed}


def test_one_that_does_not_come_to_a_start_from_checkpoints(
    lighthouse: Lighthouse, players: Players
) -> None:
    server = lighthouse()
    a, b = group = players(server, "ab")
    _start_from_checkpoints(group, 3)
    _waits(a, "1 of 3 expected", "here: a, b", DECLARE_DEAD)
    _declare_dead(server, a, "c")
    for each in group:
        assert _ids(each.await_quorum()) == {a.replica_id, b.replica_id}


def test_the_same_where_it_is_waited_for_so_long(lighthouse: Lighthouse, players: Players) -> None:
    server = lighthouse(go_on_after_s=1.0)
    a, b = group = players(server, "ab")
    _start_from_checkpoints(group, 3)
    for each in group:
        assert _ids(each.await_quorum()) == {a.replica_id, b.replica_id}


def test_most_are_lost_without_a_word(lighthouse: Lighthouse, players: Players) -> None:
    server = lighthouse()
    a, *others = group = players(server, "abcd")
    _train(group)
    for each in others:
        each.close()
    a.vote(ok=False)
    _waits(a, DECLARE_DEAD)
    _declare_dead(server, a, *(each.replica_id for each in others))
    quorum = a.await_message(Quorum)
    assert (quorum.step, quorum.lineage) == (a.step, a.lineage)


def test_half_are_back_at_another_lighthouse(lighthouse: Lighthouse, players: Players) -> None:
    old = players(lighthouse(), "abcd")
    _train(old)
    members = tuple(each.replica_id for each in old)
    last, server = old[0].quorum, lighthouse()
    assert last is not None
    new = players(server, "abcd")
    for each, before in zip(new, old, strict=True):
        each.replica_id, each.promised = before.replica_id, before.promised
        each.step, each.lineage = before.step, before.lineage
    said = {"expected_replicas": 4, "quorum_id": last.quorum_id, "last_members": members}
    said |= {"genesis": last.genesis, "held": last.quorum_id}
    for each in new[:2]:
        each.join(**said)
    _waits(new[0], DECLARE_DEAD)
    new[2].join(**said)
    for each in new[:3]:
        quorum = each.await_message(Quorum)
        assert quorum.step == old[0].step


def test_all_states_are_torn(lighthouse: Lighthouse, players: Players) -> None:
    server = lighthouse()
    group = players(server, "ab")
    for each in group:
        each.lineage = f"{TORN}{each.replica_id}"
        each.join(expected_replicas=2)
    for each in group:
        _waits(each, "no waiting replica group holds a whole state")
    for each in group:
        assert "start the replica groups again" in each.await_message(Refused).reason
