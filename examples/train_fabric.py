"""Digits with a Lightning Fabric loop, in replica groups that may die.

    python examples/train_fabric.py --devices 2

Kill -9 any of the processes, and watch it come back at its peers' position. Differences from a loop
for plain "ddp" are marked (1) to (4).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2, help="replica groups on this machine")
    parser.add_argument("--accelerator", default="cpu", help="what Fabric takes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--checkpoint", type=Path, help="save there each epoch; resume from it")
    args = parser.parse_args()

    torch.set_num_threads(1)
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy="ft_ddp")  # 1
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    strategy: Any = fabric.strategy

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
    model, optimizer = fabric.setup(net, optimizer)

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train = fabric.setup_dataloaders(
        DataLoader(TensorDataset(images[:1500], labels[:1500]), 32, shuffle=True)
    )
    val = fabric.to_device((images[1500:], labels[1500:]))

    seen = {"samples": 0}
    strategy.register("seen", seen)  # 2: your own state heals with the model
    strategy.register("scheduler", scheduler)  # so does it; it skips updates that are skipped
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": strategy.progress,
    }
    if args.checkpoint is not None and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)

    accuracy = 0.0
    for epoch in strategy.epochs(args.epochs):  # 3: instead of range; follows heals and resumes
        model.train()
        for batch, target in train:
            time.sleep(args.step_delay)
            loss = F.cross_entropy(model(batch), target)
            fabric.backward(loss)
            mean_loss = fabric.all_reduce(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if strategy.last_step_committed:  # 4: False if its update was skipped
                seen["samples"] += len(batch)
        model.eval()
        with torch.no_grad():
            accuracy = float((model(val[0]).argmax(1) == val[1]).float().mean())
        if fabric.is_global_zero:
            print(
                f"epoch {epoch}: loss {float(mean_loss):.4f}, accuracy {accuracy:.3f}", flush=True
            )
        if args.checkpoint is not None:
            fabric.save(args.checkpoint, state)

    group = os.environ.get("REPLICA_GROUP_ID", "0")
    weights = float(sum(p.detach().double().sum() for p in net.parameters()))
    print(
        json.dumps(
            {
                "replica_group": group,
                "step": strategy.current_step,
                "weights": weights,
                "accuracy": accuracy,
                "samples": seen["samples"],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
