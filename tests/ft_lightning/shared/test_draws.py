"""A sampler with a generator of its own, in a process that comes back: it draws its peers' orders, in the epoch under
way and in later ones. Lightning's loaders and fetcher, and ours for Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

from ft_lightning.fabric.loop_position import LoaderPlace, Progress, follow
from ft_lightning.trainer.batches import Batches
from tests.ft_lightning.trainer.test_batches import epoch_of, rest

SAMPLES = 8


class AtOnce(BatchSampler):
    """Draws when an iteration is made, and not with its first item: as torchdata's does."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__()))


Kind = tuple[int, type[BatchSampler]]
kinds = pytest.mark.parametrize("kind", list(product([0, 1], [BatchSampler, AtOnce])))


def drawing(kind: Kind) -> DataLoader[int]:
    """Its workers are seeded from the same generator."""
    workers, batches = kind
    generator = torch.Generator().manual_seed(3)
    drawn = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False, generator=generator)
    sampler = DistributedSamplerWrapper(drawn, num_replicas=1, rank=0, shuffle=False)
    return DataLoader(
        list(range(SAMPLES)),
        batch_sampler=batches(sampler, 1, False),
        generator=generator,
        num_workers=workers,
    )


class Trains:
    """A process under a Trainer."""

    def __init__(self, kind: Kind) -> None:
        self.fit_loop = epoch_of(drawing(kind))
        self.batches = Batches(lambda loader, number: None)
        (loader,) = self.fit_loop._combined_loader.flattened
        self.batches.adopt_loader(loader)
        iter(self.fit_loop._data_fetcher)
        self.trainer = SimpleNamespace(fit_loop=self.fit_loop)

    def next_epoch(self) -> None:
        self.fit_loop.epoch_progress.current.processed += 1
        iter(self.fit_loop._data_fetcher)

    def read(self, number: int) -> list[Any]:
        return [next(self.fit_loop._data_fetcher)[0].item() for _ in range(number)]


@kinds
@pytest.mark.parametrize("done", [0, 3, SAMPLES])
def test_under_a_trainer(kind: Kind, done: int) -> None:
    peer, late = Trains(kind), Trains(kind)
    assert sorted(peer.read(SAMPLES)) == list(range(SAMPLES))
    peer.next_epoch()
    peer.read(done)
    late.fit_loop.epoch_progress.current.processed = 1
    late.fit_loop.epoch_loop.batch_progress.current.ready = done
    late.batches.jump(late.trainer, peer.batches.states(peer.trainer, mark=False))
    left = rest(peer.fit_loop)
    assert rest(late.fit_loop) == left
    assert len(left) == SAMPLES - done
    for each in (peer, late):
        each.next_epoch()
    assert late.read(SAMPLES) == peer.read(SAMPLES)


@kinds
def test_under_a_trainer_that_begins_the_batches_of_an_epoch_anew(kind: Kind) -> None:
    """For another share of the data: a hot spare."""
    peer, spare = Trains(kind), Trains(kind)
    for each in (peer, spare):
        each.read(3)
    spare.fit_loop.epoch_loop.batch_progress.current.ready = 3
    spare.batches.jump(spare.trainer)
    assert rest(spare.fit_loop) == rest(peer.fit_loop)
    for each in (peer, spare):
        each.next_epoch()
    assert spare.read(SAMPLES) == peer.read(SAMPLES)


@kinds
@pytest.mark.parametrize("done", [1, 3, SAMPLES])
def test_in_a_fabric_loop(kind: Kind, done: int) -> None:
    def made() -> tuple[Any, Progress]:
        loader, progress = drawing(kind), Progress()
        place = LoaderPlace(loader=loader)
        progress.places = [place]
        follow(loader, place, boundary=lambda: None, set_epoch=lambda loader, epoch: None)
        return loader, progress

    (peer, said), (late, progress) = made(), made()
    assert sorted(int(x) for x in peer) == list(range(SAMPLES))
    under_way = iter(peer)
    for _ in range(done):
        next(under_way)
    progress.load_state_dict(said.state_dict())
    left = [int(x) for x in under_way]
    assert [int(x) for x in late] == left
    assert len(left) == SAMPLES - done
    assert [int(x) for x in late] == [int(x) for x in peer]
