"""A batch that all groups leave out, and one is killed there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import workers
from tests.harness.runs import ROOT
from tests.harness.waiting import PATIENCE_S

pytestmark = pytest.mark.process

SCRIPT = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from lightning.fabric import Fabric
from ft_lightning.fabric import FTDDPStrategy

torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=FTDDPStrategy(min_replicas=2))
fabric.launch()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4))
strategy, place, first = fabric.strategy, sys.argv[2], os.environ["FT_RESTARTS"] == "0"

def no_memory(*_):
    raise torch.OutOfMemoryError("no memory is left")

for _ in strategy.epochs(2):
    for (batch,) in loader:
        here = strategy.progress.epoch, strategy.batch_idx
        if os.environ["REPLICA_GROUP_ID"] == "1" and first and here == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        handle = None
        if here == (1, 3) and first and place == "in forward":
            handle = net.register_forward_pre_hook(no_memory)
        try:
            loss = model(batch).square().mean()
            if here == (1, 3) and first:
                no_memory() if place == "in the loss" else loss.register_hook(no_memory)
            fabric.backward(loss)
            optimizer.step()
        except torch.OutOfMemoryError:
            pass
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()
number = os.environ["REPLICA_GROUP_ID"]
weights = net.weight.detach().numpy().tobytes()
Path(sys.argv[1], number).write_text(hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.parametrize("place", ["in forward", "in the loss", "in backward"])
def test_one_that_has_memory_when_it_comes_back_leaves_out_the_batch_as_its_peer_has(
    tmp_path: Path, place: str
) -> None:
    """The gradients of that batch were averaged with its peer's of the next one, and so on up to the end of the
    epoch. It took its peer's state, and begins where its peer's window does."""
    train, told = tmp_path / "train.py", tmp_path / "told.txt"
    train.write_text(SCRIPT)
    with told.open("wb") as out:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        job = workers.start(
            "lightning", [str(train), str(tmp_path), place], env=env, cwd=tmp_path, stderr=out
        )
        try:
            code = job.wait(PATIENCE_S)
        finally:
            job.end()
    said = told.read_text()
    assert code == 0, said
    assert said.count("is started again") == 1
    assert "is at batch 3 of its pass over the data, and the others are at batch 4" in said
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
