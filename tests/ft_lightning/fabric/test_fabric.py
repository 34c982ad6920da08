"""Real Fabric loops in real processes: equal to stock DDP, with discarded steps, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ft_lightning.harness import Line, running
from tests.harness import workers

pytestmark = pytest.mark.process
WORKER = Path(__file__).with_name("fabric_worker.py")
LIKE_STOCK = (
    "step",
    "epoch",
    "batch_idx",
    "batch",
    "lr",
    "loss",
    "after",
    "criticism",
    "ranks",
    "count",
)
AGREE = ("epoch", "batch_idx", "digest", "lr", "loss", "ranks", "count")


def values(lines: list[Line], key: str) -> list[Any]:
    return [line[key] for line in lines]


def test_equals_stock_ddp_with_discarded_steps_and_resumes(tmp_path: Path, lighthouse: str) -> None:
    """Accumulation, clipping, windows of one and of two updates; updates of both kinds are
    discarded; saved in mid-epoch and loaded again."""
    options: dict[str, Any] = {"worker": WORKER, "accumulate": 2, "clip": 0.5, "critic": True}
    with running(tmp_path / "ddp", strategy="ddp", devices=2, **options) as stock:
        stock.wait(stock.start())
    inject = {"3": 0, "9": 1, "17": 0, "18": 1}  # the first, second, second, only one of a window
    with running(tmp_path / "ft", lighthouse, inject=inject, save_at=11, **options) as run:
        run.wait(run.start(0), run.start(1))
    for index in (0, 1):
        lines, expected = run.lines(index), stock.lines(index)
        assert len(expected) == 15
        for key in LIKE_STOCK:
            assert values(lines, key) == values(expected, key), key
        for key in ("val_loss", "val_ranks"):
            assert run.end(index)[key] == stock.end(index)[key], key
        # Statistics of batch norm follow the first; stock DDP's do only in the forward.
        assert values(lines, "digest") == values(stock.lines(0), "digest")
        assert (run.end(index)["rank"], run.end(index)["world_size"]) == (index, 2)
    assert run.lines(0)[-1]["leader"] != run.lines(1)[-1]["leader"]

    (tmp_path / "resumed").mkdir()
    (tmp_path / "ft" / "saved.ckpt").rename(tmp_path / "resumed" / "saved.ckpt")
    with running(tmp_path / "resumed", lighthouse, load=True, **options) as again:
        again.wait(again.start(0), again.start(1))
    for index in (0, 1):
        for key in ("step", "epoch", "batch_idx", "batch", "lr", "loss", "digest"):
            rest = values(run.lines(index), key)[7:]
            assert values(again.lines(index), key) == rest, key


FABRIC = str(Path(__file__).with_name("fabric_run.py"))
FABRIC_RUN = [FABRIC, "run", "--strategy", "ft_ddp", "--accelerator", "cpu", "--devices", "2"]


def test_killed_and_told_to_end_under_fabric_run(tmp_path: Path) -> None:
    """Replica group 1 is killed, comes back at its peer's place, gets a SIGTERM, comes back again; a line
    says so each time. Batches have two updates or one.
    """
    options: dict[str, Any] = {"worker": WORKER, "devices": 2, "epochs": 5}
    holds = ["step:18", "life:2", "step:33", "life:3", "validation:60"]
    options |= {"critic": True, "holds": holds}
    with running(tmp_path, **options) as run:
        main = run.start(through=FABRIC_RUN)
        for index in (0, 1):
            run.until_step(index, 3)
        first = run.lives(1)[0]
        os.kill(first, signal.SIGKILL)
        run.until_held(0, "step:18")
        run.begin_again(1, 2)
        run.go("step:18")
        run.until_held(1, "step:33")
        second = run.lives(1)[1]
        os.kill(second, signal.SIGTERM)
        run.go("step:33")
        run.until_held(0, "validation:60")
        run.begin_again(1, 3)
        run.go("validation:60")
        run.wait(main)
        printed = run.output()
        assert "replica group 1 failed with exit code 143; it is started again" in printed
        assert "ft_lightning: training with 2 of 2 replica groups; the lighthouse is " in printed
        assert printed.count("ft_lightning: group 1 is back at step ") == 2
    alone = {line["step"]: line for line in run.lines(0)}
    lives = {pid: [x for x in run.lines(1) if x["pid"] == pid] for pid in run.lives(1)}
    assert lives[second][0]["step"] > 18
    assert len(lives) == 3 and all(lives.values())
    for line in run.lines(1):
        other = alone[line["step"]]
        for key in AGREE:
            assert line[key] == other[key], (line["step"], key)
        assert not set(line["batch"]) & set(other["batch"])
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["epoch"] == run.end(1)["epoch"] == 5
    # No batch twice, and none left out.
    for epoch in range(5):
        mine = [x for line in alone.values() if line["epoch"] == epoch for x in line["batch"]]
        assert len(mine) == len(set(mine)) == 38
    # The other one has lost nothing by the SIGTERM.
    told = [json.loads(text) for text in (tmp_path / "events").read_text().splitlines()]
    mine = [e for e in told if e["name"] == "0" and e["kind"] in ("commit", "discard")]
    both = [i for i, e in enumerate(mine) if e.get("participants") == 2]
    healed = next(i for i in both if i and mine[i - 1].get("participants") != 2)
    left = next(i for i in range(healed, len(mine)) if mine[i].get("participants") != 2)
    assert left > healed and mine[left]["kind"] == "commit"


FORKS = """
import os, sys
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
import ft_lightning
from ft_core.launch.board import slot

fabric = Fabric(accelerator="cpu", devices=2, strategy="ft_ddp")
fabric.launch()
net = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 2))
for epoch in range(2):
    for (batch,) in loader:
        fabric.backward(model(batch).mean())
        optimizer.step()
    if not epoch:
        child = os.fork()
        if not child:
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert not slot().has_passed(1)
"""


def test_a_process_that_a_loop_has_forked_ends_no_training(tmp_path: Path) -> None:
    """It runs the exit hooks, too. One that came back then was told that the training was over."""
    script = tmp_path / "train.py"
    script.write_text(FORKS)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    root = str(Path(__file__).resolve().parents[3])
    done = workers.run("lightning", [str(script)], env={**env, "PYTHONPATH": root})
    assert done.returncode == 0, done.stderr[-3000:]


def test_one_dies_behind_its_loop_and_the_leader_ends_well(tmp_path: Path) -> None:
    """It comes back too late, while the leader, which is one of two that `min_replicas` asks for, shuts down."""
    options = {"devices": 2, "epochs": 1, "strategy_options": {"min_replicas": 2}}
    holds = ["trained", "life:2", "exit"]
    with running(tmp_path, worker=WORKER, holds=holds, **options) as run:
        supervisor = run.start()
        for index in (0, 1):
            run.until_held(index, "trained")
        leader = 0 if run.lines(0)[-1]["leader"] else 1
        os.kill(run.lives(1 - leader)[0], signal.SIGKILL)
        run.until_held(1 - leader, "life:2")
        run.go("trained")
        run.until_held(leader, "exit")
        run.go("life:2")
        run.until(lambda: "over for its peers" in run.output(), "the other one to hear of it")
        run.go("exit")
        run.wait(supervisor)
        assert "stopping" not in run.output()


@pytest.mark.parametrize("by_itself", [False, True])
def test_random_numbers_are_those_without_faults(by_itself: bool, tmp_path: Path) -> None:
    """Dropout, and orders that a sampler draws from torch's generator: in the epoch under way, and in later ones.
    Also where the loop counts its epochs by itself, and runs through the first one again."""
    options: dict[str, Any] = {"worker": WORKER, "devices": 2, "draws": True, "range": by_itself}
    options["strategy_options"] = {"timeout_s": 20, "min_replicas": 2}
    with running(tmp_path / "whole", **options) as whole:
        whole.wait(whole.start())
    with running(tmp_path / "killed", holds=["step:13"], **options) as run:
        main = run.start()
        for index in (0, 1):
            run.until_held(index, "step:13")
        os.kill(run.lives(1)[0], signal.SIGKILL)
        run.go("step:13")
        run.wait(main)
        assert len(run.lives(1)) == 2
    assert len({each.end(index)["digest"] for each in (whole, run) for index in (0, 1)}) == 1


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"critic": True}, {"range": True}])
def test_what_the_loop_changes_itself_is_changed_once_in_a_group_that_comes_back(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """A momentum encoder, and a weight that is scaled, where the peer waits with the gradients of that batch, or
    between its two updates."""
    options: dict[str, Any] = {"worker": WORKER, "devices": 2, "follows": True, **more}
    options["strategy_options"] = {"timeout_s": 20, "min_replicas": 2}
    hold = "between:13" if "critic" in more else "step:13"
    with running(tmp_path / "whole", **options) as whole:
        whole.wait(whole.start())
    with running(tmp_path / "killed", holds=[hold], **options) as run:
        main = run.start()
        for index in (0, 1):
            run.until_held(index, hold)
        os.kill(run.lives(1)[0], signal.SIGKILL)
        run.go(hold)
        run.wait(main)
        assert len(run.lives(1)) == 2
        assert "are not those of its peers" not in run.output()
    assert len({each.end(index)["digest"] for each in (whole, run) for index in (0, 1)}) == 1


@pytest.mark.parametrize("others", [1, 2])
def test_those_that_were_stopped_while_their_peer_left_its_loop_do_not_train_on(
    others: int, tmp_path: Path
) -> None:
    """The peer's script leaves its loop within an epoch, and ends: no data tells that it has finished. Two that
    are behind it could train, from the step at which the second one was stopped."""
    at = [5, 7][:others]
    options: dict[str, Any] = {"worker": WORKER, "devices": 1 + others, "stop_at": 9}
    if others > 1:  # that wait for the connect timeout
        options["strategy_options"] = {"timeout_s": 8.0, "keep_state_s": 0}
    with running(tmp_path, **options, holds=[f"step:{step}" for step in at]) as run:
        main, stopped = run.start(), list[int]()
        for index, step in enumerate(at, 1):
            for one in (0, *range(index, 1 + others)):
                run.until_held(one, f"step:{step}")
            stopped += run.lives(index)
            os.kill(stopped[-1], signal.SIGSTOP)
            run.go(f"step:{step}")
        run.until(lambda: "replica group 0 has finished" in run.output(), "group 0 to finish")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        run.wait(main)
        where = ["all other processes", "another process, at a later step"][:others]
        for index in range(1, 1 + others):
            said = f"replica group {index}: the training has finished in "
            assert any(said + each in run.output() for each in where)
    assert [line["step"] for line in run.lines(0)] == list(range(1, 10))
    assert [pid for index in range(1, 1 + others) for pid in run.lives(index)] == stopped
    assert [len(run.lines(index)) for index in range(1, 1 + others)] == at


CATCHES = """
import os, sys
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
import ft_lightning

fabric = Fabric(strategy="ft_ddp", accelerator="cpu")
fabric.launch()
net = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(40, 4)), 4))
for epoch in range(3):
    for (batch,) in loader:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    try:
        if os.environ["REPLICA_GROUP_ID"] == "1":
            raise OSError("the validation has failed")
    except OSError as error:
        print(error)
        sys.exit(1)
"""


def test_a_script_that_ends_with_an_error_it_has_caught_has_not_finished(
    tmp_path: Path, lighthouse: str
) -> None:
    """Between two passes over the data. Its peer ended, too: it was told that the training was over."""
    script = tmp_path / "train.py"
    script.write_text(CATCHES)
    with running(tmp_path, lighthouse, worker=script) as run:
        first, second = run.start(0), run.start(1)
        run.wait(second, code=1)
        run.wait(first)
