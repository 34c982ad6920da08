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


RELOADS = """
import gc, weakref
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

class Data(LightningDataModule):
    made = []
    def train_dataloader(self):
        data = RandomDataset(32, 8)
        self.made.append(weakref.ref(data))
        return DataLoader(data, 2)

class Counts(Callback):
    def on_train_epoch_end(self, trainer, module):
        gc.collect()
        assert sum(made() is not None for made in Data.made) == 1

options = dict(strategy="ft_ddp", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
               limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False)
Trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[Counts()], **options).fit(BoringModel(), Data())
assert len(Data.made) == 3
"""

LISTS = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

data = RandomDataset(32, 8)
for name, options in (("batch_sampler", {"batch_sampler": [[0, 1], [5]]}),
                      ("sampler", {"batch_size": None, "sampler": range(2)})):
    loader = DataLoader(data, **options)
    trainer = Trainer(strategy="ft_ddp", accelerator="cpu", devices=1, max_epochs=2, use_distributed_sampler=False,
                      limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False)
    trainer.fit(BoringModel(), loader)
    assert trainer.global_step == 4
    assert getattr(loader, name) is options[name]
"""


@pytest.mark.process
@pytest.mark.parametrize("script", [RELOADS, LISTS], ids=["reloads", "lists"])
def test_a_fit_keeps_no_data_of_earlier_epochs_and_takes_samplers_of_any_class(
    tmp_path: Path, script: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    env |= {"PYTHONPATH": str(ROOT), "FT_JOB_ID": str(tmp_path)}
    done = workers.run("lightning", ["train.py"], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


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
