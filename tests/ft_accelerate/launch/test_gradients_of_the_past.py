"""A process comes back with a script that looks at gradients: of those of its past none is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.harness import said_by

START = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator

out, dies = Path(sys.argv[1]), DIES
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(96, 4))
loader = torch.utils.data.DataLoader(data, 4)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.05))
epochs, steps = 2, 0

def step():
    global steps
    for parameter in net.parameters():
        parameter.grad.clamp_(-0.1, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if accelerator.process_index == 1 and os.environ["FT_RESTARTS"] == "0" and steps == dies:
        os.kill(os.getpid(), signal.SIGKILL)
"""
PENALTIES = """
nothing = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.empty(0, 4)), 4)
loader, nothing = accelerator.prepare(loader, nothing)
for epoch in range(epochs):
    for batch, in loader:
        batch.requires_grad_()
        energy = model(batch)
        slope, = torch.autograd.grad(energy.sum(), batch, create_graph=True)
        parts = energy.square().mean(), slope.square().mean()
        last = [torch.autograd.grad(p, net[2].weight, retain_graph=True)[0].norm() for p in parts]
        whole = torch.autograd.grad(parts[0], model.parameters(), None, True, False, True, False)
        assert len(whole) == 4
        accelerator.backward(parts[0] + parts[1] * (last[0] / (last[1] + 0.01)))
        step()
    model.eval()
    assert not list(nothing)
    model.train()
"""
ROLLOUTS = """
for epoch in range(epochs):
    for batch, in loader:
        accelerator.backward(model(batch + accelerator.process_index).square().mean())
        step()
"""
ATTACKS = """
loader = accelerator.prepare(loader)
for epoch in range(epochs):
    for batch, in loader:
        batch.requires_grad_()
        model.train(steps % 2 == 0)
        accelerator.backward(model(2 * batch).square().mean())
        attacked = (batch + 0.1 * batch.grad.sign()).detach()
        model.train()
        optimizer.zero_grad()
        accelerator.backward(model(attacked).square().mean())
        step()
"""
TOWERS = """
other = torch.nn.Linear(4, 1)
tower, others = accelerator.prepare(other, torch.optim.SGD(other.parameters(), 0.05))
for epoch in range(epochs):
    for batch, in loader:
        batch = batch + accelerator.process_index
        accelerator.backward((model(batch) * tower(batch)).square().mean())
        others.step()
        others.zero_grad()
        step()
"""
CYCLES = """
def cycle(loader):
    while True:
        yield from loader

loader, checks = accelerator.prepare(loader, torch.utils.data.DataLoader(data, 24))
batches, checked = cycle(loader), cycle(checks)
for number in range(24):
    model.train()
    batch, = next(batches)
    accelerator.backward(model(batch).square().mean())
    step()
    if number % 4 == 0:
        model.eval()
        with torch.no_grad():
            model(next(checked)[0])
"""
END = """
weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
(out / str(accelerator.process_index)).write_text(hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "loop",
    [PENALTIES, ROLLOUTS, ATTACKS, TOWERS, CYCLES],
    ids=["prepared loader", "own loader", "attacked batches", "two towers", "endless loaders"],
)
def test_it_looks_at_zeros_and_has_the_weights_of_a_whole_run(tmp_path: Path, loop: str) -> None:
    """A penalty of gradients by inputs, weights by those of the last layer, gradients by all parameters, gradients that
        are clipped one by one; and an evaluation of no data. A batch that is changed by its own gradient. One backward
    through two models, whose data the process reads again: it counts as one. With
        endless loaders a pass over the data of evaluations goes on across training batches, in the past, too."""
    ends = set()
    for name, dies in {"whole": 0, "killed": 15}.items():
        out = tmp_path / name
        out.mkdir()
        said = said_by(START.replace("DIES", str(dies)) + loop + END, out, 1, 20)
        assert said.count("killed by SIGKILL") == bool(dies)
        ends |= {(out / str(index)).read_text() for index in range(2)}
    assert len(ends) == 1
