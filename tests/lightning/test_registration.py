"""The name reaches every registry, in whatever order things are imported; and fits run by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SMALL = """
import sys, threading, os, torch
NAMESPACE = "{namespace}"
{first}
{second}
from importlib import import_module
L = import_module(NAMESPACE)
from torch.utils.data import DataLoader, TensorDataset
assert not {other!r} in sys.modules, "the other namespace was imported"

class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(strategy):
    return L.Trainer(use_distributed_sampler=False, strategy=strategy, accelerator="cpu", devices=1, max_steps=3, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False)

dataset = TensorDataset(torch.randn(16, 2))
loader = DataLoader(dataset, batch_sampler=torch.utils.data.BatchSampler(
    torch.utils.data.DistributedSampler(dataset, 1, 0), 4, False))
import ft_lightning
open_files = []
for strategy in ("FT_DDP", ft_lightning.FTDDPStrategy(min_replicas=1, timeout_s=20)):
    t = trainer(strategy)
    assert type(t.strategy).__module__ == "{home}", type(t.strategy)
    assert isinstance(t.strategy, import_module(NAMESPACE + ".strategies").DDPStrategy)
    before = dict(os.environ)
    t.fit(Small(), loader)
    assert t.global_step == 3 and t.strategy.manager.current_step() == 3
    assert t.strategy.last_step_committed is True and t.strategy.num_participants == 1
    assert t.is_global_zero and t.world_size == 1
    assert dict(os.environ) == before, "environment changed"
    assert not any("FT" in type(c).__name__ or "_AtEpochStart" == type(c).__name__
                   for c in t.callbacks)
    assert not torch.distributed.is_initialized()
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler, "the sampler was not released"
    assert "_ft_skip" not in vars(loader.batch_sampler)
    assert t.strategy.model is t.lightning_module
    open_files.append(len(os.listdir("/proc/self/fd")))
assert open_files[0] == open_files[1], open_files
print("threads", sorted(x.name for x in threading.enumerate()))
print("done")
"""

IMPORT = "import {}"


@pytest.mark.parametrize(
    ("namespace", "home", "other", "ours_first"),
    [
        ("lightning.pytorch", "ft_lightning.pytorch", "pytorch_lightning", True),
        ("pytorch_lightning", "ft_lightning.pl", "lightning", False),
    ],
)
def test_by_name_and_by_object(namespace: str, home: str, other: str, ours_first: bool) -> None:
    imports = [IMPORT.format("ft_lightning"), IMPORT.format(namespace)]
    first, second = imports if ours_first else reversed(imports)
    script = SMALL.format(namespace=namespace, home=home, other=other, first=first, second=second)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout
    assert "threads ['MainThread']" in done.stdout


def test_import_loads_nothing_and_changes_nothing() -> None:
    script = """
import os, sys
before, path = dict(os.environ), list(sys.meta_path)
import ft_lightning
heavy = [m for m in ("torch", "lightning", "pytorch_lightning", "zmq", "ft_core") if m in sys.modules]
assert not heavy, heavy
assert dict(os.environ) == before
assert len(sys.meta_path) == len(path) + 1
ft_lightning.install()
assert len(sys.meta_path) == len(path) + 1, "installed twice"
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60)
