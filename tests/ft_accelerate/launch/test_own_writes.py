"""The main process is killed in a file that the script writes by itself, under `accelerate launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

SCRIPT = """
import atexit, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

folder, where = Path(sys.argv[1]), sys.argv[2]
name = "ACCELERATE_FAULT_TOLERANCE_"
dies = (os.environ[name + "REPLICA_GROUP_ID"], os.environ["FT_RESTARTS"]) == ("0", "0")

def may_die(at):
    if dies and where == at:
        os.kill(os.getpid(), signal.SIGKILL)

def write(name):
    path = folder / name
    path.write_text("half")
    may_die(name)
    path.write_text("whole")

class Net(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        if accelerator.trackers == []:
            may_die("in_save_model")
        return super().state_dict(*args, **kwargs)

class Rows(GeneralTracker):
    name, requires_logging_directory, tracker = "rows", False, None

    def store_init_configuration(self, values):
        pass

    def log(self, values, step):
        pass

torch.manual_seed(0)
atexit.register(may_die, "at_exit")
accelerator = Accelerator(cpu=True, log_with=[Rows()])
accelerator.init_trackers("run")

@accelerator.on_main_process
def write_alone(name):
    write(name)

model = Net(4, 1)
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
accelerator.save_state(str(folder / "state"))
may_die("after_save_state")
accelerator.log({"done": 1.0}, step=3)
may_die("after_log")
accelerator.wait_for_everyone()
write_alone("decorated")
accelerator.end_training()
accelerator.trackers.clear()
accelerator.save_model(model, folder / "model")
"""
FILES = ("in_a_pass", "after_an_epoch", "at_the_end", "decorated")
pytestmark = pytest.mark.process


def run(tmp_path: Path, where: str) -> tuple[int, str]:
    """The exit code of the launcher whose main process dies there, and what it has said."""
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
    return code, output.read_text()


@pytest.mark.parametrize("where", FILES)
def test_success_means_that_each_file_is_whole(tmp_path: Path, where: str) -> None:
    """The next main process used to come with the next operation, and the exit code was 0."""
    code, said = run(tmp_path, where)
    assert "where the script itself may have been writing (line " in said
    whole = (tmp_path / where).read_text() == "whole"
    assert whole == (where in ("in_a_pass", "after_an_epoch"))
    assert (code == 0) == whole
    assert ("and no main process came there again" in said) == (not whole)
    assert all((tmp_path / name).read_text() == "whole" for name in FILES if name != where)


@pytest.mark.parametrize("where", ["after_save_state", "after_log"])
def test_what_accelerate_writes_for_the_script_is_not_its_own_write(
    tmp_path: Path, where: str
) -> None:
    """They ask, too, whether this is the main process. The launcher named their lines, and failed where no main
    process came there again."""
    code, said = run(tmp_path, where)
    assert "was killed by SIGKILL" in said and "may have been writing" not in said
    assert code == 0
    assert (tmp_path / "state" / "model.safetensors").exists()
    assert all((tmp_path / name).read_text() == "whole" for name in FILES)


@pytest.mark.parametrize("where", ["in_save_model", "at_exit"])
def test_the_script_goes_on_after_end_training_and_loses_nothing_at_its_end(
    tmp_path: Path, where: str
) -> None:
    """`end_training` was taken for the end of the script: what was saved behind it was not made again; and one
    that was killed while Python shut down was said to have left something unwritten."""
    code, said = run(tmp_path, where)
    assert "was killed by SIGKILL" in said and "missing" not in said
    assert code == 0
    assert (tmp_path / "model" / "model.safetensors").exists()
