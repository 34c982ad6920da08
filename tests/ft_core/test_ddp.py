from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from ft_core.ddp import DistributedDataParallel, PureDistributedDataParallel
from tests.harness.thread_quorum import ThreadManager, ThreadQuorum
from tests.harness.waiting import PATIENCE_S

BOTH = [DistributedDataParallel, PureDistributedDataParallel]


def layers(width: int = 400) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(100, 100) for _ in range(6)))


class Forked(nn.Module):
    """Two branches, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, branch: str = "left") -> Tensor:
        return getattr(self, branch)(x)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_are_the_mean_of_the_members(wrapper: Any, as_view: bool) -> None:
    data = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    kwargs = {"gradient_as_bucket_view": as_view} if wrapper is DistributedDataParallel else {}
    alone = layers()

    def step(manager: ThreadManager) -> list[Tensor | None]:
        model = wrapper(manager, copy.deepcopy(alone), **kwargs)
        manager.start_quorum()
        model(data[manager.rank]).square().mean().backward()
        return gradients(model.module)

    results = ThreadQuorum(3).run(step)
    sum(alone(part).square().mean() / 3 for part in data).backward()  # type: ignore[union-attr]
    for result in results:
        torch.testing.assert_close(result, gradients(alone))


@pytest.mark.parametrize("known", [1, 2, 4])
def test_a_mean_is_right_if_the_quorum_was_not_known_when_backward_began(known: int) -> None:
    """Gradients are divided while they are copied, by the number of participants known then."""
    quorum = ThreadQuorum(3, silent=(1,))
    quorum.known_participants = known
    data = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    alone = layers()

    def step(manager: ThreadManager) -> list[Tensor | None]:
        model = DistributedDataParallel(manager, copy.deepcopy(alone))
        manager.start_quorum()
        model(data[manager.rank]).square().mean().backward()
        return gradients(model.module)

    results = quorum.run(step)
    sum(alone(data[i]).square().mean() / 2 for i in (0, 2)).backward()  # type: ignore[union-attr]
    for result in results:
        torch.testing.assert_close(result, gradients(alone))


def test_several_buckets_are_in_flight_before_backward_ends() -> None:
    """The first bucket is sent while earlier layers have no gradients yet."""
    quorum = ThreadQuorum(1)
    manager = quorum.members[0]
    model = DistributedDataParallel(manager, deep(), bucket_cap_mb=0.03)
    sent_before_first_layer: list[int] = []
    model.module[0].register_full_backward_pre_hook(
        lambda *_: sent_before_first_layer.append(len(manager.sizes))
    )
    manager.start_quorum()
    model(torch.randn(5, 100)).sum().backward()
    assert sent_before_first_layer[0] >= 2
    assert len(manager.sizes) > sent_before_first_layer[0]


def test_buckets_that_fill_up_in_a_backward_within_a_backward() -> None:
    """Reentrant checkpoints: the reducer waits for all buckets at the end of the inner one."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = layers(), nn.Linear(4, 70_000)  # a bucket of its own

        def forward(self, x: Tensor) -> Tensor:
            return self.above(checkpoint(self.below, x, use_reentrant=True))

    alone = Checkpointed()
    data = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))

    def step(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        model = DistributedDataParallel(manager, copy.deepcopy(alone), bucket_cap_mb=0.1)
        manager.start_quorum()
        model(data[manager.rank].clone().requires_grad_()).square().mean().backward()
        return gradients(model.module), len(manager.sizes)

    results = ThreadQuorum(2).run(step)
    for part in data:
        (alone(part.clone().requires_grad_()).square().mean() / 2).backward()
    for found, buckets in results:
        torch.testing.assert_close(found, gradients(alone))
        assert buckets > 1


def second_step_of_two(
    wrapper: Any, module: nn.Module, backward: Callable[[Any, Tensor], None]
) -> tuple[Tensor, list[list[Tensor | None]]]:
    """Two members' data, and the gradients that each has when both have done `backward(model, part)`."""
    data = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))

    def steps(manager: ThreadManager) -> list[Tensor | None]:
        model = wrapper(manager, copy.deepcopy(module))
        for _ in range(2):
            model.zero_grad()
            manager.start_quorum()
            backward(model, data[manager.rank])
            assert manager.should_commit()
        return gradients(model.module)

    return data, ThreadQuorum(2).run(steps)


def _without_gradients(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _for_a_metric(model: Any, x: Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        model(x)
    model.train()


def _without_its_backward(model: Any, x: Tensor) -> None:
    with model.no_sync():
        model(x)


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("other", [_without_gradients, _for_a_metric, _without_its_backward])
def test_another_forward_may_come_between_a_forward_and_its_backward(
    wrapper: Any, other: Any
) -> None:
    """Of a teacher, or for a metric; or its backward comes later, or never."""
    alone = layers()

    def backward(model: Any, x: Tensor) -> None:
        loss = model(x).square().mean()
        other(model, x)
        loss.backward()

    data, results = second_step_of_two(wrapper, alone, backward)
    sum(alone(part).square().mean() / 2 for part in data).backward()  # type: ignore[union-attr]
    for result in results:
        torch.testing.assert_close(result, gradients(alone))


def _losses_of_one_output(model: Any, x: Tensor) -> None:
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()


def _losses_of_two_forwards(model: Any, x: Tensor) -> None:
    first, second = model(x).square().mean(), model(2 * x).square().mean()
    first.backward()
    second.backward()


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("losses", [_losses_of_one_output, _losses_of_two_forwards])
def test_each_of_several_backwards_after_the_forwards_is_averaged(
    wrapper: Any, losses: Any
) -> None:
    alone = layers()
    data, results = second_step_of_two(wrapper, alone, losses)
    for part in data:
        losses(alone, part)
    for result in results:
        torch.testing.assert_close(result, [p.grad / 2 for p in alone.parameters()])  # type: ignore[operator]


def test_a_second_backward_where_parameters_may_be_unused_is_not_committed() -> None:
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, Forked(), find_unused_parameters=True)
    manager.start_quorum()
    _losses_of_two_forwards(model, torch.ones(1, 2))
    assert not manager.should_commit()
    assert "call backward once" in str(manager.errored())


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_copy_is_what_a_script_keeps_of_a_model(wrapper: Any) -> None:
    """The best so far, say: under torch's wrapper, by whose names it is saved. Nobody averages its gradients."""
    manager = ThreadQuorum(1).members[0]
    model = wrapper(manager, layers())
    average = torch.optim.swa_utils.AveragedModel(model)
    best = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        model.module[0].weight.zero_()
    average.update_parameters(model)
    assert (
        average.module.state_dict().keys() == best.state_dict().keys() == model.state_dict().keys()
    )
    assert best.module[0].weight.any() and not average.module.module[0].weight.any()
    best(torch.ones(1, 8)).sum().backward()
    assert manager.sizes == []


def test_a_backward_that_raises_leaves_nothing_to_wait_for() -> None:
    def steps(manager: ThreadManager) -> list[bool]:
        model = DistributedDataParallel(manager, deep(), bucket_cap_mb=0.05)
        manager.start_quorum()
        hook = model.module[0].weight.register_hook(_raise)
        with pytest.raises(RuntimeError, match="of the user's"):
            model(torch.ones(1, 100)).mean().backward()
        hook.remove()
        sent = len(manager.sizes)
        first = manager.should_commit()
        model.forget_forward()
        manager.start_quorum()
        model(torch.ones(1, 100)).mean().backward()
        return [sent > 0, first, manager.should_commit()]

    assert ThreadQuorum(2).run(steps) == [[True, False, True]] * 2


def test_a_loop_may_catch_what_a_signal_handler_raises_in_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Handlers run at the first line of Python that the backward comes to, which is ours."""
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, deep())
    manager.start_quorum()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="of the user's"):
        patch.setattr(type(model._reduction), "getSize", _raise)
        model(torch.ones(1, 100)).mean().backward()
    model(torch.ones(1, 100)).mean().backward()
    assert manager.should_commit()


@pytest.mark.parametrize("goes_on", ["in the next step", "in the same step"])
def test_a_loop_may_catch_what_its_backward_raises(goes_on: str) -> None:
    """Out of memory, say. torch would take it for a forward with unused parameters, in the next one."""

    def steps(manager: ThreadManager) -> list[Any]:
        model = DistributedDataParallel(manager, deep(), bucket_cap_mb=0.05)
        manager.start_quorum()
        hook = model.module[0].weight.register_hook(_raise)
        with pytest.raises(RuntimeError, match="of the user's"):
            model(torch.ones(1, 100)).mean().backward()
        hook.remove()
        if goes_on == "in the same step":
            model(torch.ones(1, 100)).mean().backward()
        first = manager.should_commit()
        model.zero_grad()
        manager.start_quorum()
        model(torch.ones(1, 100)).mean().backward()
        return [first, manager.should_commit(), gradients(model.module)]

    torch.manual_seed(1)
    results = ThreadQuorum(2).run(steps)
    assert [result[:2] for result in results] == [[False, True]] * 2
    for one, other in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Downwards(nn.Module):
    """Its layers are used in another order than they are registered in: torch's reducer would regroup."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def test_buckets_stay_as_they_are_when_a_forward_is_forgotten() -> None:
    """As after a backward that has raised in one member. It would average the gradients of other parameters than
    its peer, and no line would say so."""

    def steps(manager: ThreadManager) -> list[list[Tensor]]:
        torch.manual_seed(1)
        model = DistributedDataParallel(manager, Downwards(), bucket_cap_mb=0.05)
        found = []
        for step in range(4):
            manager.start_quorum()
            model.zero_grad()
            if step == 1 and manager.rank == 0:
                model.forget_forward()
            model(torch.ones(1, 100)).mean().backward()
            assert manager.should_commit()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return found

    for first, *later in ThreadQuorum(2).run(steps):
        for found in later:
            for one, other in zip(first, found, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


def _raise(of: Any) -> Any:
    raise RuntimeError("of the user's")


@pytest.mark.parametrize("find_unused", [False, True])
def test_the_bucket_layout_is_that_of_a_restarted_member(find_unused: bool) -> None:
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(
        manager, deep(), bucket_cap_mb=0.03, find_unused_parameters=find_unused
    )
    layouts = []
    for _ in range(3):
        manager.start_quorum()
        model(torch.randn(5, 100)).sum().backward()
        layouts.append(tuple(manager.sizes))
    assert len(set(layouts)) == 1
    assert len(layouts[0]) > 2


def test_layout_follows_backward_and_starts_small() -> None:
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, layers(1200))
    manager.start_quorum()
    model(torch.randn(5, 8)).sum().backward()
    tail = sum(p.numel() for p in model.module[4].parameters())
    assert manager.sizes[0] < 1.5e6  # under torch's first bucket of 1 MiB and one tensor
    assert manager.sizes[0] >= tail
    assert sum(manager.sizes) == sum(p.numel() for p in model.parameters())


def test_the_buckets_memory_is_there_before_the_process_joins() -> None:
    """Of more than 32 MiB, so that malloc gets it from the kernel and not from what it has."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    net = nn.Linear(3000, 4000, bias=False)
    ctypes.CDLL(None).malloc_trim(0)  # nor from what earlier tests have freed
    before = resident()
    model = DistributedDataParallel(ThreadQuorum(1).members[0], net)
    assert resident() - before > 0.9 * 3000 * 4000 * 4
    del model


def test_models_made_at_once_leave_torchs_settings_alone() -> None:
    """As in threads: each used to find the other's setting, and to put that back."""
    both = threading.Barrier(2)

    def make(manager: ThreadManager) -> None:
        for _ in range(50):
            both.wait(PATIENCE_S)
            DistributedDataParallel(manager, nn.Linear(300, 300))

    ThreadQuorum(2).run(make)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("wrapper", BOTH)
def test_no_sync_accumulates_and_sends_once(wrapper: Any) -> None:
    data = torch.randn(2, 2, 5, 8)
    start = layers().state_dict()

    def step(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        net = layers()
        net.load_state_dict(start)
        model = wrapper(manager, net)
        manager.start_quorum()
        with model.no_sync():
            model(data[manager.rank, 0]).sum().backward()
        assert manager.sizes == []
        model(data[manager.rank, 1]).sum().backward()
        return gradients(net), sum(manager.sizes)

    alone = layers()
    alone.load_state_dict(start)
    (alone(data.flatten(0, 2)).sum() / 2).backward()
    for result, sent in ThreadQuorum(2).run(step):
        torch.testing.assert_close(result, gradients(alone), rtol=1e-4, atol=1e-4)
        assert sent == sum(p.numel() for p in alone.parameters())


def test_channels_last_gradients_are_averaged() -> None:
    """Their memory is not contiguous in the usual sense."""
    data = torch.randn(2, 3, 4, 8, 8)
    start = nn.Conv2d(4, 6, 3).state_dict()

    def step(manager: ThreadManager) -> Tensor:
        net = nn.Conv2d(4, 6, 3)
        net.load_state_dict(start)
        net = net.to(memory_format=torch.channels_last)
        model = PureDistributedDataParallel(manager, net)
        manager.start_quorum()
        model(data[manager.rank].to(memory_format=torch.channels_last)).sum().backward()
        assert net.weight.grad is not None
        return net.weight.grad

    one, other = ThreadQuorum(2).run(step)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", BOTH)
def test_complex_gradients_are_averaged(wrapper: Any) -> None:
    """Two values each, in buckets of real ones."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.phases = nn.Linear(4, 4), nn.Parameter(torch.ones(4) * 1j)

        def forward(self, x: Tensor) -> Tensor:
            return (self.before(x) * self.phases).abs()

    data = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    alone = Model()

    def step(manager: ThreadManager) -> tuple[list[Tensor | None], bool]:
        model = wrapper(manager, copy.deepcopy(alone))
        manager.start_quorum()
        model(data[manager.rank]).square().mean().backward()
        return gradients(model.module), manager.should_commit()

    results = ThreadQuorum(2).run(step)
    sum(alone(part).square().mean() / 2 for part in data).backward()  # type: ignore[union-attr]
    for result, committed in results:
        torch.testing.assert_close(result, gradients(alone))
        assert committed


# ---------------------------------------------------------------------- unused parameters


def test_a_backward_that_misses_parameters_is_not_committed() -> None:
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, Forked())
    manager.start_quorum()
    model(torch.randn(1, 2)).sum().backward()
    manager.should_commit()
    assert "find_unused_parameters=True" in str(manager.errored())
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):  # torch's own words
        model(torch.randn(1, 2))


def test_asking_for_the_groups_size_is_no_backward() -> None:
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, layers())
    manager.start_quorum()
    model(torch.randn(1, 8)).sum().backward()
    assert model.process_group.size() == 1
    manager.should_commit()
    assert manager.errored() is None


def test_forward_without_backward_is_no_error() -> None:
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, layers())
    manager.start_quorum()
    model(torch.randn(1, 8))
    model(torch.randn(1, 8)).sum().backward()
    model(torch.randn(1, 8))
    manager.should_commit()
    assert manager.errored() is None


def test_parameters_used_by_one_member_are_equal_in_all() -> None:
    """With one branch each: both get both gradients; a branch that no member used gets none."""
    start = Forked().state_dict()

    def step(manager: ThreadManager) -> tuple[list[Tensor | None], list[Tensor | None]]:
        net = Forked()
        net.load_state_dict(start)
        model = DistributedDataParallel(manager, net, find_unused_parameters=True)
        manager.start_quorum()
        model(torch.ones(1, 2), ["left", "right"][manager.rank]).sum().backward()
        mixed = [None if g is None else g.clone() for g in gradients(net)]
        net.zero_grad()
        manager.start_quorum()
        model(torch.ones(1, 2), "left").sum().backward()
        return mixed, gradients(net)

    one, other = ThreadQuorum(2).run(step)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    mixed, left_only = one
    torch.testing.assert_close(mixed, [torch.full_like(p, 0.5) for p in start.values()])
    assert left_only[2] is None
    assert left_only[3] is None


# ---------------------------------------------------------------------- buffers


def norm_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def buffers_of(module: nn.Module) -> list[Tensor]:
    return [b.clone() for b in module.buffers()]


def train_norm(
    manager: ThreadManager, wrapper: Any, fail_at: int | None = None, steps: int = 3
) -> list[Any]:
    """Buffers after each step."""
    net = norm_model()
    model = wrapper(manager, net)
    history = [buffers_of(net)]
    for number in range(steps):
        manager.start_quorum()
        data = torch.randn(
            16, 8, generator=torch.Generator().manual_seed(7 * number + manager.rank)
        )
        model(data).sum().backward()
        if number == fail_at and manager.rank == 0:
            manager.report_error(RuntimeError("injected"))
        manager.should_commit()
        history.append(buffers_of(net))
    return history


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("silent", [(), (0,)])
def test_buffers_follow_the_first_participant(wrapper: Any, silent: tuple[int, ...]) -> None:
    histories = ThreadQuorum(2, silent=silent).run(lambda m: train_norm(m, wrapper))
    assert_same(histories[0], histories[1])
    leader = 1 if silent else 0
    own = nn.BatchNorm1d(6)
    assert histories[0][3][2] == 3  # num_batches_tracked
    assert not torch.equal(histories[leader][1][0], own.running_mean)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_discarded_step_leaves_buffers_as_they_were(wrapper: Any) -> None:
    for history in ThreadQuorum(2).run(lambda m: train_norm(m, wrapper, fail_at=1)):
        assert_same(history[1], history[2])
        assert history[3][2] == 2


class Held(nn.Module):
    """Its forward writes to a view of its buffer's memory."""

    def __init__(self, memory: Tensor, buffer: Tensor) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(2, 2), memory
        self.register_buffer("held", buffer)

    def forward(self, x: Tensor, value: float) -> Tensor:
        self.memory.fill_(value)
        return self.layer(x)


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("kind", ["expanded", "conjugated", "negated", "gaps"])
def test_buffers_follow_the_first_participant_however_they_lie_in_memory(
    wrapper: Any, kind: str
) -> None:
    """The end of the first step had raised for an expanded one: torch does not write to it."""

    def step(manager: ThreadManager) -> list[Tensor]:
        real, pairs = torch.zeros(3, 8), torch.zeros(3, dtype=torch.complex64)
        memory, buffer = {
            "expanded": (real[:, :1], real[:, :1].expand(3, 4)),
            "conjugated": (pairs, pairs.conj()),
            "negated": (pairs.imag, pairs.conj().imag),
            "gaps": (real, real[:, ::2]),
        }[kind]
        net = Held(memory, buffer)
        model = wrapper(manager, net)
        found = []
        for number in range(3):
            manager.start_quorum()
            model(torch.ones(1, 2), 10.0 * number + manager.rank + 1).sum().backward()
            if number == 1 and manager.rank == 1:
                manager.report_error(RuntimeError("injected"))
            manager.should_commit()
            found.append(net.held.clone())
        return found

    for first, second, third in ThreadQuorum(2).run(step):
        assert bool((first.abs() == 1).all()) and torch.equal(first, second)
        assert bool((third.abs() == 21).all())


def test_buffers_healed_within_a_discarded_step_stay_healed() -> None:
    """An asynchronous heal loads after forward: the discard must not go back before it."""
    manager = ThreadQuorum(1).members[0]
    net = norm_model()
    model = DistributedDataParallel(manager, net)
    healthy = [torch.full_like(b, 5) for b in net.buffers()]
    manager.scheduled_heal = {"module.buffers": {"buffers": healthy}}
    manager.start_quorum()
    model(torch.randn(16, 8)).sum().backward()
    manager.report_error(RuntimeError("injected"))
    assert not manager.should_commit()
    assert_same(buffers_of(net), healthy)


def test_buffers_may_be_left_to_each_group() -> None:
    def step(manager: ThreadManager) -> int:
        DistributedDataParallel(manager, norm_model(), forward_sync_buffers=False)
        return len(manager.state_fns)

    assert ThreadQuorum(1).run(step) == [0]


def test_constants_that_are_no_state_are_not_sent() -> None:
    net = layers()
    net.register_buffer("mask", torch.ones(1000), persistent=False)
    manager = ThreadQuorum(1).members[0]
    model = DistributedDataParallel(manager, net)
    manager.start_quorum()
    model(torch.randn(1, 8)).sum().backward()
    assert sum(manager.sizes) == sum(p.numel() for p in net.parameters())


class Grows(nn.Module):
    """A queue that begins with one row, or none, and gets another with each forward."""

    def __init__(self, rows: int, before: bool) -> None:
        super().__init__()
        self.before = before
        self.net = nn.Linear(2, 1)
        self.register_buffer("queue", torch.zeros(rows, 2))

    def grow(self, inputs: Tensor) -> None:
        self.queue = torch.cat([self.queue, inputs])

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.before:
            self.grow(inputs)
        return self.net(inputs).sum()


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_a_buffer_that_changes_its_shape_is_named(wrapper: Any, rows: int, before: bool) -> None:
    """Before a forward, or in it. One row would have been copied to each of two, without a word."""

    def step(manager: ThreadManager) -> None:
        net = Grows(rows, before)
        model = wrapper(manager, net)
        manager.start_quorum()
        if before:
            net.grow(torch.ones(1, 2))
        model(torch.ones(1, 2)).backward()
        manager.should_commit()

    with pytest.raises(
        ValueError, match="buffer 'queue' of Grows had shape .* Allocate the largest"
    ):
        ThreadQuorum(1).run(step)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---------------------------------------------------------------------- what else is promised


@pytest.mark.parametrize("wrapper", BOTH)
def test_an_error_in_the_hook_does_not_escape(wrapper: Any) -> None:
    class Broken(ThreadManager):
        def allreduce(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("network is gone")

    manager = Broken(ThreadQuorum(1), 0)
    model = wrapper(manager, layers())
    manager.start_quorum()
    model(torch.randn(1, 8)).sum().backward()
    assert isinstance(manager.errored(), OSError)


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_schema_tells_modules_apart(wrapper: Any) -> None:
    def schema(net: nn.Module) -> dict[str, str]:
        manager = ThreadQuorum(1).members[0]
        wrapper(manager, net)
        return manager.schema

    assert schema(layers()) == schema(layers())
    assert schema(layers()) != schema(layers(401))
    assert schema(layers()) != schema(layers().double())
    assert "tensors" in schema(layers())["module"]


def test_two_modules_of_one_manager_have_schemas_of_their_own() -> None:
    manager = ThreadQuorum(1).members[0]
    DistributedDataParallel(manager, layers())
    DistributedDataParallel(manager, norm_model())
    assert set(manager.schema) == {"module", "module.1"}
    assert set(manager.state_fns) == {"module.1.buffers"}


@pytest.mark.parametrize(
    "option", [{"static_graph": True}, {"process_group": object()}, {"init_sync": True}]
)
def test_what_cannot_work_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} is not available"):
        DistributedDataParallel(ThreadQuorum(1).members[0], layers(), **option)


def test_communication_hooks_are_refused() -> None:
    model = DistributedDataParallel(ThreadQuorum(1).members[0], layers())
    with pytest.raises(NotImplementedError, match="the manager reduces"):
        model.register_comm_hook(None, lambda state, bucket: None)


def test_uneven_inputs_are_refused() -> None:
    model = DistributedDataParallel(ThreadQuorum(1).members[0], layers())
    for enter in (model.join, lambda: Join([model])):
        with pytest.raises(NotImplementedError, match="the same number of batches"):
            enter()


@pytest.mark.parametrize("wrapper", BOTH)
def test_devices_without_a_way_to_the_others_are_refused(wrapper: Any) -> None:
    with FakeTensorMode():  # tensors of a device that is not there
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(2, device="xpu"))
    with pytest.raises(ValueError, match="tensors on xpu:0 can't be averaged over replica groups"):
        wrapper(ThreadQuorum(1).members[0], module)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="sparse"):
        DistributedDataParallel(ThreadQuorum(1).members[0], nn.Embedding(4, 2, sparse=True))


def test_it_is_torchs_and_its_state_dict_is_torchs() -> None:
    model = DistributedDataParallel(ThreadQuorum(1).members[0], layers())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert set(model.state_dict()) == {f"module.{name}" for name in layers().state_dict()}


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_dropped_model_is_freed_while_its_manager_lives(wrapper: Any) -> None:
    manager = ThreadQuorum(1).members[0]
    model = wrapper(manager, layers())
    manager.start_quorum()
    model(torch.randn(1, 8)).sum().backward()
    seen = weakref.ref(model.module)
    manager._pending.clear()
    del model
    gc.collect()
    assert seen() is None
