"""A script decides by registered values and rates which operations follow, and a process dies behind such a decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.harness import said_by

pytestmark = pytest.mark.process

SCRIPT = """
import os, signal, sys, torch
from accelerate import Accelerator

class Best:
    def __init__(self):
        self.loss, self.saves = float("inf"), 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)

class Average:
    def __init__(self, model):
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model):
        for name, value in model.state_dict().items():
            self.weights[name].lerp_(value, 0.5)

    def state_dict(self):
        return self.weights

    def load_state_dict(self, state):
        for name, value in state.items():
            self.weights[name].copy_(value)

torch.manual_seed(0)
life = os.environ.get("FT_RESTARTS", "0")
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(20_000, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = torch.utils.data.DataLoader(torch.randn(24, 20_000), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
best, average = Best(), Average(accelerator.unwrap_model(model))
accelerator.register_for_checkpointing(best, average)
for epoch in range(4):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        average.update(accelerator.unwrap_model(model))
    loss = accelerator.gather(model(batch).square().mean().detach()).mean().item()
    if loss < best.loss:
        best.loss, best.saves = loss, best.saves + 1
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and (life, epoch) == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
    assert accelerator.gather(torch.tensor([epoch])).tolist() == [epoch, epoch]
weights = accelerator.unwrap_model(model).weight.sum().item(), average.weights["weight"].sum().item()
print("end", *weights, best.saves, flush=True)
"""


STOPS = """
import os, signal, sys, torch
from accelerate import Accelerator

class Stopper:
    def __init__(self):
        self.best, self.bad, self.low = float("inf"), 0, 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)

def dies(place):
    if accelerator.process_index == 0 and os.environ.get("FT_RESTARTS", "0") == "0" and place == DIES:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
if PREPARED:
    plateau = accelerator.prepare(plateau)
else:
    accelerator.register_for_checkpointing(plateau)
stopper = Stopper()
accelerator.register_for_checkpointing(stopper)
for epoch, loss in enumerate([5, 4, 6, 3, 7, 8, 9]):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer.param_groups[0]["lr"]
    accelerator.gather(torch.tensor([epoch]))
    plateau.step(loss)
    rate = optimizer.param_groups[0]["lr"]
    if rate < 5e-4 and rate < before:
        stopper.low += 1
        accelerator.wait_for_everyone()
    dies(("rate", epoch))
    assert accelerator.gather(torch.tensor([epoch])).tolist() == [epoch, epoch]
    stopper.bad = 0 if loss < stopper.best else stopper.bad + 1
    stopper.best = min(loss, stopper.best)
    if stopper.bad == 2:
        break
dies("stopped")
accelerator.wait_for_everyone()
print("end", epoch, rate, stopper.low, accelerator.unwrap_model(model).weight.sum().item(), flush=True)
"""


def ends(said: str) -> set[str]:
    return {line for line in said.splitlines() if line.startswith("end ")}


def test_the_main_process_dies_where_the_best_model_is_saved(tmp_path: Path) -> None:
    """The script registers the best loss, as the docs ask for. Its peer's was that of the save already, so the process
    that came back did not come to the save, in each of its lives."""
    found = []
    for name, dies in (("killed", ("0", 2)), ("whole", None)):
        (tmp_path / name).mkdir()
        found.append(ends(said_by(SCRIPT.replace("DIES", repr(dies)), tmp_path / name, 1, 30)))
    assert len(found[0]) == 1 and found[0] == found[1]
    assert found[0].pop().endswith(" 4")


@pytest.mark.parametrize("prepared", [False, True])
def test_a_process_dies_behind_a_change_of_the_rate_or_the_decision_to_stop(
    tmp_path: Path, prepared: bool
) -> None:
    """The script that came back stopped in its first epoch, since its peer had decided to stop, in each of its lives. And
    it had its peer's lower rate where it lowered it itself, and so decided otherwise."""
    found = []
    for name, dies in (
        ("rate", ("rate", 2)),
        ("low", ("rate", 4)),
        ("stop", "stopped"),
        ("whole", None),
    ):
        (tmp_path / name).mkdir()
        script = STOPS.replace("DIES", repr(dies)).replace("PREPARED", repr(prepared))
        found.append(ends(said_by(script, tmp_path / name, 1, 30)))
    assert all(len(each) == 1 and each == found[-1] for each in found)
    assert found[0].pop().startswith("end 5 ")


IN_VARIABLES = """
import os, signal, torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(26, 8), torch.arange(26))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
best, bad, seen = float("inf"), 0, []
for epoch in range(20):
    model.train()
    for index, (batch, _) in enumerate(loader):
        if (epoch, index, accelerator.process_index) == DIES and os.environ.get("FT_RESTARTS", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward((model(batch)[:, 0] - batch.sum(1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    found, numbers = [], []
    for batch, number in held_out:
        errors, its = accelerator.gather_for_metrics((model(batch).detach()[:, 0] - batch.sum(1), number))
        found.append(errors)
        numbers += its.tolist()
    assert sorted(numbers) == list(range(26)), numbers
    loss = torch.cat(found).square().mean().item()
    seen.append(round(loss, 6))
    bad = 0 if loss < best - 1e-2 else bad + 1
    if loss < best:
        best = loss
        accelerator.wait_for_everyone()
    if bad == 2:
        break
accelerator.wait_for_everyone()
print("end", epoch, seen, flush=True)
"""


@pytest.mark.parametrize("process", [0, 1])
def test_a_script_that_decides_by_variables_decides_in_its_past_as_its_peers_did(
    tmp_path: Path, process: int
) -> None:
    """Its metrics come from operations. In its past they were those of one batch again and again: it stopped there, in
    each of its lives."""
    found = []
    for name, dies in (("killed", (4, 2, process)), ("whole", None)):
        (tmp_path / name).mkdir()
        script = IN_VARIABLES.replace("DIES", repr(dies))
        said = said_by(script, tmp_path / name, 1, 30)
        assert ("was killed by SIGKILL" in said) == (dies is not None)
        found.append(ends(said))
    assert len(found[0]) == 1 and found[0] == found[1]


TRIGGERS = """
import os, signal, torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps, last, ended = 0, None, False
for epoch in range(3):
    for batch in loader:
        loss = (model(batch)[:, 0] - 9).square().mean()
        steps += 1
        if loss.item() == last:
            accelerator.set_trigger()  # it learns nothing any more
        last = loss.item()
        if steps == 30 and accelerator.process_index == 1 and os.environ.get("FT_RESTARTS", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if CHECKED or steps == 34:
            ended = ended or accelerator.check_trigger()
    if ended:
        break
accelerator.wait_for_everyone()
print("end", steps, ended, flush=True)
"""


@pytest.mark.parametrize("checked", ["True", "False"], ids=["in each batch", "once"])
def test_a_trigger_that_is_set_by_a_loss_of_the_past_stops_nobody(
    tmp_path: Path, checked: str
) -> None:
    """There it is that of one batch again and again. The first check behind it stopped all processes."""
    said = said_by(TRIGGERS.replace("CHECKED", checked), tmp_path, 1, 30)
    assert "was killed by SIGKILL" in said
    assert ends(said) == {"end 36 False"}
