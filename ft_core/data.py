"""DistributedSampler: one shard for each rank of each replica group, resumable within an epoch. And streams of the
library `datasets`, which must be told apart from others that keep their place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler


def is_stream_of_datasets(dataset: object) -> bool:
    """Whether it is an `IterableDataset` of the library `datasets`. That has a state; but each of its passes begins at
    its beginning, or else at the state that was loaded last, also those after the first."""
    library = sys.modules.get("datasets")  # which may be a module of the user's
    return isinstance(dataset, getattr(library, "IterableDataset", ()))


class DistributedSampler(TorchDistributedSampler[Any]):
    """Shards a dataset over all ranks of all replica groups that a job may have.

    Shards are fixed, as in torchft: the shard of a replica group that is away is not read meanwhile.
    Iterating yields sample indices (int) of this rank's shard.

    Args:
        dataset: needs a length.
        replica_rank: number of this replica group, 0 to num_replica_groups - 1: its own number, not
            its rank in a quorum, which changes. `replica_group_id` is another name for it.
        num_replica_groups: the largest number of replica groups that the job may have.
        group_rank: of this process in its replica group; default torch.distributed's rank if it
            is initialized, else 0. `rank` is another name for it.
        num_replicas: ranks in a replica group; default torch.distributed's world size if it is
            initialized, else 1.
        shuffle, seed, drop_last: as torch's; equal in all ranks.

    Raises ValueError for numbers that contradict each other.

    Thread: one; like torch's samplers, it has no lock.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int | None = None,
        num_replica_groups: int | None = None,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        replica_group_id: int | None = None,
        rank: int | None = None,
    ) -> None:
        replica_rank = _one_of("replica_rank", replica_rank, "replica_group_id", replica_group_id)
        group_rank = _one_of("group_rank", group_rank, "rank", rank)
        if replica_rank is None or num_replica_groups is None:
            raise ValueError("replica_rank and num_replica_groups must be given")
        ready = dist.is_available() and dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if ready else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if ready else 1
        _check_range("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        _check_range("group_rank", group_rank, "num_replicas", num_replicas)
        self._group_rank, self._group_size = group_rank, num_replicas
        self._num_groups = num_replica_groups
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(
            dataset,
            num_replicas=self.global_world_size,
            rank=self.global_rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._position = 0

    def take_share(self, replica_rank: int) -> None:
        """Read this replica group's shard from the next iteration on: a hot spare takes it over
        (`Manager.data_share`). The position is as far into that shard. Raises ValueError for a number
        that no group has."""
        _check_range("replica_rank", replica_rank, "num_replica_groups", self._num_groups)
        self.rank = self.global_rank = self._group_rank + self._group_size * replica_rank

    def set_position(self, samples: int) -> None:
        """Have the next iteration skip `samples` samples of this shard, which were trained on.

        Applies to one iteration, or until `set_epoch` names another epoch. Raises ValueError unless
        `samples` is from 0 to the shard's size.
        """
        if not 0 <= samples <= self.num_samples:
            raise ValueError(f"position must be 0 to {self.num_samples}, got {samples}")
        self._position = samples

    def set_epoch(self, epoch: int) -> None:
        """As torch's. A new epoch begins at its first sample."""
        if epoch != self.epoch:
            self._position = 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        start, self._position = self._position, 0
        indices = super().__iter__()
        for _ in range(start):
            next(indices)
        return indices

    def __len__(self) -> int:
        """Samples that the next iteration gives."""
        return self.num_samples - self._position

    def state_dict(self) -> dict[str, int]:
        """Where the next iteration starts: `epoch`, and `position` in samples of this shard.

        An iteration does not move the position, since workers fetch ahead: count the samples that
        were trained on and call `set_position`.
        """
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore what `state_dict` returned. Raises ValueError if the position is outside of this
        shard."""
        super().set_epoch(int(state_dict["epoch"]))
        self.set_position(int(state_dict["position"]))


def _one_of(name: str, value: int | None, other: str, alias: int | None) -> int | None:
    if value is not None and alias is not None and value != alias:
        raise ValueError(f"{name} and {other} are two names for one thing: give one")
    return alias if value is None else value


def _check_range(name: str, value: int, limit_name: str, limit: int) -> None:
    if limit < 1:
        raise ValueError(f"{limit_name} must be at least 1, got {limit}")
    if not 0 <= value < limit:
        raise ValueError(f"{name} must be 0 to {limit_name} - 1 = {limit - 1}, got {value}")
