"""What a Fabric loop may do and what it is told, in one process with a real lighthouse."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lighthouse import LighthouseServer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LighthouseServer("tcp://127.0.0.1:0") as server:
        yield server.address()


@pytest.fixture
def fabric(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # Lightning sets it when it looks for devices, for good.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from lightning.fabric import Fabric

    from ft_lightning.fabric import FTDDPStrategy

    strategy = FTDDPStrategy(lighthouse=address, job_id=uuid.uuid4().hex, timeout_s=20)
    made = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    made.launch()
    yield made
    strategy.leave()


def data(batches: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2.0 * batches).reshape(-1, 1)), 2)


def ready(fabric: Any, loader: Any, **options: Any) -> tuple[Any, Any, Any]:
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    return model, optimizer, fabric.setup_dataloaders(loader, **options)


def test_collectives_outside_of_a_step_wait_for_nobody(fabric: Any) -> None:
    value = torch.tensor([1.0, 2.0])
    assert fabric.broadcast({"a": 1}) == {"a": 1}
    fabric.barrier()
    assert torch.equal(fabric.all_reduce(value), value)
    assert torch.equal(fabric.all_gather(value), value)
    with fabric.rank_zero_first():
        pass


def test_validation_does_not_begin_a_step(fabric: Any) -> None:
    """Reading a loader in eval mode or without gradients is no training."""
    model, optimizer, loader = ready(fabric, data(), use_distributed_sampler=False)
    with torch.no_grad():
        for (batch,) in loader:
            model(batch)
    assert fabric.strategy.manager.last_outcome() is None
    model.train()
    for (batch,) in loader:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    assert fabric.strategy.current_step == 4


def test_one_step_a_batch(fabric: Any) -> None:
    model, optimizer, loader = ready(fabric, data())
    (batch,) = next(iter(loader))
    fabric.backward(model(batch).square().mean())
    optimizer.step()
    with pytest.raises(RuntimeError, match="step once a batch"):
        optimizer.step()


def test_what_comes_too_late_or_cannot_work_is_said(fabric: Any) -> None:
    model, optimizer, loader = ready(fabric, data())
    net = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        fabric.setup_optimizers(torch.optim.LBFGS(net.parameters()))
    seen = {"samples": 0}
    fabric.strategy.register("seen", seen)
    with pytest.raises(ValueError, match="the name is taken"):
        fabric.strategy.register("seen", seen)
    (batch,) = next(iter(loader))
    fabric.backward(model(batch).square().mean())
    optimizer.step()
    with pytest.raises(RuntimeError, match="before the first batch"):
        fabric.setup(net)
    with pytest.raises(ValueError, match="was fetched already"):
        fabric.strategy.register("more", {})


def test_a_discarded_step_gives_its_batch_again_and_stops_the_scheduler(fabric: Any) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    loader = fabric.setup_dataloaders(data(3))
    seen, rates = [], []
    for (batch,) in loader:
        seen.append(float(batch[0]))
        fabric.backward(model(batch).square().mean())
        if len(seen) == 2:
            fabric.strategy.manager.report_error(RuntimeError("injected"))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert seen == [0.0, 2.0, 2.0, 4.0]
    assert rates == [0.5, 0.5, 0.25, 0.125]
    assert fabric.strategy.current_step == 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(6.0).reshape(-1, 1))


def test_an_iterable_starts_over_and_that_is_said(
    fabric: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, loader = ready(fabric, DataLoader(Stream(), 2))
    seen = []
    with caplog.at_level(logging.WARNING, "ft_lightning"):
        for batch in loader:
            seen.append(float(batch[0]))
            fabric.backward(model(batch).square().mean())
            if len(seen) == 2:
                fabric.strategy.manager.report_error(RuntimeError("injected"))
            optimizer.step()
    assert seen == [0.0, 2.0, 0.0, 2.0, 4.0]
    assert "starts over" in caplog.text


def test_data_that_fabric_does_not_know(fabric: Any) -> None:
    """The step begins at the forward."""
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for _ in range(3):
        fabric.backward(model(torch.ones(2, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert fabric.strategy.current_step == 3
