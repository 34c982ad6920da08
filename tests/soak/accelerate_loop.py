"""One process of `tests.soak.stops`: a raw Accelerate loop as people write it, with accumulation, a collective in
each batch, and a validation that is divided.

    accelerate launch ... tests/soak/accelerate_loop.py FOLDER GROUPS STEPS TIMEOUT_S

Each update appends a line to `FOLDER/0.PID`: its number, and a digest of what was trained.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate.install import install
from ft_accelerate.runtime import process
from tests.harness.script import digest

ACCUMULATED = 2


def train(path: Path, steps: int) -> None:
    """Leaves its loop within an epoch, as a script with a `max_steps` does."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    samples = TensorDataset(torch.randn(256, 32, generator=torch.Generator().manual_seed(2)))
    model, optimizer, loader, whole = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        DataLoader(samples, 8, shuffle=True),
        DataLoader(samples, 64),
    )
    made = 0
    with path.open("a", buffering=1) as log:
        while made < steps:
            model.train()
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.gather(loss.detach())
                made += accelerator.sync_gradients
                runtime = process.current()
                if runtime.live and accelerator.sync_gradients:
                    log.write(f"{made} {digest(net.state_dict())}\n")
                    time.sleep(0.02)  # leaves the cores to others
                if made == steps:
                    return
            model.eval()
            with torch.no_grad():
                for (batch,) in whole:
                    accelerator.gather_for_metrics(model(batch).square().mean(1))


if __name__ == "__main__":
    install()
    torch.set_num_threads(1)
    train(Path(sys.argv[1]) / f"0.{os.getpid()}", int(sys.argv[3]))
