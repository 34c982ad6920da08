"""Gradients survive a discarded attempt, and headers keep apart from gradients. Threads, real Gloo."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft_accelerate.runtime.checked_collectives import CheckedCollectives, Diverged, Header, Kind
from ft_accelerate.runtime.models import FaultTolerantModel
from ft_accelerate.runtime.script_position import ScriptPosition
from ft_core.collectives.retry import RetryableReducer, RetryHooks
from ft_core.manager import Manager
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

INPUT = torch.arange(12.0).reshape(4, 3)


class Net(nn.Module):
    """Leaves out its second layer where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.first(x)
        return self.second(y) if both else y


def make(reducer: RetryableReducer, net: Net, **kwargs: Any) -> FaultTolerantModel:
    return FaultTolerantModel(reducer, net, ScriptPosition(), **kwargs)


def reducer_of(
    manager: Manager,
    spoil: Callable[[], None] = lambda: None,
    begin: Callable[[], None] = lambda: None,
) -> RetryableReducer:
    """One whose steps open with backward, then `begin` is called; `spoil` before each vote."""

    def first() -> bool:
        manager.start_quorum()
        begin()
        return True

    def again() -> bool:
        manager.start_quorum()
        return True

    def vote() -> bool:
        spoil()
        return manager.should_commit()

    reducer = RetryableReducer(RetryHooks(begin=first, vote=vote, again=again))
    reducer.attach(manager)
    return reducer


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def expected(net: Net, passes: list[tuple[Tensor, bool]]) -> list[Tensor | None]:
    """What plain autograd accumulates."""
    plain = Net()
    plain.load_state_dict(net.state_dict())
    for x, both in passes:
        plain(x, both).square().mean().backward()
    return gradients(plain)


def test_a_discarded_attempt_is_repeated_from_the_kept_gradients() -> None:
    """Whatever the gradients are before the pass: None, views of their buckets that hold zeros, or
    what a pass without synchronization has left."""
    with lighthouse() as server:
        replica = Replica(server, "0")
        manager = replica.manager
        for start, unused in itertools.product(("none", "zero", "accumulated"), (False, True)):
            net, both, spoiled = Net(), not unused, list[int]()

            def spoil(net: Net = net, spoiled: list[int] = spoiled) -> None:
                """The first attempt of the last pass breaks off in the middle of an all-reduce."""
                if spoiled:
                    spoiled.pop()
                    for parameter in net.parameters():
                        if parameter.grad is not None:
                            parameter.grad.fill_(float("nan"))
                    manager.report_error(RuntimeError("injected"))

            reducer = reducer_of(manager, spoil)
            model = make(reducer, net, find_unused_parameters=unused)
            passes = [(INPUT, both)]
            if start == "zero":
                model(INPUT + 1, both).square().mean().backward()
                model.zero_grad(set_to_none=False)
            elif start == "accumulated":
                passes.append((INPUT + 2, True))  # the second layer in this pass only, if unused
                with model.no_sync():
                    model(INPUT + 2, True).square().mean().backward()
            spoiled.append(1)
            discarded = manager.current_step()
            model(INPUT, both).square().mean().backward()
            assert not spoiled and manager.current_step() == discarded + 1
            for mine, right in zip(gradients(net), expected(net, passes), strict=True):
                if right is not None:
                    assert mine is not None
                    torch.testing.assert_close(mine, right, msg=lambda m, s=start: f"{s}: {m}")
                elif start == "none":
                    assert mine is None
            assert not reducer.busy and not reducer.kept
        replica.close()


class Parts(nn.Module):
    """Uses the layers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, used: str) -> Tensor:
        for name in used:
            x = self.layers[int(name)](x)
        return x


class Left(Exception):
    pass


def test_members_that_use_different_parameters_are_alike_when_one_dies_in_the_step() -> None:
    """One member errs before its first collective, one that alone has used a layer leaves: what the
    first attempt said of which member has used what holds no more. None and zero are not the same to AdamW."""
    torch.manual_seed(0)
    start = Parts().state_dict()
    uses, begun = ("01", "02", "03"), threading.Barrier(3)

    def steps(net: Parts) -> torch.optim.Optimizer:
        net.load_state_dict(start)
        return torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)

    def expected() -> Parts:
        """Mean of the two members that are left; no gradient where neither has one."""
        net, plain = Parts(), [Parts(), Parts()]
        optimizer = steps(net)
        for twin, used in zip(plain, uses, strict=False):
            twin.load_state_dict(start)
            twin(INPUT, used).square().mean().backward()
        for parameter, *both in zip(
            net.parameters(), *[t.parameters() for t in plain], strict=True
        ):
            there = [p.grad for p in both if p.grad is not None]
            parameter.grad = sum(there, torch.zeros_like(parameter)) / 2 if there else None
        optimizer.step()
        return net

    with lighthouse(min_replicas=2) as server:
        members = [Replica(server, str(i), expected_replicas=3) for i in range(3)]
        replicas(*[member.step for member in members])

        def train(index: int) -> Parts:
            manager, net = members[index].manager, Parts()

            def begin() -> None:
                assert manager.bind() and begun.wait(PATIENCE_S) >= 0
                if index == 1:
                    manager.report_error(RuntimeError("injected"))

            def leave() -> None:
                if index == 2:
                    members[2].close()
                    raise Left

            optimizer = steps(net)
            model = make(reducer_of(manager, leave, begin), net, find_unused_parameters=True)
            with contextlib.suppress(Left):
                model(INPUT, uses[index]).square().mean().backward()
                optimizer.step()
            return net

        trained = replicas(*[functools.partial(train, index) for index in range(3)])
        replicas(*[member.close for member in members[:2]])
    right = expected()
    for net in trained[:2]:
        for (name, mine), other in zip(net.named_parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(mine, other, msg=lambda m, n=name: f"{n}: {m}")
            assert (mine.grad is None) == (other.grad is None), name


def test_gradients_without_an_end_are_let_go_of() -> None:
    """Forward inside `no_sync`, backward outside: nothing is sent, so no step ends."""
    reducer = RetryableReducer(
        RetryHooks(begin=lambda: True, vote=lambda: True, again=lambda: True)
    )
    model = make(reducer, Net())
    for _ in range(3):
        with model.no_sync():
            loss = model(INPUT).square().mean()
        loss.backward()
    assert reducer.kept == 4


def test_a_header_waits_beside_gradients_and_then_tells_which_process_is_astray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo would end the process if a header met a bucket of another size in one all-reduce."""
    with lighthouse(min_replicas=2) as server:
        pair = [Replica(server, str(index), expected_replicas=2) for index in (0, 1)]
        managers = [replica.manager for replica in pair]

        def check(slot: int, kind: Kind, patience_s: float | None = None) -> object:
            here = Header(kind, event=7, agreed=7)
            return CheckedCollectives(
                managers[slot], slot, 2, torch.device("cpu"), here, patience_s
            ).check()

        sent, told = threading.Event(), threading.Event()
        report = managers[0].report_error

        def report_late(error: Exception) -> None:
            """Not before the other has the header, too: it would be cut off."""
            assert told.wait(PATIENCE_S)
            report(error)

        def trains() -> str:
            managers[0].start_quorum()
            bucket = torch.ones(100_000)
            futures = [managers[0].allreduce(bucket), managers[0].allreduce(bucket.clone())]
            sent.set()
            for future in futures:
                future.wait()
            assert not managers[0].should_commit()
            managers[0].start_quorum()
            monkeypatch.setattr(managers[0], "report_error", report_late)
            assert check(0, Kind.GRADIENTS) is None
            return str(managers[0].errored())

        def gathers() -> str:
            managers[1].start_quorum()
            assert sent.wait(PATIENCE_S)
            assert check(1, Kind.GATHER, patience_s=0.2) is None
            assert isinstance(managers[1].errored(), TimeoutError)
            assert not managers[1].should_commit()
            managers[1].start_quorum()
            with pytest.raises(Diverged, match="is at gather .*others are at a gradient step"):
                check(1, Kind.GATHER)
            told.set()
            return "told"

        said = replicas(trains, gathers)
        assert said == ["another replica group's script has diverged", "told"]
        replicas(*[replica.close for replica in pair])
