"""The keeper under `devices=N`: all groups are killed, and they go on from what it holds."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]
TRAINER = """
import os, sys, time
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ft_lightning.pytorch import FTDDPStrategy

log = Path(sys.argv[1])
life = f"{os.environ.get('REPLICA_GROUP_ID')}.{os.environ.get('FT_RESTARTS')}"

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
FABRIC = """
import os, sys, time
from pathlib import Path
import torch
from lightning.fabric import Fabric
from ft_lightning.fabric import FTDDPStrategy

log = Path(sys.argv[1])
life = f"{os.environ.get('REPLICA_GROUP_ID')}.{os.environ.get('FT_RESTARTS')}"
strategy = FTDDPStrategy(keep_state_s=0.1)
fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
fabric.launch()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0))
numbers = torch.arange(64.0)[:, None]
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(numbers, 1, shuffle=False))
for epoch in strategy.epochs(1_000_000):
    for index, batch in enumerate(loader):
        weight = float(next(model.parameters()).detach())
        fabric.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)  # leaves the cores to what starts
        both = strategy.num_participants == 2 and strategy.last_step_committed
        if both and not (log / life).exists():
            step = strategy.current_step
            # The weight counts the steps, and the batch (of this group's half) is that of the step.
            assert (weight, int(batch) // 2) == (1 - step, (step - 1) % 32), (weight, batch, step)
            passes = strategy.progress.places[0].epoch  # `epoch` is the one in which it began
            (log / f"{life}.part").write_text(f"{os.getpid()} {step} {passes * 32 + int(batch) // 2}")
            (log / f"{life}.part").rename(log / life)
"""


SHARDED = """
import os, sys, time
from pathlib import Path
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.fsdp import fully_shard
from ft_lightning.pytorch import FTFSDPStrategy

log = Path(sys.argv[1])
life = f"{os.environ.get('REPLICA_GROUP_ID')}.{os.environ.get('FT_RESTARTS')}"

class Model(BoringModel):
    def configure_model(self):
        if not isinstance(self.layer, torch.distributed.fsdp.FSDPModule):
            torch.nn.init.zeros_(self.layer.weight)
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1.0)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 32)).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.02)  # leaves the cores to what starts
        strategy, step = self.trainer.strategy, self.trainer.global_step
        # Under one gradient Adam's steps have one length: the shards of this rank count them.
        torch.testing.assert_close(self.layer.weight.to_local(), torch.full((1, 32), -float(step)))
        if strategy.scope.group_rank == 0 and not (log / life).exists():
            done = self.trainer.current_epoch * 32 + batch_idx
            (log / f"{life}.part").write_text(f"{os.getpid()} {step} {done}")
            (log / f"{life}.part").rename(log / life)

Trainer(strategy=FTFSDPStrategy(keep_state_s=0.1, group_size=2), accelerator="cpu", devices=2,
        max_epochs=1_000_000, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False).fit(Model())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "groups"),
    [
        (TRAINER, (0, 1)),
        (FABRIC, (0, 1)),
        (FABRIC.replace("strategy.epochs", "range"), (0, 1)),
        (SHARDED, (0,)),
    ],
    ids=["trainer", "fabric", "range", "sharded"],
)
def test_all_groups_are_killed_and_go_on(
    tmp_path: Path, script: str, groups: tuple[int, ...]
) -> None:
    """The ranks of the only group share one model, in the last case: it ends with one of them."""
    (tmp_path / "train.py").write_text(script)
    told = tmp_path / "told.txt"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with told.open("wb") as errors:
        command = ["train.py", str(tmp_path)]
        job = workers.start("lightning", command, cwd=tmp_path, env=env, stderr=errors)
    try:
        until(lambda: "is kept by a process of its own" in told.read_text(), "a state is kept")
        for group in groups:
            until((tmp_path / f"{group}.0").exists, "both groups have trained together")
            os.kill(int((tmp_path / f"{group}.0").read_text().split()[0]), signal.SIGKILL)
        for group in groups:
            until((tmp_path / f"{group}.1").exists, "they are back")
        job.terminate()
        job.wait(PATIENCE_S)
    finally:
        job.end()
    found = re.search(r"the job goes on from the kept state of step ([\d,]+)", told.read_text())
    assert bool(found) == (len(groups) > 1), told.read_text()  # an only group has no narrator
    kept = int(found[1].replace(",", "")) if found else 1
    for group in groups:
        _, step, batch = map(int, (tmp_path / f"{group}.1").read_text().split())
        assert step >= kept > 0
        assert batch + 1 == step, "in the place of the data that belongs to the state"
