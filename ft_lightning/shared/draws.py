"""What a process that comes back takes of its peers' data besides the number of the batch.

Samplers with a generator of their own (`WeightedRandomSampler(..., generator=g)`), which goes on from epoch to
epoch: it has that at its start, and takes its peers' state of it. Streams, which no sampler places (iterable datasets,
and loaders of a class of their own): one that keeps its place has `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ft_core.heal import UnsupportedObjectError, pack

log = logging.getLogger("ft_lightning")


class Draws:
    """The orders that a sampler draws. Does nothing for one that has no such generator."""

    def __init__(self, sampler: Any) -> None:
        self._generator = _own_generator(sampler)
        self._before: Tensor | None = None  # the generator's, before the order under way was drawn
        self._next: Tensor | None = None

    def state(self) -> list[Tensor] | None:
        """The generator's state before the order under way was drawn, or is; and its present one."""
        if self._generator is None:
            return None
        now = self._generator.get_state()
        before = self._before if self._next is None else self._next
        return [now if before is None else before, now]

    def take(self, state: Sequence[Tensor] | None, *, ended: bool) -> None:
        """The next iteration has the order under way in `state`, of a peer or once more of this process. `ended`: that
        is over, and no item of it is asked for."""
        if self._generator is None or not state:
            return
        before, now = state
        self._next = None if ended else before
        if ended:
            self._generator.set_state(now)

    def follow(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The items of an iteration, which `begin()` begins. Some samplers draw the order there (torchdata's), and
        others with the first item that is asked for. A loader with workers begins two, and uses the second."""
        self._before = None
        if self._generator is None:
            return begin()
        if self._next is not None:
            self._generator.set_state(self._next)
        before = self._generator.get_state()
        items = begin()
        drawn = not torch.equal(before, self._generator.get_state())
        if drawn:
            self._before = before
        return self._drawn(items, drawn)

    def _drawn(self, items: Iterator[Any], already: bool) -> Iterator[Any]:
        assert self._generator is not None
        if not already:
            if self._next is not None:
                self._generator.set_state(self._next)
            self._before = self._generator.get_state()
        self._next = None
        yield from items


def _own_generator(sampler: Any) -> torch.Generator | None:
    """That of a sampler, or of the one that it takes its items from."""
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
        wrapped = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # by Lightning
        sampler = getattr(sampler, "sampler", wrapped)
    return None


# ---------------------------------------------------------------------- streams


def is_stream(loader: object) -> bool:
    """Whether no sampler says what `loader` gives."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def owner_of(loader: Any) -> Any | None:
    """What keeps the place in a stream: its loader, or a dataset that is read in this process; None: nothing does.

    As in Lightning's checkpoints the state is one for all shards: how far, not of what.
    """
    owners = [loader] if is_stream(loader) else []
    if owners and not getattr(loader, "num_workers", 0):
        owners.append(getattr(loader, "dataset", None))
    both = ("state_dict", "load_state_dict")
    return next((o for o in owners if all(hasattr(o, name) for name in both)), None)


def state_of(loader: Any) -> Any:
    """The place in a stream, a copy; None: it has none that is kept."""
    owner = owner_of(loader)
    return None if owner is None else copy.deepcopy(owner.state_dict())


def travelling(state: Any) -> Any:
    """`state`; None, and a warning, if it can't be sent to a peer."""
    try:
        pack(state)
    except UnsupportedObjectError as error:
        log.warning("the state of a training data loader cannot travel: %s", error)
        return None
    return state
