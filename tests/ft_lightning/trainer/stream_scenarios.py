"""Scenarios (see `scenarios.py`) with training data that is a stream: no sampler chooses from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lighthouse.client import LighthouseClient
from tests.ft_lightning.trainer.scenarios import BATCH, BATCHES, Net, Place, Result, Trace, data
from tests.harness.waiting import until

CHANGED_AT = 4


class Stream(IterableDataset[Any]):
    """A replica's samples, in order; the first feature is the sample's number in the shard."""

    def __init__(self, place: Place) -> None:
        self.images, self.labels = (t[place.rank :: 2].clone() for t in data().tensors)
        self.images[:, 0] = torch.arange(len(self.images)) / 64
        self.at = self.start = 0

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.at, self.start = self.start, 0
        while self.at < len(self):
            self.at += 1
            yield self.images[self.at - 1], self.labels[self.at - 1]


class Resumable(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class OfUnknownLength(Resumable):
    """Lightning fetches a batch in advance."""

    def __len__(self) -> int:
        raise TypeError("the length of this stream is not known")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.at, self.start = self.start, 0
        for number in range(self.at, len(self.images)):
            self.at += 1
            yield self.images[number], self.labels[number]


class ResumableLoader:
    """As torchdata's: the loader has the state, and no dataset to ask."""

    def __init__(self, place: Place) -> None:
        self.stream = Resumable(place)

    def __len__(self) -> int:
        return len(self.stream) // BATCH

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.stream, BATCH))

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])


class Endless(IterableDataset[Any]):
    """A replica's samples, of which nothing tells how many there are. Rank 1 has more; rank 0 perhaps none."""

    def __init__(self, place: Place, *, empty: bool) -> None:
        batches = (0 if empty else 5, 8)
        self.samples = data()[: batches[place.rank] * BATCH]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*self.samples, strict=True)


def endless(place: Place, variant: str) -> Result:
    """Streams of unknown length, one of which is longer: as after a heal of one that starts over."""
    trace = Trace()
    trainer = place.trainer(trace, max_epochs=3)
    module = Net(place)
    train = DataLoader(Endless(place, empty=variant == "empty"), BATCH)
    said = ""
    try:
        trainer.fit(module, train, DataLoader(data(32, 5), 16))
    except RuntimeError as error:
        said = str(error)
    return {**trace.result(trainer), "said": said}


def until_another_is_there() -> None:
    """Until a further replica group is at the lighthouse, in the quorum or to be let in."""

    def there() -> bool:
        jobs = [x for x in client.status()["jobs"] if x["job_id"] == os.environ["FT_JOB_ID"]]
        inside = [member for job in jobs for member in job["members"] if not member["gone"]]
        return len(inside) > 1 or any(job["waiting"] for job in jobs)

    with LighthouseClient(os.environ["TORCHFT_LIGHTHOUSE"]) as client:
        until(there, "another replica group")


def stream(place: Place, variant: str) -> Result:
    """One replica's learning rate goes wrong: it heals in mid-epoch, and its data must follow.

    `variant`: "plain", or what has a state: the "dataset" (or one of "unknown length") or the "loader".
    """

    class Changing(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if place.tolerant and self.trainer.strategy.num_participants == 1:
                until_another_is_there()  # its steps take a millisecond: an epoch is soon over
            if place.rank == 1 and self.trainer.global_step == CHANGED_AT and not self.votes:
                self.votes = 1
                self.trainer.optimizers[0].param_groups[0]["lr"] = 123.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batch = round(float(batch[0][0, 0]) * 64) // BATCH
            return super().training_step(batch, batch_idx)

    class Places(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            places.append((trainer.global_step, module.batch))

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    places: list[tuple[int, int]] = []
    heard: list[str] = []
    handler = Heard()
    logger = logging.getLogger("ft_lightning")
    logger.addHandler(handler)
    trace = Trace()
    trainer = place.trainer(trace, Places())
    module = Changing(place)
    train: Any = ResumableLoader(place)
    if variant != "loader":
        kinds = {"plain": Stream, "dataset": Resumable, "unknown length": OfUnknownLength}
        train = DataLoader(kinds[variant](place), BATCH)
    trainer.fit(module, train, DataLoader(data(32, 5), 16))
    logger.removeHandler(handler)
    return {
        **trace.result(trainer),
        "places": places,
        "batches": BATCHES,
        "heals": module.events.count("heal_done"),
        "said": sum("has no position to restore" in text for text in heard),
    }


def stopping_stream(place: Place, variant: str) -> Result:
    """Streams of unknown, equal length. EarlyStopping decides by a number that is one of all only where they agree."""
    trace = Trace()
    stopping = EarlyStopping(
        "train_epoch", patience=1, min_delta=10.0, check_on_train_epoch_end=True
    )
    trainer = place.trainer(trace, stopping, max_epochs=5, accumulate_grad_batches=5)
    train = DataLoader(OfUnknownLength(place), BATCH)
    trainer.fit(Net(place), train, DataLoader(data(32, 5), 16))
    return {**trace.result(trainer), "stopped": stopping.stopped_epoch}


SCENARIOS = {"stream": stream, "endless": endless, "stopping_stream": stopping_stream}
