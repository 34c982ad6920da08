"""A tracker of the script's own, as Accelerate's documentation has it, under `accelerate launch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ft_accelerate.harness import said_by

# The main process dies behind its fourth row, when the other has taken part in the operation.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process

class Rows(GeneralTracker):
    name, requires_logging_directory = "rows", False

    @on_main_process
    def __init__(self, path, *, mode):
        super().__init__()
        self.run = path.open(mode)

    @property
    def tracker(self):
        return self.run

    @on_main_process
    def store_init_configuration(self, values):
        self.log(values, "config")

    @on_main_process
    def log(self, values, step):
        self.run.write(json.dumps([step, values]) + "\\n")
        self.run.flush()

rows = Rows(Path(sys.argv[1], "rows"), mode="a")
accelerator = Accelerator(cpu=True, log_with=rows)
accelerator.init_trackers("job", config={"rate": 0.01})
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), 0.01), torch.utils.data.DataLoader(torch.randn(64, 4), 4))
dies = (accelerator.process_index, os.environ["FT_RESTARTS"]) == (0, "0")
for step, batch in enumerate(loader):
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=step)
    accelerator.wait_for_everyone()
    if dies and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
accelerator.end_training()
"""


@pytest.mark.process
def test_a_tracker_that_is_made_in_the_main_process_is_made_in_the_next_one(tmp_path: Path) -> None:
    """Its `__init__` is `@on_main_process`, and had not run there: nothing was logged from the death on."""
    said = said_by(SCRIPT, tmp_path, 1, 60)
    assert said.count("was killed by SIGKILL; it is started again") == 1
    assert "nothing is logged" not in said
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    config = ["config", {"rate": 0.01}]
    assert rows.count(config) == 2  # each run has it
    assert [step for step, _ in rows if step != "config"] == list(range(8))
