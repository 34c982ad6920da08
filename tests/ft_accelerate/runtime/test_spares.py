"""Raw Accelerate loops with a hot spare: it takes over the share of one that is killed.

What they train on is compared with a run of as many groups as there are shares, without a fault.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.ft_accelerate.harness import Run, compare, running
from tests.ft_accelerate.installed import accelerate, installed
from tests.harness import workers
from tests.harness.runs import Process
from tests.harness.waiting import PATIENCE_S

pytestmark = pytest.mark.process

SHARES, GROUPS = 2, 3
Batch = tuple[int, int]  # share, optimizer step


def trained(run: Run) -> dict[Batch, list[int]]:
    """The batches that count, of all groups. None counts twice."""
    found: dict[Batch, list[int]] = {}
    for group in range(GROUPS):
        for line in (line for line in run.lines(group) if line["share"] is not None):
            batch = line["share"], line["step"]
            assert batch not in found
            found[batch] = line["batch"]
    return found


@pytest.mark.parametrize("min_replicas", [1, SHARES])
def test_a_spare_takes_over_and_the_one_that_comes_back_is_the_next(
    tmp_path: Path, lighthouse: str, min_replicas: int
) -> None:
    """A process is killed in a forward: its batch of that step is lost, and with the next step the spare has
    its share. Where all shares are needed none is lost: the spare, which has read another share, ends, and
    computes the batch when it is started again. The dead process comes back, and takes over in its turn in
    the next epoch: from the main process, or from the heir, whose share it has read as a spare. An operation
    in each step moves no share."""
    needs_all = min_replicas == SHARES
    options = {"norm": False, "gather_loss": True}
    env = {
        "ACCELERATE_FAULT_TOLERANCE_SPARES": "1",
        "ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": str(min_replicas),
    }
    with running(tmp_path / "plain", **options) as plain:
        plain.wait(*plain.start_plain(), code=None)
    holds = ["step-5", "step-25", "step-30"]
    with running(tmp_path / "spare", lighthouse, holds=holds, **options) as run:

        def start(group: int, life: int) -> Process:
            return run.start(group, GROUPS, FT_RESTARTS=str(life), **env)

        def kill(group: int, hold: str) -> None:
            for each in range(GROUPS):
                run.until_held(each, hold)
            lives[group].kill()
            lives[group].wait()
            run.go(hold)

        lives = [start(group, 0) for group in range(GROUPS)]
        kill(1, "step-5")
        if needs_all:
            run.wait(lives[2], code=1)
            lives[2] = start(2, 1)
        run.until_held(0, "step-25")
        asked = run.events(1, "waiting", "quorum")
        lives[1] = start(1, 1)
        run.until(lambda: run.events(1, "waiting", "quorum") > asked, "group 1 asks for a quorum")
        run.go("step-25")
        second = 2 if needs_all else 0
        kill(second, "step-30")
        left = 2 - second
        run.wait(lives[left], lives[1])
    expected = {(i, line["step"]): line["batch"] for i in range(SHARES) for line in plain.lines(i)}
    lost = set() if needs_all else {(1, 6), (0, 31)}
    assert trained(run) == {key: batch for key, batch in expected.items() if key not in lost}
    ends = [run.end(1), run.end(left)]
    assert {end["processes"] for end in ends} == {SHARES}
    assert [end["index"] for end in ends] == ([1, 0] if needs_all else [0, 1])
    assert [end["main"] for end in ends] == [False, True]
    assert ends[0]["digest"] == ends[1]["digest"]
    if needs_all:
        assert ends[0]["digest"] == plain.end(0)["digest"], "as in a run without a fault"
    assert compare(run.lines(1), run.lines(left)) > 0
    assert {line["share"] for line in run.lines(2) if line["step"] <= 5} == {None}
    assert {line["share"] for line in run.lines(1) if 26 < line["step"] <= 30} == {None}


EVALUATES = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(64, 1))
model, optimizer, loader, held_out = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), 1e-6), torch.utils.data.DataLoader(data, 4),
    torch.utils.data.DataLoader(data, 8))
group = os.environ["ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID"]
dies = group == "1" and os.environ["FT_RESTARTS"] == "0"
def evaluate():
    model.eval()
    for (batch,) in held_out:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.gather(model(batch))

with Path(sys.argv[1], group).open("a", buffering=1) as rows:
    for epoch in range(2):
        for step, (batch,) in enumerate(loader):
            model.train()  # as many examples do: behind the batch
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            share = accelerator.process_index
            rows.write(json.dumps([epoch, step, share, batch.flatten().tolist()]) + "\\n")
            if (epoch, step) == (0, int(sys.argv[2])):
                evaluate()
"""


@pytest.mark.parametrize("step", [2, 7], ids=["within_an_epoch", "at_its_end"])
def test_a_spare_takes_over_in_an_evaluation(tmp_path: Path, step: int) -> None:
    """Both shares are needed. The next batch is asked for while the model is in evaluation mode: it was of the share
    that the spare had read before, so that counted twice, and the dead process's was left out."""
    script = tmp_path / "train.py"
    script.write_text(EVALUATES)
    flags = ["--cpu", "--num_processes", str(GROUPS), "--fault_tolerance_min_replicas", str(SHARES)]
    command = [*accelerate("launch")[1:], *flags, "--fault_tolerance_spares", "1"]
    env = installed(tmp_path / "package", ACCELERATE_USE_FAULT_TOLERANCE="true")
    with (tmp_path / "said").open("wb") as out:
        job = workers.start(
            "accelerate",
            [*command, str(script), str(tmp_path), str(step)],
            env=env,
            stdout=out,
            stderr=out,
        )
        try:
            code = job.wait(PATIENCE_S)
        finally:
            job.end()
    assert code == 0, (tmp_path / "said").read_text()
    found = set()
    for group in range(GROUPS):
        for line in (tmp_path / str(group)).read_text().splitlines():
            epoch, step, share, rows = json.loads(line)
            assert rows == [8.0 * step + 4 * share + each for each in range(4)]
            found.add((epoch, step, share))
    assert found == set(itertools.product(range(2), range(8), range(SHARES)))
