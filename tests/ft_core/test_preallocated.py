"""What an optimizer's state will be is known, and in memory, before there is any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ft_core import state
from ft_core.state import PreallocatedState


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PREALLOCATE_BYTES", 1)


def network(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, bias=False))
    return net.to(memory_format=memory_format)


def form(state_dict: dict[str, Any]) -> Any:
    """A state dict without its values: types, dtypes, shapes, strides."""
    return {
        number: {
            key: (v.shape, v.dtype, v.stride(), v.device)
            if isinstance(v, torch.Tensor)
            else type(v)
            for key, v in values.items()
        }
        for number, values in state_dict["state"].items()
    }


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adadelta", {}),
        ("Adam", {}),
        ("Adam", {"foreach": True}),
        ("Adamax", {}),
        ("AdamW", {"amsgrad": True, "weight_decay": 0.1}),
        ("AdamW", {"fused": True}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
    ],
)
def test_it_is_what_the_first_step_makes(
    name: str, options: dict[str, Any], memory_format: torch.memory_format
) -> None:
    net = network(memory_format)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1, **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts a step of its own into the optimizer
    allocated = PreallocatedState(optimizer)
    allocated.prepare()
    with allocated.shown():
        foreseen = form(optimizer.state_dict())
    assert not optimizer.state
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert foreseen == form(optimizer.state_dict())


def test_frozen_parameters_and_groups_of_their_own_options() -> None:
    net = network()
    frozen, *others = net.parameters()
    frozen.requires_grad_(False)
    groups = [{"params": [frozen, others[0]]}, {"params": others[1:], "amsgrad": True}]
    optimizer = torch.optim.Adam(groups)
    allocated = PreallocatedState(optimizer)
    allocated.prepare()
    with allocated.shown():
        assert frozen not in optimizer.state
        assert "max_exp_avg_sq" not in optimizer.state[others[0]]
        assert "max_exp_avg_sq" in optimizer.state[others[1]]


def test_a_state_that_is_there_is_left_alone() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    early = PreallocatedState(optimizer)
    early.prepare()
    optimizer.step()
    late = PreallocatedState(optimizer)
    late.prepare()
    mine = {p: dict(values) for p, values in optimizer.state.items()}
    for allocated in (early, late):
        with allocated.shown():
            assert dict(optimizer.state) == mine
        assert dict(optimizer.state) == mine


def test_after_drop_there_is_nothing_to_show() -> None:
    optimizer = torch.optim.Adam(network().parameters())
    allocated = PreallocatedState(optimizer)
    allocated.prepare()
    allocated.drop()
    with allocated.shown():
        assert not optimizer.state


class Own(torch.optim.Adam):
    """Not torch's: a step of it might talk to others."""

    stepped = False

    def step(self, closure: Any = None) -> None:
        Own.stepped = True


@pytest.mark.parametrize("kind", [Own, torch.optim.ASGD, torch.optim.Adafactor])
def test_what_cannot_be_foreseen_is_left_to_the_heal(kind: Any) -> None:
    optimizer = kind(network().parameters(), lr=0.1)
    allocated = PreallocatedState(optimizer)
    allocated.prepare()
    with allocated.shown():
        assert not optimizer.state
    assert not Own.stepped


def test_little_memory_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PREALLOCATE_BYTES", 1 << 20)
    optimizer = torch.optim.Adam(network().parameters())
    allocated = PreallocatedState(optimizer)
    allocated.prepare()
    with allocated.shown():
        assert not optimizer.state


SHARDED: dict[str, dict[str, Any]] = {"AdamW": {}, "SGD": {"momentum": 0.9}, "Adafactor": {}}


@pytest.fixture(scope="module")
def states_of_shards() -> dict[str, tuple[Any, Any]]:
    """What is foreseen for sharded parameters, and what a step makes. For all tests here at once: torch
    keeps the sockets of groups whose DTensors it has worked on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    found = {}
    for name, options in SHARDED.items():
        local = [torch.randn(4, 3), torch.randn(4), torch.randn(2, 4)]
        shards = [nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)])) for part in local]
        optimizer = getattr(torch.optim, name)(shards, lr=0.1, **options)
        allocated = PreallocatedState(optimizer)
        allocated.prepare()
        with allocated.shown():
            foreseen = sharded_form(optimizer)
        for parameter in shards:
            parameter.grad = torch.ones_like(parameter)
        if name != "Adafactor":  # torch's does not work on shards yet
            optimizer.step()
        found[name] = foreseen, sharded_form(optimizer)
    dist.destroy_process_group()
    return found


def sharded_form(optimizer: torch.optim.Optimizer) -> Any:
    state_dict = optimizer.state_dict()
    return form(state_dict), [
        (tuple(value.device_mesh.shape), value.placements, value.to_local().shape)
        for values in state_dict["state"].values()
        for value in values.values()
        if isinstance(value, DTensor)
    ]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_moments_of_shards_are_shards(
    name: str, states_of_shards: dict[str, tuple[Any, Any]]
) -> None:
    """However small they are: a sharded tensor is best received into one."""
    foreseen, made = states_of_shards[name]
    assert foreseen == made
    assert made[1]


def test_a_state_that_is_not_sharded_as_its_shard_is_not_foreseen(
    states_of_shards: dict[str, tuple[Any, Any]],
) -> None:
    assert states_of_shards["Adafactor"][0] == ({}, [])
