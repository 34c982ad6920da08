"""Managers train over the double of NCCL's semantics (tests/harness/nccl_double.py), and links break."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it in the middle of things: two threads at once fail
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ft_core.collectives.agreement import exchange_headers
from ft_core.collectives.sharded import replicate
from ft_core.ddp import DistributedDataParallel
from ft_core.diloco.diloco import DiLoCo
from ft_core.manager import Manager
from ft_core.optimizer import Optimizer
from ft_core.process_group import ProcessGroupNCCL
from lighthouse import LighthouseServer
from tests.harness.cluster import agreed, lighthouse, replicas
from tests.harness.copy_double import CopyDouble
from tests.harness.nccl_double import POISON, DoubleDevice, Wires

STEPS = 12
CUT_AT = (4, 8, 13)
"""Kernels in whose midst all links break, as they are counted over both members: when both have queued
theirs, so that neither hears of it when it queues, and when one has."""
HANG_AT = (17,)
"""Kernels in whose midst links break, and all kernels hang: nothing is revoked until somebody asks."""
CUT_AGAIN_AT = (1, 4)
"""The same for kernels since a member has come back, which must heal."""
LEAVES_AT = 7


def member(server: LighthouseServer, device: DoubleDevice, index: int, **options: Any) -> Manager:
    """A manager of one of two groups, over this double of a device."""
    return Manager(
        ProcessGroupNCCL(20.0, hostname="127.0.0.1", on=device),
        min_replica_size=2,
        lighthouse_addr=server.address(),
        replica_id=str(index),
        expected_replicas=2,
        rank=0,
        world_size=1,
        watch_process=False,
        **options,
    )


def test_no_gradient_is_committed_that_was_not_reduced() -> None:
    wires, kernels = Wires(), itertools.count(1)
    wires.delay_s = lambda: 0.001

    def queued() -> None:
        if next(kernels) in CUT_AT:
            wires.cut()

    wires.on_kernel = queued
    with lighthouse(all_join=True, min_replicas=2) as server:

        def train(index: int) -> tuple[int, list[float]]:
            device = DoubleDevice(wires, index + 1)
            weights, discarded = torch.zeros(8), 0
            manager = member(
                server,
                device,
                index,
                load_state_dict=lambda state: weights.copy_(state["weights"]),
                state_dict=lambda: {"weights": weights},
                weighted=True,  # its factors travel in host memory
            )
            while manager.current_step() < STEPS:
                manager.start_quorum()
                manager.set_samples(1 + 2 * index)
                gradient = device.place(torch.full((8,), 4.0 * index))
                manager.allreduce(gradient).wait()
                if manager.should_commit():
                    assert gradient.tolist() == [3.0] * 8
                    weights -= gradient
                else:
                    discarded += 1
            manager.shutdown(finished=True)
            return discarded, weights.tolist()

        results = replicas(lambda: train(0), lambda: train(1))
    assert [weights for _, weights in results] == [[-3.0 * STEPS] * 8] * 2
    assert all(discarded >= 1 for discarded, _ in results)
    assert not wires.faults


def network() -> nn.Module:
    """With one weight that a heal serves and receives in place."""
    model, generator = (
        nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 4)),
        torch.Generator(),
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator.manual_seed(parameter.numel()))
    return model


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + index))
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@functools.cache
def replayed() -> list[torch.Tensor]:
    """The parameters after the steps of one loop that has both members' batches."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        halves = []
        for index in range(2):
            optimizer.zero_grad()
            loss_of(model, step, index).backward()
            halves.append([p.grad / 2 for p in model.parameters() if p.grad is not None])
        for parameter, one, other in zip(model.parameters(), *halves, strict=True):
            parameter.grad = one + other
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Faults:
    """What happens to the links of two members' devices, as their kernels are queued."""

    def __init__(self) -> None:
        chance = random.Random(1)
        self.wires, self._kernels, self._later = Wires(), itertools.count(1), itertools.count(1)
        self.came_back = threading.Event()
        self.wires.delay_s = lambda: 0.005 * chance.random()
        self.wires.on_kernel = self._queued

    def _queued(self) -> None:
        number = next(self._kernels)
        if self.came_back.is_set() and next(self._later) in CUT_AGAIN_AT:
            self.wires.cut()
        elif number in CUT_AT + HANG_AT:
            self.wires.cut(revoke=number in CUT_AT)


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def live(
    server: LighthouseServer,
    faults: Faults,
    copies: CopyDouble,
    index: int,
    until: int,
    shards: bool,
) -> tuple[int, list[torch.Tensor]]:
    """A member's life, up to so many steps: how many were discarded, and its parameters then. A later life
    begins with garbage."""
    device, model = DoubleDevice(faults.wires, index + 1, takes_floats=True), network()
    if faults.came_back.is_set():
        for parameter in model.parameters():
            parameter.data.fill_(POISON)
    if shards:
        fully_shard(model[2], mesh=init_device_mesh("cpu", (1,)))  # type: ignore[arg-type]
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for parameter in model.parameters():
        copies.place(local(parameter.data))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def save() -> dict[str, Any]:
        for state in inner.state.values():
            copies.place(local(state["exp_avg"]))
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, dict[str, Any]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = member(server, device, index, load_state_dict=load, state_dict=save)
    wrapped = replicate(model, manager) if shards else DistributedDataParallel(manager, model)
    optimizer, discarded = Optimizer(manager, inner), 0
    while manager.current_step() < until:
        optimizer.zero_grad()
        loss_of(wrapped, manager.current_step(), index).backward()
        optimizer.step()
        discarded += optimizer.step_was_skipped
    manager.shutdown(finished=until == STEPS)
    return discarded, [local(parameter.detach()) for parameter in model.parameters()]


def train_with_faults(*, shards: bool) -> None:
    """Two members whose links break, hang and are late. One leaves, and comes back with garbage. What an
    aborted kernel, or a copy that is not done, leaves is garbage, too: a committed step that has read any shows in
    the parameters."""
    faults, chance = Faults(), random.Random(2)
    with (
        CopyDouble(lambda: 0.002 * chance.random(), at_once=True) as copies,
        lighthouse(all_join=True, min_replicas=2) as server,
    ):
        given = (server, faults, copies)

        def stays() -> tuple[int, list[torch.Tensor]]:
            return live(*given, 0, STEPS, shards)

        def comes_back() -> tuple[int, list[torch.Tensor]]:
            live(*given, 1, LEAVES_AT, shards)
            faults.came_back.set()
            return live(*given, 1, STEPS, shards)

        results = replicas(stays, comes_back)
    assert all(discarded >= 1 for discarded, _ in results)
    for _, parameters in results:
        for one, other in zip(parameters, replayed(), strict=True):
            assert torch.equal(one, other)
    assert copies.done > 0
    assert not faults.wires.faults + copies.faults


def test_ddp_trains_and_heals_as_without_faults_where_links_break_hang_and_are_late() -> None:
    train_with_faults(shards=False)


@pytest.fixture(scope="module")
def sharded_run() -> None:
    """Before the test: DTensor's caches keep the group of its mesh, which would be taken for a leak."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train_with_faults(shards=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("sharded_run")
def test_the_hook_of_fsdp_reduces_and_shards_heal_with_the_same_faults() -> None:
    """See `train_with_faults`."""


def test_an_agreement_is_the_same_in_all_members_wherever_links_break() -> None:
    """Numbers of the host and of the device, gathered and summed in steps without an update."""
    wires, kernels, rounds = Wires(), itertools.count(1), 10
    wires.delay_s = lambda: 0.001
    wires.on_kernel = lambda: wires.cut() if next(kernels) in CUT_AT else None
    with lighthouse(all_join=True, min_replicas=2) as server:

        def exchange(index: int) -> int:
            device, attempts = DoubleDevice(wires, index + 1), itertools.count(1)
            state: dict[str, Any] = {"load_state_dict": lambda _: None, "state_dict": dict}
            manager = member(server, device, index, use_async_quorum=False, **state)

            def attempt() -> tuple[list[list[int]] | None, list[float]]:
                next(attempts)
                said = exchange_headers(manager.step, [index, number])
                total = device.tensor([float(index), float(number)])
                manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
                manager.step.drain()
                return said, total.tolist()

            for number in range(rounds):
                assert agreed(manager, attempt) == ([[0, number], [1, number]], [1.0, 2.0 * number])
            manager.shutdown(finished=True)
            return next(attempts) - 1

        assert min(replicas(lambda: exchange(0), lambda: exchange(1))) > rounds
    assert not wires.faults


def test_diloco_never_takes_what_a_cut_link_has_left() -> None:
    """Each outer step adds the mean of what the members have added, or is discarded: whole numbers."""
    wires, kernels = Wires(), itertools.count(1)
    wires.delay_s = lambda: 0.001
    wires.on_kernel = lambda: wires.cut() if next(kernels) in CUT_AT else None
    with lighthouse(all_join=True, min_replicas=2) as server:

        def train(index: int) -> tuple[int, list[float]]:
            model = nn.Linear(2, 2, bias=False)
            nn.init.zeros_(model.weight)
            device = DoubleDevice(wires, index + 1, takes_floats=True)
            manager = member(server, device, index, use_async_quorum=False)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            outer = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(manager, model, inner, outer, sync_every=2) as loop:
                while loop.stats.committed < STEPS:
                    model.weight.grad = torch.full((2, 2), -2.0 * index)
                    inner.step()
                manager.shutdown(finished=True)
            return loop.stats.discarded, model.weight.flatten().tolist()

        results = replicas(lambda: train(0), lambda: train(1))
    assert all(discarded >= 1 for discarded, _ in results)
    assert [weights for _, weights in results] == [[2.0 * STEPS] * 4] * 2
    assert not wires.faults
