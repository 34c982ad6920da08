"""Epochs and batches of a raw loop, whose process comes back at its peers' place at once.

    for epoch in (epochs := ft_accelerate.epochs(10)):
        for index, batch in epochs.batches(loader):

The object tells the runtime where each epoch begins. So a script that comes back runs through the
first batch and the end of the epoch in which it learns where its peers are, and its next epoch is
theirs, at the batch where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ft_accelerate.runtime.process import active
from ft_accelerate.runtime.runtime import Runtime


class Epochs:
    """The numbers from `start` to `total`, as `range` has them, but that a process which comes back
    goes on with its peers' epoch. The loop's thread only.

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
