"""A GAN with manual optimization: two optimizers a batch, in replica groups that may die.

    python examples/train_gan.py --devices 2

The generator learns to draw handwritten digits of 8 x 8 pixels; the discriminator tells them from
real ones. Each backward pass of a batch is a step with a vote of its own; a discarded one is tried
again.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NOISE = 16


class Gan(LightningModule):
    """`automatic_optimization` is off: `training_step` steps both optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        optimizer_g, optimizer_d = self.optimizers()  # type: ignore[attr-defined]
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))

        self.toggle_optimizer(optimizer_d)
        loss_d = self.judge(real, 1.0) + self.judge(fake.detach(), 0.0)
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        loss_g = self.judge(fake, 1.0)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)
        self.log_dict({"loss_g": loss_g, "loss_d": loss_d}, prog_bar=True)

    def judge(self, images: Tensor, truth: float) -> Tensor:
        found = self.discriminator(images).squeeze(1)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, truth))

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=2e-3),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2, help="replica groups on this machine")
    parser.add_argument("--max-epochs", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model = Gan()
    trainer = Trainer(
        strategy="ft_ddp",
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(images), 64, shuffle=True))
    print(
        json.dumps(
            {
                "replica_group": os.environ.get("REPLICA_GROUP_ID", "0"),
                "step": trainer.global_step,
                "weights": float(sum(p.detach().double().sum() for p in model.parameters())),
                "loss_g": float(trainer.callback_metrics["loss_g"]),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
