"""A process that has made no step yet heals into memory that it had before it joined."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ft_core import DistributedDataParallel, OptimizerWrapper
from ft_core import state as state_module
from tests.harness.cluster import lighthouse, manager, replicas

SIDE = 600  # a weight of 1.4 MB


class Trainer:
    def __init__(self, address: str, name: str, *, asynchronous: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.inner = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.manager = manager(
            address,
            name,
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.model.state_dict(), "adam": self.inner.state_dict()},
            use_async_quorum=asynchronous,
        )
        self.ddp = DistributedDataParallel(self.manager, self.model)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["adam"])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.ones(2, SIDE)).square().mean().backward()
        self.optimizer.step()

    def moments(self) -> list[torch.Tensor]:
        (values,) = self.inner.state.values()
        return [values["exp_avg"], values["exp_avg_sq"]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_its_moments_arrive_in_memory_made_before(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr(state_module, "PREALLOCATE_BYTES", 1)
    made: list[list[int]] = []
    prepare = state_module.PreallocatedState.prepare

    def watched(self: state_module.PreallocatedState) -> None:
        prepare(self)
        (values,) = self._spare.values()
        made.append([values[key].data_ptr() for key in ("exp_avg", "exp_avg_sq")])

    with lighthouse() as server:
        old = Trainer(server.address(), "old", asynchronous=asynchronous)
        for _ in range(3):
            old.step()
        monkeypatch.setattr(state_module.PreallocatedState, "prepare", watched)
        new = Trainer(server.address(), "new", asynchronous=asynchronous)
        healed = threading.Event()

        def run(trainer: Trainer) -> None:
            while not healed.is_set():
                trainer.step()
                if trainer is new and trainer.inner.state:
                    assert [m.data_ptr() for m in trainer.moments()] == made[0]
                    last.append(trainer.manager.current_step() + 3)
                    healed.set()
            while trainer.manager.current_step() < last[0]:
                trainer.step()
            trainer.manager.shutdown()

        last: list[int] = []
        replicas(lambda: run(old), lambda: run(new))
    assert len(made) == 1
    for mine, theirs in zip(new.moments(), old.moments(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(new.model.weight, old.model.weight)
