"""Warm starts of `accelerate launch`: the ranks of a group that dies are forked."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness.waiting import PATIENCE_S, template_of, until

SCRIPT = """
import os, sys
warm = "ft_core.launch.warm.template" in sys.modules
import time
from pathlib import Path
import torch
from accelerate import Accelerator

log, restarts = Path(sys.argv[1]), os.environ["FT_RESTARTS"]
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.01), torch.utils.data.DataLoader(data, 8))
life = f"{os.environ['RANK']}.{restarts}"
while True:
    for batch, in loader:
        time.sleep(0.02)  # leaves the cores to what starts
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        if not (log / life).exists():
            (log / f"{life}.part").write_text(f"{os.getpid()} {warm} {__name__} {sys.argv[1:]}")
            (log / f"{life}.part").rename(log / life)
"""


@pytest.mark.process
def test_the_ranks_of_a_group_that_dies_come_back_warm(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--cpu", "--num_processes", "2", "--fault_tolerance_group_size", "2"]
    command = [*accelerate("launch"), *flags, str(script), str(tmp_path)]
    env = installed(tmp_path / "package", FT_WARM_START="1", ACCELERATE_USE_FAULT_TOLERANCE="true")
    said_to = tmp_path / "said"
    with said_to.open("wb") as err, subprocess.Popen(command, env=env, stderr=err) as launcher:
        until(lambda: all((tmp_path / f"{rank}.0").exists() for rank in (0, 1)), "a step")
        until(lambda: template_of(launcher.pid), "the template")
        os.kill(int((tmp_path / "1.0").read_text().split()[0]), signal.SIGKILL)
        until(lambda: all((tmp_path / f"{rank}.1").exists() for rank in (0, 1)), "the next life")
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(PATIENCE_S)
    said = [
        (tmp_path / f"{rank}.{life}").read_text().split()[1:] for rank in (0, 1) for life in (0, 1)
    ]
    assert said == [
        [str(warm), "__main__", str([str(tmp_path)])] for _ in (0, 1) for warm in (False, True)
    ]
    assert "Warning" not in said_to.read_text()
