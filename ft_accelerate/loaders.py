"""Passes over prepared data loaders: real, or a ghost's, and from one to the other within a pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from accelerate.utils import send_to_device

from ft_accelerate.course import Iteration, Phase
from ft_accelerate.runtime import Runtime
from ft_accelerate.state import generator_of

Original = Callable[[Any], Iterator[Any]]

EVALUATION_BATCHES = 1
"""What a ghost sees of an evaluation: enough for the script's variables to exist."""


class Passes:
    """Replaces `DataLoaderShard.__iter__`. `current()` gives the runtime."""

    def __init__(self, current: Callable[[], Runtime], original: Original) -> None:
        self._current, self._original = current, original
        self._first: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def iterate(self, loader: Any) -> Iterator[Any]:
        """One pass. Each request for a batch may begin a window, heal, or arrive."""
        runtime = self._current()
        course = runtime.course
        generator = generator_of(loader)
        iteration = course.begin(generator.get_state() if generator is not None else None)
        real: Iterator[Any] | None = None
        try:
            while True:
                runtime.at_fetch(loader, iteration)
                if course.work_is_ghost:
                    if real is not None:
                        real.close()  # type: ignore[attr-defined]
                        real = None
                    if self._ghost_is_over(runtime, loader, iteration):
                        break
                    batch = self._remembered(loader)
                else:
                    if real is None:
                        if self._is_over(loader, iteration):
                            break
                        real = self._start(runtime, loader, iteration)
                    try:
                        batch = next(real)
                    except StopIteration:
                        break
                iteration.yielded += 1
                course.fresh = False
                yield batch
        finally:
            if real is not None:
                real.close()  # type: ignore[attr-defined]
            course.finish(iteration, has_length=_length(loader) is not None)

    def _start(self, runtime: Runtime, loader: Any, iteration: Iteration) -> Iterator[Any]:
        """The real batches, from where this pass stands."""
        generator = generator_of(loader)
        state = runtime.course.generator_states.pop(iteration.seq, None)
        if generator is not None and state is not None:
            generator.set_state(state)
            iteration.generator_state = state
        if not iteration.yielded:
            return self._original(loader)
        sampler = _index_sampler(loader)
        if sampler is None:
            return _later(self._original(loader), iteration.yielded)
        sampler._ft_skip = iteration.yielded
        return self._original(loader)

    def _ghost_is_over(self, runtime: Runtime, loader: Any, iteration: Iteration) -> bool:
        """Whether a ghost's pass has no more batches; keeps what Accelerate knows of the pass."""
        course = runtime.course
        if not iteration.yielded:
            loader.begin()
        length = _length(loader)
        if length is None:
            length = course.lengths.get(iteration.seq)
        if course.phase is Phase.GHOST and not runtime.training():
            length = min(EVALUATION_BATCHES, length or EVALUATION_BATCHES)
        if length is not None and iteration.yielded >= length:
            _end(loader)
            return True
        loader.end_of_dataloader = length is not None and iteration.yielded == length - 1
        return False

    def _is_over(self, loader: Any, iteration: Iteration) -> bool:
        """Whether a pass that goes on as a real one stands at its end already."""
        length = _length(loader)
        if length is None or not iteration.yielded or iteration.yielded < length:
            return False
        _end(loader)
        return True

    def _remembered(self, loader: Any) -> Any:
        """This loader's first batch, always the same."""
        if loader not in self._first:
            generator = generator_of(loader)
            before = generator.get_state() if generator is not None else None
            iterator = iter(loader.base_dataloader)
            batch = next(iterator)
            del iterator
            if generator is not None and before is not None:
                generator.set_state(before)
            if loader.device is not None:
                batch = send_to_device(batch, loader.device)
            self._first[loader] = batch
        return self._first[loader]


def _end(loader: Any) -> None:
    """What Accelerate does at the end of a pass."""
    loader.iteration += 1
    loader.end()


def _later(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """`batches` from number `skip` on, where only fetching tells which those are."""
    for index, batch in enumerate(batches):
        if index >= skip:
            yield batch


def skipping(original: Original) -> Callable[[Any], Iterator[Any]]:
    """Replaces `BatchSamplerShard.__iter__`: leaves out as many batches as `_ft_skip` says, once."""

    def __iter__(self: Any) -> Iterator[Any]:
        skip = self.__dict__.pop("_ft_skip", 0)
        return islice(original(self), skip, None) if skip else original(self)

    return __iter__


def _index_sampler(loader: Any) -> Any | None:
    """The sampler whose items can be left out without loading data."""
    from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler

    for sampler in (loader.batch_sampler, loader.sampler):
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            return sampler
    return None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
