"""A Lightning that is newer than those that were tested: taken with a warning, if it counts as they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
import ft_lightning

lightning.__version__ = "2.99.1"
if sys.argv[1] == "moved":
    del _TrainingEpochLoop._should_accumulate
Trainer(strategy="ft_ddp", accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=2,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False).fit(BoringModel())
print("trained")
"""
FABRIC = """
import lightning
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
import ft_lightning

lightning.__version__ = "2.99.1"
fabric = Fabric(strategy="ft_ddp", accelerator="cpu", devices=1)
fabric.launch()
net = torch.nn.Linear(2, 1)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for batch in fabric.setup_dataloaders(DataLoader(torch.ones(2, 2))):
    fabric.backward(model(batch).sum())
    optimizer.step()
print("trained")
"""


@pytest.mark.process
@pytest.mark.parametrize("counters", ["there", "moved", "none (Fabric)"])
def test_a_newer_lightning_is_taken_with_a_warning_or_refused(
    tmp_path: Path, counters: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FABRIC if "Fabric" in counters else SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FT_JOB_ID": str(tmp_path)}
    done = workers.run("lightning", [str(script), counters], env=env)
    said = done.stdout + done.stderr
    if counters != "moved":
        assert done.returncode == 0, said
        assert said.count("lightning 2.99.1 is newer than what ft_lightning was tested with (") == 1
        assert "trained" in said
    else:
        assert done.returncode != 0
        assert "RuntimeError: this version of Lightning keeps its loop state in another way" in said
