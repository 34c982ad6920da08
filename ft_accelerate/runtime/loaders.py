"""Passes over prepared data loaders: real or fast-forwarded, with the change in the middle of a pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from accelerate.utils import send_to_device

from ft_accelerate.runtime.peer_state import generator_of
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import Iteration, Phase

Original = Callable[[Any], Iterator[Any]]

_LoaderState = dict[str, Any] | None
_COUNTS = ("_num_yielded", "_sampler_iter_yielded")
_POSITIONS_OF_OTHERS = (
    "_index_sampler_state", "_sampler_iter_state", "fetcher_state", "dataset_state",
)  # fmt: skip
"""Of torchdata's states: where all of these are None, counts are all there is to a place."""

EVALUATION_BATCHES = 1
"""How many batches of an evaluation a script that fast-forwards sees: enough for the script's variables to exist."""


class Passes:
    """Replaces `DataLoaderShard.__iter__`. `current()` gives the runtime."""

    def __init__(self, current: Callable[[], Runtime], original: Original) -> None:
        self._current, self._original = current, original
        self._first: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def iterate(self, loader: Any) -> Iterator[Any]:
        """One pass. Each request for a batch may begin a window, heal, or arrive."""
        runtime = self._current()
        position = runtime.position
        generator = generator_of(loader)
        iteration = position.begin(generator.get_state() if generator is not None else None)
        resumed = _take_resumed(loader)
        length = _length(loader)
        if length is not None:
            length -= _done_in(resumed)
        real: Iterator[Any] | None = None
        try:
            while True:
                runtime.at_fetch(loader, iteration)
                if position.fast_forwarding:
                    if real is not None:
                        real.close()  # type: ignore[attr-defined]
                        real = None
                    if self._fast_forward_is_over(runtime, loader, iteration, length):
                        break
                    batch = self._remembered(loader)
                else:
                    if real is None:
                        if iteration.yielded and iteration.yielded == length:
                            _end(loader)
                            break
                        real = self._start(runtime, loader, iteration, resumed)
                    try:
                        batch = next(real)
                    except StopIteration:
                        break
                iteration.yielded += 1
                position.fresh = False
                yield batch
        finally:
            if real is not None:
                real.close()  # type: ignore[attr-defined]
            position.finish(iteration, has_length=length is not None)

    def _start(
        self, runtime: Runtime, loader: Any, iteration: Iteration, resumed: _LoaderState
    ) -> Iterator[Any]:
        """The real batches, from this pass's position on."""
        generator = generator_of(loader)
        state = runtime.position.generator_states.pop(iteration.seq, None)
        if generator is not None and state is not None:
            generator.set_state(state)
            iteration.generator_state = state
        if _is_stateful(loader):
            return self._start_stateful(loader, iteration.yielded, resumed)
        if not iteration.yielded:
            return self._original(loader)
        sampler = _index_sampler(loader)
        if sampler is None:
            return _later(self._original(loader), iteration.yielded)
        sampler._ft_skip = iteration.yielded
        return self._original(loader)

    def _start_stateful(self, loader: Any, skip: int, resumed: _LoaderState) -> Iterator[Any]:
        """Move the loader itself to its position, so that its own state tells that position."""
        state = resumed or loader.dl_state_dict
        if skip and all(state.get(name, 0) is None for name in _POSITIONS_OF_OTHERS):
            done = _done_in(resumed) + skip
            resumed = {**state, **dict.fromkeys(_COUNTS, done), "_iterator_finished": False}
            skip = 0
        loader.base_dataloader.load_state_dict(resumed or {})
        batches = self._original(loader)
        return _later(batches, skip) if skip else batches

    def _fast_forward_is_over(
        self, runtime: Runtime, loader: Any, iteration: Iteration, length: int | None
    ) -> bool:
        """Whether a fast-forwarded pass has no more batches; keeps what Accelerate knows of the pass."""
        position = runtime.position
        if not iteration.yielded:
            loader.begin()
        if length is None:
            length = position.lengths.get(iteration.seq)
        if position.phase is Phase.FAST_FORWARD and not runtime.training():
            length = min(EVALUATION_BATCHES, length or EVALUATION_BATCHES)
        if length is not None and iteration.yielded >= length:
            _end(loader)
            return True
        loader.end_of_dataloader = length is not None and iteration.yielded == length - 1
        return False

    def _remembered(self, loader: Any) -> Any:
        """This loader's first batch, always the same."""
        if loader not in self._first:
            generator = generator_of(loader)
            before = generator.get_state() if generator is not None else None
            iterator = iter(loader.base_dataloader)
            batch = next(iterator)
            del iterator
            if _is_stateful(loader):
                loader.base_dataloader.load_state_dict({})  # forget it
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


def _is_stateful(loader: Any) -> bool:
    """Whether torchdata's StatefulDataLoader reads for it."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _take_resumed(loader: Any) -> _LoaderState:
    """The state with which a checkpoint lets this pass begin, which is used once."""
    if not _is_stateful(loader):
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


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
