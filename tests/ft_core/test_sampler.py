from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from ft_core.data import DistributedSampler, is_stream_of_datasets


def dataset(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


@given(
    size=st.integers(1, 60),
    groups=st.integers(1, 4),
    ranks=st.integers(1, 3),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_shards_cover_the_dataset(
    size: int, groups: int, ranks: int, drop_last: bool, epoch: int
) -> None:
    seen: Counter[int] = Counter()
    for group in range(groups):
        for rank in range(ranks):
            sampler = DistributedSampler(
                dataset(size), group, groups, rank, ranks, drop_last=drop_last, seed=5
            )
            same = TorchDistributedSampler(
                dataset(size), groups * ranks, rank + ranks * group, seed=5, drop_last=drop_last
            )
            sampler.set_epoch(epoch)
            same.set_epoch(epoch)
            mine = list(sampler)
            assert mine == list(same)
            assert len(mine) == len(sampler)
            seen.update(mine)
    if drop_last:
        assert set(seen.values()) <= {1}
    else:
        assert set(seen) == set(range(size))
        assert sum(seen.values()) < size + groups * ranks


def test_global_rank_counts_group_by_group() -> None:
    sampler = DistributedSampler(dataset(8), 1, 3, group_rank=1, num_replicas=2)
    assert (sampler.global_rank, sampler.global_world_size) == (3, 6)


def test_old_and_new_names_mean_the_same() -> None:
    sampler = DistributedSampler(
        dataset(8), replica_group_id=1, num_replica_groups=3, rank=1, num_replicas=2
    )
    assert sampler.global_rank == 3


def test_alone_in_its_group_without_torch_distributed() -> None:
    assert DistributedSampler(dataset(8), 1, 2).global_world_size == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"replica_rank": 2, "num_replica_groups": 2}, "replica_rank must be 0 to"),
        ({"replica_rank": -1, "num_replica_groups": 2}, "replica_rank must be 0 to"),
        ({"replica_rank": 0, "num_replica_groups": 0}, "num_replica_groups must be at least 1"),
        ({"replica_rank": 0, "num_replica_groups": 1, "group_rank": 1}, "group_rank must be 0 to"),
        ({"replica_rank": 0}, "must be given"),
        (
            {"replica_rank": 0, "replica_group_id": 1, "num_replica_groups": 2},
            "two names for one thing",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedSampler(dataset(8), **arguments)


@given(size=st.integers(2, 40), done=st.integers(0, 20))
def test_a_position_skips_what_is_done_once(size: int, done: int) -> None:
    sampler = DistributedSampler(dataset(size), 0, 2, seed=1)
    whole = list(sampler)
    done = min(done, len(whole))
    sampler.set_position(done)
    assert len(sampler) == len(whole) - done
    assert list(sampler) == whole[done:]
    assert list(sampler) == whole


def test_a_healed_replica_goes_on_where_the_others_are() -> None:
    ahead = DistributedSampler(dataset(20), 1, 2, seed=3)
    ahead.set_epoch(4)
    ahead.set_position(6)
    fresh = DistributedSampler(dataset(20), 1, 2, seed=3)
    fresh.load_state_dict(ahead.state_dict())
    (first,) = next(iter(DataLoader(fresh.dataset, 2, sampler=fresh)))
    assert first.tolist() == list(ahead)[:2]


def test_a_new_epoch_begins_at_its_start() -> None:
    sampler = DistributedSampler(dataset(20), 0, 2)
    sampler.set_position(6)
    sampler.set_epoch(0)  # the same epoch, as frameworks say before each iteration
    assert len(sampler) == 4
    sampler.set_epoch(1)
    assert len(sampler) == 10


def test_a_position_outside_the_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 10"):
        DistributedSampler(dataset(20), 0, 2).set_position(11)


def test_a_module_of_the_users_may_be_named_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    assert not is_stream_of_datasets(object())
