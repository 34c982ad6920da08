"""The script forks processes of its own, under `accelerate launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

SCRIPT = """
import multiprocessing, os, signal, sys, time
import torch
from accelerate import Accelerator

name = "ACCELERATE_FAULT_TOLERANCE_"
dies = (os.environ[name + "REPLICA_GROUP_ID"], os.environ["FT_RESTARTS"]) == ("1", "0")

def fork():
    if (pid := os.fork()) == 0:
        sys.exit()  # as a script ends, and not with os._exit
    print("forked:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), 0.01), torch.utils.data.DataLoader(data, 4))
for number, (batch,) in enumerate(loader):
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    if number == 2:
        fork()
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
        context.Process(target=time.sleep, args=(3600,), daemon=True).start()
    if number == 4 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_what_a_script_forks_ends_as_without_fault_tolerance(tmp_path: Path) -> None:
    """Workers of a pool got the loop's SIGTERM handler and did not end by it, so that their pool waited without an
    end, as did a script with a daemon at its end; a process that was forked in the past of one that had come back
    ended with exit code 1 and a sentence."""
    train, output, printed = (tmp_path / name for name in ("train.py", "told.txt", "printed.txt"))
    train.write_text(SCRIPT)
    flags = ["--cpu", "--num_processes", "2", "--use_fault_tolerance"]
    flags += ["--fault_tolerance_min_replicas", "2"]
    command = [*accelerate("launch")[1:], *flags, str(train)]
    with output.open("wb") as told, printed.open("wb") as out:
        launcher = workers.start(
            "accelerate", command, env=installed(tmp_path / "package"), stdout=out, stderr=told
        )
    try:
        code = launcher.wait(PATIENCE_S)
    finally:
        launcher.end()
    assert code == 0
    assert "was killed by SIGKILL" in output.read_text()
    assert printed.read_text() == "forked: 0\n" * 3  # of three lives
