"""A Trainer of one replica group: it agrees with no one, and ends its epochs as under `ddp`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]

WITHOUT_LOSS = """
import json, sys
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel

class Diverges(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch and batch_idx == 2:
            return None  # as scripts do where a loss is not finite
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        self.log("worse", float(self.trainer.current_epoch))

class Stops(BoringModel):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = True

ends = []
for model, callbacks in ((Diverges(), [EarlyStopping("worse", patience=1)]), (Stops(), [])):
    trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=1, max_epochs=9, limit_train_batches=3,
                      limit_val_batches=1, logger=False, enable_checkpointing=False, callbacks=callbacks,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model)
    ends.append([trainer.current_epoch, trainer.global_step])
print(json.dumps(ends))
"""


@pytest.mark.process
def test_an_epoch_whose_last_batch_has_no_loss_stops_where_ddp_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_LOSS)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    env |= {"PYTHONPATH": str(ROOT), "FT_JOB_ID": str(tmp_path)}
    ends = []
    for strategy in ("ddp", "ft_ddp"):
        done = workers.run("lightning", ["train.py", strategy], env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        ends.append(json.loads(done.stdout.splitlines()[-1]))
    assert ends[0] == ends[1]
