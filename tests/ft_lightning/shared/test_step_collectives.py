"""What a step gathers, with groups away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_lightning.shared.step_collectives import gather_in_step, reduce_in_step
from tests.harness.cluster import Replica, lighthouse, replicas


@pytest.mark.parametrize(
    ("there", "expected"),
    [([0, 1, 2], [0, 1, 2]), ([2, 0], [0, 2, 2]), ([1], [1, 1, 1]), ([0, 1, 2, 5], [0, 1, 2, 5])],
)
def test_rows_of_groups_that_are_away_are_copies(there: list[int], expected: list[int]) -> None:
    """Of three that are configured."""
    values: list[Any] = [torch.tensor(True), torch.tensor(2.5, dtype=torch.bfloat16)]
    values += [torch.zeros(2, 0), torch.ones(2, 3).t(), torch.tensor([1 + 2j])]

    with lighthouse() as server:
        options = {"expected_replicas": len(there), "min_replica_size": len(there)}
        members = [Replica(server, str(at), **options) for at in range(len(there))]

        def gather(at: int) -> list[torch.Tensor]:
            manager = members[at].manager
            manager.start_quorum()
            row = there[at]
            found = [gather_in_step(manager, value * row, row, 3) for value in values]
            assert manager.should_commit()
            return found

        each = replicas(*[lambda at=at: gather(at) for at in range(len(there))])
        replicas(*[member.close for member in members])
    wanted = [torch.stack([value * row for row in expected]) for value in values]
    for found in each:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_conjugated_and_negated_tensors_are_reduced_and_gathered() -> None:
    """Both had raised."""
    with lighthouse(min_replicas=2, all_join=True) as server:
        members = [Replica(server, str(at), expected_replicas=2) for at in (0, 1)]

        def run(at: int) -> list[torch.Tensor]:
            manager = members[at].manager
            manager.start_quorum()
            conjugated = torch.full((1,), complex(1, at + 1)).conj()
            found = []
            for value in (conjugated, conjugated.imag):
                found.append(gather_in_step(manager, value, at, 2))
                found.append(reduce_in_step(manager, value, "sum"))
            assert manager.should_commit()
            return found

        each = replicas(lambda: run(0), lambda: run(1))
        replicas(*[member.close for member in members])
    wanted = [torch.tensor([[1 - 1j], [1 - 2j]]), torch.tensor([2 - 3j])]
    wanted += [torch.tensor([[-1.0], [-2.0]]), torch.tensor([-3.0])]
    for found in each:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
