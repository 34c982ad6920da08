"""A Fabric's loggers go on in the next leader, in real processes."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from tests.ft_lightning.harness import running
from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.process

LOGS = """
import os, sys, time
from pathlib import Path
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
import ft_lightning

folder = Path(sys.argv[1])
logger = CSVLogger(folder, flush_logs_every_n_steps=1000)
strategy, devices = sys.argv[2], int(sys.argv[3])
fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices, loggers=logger)
fabric.launch()
fabric.log("batch_size", 4, step=0)
net = torch.nn.Linear(4, 1)
model = fabric.setup(net)
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
data = TensorDataset(torch.randn(40, 4))
loader = fabric.setup_dataloaders(DataLoader(data, 4))
lasts = 0

def dies(where):
    # Each group leads once, and dies when the other one is there. All rows are held back by the logger, also those
    # from before the other one has come back.
    path = folder / where
    if fabric.is_global_zero and lasts >= 4 and not path.exists():
        if where == "before" or (folder / "before").exists():
            path.touch()
            os.kill(os.getpid(), 9)

def all_done():
    done = (folder / "after").exists() and lasts >= 4
    return fabric.all_reduce(torch.tensor(float(done)), reduce_op="max") > 0

for epoch in fabric.strategy.epochs(1_000_000):
    for (batch,) in loader:
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        step = fabric.strategy.current_step
        lasts = lasts + 1 if fabric.strategy.num_participants == devices else 0
        dies("before")
        fabric.log("loss", loss, step=step)
        dies("after")
    rate = fabric.all_reduce(torch.tensor(0.5))
    fabric.log("rate", rate, step=step)
    if all_done():
        break
logger.save()
"""


@pytest.mark.parametrize(("strategy", "devices"), [("ft_ddp", 2), ("ft_fsdp", 4)])
def test_one_file_has_each_row_once_when_leaders_are_killed(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOGS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = workers.run("lightning", [str(script), str(tmp_path), strategy, str(devices)], env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "before").exists()
    assert (tmp_path / "after").exists()
    (file,) = tmp_path.glob("**/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    losses = [int(row["step"]) for row in rows if row["loss"]]
    assert losses == list(range(1, losses[-1] + 1))
    rates = [int(row["step"]) for row in rows if row["rate"]]
    assert rates == list(range(rates[0], losses[-1] + 1, rates[0]))
    assert [row["step"] for row in rows if row["batch_size"]] == ["0"]


UNREACHABLE = """
import sys
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
import ft_lightning

fabric = Fabric(strategy="ft_ddp", accelerator="cpu", loggers=CSVLogger(sys.argv[0]))  # which is a file
fabric.launch()
net = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(40, 4)), 4))
for epoch in fabric.strategy.epochs(2):
    for (batch,) in loader:
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("loss", loss, step=fabric.strategy.current_step)
"""


def test_a_logger_that_no_group_can_open_ends_each_with_its_error(
    tmp_path: Path, lighthouse: str
) -> None:
    """As stock Fabric, and as a Trainer. The second one trained to the end, and logged nothing."""
    script = tmp_path / "train.py"
    script.write_text(UNREACHABLE)
    with running(tmp_path, lighthouse, worker=script) as run:
        first, second = run.start(0), run.start(1)
        run.wait(first, code=1)
        run.wait(second, code=1)
        assert run.output().count("FileExistsError: [Errno 17]") == 2
