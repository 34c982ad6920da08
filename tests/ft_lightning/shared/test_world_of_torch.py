"""What code is told that asks torch.distributed for the world: samplers, and losses that reduce over it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ft_lightning.shared import world_of_torch
from ft_lightning.shared.world_of_torch import divide_anew, stand_in

DATA: Any = list(range(12))


class Strategy(SimpleNamespace):
    """Of the second of three processes."""

    divides_now = True
    is_in_step = False
    distributed_sampler_kwargs = {"num_replicas": 3, "rank": 1}  # noqa: RUF012
    scope = SimpleNamespace(num_groups=3, rank=0)


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Strategy:
    monkeypatch.setattr(world_of_torch, "_newest", [])
    monkeypatch.setattr(world_of_torch, "_told", set())
    made = Strategy()
    stand_in(made)
    return made


class OfLibrary(DistributedSampler[int]):
    """Knows nothing of the number of processes."""

    def __init__(self, dataset: Dataset[int], batch_size: int, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.batch_size = batch_size


@pytest.mark.parametrize(
    "make",
    [lambda: DistributedSampler(DATA, shuffle=False), lambda: OfLibrary(DATA, 2, shuffle=False)],
)
def test_a_sampler_divides_as_the_strategy_says(strategy: Strategy, make: Any) -> None:
    assert list(make()) == DATA[1::3]


def test_what_a_sampler_is_told_counts(strategy: Strategy) -> None:
    assert list(DistributedSampler(DATA, 2, 0, False)) == DATA[::2]


def test_outside_of_a_run_torch_says_what_it_lacks(strategy: Strategy) -> None:
    strategy.divides_now = False
    with pytest.raises(ValueError, match="process group"):
        DistributedSampler(DATA)


def test_an_evaluation_reads_all(strategy: Strategy) -> None:
    sampler: DistributedSampler[int] = DistributedSampler(DATA, drop_last=True, seed=5)
    sampler.set_epoch(3)
    loader: Any = DataLoader(DATA, batch_size=2, sampler=sampler)
    divide_anew(loader, 3, {"num_replicas": 1, "rank": 0})
    assert sorted(x for batch in loader for x in batch.tolist()) == DATA
    assert (sampler.epoch, sampler.seed, sampler.drop_last) == (3, 5, True)
    assert len(loader) == 6


def test_a_reduction_over_a_world_that_is_not_there_is_told_once(
    strategy: Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    def asks(module: str) -> bool:
        said: dict[str, Any] = {"__name__": module, "dist": dist}
        exec("there = dist.is_initialized()", said)
        return bool(said["there"])

    assert not asks("lightly.utils.dist")
    assert capsys.readouterr().err == "", "nothing is computed"
    strategy.is_in_step = True
    for module in ("torchmetrics.metric", "lightly.utils.dist", "lightly.loss.ntx_ent_loss"):
        assert not asks(module)
    (line,) = capsys.readouterr().err.splitlines()
    assert "lightly.utils.dist asks torch.distributed for other processes within a step" in line
