"""The keeper under `devices=N`: all groups are killed, and the fit goes on from what it holds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]
TRAINER = """
import os, sys, time
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ft_lightning.pytorch import FTDDPStrategy

log = Path(sys.argv[1])
life = f"{os.environ.get('REPLICA_GROUP_ID')}.{os.environ.get('FT_LIGHTNING_RESTARTS')}"

class Model(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.02)  # leaves the cores to what starts
        both = self.trainer.strategy.num_participants == 2
        if both and not (log / life).exists():
            place = self.trainer.global_step, self.trainer.current_epoch, batch_idx
            (log / f"{life}.part").write_text(f"{os.getpid()} {place[0]} {place[1] * 32 + place[2]}")
            (log / f"{life}.part").rename(log / life)

strategy = FTDDPStrategy(keep_state_s=0.1)
Trainer(strategy=strategy, accelerator="cpu", devices=2,
        max_epochs=1_000_000, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False).fit(Model())
"""


@pytest.mark.process
def test_all_groups_are_killed_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    told = tmp_path / "told.txt"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py", str(tmp_path)]
    with (
        told.open("wb") as errors,
        subprocess.Popen(command, cwd=tmp_path, env=env, stderr=errors) as job,
    ):
        until(lambda: "is kept by a process of its own" in told.read_text(), "a state is kept")
        for group in (0, 1):
            until((tmp_path / f"{group}.0").exists, "both groups have trained together")
            os.kill(int((tmp_path / f"{group}.0").read_text().split()[0]), signal.SIGKILL)
        for group in (0, 1):
            until((tmp_path / f"{group}.1").exists, "they are back")
        job.terminate()
        job.wait(PATIENCE_S)
    found = re.search(r"the job goes on from the kept state of step ([\d,]+)", told.read_text())
    assert found, told.read_text()
    kept = int(found[1].replace(",", ""))
    for group in (0, 1):
        _, step, batch = map(int, (tmp_path / f"{group}.1").read_text().split())
        assert step >= kept > 1
        assert batch + 1 == step, "in the place of the data that belongs to the state"
