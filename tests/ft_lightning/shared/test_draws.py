"""A sampler with a generator of its own, or with torch's, in a process that comes back: it draws its peers' orders, in
the epoch under way and in later ones. Lightning's loaders and fetcher, and ours for Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from ft_lightning.fabric.loop_position import LoaderPlace, Progress, follow
from ft_lightning.shared.draws import Draws
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
    late.batches.jump(late.trainer, peer.batches.states(peer.trainer, mark=True))
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


class Two:
    """A process under a Trainer with two loaders of different lengths, which draw from one generator: their own, or
    torch's. In its second epoch, `done` batches of which it has read."""

    def __init__(self, mode: str, torchs: bool, done: int) -> None:
        torch.manual_seed(3)
        generator = None if torchs else torch.Generator().manual_seed(3)
        loaders = [
            DataLoader(range(first, first + n), 1, shuffle=True, generator=generator)  # type: ignore[arg-type]
            for first, n in ((0, 3), (100, SAMPLES))
        ]
        self.fit_loop = epoch_of(loaders, mode)
        self.batches = Batches(lambda loader, number: None)
        for loader in self.fit_loop._combined_loader.flattened:
            self.batches.adopt_loader(loader)
        iter(self.fit_loop._data_fetcher)
        rest(self.fit_loop)
        self.next_epoch()
        for _ in range(done):
            next(self.fit_loop._data_fetcher)
        self.fit_loop.epoch_loop.batch_progress.current.ready = done
        self.trainer = SimpleNamespace(fit_loop=self.fit_loop)

    def next_epoch(self) -> None:
        self.fit_loop.epoch_progress.current.processed += 1
        iter(self.fit_loop._data_fetcher)

    def rest_of_two_epochs(self) -> list[Any]:
        left = rest(self.fit_loop)
        self.next_epoch()
        return [*left, *rest(self.fit_loop)]


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_two_loaders_that_draw_from_one_generator(mode: str, torchs: bool, window: int) -> None:
    """The peer gives its place before it fetches the next batch, or when it has fetched a window of batches, in
    which the shorter loader may have begun anew, in another order."""
    for done in range((3 if mode == "min_size" else SAMPLES) - window):
        whole = Two(mode, torchs, done).rest_of_two_epochs()
        peer = Two(mode, torchs, done)
        peer.batches.mark(peer.trainer)
        numbers = torch.get_rng_state()
        for _ in range(window):
            next(peer.fit_loop._data_fetcher)
        states = peer.batches.states(peer.trainer, mark=False)
        late = Two(mode, torchs, 0)
        late.fit_loop.epoch_loop.batch_progress.current.ready = done
        late.batches.jump(late.trainer, states)
        torch.set_rng_state(numbers)  # as it takes its peer's, too
        assert late.rest_of_two_epochs() == whole, done


@kinds
@pytest.mark.parametrize("done", [0, 1, 3, SAMPLES])
def test_in_a_fabric_loop(kind: Kind, done: int) -> None:
    def made() -> tuple[Any, Progress, list[Any]]:
        loader, progress, states = drawing(kind), Progress(), []
        place = LoaderPlace.of(loader)
        progress.places = [place]

        def before_batch() -> None:
            states.append(progress.state_dict())

        follow(
            loader, place, boundary=before_batch, in_past=lambda: False, set_epoch=lambda *_: None
        )
        return loader, progress, states

    (peer, theirs, states), (late, progress, _) = made(), made()
    assert sorted(int(x) for x in peer) == list(range(SAMPLES))
    under_way = iter(peer)
    order = [int(next(under_way)) for _ in range(max(done, 1))]
    # Before the first batch of an epoch its order is not drawn yet.
    progress.load_state_dict(theirs.state_dict() if done else states[SAMPLES])
    left = [*(order if done == 0 else []), *(int(x) for x in under_way)]
    assert [int(x) for x in late] == left
    assert len(left) == SAMPLES - done
    assert [int(x) for x in late] == [int(x) for x in peer]


def order_of(sampler: Any, draws: Draws) -> list[int]:
    return list(draws.follow(lambda: iter(sampler)))


@pytest.mark.parametrize("kind", [BatchSampler, AtOnce])
@pytest.mark.parametrize("divided", [True, False])
def test_torchs_generator_is_lent_for_the_order_under_way(
    kind: type[BatchSampler], divided: bool
) -> None:
    """What else this process draws is its own, until it takes its peers' numbers, too."""
    drawn: Any = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)
    if divided:
        drawn = DistributedSamplerWrapper(drawn, num_replicas=1, rank=0, shuffle=False)
    sampler = kind(drawn, 2, False)
    torch.manual_seed(3)
    peer, late = Draws(sampler), Draws(sampler)
    torch.rand(1)
    expected = order_of(sampler, peer)
    state = peer.state()
    torch.manual_seed(3)
    own = torch.rand(5)
    torch.manual_seed(3)
    late.take(state, ended=False)
    assert order_of(sampler, late) == expected
    assert torch.equal(torch.rand(5), own)
    assert late.state()[0].equal(state[0])  # type: ignore[index]
    assert order_of(sampler, late) != expected


def test_data_of_its_own_keep_their_own_order(caplog: pytest.LogCaptureFixture) -> None:
    """`use_distributed_sampler=False`, and a seed for each process: it would read samples twice in its peers' order."""

    def drawing(seed: int) -> BatchSampler:
        generator = torch.Generator().manual_seed(seed)
        return BatchSampler(RandomSampler(range(SAMPLES), generator=generator), 2, False)

    for seed, alike in ((4, False), (3, True)):
        theirs, mine, same = drawing(3), drawing(seed), drawing(seed)
        peer, late = Draws(theirs), Draws(mine)
        assert order_of(theirs, peer) != order_of(theirs, peer)
        caplog.clear()
        late.take(peer.state(), ended=False)
        under_way = order_of(mine, late)
        if alike:
            list(same)
        assert under_way == list(same)
        assert bool(caplog.messages) is not alike


class Wraps(BatchSampler):
    """A sampler of a script's own, which refers to itself, or to one that refers to it."""

    def __init__(self, inner: Any = None) -> None:
        self.sampler: Any = self if inner is None else inner

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[int(x)] for x in torch.randperm(SAMPLES)])


@pytest.mark.parametrize("both", [False, True])
def test_a_sampler_that_refers_to_itself(both: bool) -> None:
    """It draws from torch's generator, as far as can be told."""
    sampler = Wraps()
    if both:
        sampler.sampler = Wraps(sampler)
    assert Draws(sampler).counts
