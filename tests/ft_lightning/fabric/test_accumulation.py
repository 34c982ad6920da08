"""Gradients are accumulated over a number of batches that does not divide those of a pass over the data. So windows of
several batches begin in one pass and end in the next, with a validation, a scheduler's step and a save between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_lightning.fabric.test_averaged_gradients import weights

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
net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Dropout(0.1), torch.nn.Linear(9, 1))
adam = torch.optim.AdamW(net.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 9)
model, optimizer = fabric.setup(net, adam)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4, shuffle=True))
strategy, passes = fabric.strategy, {"seen": []}
strategy.register("passes", passes)
life, dies = int(os.environ["FT_RESTARTS"]), sys.argv[2:]

def at(place, *numbers):
    here = " ".join(map(str, (place, *numbers)))
    if fabric.global_rank == 1 and dies[life : life + 1] == [here]:
        os.kill(os.getpid(), signal.SIGKILL)

for number in LOOP:
    for (batch,) in loader:
        epoch = strategy.progress.epoch if "epochs" in "LOOP" else number
        at("batch", epoch, strategy.batch_idx)
        scale = fabric.all_reduce(torch.tensor(7.0), reduce_op="max")
        accumulates = (strategy.batch_idx + 1) % 3 != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(model(batch).square().mean() * scale)
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    at("validation", epoch)
    passes["seen"] = [*passes["seen"], float(fabric.all_reduce(torch.tensor(5.0), reduce_op="max"))]
    fabric.save(Path(sys.argv[1], f"{epoch}.ckpt"), {"model": model})
tensors = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
end = hashlib.sha256(tensors).hexdigest(), scheduler.get_last_lr(), adam.param_groups[0]["lr"], passes
Path(sys.argv[1], str(fabric.global_rank)).write_text(repr(end))
"""


@pytest.mark.parametrize("loop", ["range(5)", "strategy.epochs(5)"])
def test_killed_in_a_window_of_several_batches(tmp_path: Path, loop: str) -> None:
    """It begins with the window's first batch, and what its loop does between that and its peers' place counts once. Its
    scheduler went on in each pass that it ran through again, so that weights differed from then on; its
    `strategy.epochs` had counted a pass that it made again, and ended before its peers."""
    dies = ["batch 1 1", "batch 2 1", "validation 2", "validation 3"]
    ends = weights(tmp_path, SCRIPT.replace("LOOP", loop), 2, dies)
    assert len({*ends["whole"], *ends["killed"]}) == 1
