"""transformers' `TrainingArguments.main_process_first`, in which scripts prepare their data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

pytest.importorskip("transformers")

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.utils import logging

folder, local, dies = Path(sys.argv[1]), sys.argv[2] == "local", sys.argv[3] == "dies"
arguments = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
if arguments.should_log:
    logging.set_verbosity_info()
main = arguments.process_index == 0
(folder / f"comes.{arguments.process_index}").touch()
while main and not (folder / "comes.1").exists():
    time.sleep(0.01)
with arguments.main_process_first(local=local, desc="prepare the data"):
    if main and dies and os.environ["FT_RESTARTS"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    with (folder / "order").open("a") as order:
        order.write(f"{arguments.process_index}\\n")

accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.randn(16, 4))
model, loader = accelerator.prepare(torch.nn.Linear(4, 1), torch.utils.data.DataLoader(data, 4))
for batch, in loader:
    accelerator.backward(model(batch).pow(2).mean())
accelerator.end_training()
"""
pytestmark = pytest.mark.process


def run(tmp_path: Path, *argv: str) -> str:
    """What the launcher has said, which ends with exit code 0."""
    train, output = tmp_path / "train.py", tmp_path / "told.txt"
    train.write_text(SCRIPT)
    flags = ["--cpu", "--num_processes", "2", "--use_fault_tolerance"]
    flags += ["--fault_tolerance_min_replicas", "2"]
    command = [*accelerate("launch")[1:], *flags, str(train), str(tmp_path), *argv]
    with output.open("wb") as told:
        launcher = workers.start(
            "transformers", command, env=installed(tmp_path / "package"), stderr=told
        )
    try:
        assert launcher.wait(PATIENCE_S) == 0, output.read_text()
    finally:
        launcher.end()
    return output.read_text()


@pytest.mark.parametrize("where", ["local", "everywhere"])
def test_the_others_wait_for_the_main_process(tmp_path: Path, where: str) -> None:
    """They waited in a barrier of torch's, which reaches one process only: all prepared the data at once."""
    run(tmp_path, where, "lives")
    assert (tmp_path / "order").read_text().split() == ["0", "1"]


def test_one_that_dies_in_it_has_written_nothing_for_all(tmp_path: Path) -> None:
    """A script that asks whether it should log lines does not write: the launcher named that line as one where
    files may be missing, and the exit code of a run that had lost nothing was that of SIGKILL."""
    said = run(tmp_path, "local", "dies")
    assert "was killed by SIGKILL" in said
    assert "may have been writing" not in said and "missing" not in said
    assert sorted((tmp_path / "order").read_text().split()) == ["0", "1"]
