"""Real Trainers in real processes: equal to stock DDP without faults, and equal to each other with.

Runs take seconds each (importing Lightning alone takes some); each test reads as much as it can
from one run.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lighthouse import LighthouseServer
from tests.ft_lightning.harness import Line, Run, compare, running
from tests.ft_lightning.trainer.worker import OPTIONS, Model, loaders
from tests.harness.trackers import (
    in_csv,
    in_mlflow,
    in_tensorboard,
    in_wandb,
    installed_trackers,
    make_mlflow,
)

pytestmark = pytest.mark.process

SAMPLES, BATCH = 152, 4
BATCHES = SAMPLES // BATCH // 2  # of one of two replicas: 19, odd and prime on purpose


def samples_of(lines: list[Line], epoch: int) -> list[int]:
    return [round(x * 64) for line in lines if line["epoch"] == epoch for x in line["batch"]]


def test_equals_stock_ddp_bit_for_bit_and_retries_discarded_steps(
    tmp_path: Path, lighthouse: str
) -> None:
    """As two replica groups of one process, two steps of which are discarded, and as one of two."""
    with running(tmp_path / "ddp", strategy="ddp", devices=2) as stock:
        stock.wait(stock.start())
    expected = [stock.lines(i) for i in (0, 1)]
    inject = {"4": 0, "11": 1, "25": 1}
    for name, faults in (("ranks", {}), ("discards", inject)):
        with running(tmp_path / name, lighthouse, inject=faults) as run:
            if name == "ranks":
                run.wait(*run.start_ranks(0, size=2, groups=1))
            else:
                run.wait(run.start(0), run.start(1))
            alone = "these 2 processes are the only replica group"
            assert run.output().count(alone) == (name == "ranks")
        assert compare(run.lines(0), run.lines(1)) == 2 * BATCHES
        assert run.end(0)["digest"] == run.end(1)["digest"] == stock.end(0)["digest"]
        for index in (0, 1):
            lines = run.lines(index)
            assert [line["step"] for line in lines] == list(range(1, 2 * BATCHES + 1))
            for key in ("batch", "lr", "epoch", "batch_idx", "total"):
                assert [x[key] for x in lines] == [x[key] for x in expected[index]], key
            assert run.end(index)["runs"] == [[x["epoch"], x["batch_idx"]] for x in lines]
            assert run.end(index)["world_size"] == 2
            assert run.end(index)["rank"] == index
        assert run.end(0)["leader"] != run.end(1)["leader"]
        assert run.end(0)["val_loss"] == run.end(1)["val_loss"]  # not sharded, unlike stock's


@pytest.mark.parametrize("manual", [False, True])
def test_training_step_runs_once_a_batch_though_members_die_in_the_step(
    tmp_path: Path, lighthouse: str, manual: bool
) -> None:
    """The leader is killed in a backward, later another group; one step fails besides."""
    faults = {"dies": {"4": 0, "11": 2}, "inject": {"7": 1}, "manual": manual}
    with running(tmp_path, lighthouse, **faults) as run:
        groups = [run.start(index, groups=3) for index in range(3)]
        run.wait(groups[1])
        run.wait(groups[0], groups[2], code=-signal.SIGKILL)
    lines = [run.lines(index) for index in range(3)]
    batches = -(-SAMPLES // BATCH // 3)
    assert [len(each) for each in lines] == [4, 2 * batches, 11]
    assert compare(lines[0], lines[1]) == 4
    assert compare(lines[1], lines[2]) == 11
    assert [line["participants"] for line in lines[1]] == [3] * 4 + [2] * 7 + [1] * (
        2 * batches - 11
    )
    assert [line["leader"] for line in lines[1]] == [False] * 4 + [True] * (2 * batches - 4)
    assert run.end(1)["runs"] == [[x["epoch"], x["batch_idx"]] for x in lines[1]]
    assert run.end(1)["runs"] == [[e, b] for e in range(2) for b in range(batches)]


def test_trackers_go_on_though_the_leader_is_killed_twice(tmp_path: Path, lighthouse: str) -> None:
    """A Trainer as it is by default, with every tracker that is installed: each step once, in one run.
    Callbacks that set themselves up on rank zero only go on in the next leader.

    With the trackers that are not installed with the tests: docs/lightning_tests.md.
    """
    trackers = installed_trackers()
    if "mlflow" in trackers:
        make_mlflow(tmp_path / "mlflow.db", "test")
    options = {"dies": {"4": 0, "11": 1}, "trackers": ["csv", *trackers]}
    with running(tmp_path, lighthouse, **options) as run:
        groups = [run.start(index, groups=3) for index in range(3)]
        run.wait(groups[2])
        run.wait(groups[0], groups[1], code=-signal.SIGKILL)
    every = list(range(2 * -(-SAMPLES // BATCH // 3)))
    assert in_csv(tmp_path / "last", "lr-AdamW") == [0, len(every) // 2]
    for name in ("train_loss", "device/batches_per_sec", "lr-AdamW"):
        assert in_csv(tmp_path / "first", name) == in_csv(tmp_path / "last", name)
    found = {"first": in_csv(tmp_path / "first", "train_loss")}
    if "tensorboard" in trackers:
        found["tensorboard"] = in_tensorboard(tmp_path / "tensorboard", "train_loss")
    if "wandb" in trackers:
        found["wandb"] = in_wandb(tmp_path, "train_loss")
    if "mlflow" in trackers:
        found["mlflow"] = in_mlflow(tmp_path / "mlflow.db", "test", "train_loss")
    assert found == dict.fromkeys(found, every)


def test_a_group_that_comes_back_and_leads_logs_no_row_of_an_epochs_start_again(
    tmp_path: Path, lighthouse: str
) -> None:
    """Callbacks hear of the epoch's start where it enters that epoch; its peer has logged that."""
    options: dict[str, Any] = {
        "dies": {str(BATCHES + 4): 1, str(BATCHES + 8): 0},
        "trackers": ["csv"],
    }
    options["strategy_options"] = {"min_replicas": 2}
    with running(tmp_path, lighthouse, **options) as run:
        zero, one = run.start(0), run.start(1)
        run.wait(one, code=-signal.SIGKILL)
        one = run.start(1)
        run.wait(zero, code=-signal.SIGKILL)
        run.wait(one, run.start(0))
    assert in_csv(tmp_path / "first", "lr-AdamW") == [0, BATCHES]
    assert in_csv(tmp_path / "first", "train_loss") == list(range(2 * BATCHES))


def test_killed_under_the_launcher_comes_back_at_its_peers_place(tmp_path: Path) -> None:
    """Two replica groups of two ranks, which begin unlike: one rank takes its group along.

    It dies in its share of a validation, which the others do in its place.
    """
    options: dict[str, Any] = {"max_epochs": 5, "checkpoints": True}
    options |= {"strategy_options": {"group_size": 2, "validation": "sharded"}, "own_start": True}
    options |= {"holds": ["val batch:0:3", "step:17", "life:2"]}
    with running(tmp_path, devices=4, **options) as run:
        main = run.start()
        for rank in range(4):
            run.until_step(rank, 3)
        first = [run.lives(rank)[0] for rank in range(4)]
        run.until_held(3, "val batch:0:3")
        os.kill(first[3], signal.SIGKILL)
        run.go("val batch:0:3")
        run.until_held(0, "step:17")
        run.begin_again(2, 2, group=1)
        run.go("step:17")
        run.wait(main)
    shares = [run.validations(rank) for rank in range(4)]
    assert [each[0]["batches"] for each in shares[:2]] == [[0, 2], [1, 3]]
    assert sorted(batch for each in shares for batch in each[4]["batches"]) == [0, 1, 2, 3]
    lines = [run.lines(rank) for rank in range(4)]
    assert compare(lines[0], lines[1]) == len(lines[0]) == 50
    assert [run.lives(rank) for rank in (0, 1)] == [[first[0]], [first[1]]]
    for rank in (2, 3):
        healed = [line for line in lines[rank] if line["pid"] != first[rank]]
        assert healed[0]["step"] > 17
        assert healed[0]["started"] == [healed[0]["epoch"], healed[0]["batch_idx"]]
        assert compare(lines[0], lines[rank]) > len(healed) > 5
    ends = [run.end(rank) for rank in range(4)]
    assert len({(end["digest"], end["step"], end["epoch"]) for end in ends}) == 1
    assert sum(end["leader"] for end in ends) == 1
    assert [(end["rank"], end["world_size"]) for end in ends] == [(r, 4) for r in range(4)]
    assert {line["participants"] for line in lines[0]} == {2, 4}
    # While four take part no rank trains on another's samples, nor twice on one.
    for epoch in range(5):
        seen = [x for replica in lines for x in samples_of(replica, epoch)]
        assert len(seen) == len(set(seen))
    check_against_four_processes([replica[:3] for replica in lines])
    saved = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert len(saved) == ends[0]["step"] // 10
    assert "replica group 1 was killed by SIGKILL; it is started again" in run.output()


def check_against_four_processes(lines: list[list[Line]]) -> None:
    """Data order and parameters of the first steps are those of `ddp` in four processes."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(7)).tolist()
    for rank, mine in enumerate(lines):
        assert samples_of(mine, 0) == order[rank::4][: len(mine) * BATCH]
    dataset: Any = loaders({**OPTIONS, "samples": SAMPLES})[0].dataset
    norms = []
    for begins in (0, 2):  # the first rank of the group whose state all begin with
        torch.manual_seed(begins)
        model = Model(OPTIONS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(len(lines[0])):
            # A group that takes the others' state adds nothing to the step in which it does.
            count = lines[0][step]["participants"]
            for mine in lines if count == 4 else lines[begins : begins + 2]:
                images, labels = dataset[[round(x * 64) for x in mine[step]["batch"]]]
                (nn.functional.cross_entropy(model.net(images), labels) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [p.detach() for p in model.parameters() if p.dim() > 1]
        norms.append(sum(float(p.abs().sum()) for p in weights))
    assert any(lines[0][-1]["norm"] == pytest.approx(norm, rel=1e-5) for norm in norms)


def test_accumulation_repeats_discarded_windows_and_heals_at_a_window(
    tmp_path: Path, lighthouse: str
) -> None:
    options: dict[str, Any] = {"accumulate": 3, "max_epochs": 6, "holds": ["step:8"]}
    options["inject"] = {"2": 0, "30": 1, "32": 0}
    windows = -(-BATCHES // 3)
    with running(tmp_path, lighthouse, **options) as run:
        zero, one = run.start(0), run.start(1)
        run.until_step(1, 4)
        one.kill()
        one.wait()
        run.until_held(0, "step:8")
        again = run.start_again(1)
        run.go("step:8")
        run.wait(zero, again)
    lines = [run.lines(i) for i in (0, 1)]
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["step"] == run.end(1)["step"] == 6 * windows
    assert compare(*lines) > 10
    healed = [line for line in lines[1] if line["pid"] == again.pid]
    assert healed[0]["step"] > 8


def run_that_waits_for_one(
    tmp_path: Path, lighthouse: str, *, dies: int, validated: int = 0, **options: Any
) -> Run:
    """A run of two groups, which has ended. The second one dies in the backward of step `dies`, when the first has
    made `validated` validations; the first waits until it is back."""
    options |= {"dies": {str(dies): 1}, "holds": [f"dies:{dies}"]}
    options["strategy_options"] = {"min_replicas": 2}
    with running(tmp_path, lighthouse, **options) as run:
        zero, one = run.start(0), run.start(1)
        run.until_held(1, f"dies:{dies}")
        run.until(lambda: len(run.lines(0, "validations")) >= validated, "the first's validations")
        run.go(f"dies:{dies}")
        run.wait(one, code=-signal.SIGKILL)
        run.wait(zero, run.start(1))
    return run


@pytest.mark.parametrize("accumulate", [1, 3])
def test_callbacks_count_each_batch_once_where_a_peer_waits_within_a_step(
    tmp_path: Path, lighthouse: str, accumulate: int
) -> None:
    """It gives its state when its callbacks have heard of the step's batches, and the group that comes back computes
    those from the step's first one on."""
    run = run_that_waits_for_one(tmp_path, lighthouse, dies=4, accumulate=accumulate)
    lines = [run.lines(i) for i in (0, 1)]
    compare(*lines)
    heard = [{line["step"]: line["heard"] for line in each} for each in lines]
    assert heard[0] == heard[1]
    assert heard[0][max(heard[0])] == [2 * BATCHES, 2 * BATCHES]


def test_batches_by_hand_without_an_update_are_counted_once_where_a_peer_waits_for_the_next_that_has_one(
    tmp_path: Path, lighthouse: str
) -> None:
    """The group that comes back computes them, too; it numbers its rows as its peer does."""
    options: dict[str, Any] = {"manual": True, "every": 4, "max_epochs": 1}
    run = run_that_waits_for_one(tmp_path, lighthouse, dies=2, **options)
    rows = [{line["step"]: line["row"] for line in run.lines(i)} for i in (0, 1)]
    assert rows[0] == rows[1] == {n: 4 * n - 1 for n in range(1, BATCHES // 4 + 1)}


def test_callbacks_hear_of_each_validation_once_where_a_peer_waits_in_the_window_around_them(
    tmp_path: Path, lighthouse: str
) -> None:
    """The group that comes back computes the window from its first batch on, and does not validate again."""
    options: dict[str, Any] = {"accumulate": 4, "validates": 1, "logs": True, "max_epochs": 1}
    # In the window's first batch, when its peer has validated within it.
    run = run_that_waits_for_one(tmp_path, lighthouse, dies=1, validated=5, **options)
    lines = [run.lines(i) for i in (0, 1)]
    compare(*lines)
    stopping = [{line["step"]: line["stopping"] for line in each} for each in lines]
    assert stopping[0] == stopping[1]
    validations = [len(run.lines(i, "validations")) for i in (0, 1)]
    assert validations == [BATCHES, BATCHES - 3]
    assert run.end(0)["digest"] == run.end(1)["digest"]


@pytest.mark.parametrize("stream", [False, True])
def test_it_dies_in_the_validation_after_batches_by_hand_that_had_no_update(
    tmp_path: Path, lighthouse: str, stream: bool
) -> None:
    """It comes back in the next epoch: the epoch that has ended has left no step open. What is logged while it is
    away, long before the vote, is a mean over both."""
    options: dict[str, Any] = {"manual": True, "every": 4, "holds": ["validation:0"]}
    options["stream"] = stream
    options["strategy_options"] = {"min_replicas": 2}
    norms = []  # of the weights: running statistics are each process's own in a window
    synced = []
    for dies in (False, True):
        (folder := tmp_path / f"{dies}").mkdir()
        with running(folder, lighthouse, **options) as run:
            zero, one = run.start(0), run.start(1)
            for rank in (0, 1):
                run.until_held(rank, "validation:0")
            if dies:
                one.kill()
                one.wait()
                one = run.start(1)
            run.go("validation:0")
            run.wait(zero, one)
            norms += [{line["step"]: line["norm"] for line in run.lines(i)} for i in (0, 1)]
            lines = run.lines(0, "synced")
            synced.append([(line["epoch"], line["batch"], line["value"]) for line in lines])
    assert all(seen == norms[0] for seen in norms[1:])
    assert [*norms[0]] == list(range(1, 2 * (BATCHES // 4) + 1))
    assert synced[0] == synced[1]


@pytest.mark.parametrize("stream", [False, True])
def test_it_dies_in_a_backward_behind_a_mean_that_waits_for_it(
    tmp_path: Path, lighthouse: str, stream: bool
) -> None:
    """Its peer waits with the gradients of a step that can't be committed without it, and it, when it is back, with
    the batch's mean. Over a stream a vote says, too, which batch is the last one."""
    options = {"synced": True, "stream": stream, "strategy_options": {"min_replicas": 2}}
    norms = []
    for dies in ({}, {"3": 1}):
        (folder := tmp_path / f"{len(dies)}").mkdir()
        with running(folder, lighthouse, dies=dies, **options) as run:
            zero, one = run.start(0), run.start(1)
            if dies:
                assert one.wait() == -signal.SIGKILL
                one = run.start(1)
            run.wait(zero, one)
            norms += [{line["step"]: line["norm"] for line in run.lines(i)} for i in (0, 1)]
    assert all(seen == norms[0] for seen in norms[1:])
    assert [*norms[0]] == list(range(1, 2 * BATCHES + 1))


def test_sigterm_leaves_without_a_discard(tmp_path: Path, lighthouse: str) -> None:
    events = tmp_path / "events.jsonl"
    with running(tmp_path, lighthouse, holds=["step:6"], max_epochs=3) as run:
        zero = run.start(0, FT_EVENT_LOG=str(events))
        one = run.start(1)
        run.until_held(1, "step:6")
        one.terminate()
        run.go("step:6")
        run.wait(one, zero)
    kinds = [(e["kind"], e.get("participants")) for e in map(json.loads, events.open())]
    left = kinds.index(("commit", 1))  # the first step without the one that left
    assert ("commit", 2) in kinds[:left]
    assert "loss" in [kind for kind, _ in kinds[:left]]
    assert "discard" not in [kind for kind, _ in kinds[:left]]
    last = run.lines(1)[-1]
    assert last["step"] < run.end(0)["step"] == 3 * BATCHES
    assert compare(*[run.lines(i) for i in (0, 1)]) >= 5
    assert {line["participants"] for line in run.lines(0)} == {1, 2}


def test_manual_optimization_repeats_a_discarded_step(tmp_path: Path, lighthouse: str) -> None:
    with running(tmp_path, lighthouse, manual=True, max_epochs=1, inject={"3": 1}) as run:
        run.wait(run.start(0), run.start(1))
    assert compare(run.lines(0), run.lines(1)) == BATCHES
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["step"] == BATCHES
    assert run.end(0)["runs"] == run.end(1)["runs"] == [[0, b] for b in range(BATCHES)]


@pytest.mark.parametrize("raising", [[1], [1, 2]], ids=["one of two", "two of three"])
@pytest.mark.parametrize("manual", [True, False], ids=["manual", "automatic"])
def test_an_optimizer_that_raises_in_a_loop_that_goes_on(
    tmp_path: Path, coordinator: LighthouseServer, manual: bool, raising: list[int]
) -> None:
    """Parts of the update are done. The group gives up its state, and takes its peers' and their place, without
    a restart; also where most have raised."""
    options = {"manual": manual, "max_epochs": 2, "raises": {"3": raising}, "holds": ["step:16"]}
    groups = len(raising) + 1
    batches = -(-2 * BATCHES // groups)
    with running(tmp_path, coordinator.address(), **options) as run:
        processes = [run.start(index, groups) for index in range(groups)]
        run.until_held(0, "step:16")
        for index in raising:
            run.until_waiting(coordinator, str(index), or_member=True)
        run.go("step:16")
        run.wait(*processes)
    ends = [run.end(index) for index in range(groups)]
    assert len({end["digest"] for end in ends}) == 1
    assert {end["step"] for end in ends} == {2 * batches}
    assert ends[0]["runs"] == [[e, b] for e in range(2) for b in range(batches)]
    for index in raising:
        assert [line["step"] for line in run.lines(index, "raised")] == [3]
        lines = run.lines(index)
        if not manual:
            # Lightning takes the step for made: this line shows what the group has given up.
            assert lines.pop(3)["step"] == 4
        assert compare(run.lines(0), lines) >= batches
        assert len(run.lives(index)) == 1


@pytest.mark.parametrize("averages", [False, True])
def test_what_a_training_step_changes_is_changed_once_in_a_group_that_heals_within_that_step(
    tmp_path: Path, lighthouse: str, averages: bool
) -> None:
    """A momentum encoder, a weight that is normalized, and one that `on_before_zero_grad` changes, where the peer waits
    with the gradients of that batch. `averages`: a callback has put its averages in the checkpoint in their place."""
    options: dict[str, Any] = {"momentum": True, "max_epochs": 1, "logs": averages}
    options["strategy_options"] = {"min_replicas": 2}
    ends = []
    for dies in ({}, {"0": 1}, {"5": 1}):
        (folder := tmp_path / f"{len(ends)}").mkdir()
        with running(folder, lighthouse, dies=dies, **options) as run:
            whole, victim = run.start(0), run.start(1)
            if dies:
                run.wait(victim, code=-signal.SIGKILL)
                victim = run.start(1)
            run.wait(whole, victim)
            assert run.end(0)["digest"] == run.end(1)["digest"]
            ends.append(run.end(0)["digest"])
    assert len(set(ends)) == 1


def test_a_flipped_bit_is_named_and_healed(tmp_path: Path, coordinator: LighthouseServer) -> None:
    options = {"flips": {"5": 1}, "holds": ["step:16"]}
    with running(tmp_path, coordinator.address(), **options) as run:
        groups = [run.start(index, 3, FT_COMPARE_STEPS="8") for index in range(3)]
        for index in (0, 2):
            run.until_held(index, "step:16")
        run.until_waiting(coordinator, "1", or_member=True)
        run.go("step:16")
        run.wait(*groups)
    named = {*re.findall(r"1: its parameters at step (\d+) are not", run.output())}
    assert [5 <= int(step) < 5 + 8 for step in named] == [True], run.output()
    assert [bool(run.events(index, "heal_done")) for index in range(3)] == [False, True, False]
    assert len({run.end(index)["digest"] for index in range(3)}) == 1
    assert len(run.lives(1)) == 1
