"""What a process that comes back takes of its peers' data besides the number of the batch.

The orders that a sampler draws, from a generator of its own that goes on from epoch to epoch
(`WeightedRandomSampler(..., generator=g)`) or from torch's: it has that at its start, and takes its peers' state of it.
Streams, which no sampler places (iterable datasets, and loaders of a class of their own): one that keeps its place has
`state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ft_core.data import is_stream_of_datasets
from ft_core.heal import UnsupportedObjectError, pack
from ft_core.heal.random_numbers import seed_of, unchanged

log = logging.getLogger("ft_lightning")

OWN_ORDER = (
    "the training data of this process are in an order of their own, drawn from a seed that its peers have not: which "
    "of them it had read in this epoch is not known, so some may be read twice in it, or not at all. With the same "
    "seed in all processes each is read once"
)


class Draws:
    """The orders that a sampler draws. Does nothing for one whose order follows from a seed and the epoch's number."""

    def __init__(self, sampler: Any) -> None:
        self._generator, self._divided = _source(sampler)
        self._is_torchs = self._generator is torch.default_generator
        self._before: Tensor | None = None  # the generator's, before the order under way was drawn
        self._next: Tensor | None = None
        self._after: Tensor | None = None  # where the generator is that `_next` was taken from
        self._lends = False  # this one is there, and drawing that order again does not move it

    @property
    def counts(self) -> bool:
        """Whether orders are drawn from a generator."""
        return self._generator is not None

    def state(self) -> list[Tensor] | None:
        """The generator's state before the order under way was drawn, or is; and its present one."""
        if self._generator is None:
            return None
        now = self._generator.get_state()
        if self._next is not None:
            late = self._after if not self._is_torchs and not self._lends else None
            return [self._next, now if late is None else late]
        return [now if self._before is None else self._before, now]

    def take(self, state: Sequence[Tensor] | None, *, ended: bool) -> None:
        """The next iteration has the order under way in `state`, of a peer or once more of this process. `ended`: that
        is over, and no item of it is asked for.

        A process whose data are its own, as is its seed, keeps its order."""
        if self._generator is None or not state:
            return
        before, now = state
        self._after, self._lends = None, False
        if not self._divided and seed_of(before) != self._generator.initial_seed():
            log.warning(OWN_ORDER)
            return
        self._next, self._after = None if ended else before, now
        if ended and not self._is_torchs:  # torch's is not only for this sampler
            self._generator.set_state(now)

    def begun(self) -> None:
        """The loader's iterator is there, for which torch has drawn, too: the generator goes on where the peer's is,
        which may have drawn for other loaders since."""
        if self._generator is not None and self._after is not None and not self._is_torchs:
            self._generator.set_state(self._after)
            self._lends = True

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """What is drawn here is of no order that counts."""
        if self._generator is None:
            yield
            return
        kept, now = (self._before, self._next), self._generator.get_state()
        try:
            yield
        finally:
            self._before, self._next = kept
            self._generator.set_state(now)

    def begin(self) -> None:
        """An epoch begins, whose order is not drawn yet."""
        self._before = None

    def follow(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The items of an iteration, which `begin()` begins. Some samplers draw the order there (torchdata's), and
        others with the first item that is asked for. A loader with workers begins two, and uses the second."""
        self.begin()
        if self._generator is None:
            return begin()
        with self._drawing():
            before = self._generator.get_state()
            items = begin()
            drawn = not torch.equal(before, self._generator.get_state())
        if drawn:
            self._before = before
        return self._drawn(items, drawn)

    def _drawn(self, items: Iterator[Any], already: bool) -> Iterator[Any]:
        assert self._generator is not None
        first: list[Any] = []
        if not already:
            with self._drawing():
                self._before = self._generator.get_state()
                self._next = None
                first.extend(itertools.islice(items, 1))
        self._next = None
        yield from first
        yield from items

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """An order is drawn, which may be one that a peer has drawn. Torch's generator is only lent for that, unless
        it is where the peer's was: what else this process draws is not the peer's. So is one that has begun."""
        assert self._generator is not None
        again, now = self._next, self._generator.get_state()
        with contextlib.ExitStack() as lent:
            if again is not None and not torch.equal(again, now):
                if self._is_torchs:
                    lent.enter_context(unchanged())
                elif self._lends:
                    lent.callback(self._generator.set_state, now)
                self._generator.set_state(again)
            yield


def _source(sampler: Any) -> tuple[torch.Generator | None, bool]:
    """What a sampler draws its orders from, or the one that it takes its items from does; None: nothing, or only a
    seed and the epoch's number. And whether processes divide its items, so that all must draw alike."""
    divided, last, seen = False, None, set()
    while sampler is not None and id(sampler) not in seen:  # one may refer to itself
        seen.add(id(sampler))
        last, divided = sampler, divided or isinstance(sampler, DistributedSampler)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator, divided
        wrapped = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # by Lightning
        sampler = getattr(sampler, "sampler", wrapped)
    if last is None or isinstance(last, (DistributedSampler, SequentialSampler)):
        return None, divided
    return torch.default_generator, divided


# ---------------------------------------------------------------------- streams


def is_stream(loader: object) -> bool:
    """Whether no sampler says what `loader` gives."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


_placed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Streams of the library `datasets` that were brought to a place: they would begin each later pass there."""


def _owner_of(loader: Any) -> Any | None:
    """What keeps the place in a stream: its loader, or a dataset that is read in this process; None: nothing does."""
    owners = [loader] if is_stream(loader) else []
    if owners and not getattr(loader, "num_workers", 0):
        owners.append(getattr(loader, "dataset", None))
    both = ("state_dict", "load_state_dict")
    return next((o for o in owners if all(hasattr(o, name) for name in both)), None)


def _of_datasets(loader: Any) -> Any | None:
    """The stream of the library `datasets` that `loader` reads, or is; None: there is none."""
    both = (loader, getattr(loader, "dataset", None))
    return next(filter(is_stream_of_datasets, both), None)


def state_of(loader: Any, *, begun: bool = True) -> Any:
    """The place in a stream, a copy; None: it has none that is kept. `begun`: a pass is; or else the next one is to
    begin.

    As in Lightning's checkpoints the state is one for all shards: how far, not of what.
    """
    owner = _owner_of(loader)
    if owner is None:
        return None
    stream = _of_datasets(loader)
    if stream is None:
        return copy.deepcopy(owner.state_dict())
    at = copy.deepcopy(owner.state_dict()) if begun else None
    return {"at": at, "epoch": stream.epoch}  # of another epoch it would not take a state


def bring(loader: Any, state: Any) -> bool:
    """Let the next pass over a stream begin where `state_of` was called. False: that is not known, or the stream does
    not keep its place."""
    owner = _owner_of(loader)
    if owner is None or state is None:
        return False
    stream = _of_datasets(loader)
    if stream is not None:
        begin_pass(loader)
        stream.set_epoch(state["epoch"])
        state = state["at"]
        if state is None:
            return True
        _placed.add(stream)
    owner.load_state_dict(state)
    return True


def begin_pass(loader: Any) -> None:
    """The next pass over a stream begins as it would if it had not been brought to a place in an earlier one."""
    stream = _of_datasets(loader)
    if stream is not None and stream in _placed:
        _placed.discard(stream)
        stream.load_state_dict({})
        owner = _owner_of(loader)
        if owner is not None:  # torchdata's loader, which loads its state into the stream
            owner.load_state_dict({})


def travelling(state: Any) -> Any:
    """`state`; None, and a warning, if it can't be sent to a peer."""
    try:
        pack(state)
    except UnsupportedObjectError as error:
        log.warning("the state of a training data loader cannot travel: %s", error)
        return None
    return state
