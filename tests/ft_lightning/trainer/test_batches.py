"""Where several training loaders go on after a heal: with Lightning's own `CombinedLoader` and fetcher."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from ft_lightning.trainer.batches import Batches

BATCHES = (7, 3)
"""Of the two loaders in an epoch."""


def epoch(mode: str) -> Any:
    """A fit loop before an epoch's first batch."""
    loaders = [
        DataLoader([f"{name}{i}" for i in range(n)], 1)
        for name, n in zip("ab", BATCHES, strict=True)
    ]
    fetcher = _PrefetchDataFetcher()
    combined = CombinedLoader(loaders, mode)
    fetcher.setup(combined)
    iter(fetcher)
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
    whole = rest(epoch(mode))
    fit_loop = epoch(mode)
    batches = Batches(lambda loader, number: None)
    for loader in fit_loop._combined_loader.flattened:
        batches.adopt_loader(loader)
    fit_loop.epoch_loop.batch_progress.current.ready = done
    if done < len(whole):
        batches.jump(SimpleNamespace(fit_loop=fit_loop))
        assert rest(fit_loop) == whole[done:]
