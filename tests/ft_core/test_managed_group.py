"""torch.distributed's collectives over the members of a quorum: right in a step, refused outside one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ft_core import ManagedProcessGroup
from ft_core.errors import OutsideStep
from ft_core.replica.status import WorldSizeMode
from tests.harness.cluster import Replica, lighthouse, replicas


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
            Replica(server, f"r{i}", expected_replicas=3, min_replica_size=2,
                    world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
            for i in range(3)
        ]  # fmt: skip
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
