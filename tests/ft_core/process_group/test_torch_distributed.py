"""A reconfigurable group in the place of a torch.distributed group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ft_core.process_group import ProcessGroupGloo
from tests.ft_core.process_group.members import Calls, configure, gloo_groups


@pytest.fixture
def pair() -> Iterator[list[ProcessGroupGloo]]:
    with gloo_groups(2) as groups:
        configure(groups, 1)
        yield groups


@pytest.fixture
def default_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_functions_take_an_unregistered_group(pair: list[ProcessGroupGloo]) -> None:
    def run(rank: int) -> list[object]:
        group, mine = pair[rank], torch.tensor([rank + 1.0, 5.0])
        seen: list[object] = [dist.get_world_size(group)]
        total = mine.clone()
        dist.all_reduce(total, group=group)
        seen.append(total.tolist())
        value = mine.clone()
        dist.broadcast(value, group=group, group_src=1)
        seen.append(value.tolist())
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, mine, group=group)
        seen.append([part.tolist() for part in parts])
        flat = torch.zeros(4)
        dist.all_gather_into_tensor(flat, mine, group=group)
        seen.append(flat.tolist())
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, mine, group=group)
        seen.append(part.tolist())
        swapped = torch.zeros(2)
        dist.all_to_all_single(swapped, mine, group=group)
        seen.append(swapped.tolist())
        objects: list[object] = [None, None]
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        seen.append(objects)
        dist.barrier(group=group)
        return seen

    seen = Calls(run, range(2)).values()
    for rank in range(2):
        assert seen[rank][:5] == [
            2,
            [3.0, 10.0],
            [2.0, 5.0],
            [[1.0, 5.0], [2.0, 5.0]],
            [1.0, 5.0, 2.0, 5.0],
        ]
        assert seen[rank][5] == [[3.0], [10.0]][rank]
        assert seen[rank][6] == [[1.0, 2.0], [5.0, 5.0]][rank]
        assert seen[rank][7] == [{"rank": 0}, {"rank": 1}]


def test_ddp_averages_over_the_members(pair: list[ProcessGroupGloo]) -> None:
    data = [torch.full((2, 3), 1.0), torch.full((2, 3), 5.0)]

    def train(rank: int) -> torch.Tensor:
        torch.manual_seed(rank)  # DDP takes the first member's parameters
        model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=pair[rank])
        model(data[rank]).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        return torch.cat([gradient, model.module.weight.detach()])

    results = Calls(train, range(2)).values()
    assert torch.equal(results[0], results[1])
    assert results[0][0].tolist() == [6.0, 6.0, 6.0]


def test_ddp_fails_and_does_not_hang_when_revoked(pair: list[ProcessGroupGloo]) -> None:
    def train(rank: int) -> None:
        model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=pair[rank])
        if rank == 0:
            pair[0].revoke(RuntimeError("gone"))
        model(torch.ones(2, 3)).sum().backward()

    outcomes = Calls(train, range(2)).finish()
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes.values())
    assert "gone" in str(outcomes[0])


@pytest.mark.usefixtures("default_group")
def test_a_registered_group_is_found_by_name(pair: list[ProcessGroupGloo]) -> None:
    group = pair[0]
    group.configure(2, 0, [group.address()], 5.0)
    group.register("replicas")
    with pytest.raises(ValueError, match="already"):
        group.register("twice")
    reduced = functional.all_reduce(torch.ones(2), "sum", group)
    assert (reduced + 0).tolist() == [1.0, 1.0]
    mesh = DeviceMesh.from_group(group, "cpu")
    assert mesh.size() == 1
    assert dist.get_process_group_ranks(group) == [0]
    group.unregister()
    group.unregister()
    assert group.allreduce([torch.ones(1)]).wait(), "it lives on"
    group.register("replicas")  # the name is free again


def test_registering_needs_a_default_group(pair: list[ProcessGroupGloo]) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        pair[0].register("replicas")
