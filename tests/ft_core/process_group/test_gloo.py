"""Real Gloo groups in threads: configure, revoke, configure again; right sums, no thread left behind."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_core.collectives.allreduce import options_for
from ft_core.process_group import ProcessGroupError, ProcessGroupGloo, gloo, reconfigurable
from tests.ft_core.process_group.members import (
    KIND_NAMES,
    KINDS,
    Calls,
    assert_freed,
    configure,
    gloo_groups,
    right_sum,
    sums,
)
from tests.harness.waiting import PATIENCE_S, until

SUM = options_for("sum")


@pytest.fixture(params=KINDS, ids=KIND_NAMES)
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def four(native: bool) -> Iterator[list[ProcessGroupGloo]]:
    with gloo_groups(4, native=native) as groups:
        yield groups


def test_strangers_do_not_get_into_a_device_whose_members_are_connected(native: bool) -> None:
    """Gloo never gives their descriptors back, and aborts the process when none are left."""
    with gloo_groups(3, native=native) as groups:
        for quorum_id, chosen in enumerate(([0, 1], [0, 1, 2], [2, 0])):
            members = [groups[i] for i in chosen]
            configure(members, quorum_id)
            for member in members:
                communicator: Any = member._communicator
                with pytest.raises(OSError, match="timed out|refused"):
                    socket.create_connection(communicator._sockets._address, 0.1).close()
            assert sums(members) == right_sum(len(members))


def test_sums_while_members_come_and_go(four: list[ProcessGroupGloo]) -> None:
    members = ([0, 1, 2, 3], [1, 3], [3], [3, 0, 1], [2, 1, 0, 3], [0, 2])
    for quorum_id, chosen in enumerate(members):
        groups = [four[i] for i in chosen]
        configure(groups, quorum_id)
        assert sums(groups) == right_sum(len(chosen))
        assert [group.size() for group in groups] == [len(chosen)] * len(chosen)
        assert [group.rank() for group in groups] == list(range(len(chosen)))
        assert [group.errored() for group in groups] == [None] * len(chosen)


@pytest.mark.parametrize("elements", [1, 1 << 24], ids=["4 B", "64 MiB"])
@pytest.mark.parametrize("call", ["allreduce", "start_allreduce"])
def test_revoke_frees_every_blocked_member(
    four: list[ProcessGroupGloo], call: str, elements: int
) -> None:
    configure(four, 1)
    entered = threading.Barrier(4)

    def blocked(rank: int) -> None:
        issue = getattr(four[rank], call)
        works = [issue([torch.ones(elements)], SUM) for _ in range(2)]
        entered.wait(PATIENCE_S)
        for work in works:
            with pytest.raises(ProcessGroupError) as caught:
                work.wait()  # ends by the revocation, or by a neighbour's broken line
            assert_freed(caught.value)
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), ProcessGroupError)

    calls = Calls(blocked, [0, 1, 2])  # rank 3 never comes
    entered.wait(PATIENCE_S)
    for group in four:
        group.revoke(RuntimeError("rank 3 is gone"))
    calls.values()
    assert all(isinstance(group.errored(), ProcessGroupError) for group in four)

    configure(four[:3], 2)
    assert sums(four[:3], elements) == right_sum(3)


def test_a_started_allreduce_is_found_by_waiting_or_asking(
    four: list[ProcessGroupGloo],
) -> None:
    """Nothing follows it in the backend's threads."""
    configure(four[:2], 1)
    tensors = [torch.full((3,), index + 1.0) for index in range(8)]
    works = [
        four[rank].start_allreduce([tensors[2 * n + rank]], SUM)
        for n in range(4)
        for rank in (0, 1)
    ]
    assert works[0].wait() and works[1].wait()
    until(works[2].is_completed)
    assert works[2].is_success() and works[2].exception() is None
    (result,) = works[3].get_future().wait()
    assert result is tensors[3]
    works[4].wait(timedelta(seconds=5))
    assert works[5].result()[0].tolist() == [11.0] * 3
    four[0].revoke(RuntimeError("gone"))  # a work without a waiter ends, too
    four[1].revoke(RuntimeError("gone"))
    until(lambda: works[6].is_completed() and works[7].is_completed())
    assert [tensor[0].item() for tensor in tensors[:6]] == [3.0, 3.0, 7.0, 7.0, 11.0, 11.0]
    configure(four[:2], 2)
    assert sums(four[:2]) == right_sum(2)


def test_a_long_wait_for_a_started_allreduce_gets_it(four: list[ProcessGroupGloo]) -> None:
    """Longer than it sits in the backend, which might have lost it."""
    configure(four[:2], 1)
    tensor = torch.ones(1)
    work = four[0].start_allreduce([tensor], SUM)
    waiting = Calls(lambda _: work.wait(), [0])
    until(lambda: not work._watch_once)  # type: ignore[attr-defined]
    assert not work.is_completed()
    four[1].start_allreduce([torch.ones(1)], SUM).wait()
    assert waiting.values() == {0: True}
    assert tensor.item() == 2.0


def test_a_failure_of_a_started_allreduce_is_its_waiters(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    work = four[0].start_allreduce([torch.ones(1 << 20)], SUM)
    four[1].shutdown()
    assert "allreduce of quorum 1 failed" in _failure(work)
    assert isinstance(four[0].errored(), ProcessGroupError)
    assert "failed" in _failure(four[0].start_allreduce([torch.ones(1)], SUM))
    gc.disable()  # no cycle may be there that only it ends: descriptors would stay open
    try:
        kept = weakref.ref(work)
        del work
        until(lambda: kept() is None)  # a thread of the group looks at it for a moment
    finally:
        gc.enable()


def _failure(work: dist.Work) -> str:
    """As pytest.raises, which holds on to the frames."""
    try:
        work.wait()
    except ProcessGroupError as error:
        return str(error)
    return ""


def test_a_revoked_future_ends_with_the_error(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    future = four[0].allreduce([torch.ones(3)]).get_future()
    chained = future.then(lambda done: done.value()[0] * 2)
    four[0].revoke(RuntimeError("gone"))
    for each in (future, chained):
        with pytest.raises(RuntimeError, match="gone"):
            each.wait()


def test_a_future_holds_the_tensors(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    tensors = [torch.ones(3), torch.ones(3)]
    futures = [four[rank].allreduce([tensors[rank]]).get_future() for rank in range(2)]
    for rank, future in enumerate(futures):
        (result,) = future.wait()
        assert result.data_ptr() == tensors[rank].data_ptr()
        assert result.tolist() == [2.0, 2.0, 2.0]


def test_collectives_without_a_quorum_fail_in_the_work(four: list[ProcessGroupGloo]) -> None:
    early = four[0].allreduce([torch.ones(1)])
    with pytest.raises(ProcessGroupError, match="before the first configure"):
        early.wait()
    configure(four[:2], 1)
    four[0].revoke(RuntimeError("gone"))
    four[0].revoke(RuntimeError("later"))
    late = four[0].allreduce([torch.ones(1)])
    with pytest.raises(ProcessGroupError, match="gone"):
        late.wait()
    with pytest.raises(RuntimeError, match="gone"):
        late.get_future().wait()


def test_a_bound_step_cannot_use_the_next_quorum(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    four[0].bind(1)
    configure(four[:2], 2)
    with pytest.raises(ProcessGroupError, match="belongs to quorum 1"):
        four[0].allreduce([torch.ones(1)]).wait()
    four[0].bind(2)
    assert sums(four[:2]) == right_sum(2)


def test_works_of_the_old_quorum_do_not_break_the_new_one(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    old = [four[0].allreduce([torch.ones(1 << 16)]) for _ in range(3)]
    configure(four[:2], 2)  # revokes quorum 1
    assert sums(four[:2]) == right_sum(2)
    for work in old:
        with pytest.raises(ProcessGroupError, match="quorum 1"):
            work.wait()
    four[0].revoke(RuntimeError("about quorum 1"), quorum_id=1)
    assert four[0].errored() is None
    assert sums(four[:2]) == right_sum(2)


def test_configure_gives_up_when_a_member_never_comes(four: list[ProcessGroupGloo]) -> None:
    addresses = [group.address() for group in four]
    calls = Calls(lambda i: four[i].configure(1, i, addresses, 0.3), [0, 1, 2])
    for outcome in calls.finish().values():
        # The first to give up says so to the others.
        assert isinstance(outcome, ProcessGroupError)
    assert "rank(s) 3 of 4 never came" in " ".join(map(str, calls.outcomes.values()))
    configure(four, 2)
    assert sums(four) == right_sum(4)


@pytest.mark.parametrize("what", ["Rendezvous", "choose_address"])
def test_a_configure_that_can_not_begin_closes_the_last_quorums_communicator(
    native: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device kept threads and descriptors, of which there may be too few already."""

    def fails(*args: Any, **options: Any) -> None:
        raise OSError("no descriptors are left")

    closed = threading.Event()
    with gloo_groups(1, native=native) as [group]:
        configure([group], 1)
        last: Any = group._communicator
        close = last.close
        monkeypatch.setattr(last, "close", lambda end_works: (close(end_works), closed.set()))
        group.set_timeout(timedelta(seconds=7))  # it can't be used again
        with monkeypatch.context() as broken:
            broken.setattr(gloo if what == "choose_address" else reconfigurable, what, fails)
            with pytest.raises(ProcessGroupError, match="no descriptors are left"):
                group.configure(2, 0, [group.address()], PATIENCE_S)
        assert closed.wait(PATIENCE_S)
        configure([group], 3)
        assert sums([group]) == right_sum(1)


def test_revoke_ends_a_configure(four: list[ProcessGroupGloo]) -> None:
    addresses = [group.address() for group in four]
    calls = Calls(lambda i: four[i].configure(1, i, addresses, 20.0), [0, 1, 2])
    while any(group.quorum_id < 1 for group in four[:3]):
        time.sleep(0.001)
    four[1].revoke(RuntimeError("gone"))  # the others hear of it from rank 1
    for outcome in calls.finish().values():
        assert_freed(outcome)
    configure(four, 2)
    assert sums(four) == right_sum(4)


def test_a_member_of_an_older_quorum_never_mixes_in(four: list[ProcessGroupGloo]) -> None:
    addresses = [group.address() for group in four[:3]]
    late = Calls(lambda i: four[i].configure(1, i, addresses, 20.0), [0])
    while four[0].quorum_id < 1:
        time.sleep(0.001)
    configure(four[1:3], 2)
    (outcome,) = late.finish().values()
    assert isinstance(outcome, ProcessGroupError)
    assert "quorum 1 is over" in str(outcome)
    assert sums(four[1:3]) == right_sum(2)


def test_members_with_other_lists_do_not_meet(four: list[ProcessGroupGloo]) -> None:
    addresses = [group.address() for group in four[:3]]
    lists = {0: addresses, 1: addresses[:2]}
    calls = Calls(lambda i: four[i].configure(1, i, lists[i], 2.0), [0, 1])
    assert all(isinstance(outcome, ProcessGroupError) for outcome in calls.finish().values())
    assert "another member list" in str(calls.outcomes[0])


def test_a_dead_member_ends_a_configure_at_once(four: list[ProcessGroupGloo]) -> None:
    addresses = [group.address() for group in four[:3]]
    four[2].shutdown()  # as a process that ends: its port is closed
    calls = Calls(lambda i: four[i].configure(1, i, addresses, 20.0), [0, 1])
    for outcome in calls.finish().values():
        assert_freed(outcome)
    assert "its process is gone" in " ".join(map(str, calls.outcomes.values()))


def test_an_operation_times_out_and_breaks_the_group(native: bool) -> None:
    with gloo_groups(2, native=native, timeout_s=0.3) as groups:
        configure(groups, 1)
        with pytest.raises(ProcessGroupError, match="Timed out"):
            groups[0].allreduce([torch.ones(1)]).wait()
        assert groups[0].errored() is not None
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.1)
        configure(groups, 2)
        with pytest.raises(ProcessGroupError, match="waiting 100ms"):
            groups[0].allreduce([torch.ones(1)], options).wait()


def test_a_wait_may_be_bounded_without_breaking_the_group(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    tensor = torch.ones(1)
    work = four[0].allreduce([tensor])
    with pytest.raises(ProcessGroupError, match="has not ended"):
        work.wait(timedelta(seconds=0.05))
    four[1].allreduce([torch.ones(1)]).wait()
    assert work.wait()
    assert tensor.item() == 2.0


def test_wrong_arguments_raise_at_the_call(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    with pytest.raises((TypeError, ValueError)):
        four[0].allreduce(["no tensor"])  # type: ignore[list-item]
    assert four[0].errored() is None
    addresses = [group.address() for group in four[:2]]
    with pytest.raises(ValueError, match="not newer"):
        four[0].configure(1, 0, addresses, 1.0)
    with pytest.raises(ValueError, match="not this group's"):
        four[0].configure(2, 1, addresses, 1.0)
    with pytest.raises(ValueError, match="no address"):
        four[0].configure(2, 0, [addresses[0], b"elsewhere"], 1.0)
    assert sums(four[:2]) == right_sum(2)  # quorum 1 has not suffered


@pytest.mark.parametrize("name", ["allreduce", "broadcast", "reduce"])
def test_a_view_with_gaps_is_refused(four: list[ProcessGroupGloo], name: str) -> None:
    """Gloo writes to as many values as the view has, from its first one on: to a neighbour's memory."""
    configure(four[:2], 1)
    for view in (torch.ones(2, 8)[:, :3], torch.ones(2, 6)[:, ::2], torch.ones(1).expand(5)):
        with pytest.raises(ValueError, match=f"{name} of a tensor of shape"):
            getattr(four[0], name)([view])
    assert sums(four[:2]) == right_sum(2)

    def transposed(rank: int) -> list[list[float]]:
        tensor = torch.full((3, 2), rank + 1.0).t()
        four[rank].allreduce([tensor]).wait()
        return tensor.tolist()

    assert Calls(transposed, range(2)).values() == {0: [[3.0] * 3] * 2, 1: [[3.0] * 3] * 2}


def test_what_the_backend_does_not_have_raises_at_the_call(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    tensor = torch.ones(2)
    with pytest.raises(NotImplementedError, match="does not support a_collective_of_tomorrow"):
        four[0].issue("a_collective_of_tomorrow", [tensor])
    with pytest.raises(NotImplementedError, match="one tensor"):
        four[0].reduce_scatter_tensor_coalesced([tensor] * 2, [tensor] * 2)
    assert sums(four[:2]) == right_sum(2)  # nor has quorum 1 suffered


def test_shutdown_with_works_pending(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    works = [four[0].allreduce([torch.ones(1 << 16)]) for _ in range(4)]
    four[0].shutdown()
    four[0].shutdown()
    for work in works:
        with pytest.raises(ProcessGroupError, match="shut down"):
            work.wait()
    with pytest.raises(ProcessGroupError, match="shut down"):
        four[0].address()


def test_a_member_that_shuts_down_when_it_is_done_cuts_no_peer(native: bool) -> None:
    """A reset of its connections threw away what the peer had not read yet: two times in twenty, the
    peer then waited for its timeout."""
    for _ in range(10):
        with gloo_groups(2, native=native, timeout_s=PATIENCE_S) as groups:
            configure(groups, 1)

            def reduce(rank: int, groups: list[ProcessGroupGloo] = groups) -> bool:
                tensor = torch.full((1_000_000,), rank + 1.0)
                groups[rank].allreduce([tensor]).wait()
                if rank == 1:
                    assert groups[rank].idle
                    groups[rank].shutdown()
                return bool((tensor == 3.0).all())

            assert Calls(reduce, range(2)).values() == {0: True, 1: True}


def test_every_collective(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)

    def run(rank: int) -> dict[str, object]:
        group, mine = four[rank], torch.tensor([1.0, 2.0]) * (rank + 1)
        seen: dict[str, object] = {}
        group.barrier().wait()
        value = mine.clone()
        group.allreduce(value, dist.ReduceOp.MAX).wait()
        seen["max"] = value.tolist()
        value = mine.clone()
        group.broadcast(value, 1).wait()
        seen["broadcast"] = value.tolist()
        gathered = [torch.zeros(2), torch.zeros(2)]
        group.allgather([gathered], [mine]).wait()
        seen["allgather"] = [each.tolist() for each in gathered]
        value = mine.clone()
        group.broadcast_one(value, 0).wait()
        seen["broadcast one"] = value.tolist()
        several = [torch.zeros(4), torch.zeros(2, 1)]
        group.allgather_into_tensor_coalesced(several, [mine, mine[:1]]).wait()
        seen["several"] = [each.flatten().tolist() for each in several]
        flat = torch.zeros(4)
        group._allgather_base(flat, mine).wait()
        seen["flat"] = flat.tolist()
        part = torch.zeros(1)
        group._reduce_scatter_base(part, mine).wait()
        seen["part"] = part.tolist()
        part = torch.zeros(1)
        group.reduce_scatter_tensor_coalesced([part], [mine]).wait()
        seen["part 3"] = part.tolist()
        part = torch.zeros(1)
        group.reduce_scatter([part], [[mine[:1].clone(), mine[1:].clone()]]).wait()
        seen["part 2"] = part.tolist()
        swapped = torch.zeros(2)
        group.alltoall_base(swapped, mine, [], []).wait()
        seen["swapped"] = swapped.tolist()
        if rank == 0:
            group.send([mine], 1, 5).wait()
        else:
            value = torch.zeros(2)
            work = group.recv([value], 0, 5)
            assert work.get_future().wait()[0].tolist() == [1.0, 2.0]
        return seen

    seen = Calls(run, range(2)).values()
    for rank in range(2):
        assert seen[rank]["max"] == [2.0, 4.0]
        assert seen[rank]["broadcast"] == [2.0, 4.0]
        assert seen[rank]["allgather"] == [[1.0, 2.0], [2.0, 4.0]]
        assert seen[rank]["flat"] == [1.0, 2.0, 2.0, 4.0]
        assert seen[rank]["broadcast one"] == [1.0, 2.0]
        assert seen[rank]["several"] == [[1.0, 2.0, 2.0, 4.0], [1.0, 2.0]]
        for name in ("part", "part 2", "part 3"):
            assert seen[rank][name] == [[3.0], [6.0]][rank]
        assert seen[rank]["swapped"] == [[1.0, 2.0], [2.0, 4.0]][rank]
    with pytest.raises(NotImplementedError):
        four[0].recv_anysource([torch.zeros(1)])


def test_a_revoked_receive_ends(four: list[ProcessGroupGloo]) -> None:
    configure(four[:2], 1)
    work = four[0].recv([torch.zeros(1)], 1)
    four[0].revoke(RuntimeError("gone"))
    with pytest.raises(ProcessGroupError, match="gone"):
        work.wait(timedelta(seconds=PATIENCE_S))


def test_a_receive_that_no_thread_can_wait_for_fails_and_the_next_quorum_works(
    four: list[ProcessGroupGloo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call raised, and its work stayed under way."""
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == "ft-pg-work":
            raise RuntimeError("can't start new thread")
        start(thread)

    configure(four[:2], 1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        work = four[0].recv([torch.zeros(1)], 1)
    with pytest.raises(ProcessGroupError, match="recv of quorum 1 failed: can't start new thread"):
        work.wait(timedelta(seconds=PATIENCE_S))
    assert not four[0].under_way
    configure(four[:2], 2)
    received = torch.zeros(1)
    work = four[0].recv([received], 1)
    four[1].send([torch.ones(1)], 0).wait(timedelta(seconds=PATIENCE_S))
    work.wait(timedelta(seconds=PATIENCE_S))
    assert received.item() == 1.0


def test_works_of_one_member_finish_in_order_of_issue(four: list[ProcessGroupGloo]) -> None:
    configure(four[:3], 1)

    def several(rank: int) -> list[float]:
        tensors = [torch.full((1 << size,), float(rank + size)) for size in range(12)]
        works = [four[rank].allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
        return [float(tensor.sum() / tensor.numel()) for tensor in tensors]

    for result in Calls(several, range(3)).values().values():
        assert result == [3.0 + 3 * size for size in range(12)]
