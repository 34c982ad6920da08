"""The training data at the right place: the boundary before each batch, and jumps within an epoch.

Two objects of Lightning get a subclass of their own class while a fit lasts (both are undone by
`Batches.release`):

- the data fetcher calls `at_boundary` before it fetches. There a step begins and a replica group
  heals: counters are whole, and batch, batch index and "last batch" that Lightning computes next
  are already those of the healed position. (At `on_train_batch_start` they would be stale.)
- the sampler of batches can be told to leave out the first n, which costs index arithmetic only,
  whatever sampler or batch sampler the user chose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ft_lightning import position

log = logging.getLogger("ft_lightning")


class _Boundary:
    """Mixin of a data fetcher."""

    _ft_at_boundary: Callable[[], None]

    def __next__(self) -> Any:
        try:
            self._ft_at_boundary()
        except StopIteration as error:
            # Lightning would take it for the end of the epoch and go on in silence.
            raise RuntimeError("StopIteration at a step's boundary") from error
        return super().__next__()  # type: ignore[misc]


class _Skipping:
    """Mixin of a (batch) sampler: its next iteration leaves out `_ft_skip` items."""

    _ft_skip = 0

    def __iter__(self) -> Iterator[Any]:
        skip, self._ft_skip = self._ft_skip, 0
        # Read now, skipped at the first `next`: loaders make an iterator long before they use it.
        return islice(super().__iter__(), skip, None)  # type: ignore[misc]


def _with(mixin: type, instance: Any) -> None:
    """Give `instance` a class that has `mixin` in front of its own."""
    cls = type(instance)
    if not issubclass(cls, mixin):
        instance.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def _without(mixin: type, instance: Any) -> None:
    if isinstance(instance, mixin):
        instance.__class__ = type(instance).__mro__[2]


class Batches:
    """The training data of one fit. `set_sampler_epoch(loader, epoch)` is Lightning's own."""

    def __init__(
        self, at_boundary: Callable[[], None], set_sampler_epoch: Callable[[Any, int], None]
    ) -> None:
        self._at_boundary = at_boundary
        self._set_sampler_epoch = set_sampler_epoch
        self._samplers: list[Any] = []
        self._fetchers: list[Any] = []
        self._warned = False

    def adopt_loader(self, loader: object) -> None:
        """Make a training data loader's position choosable."""
        sampler = self._index_sampler(loader)
        if sampler is not None and not isinstance(sampler, _Skipping):
            _with(_Skipping, sampler)
            self._samplers.append(sampler)

    def adopt_fetcher(self, fetcher: Any) -> None:
        """Have `at_boundary` called before each of its batches."""
        if not isinstance(fetcher, _Boundary):
            fetcher._ft_at_boundary = self._at_boundary
            _with(_Boundary, fetcher)
            self._fetchers.append(fetcher)

    def jump(self, trainer: Any) -> None:
        """Make the next batch that is fetched the one at which the loops' counters stand."""
        fit_loop = trainer.fit_loop
        done = position.batches_done(trainer)
        for loader in fit_loop._combined_loader.flattened:
            self._set_sampler_epoch(loader, position.epoch(trainer))
            sampler = self._index_sampler(loader)
            if sampler is None:
                self._warn_unplaceable(loader)
                continue
            # A shorter loader may have started over within the epoch.
            sampler._ft_skip = done % len(loader) if len(loader) else 0
        fetcher = fit_loop._data_fetcher
        iter(fetcher)
        fetcher.fetched += done
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length

    def release(self) -> None:
        """Give fetchers and samplers their own classes back."""
        for sampler in self._samplers:
            _without(_Skipping, sampler)
            sampler.__dict__.pop("_ft_skip", None)
        for fetcher in self._fetchers:
            _without(_Boundary, fetcher)
            fetcher.__dict__.pop("_ft_at_boundary", None)
        self._samplers.clear()
        self._fetchers.clear()

    @staticmethod
    def _index_sampler(loader: object) -> Any | None:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler

    def _warn_unplaceable(self, loader: object) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "after a heal the data of %s goes on from where this process's own iterator "
                "starts: an iterable has no position to restore, so some samples are seen twice "
                "or not at all in this epoch",
                type(loader).__name__,
            )
