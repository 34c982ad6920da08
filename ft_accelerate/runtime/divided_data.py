"""Which share of the training data this replica group reads: `fault_tolerance_spares`.

N + k groups have N shares (`ft_core.replica.shares`), and the script knows the processes of N groups. A
spare reads a share, too, whose batches do not count. It takes over the share of a group that is gone:

| when it is given | what the group does |
|---|---|
| with a gradient step that was committed without the dead group | before the first batch of the next window it has that group's `process_index`, and its passes over prepared loaders go on with that group's batches |
| within a window, since too few hold a share to commit its first gradient step | a raw script can't go back to the window's first batch, whose share it has not read: it ends, and is started again, as one that comes back to that window |
| the same, and it has read that very share, or no holder is left; between two gradient steps of a window | it goes on with the batch that it has |
| within an operation | it acts in place of the dead group, and no share moves; it reads that group's batches from the next one on, if it has none in use |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import SequentialSampler

from ft_accelerate.runtime.script_position import Iteration, Phase, Place, ScriptPosition
from ft_accelerate.runtime.startup import GroupRanks
from ft_core.data import is_stream_of_datasets
from ft_core.replica.status import Participation

LATE_SHARE = (
    "replica group {} takes over share {} of the data within a step that needs it: it ends, and computes "
    "that share's batch when it is started again"
)
UNDIVIDED = (
    "fault_tolerance_spares needs training data of which a group can take over another one's share: "
    "DataLoaders over map-style datasets, prepared by Accelerate, without use_stateful_dataloader; set it "
    "to 0 for other data"
)
UNEVEN = (
    "even_batches=False gives this process another number of training batches than the others, which would "
    "wait for it, or it for them: leave it out, so that the last batches repeat samples, or drop the last "
    "ones (DataLoader(drop_last=True), dataloader_drop_last)"
)
DRIFTING = (
    "fault_tolerance_spares serves scripts that average gradients in each step: leave out LocalSGD and "
    "DiLoCo, or set it to 0"
)


class DividedData:
    """The share of one process, in a job with hot spares whose data has several shares. The loop's thread."""

    def __init__(self, ranks: GroupRanks, position: ScriptPosition) -> None:
        self._ranks, self._position = ranks, position
        self._window: Place | None = None
        """That begins with the last batch that was asked for while none was in use; None: no window does."""

    @classmethod
    def of(cls, ranks: GroupRanks, position: ScriptPosition) -> DividedData | None:
        """None: this process's share never changes."""
        options = ranks.options
        several = options.spares > 0 and options.num_replica_groups - options.spares > 1
        return cls(ranks, position) if several else None

    def follow(self, iteration: Iteration, part: Participation | None) -> None:
        """A batch is about to be fetched. If none is in use, let it be of the share that this group holds, or will
        hold with the next step. It may be the first of its window, of an evaluation, or of training before the
        model is in training mode."""
        window = self._position.window
        known = window == (iteration.seq, iteration.yielded)
        if not known and not self._position.stepped:
            return
        self._window = window if known else None
        if part is not None and part.reads is not None and part.reads != self._ranks.share:
            self._ranks.share = part.reads
            for state in (PartialState, AcceleratorState):
                state._shared_state["process_index"] = self._ranks.process_index

    def is_another(self, part: Participation, at: str) -> bool:
        """Whether a share was given to this group within a window in which it has read another one, and
        others wait for that share's batch. `at`: of what an attempt is opened."""
        position = self._position
        if not part.heir or part.share == self._ranks.share or position.phase is Phase.FAST_FORWARD:
            return False
        if self._window is None:
            return at == "grad"
        return not position.stepped and not position.grads and position.window == self._window

    def refuse_undivided(self, loader: Any) -> None:
        """Raise ValueError for training data of which a spare could not take over a share."""
        if not skips_by_index(loader):
            raise ValueError(UNDIVIDED)

    def refuse_unknown(self) -> None:
        """Gradients are to be averaged. Raise ValueError if no prepared loader was asked for their batch."""
        if self._position.window is None:
            raise ValueError(UNDIVIDED)


# ------------------------------------------------------------------ what divides the data of a loader


def index_sampler(loader: Any) -> BatchSamplerShard | None:
    """The sampler whose items can be left out without loading data."""
    for sampler in (loader.batch_sampler, loader.sampler):
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            return sampler
    return None


def drawn_before_fetch(loader: Any) -> torch.Tensor | None:
    """Torch's random numbers where the loader read the batch that the script asks for next."""
    sampler = index_sampler(loader)
    return None if sampler is None else sampler.__dict__.get("_ft_drawn")


def generator_of(loader: Any) -> torch.Generator | None:
    """The one that shuffles this loader's data, where all replica groups must draw alike: Accelerate's, or one
    that its sampler has of its own."""
    generator = getattr(loader, "synchronized_generator", None)
    if generator is None:
        sampler = _sampler(loader)
        if not isinstance(sampler, SeedableRandomSampler):
            generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def seeded_sampler(loader: Any) -> SeedableRandomSampler | None:
    """The one of this loader whose order is that of a seed, Accelerate's `use_seedable_sampler`."""
    sampler = getattr(loader, "get_sampler", lambda: None)()
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def draws_from_torch(loader: Any) -> bool:
    """Whether its order of samples comes from torch's own generator: a sampler without one, such as
    `WeightedRandomSampler`, or that of transformers' `group_by_length`. It is the same in all processes
    only as long as none has come back, since their random numbers are their own then."""
    sampler = _sampler(loader)
    if sampler is None or is_stateful(loader) or generator_of(loader) is not None:
        return False
    return not isinstance(sampler, (SequentialSampler, SeedableRandomSampler))


def _sampler(loader: Any) -> Any:
    """What draws its samples, or batches of them; None: they can't be left out without loading data."""
    shard = index_sampler(loader)
    return None if shard is None else getattr(shard.batch_sampler, "sampler", shard.batch_sampler)


def is_stateful(loader: Any) -> bool:
    """Whether torchdata's StatefulDataLoader reads for it."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def stateful_dataset(loader: Any) -> Any | None:
    """Its dataset, if that is read in this process and keeps its place from pass to pass; None: it isn't, or doesn't."""
    base = loader.base_dataloader
    dataset = base.dataset
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    if is_stream_of_datasets(dataset):
        return None
    both = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return dataset if both and not base.num_workers else None


def skips_by_index(loader: Any) -> bool:
    """Whether a pass over this loader can begin in its middle without reading what lies before."""
    return (
        isinstance(loader, DataLoaderShard)
        and not is_stateful(loader)
        and index_sampler(loader) is not None
    )


def refuse_uneven(loader: Any) -> None:
    """Raise ValueError if the processes get unequal numbers of batches of this training loader."""
    sampler = index_sampler(loader)
    if sampler is None or sampler.even_batches or sampler.drop_last:
        return
    batches, number = sampler.batch_sampler, sampler.num_processes
    if not hasattr(batches, "__len__"):
        return  # only its end tells
    if sampler.split_batches:
        rest = len(batches.sampler) % batches.batch_size if hasattr(batches, "sampler") else 0
        uneven = 0 < rest <= batches.batch_size // number * (number - 1)
    else:
        uneven = len(batches) % number != 0
    if uneven:
        raise ValueError(UNEVEN)


def read_as(loader: Any, index: int, num_processes: int) -> None:
    """Have the next pass read the part of this process, of so many."""
    for each in (index_sampler(loader), getattr(loader, "dataset", None)):
        if isinstance(each, (BatchSamplerShard, IterableDatasetShard)):
            if each.num_processes == num_processes:
                each.process_index = index


# ------------------------------------------------------------------ streams of several shards

_by_batches: ContextVar[bool] = ContextVar("_by_batches", default=False)


@contextmanager
def divided_by_batches() -> Iterator[None]:
    """A loader is prepared that one process of plain Accelerate would read for all: of a stream of the library
    `datasets` each process reads all, and keeps its batches. Else Accelerate gives it shards of its own, which may
    be unequal: its passes would have other lengths than its peers', whose counts tell it where it comes back."""
    token = _by_batches.set(True)
    try:
        yield
    finally:
        _by_batches.reset(token)


def whether_to_know_shards(original: Callable[[], bool]) -> bool:
    """`is_datasets_available`, which `prepare_data_loader` asks before it looks for shards."""
    return not _by_batches.get() and original()


# ------------------------------------------------------------------ the last batch of a stream


class _Counted:
    """A dataset, and how many of its samples were read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.read = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        for sample in self._dataset:
            self.read += 1
            yield sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


def read_counted(original: Any, shard: Any) -> Iterator[Any]:
    """`IterableDatasetShard.__iter__`: notes at its end how many samples the last batch of all processes has. The rest
    of that batch is filled up."""
    reader = copy.copy(shard)
    reader.dataset = counted = _Counted(shard.dataset)
    yield from original(reader)
    together = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    shard._ft_rest = counted.read % together


def tell_rest(loader: Any) -> None:
    """`gather_for_metrics` leaves out what fills up the last batch, which this loader is about to give. In plain
    Accelerate one process reads a stream for all, and tells how many samples that batch has."""
    shard = getattr(loader, "dataset", None)
    if isinstance(shard, IterableDatasetShard) and not shard.drop_last:
        loader.remainder = shard.__dict__.get("_ft_rest", loader.remainder)
