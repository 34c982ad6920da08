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

SHARDED = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
adam = torch.optim.AdamW(net.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(96, 4))
net, adam, loader = accelerator.prepare(net, adam, torch.utils.data.DataLoader(data, 4))
life, dies = int(os.environ["FT_RESTARTS"]), sys.argv[2:]

def at(place):
    mine = accelerator.process_index == 3 and life < len(dies)
    if mine and dies[life] == f"{place} {epoch} {index}":
        os.kill(os.getpid(), signal.SIGKILL)

for epoch in range(2):
    for index, (batch,) in enumerate(loader):
        accelerator.backward(net(batch).square().mean())
        at("between two backwards")
        accelerator.backward(net(batch * 2).square().mean())
        accelerator.clip_grad_norm_(net.parameters(), 0.1)
        at("behind a clip")
        accelerator.wait_for_everyone()
        at("before the step")
        adam.step()
        adam.zero_grad()
weights = b"".join(p.detach().to_local().numpy().tobytes() for p in net.parameters())
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
    flags = ["--num_processes", "2", "--cpu"]
    ends = weights(tmp_path, SCRIPT, flags, dies)
    assert len({*ends["whole"], *ends["killed"]}) == 1


@pytest.mark.process
def test_so_is_one_of_a_group_whose_processes_hold_shards(tmp_path: Path) -> None:
    """FSDP2. Its whole group comes back, each process with its part of these gradients."""
    flags = ["--num_processes", "4", "--fault_tolerance_group_size", "2"]
    flags += ["--use_fsdp", "--fsdp_version", "2"]
    dies = ["between two backwards 0 2", "behind a clip 1 0", "before the step 1 2"]
    ends = weights(tmp_path, SHARDED, flags, dies)
    assert ends["killed"] == ends["whole"]
    assert ends["whole"][:2] == ends["whole"][2:]


def weights(tmp_path: Path, text: str, flags: list[str], dies: list[str]) -> dict[str, list[str]]:
    """Digests of what the processes of a script have at its end, in a whole run and in one with these deaths."""
    (tmp_path / "train.py").write_text(text)
    processes = range(int(flags[1]))
    ends = {}
    for out, deaths in {"whole": [], "killed": dies}.items():
        (tmp_path / out).mkdir()
        assert run(tmp_path, out, flags, deaths).count("killed by SIGKILL") == len(deaths)
        ends[out] = [(tmp_path / out / str(index)).read_text() for index in processes]
    return ends


def run(tmp_path: Path, out: str, flags: list[str], dies: list[str]) -> str:
    """What a launcher of two replica groups says of the script."""
    flags = [*flags, "--fault_tolerance_min_replicas", "2"]
    script = str(tmp_path / "train.py")
    command = [*accelerate("launch")[1:], *flags, script, str(tmp_path / out), *dies]
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
