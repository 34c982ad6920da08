"""A process comes back where gradients are averaged, and no optimizer has stepped on them yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

SCRIPT = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

each = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=each)
torch.manual_seed(0)
nets = [torch.nn.Linear(4, 1) for _ in range(3)]
sgd = [torch.optim.Adam(net.parameters(), 0.01) for net in nets]
data = torch.utils.data.TensorDataset(torch.randn(96, 4))
first, second, third, one, two, three, loader = accelerator.prepare(
    *nets, *sgd, torch.utils.data.DataLoader(data, 4, shuffle=True))
life, dies = int(os.environ["FT_RESTARTS"]), sys.argv[2:]

def at(place, index):
    mine = accelerator.process_index == 1 and life < len(dies)
    if mine and dies[life] == f"{place} {epoch} {index}":
        os.kill(os.getpid(), signal.SIGKILL)

for epoch in range(4):
    for index, (batch,) in enumerate(loader):
        with accelerator.accumulate(first, second):
            accelerator.backward(first(batch).square().mean())
            at("between two backwards", index)
            with accelerator.no_sync(first):
                accelerator.backward((first(batch) - 1).square().mean())
            at("behind a local backward", index)
            accelerator.backward(first(batch * 2).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(first.parameters(), 0.1)
            at("behind a clip", index)
            accelerator.backward(second(batch).square().mean())
            at("before an operation", index)
            accelerator.wait_for_everyone()
            one.step()
            at("between two steps", index)
            accelerator.wait_for_everyone()
            two.step()
            one.zero_grad(set_to_none=False)
            two.zero_grad()
            if index % 4 == 3:
                three.step()
                three.zero_grad()
            at("before one that steps seldom", index)
            accelerator.backward(third(batch).square().mean())
            at("before a batch", index)
weights = b"".join(p.detach().numpy().tobytes() for net in nets for p in net.parameters())
Path(sys.argv[1], str(accelerator.process_index)).write_text(hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.process
def test_killed_where_no_optimizer_has_stepped_on_averaged_gradients(tmp_path: Path) -> None:
    """Its peer can't go on without it (`min_replicas`), nor without these gradients can it come back."""
    dies = [
        "between two backwards 0 2",
        "before an operation 0 4",
        "behind a local backward 0 7",
        "between two steps 1 1",
        "before an operation 1 5",
        "before a batch 1 7",
        "behind a clip 1 11",
        "between two steps 2 3",
    ]
    for out in ("whole", "killed"):
        (tmp_path / out).mkdir()
    assert "SIGKILL" not in run(tmp_path, "whole", [])
    assert run(tmp_path, "killed", dies).count("killed by SIGKILL") == len(dies)
    ends = [(tmp_path / out / str(i)).read_text() for out in ("whole", "killed") for i in (0, 1)]
    assert len(set(ends)) == 1


def run(tmp_path: Path, out: str, dies: list[str]) -> str:
    """What a launcher of two replica groups says of the script."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--cpu", "--num_processes", "2", "--fault_tolerance_min_replicas", "2"]
    command = [*accelerate("launch")[1:], *flags, str(script), str(tmp_path / out), *dies]
    env = installed(tmp_path / "package", ACCELERATE_USE_FAULT_TOLERANCE="true")
    with (tmp_path / f"{out}.said").open("wb") as file:
        job = workers.start("accelerate", command, env=env, stdout=file, stderr=file)
        try:
            code = job.wait(PATIENCE_S)
        finally:
            job.end()
    said = (tmp_path / f"{out}.said").read_text()
    assert code == 0, said
    return said
