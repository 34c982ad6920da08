"""Where several training loaders go on after a heal: with Lightning's own `CombinedLoader` and fetcher."""

from __future__ import annotations

import contextlib
import fcntl
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

from ft_lightning.trainer.batches import Batches, Preparing
from lighthouse.files import machine_file

BATCHES = (7, 3)
"""Of the two loaders in an epoch."""


def epoch(mode: str, **workers: Any) -> Any:
    """A fit loop before an epoch's first batch."""
    loaders = [
        DataLoader([f"{name}{i}" for i in range(n)], 1, **workers)
        for name, n in zip("ab", BATCHES, strict=True)
    ]
    fit_loop = epoch_of(loaders, mode)
    iter(fit_loop._data_fetcher)
    return fit_loop


def epoch_of(loaders: Any, mode: str = "min_size") -> Any:
    fetcher = _PrefetchDataFetcher()
    combined = CombinedLoader(loaders, mode)
    fetcher.setup(combined)
    return SimpleNamespace(
        _combined_loader=combined,
        _data_fetcher=fetcher,
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0)),
        epoch_loop=SimpleNamespace(
            batch_progress=SimpleNamespace(current=SimpleNamespace(ready=0))
        ),
    )


def rest(fit_loop: Any) -> list[Any]:
    """What is left of the epoch."""
    found = []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(next(fit_loop._data_fetcher)[0])
    return found


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
@pytest.mark.parametrize("done", [1, 2, 3, 5, 6])
def test_several_loaders_go_on_where_a_peers_are(mode: str, done: int) -> None:
    goes_on_where_a_peer_is(mode, done)


@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_with_workers_go_on_where_a_peers_are(persistent: bool) -> None:
    """They began anew: the iterator that left out the first batches was the one that such a loader does not use."""
    goes_on_where_a_peer_is("max_size", 2, num_workers=1, persistent_workers=persistent)


def goes_on_where_a_peer_is(mode: str, done: int, **workers: Any) -> None:
    whole = rest(epoch(mode))
    fit_loop = epoch(mode, **workers)
    batches = Batches(lambda loader, number: None)
    for loader in fit_loop._combined_loader.flattened:
        batches.adopt_loader(loader)
    fit_loop.epoch_loop.batch_progress.current.ready = done
    if done < len(whole):
        batches.jump(SimpleNamespace(fit_loop=fit_loop))
        assert rest(fit_loop) == whole[done:]
        iter(fit_loop._data_fetcher)
        assert rest(fit_loop) == whole, "the next epoch"


class Placed(IterableDataset[Any]):
    """Keeps its place, where it is read in this process."""

    def __init__(self) -> None:
        self.at = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < 6:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class OfKnownLength(Placed):
    def __len__(self) -> int:
        return 6


def of_datasets() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": range(6)}).to_iterable_dataset()


@pytest.mark.parametrize("kind", [Placed, OfKnownLength, of_datasets])
def test_an_epoch_of_a_stream_goes_on_where_it_was_saved(kind: Callable[[], Any]) -> None:
    """Lightning keeps the place of a loader, and not of its dataset. One of unknown length is read ahead. Later epochs
    are whole."""

    def begun(done: int) -> tuple[Any, Batches]:
        loop = epoch_of(DataLoader(kind(), 1))
        loop.epoch_loop.batch_progress = SimpleNamespace(
            current=SimpleNamespace(ready=done, completed=done), is_last_batch=False
        )
        loop.epoch_loop.restarted_on_train_batch_end = False
        loop.restarted_mid_epoch = done > 0
        batches, trainer = Batches(lambda loader, number: None), SimpleNamespace(fit_loop=loop)
        (loader,) = loop._combined_loader.flattened
        batches.adopt_loader(loader)
        batches.begin_epoch(trainer)
        iter(loop._data_fetcher)
        return trainer, batches

    def read(trainer: Any) -> list[int]:
        items = rest(trainer.fit_loop)
        return [int(item["x"] if isinstance(item, dict) else item) for item in items]

    trainer, batches = begun(0)
    for _ in range(2):
        next(trainer.fit_loop._data_fetcher)
        trainer.fit_loop.epoch_loop.batch_progress.current.ready += 1
    saved = pickle.loads(pickle.dumps(batches.read_so_far(trainer)))
    left = read(trainer)
    trainer, batches = begun(2)
    assert batches.resume(trainer, saved, same_world=True)
    assert batches.states(trainer, mark=True) == saved["streams"]  # for a peer that heals at once
    batches.begin(trainer)
    assert batches.states(trainer, mark=True) == saved["streams"]
    assert read(trainer) == left == [2, 3, 4, 5]
    for _ in range(2):
        batches.begin_epoch(trainer)
        iter(trainer.fit_loop._data_fetcher)
        assert read(trainer) == [0, 1, 2, 3, 4, 5]


def _is_locked(subject: str) -> bool:
    with machine_file("ft_lightning", subject, "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Prepared:
    subject, locked = "", False

    def prepare_data(self) -> None:
        pickle.dumps(self)  # as for a pool of processes that downloads
        self.locked = _is_locked(self.subject)


class PreparedModule(Prepared, LightningModule):
    pass


class PreparedData(Prepared, LightningDataModule):
    pass


def test_module_and_datamodule_prepare_while_no_other_process_of_the_machine_does(
    tmp_path: Path,
) -> None:
    subject = str(tmp_path)
    owners = [PreparedData(), PreparedModule()]
    plain = LightningModule()
    preparing = Preparing(subject, *owners, plain, None)
    assert not is_overridden("prepare_data", plain)
    for owner in owners:
        assert is_overridden("prepare_data", owner)
        owner.subject = subject
        owner.prepare_data()
        assert owner.locked and not _is_locked(subject)
    preparing.release()
    assert all("prepare_data" not in vars(owner) for owner in (*owners, plain))
    machine_file("ft_lightning", subject, "lock").unlink()
