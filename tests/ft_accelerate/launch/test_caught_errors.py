"""Scripts that leave out a batch, in one process alone or in all, under `accelerate launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.harness import said_by

BEGINS = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), 0.01), torch.utils.data.DataLoader(data, 4))
leaves_out = (accelerator.process_index, os.environ["FT_RESTARTS"]) == (1, "0")
"""
ENDS = """
weights = hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest()
Path(sys.argv[1], str(accelerator.process_index)).write_text(weights)
"""

CATCHES = """
for epoch in range(3):
    for index, (batch,) in enumerate(loader):
        try:
            loss = model(batch).mean()
            if leaves_out and (epoch, index) == (1, 3):
                raise torch.OutOfMemoryError("no memory is left")
            accelerator.backward(loss)
            optimizer.step()
        except RuntimeError:
            continue  # the next batch may be a smaller one
        finally:
            optimizer.zero_grad()
        if index % 2:
            accelerator.gather(loss.detach())
"""

CUT_SHORT = """
from ft_accelerate import LocalSGD

class CutShort(LocalSGD):
    def _sync_and_avg_model_params(self):
        raise torch.OutOfMemoryError("no memory is left")

local = CutShort(accelerator, model, 8)
try:
    with local:
        pass
except torch.OutOfMemoryError:
    pass
for batch, in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
"""

# Nothing is raised, and no operation tells where the processes are.
WITHOUT_A_WORD = """
for epoch in range(20):
    for index, (batch,) in enumerate(loader):
        if leaves_out and (epoch, index) == (1, 3):
            continue
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
"""

# The one process asks for a sixth batch when the other one has ended.
ZIPPED = """
import time

ended = Path(sys.argv[1], "pid")
for (batch,), index in zip(loader, range(5)):
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    if index == 4 and not accelerator.process_index:
        while not ended.exists() or Path("/proc", ended.read_text()).exists():
            time.sleep(0.01)
if accelerator.process_index:
    ended.write_text(str(os.getpid()))
"""

# Gradients stay in each process; parameters are averaged in every fourth batch.
IN_LOCAL_SGD = """
from accelerate.local_sgd import LocalSGD

with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
    for epoch in range(3):
        for index, (batch,) in enumerate(loader):
            if leaves_out and (epoch, index) == (1, 3):
                continue
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
"""

# One alone has no memory for the first batch. Its peer does not look for another size.
SEARCHES_ALONE = """
from accelerate.utils import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=8)
def train(size):
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, size))
    for epoch in range(3):
        for index, (batch,) in enumerate(loader):
            loss = model(batch).mean()
            if leaves_out and size == 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

train()
"""

# All leave out a batch. One dies in the next one.
NOT_FINITE = """
for index, (batch,) in enumerate(loader):
    if leaves_out and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(model(batch).mean() * (float("nan") if index == 3 else 1.0))
    if accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad()
"""
# The others are in an operation, still in that batch.
NOT_FINITE_AND_GATHERS = (
    NOT_FINITE.replace("index == 4", "False")
    + """
    if leaves_out and index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.gather(batch)
"""
)
# The process that comes back has memory for it.
OUT_OF_MEMORY = """
def need(gradient):
    if os.environ["FT_RESTARTS"] == "0":
        raise torch.OutOfMemoryError("no memory is left")

for index, (batch,) in enumerate(loader):
    if leaves_out and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(batch).mean()
    if index == 3:
        loss.register_hook(need)
    try:
        accelerator.backward(loss)
        optimizer.step()
    except torch.OutOfMemoryError:
        pass
    optimizer.zero_grad()
"""
# Nor does this one begin its backward.
OUT_OF_MEMORY_IN_THE_LOSS = """
def loss_of(output, index):
    if index == 3 and os.environ["FT_RESTARTS"] == "0":
        raise torch.OutOfMemoryError("no memory is left")
    return output.mean()

for index, (batch,) in enumerate(loader):
    if leaves_out and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        accelerator.backward(loss_of(model(batch), index))
        optimizer.step()
    except torch.OutOfMemoryError:
        pass
    optimizer.zero_grad()
"""
OUT_OF_MEMORY_DROPPED_BY_THE_MODEL = OUT_OF_MEMORY_IN_THE_LOSS.replace(
    "optimizer.zero", "model.zero"
)
# This one drops gradients before each batch.
OUT_OF_MEMORY_IN_FORWARD = """
def refuse(module, inputs):
    if index == 3 and os.environ["FT_RESTARTS"] == "0":
        raise torch.OutOfMemoryError("no memory is left")

net.register_forward_pre_hook(refuse)
for index, (batch,) in enumerate(loader):
    if leaves_out and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    try:
        accelerator.backward(model(batch).mean())
    except torch.OutOfMemoryError:
        continue
    optimizer.step()
"""

# One is killed behind a batch, before which the other waits until its next life has begun: that heals twice at
# one step.
OUT_OF_MEMORY_BEHIND_A_HEAL = f"""
import time

begun = Path(sys.argv[1], "begun")
if os.environ["FT_RESTARTS"] != "0":
    begun.touch()
{OUT_OF_MEMORY_IN_FORWARD.strip()}
    while index == 2 and accelerator.process_index == 0 and not begun.exists():
        time.sleep(0.01)
"""

OUT_OF_MEMORY_BEFORE_AN_OPERATION = """
def refuse(module, inputs):
    if index == 3 and os.environ["FT_RESTARTS"] != "1":
        raise torch.OutOfMemoryError("no memory is left")

net.register_forward_pre_hook(refuse)
for index, (batch,) in enumerate(loader):
    optimizer.zero_grad()
    try:
        accelerator.backward(model(batch).mean())
        optimizer.step()
    except torch.OutOfMemoryError:
        pass
    if leaves_out and index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.gather(batch)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "loop",
    [
        NOT_FINITE,
        NOT_FINITE_AND_GATHERS,
        OUT_OF_MEMORY,
        OUT_OF_MEMORY_IN_THE_LOSS,
        OUT_OF_MEMORY_DROPPED_BY_THE_MODEL,
        OUT_OF_MEMORY_IN_FORWARD,
    ],
    ids=[
        "not finite",
        "in an operation",
        "in backward",
        "in the loss",
        "by the model",
        "in forward",
    ],
)
def test_a_process_that_dies_behind_a_batch_that_all_leave_out_comes_back(
    tmp_path: Path, loop: str
) -> None:
    """It goes on where its peers are, that have no gradient of that batch left. `run` asks for both groups in each step."""
    said = run(loop, tmp_path)
    assert said.count("replica group 1 was killed by SIGKILL; it is started again") == 1
    assert "failed with exit code" not in said
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
def test_one_that_comes_back_before_a_batch_and_behind_it_is_where_its_peer_is(
    tmp_path: Path,
) -> None:
    """Its peer leaves out the batch, maybe when it has healed there, and is found elsewhere. The next time it was given
    the same state, though its peer had gone on: ten lives ended so, and the job with them."""
    said = run(OUT_OF_MEMORY_BEHIND_A_HEAL, tmp_path)
    assert said.count("replica group 1 failed with exit code 1; it is started again") <= 1
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
def test_one_that_comes_back_to_a_gradient_step_while_its_peer_is_in_an_operation_is_told(
    tmp_path: Path,
) -> None:
    """It has memory for the batch in its second life. While it only heals the peer does not hear of its gradients,
    which would end its process if they met an operation's rows."""
    said = run(OUT_OF_MEMORY_BEFORE_AN_OPERATION, tmp_path)
    assert "this replica group is at a gradient step (batch 4 of a pass" in said
    assert said.count("replica group 1 failed with exit code 1; it is started again") == 1
    assert "SIGABRT" not in said
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
def test_a_process_that_leaves_out_a_batch_without_a_word_is_found(tmp_path: Path) -> None:
    """From there on its gradients would be averaged with those of other batches."""
    said = run(WITHOUT_A_WORD, tmp_path)
    assert "event 64 of its script), the others are at a gradient step (batch 1 of" in said
    assert said.count("replica group 1 failed with exit code 1; it is started again") == 1
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
@pytest.mark.parametrize("group_size", [1, 2])
def test_a_process_that_leaves_out_a_batch_between_averages_is_found(
    tmp_path: Path, group_size: int
) -> None:
    """Its next average would be a batch later than its peers'."""
    said = run(IN_LOCAL_SGD, tmp_path, group_size)
    assert "this replica group is at an average of parameters (batch" in said
    assert said.count("is started again") == 1
    assert len({(tmp_path / str(i)).read_text() for i in range(2 * group_size)}) == 1


@pytest.mark.process
def test_a_process_that_tries_another_batch_size_alone_is_found(tmp_path: Path) -> None:
    """Its model is that of the first try, so nothing but its gradients tells where it is: they would be averaged
    with those of the other size."""
    said = run(SEARCHES_ALONE, tmp_path)
    assert "(try 2 of a batch size, batch 1 of a pass, event 0 of its script), the others" in said
    assert "at a gradient step (try 1 of a batch size, batch 1 of a pass, event 0" in said
    assert said.count("is started again") == 1
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
def test_gradients_are_averaged_again_behind_an_average_of_parameters_that_has_raised(
    tmp_path: Path,
) -> None:
    """The block of LocalSGD in which none are was left, and its end was not reached."""
    run(CUT_SHORT, tmp_path)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
def test_a_process_that_leaves_out_a_batch_alone_is_started_again(tmp_path: Path) -> None:
    """It can't tell the error of its own batch from that of a process which has diverged from the others."""
    said = run(CATCHES, tmp_path)
    assert (
        "script has caught an error and goes on, after which it can't train: this replica" in said
    )
    assert said.count("replica group 1 failed with exit code 1; it is started again") == 1
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.process
def test_a_batch_that_is_not_used_may_be_asked_for_when_the_others_have_ended(
    tmp_path: Path,
) -> None:
    """At the end of `zip(loader, shorter)`. With one that is used the process is one too few."""
    said = run(ZIPPED, tmp_path, timeout_s=10)
    assert said.count("has finished") == 2
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


def run(loop: str, tmp_path: Path, group_size: int = 1, timeout_s: int = 60) -> str:
    """What a launcher of two replica groups says of a script with this loop, which gets `tmp_path`."""
    return said_by(BEGINS + loop + ENDS, tmp_path, group_size, timeout_s)
