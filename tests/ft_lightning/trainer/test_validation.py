"""Shares of a validation (pure), and metrics that have travelled: against what they should be.

With real Trainers: `test_scenarios.py` (values), `test_membership.py` (deaths).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, Metric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.retrieval import RetrievalMAP

from ft_lightning.trainer import logged_totals
from ft_lightning.trainer.validation import batches_missing, share


@given(
    batches=st.integers(0, 40),
    deaths=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6),
    members=st.integers(1, 6),
)
def test_each_batch_counts_once_whichever_group_dies(
    batches: int, deaths: list[list[int]], members: int
) -> None:
    """Against the sentence itself: after any deaths, the survivors hold each batch once."""
    done: dict[int, list[int]] = {name: [] for name in range(members)}
    missing: list[int] = list(range(batches))
    tallies = 0
    while True:
        sizes = []
        for rank, own in enumerate(done.values()):
            mine = share(missing, rank, len(done))
            sizes.append(len(mine))
            own += mine
        assert max(sizes) - min(sizes) <= 1
        for index in deaths.pop() if deaths else []:
            if len(done) > 1:  # with all it holds, the share just done too
                del done[list(done)[index % len(done)]]
        missing = batches_missing(batches, list(done.values()))
        tallies += 1
        if not missing:
            break
    held = sorted(number for own in done.values() for number in own)
    assert held == list(range(batches))
    assert tallies <= members


def test_a_batch_that_two_have_done_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="validated by two"):
        batches_missing(3, [[0, 1], [1, 2]])


def test_tensors_travel_as_they_are() -> None:
    tree: dict[str, Any] = {
        "kinds": [
            torch.arange(6).reshape(2, 3).t(),
            torch.tensor(True),
            torch.empty(0, 4),
            torch.tensor([1.5], dtype=torch.bfloat16),
            torch.tensor(2.0),
        ],
        "plain": [1, "two", None, b"three", float("inf")],
    }
    got = logged_totals.unpack(logged_totals.pack(tree))
    assert got["plain"] == tree["plain"]
    for there, here in zip(got["kinds"], tree["kinds"], strict=True):
        assert there.dtype == here.dtype and torch.equal(there, here)
    with pytest.raises(TypeError, match="cannot send a set"):
        logged_totals.pack({1, 2})


SCORES = torch.rand(23, 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
LABELS = torch.randint(0, 3, (23,), generator=torch.Generator().manual_seed(2))
QUERIES = torch.arange(23) % 4
CASES: dict[str, tuple[Any, Any]] = {
    "sum and lists": (MulticlassAccuracy, lambda m, s: m.update(SCORES[s], LABELS[s])),
    "chained lists": (MulticlassAUROC, lambda m, s: m.update(SCORES[s], LABELS[s])),
    "lists of another length": (
        RetrievalMAP,
        lambda m, s: m.update(SCORES[s, 0], LABELS[s] == 0, QUERIES[s]),
    ),
    "stacked": (PearsonCorrCoef, lambda m, s: m.update(SCORES[s, 0], SCORES[s, 1])),
    "maximum": (MaxMetric, lambda m, s: m.update(SCORES[s, 0])),
    "mean": (MeanMetric, lambda m, s: m.update(SCORES[s, 0])),
    "sum": (SumMetric, lambda m, s: m.update(SCORES[s, 0])),
}


class Holder(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.metric: Metric = make(num_classes=3) if "Multiclass" in make.__name__ else make()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("division", [(5, 9, 9), (23, 0, 0), (0, 3, 20)])
def test_torchmetrics_objects_see_what_all_have(case: str, division: tuple[int, ...]) -> None:
    """Of three members, some with nothing; each computes the same, and keeps its own states."""
    make, update = CASES[case]
    truth = Holder(make).metric
    update(truth, slice(None))
    members, start = [], 0
    for size in division:
        holder = Holder(make)
        for first in range(start, start + size, 4):
            update(holder.metric, slice(first, min(first + 4, start + size)))
        members.append(holder)
        start += size
    sent = [logged_totals.pack(logged_totals.states(m, {"metric": 0})) for m in members]
    for member in members:
        own = dict(member.metric.metric_state)
        undo = logged_totals.share(member, [logged_totals.unpack(each) for each in sent])
        torch.testing.assert_close(member.metric.compute(), truth.compute())
        undo()
        assert not member.metric._is_synced
        for key, state in member.metric.metric_state.items():
            assert str(state) == str(own[key])
    before = members[1].metric.update_count
    if before:  # what is updated after it is on top of its own states
        update(members[1].metric, slice(0, 4))
        assert members[1].metric.update_count == before + 1
