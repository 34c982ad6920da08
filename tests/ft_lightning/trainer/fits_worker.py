"""One process of a test: a script that trains twice, with Lightning's defaults.

    python tests/ft_lightning/trainer/fits_worker.py '{"log": "/dir", ...}'

Each fit trains on data of its own and appends its result to `<log>/<name>.fits`.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

import ft_lightning
from tests.harness.script import Log, digest, options_of, process_name

OPTIONS: dict[str, Any] = {
    "log": "",
    "fits": 2,
    "epochs": 2,
    "devices": 1,
    "strategy": {"timeout_s": 20},
    "ckpt_path": None,
    "averages": False,  # stochastic weight averaging, which replaces the schedulers on its way
    "checkpoints": True,
    "has_data": True,  # to train on
    "validates_each": 1.0,  # part of an epoch
    "saves": False,  # after each fit, to <log>/final.ckpt
    "validates": False,  # after each fit
    "validates_first": False,  # before the first fit, at the end of which it may hold: "before"
    "logs": False,  # each step
    "told": False,  # waits at global step 5 until it is told to end
    "tests": False,  # the best checkpoint, after each fit
    "unlike": False,  # the groups begin with weights of their own
    "scores": [],  # of each epoch's validation: the checkpoint with the lowest is the best, and is kept
    "save_last": False,  # in a file of one name, too
    "saves_each": 0,  # each so many steps, which is before the validation behind them
    "keeps_all": False,  # another callback saves each epoch, behind the first one
    "grows": 0,  # the data: with each so many epochs loaders of more samples are asked for
    "counts": "",  # ... by what the "data" module or the "model" has counted, which gives them, not by the epoch
    "fails": [],  # processes whose first fit fails, once, at step 3; the script calls it again
    "anew": False,  # ... with a new Trainer
    "again": False,  # one Trainer and one model: a later fit trains them on
    "draws": False,  # dropout, and a sampler without a generator of its own: from torch's
    "stops": False,  # early, in the first epoch; holds at "end:<fit>" before the end is recorded
    # Places to wait at: "begin:<fit>:<life>", "step:<fit>:<global step>", "save:<global step>", "final",
    # "dump:<fit>:<global step>": before that,
    # "after:<fit>", "validate:<fit>" and "test:<fit>" in these, "test_end:<fit>", "exit": when Python shuts down
    "holds": [],
}


class Model(LightningModule):
    def __init__(self, number: int, files: Log, options: dict[str, Any]) -> None:
        super().__init__()
        self.number, self.files, self.options = number, files, options
        self.fails: list[str] = options["fails"]
        self.stops, self.scores = options["stops"], options["scores"]
        self.net: nn.Module = nn.Linear(8, 3)
        if options["draws"]:
            self.net = nn.Sequential(nn.Dropout(0.3), self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.files.at(f"step:{self.number}:{self.global_step}")
        if self.files.name in self.fails and self.global_step == 3:
            self.fails = []
            raise RuntimeError("injected")
        while self.options["told"] and self.global_step == 5 and not self.trainer.received_sigterm:
            time.sleep(0.02)
        fold = {int(x) for x in batch[0][:, 0]}
        weights, step = digest(self.net.state_dict()), self.global_step
        self.files.append(
            "trained", fit=self.number, folds=sorted(fold), step=step, weights=weights
        )
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.options["logs"]:
            self.log("loss", loss)
        return loss

    def on_train_start(self) -> None:
        self.files.append("starts", weights=digest(self.net.state_dict()))
        self.files.at(f"begin:{self.number}:{self.files.life}")

    def on_train_epoch_start(self) -> None:
        self.files.append("epochs", epoch=self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop |= self.stops

    def on_train_end(self) -> None:
        self.files.append("ends", leader=self.trainer.is_global_zero)
        self.files.at(f"end:{self.number}")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.files.at(f"dump:{self.number}:{self.global_step}")

    def on_validation_epoch_start(self) -> None:
        if self.trainer.state.fn == "validate":
            self.files.at(f"validate:{self.number}")

    def on_test_epoch_start(self) -> None:
        self.files.at(f"test:{self.number}")

    def on_test_epoch_end(self) -> None:
        self.files.at(f"test_end:{self.number}")
        if self.trainer.is_global_zero:
            self.files.append("summaries", fit=self.number)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.options["grows"]:
            self.files.append("validated", epoch=self.current_epoch, fold=int(batch[0][0, 0]))
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        if self.scores:
            self.log("score", self.scores[self.current_epoch] - self.global_step / 100)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        if batch_idx + 1 == self.trainer.num_test_batches[0]:
            self.files.append("tested", fit=self.number)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)]


class HoldingIO(TorchCheckpointIO):
    """Has written a file, which has not got its name yet."""

    def __init__(self, files: Log) -> None:
        self.files = files

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.files.at("final" if "final" in str(path) else f"save:{checkpoint['global_step']}")


def data(fold: int, *, draws: bool = False) -> DataLoader[Any]:
    """Samples whose first feature is the number of their fold."""
    generator = torch.Generator().manual_seed(fold)
    images = torch.randn(32, 8, generator=generator)
    images[:, 0] = fold
    labels = torch.randint(0, 3, (32,), generator=generator)
    sampler = WeightedRandomSampler(torch.arange(1.0, 33.0), 32) if draws else None
    return DataLoader(TensorDataset(images, labels), 4, sampler=sampler)


def grown(number: int) -> DataLoader[Any]:
    return DataLoader(Subset(data(1).dataset, range(8 + 8 * number)), 4)


class Growing(LightningDataModule):
    """8 samples in the first epoch, and 8 more in each; and another validation set. `counts`: each time that
    loaders to train on are asked for."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.asked = counts, 0

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        self.asked += 1
        return grown(self.asked - 1 if self.counts else self.trainer.current_epoch)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return data(-1 - self.trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.asked = state_dict["asked"]


class GrowingModel(Model):
    """The same, of the module's own."""

    asked = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.asked += 1
        return grown(self.asked - 1)

    def val_dataloader(self) -> DataLoader[Any]:
        return data(-1 - self.current_epoch)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["asked"] = self.asked

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.asked = checkpoint["asked"]


def make(options: dict[str, Any], files: Log, number: int) -> tuple[Model, Trainer]:
    mine = int(os.environ.get("REPLICA_GROUP_ID", "0")) if options["unlike"] else 0
    seed_everything(number + 100 * mine, verbose=False)
    periodic = "sync_every" in options["strategy"]
    callbacks: list[Callback] = [StochasticWeightAveraging(0.01, 1)] if options["averages"] else []
    callbacks += [ModelCheckpoint(monitor="score")] if options["scores"] else []
    callbacks += [ModelCheckpoint(save_last=True)] if options["save_last"] else []
    if options["saves_each"]:
        callbacks.append(ModelCheckpoint(every_n_train_steps=options["saves_each"]))
    if options["keeps_all"]:
        callbacks.append(ModelCheckpoint(monitor="val_loss", save_top_k=-1, filename="all-{epoch}"))
    strategy = ft_lightning.FTDiLoCoStrategy if periodic else ft_lightning.FTDDPStrategy
    trainer = Trainer(
        accelerator="cpu",
        devices=options["devices"],
        strategy=strategy(**options["strategy"]),
        max_epochs=options["epochs"],
        plugins=[HoldingIO(files)],
        callbacks=callbacks,
        val_check_interval=options["validates_each"],
        reload_dataloaders_every_n_epochs=options["grows"],
        default_root_dir=options["log"],
        logger=CSVLogger(options["log"]),  # Lightning's own choice depends on what is installed
        enable_checkpointing=options["checkpoints"],
        log_every_n_steps=1 if options["logs"] else 50,
    )
    model = GrowingModel if options["counts"] == "model" else Model
    return model(number, files, options), trainer


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    files = Log(options["log"], process_name(), options["holds"])
    atexit.register(files.at, "exit")
    if "REPLICA_GROUP_ID" in os.environ:  # not in the process that starts the replicas
        files.begin_life()
        files.ready()
    for number in range(1, max(1, options["fits"]) + 1):
        if number == 1 or not options["again"]:
            model, trainer = make(options, files, number)
        else:
            model.number = number
            trainer.fit_loop.max_epochs += options["epochs"]
        if number == 1 and options["validates_first"]:
            trainer.validate(model, data(-number), verbose=False)
            files.at("before")
        if not options["fits"]:
            return
        loaders = (
            ()
            if options["counts"] == "model"
            else (Growing(options["counts"] == "data"),)
            if options["grows"]
            else (
                data(number, draws=options["draws"]),
                data(-number),
            )
        )
        if not options["has_data"]:
            loaders = (DataLoader(Subset(data(number).dataset, []), 4), data(-number))
        try:
            trainer.fit(model, *loaders, ckpt_path=options["ckpt_path"])
        except RuntimeError as error:
            if str(error) != "injected":
                raise
            if options["anew"]:
                _, trainer = make(options, files, number)
            trainer.fit(model, *loaders)
        files.append(
            "fits",
            fit=number,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            digest=digest(model.state_dict()),
            val_loss=float(trainer.callback_metrics["val_loss"]),
            best=getattr(trainer.checkpoint_callback, "best_model_path", ""),
        )
        if options["saves"]:
            trainer.save_checkpoint(f"{options['log']}/final.ckpt")
        files.at(f"after:{number}")
        if options["validates"]:
            trainer.validate(model, data(-number), verbose=False)
            files.append("validates", fit=number)
        if options["tests"]:
            trainer.test(ckpt_path="best", dataloaders=data(-number), verbose=False)
            files.append("tests", fit=number, leader=trainer.is_global_zero)


if __name__ == "__main__":
    main(options_of(OPTIONS))
