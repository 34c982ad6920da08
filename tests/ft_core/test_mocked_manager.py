"""A script's own tests may put a mock in the place of the manager: the module trains as without."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from ft_core import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel

STEPS = 5


def inputs(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_without() -> dict[str, Tensor]:
    model = net()
    train(model, sgd(model))
    return model.state_dict()


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
@pytest.mark.parametrize("instance", [False, True])
def test_it_trains_with_a_mock(wrapper: Any, instance: bool) -> None:
    manager = create_autospec(Manager, instance=instance)
    manager.should_commit.return_value = True
    model = net()
    train(wrapper(manager, model), Optimizer(manager, sgd(model)))
    torch.testing.assert_close(model.state_dict(), trained_without(), rtol=0, atol=0)
    assert manager.start_quorum.call_count == manager.should_commit.call_count == STEPS


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_mock_that_discards_leaves_the_parameters(wrapper: Any) -> None:
    manager = create_autospec(Manager)
    manager.should_commit.return_value = False
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(manager, sgd(model))
    train(wrapper(manager, model), optimizer)
    assert optimizer.step_was_skipped
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)
    assert manager.should_commit.call_count == STEPS


def test_it_sees_each_gradient_of_the_pure_one() -> None:
    manager = create_autospec(Manager)

    def halved(tensor: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        future.set_result(tensor.mul_(0.5))
        return future

    manager.allreduce.side_effect = halved
    model, plain = net(), net()
    wrapped = PureDistributedDataParallel(manager, model)
    wrapped(inputs(0)).square().mean().backward()
    plain(inputs(0)).square().mean().backward()
    assert manager.allreduce.call_count == len(list(model.parameters()))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad / 2, rtol=0, atol=0)


def test_the_optimizer_alone() -> None:
    manager = create_autospec(Manager)
    module = nn.Linear(3, 4)
    optimizer = Optimizer(manager, torch.optim.AdamW(module.parameters()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.zero_grad()
    manager.start_quorum.assert_called_once_with()
    module(torch.ones(1, 3)).sum().backward()
    manager.should_commit.return_value = True
    optimizer.step()
    manager.should_commit.assert_called_once_with()
    assert optimizer.state_dict()["state"]
    optimizer.load_state_dict(optimizer.state_dict())
