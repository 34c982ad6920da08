from __future__ import annotations

import pickle
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ft_core.ddp import DistributedDataParallel, PureDistributedDataParallel
from ft_core.errors import QuorumUnavailable
from ft_core.optimizer import Optimizer, OptimizerWrapper
from tests.harness import cluster
from tests.harness.thread_quorum import ThreadManager, ThreadQuorum

FAIL = RuntimeError("injected")


def trained(manager: ThreadManager, optimizer: OptimizerWrapper, *, fail: bool = False) -> Tensor:
    """One step; the parameter afterwards."""
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    parameter.square().sum().backward()
    manager.allreduce(parameter.grad)
    if fail:
        manager.report_error(FAIL)
    optimizer.step()
    return parameter.detach().clone()


def new(lr: float = 0.1, **kwargs: Any) -> tuple[ThreadManager, nn.Parameter, OptimizerWrapper]:
    manager = ThreadQuorum(1).members[0]
    parameter = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([parameter], lr=lr, momentum=0.9)
    return manager, parameter, Optimizer(manager, inner, **kwargs)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- steps


def test_a_committed_step_is_the_inner_optimizers() -> None:
    manager, parameter, optimizer = new()
    alone = nn.Parameter(torch.ones(3))
    plain = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
    for _ in range(3):
        trained(manager, optimizer)
        assert not optimizer.step_was_skipped
        plain.zero_grad()
        alone.square().sum().backward()
        plain.step()
    assert torch.equal(parameter, alone)
    assert manager.step == 3


def test_a_discarded_step_changes_nothing_and_says_so() -> None:
    manager, _, optimizer = new()
    before = trained(manager, optimizer)
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    assert torch.equal(trained(manager, optimizer, fail=True), before)
    assert optimizer.step_was_skipped
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)
    assert not torch.equal(trained(manager, optimizer), before)
    assert not optimizer.step_was_skipped


def test_zero_grad_twice_is_one_step_until_gradients_travel() -> None:
    manager, parameter, optimizer = new()
    optimizer.zero_grad()
    optimizer.zero_grad()
    assert manager.attempts == 1
    parameter.sum().backward()
    manager.allreduce(parameter.grad)  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert manager.attempts == 2
    assert parameter.grad is None


def test_optimizers_by_turns_share_the_manager() -> None:
    manager, parameter, first = new()
    second = Optimizer(manager, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))  # type: ignore[arg-type]
    assert set(manager.schema) == {"optimizer", "optimizer.1"}
    for turn in first, second:
        begun = manager.attempts
        first.zero_grad()
        second.zero_grad()
        assert manager.attempts == begun + 1
        parameter.sum().backward()
        manager.allreduce(parameter.grad)  # type: ignore[arg-type]
        turn.step()
        assert not turn.step_was_skipped
    assert manager.step == 2


def test_zero_grad_waits_on_when_no_quorum_has_formed() -> None:
    with cluster.lighthouse() as server:
        member = cluster.manager(
            server.address(), "a", min_replica_size=2, quorum_timeout=timedelta(seconds=0.05)
        )
        optimizer = Optimizer(member, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
        for _ in range(2):
            with pytest.raises(QuorumUnavailable):
                optimizer.zero_grad()
        member.shutdown()


def test_zero_grad_begins_a_step_when_another_ended_the_last() -> None:
    manager, _, optimizer = new()
    optimizer.zero_grad()
    assert manager.should_commit()
    optimizer.zero_grad()
    assert manager.attempts == 2


def test_incomplete_gradients_are_not_stepped_on() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, Half())  # type: ignore[arg-type]
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]
    before = model.module.used.weight.detach().clone()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model.module.used.weight, before)


def test_a_closure_is_run_once_before_the_vote() -> None:
    manager, parameter, optimizer = new()
    seen: list[int] = []

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        seen.append(manager.step)
        return loss

    optimizer.zero_grad()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 3.0
    assert seen == [0]
    assert parameter[0].item() == pytest.approx(0.8)


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        Optimizer(ThreadQuorum(1).members[0], torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- it is an optimizer


def test_it_is_a_torch_optimizer_with_the_inner_ones_contents() -> None:
    manager, _, optimizer = new()
    inner = optimizer.optim
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 7.0})
    assert inner.param_groups[1]["lr"] == 7.0
    inner.load_state_dict(inner.state_dict())  # which replaces the list
    assert optimizer.param_groups is inner.param_groups
    assert "SGD" in repr(optimizer)
    assert manager.schema["optimizer"].startswith("SGD of 1 tensors")
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_thing
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)


def test_hooks_fire_when_parameters_are_updated() -> None:
    manager, _, optimizer = new()
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    trained(manager, optimizer, fail=True)
    assert fired == []
    trained(manager, optimizer)
    assert fired == ["before", "after"]
    handle.remove()
    trained(manager, optimizer)
    assert fired == ["before", "after", "before"]


@pytest.mark.parametrize("kind", ["step", "plateau", "one_cycle"])
def test_schedulers_take_it_and_follow_commits(kind: str) -> None:
    manager, _, optimizer = new()
    scheduler: Any = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        "one_cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
    }[kind]()
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: scheduler.step() before optimizer.step()
        for number in range(6):
            trained(manager, optimizer, fail=number in (0, 3))
            if not optimizer.step_was_skipped:
                scheduler.step(*[1.0] * (kind == "plateau"))
            rates.append(optimizer.optim.param_groups[0]["lr"])
    assert rates[0] == (0.1 if kind != "one_cycle" else pytest.approx(0.04))
    assert rates[2] == rates[3]
    assert rates[5] != rates[0]


def test_lr_scheduler_counts_commits_only() -> None:
    manager, _, optimizer = new()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(5):
        trained(manager, optimizer, fail=number % 2 == 1)
        if not optimizer.step_was_skipped:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


# ---------------------------------------------------------------------- GradScaler


def scaled(
    manager: ThreadManager,
    optimizer: OptimizerWrapper,
    scaler: GradScaler,
    *,
    value: float = 1.0,
    fail: bool = False,
    unscale: bool = False,
    no_gradient: bool = False,
) -> None:
    """One step with gradients of `value`."""
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    if no_gradient:
        scaler.scale(torch.ones(1))
    else:
        scaler.scale((parameter * value).sum()).backward()
        manager.allreduce(parameter.grad).wait()
    if fail:
        manager.report_error(FAIL)
    if unscale:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([parameter], 1e9)
    scaler.step(optimizer)
    scaler.update()


def new_scaler(growth_interval: int = 3) -> GradScaler:
    return GradScaler("cpu", init_scale=8.0, growth_interval=growth_interval)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_steps_equal_plain_ones(unscale: bool) -> None:
    manager, parameter, optimizer = new(lr=0.5)
    scaler = new_scaler()
    scaled(manager, optimizer, scaler, unscale=unscale)
    assert torch.equal(parameter, torch.full((3,), 0.5))
    assert not optimizer.step_was_skipped
    for _ in range(2):
        scaled(manager, optimizer, scaler, unscale=unscale)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_a_discarded_step_leaves_the_scale_alone(unscale: bool, value: float) -> None:
    """Its gradients are arbitrary, so that members must not take a scale from them."""
    manager, parameter, optimizer = new()
    scaler = new_scaler()
    for _ in range(2):
        scaled(manager, optimizer, scaler)
    before = scaler.state_dict(), parameter.detach().clone()
    scaled(manager, optimizer, scaler, value=value, fail=True, unscale=unscale)
    assert optimizer.step_was_skipped
    assert scaler.state_dict() == before[0]
    assert torch.equal(parameter, before[1])
    scaled(manager, optimizer, scaler, unscale=unscale)
    assert scaler.get_scale() == 16.0  # the third good step, as without the discard


def test_a_step_discarded_before_any_gradient_leaves_the_scale_alone() -> None:
    manager, _, optimizer = new()
    scaler = new_scaler()
    scaled(manager, optimizer, scaler)
    before = scaler.state_dict()
    scaled(manager, optimizer, scaler, fail=True, no_gradient=True)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_in_one_member_is_a_committed_step_without_update_in_all(
    unscale: bool,
) -> None:
    def work(manager: ThreadManager) -> tuple[list[float], float, int, bool]:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = Optimizer(manager, torch.optim.SGD([parameter], lr=0.5))  # type: ignore[arg-type]
        scaler = new_scaler()
        scaled(manager, optimizer, scaler, unscale=unscale)
        bad = float("inf") if manager.rank == 1 else 1.0
        scaled(manager, optimizer, scaler, value=bad, unscale=unscale)
        return parameter.tolist(), scaler.get_scale(), manager.step, optimizer.step_was_skipped

    assert ThreadQuorum(2).run(work) == [([0.5] * 3, 4.0, 2, True)] * 2


def test_a_scaler_that_heals_with_the_vote_unscales_with_the_healed_scale() -> None:
    manager = ThreadQuorum(1).members[0]
    parameter = nn.Parameter(torch.ones(3))
    scaler = new_scaler()
    optimizer = Optimizer(manager, torch.optim.SGD([parameter], lr=1.0), grad_scaler=scaler)  # type: ignore[arg-type]
    healthy = new_scaler().state_dict() | {"scale": 2.0}
    manager.scheduled_heal = {"grad_scaler": healthy}
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    parameter.grad = torch.full((3,), 2.0)  # the others' average, with the scale of 2
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, torch.zeros(3))
    assert scaler.get_scale() == 2.0


def test_gradients_unscaled_before_the_heal_are_not_committed() -> None:
    """They were divided by this member's old scale."""
    manager, _, optimizer = new()
    scaler = new_scaler()
    manager.is_healing = lambda: True  # type: ignore[method-assign]
    scaled(manager, optimizer, scaler)
    assert manager.step == 1
    scaled(manager, optimizer, scaler, unscale=True)
    assert manager.step == 1


def test_a_disabled_scaler_is_no_scaler() -> None:
    manager, parameter, optimizer = new(lr=0.5)
    scaled(manager, optimizer, GradScaler("cpu", enabled=False), unscale=True)
    assert torch.equal(parameter, torch.full((3,), 0.5))


# ---------------------------------------------------------------------- what no model averages


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_what_was_frozen_when_the_model_was_wrapped_and_is_trained_is_refused(wrapper: Any) -> None:
    manager, net = ThreadQuorum(1).members[0], two_layers()
    net[0].requires_grad_(False)
    model = wrapper(manager, net)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))  # type: ignore[arg-type]
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    net[0].requires_grad_(True)
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"0.weight, 0.bias: frozen when the model was wrapped"):
        optimizer.step()


def test_a_network_that_is_called_in_place_of_its_wrapper_is_refused() -> None:
    manager, net = ThreadQuorum(1).members[0], two_layers()
    model = DistributedDataParallel(manager, net)  # type: ignore[arg-type]
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))  # type: ignore[arg-type]
    optimizer.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="DistributedDataParallel was never called"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_one_of_two_wrappers_of_a_network_may_rest() -> None:
    manager, net = ThreadQuorum(1).members[0], two_layers()
    used, _rests = (DistributedDataParallel(manager, net) for _ in range(2))  # type: ignore[arg-type]
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))  # type: ignore[arg-type]
    optimizer.zero_grad()
    used(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
