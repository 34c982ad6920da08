"""One process of a test of "ft_diloco" and "ft_local_sgd": a real Trainer that logs outer steps.

    python tests/ft_lightning/diloco/diloco_worker.py '{"log": "/dir", "strategy": "ft_diloco", ...}'

Options (JSON): see `OPTIONS`. Each outer step appends one line to `<log>/<name>.steps`, the end of
the fit writes `<log>/<name>.end`.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import ft_lightning
from tests.ft_lightning.trainer.worker import loaders
from tests.harness.script import Log, digest, options_of, process_name

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy": "FTDiLoCoStrategy",  # a name of the registry, or a class of ft_lightning
    "strategy_options": {},
    "devices": 1,
    "max_epochs": 4,
    "samples": 152,
    "batch_size": 4,
    "accumulate": 1,
    "precision": "32-true",
    "seed": 7,
    "step_delay_s": 0.0,
    "holds": [],  # places to wait at, see `script.Log`: "step:<global step>"
    "die": None,  # [replica, global step]: SIGKILL itself there, in its first life
    "inject": {},  # {"<global step>": replica}: this replica reports an error once
    "resume": None,  # a checkpoint
    "save_every_s": [],  # of each replica: a ModelCheckpoint saves by its clock, to `<log>/timed`
}


class Model(LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.files = Log(options["log"], process_name(), options["holds"])
        self.injected: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.options["step_delay_s"])
        self.interfere(self.trainer.global_step)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def interfere(self, step: int) -> None:
        self.files.at(f"step:{step}")
        rank = self.global_rank
        self.files.die_once([rank, step] == self.options["die"])
        if self.options["inject"].get(str(step)) == rank and str(step) not in self.injected:
            self.injected.add(str(step))
            self.trainer.strategy.manager.report_error(RuntimeError("injected"))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        step = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
        epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": epoch, "interval": "epoch", "monitor": "val_loss"},
        ]


def hold_in_slots(manager: Any, files: Log) -> None:
    """Places "slot:STEPS", where the slot behind an outer step begins, which may not have its quorum any more."""
    begin = manager._attempts.begin

    def held(*args: Any, stays: bool = False, **options: Any) -> None:
        if stays:
            files.at(f"slot:{manager.current_step()}")
        begin(*args, stays=stays, **options)

    manager._attempts.begin = held


class Recorder(Callback):
    """Has a state that a heal must bring along; writes a line an outer step."""

    def __init__(self, files: Log) -> None:
        self.files = files
        self.inner_steps = 0
        """Of this life."""
        self.val_losses: list[float] = []
        self.outcome: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"val_losses": self.val_losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.val_losses = state["val_losses"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.files.ready()
        manager = trainer.strategy.manager
        if self.files.holds and manager is not None:
            hold_in_slots(manager, self.files)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        self.inner_steps += 1
        outcome = strategy.manager.last_outcome()
        if outcome is self.outcome:
            return
        self.outcome = outcome
        line = {
            "outer_step": strategy.manager.current_step(),
            "committed": outcome.committed,
            "participants": outcome.participants,
            "inner_steps": self.inner_steps,
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batches": trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            "last": trainer.is_last_batch,
            "digest": digest(strategy.lightning_module_state_dict()),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "schedulers": [repr(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            "val_losses": list(self.val_losses),
            "metrics": {
                k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("outer")
            },
            "leader": trainer.is_global_zero,
            "saved": Path(trainer.checkpoint_callbacks[-1].best_model_path).name,
        }
        self.files.step(**line)


def run(options: dict[str, Any]) -> Trainer:
    torch.set_num_threads(1)
    seed_everything(options["seed"], verbose=False)
    model = Model(options)
    if "REPLICA_GROUP_ID" in os.environ:  # not in the process that starts the replicas
        model.files.begin_life()
    train, val = loaders(options)
    recorder = Recorder(model.files)
    callbacks = [recorder, ModelCheckpoint(options["log"] + "/checkpoints", save_top_k=-1)]
    if options["save_every_s"]:
        interval = timedelta(seconds=options["save_every_s"][int(os.environ["REPLICA_GROUP_ID"])])
        callbacks.append(ModelCheckpoint(options["log"] + "/timed", train_time_interval=interval))
    strategy = options["strategy"]
    if strategy.startswith("FT"):
        strategy = getattr(ft_lightning, strategy)(**options["strategy_options"])
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=options["devices"],
        max_epochs=options["max_epochs"],
        accumulate_grad_batches=options["accumulate"],
        precision=options["precision"],
        callbacks=callbacks,
        logger=CSVLogger(options["log"] + "/csv", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(model, train, val, ckpt_path=options["resume"])
    model.files.end(
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        digest=digest(model.state_dict()),
        val_losses=recorder.val_losses,
        inner_steps=recorder.inner_steps,
        leader=trainer.is_global_zero,
    )
    return trainer


if __name__ == "__main__":
    run(options_of(OPTIONS))
