"""A replica group comes back where gradients are averaged, and no optimizer has stepped on them yet."""

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
fabric = Fabric(accelerator="cpu", devices=2, strategy=FTDDPStrategy(min_replicas=2, max_restarts=20))
fabric.launch()
torch.manual_seed(0)
nets = [torch.nn.Linear(4, 1) for _ in range(3)]
pairs = [fabric.setup(net, torch.optim.Adam(net.parameters(), 0.01)) for net in nets]
(first, one), (second, two), (third, three) = pairs
data = torch.utils.data.TensorDataset(torch.randn(96, 4))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4, shuffle=True))
strategy, life, dies = fabric.strategy, int(os.environ["FT_RESTARTS"]), sys.argv[2:]

def at(place):
    here = f"{place} {strategy.progress.epoch} {strategy.batch_idx}"
    if os.environ["REPLICA_GROUP_ID"] == "1" and dies[life : life + 1] == [here]:
        os.kill(os.getpid(), signal.SIGKILL)

for _ in strategy.epochs(4):
    for (batch,) in loader:
        at("behind a fetch")
        fabric.backward(first(batch).square().mean())
        at("between two backwards")
        with fabric.no_backward_sync(first):
            fabric.backward((first(batch) - 1).square().mean())
        at("behind a local backward")
        fabric.backward(first(batch * 2).square().mean())
        fabric.clip_gradients(first, one, max_norm=0.1)
        at("behind a clip")
        fabric.backward(second(batch).square().mean())
        at("before an operation")
        fabric.barrier()
        one.step()
        at("between two steps")
        fabric.all_reduce(torch.ones(1))
        two.step()
        one.zero_grad(set_to_none=False)
        two.zero_grad()
        if strategy.batch_idx % 4 == 3:
            three.step()
            three.zero_grad()
        at("before one that steps seldom")
        fabric.backward(third(batch).square().mean())
        at("before a batch")
weights = b"".join(p.detach().numpy().tobytes() for net in nets for p in net.parameters())
number = os.environ["REPLICA_GROUP_ID"]
Path(sys.argv[1], number).write_text(hashlib.sha256(weights).hexdigest())
"""

SHARDED = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from lightning.fabric import Fabric
from ft_lightning.fabric import FTFSDPStrategy

torch.set_num_threads(1)
strategy = FTFSDPStrategy(min_replicas=2, num_replica_groups=2, data_parallel_size=2)
fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
net = fabric.setup_module(net)
adam = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), 0.01))
data = torch.utils.data.TensorDataset(torch.randn(96, 4))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4))
life, dies = int(os.environ["FT_RESTARTS"]), sys.argv[2:]

def at(place):
    here = f"{place} {strategy.progress.epoch} {strategy.batch_idx}"
    if fabric.global_rank == 3 and dies[life : life + 1] == [here]:
        os.kill(os.getpid(), signal.SIGKILL)

for _ in strategy.epochs(2):
    for (batch,) in loader:
        fabric.backward(net(batch).square().mean())
        at("between two backwards")
        fabric.backward(net(batch * 2).square().mean())
        fabric.clip_gradients(net, adam, max_norm=0.1)
        at("behind a clip")
        fabric.barrier()
        at("before the step")
        if strategy.batch_idx % 2:
            adam.step()
            adam.zero_grad()
weights = b"".join(p.detach().to_local().numpy().tobytes() for p in net.parameters())
Path(sys.argv[1], str(fabric.global_rank)).write_text(hashlib.sha256(weights).hexdigest())
"""


def test_killed_where_no_optimizer_has_stepped_on_averaged_gradients(tmp_path: Path) -> None:
    """Its peer can't go on without it (`min_replicas`). It added gradients of its own to those that its peer
    had averaged already, and all trained on, with wrong weights."""
    dies = [
        "between two backwards 0 2",
        "before an operation 0 4",
        "behind a local backward 0 7",
        "between two steps 1 1",
        "behind a fetch 1 3",
        "before an operation 1 5",
        "before a batch 1 7",
        "behind a clip 1 11",
        "before one that steps seldom 2 1",
        "between two steps 2 3",
    ]
    ends = weights(tmp_path, SCRIPT, 2, dies)
    assert len({*ends["whole"], *ends["killed"]}) == 1


def test_so_is_one_of_a_group_whose_ranks_hold_shards(tmp_path: Path) -> None:
    """Its whole group comes back, each rank with its part of these gradients."""
    dies = ["between two backwards 0 2", "behind a clip 1 0", "before the step 1 2"]
    ends = weights(tmp_path, SHARDED, 4, dies)
    assert ends["killed"] == ends["whole"]
    assert ends["whole"][:2] == ends["whole"][2:]


def weights(tmp_path: Path, text: str, processes: int, dies: list[str]) -> dict[str, list[str]]:
    """Digests of what the processes of a script have at its end, in a whole run and in one with these deaths."""
    script, ends = tmp_path / "train.py", {}
    script.write_text(text)
    for out, deaths in {"whole": [], "killed": dies}.items():
        (tmp_path / out).mkdir()
        command = [str(script), str(tmp_path / out), *deaths]
        assert run(tmp_path / f"{out}.said", command).count("killed by SIGKILL") == len(deaths)
        ends[out] = [(tmp_path / out / str(index)).read_text() for index in range(processes)]
    return ends


def run(log: Path, command: list[str]) -> str:
    """What a script says that starts its replica groups."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        job = workers.start("lightning", command, env=env, stdout=file, stderr=file)
        try:
            code = job.wait(PATIENCE_S)
        finally:
            job.end()
    said = log.read_text()
    assert code == 0, said
    return said
