"""The keeper under `accelerate launch`: all groups are killed, and they go on from what it holds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, until

HEAD = """
import hashlib, os, sys, time
from pathlib import Path
import torch
from ft_accelerate.runtime.process import active

folder, name = Path(sys.argv[1]), "ACCELERATE_FAULT_TOLERANCE_"
life = f"{os.environ[name + 'REPLICA_GROUP_ID']}.{os.environ['FT_RESTARTS']}"
out = (folder / life).open("a", buffering=1)

def tell(place, model):
    if active().live:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        out.write(f"{os.getpid()} {place} {hashlib.sha256(weights).hexdigest()}\\n")
        time.sleep(0.02)  # leaves the cores to what starts
"""
RAW = """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), 0.01),
    torch.utils.data.DataLoader(data, 4, shuffle=True))
for epoch in range(1_000_000):
    for index, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        tell(epoch * 8 + index, model)
    accelerator.wait_for_everyone()
"""
NUMBERED = RAW.replace(
    "Accelerator(cpu=True)",
    """Accelerator(cpu=True, project_config=ProjectConfiguration(
    str(folder), automatic_checkpoint_naming=True, total_limit=3))""",
).replace("accelerator.wait_for_everyone()", "accelerator.save_state()")
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.net(x).pow(2).mean()}

class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        tell(state.global_step, model)

data = [{"x": x} for x in torch.randn(64, 4, generator=torch.Generator().manual_seed(1))]
arguments = TrainingArguments(
    output_dir=str(folder / "out"), per_device_train_batch_size=4, num_train_epochs=1_000_000,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1_000_000)
Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Tell()]).train()
"""
READ_ONLY = TRAINER.replace('str(folder / "out")', '"/proc"')  # where root can't write, either


def steps(life: Path) -> dict[int, str]:
    """The digest of the weights after each step that was told."""
    lines = life.read_text().splitlines(keepends=True) if life.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return {int(place): weights for _, place, weights in words}


def numbers(folder: Path) -> list[int]:
    """Of the checkpoints that are there."""
    names = (folder / "checkpoints").glob("checkpoint_*")
    return sorted(int(each.name.partition("_")[2]) for each in names) or [-1]


@pytest.mark.process
@pytest.mark.parametrize(
    "script", [RAW, NUMBERED, TRAINER, READ_ONLY], ids=["raw", "numbered", "trainer", "read_only"]
)
def test_all_groups_are_killed_and_go_on(tmp_path: Path, script: str) -> None:
    """Also where what is kept is older than the newest of the checkpoints that `save_state` has numbered: they
    are saved again. A Trainer that saves nothing does so, too, where nothing can be written to its `output_dir`."""
    if script in (TRAINER, READ_ONLY):
        pytest.importorskip("transformers")
    train, output = tmp_path / "train.py", tmp_path / "told.txt"
    train.write_text(HEAD + script)
    interval = "3" if script is NUMBERED else "0.1"
    flags = ["--cpu", "--num_processes", "2", "--fault_tolerance_keep_state_s", interval]
    flags += ["--fault_tolerance_min_replicas", "2"]
    command = [*accelerate("launch")[1:], *flags, str(train), str(tmp_path)]
    env = installed(tmp_path / "package", ACCELERATE_USE_FAULT_TOLERANCE="true")
    first, second = ([tmp_path / f"{group}.{life}" for group in (0, 1)] for life in (0, 1))
    with output.open("wb") as told:
        launcher = workers.start("accelerate", command, env=env, stderr=told)
    try:
        until(lambda: "is kept by a process of its own" in output.read_text(), "a state is kept")
        if script is NUMBERED:
            later = numbers(tmp_path)[-1] + 3
            until(lambda: numbers(tmp_path)[-1] >= later, "checkpoints after that")
        for life in first:
            os.kill(int(life.read_text().split()[0]), signal.SIGKILL)
        before = [steps(life) for life in first]
        newest = max(max(each) for each in before)

        def made_up() -> bool:
            assert launcher.poll() is None, output.read_text()[-2_000:]
            return all(max(steps(life), default=0) > newest for life in second)

        until(made_up, "all is made up")
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(PATIENCE_S)
    finally:
        launcher.end()
    assert "the job goes on from the kept state of batch" in output.read_text()
    after = [steps(life) for life in second]
    assert min(min(each) for each in after) > min(before[0]) + 1, "not from the beginning"
    for was, now in zip(before, after, strict=True):
        assert all(now[step] == was[step] for step in was.keys() & now.keys())
    shared = after[0].keys() & after[1].keys()
    assert shared
    assert all(after[0][step] == after[1][step] for step in shared)
