"""Passes over prepared data loaders: real, fast-forwarded, or real from the middle on."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import get_sampler
from accelerate.utils import send_to_device

from ft_accelerate.runtime.divided_data import (
    draws_from_torch,
    generator_of,
    index_sampler,
    is_stateful,
    read_as,
    refuse_uneven,
    seeded_sampler,
    stateful_dataset,
    tell_rest,
)
from ft_accelerate.runtime.process import active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import Phase
from ft_accelerate.runtime.world_collectives import take_main

Original = Callable[[Any], Iterator[Any]]

_LoaderState = dict[str, Any] | None
_COUNTS = ("_num_yielded", "_sampler_iter_yielded")
_POSITIONS_OF_OTHERS = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "fetcher_state",
    "dataset_state",
)
"""Of torchdata's states: where all of these are None, the counts alone give a place."""

SHOWN_BATCHES = 1
"""How many batches of an evaluation a fast-forwarding script sees, and of an epoch that it need not run
through: enough for its variables to exist."""

_later_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Prepared in mid-training."""

_drawn_early: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()
"""Of each loader whose first pass has its order since it was prepared: what its generator was before."""

_passed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Over which this process, or its peers where it has come to them, have begun a pass."""

_first_batches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Of each loader that was fast-forwarded."""


def before_preparing(loader: Any) -> torch.Tensor | None:
    """What the generator that shuffles a loader of the script is before it is prepared; None: Accelerate makes one."""
    generator = getattr(get_sampler(loader), "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def prepared(runtime: Runtime, loader: Any, before: torch.Tensor | None) -> None:
    """The script has prepared a loader. In mid-training (the next fold's, say) its order was drawn by each
    process on its own, and one that has come back draws otherwise.

    A stateful loader has made an iterator, whose workers are asked for their first batches at once: the order of its
    first pass comes from what the generator was `before`."""
    generator = generator_of(loader)
    if generator is not None and is_stateful(loader) and loader.base_dataloader.num_workers:
        if before is None:  # it was made with that seed
            made = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            before = made.get_state()
        _drawn_early[loader] = before
    if runtime.manager is not None and (generator_of(loader) or seeded_sampler(loader)):
        _later_loaders.add(loader)


def passed(loader: Any) -> bool:
    """Whether a pass over this loader was begun."""
    return loader in _passed


def peers_have_passed(loader: Any) -> None:
    """They have begun a pass over it, which this process may have left out."""
    _passed.add(loader)


def iterate(runtime: Runtime, original: Original, loader: Any) -> Iterator[Any]:
    """`DataLoaderShard.__iter__`; the pass begins when its first batch is asked for."""
    yield from _Pass(runtime, original, loader).batches()


class _Pass:
    """One pass over `loader`. Each request for a batch may begin a window, heal, or arrive."""

    def __init__(self, runtime: Runtime, original: Original, loader: Any) -> None:
        self._runtime, self._original, self._loader = runtime, original, loader
        if runtime.prepared.training:
            refuse_uneven(loader)
        self._is_first = loader not in _passed
        _passed.add(loader)
        self._draws_from_torch = draws_from_torch(loader)
        self._generator = (
            torch.default_generator if self._draws_from_torch else generator_of(loader)
        )
        self._early = _drawn_early.pop(loader, None)
        state = None if self._generator is None else self._order_begins_at(self._generator)
        self._resumed = _take_resumed(loader)
        left_out = _done_in(self._resumed) + _skipped(loader)
        self._iteration = runtime.position.begin(state, left_out)
        self._length = _length(loader)
        self._iteration.length = self._length
        self._share = -1
        """Of the data, which is read."""
        self._others_between = False
        """Whether the script has asked other loaders for batches between two of this pass: it does not run through the
        pass at once, as an evaluation does."""

    def batches(self) -> Iterator[Any]:
        """What the script gets."""
        runtime, loader, position = self._runtime, self._loader, self._runtime.position
        iteration, length = self._iteration, self._length
        real: Iterator[Any] | None = None
        try:
            while True:
                runtime.at_fetch(loader, iteration)
                if position.phase is Phase.FAST_FORWARD:
                    if real is not None:
                        real.close()  # type: ignore[attr-defined]
                        real = None
                    if self._fast_forward_is_over():
                        break
                    batch = self._first_batch()
                else:
                    if real is not None and self._share != runtime.group_ranks.share:
                        real.close()  # type: ignore[attr-defined]
                        real = None  # it goes on with the share of another group
                        position.generator_states[iteration.seq] = iteration.generator_state
                    if real is None:
                        if iteration.begun and iteration.yielded == length:
                            _end(loader)
                            break
                        real = self._start()
                    try:
                        batch = next(real)
                    except StopIteration:
                        break
                    if loader.end_of_dataloader:
                        tell_rest(loader)
                iteration.yielded += 1
                position.batches += 1
                given = position.batches
                yield batch
                self._others_between |= position.batches != given
        finally:
            if real is not None:
                real.close()  # type: ignore[attr-defined]
            position.finish(iteration, has_length=length is not None)

    def _order_begins_at(self, generator: torch.Generator) -> torch.Tensor:
        """What the generator is before it draws the order of this pass."""
        return generator.get_state() if self._early is None else self._early.clone()

    def _take_order_of_main(self) -> None:
        """Each process has drawn the order of this pass on its own."""
        if self._generator is not None:
            state = self._order_begins_at(self._generator)
            take_main(state)
            self._generator.set_state(state)
            self._iteration.generator_state = state
        elif (sampler := seeded_sampler(self._loader)) is not None:
            seed = torch.tensor(divmod(sampler.initial_seed, 1 << 32))
            take_main(seed)
            sampler.initial_seed = (int(seed[0]) << 32) + int(seed[1])

    def _start(self) -> Iterator[Any]:
        """The real batches, from this pass's position on."""
        loader, iteration = self._loader, self._iteration
        self._share = self._runtime.group_ranks.share
        drawn = self._runtime.drawn_before_fetch()
        read_as(loader, self._runtime.process_index, self._runtime.num_processes)
        skip, own = iteration.yielded - iteration.left_out, torch.get_rng_state()
        state = self._runtime.position.generator_states.pop(iteration.seq, None)
        if self._generator is not None and state is not None:
            self._generator.set_state(state)
            iteration.generator_state = state
        # In each pass: what is the first one of a process that comes back is a later one of its peers.
        takes = not iteration.yielded and (self._draws_from_torch or loader in _later_loaders)
        if takes:
            self._take_order_of_main()
        lent = self._draws_from_torch and not torch.equal(own, iteration.generator_state)
        # Within a pass its peers draw nothing here. A script that resumes there has nothing to skip.
        within = iteration.yielded and iteration.seq in self._runtime.position.begun_before
        keeps_own = lent or skip or within
        if is_stateful(loader):
            batches = self._start_stateful(anew=bool(takes or keeps_own or state is not None))
            return _drawn(batches, own) if keeps_own else batches
        sampler = index_sampler(loader)
        self._draw_as_peers(sampler)
        if skip and sampler is None:
            return _drawn(_later(self._original(loader), skip), own)
        if skip and sampler is not None:
            sampler._ft_skip = skip
        reads_here = not (loader.base_dataloader.num_workers or lent)
        if sampler is not None and reads_here and iteration.yielded and drawn is not None:
            sampler._ft_draws = _skipped(loader), drawn, own
            return self._original(loader)
        return _drawn(self._original(loader), own) if keeps_own else self._original(loader)

    def _draw_as_peers(self, sampler: Any | None) -> None:
        """Torch draws a number when it makes a loader's iterator: for persistent workers once, in the first pass."""
        base = self._loader.base_dataloader
        if sampler is None or not base.persistent_workers:
            return
        if self._is_first:
            base._iterator = None
        elif base._iterator is None:  # that pass was fast-forwarded
            drawn = [g for g in (self._generator, base.generator, torch.default_generator) if g]
            states = [generator.get_state() for generator in drawn]
            sampler._ft_skip = sys.maxsize  # it loads nothing
            iter(base)
            for generator, state in zip(drawn, states, strict=True):
                generator.set_state(state)

    def _start_stateful(self, *, anew: bool) -> Iterator[Any]:
        """Move the loader itself to its position, so that its own state tells that position.

        `anew`: not with the iterator that it has (it made one when it was first asked for its state, and keeps one
        with persistent workers), whose order is drawn. Else with that one, as without us: to make another one takes
        a random number.
        """
        loader, iteration, resumed = self._loader, self._iteration, self._resumed
        skip = iteration.yielded - iteration.left_out
        state = resumed or loader.dl_state_dict
        if skip and all(state.get(name, 0) is None for name in _POSITIONS_OF_OTHERS):
            done = _done_in(resumed) + skip
            resumed = {**state, **dict.fromkeys(_COUNTS, done), "_iterator_finished": False}
            skip = 0
        if resumed or anew:
            loader.base_dataloader.load_state_dict(resumed or {})
        return _later(self._original(loader), skip)

    def _fast_forward_is_over(self) -> bool:
        """Whether a fast-forwarded pass has no more batches; keeps what Accelerate knows of the pass."""
        loader, iteration, length = self._loader, self._iteration, self._length
        position = self._runtime.position
        if not iteration.begun:
            loader.begin()
        if length is None:
            length = position.lengths.get(iteration.seq)
        whole = length
        not_all = position.entry is not None and not position.in_loop
        evaluates = not self._runtime.prepared.training and not self._others_between
        evaluates = evaluates and not self._runtime.past.within(iteration.seq)
        if not_all or evaluates:
            some = iteration.left_out + SHOWN_BATCHES
            length = some if length is None else min(some, length)
        if length is not None and iteration.yielded >= length:
            position.batches += max(0, (whole or 0) - iteration.yielded)
            _end(loader)
            return True
        loader.end_of_dataloader = length is not None and iteration.yielded == length - 1
        return False

    def _first_batch(self) -> Any:
        """The loader's first batch, always the same."""
        loader, generator = self._loader, self._generator
        if loader not in _first_batches:
            before = None if generator is None else generator.get_state()
            dataset = stateful_dataset(loader)
            place = None if dataset is None else copy.deepcopy(dataset.state_dict())
            if is_stateful(loader):
                batch = next(iter(loader.base_dataloader))
                loader.base_dataloader.load_state_dict({})  # forget it
            else:
                alone = copy.copy(loader.base_dataloader)
                alone._iterator = None  # its workers go with it
                batch = next(iter(alone))
            if dataset is not None:  # which has gone on
                dataset.load_state_dict(place)
            if generator is not None and before is not None:
                generator.set_state(before)
            if loader.device is not None:
                batch = send_to_device(batch, loader.device)
            _first_batches[loader] = batch
        return _first_batches[loader]


def _drawn(batches: Iterator[Any], own: torch.Tensor) -> Iterator[Any]:
    """`batches`, with the first of which others' order is drawn, or once more this pass's: then this process has its
    random numbers back."""
    try:
        first = next(batches)
    except StopIteration:
        return
    finally:
        torch.set_rng_state(own)
    yield first
    yield from batches


def _end(loader: Any) -> None:
    """What Accelerate does at the end of a pass."""
    loader.iteration += 1
    loader.end()


def _later(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """`batches` from number `skip` on, where only fetching tells which those are."""
    for index, batch in enumerate(batches):
        if index >= skip:
            yield batch


def skip_batches(original: Original, sampler: Any) -> Iterator[Any]:
    """`BatchSamplerShard.__iter__`: leaves out as many batches as `_ft_skip` says, once.

    A loader without workers reads a batch when it has its indices, and may draw for it (masked language models): that
    was one batch before it is asked for, with the random numbers of then. `_ft_draws`: how many batches
    `skip_first_batches` leaves out, and the peers' random numbers where the one behind was read, and where it was
    asked for; once.
    """
    # Not before the first batch is asked for: a loader with workers makes two iterators, and uses the second.
    batches = islice(original(sampler), sampler.__dict__.pop("_ft_skip", 0), None)
    left_out, read, asked = sampler.__dict__.pop("_ft_draws", (-1, None, None))
    for index, batch in enumerate(batches):
        if index == left_out:
            torch.set_rng_state(read)
        sampler._ft_drawn = torch.get_rng_state()
        yield batch
        if index == left_out:
            torch.set_rng_state(asked)


def _take_resumed(loader: Any) -> _LoaderState:
    """The state with which a checkpoint lets this pass begin, which is used once."""
    if not is_stateful(loader):
        return None
    base = loader.base_dataloader
    resumed: _LoaderState = base.next_iter_state
    base.next_iter_state = None
    return resumed


def _done_in(resumed: _LoaderState) -> int:
    """Batches that the pass of this state had yielded before."""
    if resumed is None or resumed.get("_iterator_finished"):
        return 0  # the next pass begins anew
    if "_num_yielded" in resumed:
        return int(resumed["_num_yielded"])
    return int(resumed["_snapshot"]["_snapshot_step"]) + int(resumed["_steps_since_snapshot"])


def _skipped(loader: Any) -> int:
    """Batches that `skip_first_batches` leaves out of each pass: by the sampler, or of a stream when they are read."""
    return _skipped_by_index(loader) + int(getattr(loader, "skip_batches", 0))


def _skipped_by_index(loader: Any) -> int:
    from accelerate.data_loader import SkipBatchSampler

    skipped = 0
    for sampler in (loader.batch_sampler, loader.sampler):
        while isinstance(sampler, SkipBatchSampler):
            skipped += sampler.skip_batches
            sampler = sampler.batch_sampler
    return skipped


def _length(loader: Any) -> int | None:
    """Batches of a pass, with those that are left out; None: the loader has no length."""
    try:
        return len(loader) + _skipped_by_index(loader)
    except Exception:  # of the script's own, whose data may raise what it likes
        return None


# ---------------------------------------------------------------- epochs of a raw loop


class Epochs:
    """Epochs and batches of a raw loop, whose process comes back at its peers' place at once.

        for epoch in (epochs := ft_accelerate.epochs(10)):
            for index, batch in epochs.batches(loader):

    The object tells the runtime where each epoch begins. So a script that comes back runs through the
    first batch and the end of the epoch in which it learns where its peers are, and its next epoch is
    theirs, at the batch where they are.

    The numbers from `start` to `total`, as `range` has them, except that a process which comes
    back goes on with its peers' epoch. The loop's thread only.

    What the script keeps in variables of its own is what it was at the start, and not what it would
    be after the epochs that are left out: register it for checkpointing
    (`accelerator.register_for_checkpointing`), prepare schedulers, or compute it from `epoch` and the
    index of the batch.

    Args:
        total: the epoch at which the training ends.
        start: where the script begins, if it resumes by itself.
    """

    def __init__(self, total: int, start: int = 0) -> None:
        self._total, self._start = total, start

    def __iter__(self) -> Iterator[int]:
        number, runtime = self._start, active()
        while number < self._total:
            if runtime is None:
                yield number
                number += 1
            else:
                position, loaders = runtime.position, runtime.prepared.loaders
                position.begin_epoch(number, *(loader.iteration for loader in loaders))
                yield number
                number = _next(runtime, number + 1)

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """`enumerate(loader)`, for a prepared loader: a process that comes back goes on with the index
        of its peers' batch."""
        runtime, iteration = active(), None
        for index, batch in enumerate(loader):
            if runtime is not None and index == 0:
                iteration = runtime.position.active[-1] if runtime.position.active else None
            yield index if iteration is None else iteration.yielded - iteration.left_out - 1, batch


def _next(runtime: Runtime, number: int) -> int:
    """The epoch after those that the script has done: `number`, or that of its peers."""
    entry = runtime.position.entry
    if entry is None or entry.number < number:
        return number
    runtime.position.enter(entry)
    for loader, iteration in zip(runtime.prepared.loaders, entry.counts, strict=False):
        loader.iteration = iteration
    return entry.number


def epochs(total: int, start: int = 0) -> Epochs:
    """`for epoch in epochs(10)`: see `Epochs`. Without fault tolerance it is `range(start, total)`."""
    return Epochs(total, start)
