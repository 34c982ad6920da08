"""Which share of the training data this replica group reads: `FTDDPStrategy(spares=k)`.

N + k groups have N shares (`ft_core.replica.shares`). `trainer.world_size` and the samplers are those of
N groups. A spare reads a share, too, whose batches do not count. When it is given the share of one that
is gone, that has happened with a commit, or with an attempt that too few were left to commit:

| when it is known | what the group does |
|---|---|
| before the first batch of a step is fetched | its samplers go to the other share, and its loaders to the batch at hand |
| when a discarded step is tried again | it abandons the step's batches, and fetches those of its share; its peers wait with their kept gradients |
| between two steps of a batch (manual optimization) | the rest of the batch is of the share that it has read so far |

What it has logged for an epoch's mean as a spare is dropped: another group's mean has those batches.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from ft_core.manager import Manager
from ft_lightning.trainer.batches import Batches


class DataShare:
    """The share of one fit with spares, which is `strategy.share`. The loop's thread."""

    def __init__(self, trainer: Any, manager: Manager, batches: Batches) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._is_spare = False

    def changes(self) -> bool:
        """Whether this group contributes to the step under way, and reads another share than its own."""
        part = self._manager.step.part
        given = None if part is None else part.share
        return given is not None and given != self._trainer.strategy.share

    def follow(self) -> None:
        """The first batch of a step is about to be fetched: let it be of this group's share."""
        part = self._manager.step.part
        if part is None:
            return  # the attempt has failed already: the next one tells
        was_spare, self._is_spare = self._is_spare, part.share is None
        if part.share is None:
            return
        if was_spare:
            self._trainer.fit_loop.epoch_loop._results.reset()
        if self.changes():
            strategy = self._trainer.strategy
            strategy.share = part.share
            place = strategy.distributed_sampler_kwargs
            for loader in self._trainer.fit_loop._combined_loader.flattened:
                sampler = sharding_sampler(loader, place["num_replicas"])
                if sampler is not None:
                    sampler.rank = place["rank"]
            self._batches.jump(self._trainer)


def sharding_sampler(loader: Any, shards: int) -> DistributedSampler[Any] | None:
    """What divides the data of `loader` into so many shards; None: nothing that can be told which."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None), batches):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas == shards:
            return sampler
    return None


def check_loader(loader: Any, shards: int) -> None:
    """Raise ValueError for training data of which a hot spare could not take over a share."""
    if Batches.index_sampler(loader) is None or sharding_sampler(loader, shards) is None:
        raise ValueError(
            "spares needs training data of which a group can take over another one's share: DataLoaders "
            "over map-style datasets, with the DistributedSampler that Lightning puts into them; "
            f"{type(loader).__name__} has none, so set spares=0"
        )
