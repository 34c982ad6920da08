"""Scenarios (see `scenarios.py`) of validations that replica groups divide among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.wrappers import MinMaxMetric

from tests.ft_lightning.trainer.scenarios import BATCH, Net, Place, Result, data

VALIDATED, VAL_BATCH = 37, 4  # ten batches, the last one of one sample
LOADERS = {"one": (VALIDATED,), "two": (VALIDATED, 9), "tiny": (3,)}


class Longest(Metric):
    """A state that is a list without a reduction, as retrieval metrics have."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("losses", default=[], dist_reduce_fx=None)

    def update(self, losses: Tensor) -> None:
        self.losses.append(losses)  # type: ignore[union-attr,operator]

    def compute(self) -> Tensor:
        assert isinstance(self.losses, list)
        return torch.cat(self.losses).topk(3).values.mean()


class Measured(Net):
    """Logs in every way that there is, and computes the same in one process on the whole set."""

    def __init__(self, place: Place, sets: tuple[int, ...]) -> None:
        super().__init__(place)
        self.sets = [data(size, 20 + size) for size in sets]
        self.accuracy = MulticlassAccuracy(3)
        self.ranking = MulticlassAUROC(3)  # keeps all predictions
        self.longest = Longest()
        self.best = MinMaxMetric(MulticlassAccuracy(3))
        self.several = MetricCollection(
            {"micro": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3)}
        )
        self.trained = MulticlassAccuracy(3)
        self.seen: list[tuple[int, int]] = []
        self.learnt: list[tuple[int, int]] = []
        self.shown: list[dict[str, float]] = []
        self.truth: list[dict[str, float]] = []
        self.counted: list[list[int]] = []

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(each, VAL_BATCH) for each in self.sets]
        return loaders if len(loaders) > 1 else loaders[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0]).detach()
        self.trained(scores, batch[1])
        if self.trainer.current_epoch == self.trainer.max_epochs - 1:
            self.learnt += zip(scores.argmax(-1).tolist(), batch[1].tolist(), strict=True)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.seen.append((dataloader_idx, batch_idx))
        logits, labels = self.net(batch[0]), batch[1]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        self.log("val", losses.mean())
        self.log("synced", losses.mean(), sync_dist=True)
        self.log("total", losses.sum(), reduce_fx="sum")
        self.log("largest", losses.max(), reduce_fx="max")
        self.log("least", losses.min(), reduce_fx=torch.min)
        if batch_idx == 1:
            self.log("second batch", losses.mean())
        if dataloader_idx == 0:
            for metric in (self.accuracy, self.ranking, self.best):
                metric.update(logits.softmax(-1), labels)
            self.several.update(logits.softmax(-1), labels)
            self.longest.update(losses)
            self.log("accuracy", self.accuracy, add_dataloader_idx=False)
            self.log("ranking", self.ranking, add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.log("best", self.best.compute()["max"])
        self.log_dict(self.several.compute())
        self.log("longest", self.longest.compute())
        self.log("once a member", torch.tensor(3.0), reduce_fx="sum", sync_dist=True)
        for metric in (self.best, self.several, self.longest):
            metric.reset()

    def on_validation_end(self) -> None:
        progress = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress
        self.counted.append([progress.current.ready, progress.current.completed])

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch:
            self.note()

    def on_train_end(self) -> None:
        self.note()

    def note(self) -> None:
        """What callbacks have seen of the last validation, and what they should have."""
        metrics = {k: float(v) for k, v in self.trainer.callback_metrics.items()}
        self.shown.append({k: v for k, v in metrics.items() if "train" not in k})


class Truth:
    """The whole set, in one process, when a validation has ended."""

    @staticmethod
    @torch.no_grad()
    def of(module: Measured) -> dict[str, float]:
        module.net.eval()
        found: dict[str, float] = {}
        for index, each in enumerate(module.sets):
            suffix = f"/dataloader_idx_{index}" if len(module.sets) > 1 else ""
            images, labels = each.tensors
            logits = module.net(images)
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            part = losses[VAL_BATCH : 2 * VAL_BATCH]
            found |= {
                f"val{suffix}": float(losses.mean()),
                f"synced{suffix}": float(losses.mean()),
                f"total{suffix}": float(losses.sum()),
                f"largest{suffix}": float(losses.max()),
                f"least{suffix}": float(losses.min()),
            }
            if len(part):
                found[f"second batch{suffix}"] = float(part.mean())
            if index == 0:
                scores = logits.softmax(-1)
                found |= {
                    "accuracy": float(MulticlassAccuracy(3)(scores, labels)),
                    "best": float(MulticlassAccuracy(3)(scores, labels)),
                    "ranking": float(MulticlassAUROC(3)(scores, labels)),
                    "micro": float(MulticlassAccuracy(3, average="micro")(scores, labels)),
                    "f1": float(MulticlassF1Score(3)(scores, labels)),
                    "longest": float(losses.topk(min(3, len(losses))).values.mean()),
                }
        module.net.train()
        return found


def measured(place: Place, validation: str, name: str) -> Result:
    from lightning.pytorch import Callback

    import ft_lightning

    class Checking(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.truth.append(Truth.of(module))

    strategy = ft_lightning.FTDDPStrategy(validation=validation)  # type: ignore[arg-type]
    module = Measured(place, LOADERS[name])
    trainer = place.trainer(Checking(), strategy=strategy, max_epochs=2)
    trainer.fit(module, DataLoader(data(), BATCH, shuffle=True))
    return {
        "seen": module.seen,
        "shown": module.shown,
        "truth": module.truth,
        "counted": module.counted,
        "trained": float(trainer.callback_metrics["trained"]),
        "learnt": module.learnt,
    }


def sharded(place: Place, variant: str) -> Result:
    """`variant`: of LOADERS."""
    return measured(place, "sharded", variant)


def replicated(place: Place, variant: str) -> Result:
    return measured(place, "replicated", variant)


SCENARIOS = {f.__name__: f for f in (sharded, replicated)}
