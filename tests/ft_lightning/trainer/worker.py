"""One process of a test: a real Trainer with a log of everything that must agree.

    python tests/ft_lightning/trainer/worker.py '{"log": "/dir", "strategy": "ft_ddp", ...}'

Options (JSON): see `OPTIONS`. Each optimizer step appends one line to `<log>/<name>.steps`, the
end of the fit writes `<log>/<name>.end`.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ft_lightning
from tests.harness.script import Log, digest, fail_once, flip_bit, options_of, process_name
from tests.harness.stock import leave_stock

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy": "ft_ddp",
    "strategy_options": None,  # given: by object
    "devices": 1,
    "max_epochs": 2,
    "samples": 152,
    "batch_size": 4,
    "stream": False,  # data of unknown length, which keeps its place
    "synced": False,  # each batch's loss is logged as the mean over all
    "accumulate": 1,
    "min_steps": None,
    "asks_to_stop": None,  # from this global step on
    "validates": 1.0,  # each so many batches; a float: that part of an epoch
    "step_delay_s": 0.0,
    "seed": 7,
    "own_start": False,  # each process begins with other parameters
    "inject": {},  # {"<global step>": replica index}: this replica reports an error once
    "raises": {},  # {"<global step>": [replica index, ...]}: their optimizers raise once, and are caught
    "flips": {},  # {"<global step>": replica index}: a bit of its parameters flips after that step, once
    "dies": {},  # {"<global step>": replica index}: it is killed in that step's backward, once
    "momentum": False,  # a copy of the net that follows it, in `training_step`, and a weight that is normalized there
    "manual": False,
    "every": 1,  # of so many batches the last one has an update, by hand
    "gan": False,  # two optimizers, by hand; in every other batch on one loss
    "gathers": False,  # validation calls collectives
    "checkpoints": False,
    "logs": False,  # a CSV logger, a weight average, an early stopping
    "trackers": [],  # modules of trackers; given: a CSV logger before and after theirs, and what a
    # Trainer shows by default
    "holds": [],  # places to wait at, see `script.Log`: "step:<global step>", "dies:<global step>", "end:<epoch>",
    # "row:<epoch>" (the leader, before its other loggers write what an epoch ends with), "validation:<epoch>", "val batch:<epoch>:<index>"
}


class Model(LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.automatic_optimization = not (options["manual"] or options["gan"])
        self.save_hyperparameters({"batch_size": options["batch_size"]})
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        if options["momentum"]:
            self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.injected: set[str] = set()
        self.runs: list[list[int]] = []
        self.validated: list[int] = []
        self.files = Log(options["log"], process_name(), options["holds"])

    def on_train_epoch_end(self) -> None:
        self.files.at(f"end:{self.trainer.current_epoch}")
        self.log("ended", float(self.trainer.current_epoch))

    def on_validation_end(self) -> None:
        """A line for each validation: the batches that were done here, the metric, the truth."""
        if self.trainer.sanity_checking:
            return
        images, labels = self.trainer.val_dataloaders.dataset.tensors
        self.files.append(
            "validations",
            epoch=self.trainer.current_epoch,
            batches=self.validated,
            val_loss=float(self.trainer.callback_metrics["val_loss"]),
            truth=float(nn.functional.cross_entropy(self.net(images), labels)),
        )
        self.validated = []

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.files.at(f"validation:{self.trainer.current_epoch}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.runs.append([self.trainer.current_epoch, batch_idx])
        self.files.at(f"step:{self.trainer.global_step}")
        time.sleep(self.options["step_delay_s"])
        if self.trainer.global_step == self.options["asks_to_stop"]:
            self.trainer.should_stop = True
        step = str(self.trainer.global_step)
        if self.options["inject"].get(step) == self.global_rank and step not in self.injected:
            self.injected.add(step)
            self.trainer.strategy.manager.report_error(RuntimeError("injected"))
        self.batch = [float(x) for x in batch[0][:, 0]]
        self.batch_idx = batch_idx
        if self.options["momentum"]:
            self.follow()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.options["momentum"]:
            loss = loss + nn.functional.mse_loss(self.net(batch[0]), self.slow(batch[0]))
        self.perhaps_die(loss)
        self.log("train_loss", loss, sync_dist=self.options["synced"])
        if self.options["gan"] and batch_idx % 2 == 0:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            self.log("synced", loss.detach(), sync_dist=True)
        elif self.options["gan"]:
            for optimizer, part in zip(self.optimizers(), (self.net[0], self.net[3]), strict=True):
                optimizer.zero_grad()
                self.toggle_optimizer(optimizer)
                assert all(p.requires_grad for p in part.parameters())
                own = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.perhaps_die(own)
                self.manual_backward(own)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
        elif self.options["manual"]:
            self.update_seldom(loss, batch_idx)
        return loss

    def update_seldom(self, loss: Tensor, batch_idx: int) -> None:
        self.log("synced", loss.detach(), sync_dist=True)
        synced = float(self.trainer.callback_metrics["synced"])
        self.files.append("synced", epoch=self.trainer.current_epoch, batch=batch_idx, value=synced)
        if (batch_idx + 1) % self.options["every"] == 0:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                self.files.append("raised", step=self.trainer.global_step)

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.options["momentum"]:
            self.net[0].weight.mul_(1.001)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Between forward and backward."""
        if self.options["momentum"]:
            self.net[3].bias.data.mul_(0.9).add_(0.01)  # no version tells of it

    @torch.no_grad()
    def follow(self) -> None:
        """As libraries do it: one in place, one by another tensor in the parameter."""
        for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        weight = self.net[3].weight
        weight.copy_(nn.functional.normalize(weight, dim=0) * 1.001)

    def perhaps_die(self, loss: Tensor) -> None:
        """In the backward of `loss`, in this replica's first life."""
        step = self.trainer.global_step

        def die(_: Tensor) -> None:
            self.files.at(f"dies:{step}")
            os.kill(os.getpid(), signal.SIGKILL)

        if self.options["dies"].get(str(step)) == self.global_rank and self.files.life == 1:
            loss.register_hook(die)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.files.at(f"val batch:{self.trainer.current_epoch}:{batch_idx}")
            self.validated.append(batch_idx)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.options["gathers"]:
            assert len(self.all_gather(loss)) == 1  # no rank waits for one that may be dead
        self.log("val_loss", loss, sync_dist=self.options["gathers"])

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().optimizer_step(*args, **kwargs)
        except torch.OutOfMemoryError:
            self.files.append("raised", step=self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        if self.options["gan"]:
            parts = [self.net[0].parameters(), self.net[3].parameters()]
            return [torch.optim.AdamW(part, lr=0.01) for part in parts]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        raises = self.options["raises"]
        fail_once(
            optimizer,
            lambda: self.global_rank in raises.get(str(self.trainer.global_step), ()),
            half=True,
            after=not self.options["manual"],
        )
        if self.options["manual"]:
            return optimizer
        step = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
        epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": epoch, "interval": "epoch", "monitor": "val_loss"},
        ]


class Recorder(Callback):
    """Has a state that a heal must bring along; writes a line a committed step."""

    def __init__(self, files: Log) -> None:
        self.files = files
        self.average: Tensor | None = None
        self.steps = 0
        self.last_step = 0
        self.started: list[tuple[int, int]] = []
        self.heard = [0, 0]  # batches that have begun, and that have ended

    def state_dict(self) -> dict[str, Any]:
        kept = {"average": self.average, "steps": self.steps, "last_step": self.last_step}
        return {**kept, "heard": list(self.heard)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.steps = state["average"], state["steps"]
        self.last_step, self.heard = state["last_step"], list(state["heard"])

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.files.ready()
        if getattr(trainer.strategy, "manager", None) is not None:
            self.tell_of_agreements(trainer)

    def tell_of_agreements(self, trainer: Any) -> None:
        """A line for each quorum that is asked for between batches."""
        manager = trainer.strategy.manager
        start_quorum = manager.start_quorum

        def telling(*args: Any, **kwargs: Any) -> None:
            if not kwargs.get("takes_state", True):
                self.files.append("agreements", epoch=trainer.current_epoch)
            start_quorum(*args, **kwargs)

        manager.start_quorum = telling

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.started.append((trainer.current_epoch, batch_idx))
        self.heard[0] += 1

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.heard[1] += 1
        strategy = trainer.strategy
        if trainer.global_step == self.last_step:
            return
        self.last_step = trainer.global_step
        self.steps += 1
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.average = flat if self.average is None else self.average * 0.9 + flat * 0.1
        line = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batch_idx": batch_idx,
            "norm": sum(float(p.abs().sum()) for p in module.parameters() if p.dim() > 1),
            "module_batch_idx": module.batch_idx,
            "last": trainer.is_last_batch,
            "total": trainer.fit_loop.total_batch_idx,
            "row": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "digest": digest(module.state_dict()),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "schedulers": [repr(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            "average": float(self.average.double().sum()),
            "steps": self.steps,
            "heard": self.heard,
            "batch": module.batch,
            "started": self.started[-1],
            "leader": trainer.is_global_zero,
        }
        for callback in trainer.callbacks:
            if hasattr(callback, "_average_model"):
                line["weights"] = digest(callback._average_model.state_dict())
            if isinstance(callback, EarlyStopping) and callback.monitor:
                line["stopping"] = repr(callback.state_dict())
        if hasattr(strategy, "manager"):
            line["manager_step"] = strategy.manager.current_step()
            line["participants"] = strategy.num_participants
            if strategy.manager.spares:
                line["share"] = strategy.manager.data_share()
        self.files.step(**line)
        flips = module.options["flips"]
        if flips.get(str(trainer.global_step)) == trainer.global_rank:
            flips.clear()
            flip_bit(module.net[0].weight)


class Clock(Callback):
    """As users write it: rank zero sets up, and uses it later."""

    @rank_zero_only
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.steps: list[int] = []

    @rank_zero_only
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.begun = batch_idx

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.begun == batch_idx
        self.steps.append(trainer.global_step)


class Waits(CSVLogger):
    """Where the test holds the leader at the row that an epoch ends with."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options["log"], "before")
        self.files = Log(options["log"], process_name(), options["holds"])

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        super().log_metrics(metrics, step)
        if "ended" in metrics and rank_zero_only.rank == 0:
            self.files.at(f"row:{int(metrics['ended'])}")


def make_loggers(options: dict[str, Any]) -> Any:
    folder = options["log"]
    if options["logs"]:
        logs = CSVLogger(folder, "logs", flush_logs_every_n_steps=1)
        waits = any(place.startswith("row:") for place in options["holds"])
        return [Waits(options), logs] if waits else logs
    if not options["trackers"]:
        return False
    found: list[Any] = [CSVLogger(folder, "first")]
    if "tensorboard" in options["trackers"]:
        found.append(TensorBoardLogger(folder, "tensorboard"))
    if "wandb" in options["trackers"]:
        found.append(WandbLogger(save_dir=folder, offline=True))
    if "mlflow" in options["trackers"]:
        found.append(MLFlowLogger("test", tracking_uri=f"sqlite:///{folder}/mlflow.db"))
    return [*found, CSVLogger(folder, "last")]


class Stream(IterableDataset[Any]):
    """One of two groups' samples, in order."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.samples = [dataset[i] for i in range(int(process_name()), len(dataset), 2)]
        self.at = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        for sample in self.samples[self.at :]:
            self.at += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def loaders(options: dict[str, Any]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(options["samples"], 8, generator=generator)
    images[:, 0] = torch.arange(options["samples"])  # every sample can be told by its number
    images[:, 0] /= 64
    labels = torch.randint(0, 3, (options["samples"],), generator=generator)
    dataset = TensorDataset(images, labels)
    return DataLoader(dataset, options["batch_size"], shuffle=True), DataLoader(dataset, 50)


def run(options: dict[str, Any]) -> Trainer:
    torch.set_num_threads(1)
    seed_everything(options["seed"], verbose=False)
    if options["own_start"]:
        torch.manual_seed(int(process_name()))
    model = Model(options)
    if "REPLICA_GROUP_ID" in os.environ:  # not in the process that starts the replicas
        model.files.begin_life()
    train, val = loaders(options)
    if options["stream"]:
        train = DataLoader(Stream(val.dataset), options["batch_size"])
    recorder = Recorder(model.files)
    callbacks: list[Any] = [recorder]
    if options["checkpoints"]:
        callbacks.append(
            ModelCheckpoint(options["log"] + "/checkpoints", every_n_train_steps=10, save_top_k=-1)
        )
    if options["trackers"]:
        callbacks.append(Clock())
        if RequirementCache("lightning>=2.6"):  # 2.5's takes no smaller last batch
            callbacks.append(ThroughputMonitor(lambda batch: len(batch[0])))
        # Its first row is older than the first quorum.
        callbacks.append(LearningRateMonitor("epoch"))
    if options["logs"]:
        if hasattr(stock_callbacks, "EMAWeightAveraging"):  # Lightning 2.6
            callbacks.append(stock_callbacks.EMAWeightAveraging(decay=0.9))
        callbacks.append(EarlyStopping("val_loss", patience=99))
    strategy = options["strategy"]
    if options["strategy_options"] is not None:
        strategy = ft_lightning.FTDDPStrategy(**options["strategy_options"])
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=options["devices"],
        max_epochs=options["max_epochs"],
        min_steps=options["min_steps"],
        accumulate_grad_batches=options["accumulate"],
        val_check_interval=options["validates"],
        callbacks=callbacks,
        logger=make_loggers(options),
        log_every_n_steps=1,
        enable_checkpointing=options["checkpoints"],
        enable_progress_bar=bool(options["trackers"]),
        enable_model_summary=bool(options["trackers"]),
        num_sanity_val_steps=1,
    )
    trainer.fit(model, train, val)
    model.files.end(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        digest=digest(model.state_dict()),
        val_loss=float(trainer.callback_metrics["val_loss"]),
        leader=trainer.is_global_zero,
        runs=model.runs,
        world_size=trainer.world_size,
        rank=trainer.global_rank,
    )
    return trainer


if __name__ == "__main__":
    given = options_of(OPTIONS)
    run(given)
    if given["strategy"] == "ddp":
        leave_stock()
