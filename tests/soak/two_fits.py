"""One process of `tests.soak.stops`: a script with two Trainers, at Lightning's default settings but for the bar.

    python tests/soak/two_fits.py FOLDER GROUPS STEPS TIMEOUT_S

Each step appends a line to `FOLDER/GROUP.PID`: its number in both fits, and a digest of what was trained.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ft_lightning.pytorch import FTDDPStrategy
from tests.harness.script import digest

FITS = 2


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Steps(Callback):
    def __init__(self, folder: Path, before: int) -> None:
        place = f"{os.environ.get('REPLICA_GROUP_ID', '')}.{os.getpid()}"
        self.path, self.before = folder / place, before

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with self.path.open("a") as log:
            log.write(f"{self.before + trainer.global_step} {digest(module.state_dict())}\n")
        time.sleep(0.02)  # leaves the cores to others


def train(folder: Path, groups: int, steps: int, timeout_s: float) -> None:
    seed_everything(1, verbose=False)
    model = Model()
    samples = TensorDataset(torch.randn(256, 32))
    for number in range(FITS):
        strategy: Any = FTDDPStrategy(timeout_s=timeout_s, keep_state_s=0)
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=groups,
            max_steps=steps // FITS,
            default_root_dir=folder / f"fit-{number}",
            enable_progress_bar=False,
            callbacks=[Steps(folder, number * steps // FITS)],
        )
        trainer.fit(model, DataLoader(samples, 8, shuffle=True), DataLoader(samples, 64))
        trainer.validate(model, DataLoader(samples, 64), verbose=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
