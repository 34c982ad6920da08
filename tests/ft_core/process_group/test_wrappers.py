"""Dummy, error-swallowing, managed and fault-injecting groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.errors import OutsideStep
from ft_core.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from ft_core.replica.status import WorldSizeMode
from tests.harness.cluster import Replica, lighthouse, replicas


@pytest.fixture
def alone() -> Iterator[ProcessGroupGloo]:
    """A real Gloo group of one."""
    group = ProcessGroupGloo(10.0, hostname="127.0.0.1")
    group.configure(1, 0, [group.address()], 5.0)
    yield group
    group.shutdown()


def test_dummy_soaks_up_everything() -> None:
    group = ProcessGroupDummy(1, 3)
    assert (group.rank(), group.size()) == (1, 3)
    tensor = torch.arange(3.0)
    work = group.allreduce([tensor])
    assert work.wait()
    assert work.get_future().wait()[0] is tensor
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    group.barrier().wait()
    group.broadcast(tensor, 2).wait()
    assert group.collective_count == 3
    group.configure(7, 0, [b"a", b"b"], 1.0)
    assert (group.quorum_id, group.rank(), group.size()) == (7, 0, 2)
    reason = RuntimeError("gone")
    group.revoke(reason, quorum_id=6)
    assert group.errored() is None
    group.revoke(reason)
    assert group.errored() is reason
    with pytest.raises(ValueError, match="rank 2"):
        ProcessGroupDummy(2, 2)


def test_a_dummy_gives_outputs_of_their_own_the_input() -> None:
    group, mine = ProcessGroupDummy(0, 2), torch.arange(4.0)
    gathered, flat = [torch.empty(4), torch.empty(4)], torch.empty(8)
    group.allgather([gathered], [mine]).wait()
    group._allgather_base(flat, mine).wait()
    assert [each.tolist() for each in gathered] == [mine.tolist()] * 2
    assert flat.tolist() == mine.tolist() * 2
    parts = [torch.empty(2), torch.empty(2), torch.empty(2)]
    group._reduce_scatter_base(parts[0], mine).wait()
    group.reduce_scatter([parts[1]], [[mine[:2], mine[2:]]]).wait()
    group.gather([], [mine]).wait()  # this member is not the root
    group.alltoall([parts[2]], [mine[:2]]).wait()
    assert [each.tolist() for each in parts] == [[0.0, 1.0]] * 3
    model = nn.parallel.DistributedDataParallel(
        nn.Linear(3, 4), process_group=ProcessGroupDummy(0, 1)
    )
    model(torch.rand(2, 3)).sum().backward()


def test_a_wrapper_tells_what_it_wraps(alone: ProcessGroupGloo) -> None:
    assert ErrorSwallowingProcessGroupWrapper(pg=alone).parent is alone


def test_what_a_wrapper_wraps_advertises_the_address_that_its_manager_names() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(10.0))
    group.advertise("127.0.0.1")
    assert group.address().endswith(b"/127.0.0.1")
    group.shutdown()


def test_swallowing_hides_the_error_until_configure(alone: ProcessGroupGloo) -> None:
    fake = FakeProcessGroupWrapper(alone)
    group = ErrorSwallowingProcessGroupWrapper(fake)
    tensor = torch.ones(2)
    assert group.allreduce([tensor]).wait()
    assert group.error() is None

    boom = RuntimeError("boom")
    fake.report_future_error(boom)
    work = group.allreduce([tensor])
    assert work.wait()
    assert group.error() is boom

    issued = []
    fake.issue = lambda *args, **kwargs: issued.append(args)  # type: ignore[method-assign,assignment,return-value]
    assert group.allreduce([tensor]).wait()
    assert not issued, "after an error nothing may reach the group"
    del fake.issue

    group.configure(2, 0, [group.address()], 5.0)
    assert group.error() is None
    assert group.allreduce([tensor]).wait()


def test_swallowing_through_a_future(alone: ProcessGroupGloo) -> None:
    fake = FakeProcessGroupWrapper(alone)
    group = ErrorSwallowingProcessGroupWrapper(fake)
    fake.report_future_error(RuntimeError("boom"))
    tensor = torch.ones(2)
    assert group.allreduce([tensor]).get_future().wait()[0] is tensor
    assert "boom" in str(group.error())


def test_swallowing_a_revocation_and_a_raise(alone: ProcessGroupGloo) -> None:
    fake = FakeProcessGroupWrapper(alone)
    group = ErrorSwallowingProcessGroupWrapper(fake)
    fake.raise_next(RuntimeError("at the call"))
    assert group.allreduce([torch.ones(1)]).wait()
    assert "at the call" in str(group.errored())
    group.configure(2, 0, [group.address()], 5.0)
    group.revoke(RuntimeError("gone"))
    assert group.allreduce([torch.ones(1)]).wait()
    assert "gone" in str(group.error())


def test_faults_are_injected_once_and_in_order(alone: ProcessGroupGloo) -> None:
    group = FakeProcessGroupWrapper(alone)
    first, second = RuntimeError("first"), RuntimeError("second")
    group.fail_next(first)
    group.report_future_error(second)
    group.delay_next(0.0)
    with pytest.raises(RuntimeError, match="first"):
        group.allreduce([torch.ones(1)]).wait()
    work = group.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="second"):
        work.wait()
    assert work.exception() is second
    with pytest.raises(RuntimeError, match="second"):
        work.get_future().wait()
    assert group.allreduce([torch.ones(1)]).wait()
    assert group.allreduce([torch.ones(1)]).wait()
    assert alone.errored() is None, "injected faults are not the group's"

    group.report_configure_error(ProcessGroupError("no"))
    with pytest.raises(ProcessGroupError, match="no"):
        group.configure(2, 0, [group.address()], 5.0)
    group.configure(2, 0, [group.address()], 5.0)


class LonelyManager:
    """A manager whose other participants always have zeros. Fails if `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.participants = 2

    def allreduce(
        self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG
    ) -> Future[torch.Tensor]:
        assert reduce_op == dist.ReduceOp.AVG
        future: Future[torch.Tensor] = Future()
        if self.error is None:
            tensor.div_(self.participants)
            future.set_result(tensor)
        else:
            future.set_exception(self.error)
        return future

    def num_participants(self) -> int:
        return self.participants

    def participating_rank(self) -> int | None:
        return None


def test_managed_goes_through_the_manager() -> None:
    manager = LonelyManager()
    group = ManagedProcessGroup(manager)
    assert (group.size(), group.rank()) == (2, 0)
    tensor = torch.full((2,), 4.0)
    assert group.allreduce(tensor, dist.ReduceOp.AVG).wait()
    assert tensor.tolist() == [2.0, 2.0]
    dist.all_reduce(tensor, group=group)  # a sum: the average times the participants
    assert tensor.tolist() == [2.0, 2.0]
    work = group.allreduce([tensor, torch.ones(1)])
    assert work.get_future().wait()[0] is tensor
    group.barrier().wait()
    with pytest.raises(NotImplementedError):
        group.allreduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BOR)
    with pytest.raises(NotImplementedError):
        group.alltoall_base(tensor, tensor, [], [])
    manager.error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        group.allreduce(tensor, dist.ReduceOp.AVG).wait()
    group.shutdown()


def test_managed_group_under_ddp_while_participants_change() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    manager = LonelyManager()
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, process_group=ManagedProcessGroup(manager), init_sync=False
    )
    for participants in (2, 2, 4, 1, 3):
        manager.participants = participants
        model.zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()
        gradient = model.weight.grad
        assert gradient is not None
        assert torch.allclose(gradient, torch.full((1, 3), 2.0 / participants))


def test_nccl_is_refused_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="use Gloo"):
        ProcessGroupNCCL()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_each_reduction_is_that_of_the_participants(dtype: torch.dtype) -> None:
    """Two take part with 3 and 4; the third is a spare whose 100 must leave no trace."""
    expected = {ReduceOp.SUM: 7, ReduceOp.MIN: 3, ReduceOp.MAX: 4, ReduceOp.PRODUCT: 12}
    values = [3, 4, 100]

    def script(replica: Replica, index: int) -> dict[Any, list[float]]:
        group = ManagedProcessGroup(replica.manager)
        replica.manager.start_quorum()
        found = {}
        for op in expected:
            tensor = torch.full((2,), values[index], dtype=dtype)
            dist.all_reduce(tensor, op=op, group=group)
            found[op] = tensor.tolist()
        assert replica.manager.should_commit()
        replica.close()
        return found

    with lighthouse() as server:
        three = [
            Replica(
                server,
                f"r{i}",
                expected_replicas=3,
                min_replica_size=2,
                world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
            )
            for i in range(3)
        ]
        found = replicas(*[lambda r=r, i=i: script(r, i) for i, r in enumerate(three)])
    assert found == [{op: [value] * 2 for op, value in expected.items()}] * 3


def test_a_collective_outside_of_a_step_raises() -> None:
    """Before the first step, and after a vote: a loss that is averaged after the update, say."""

    def refused(replica: Replica) -> None:
        tensor = torch.ones(1)
        with pytest.raises(OutsideStep, match="start_quorum"):
            dist.all_reduce(tensor, op=ReduceOp.MAX, group=ManagedProcessGroup(replica.manager))
        with pytest.raises(OutsideStep, match="should_commit"):
            replica.manager.allreduce(tensor)
        with pytest.raises(OutsideStep):
            replica.manager.start_allreduce(tensor)
        assert tensor.item() == 1.0

    with lighthouse() as server:
        replica = Replica(server, "alone")
        refused(replica)
        assert replica.step()
        refused(replica)
        assert replica.step(), "a refused call does no harm to the next step"
        replica.close()
