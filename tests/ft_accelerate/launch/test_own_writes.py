"""The main process is killed in a file that the script writes by itself, under `accelerate launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator

folder, where = Path(sys.argv[1]), sys.argv[2]
name = "ACCELERATE_FAULT_TOLERANCE_"
dies = (os.environ[name + "REPLICA_GROUP_ID"], os.environ["FT_RESTARTS"]) == ("0", "0")

def write(name):
    path = folder / name
    path.write_text("half")
    if dies and where == name:
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text("whole")

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)

@accelerator.on_main_process
def write_alone(name):
    write(name)

model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), 0.01), torch.utils.data.DataLoader(data, 4))
for epoch in range(3):
    for batch, in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            write("in_a_pass")
    if accelerator.is_main_process:
        write("after_an_epoch")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    write("at_the_end")
accelerator.wait_for_everyone()
write_alone("decorated")
accelerator.wait_for_everyone()
"""
FILES = ("in_a_pass", "after_an_epoch", "at_the_end", "decorated")


@pytest.mark.process
@pytest.mark.parametrize("where", FILES)
def test_success_means_that_each_file_is_whole(tmp_path: Path, where: str) -> None:
    """The next main process used to come with the next operation, and the exit code was 0."""
    train, output = tmp_path / "train.py", tmp_path / "told.txt"
    train.write_text(SCRIPT)
    flags = ["--cpu", "--num_processes", "2", "--use_fault_tolerance"]
    command = [*accelerate("launch")[1:], *flags, str(train), str(tmp_path), where]
    with output.open("wb") as told:
        launcher = workers.start(
            "accelerate", command, env=installed(tmp_path / "package"), stderr=told
        )
    try:
        code = launcher.wait(PATIENCE_S)
    finally:
        launcher.end()
    said = output.read_text()
    assert "where the script itself may have been writing (line " in said
    whole = (tmp_path / where).read_text() == "whole"
    assert whole == (where in ("in_a_pass", "after_an_epoch"))
    assert (code == 0) == whole
    assert ("and no main process came there again" in said) == (not whole)
    assert all((tmp_path / name).read_text() == "whole" for name in FILES if name != where)
