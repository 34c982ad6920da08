"""Replica groups of two ranks that hold a copy of the model each: one mesh over all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ft_core.errors import GroupLeft, QuorumUnavailable
from ft_core.telemetry import REVOKED, Event
from lighthouse import LighthouseServer
from lighthouse.errors import JoinRefused, SettingsDiffer
from tests.harness.cluster import Replica, lighthouse, one_of_two, rendezvous, replicas


def ranks(server: LighthouseServer, name: str, store: Any, **kw: Any) -> list[Replica]:
    """Both ranks of a group."""
    return [
        Replica(
            server,
            name,
            **one_of_two(rank, store),
            **kw,
        )
        for rank in (0, 1)
    ]


@contextmanager
def four(**kw: Any) -> Iterator[list[Replica]]:
    """Two groups of two ranks, in the order of the mesh; shut down at the end."""
    with lighthouse() as server, rendezvous(2) as stores:
        options = {"expected_replicas": 2, **kw}
        members = [
            member
            for name, store in zip("01", stores, strict=True)
            for member in ranks(server, name, store, **options)
        ]
        yield members
        replicas(*[member.close for member in members])


def test_means_counts_and_numbers_span_all_ranks() -> None:
    with four(min_replica_size=2) as members:

        def script(index: int) -> Any:
            manager = members[index].manager
            manager.start_quorum()
            mean = torch.tensor([float(index)])
            manager.allreduce(mean).wait()
            total = torch.tensor([1])
            manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
            number = manager.participating_rank(), manager.num_participants()
            groups = manager.num_participating_groups(), manager.replica_world_size()
            assert manager.should_commit(control=b"%d" % index)
            outcome = manager.last_outcome()
            assert outcome is not None
            return mean.item(), total.item(), number, groups, outcome.control

        results = replicas(*[lambda i=i: script(i) for i in range(4)])
        numbers = sorted(r[2] for r in results)
        assert numbers == [(i, 4) for i in range(4)]
        assert {r[0] for r in results} == {1.5}
        assert {r[1] for r in results} == {4}
        assert {r[3] for r in results} == {(2, 2)}
        assert {m.manager.batches_committed() for m in members} == {4}
        first = next(i for i, r in enumerate(results) if r[2][0] == 0)
        assert {r[4] for r in results} == {b"%d" % first}  # rank 0 of the first group


def test_an_error_in_one_rank_discards_for_all_and_the_next_step_commits() -> None:
    """One that had not begun the step may not see it discarded: what is sent depends on the step."""
    with four(min_replica_size=2) as members:

        def script(index: int) -> list[tuple[int, bool]]:
            member, history = members[index], []
            manager = member.manager
            while (step := manager.current_step()) < 4:
                if index == 3 and step == 1 and (1, False) not in history:
                    manager.start_quorum()
                    manager.report_error(RuntimeError("a bad batch"))
                    history.append((1, manager.should_commit()))
                else:
                    history.append((step, member.step(float(index))))
            return history

        results = replicas(*[lambda i=i: script(i) for i in range(4)])
        assert (1, False) in results[3]
        for history in results:
            assert [step for step, committed in history if committed] == [0, 1, 2, 3]
        for member in members:
            assert member.weights.tolist() == [-4 * 1.5] * 8  # nothing of the discarded attempt


def test_a_store_that_has_had_no_time_to_answer_is_asked_again() -> None:
    """It is not taken for another program's port."""
    with lighthouse() as server, rendezvous(1) as stores:
        first, second = members = ranks(server, "a", stores[0])
        with pytest.raises(QuorumUnavailable):
            first.manager.start_quorum(timeout=timedelta(milliseconds=1))
        assert replicas(first.step, second.step) == [True, True]
        replicas(*[member.close for member in members])


def test_a_rank_that_leaves_out_an_update_costs_its_group_the_state() -> None:
    """In two of three groups at once: by the fewest updates of each group they would be the majority, and
    those of the third one's ranks would heal from ranks that differ."""
    with lighthouse(all_join=True) as server, rendezvous(3) as stores:
        groups = [
            ranks(server, name, store, expected_replicas=3, min_replica_size=3)
            for name, store in zip("abc", stores, strict=True)
        ]

        def script(member: Replica, *, leaves_out: bool) -> None:
            while member.manager.current_step() < 6:
                reduced = member.begin()
                if member.manager.should_commit():
                    if leaves_out and member.manager.current_step() == 3:
                        leaves_out = False
                    else:
                        member.weights -= reduced
                        member.manager.updated()

        replicas(
            *[
                lambda m=member, rank=rank, name=name: script(
                    m, leaves_out=name != "a" and rank == 1
                )
                for name, group in zip("abc", groups, strict=True)
                for rank, member in enumerate(group)
            ]
        )
        held = [member.weights.tolist() for group in groups for member in group]
        replicas(*[member.close for group in groups for member in group])
    assert held == [[-6.0] * 8] * 6


@pytest.mark.parametrize("which", [[3], [2], [2, 3]])
def test_a_rank_that_forgets_its_state_heals_with_its_group(which: list[int]) -> None:
    """Several times, and no rank waits for a group that will never be made: where both ranks forget,
    the second may do so when the quorum in which the first would heal is on its way already."""
    # Together to the end: a group that trained on alone would have stopped before the other heals.
    with four(min_replica_size=2, timeout=timedelta(seconds=5)) as members:
        told: list[Event] = []
        for member in members:
            member.manager.telemetry.add_sink(told.append)

        def script(index: int) -> list[float]:
            member, manager = members[index], members[index].manager
            while manager.current_step() < 16:
                if member.step() and index in which and manager.current_step() % 3 == 0:
                    member.weights.fill_(99.0)
                    manager.rejoin("spoilt")
            weights: list[float] = member.weights.tolist()
            return weights

        results = replicas(*[lambda i=i: script(i) for i in range(4)])
        assert results[1:] == results[:-1]
        assert results[0][0] < 0.0
        reasons = [str(event.data["reason"]) for event in told if event.kind == REVOKED]
        assert not [reason for reason in reasons if "timed out" in reason]


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_that_begin_with_unlike_copies_have_that_of_the_first(groups: int) -> None:
    """As under DistributedDataParallel: a script need not seed them. Without that no group held a whole state, and
    there was no quorum."""
    with lighthouse() as server, rendezvous(groups) as stores:
        members = [
            Replica(
                server,
                name,
                value=float(10 * group + 2 + rank),
                expected_replicas=groups,
                **one_of_two(rank, store),
            )
            for group, (name, store) in enumerate(zip("01", stores, strict=False))
            for rank in (0, 1)
        ]
        replicas(*[lambda m=member: m.run_to(2) for member in members])
        held = [member.weights.tolist() for member in members]
        replicas(*[member.close for member in members])
    assert held == [held[0]] * len(members)
    assert held[0] in ([[0.0] * 8, [10.0] * 8][:groups])


def test_groups_of_other_sizes_are_refused() -> None:
    with lighthouse() as server, rendezvous(1) as stores:
        pair = ranks(server, "0", stores[0], job_id="j", timeout=timedelta(seconds=5))
        alone = Replica(server, "1", ranks_hold="copies", job_id="j")
        replicas(pair[0].step, pair[1].step)
        with pytest.raises(
            JoinRefused, match="1 has 1 ranks and 0 2; all replica groups need the same number"
        ):
            alone.step()
        alone.close()
        replicas(pair[0].close, pair[1].close)


def test_what_ranks_can_hold() -> None:
    with pytest.raises(ValueError, match='"shards" or "copies"'):
        Replica("tcp://127.0.0.1:1", "0", ranks_hold="halves")


def test_a_group_with_another_token_is_told_at_all_of_its_ranks() -> None:
    """Its ranks leave one by one, as each is refused; the other group trains on."""
    with lighthouse() as server, rendezvous(2) as stores:
        first = ranks(server, "0", stores[0], token="ours")
        replicas(*[lambda r=r: r.run_to(1) for r in first])
        strangers = ranks(server, "1", stores[1], token="theirs")
        over = threading.Event()

        def train(member: Replica) -> None:
            with suppress(GroupLeft):  # the other rank has left first, and this one with it
                while not member.manager.left():
                    if over.is_set():
                        member.manager.leave_after_step()
                    member.step()

        def join(member: Replica) -> None:
            with pytest.raises(SettingsDiffer, match="wrong token"):
                member.manager.start_quorum()

        def both() -> None:
            try:
                replicas(*[lambda s=s: join(s) for s in strangers])
            finally:
                over.set()

        replicas(*[lambda r=r: train(r) for r in first], both)
        replicas(*[member.close for member in [*first, *strangers]])
