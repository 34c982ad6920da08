"""Asynchronous quorum: the state arrives while the loop computes, large tensors in their places."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.copy_double import CopyDouble
from tests.harness.waiting import PATIENCE_S

SIDE = 600  # a weight of 1.4 MB


class Member(Replica):
    """A replica that holds a large layer, too."""

    def __init__(self, server: str, index: int) -> None:
        super().__init__(
            server, f"r{index}", value=float(index), expected_replicas=2, use_async_quorum=True
        )
        self.layer = torch.nn.Linear(SIDE, SIDE)
        torch.nn.init.constant_(self.layer.weight, 0.01 * (index + 1))
        self.loaded: list[int] = []  # where the weights were that `load` was given
        self.healed, self.heals = threading.Event(), 0
        self.manager.register_state_dict_fn("layer", self._load, self.layer.state_dict)
        self.manager.telemetry.add_sink(self._see)

    def _load(self, state: dict[str, Any]) -> None:
        self.loaded.append(state["weight"].data_ptr())
        self.layer.load_state_dict(state)

    def _see(self, event: Any) -> None:
        if event.kind == "heal_done":
            self.heals += 1
            self.healed.set()

    def end_step(self) -> bool:
        return self.end(self.reduce())


@pytest.fixture
def members() -> Any:
    with lighthouse() as server:
        yield [Member(server, index) for index in range(2)]


def run(members: list[Member], joiner: Any) -> None:
    """r0 is the first, and r1 heals from it in the step that `joiner` computes."""

    def first() -> None:
        members[0].manager.start_quorum()
        assert members[0].end_step()

    replicas(first, joiner)
    replicas(*(lambda m=m: (m.run_to(3), m.close()) for m in members))
    for name in ("weight", "bias"):
        mine, theirs = (member.layer.state_dict()[name] for member in members)
        assert torch.equal(mine, theirs)
    assert torch.equal(members[0].weights, members[1].weights)


def test_large_tensors_arrive_in_place_under_a_loop_that_computes(members: list[Member]) -> None:
    joiner = members[1]
    place = joiner.layer.weight.data_ptr()

    def compute() -> None:
        joiner.manager.start_quorum()
        output = joiner.layer(torch.ones(2, SIDE, requires_grad=True)).square().sum()
        assert joiner.healed.wait(PATIENCE_S)
        assert joiner.layer.weight[0, 0].item() == pytest.approx(0.01)  # already the peer's
        output.backward()  # what autograd saved has other contents now, and it does not mind
        assert not joiner.manager.is_participating()
        joiner.weights.add_(5.0)  # small ones are put in place after this
        assert joiner.end_step()

    run(members, compute)
    assert joiner.loaded == [place]
    assert joiner.heals == 1


def test_what_the_step_queues_for_a_device_does_not_hold_up_the_heal(members: list[Member]) -> None:
    """Its collective waits for the peer, which waits for the heal. What was queued before the step is done
    before the first byte arrives."""
    joiner, begun = members[1], threading.Event()
    weight = joiner.layer.weight.data
    with CopyDouble() as device:
        device.place(weight)

        def compute() -> None:
            device.model.run(lambda: begun.wait(PATIENCE_S) and weight.fill_(9.0))
            joiner.manager.start_quorum()
            device.model.run(lambda: joiner.healed.wait(PATIENCE_S))
            begun.set()
            assert joiner.healed.wait(PATIENCE_S)
            assert joiner.end_step()

        run(members, compute)
        assert not device.faults
    assert joiner.heals == 1


def test_a_loop_that_changes_a_large_tensor_in_the_step_heals_nonetheless(
    members: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    joiner = members[1]
    place = joiner.layer.weight.data_ptr()

    def compute() -> None:
        joiner.manager.start_quorum()
        assert joiner.healed.wait(PATIENCE_S)
        with torch.no_grad():
            joiner.layer.weight.mul_(2.0)
        assert joiner.end_step()

    with caplog.at_level(logging.WARNING, "ft_core"):
        run(members, compute)
    assert "changed before should_commit while it was received" in caplog.text
    assert joiner.heals == 2
    assert len(joiner.loaded) == 1
    assert joiner.loaded != [place]
