"""A script that prepares no model, as one that only predicts, under `accelerate launch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ft_accelerate.harness import said_by

PREDICTS = """
import os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(32.0), 4))
read = []
for index, batch in enumerate(loader):
    accelerator.gather_for_metrics(batch)
    read += batch.tolist()
    if (accelerator.process_index, os.environ["FT_RESTARTS"], index) == (1, "0", 1):
        os.kill(os.getpid(), signal.SIGKILL)
Path(sys.argv[1], str(accelerator.process_index)).write_text(str(read))
"""


@pytest.mark.process
@pytest.mark.parametrize("group_size", [1, 2])
def test_the_others_do_not_wait_for_ever_for_one_that_was_killed(
    tmp_path: Path, group_size: int
) -> None:
    """It begins anew, by itself, and they may not go on with fewer."""
    said = said_by(PREDICTS, tmp_path, group_size, timeout_s=10)
    assert said.count("killed by SIGKILL") == 1
    assert said.count("what follows of them reaches this process alone") == group_size
    read = [json.loads((tmp_path / str(n)).read_text()) for n in range(2 * group_size)]
    assert sorted(sample for each in read for sample in each) == [float(n) for n in range(32)]
