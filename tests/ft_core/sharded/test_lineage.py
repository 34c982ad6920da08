"""Replica groups whose ranks hold the shards of one copy of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_core.errors import QuorumUnavailable
from ft_core.replica.status import Attempt
from ft_core.telemetry import HEAL_DONE, Event
from tests.harness.cluster import Replica, lighthouse, one_of_two, rendezvous, replicas
from tests.harness.waiting import until


@pytest.mark.parametrize("second", [0.0, 5.0])
def test_groups_of_unlike_shards_begin_as_one_state(second: float) -> None:
    """Each rank's shard has other values; both groups begin equal, or the second one heals."""
    healed = threading.Event()

    def note(event: Event) -> None:
        if event.kind == HEAL_DONE:
            healed.set()

    with lighthouse() as server, rendezvous(2) as stores:
        members = [
            Replica(
                server,
                name,
                value=first + rank,
                expected_replicas=2,
                **one_of_two(rank, store, hold="shards"),
            )
            for name, first, store in zip("ab", (0.0, second), stores, strict=True)
            for rank in (0, 1)
        ]
        for member in members:
            member.manager.telemetry.add_sink(note)
        replicas(*[lambda m=member: m.run_to(3, gradient=1.0) for member in members])
        ends = [set(member.weights.tolist()) for member in members]
        replicas(*[member.close for member in members])
    assert ends[0] == ends[2]
    assert ends[1] == ends[3]
    assert ends[0] != ends[1]
    assert healed.is_set() == (second != 0.0)


@pytest.mark.parametrize("ranks_hold", ["shards", "copies"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_has_not_started_is_waited_for_as_long_as_the_call_says(
    first: int, ranks_hold: str
) -> None:
    """The wait for the ranks of the own group is one for a quorum, and a later call goes on with it."""
    soon = timedelta(seconds=0.05)
    with lighthouse() as server, rendezvous(1) as stores:
        options: dict[str, Any] = {
            "world_size": 2,
            "store_addr": "127.0.0.1",
            "store_port": stores[0].port,
            "ranks_hold": ranks_hold,
            "connect_timeout": timedelta(days=1),
        }
        early = Replica(server, "a", rank=first, **options)

        def no_quorum(call: Callable[..., object]) -> None:
            with pytest.raises(QuorumUnavailable):
                call(timeout=soon)

        no_quorum(early.manager.start_quorum)
        no_quorum(early.manager.should_commit)
        early.manager.allreduce(early.weights).wait()
        assert isinstance(early.manager.errored(), QuorumUnavailable)
        no_quorum(early.manager.start_quorum)
        late = Replica(server, "a", rank=1 - first, **options)
        replicas(lambda: early.run_to(2), lambda: late.run_to(2))
        replicas(early.close, late.close)
        never = Replica(server, "b", rank=0, **options)
        no_quorum(never.manager.start_quorum)
        never.close()


def test_a_store_at_the_port_of_an_earlier_one_knows_nothing_of_its_managers() -> None:
    """There a rank had made one more than the other."""
    with lighthouse() as server:
        with rendezvous(1) as stores:
            port = stores[0].port
            alone = Replica(server, "a", **one_of_two(0, stores[0], hold="shards"))
            with pytest.raises(QuorumUnavailable):
                alone.manager.start_quorum(timeout=timedelta(seconds=0.05))
            alone.close()
            stores.clear()
        with rendezvous(1, port) as stores:
            both = [
                Replica(server, "a", **one_of_two(rank, stores[0], hold="shards"))
                for rank in (0, 1)
            ]
            replicas(*[lambda m=member: m.run_to(1) for member in both])
            replicas(*[member.close for member in both])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_that_commits_alone_acts_on_the_vote_of_all_its_ranks(groups: int) -> None:
    """One rank's no is the group's. Where another one acted on its own yes, the state was torn: without a peer that
    held a whole one, the training was over."""
    with lighthouse() as server, rendezvous(groups) as stores:
        options: dict[str, Any] = {"commit": "group", "expected_replicas": groups}
        members = [
            Replica(server, name, **options, **one_of_two(rank, store, hold="shards"))
            for name, store in zip("ab", stores, strict=False)
            for rank in (0, 1)
        ]
        refuser, *others = members

        def run_to(step: int) -> None:
            replicas(*[lambda m=member: m.run_to(step) for member in members])

        def has_voted(member: Replica) -> bool:
            status = member.manager._session.control.status  # type: ignore[union-attr]
            return status.attempt in (Attempt.VOTED, Attempt.CLOSED)

        def is_back() -> bool:
            """Else its peers may have ended when it comes to heal."""
            job = server.status()["jobs"][0]
            healing = [member["name"] for member in job["members"] if member["healing"]]
            return "a" in [*job["waiting"], *healing] or groups == 1

        def refuse() -> bool:
            reduced = refuser.begin()
            until(lambda: all(map(has_voted, others)), "the others' votes")
            refuser.manager.report_error(RuntimeError("lost"))
            return refuser.end(reduced)

        run_to(2)
        made = replicas(refuse, *[other.step for other in others])
        assert made == [False, False, True, True][: len(members)]
        until(is_back, "the group that is behind")
        run_to(5)
        for mine, other in zip(members[:2], members[-2:], strict=True):
            assert torch.equal(mine.weights, other.weights)
        replicas(*[member.close for member in members])
