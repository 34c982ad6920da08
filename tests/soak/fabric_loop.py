"""One process of `tests.soak.stops`: a Fabric loop as people write it, with collectives in each batch.

    python tests/soak/fabric_loop.py FOLDER GROUPS STEPS TIMEOUT_S

Each step that counts appends a line to `FOLDER/GROUP.PID`: its number, and a digest of what was trained.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ft_lightning.fabric import FTDDPStrategy
from tests.harness.script import digest


def train(folder: Path, groups: int, steps: int, timeout_s: float) -> None:
    """Leaves its loop within an epoch, by the word of all."""
    strategy: Any = FTDDPStrategy(timeout_s=timeout_s, keep_state_s=0)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=groups)
    fabric.launch()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    samples = torch.randn(256, 32, generator=torch.Generator().manual_seed(2))
    data = DataLoader(TensorDataset(samples), 8, shuffle=True)
    loader = fabric.setup_dataloaders(data)
    whole = fabric.setup_dataloaders(
        DataLoader(TensorDataset(samples), 64), use_distributed_sampler=False
    )
    place = f"{os.environ['REPLICA_GROUP_ID']}.{os.getpid()}"
    with (folder / place).open("a", buffering=1) as log:
        for _ in strategy.epochs(1_000_000):
            model.train()
            for (batch,) in loader:
                done = torch.tensor(float(strategy.progress.step >= steps))
                if fabric.all_reduce(done, reduce_op="max") > 0:
                    return
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if strategy.last_step_committed:
                    log.write(f"{strategy.progress.step} {digest(net.state_dict())}\n")
                time.sleep(0.02)  # leaves the cores to others
            model.eval()
            with torch.no_grad():
                losses = [model(batch).square().mean() for (batch,) in whole]
            fabric.all_reduce(torch.stack(losses).mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
