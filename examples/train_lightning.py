"""Digits with PyTorch Lightning, in replica groups that may die.

    python examples/train_lightning.py --devices 3

starts three replica groups on this machine. Kill -9 any of the processes, and watch the others
continue and the killed one come back. The line that makes it fault tolerant is marked.

Or start the processes yourself, on any machines:

    lighthouse --bind tcp://0.0.0.0:29510 &
    export TORCHFT_LIGHTHOUSE=tcp://localhost:29510 NUM_REPLICA_GROUPS=3
    for i in 0 1 2; do REPLICA_GROUP_ID=$i python examples/train_lightning.py & done; wait
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    """A small convolutional network; 8 x 8 pixels, ten classes."""

    def __init__(self, step_delay_s: float) -> None:
        super().__init__()
        self.step_delay_s = step_delay_s
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.step_delay_s)
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("val_accuracy", right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def data(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1500], labels[:1500])
    val = TensorDataset(images[1500:], labels[1500:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, 256)


def digest(module: nn.Module) -> str:
    """Equal for equal weights, to the bit."""
    total = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(module.state_dict().items()):
        total.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1, help="replica groups on this machine")
    parser.add_argument("--accelerator", default="cpu", help="what Trainer takes")
    parser.add_argument("--max-epochs", type=int, default=None)
    parser.add_argument("--max-steps", type=int, default=None, help="default: 200")
    parser.add_argument("--batch-size", type=int, default=32, help="of each replica group")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    parser.add_argument("--out", type=Path, help="write the final weights' digest to this file")
    args = parser.parse_args()
    max_steps = args.max_steps or (-1 if args.max_epochs else 200)

    torch.set_num_threads(1)
    seed_everything(args.seed)
    model = Digits(args.step_delay)
    train, val = data(args.batch_size)
    trainer = Trainer(
        strategy="ft_ddp",  # this one; the name is known where the package is installed
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.max_epochs,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=args.progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, train, val)

    result = {
        "replica_group": os.environ.get("REPLICA_GROUP_ID", "0"),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "val_accuracy": float(trainer.callback_metrics.get("val_accuracy", float("nan"))),
        "digest": digest(model),
    }
    print(json.dumps(result), flush=True)
    if args.out is not None:
        out = args.out.with_name(args.out.name.replace("%r", result["replica_group"]))
        out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
