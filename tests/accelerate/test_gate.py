"""Gradients survive a discarded attempt, and headers keep apart from gradients. Threads, real Gloo."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft_accelerate.exchange import Diverged, Exchange, Kind
from ft_accelerate.gate import Gate
from ft_accelerate.models import FaultTolerantModel
from tests.threads.cluster import Replica, lighthouse, replicas

INPUT = torch.arange(12.0).reshape(4, 3)


class Net(nn.Module):
    """Leaves out its second layer where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.first(x)
        return self.second(y) if both else y


def make(gate: Gate, net: Net, **kwargs: Any) -> FaultTolerantModel:
    return FaultTolerantModel(
        gate, net, is_ghost=lambda: False, is_replay=lambda: False,
        on_ghost_backward=lambda: None, **kwargs,
    )  # fmt: skip


def never(error: Exception) -> None:
    raise AssertionError(error)


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
            gate = Gate(lambda: True, never)
            gate.attach(manager)
            net, both = Net(), not unused
            model = make(gate, net, find_unused_parameters=unused)
            passes = [(INPUT, both)]
            if start == "zero":
                manager.start_quorum()
                model(INPUT + 1, both).square().mean().backward()
                assert manager.should_commit()
                gate.over()
                model.zero_grad(set_to_none=False)
            elif start == "accumulated":
                passes.append((INPUT + 2, both))
                with model.no_sync():
                    model(INPUT + 2, both).square().mean().backward()
            manager.start_quorum()
            model(INPUT, both).square().mean().backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))  # an all-reduce broke off in the middle
            manager.report_error(RuntimeError("injected"))
            assert not manager.should_commit()
            manager.start_quorum()
            gate.again()
            assert manager.should_commit()
            gate.over()
            for mine, right in zip(gradients(net), expected(net, passes), strict=True):
                if right is not None:
                    assert mine is not None
                    torch.testing.assert_close(mine, right, msg=lambda m, s=start: f"{s}: {m}")
            assert not gate.busy and not gate._gradients
        replica.close()


def test_gradients_without_an_end_are_let_go_of() -> None:
    """Forward inside `no_sync`, backward outside: nothing is sent, so no step ends."""
    gate = Gate(lambda: True, never)
    model = make(gate, Net())
    for _ in range(3):
        with model.no_sync():
            loss = model(INPUT).square().mean()
        loss.backward()
    assert len(gate._gradients) == 4


def test_a_header_waits_beside_gradients_and_then_tells_who_is_astray() -> None:
    """Gloo would end the process if a header met a bucket of another size in one all-reduce."""
    with lighthouse(min_replicas=2) as server:
        pair = [Replica(server, str(index), expected_replicas=2) for index in (0, 1)]
        managers = [replica.manager for replica in pair]
        exchanges = [Exchange(m, slot, 2, torch.device("cpu")) for slot, m in enumerate(managers)]
        sent = threading.Event()

        def trains() -> str:
            managers[0].start_quorum()
            bucket = torch.ones(100_000)
            futures = [managers[0].allreduce(bucket), managers[0].allreduce(bucket.clone())]
            sent.set()
            for future in futures:
                future.wait()
            assert not managers[0].should_commit()
            managers[0].start_quorum()
            assert exchanges[0].agree(Kind.GRADIENTS, 7, 7) is None
            return str(managers[0].errored())

        def gathers() -> str:
            managers[1].start_quorum()
            assert sent.wait(20)
            assert exchanges[1].agree(Kind.GATHER, 7, 7, patience_s=0.2) is None
            assert isinstance(managers[1].errored(), TimeoutError)
            assert not managers[1].should_commit()
            managers[1].start_quorum()
            with pytest.raises(Diverged, match="is at gather .*others are at a gradient step"):
                exchanges[1].agree(Kind.GATHER, 7, 7)
            return "told"

        said = replicas(trains, gathers)
        assert said == ["another replica group's script has diverged", "told"]
        replicas(*[replica.close for replica in pair])
