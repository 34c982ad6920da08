"""Passes over prepared loaders, without a quorum."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

from ft_accelerate.runtime.divided_data import refuse_uneven
from ft_accelerate.runtime.loaders import _length, _Pass
from tests.ft_accelerate.harness import forget_accelerate


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    yield
    forget_accelerate()


class Placed(IterableDataset[Any]):
    """Keeps its place, where it is read in this process."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 8:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("stateful", [False, True])
def test_the_batch_that_a_past_shows_does_not_move_its_data(stateful: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata")
    loader = prepare_data_loader(
        DataLoader(Placed(), 2),
        num_processes=2,
        process_index=1,
        put_on_device=False,
        dispatch_batches=False,
        use_stateful_dataloader=stateful,
    )
    shown: Any = SimpleNamespace(_loader=loader, _generator=None)
    assert _Pass._first_batch(shown).tolist() == [2, 3]
    assert [batch.tolist() for batch in loader.base_dataloader] == [[2, 3], [6, 7]]


def test_the_batches_that_a_past_shows_leave_a_stream_of_datasets_whole() -> None:
    """Trainer prepares a loader for each evaluation: the next one began where the last past had read."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset()
    for _ in range(3):
        loader = prepare_data_loader(
            DataLoader(stream, 2),
            num_processes=2,
            process_index=1,
            put_on_device=False,
            dispatch_batches=False,
        )
        shown: Any = SimpleNamespace(_loader=loader, _generator=None)
        assert _Pass._first_batch(shown)["x"].tolist() == [2, 3]
    assert [batch["x"].tolist() for batch in loader.base_dataloader] == [[2, 3], [6, 7]]


class Endless(IterableDataset[Any]):
    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        yield from range(8)


class Pairs:
    """A batch sampler that does not say how many there are."""

    batch_size, drop_last = 2, False

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([n, n + 1] for n in range(0, 8, 2))


@pytest.mark.parametrize(
    "stock",
    [DataLoader(Endless(), 2), DataLoader(list(range(8)), batch_sampler=Pairs())],  # type: ignore[arg-type]
    ids=["stream", "batch sampler"],
)
def test_a_loader_need_not_know_its_length(stock: DataLoader[Any]) -> None:
    """Plain Accelerate does not ask for it; here the script ended with what the question raises."""
    loader = prepare_data_loader(
        stock, num_processes=2, process_index=1, put_on_device=False, even_batches=False
    )
    refuse_uneven(loader)
    assert _length(loader) is None
    assert [batch.tolist() for batch in loader.base_dataloader] == [[2, 3], [6, 7]]
