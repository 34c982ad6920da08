"""Managers train over the double of NCCL's semantics (tests/harness/nccl_double.py), and links break."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
import torch._dynamo  # torch imports it in the middle of things: two threads at once fail
from torch import nn

from ft_core.ddp import DistributedDataParallel
from ft_core.diloco.diloco import DiLoCo
from ft_core.manager import Manager
from ft_core.optimizer import Optimizer
from ft_core.process_group import ProcessGroupNCCL
from lighthouse import LighthouseServer
from tests.harness.cluster import lighthouse, replicas
from tests.harness.nccl_double import DoubleDevice, Wires

STEPS = 12
CUT_AT = (4, 8, 13)
"""Kernels in whose midst all links break, as they are counted over both members: when both have queued
theirs, so that neither hears of it when it queues, and when one has."""
HANG_AT = (17,)
"""Kernels in whose midst links break, and all kernels hang: nothing is revoked until somebody asks."""


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
    model, generator = (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
        torch.Generator(),
    )
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator.manual_seed(parameter.numel()))
    return model


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + index))
    return model(batch).square().mean()


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


def test_ddp_trains_as_without_faults_where_links_break_hang_and_are_late() -> None:
    """What an aborted kernel leaves in a bucket is `POISON`: a committed step that has read it, or has read
    too early, shows in the parameters."""
    wires, kernels, chance = Wires(), itertools.count(1), random.Random(1)
    wires.delay_s = lambda: 0.005 * chance.random()

    def queued() -> None:
        number = next(kernels)
        if number in CUT_AT + HANG_AT:
            wires.cut(revoke=number in CUT_AT)

    wires.on_kernel = queued
    with lighthouse(all_join=True, min_replicas=2) as server:

        def train(index: int) -> tuple[int, list[torch.Tensor]]:
            device, model = DoubleDevice(wires, index + 1, takes_floats=True), network()
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

            def load(state: dict[str, dict[str, object]]) -> None:
                model.load_state_dict(state["model"])
                inner.load_state_dict(state["optimizer"])

            manager = member(
                server,
                device,
                index,
                load_state_dict=load,
                state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            )
            wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
            discarded = 0
            while (step := manager.current_step()) < STEPS:
                optimizer.zero_grad()
                loss_of(wrapped, step, index).backward()
                optimizer.step()
                discarded += optimizer.step_was_skipped
            manager.shutdown(finished=True)
            return discarded, [parameter.detach() for parameter in model.parameters()]

        results = replicas(lambda: train(0), lambda: train(1))
    assert all(discarded >= 1 for discarded, _ in results)
    for _, parameters in results:
        for one, other in zip(parameters, replayed(), strict=True):
            assert torch.equal(one, other)
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
