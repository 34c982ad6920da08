"""Raw loops in real processes: equal to plain DDP without faults, and equal to each other with."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from ft_accelerate.runtime.checkpoints import POSITION_FILE
from ft_core.environment import ENV_HEARTBEAT
from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.ft_accelerate.harness import Line, Run, compare, running
from tests.harness.lighthouses import has_joined, patient_lighthouse
from tests.harness.waiting import PATIENCE_S

pytestmark = pytest.mark.process

SAMPLES, BATCH = 152, 4
EPOCHS = 5
LACKS = "this process is the main one now, and came back after its peers had done"
STEPS = SAMPLES // BATCH // 2  # in an epoch, of one of two replicas: 19, odd and prime on purpose


def samples_of(lines: list[Line], epoch: int) -> list[int]:
    return [x for line in lines if line["epoch"] == epoch for x in line["batch"]]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3, "precision": "bf16", "data": {"split_batches": True}},
        {
            "gather_loss": True,
            "norm": False,
            "seedable": True,
            "save": 10,
            "dropout": 0.1,
            "own_dropout": True,
            "generator": "own",
            "data": {"even_batches": False},
            "evaluated": 48,
        },
    ],
    ids=["accumulation-bf16-split", "gather-seedable"],
)
def test_equals_plain_ddp_bit_for_bit_also_with_discards(
    tmp_path: Path, lighthouse: str, options: dict[str, object]
) -> None:
    inject = {"0": 1, "3": 0, "9": 1, "10": 0}
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, inject=inject, **options) as run:
        run.wait(run.start(0), run.start(1))
    for index in (0, 1):
        mine, expected = run.lines(index), plain.lines(index)
        for key in ("step", "index", "epoch", "batch", "weights", "lr", "ticks", "skipped"):
            assert [x[key] for x in mine] == [x[key] for x in expected], key
        for key in ("step", "ticks", "lr", "accuracy", "processes", "index", "weights"):
            assert run.end(index)[key] == plain.end(index)[key], key
        assert run.evaluations(index) == plain.evaluations(index)
    assert run.end(0)["digest"] == plain.end(0)["digest"]
    assert compare(run.lines(0), run.lines(1)) == len(run.lines(0))
    assert sum(run.end(i)["main"] for i in (0, 1)) == 1
    if "save" in options:
        in_one_group(tmp_path / "one", lighthouse, plain, **options)
    if "gather_loss" not in options:  # after which no step is open where these are injected
        for index in (0, 1):  # of the other's it hears only once it takes part in that step
            own = sum(by == index for by in inject.values())
            assert own <= run.events(index, "discard") <= len(inject)
    if "save" in options:
        saved = sorted(p.name for p in (tmp_path / "ft" / "checkpoint_10").iterdir())
        plainly = [p.name for p in (tmp_path / "plain" / "checkpoint_10").iterdir()]
        assert saved == sorted([*plainly, POSITION_FILE])


def plain_run(tmp_path: Path, processes: int = 2, **options: object) -> Run:
    """The same script under plain Accelerate, to its end."""
    with running(tmp_path / "plain", **options) as plain:
        plain.wait(*plain.start_plain(processes), code=None)
    return plain


def in_one_group(log: Path, lighthouse: str, plain: Run, **options: object) -> None:
    """Two processes that torchrun starts are one replica group, and no less equal to plain DDP."""
    with running(log, lighthouse, **options) as run:
        run.wait(run.start_by_torchrun(2))
        assert run.output().count("these 2 processes are the only replica group") == 1
    for index in (0, 1):
        mine, expected = run.lines(index), plain.lines(index)
        for key in ("step", "index", "epoch", "batch", "weights", "lr", "ticks"):
            assert [x[key] for x in mine] == [x[key] for x in expected], key
        for key in ("processes", "index", "accuracy", "weights", "main"):
            assert run.end(index)[key] == plain.end(index)[key], key
        assert run.evaluations(index) == plain.evaluations(index)


def test_three_replicas_equal_plain_ddp_to_rounding(tmp_path: Path, lighthouse: str) -> None:
    options = {"epochs": 1, "norm": False, "seedable": True, "generator": "torch"}
    # Without a norm, whose zero gradients AdamW would blow up to noise.
    plain = plain_run(tmp_path, 3, **options)
    with running(tmp_path / "ft", lighthouse, **options) as run:
        run.wait(*[run.start(index, 3) for index in range(3)])
    for index in range(3):
        mine, expected = run.lines(index), plain.lines(index)
        assert [x["batch"] for x in mine] == [x["batch"] for x in expected]
        assert [x["average"] for x in mine] == pytest.approx(
            [x["average"] for x in expected], rel=1e-4
        )
        assert run.evaluations(index) == plain.evaluations(index)


@pytest.mark.parametrize(
    ("generator", "accumulate", "hold"),
    [("", 2, "step-12"), ("torch", 1, "step-24"), ("", 1, "loss-0")],
)
def test_random_numbers_are_those_without_faults(
    tmp_path: Path, lighthouse: str, generator: str, accumulate: int, hold: str
) -> None:
    """Dropout, and orders that a sampler draws from torch's generator: in the epoch under way, and in later ones.
    Also where it runs through no past: it was killed in the first batch, behind an operation."""
    options = {"dropout": 0.3, "norm": False, "generator": generator, "accumulate": accumulate}
    options["gather_loss"] = hold == "loss-0"
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, holds=[hold], **options) as run:
        zero, one = (run.start(index, **both) for index in (0, 1))
        for index in (0, 1):
            run.until_held(index, hold)
        one.kill()
        run.wait(one, code=-signal.SIGKILL)
        one = run.start(1, FT_RESTARTS="1", **both)
        run.go(hold)
        run.wait(zero, one)
    assert {run.end(index)["digest"] for index in (0, 1)} == {plain.end(0)["digest"]}


@pytest.mark.parametrize(
    ("workers", "persistent", "hold"),
    [(0, False, "step-24"), (1, False, "step-24"), (1, True, "step-24"), (1, False, "step-4")],
)
def test_a_stateful_loader_draws_as_without_us(
    tmp_path: Path, lighthouse: str, workers: int, persistent: bool, hold: str
) -> None:
    """torchdata's makes its first iterator when it is prepared, and draws a number for that. It was made again in the
    first pass, with persistent workers in each one: dropout, and with workers the order, were others. One that came
    back within the first pass read on in another order, since workers are asked for batches there."""
    options = {"dropout": 0.3, "norm": False, "workers": workers, "persistent": persistent}
    options |= {"data": {"use_stateful_dataloader": True}, "epochs": 3}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, holds=[hold], **options) as run:
        zero, one = (run.start(index, **both) for index in (0, 1))
        run.until_held(0, hold)
        for index in (0, 1):
            before = [x["weights"] for x in run.lines(index)]
            assert before == [x["weights"] for x in plain.lines(index)][: len(before)]
        one = run.killed_and_back(one, 1, hold=hold, of=0, **both)
        run.wait(zero, one)
    assert {run.end(index)["digest"] for index in (0, 1)} == {plain.end(0)["digest"]}


def test_random_numbers_behind_a_stream_that_is_read_again_are_those_without_faults(
    tmp_path: Path, lighthouse: str
) -> None:
    """Torch draws a number where the reading begins. A process that came back into a pass drew one more than its
    peers, and its dropout was another from there on."""
    options = {"dropout": 0.3, "norm": False, "trains_on_stream": True, "epochs": 3}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, holds=["step-12"], **options) as run:
        zero, one = (run.start(index, **both) for index in (0, 1))
        one = run.killed_and_back(one, 1, hold="step-12", of=0, **both)
        run.wait(zero, one)
    assert {run.end(index)["digest"] for index in (0, 1)} == {plain.end(0)["digest"]}


@pytest.mark.parametrize(
    ("more", "hold"),
    [({}, "step-12"), ({"accumulate": 2}, "step-10"), ({"gather_loss": True}, "loss-21")],
)
def test_what_the_script_changes_itself_is_changed_once_in_a_process_that_comes_back(
    tmp_path: Path, lighthouse: str, more: dict[str, object], hold: str
) -> None:
    """A momentum encoder, and a weight that is scaled, where the peer waits with the gradients of that batch."""
    options = {"follows": True, "norm": False, **more}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, holds=[hold], **options) as run:
        zero, one = (run.start(index, **both) for index in (0, 1))
        one = run.killed_and_back(one, 1, hold=hold, of=0, **both)
        run.wait(zero, one)
        assert "are not those of its peers" not in run.output()
    assert {run.end(index)["digest"] for index in (0, 1)} == {plain.end(0)["digest"]}


def test_killed_where_accumulation_goes_on_across_the_end_of_an_epoch(
    tmp_path: Path, lighthouse: str
) -> None:
    """Its peer waits in the second batch of the window, the first one of an epoch. The last one of the epoch before
    must be computed once more: the order of that epoch was drawn from where its sampler's generator is no more."""
    options = {"norm": False, "accumulate": 2, "across": True, "epochs": 3}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    hold = f"step-{STEPS // 2}"
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, holds=[hold], **options) as run:
        zero, one = (run.start(index, **both) for index in (0, 1))
        one = run.killed_and_back(one, 1, hold=hold, of=0, **both)
        run.wait(zero, one)
    assert {run.end(index)["digest"] for index in (0, 1)} == {plain.end(0)["digest"]}


@pytest.mark.parametrize(("generator", "workers"), [("torch", 0), ("own", 0), ("torch", 1)])
def test_killed_in_turn_in_an_epoch_in_evaluation_and_at_its_end(
    tmp_path: Path, lighthouse: str, generator: str, workers: int
) -> None:
    """A loop over `ft_accelerate.epochs`: what it logs before it has come to its peers is one epoch's end.

    All draw the order of the data from torch's generator, or one that the sampler has of its own, as TRL's
    for GRPO. Neither is the same in those that have come back, and both go on from pass to pass.
    """
    holds = ["step-8", "eval-1", "step-57"]
    options = {
        "epochs": EPOCHS,
        "step_delay_s": 0.02,
        "dropout": 0.1,
        "told": True,
        "seedable": True,
        "generator": generator,
        "workers": workers,
    }
    with running(tmp_path, lighthouse, holds=holds, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-8", of=0)
        zero = run.killed_and_back(zero, 0, hold="eval-1", of=1)  # the main process
        one = run.killed_and_back(one, 1, hold="step-57", of=0)  # the first of an epoch
        run.wait(zero, one)
    lines = [run.lines(i) for i in (0, 1)]
    ends = [run.end(i) for i in (0, 1)]
    for key in ("digest", "step", "ticks", "lr", "accuracy", "count"):
        assert ends[0][key] == ends[1][key], key
    assert ends[0]["step"] == EPOCHS * STEPS
    assert ends[0]["ticks"] == EPOCHS * STEPS * 2
    assert ends[0]["lr"] == 0
    assert sum(end["main"] for end in ends) == 1
    assert compare(*lines) > STEPS
    assert not any(line["skipped"] for replica in lines for line in replica)
    done = {line["step"] for replica in lines for line in replica}
    assert done == set(
        range(1, EPOCHS * STEPS + 1)
    )  # no process has skipped a step that no other took
    for epoch in range(EPOCHS):
        seen = [x for replica in lines for x in samples_of(replica, epoch)]
        assert len(seen) - len(set(seen)) <= 1  # the shards are padded to equal length by one
    both = [{e["epoch"]: e for e in run.evaluations(i, live=True)} for i in (0, 1)]
    common = both[0].keys() & both[1].keys()
    assert [both[0][e] for e in common] == [both[1][e] for e in common]
    assert len(run.evaluations(1, live=False)) < 3  # which were before its last return


@pytest.mark.parametrize("told", [False, True], ids=["range", "epochs"])
def test_a_loader_whose_workers_stay_draws_as_its_peers_do(
    tmp_path: Path, lighthouse: str, told: bool
) -> None:
    """`DataLoader(shuffle=True, generator=g, persistent_workers=True)`: in its first pass only, torch draws the
    workers' seed from `g`. One that came back drew it in another pass, or not at all."""
    options = {"epochs": 3, "step_delay_s": 0.01, "told": told, "generator": "own"}
    holds = ["step-8", "step-28"]
    with running(tmp_path, lighthouse, holds=holds, workers=1, persistent=True, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-8", of=0)
        zero = run.killed_and_back(zero, 0, hold="step-28", of=1)
        run.wait(zero, one)
    lines = [run.lines(i) for i in (0, 1)]
    assert run.end(0)["digest"] == run.end(1)["digest"]
    for epoch in range(3):
        seen = [x for replica in lines for x in samples_of(replica, epoch)]
        assert len(seen) == len(set(seen)), epoch


def test_a_loop_whose_loader_is_not_prepared_is_led_to_its_peers(
    tmp_path: Path, lighthouse: str
) -> None:
    """All of its past is one window. It begins with other weights than its peers', too. Its peer takes
    no step without it: else it might wait at the second hold, and be no peer to come to."""
    options = {"prepare_data": False, "first_seed_only": True, "gather_loss": True, "epochs": 2}
    holds = ["step-30", "step-50"]
    two = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path, lighthouse, holds=holds, stay_s=0.0001, **options) as run:
        zero, one = run.start(0, **two), run.start(1, **two)
        one = run.killed_and_back(one, 1, hold="step-30", of=0, **two)
        run.until_held(0, "step-50")
        run.until_held(1, "step-50")
        run.go("step-50")
        run.wait(zero, one)
    assert run.output().count("1 runs through 30 gradient steps of its past") == 1
    for key in ("digest", "step", "ticks", "lr", "count"):
        assert run.end(0)[key] == run.end(1)[key], key
    assert compare(run.lines(0), run.lines(1)) > STEPS


def test_early_stopping_and_the_best_metric_outlive_the_death_of_each_process(
    tmp_path: Path, lighthouse: str
) -> None:
    """They are in a registered object, which a script's past does not change."""
    losses = [0.9, 0.5, 0.6, 0.3, 0.4, 0.2, 0.3, 0.25, 0.1, 0.1]
    holds = [
        "eval-2",
        "step-76",
    ]  # after one that is worse, and the first of the epoch after the fourth
    options = {"losses": losses, "epochs": len(losses), "step_delay_s": 0.01}
    with running(tmp_path, lighthouse, holds=holds, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="eval-2", of=0)
        zero = run.killed_and_back(zero, 0, hold="step-76", of=1)
        run.wait(zero, one)
    for index in (0, 1):
        assert run.end(index)["step"] == 8 * STEPS
        assert run.evaluations(index, live=True)[-1]["epoch"] == 7
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert torch.load(tmp_path / "best.pt") == {"loss": 0.2, "epoch": 5}


@pytest.mark.parametrize(
    "holds", [["step-40", "step-58"], ["eval-1", "eval-2"]], ids=["step", "eval"]
)
@pytest.mark.parametrize("told", [False, True], ids=["range", "epochs"])
def test_a_parameter_group_that_was_added_in_the_past_is_its_peers_group(
    tmp_path: Path, lighthouse: str, holds: list[str], told: bool
) -> None:
    """A layer is trained from the second epoch on. A process that comes back begins with one group."""
    options = {"grows": 1, "epochs": 4, "step_delay_s": 0.01, "told": told}
    with running(tmp_path, lighthouse, holds=holds, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold=holds[0], of=0)
        zero = run.killed_and_back(zero, 0, hold=holds[1], of=1)
        run.wait(zero, one)
    for key in ("digest", "step", "ticks", "lr"):
        assert run.end(0)[key] == run.end(1)[key], key
    assert compare(run.lines(0), run.lines(1)) > STEPS


def test_what_a_script_keeps_in_variables_lacks_its_past_and_each_main_process_says_so_once(
    tmp_path: Path, lighthouse: str
) -> None:
    """The best metric and a list of results, over the death of each process in turn, and of the first once
    more. The best that is saved is the best of those that the main process has seen."""
    past, losses = 1e6, [0.1, 0.5, 0.6, 0.3, 0.4, 0.2]
    holds = ["step-25", "step-60", "step-80"]  # in the second, fourth and fifth epoch
    options = {"losses": losses, "in_variables": True, "epochs": len(losses), "holds": holds}
    with running(tmp_path, lighthouse, step_delay_s=0.01, **options) as run:
        zero, one = run.start(0), run.start(1)
        zero = run.killed_and_back(zero, 0, hold="step-25", of=1)
        assert LACKS not in run.output()
        one = run.killed_and_back(one, 1, hold="step-60", of=0)
        run.until_held(0, "step-80")
        assert run.output().count(LACKS) == 1
        saved = torch.load(tmp_path / "best.pt")
        zero = run.killed_and_back(zero, 0, hold="step-80", of=1)
        run.wait(zero, one)
    assert run.output().count(LACKS) == 2
    assert "after its peers had done 0 events" not in run.output()
    assert run.end(1)["main"] and saved == {"loss": 0.3, "epoch": 3}, "not the first epoch's"
    assert run.end(0)["results"] == [past] * 4 + losses[4:]
    assert run.end(1)["results"] == [past] * 3 + losses[3:]
    assert run.end(0)["best"] == run.end(1)["best"] == 0.2
    assert torch.load(tmp_path / "best.pt") == {"loss": 0.2, "epoch": 5}
    assert run.end(0)["digest"] == run.end(1)["digest"]


def test_one_that_has_come_back_is_not_the_main_process_while_another_was_always_there(
    tmp_path: Path,
) -> None:
    """A lighthouse that is started again orders processes by their names: the one that has come back is
    the first. It becomes the main one when the other dies, and says what it does not know."""
    options = {"epochs": EPOCHS, "holds": ["step-8", "step-20", "step-30"]}
    first = patient_lighthouse()
    with running(tmp_path, first.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        zero = run.killed_and_back(zero, 0, hold="step-8", of=1)  # the main process
        for index in (0, 1):
            run.until_held(index, "step-20")
        first.shutdown()
        with LighthouseServer(first.address(), config=first.config):
            run.go("step-20")
            run.until_held(1, "step-30")
            run.until_held(0, "step-30")
            between = [[x["main"] for x in run.lines(i) if x["step"] > 20] for i in (0, 1)]
            assert LACKS not in run.output()
            one.kill()
            one.wait()
            run.go("step-30")
            run.wait(zero)
    assert between == [[False] * 10, [True] * 10]
    assert run.end(0)["main"]
    assert run.output().count(LACKS) == 1


def test_a_triggered_backward_of_the_past_leaves_nothing_behind(
    tmp_path: Path, lighthouse: str
) -> None:
    """A process that had come back averaged the gradients of the next backward, in which its peers average none,
    and was taken for one that has left out an update, in each batch again."""
    options = {"triggered": True, "norm": False, "step_delay_s": 0.01}
    plain = plain_run(tmp_path, **options)
    fewest = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path / "ft", lighthouse, holds=["step-9"], **options) as run:
        zero, one = run.start(0, **fewest), run.start(1, **fewest)
        zero = run.killed_and_back(zero, 0, hold="step-9", of=1, **fewest)
        run.wait(zero, one)
    for index in (0, 1):
        assert run.end(index)["digest"] == plain.end(index)["digest"]
    assert compare(run.lines(0), run.lines(1)) > STEPS
    assert len(run.lives(0)) == 2


@pytest.mark.parametrize(
    "holds", [["step-40", "step-58"], ["eval-1", "eval-2"]], ids=["step", "eval"]
)
def test_an_optimizer_that_is_evaluated_elsewhere_is_moved_once(
    tmp_path: Path, lighthouse: str, holds: list[str]
) -> None:
    """`optimizer.train()` and `eval()` of the past moved the healed weights to and fro, whose last bits were no longer
    the peers': the process discarded its state in the next step."""
    options = {"moves": True, "norm": False, "epochs": 4, "step_delay_s": 0.01}
    plain = plain_run(tmp_path, **options)
    fewest = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path / "ft", lighthouse, holds=holds, **options) as run:
        zero, one = run.start(0, **fewest), run.start(1, **fewest)
        one = run.killed_and_back(one, 1, hold=holds[0], of=0, **fewest)
        zero = run.killed_and_back(zero, 0, hold=holds[1], of=1, **fewest)
        run.wait(zero, one)
    assert "are not those of its peers" not in run.output()
    for index in (0, 1):
        assert run.end(index)["digest"] == plain.end(index)["digest"]


def test_passes_of_the_main_process_alone_count_for_nothing(
    tmp_path: Path, lighthouse: str
) -> None:
    """It evaluates over a prepared loader, and the other process makes no such pass. Having come back, that one ran
    past its peer's place, to the script's end, in each of its lives."""
    options = {"alone": True, "norm": False, "epochs": 4, "step_delay_s": 0.01}
    plain = plain_run(tmp_path, **options)
    hold = f"step-{2 * STEPS + 3}"  # in the third epoch
    fewest = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path / "ft", lighthouse, holds=[hold], **options) as run:
        zero, one = run.start(0, **fewest), run.start(1, **fewest)
        one = run.killed_and_back(one, 1, hold=hold, of=0, **fewest)
        run.wait(zero, one)
    for index in (0, 1):
        assert run.end(index)["digest"] == plain.end(index)["digest"]


def test_weights_that_the_past_has_written_over_heal_anew(tmp_path: Path, lighthouse: str) -> None:
    """`model.load_state_dict` in the past: the peers' weights were received in place, so they were gone. The first
    gradient of a process that came back was one of the old weights, and all trained on it."""
    options = {"restores": True, "norm": False, "epochs": 3, "step_delay_s": 0.01}
    plain = plain_run(tmp_path, **options)
    fewest = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path / "ft", lighthouse, holds=["step-25"], **options) as run:
        zero, one = run.start(0, **fewest), run.start(1, **fewest)
        one = run.killed_and_back(one, 1, hold="step-25", of=0, **fewest)
        run.wait(zero, one)
    assert "are not those of its peers" not in run.output()
    for index in (0, 1):
        assert run.end(index)["digest"] == plain.end(index)["digest"]


def test_killed_within_accumulation_with_operations_in_it(tmp_path: Path, lighthouse: str) -> None:
    options = {"accumulate": 3, "epochs": 2, "gather_loss": True, "step_delay_s": 0.01}
    options["data"] = {"split_batches": True}  # so that an epoch has twice as many
    inject = {"4": 0, "16": 1, "18": 0}
    holds = ["step-9"]
    with running(tmp_path, lighthouse, holds=holds, inject=inject, **options) as run:
        zero, one = run.start(0), run.start(1)
        zero = run.killed_and_back(zero, 0, hold="step-9", of=1)
        run.wait(zero, one)
    windows = -(-2 * STEPS // 3)
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["step"] == run.end(1)["step"] == 2 * windows
    assert run.end(0)["ticks"] == run.end(1)["ticks"] == 2 * windows
    assert compare(run.lines(0), run.lines(1)) > windows


@pytest.mark.parametrize("split", [False, True])
def test_an_evaluation_over_a_stream_counts_each_sample_once(
    tmp_path: Path, lighthouse: str, split: bool
) -> None:
    """What fills up its last batch is left out, as in plain Accelerate, where one process reads for all."""
    options = {"streams": True, "evaluated": 50, "epochs": 1, "data": {"split_batches": split}}
    plain = plain_run(tmp_path, **options)
    with running(tmp_path / "ft", lighthouse, **options) as run:
        run.wait(*(run.start(index) for index in (0, 1)))
    (expected,) = plain.evaluations(0)
    assert expected["total"] == 50
    assert [run.evaluations(index) for index in (0, 1)] == [[expected]] * 2


@pytest.mark.parametrize("accumulate", [1, 4])
def test_batches_of_a_step_that_waits_count_once(
    tmp_path: Path, lighthouse: str, accumulate: int
) -> None:
    """Its peer comes back when the gradients are to be averaged: schedulers and registered objects have the step's
    batches in them by then, and the one that comes back uses these batches, too."""
    options = {"each_batch": True, "accumulate": accumulate, "norm": False, "epochs": 3}
    plain = plain_run(tmp_path, **options)
    fewest = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path / "ft", lighthouse, holds=["step-9"], **options) as run:
        zero, one = run.start(0, **fewest), run.start(1, **fewest)
        one = run.killed_and_back(one, 1, hold="step-9", of=0, **fewest)
        run.wait(zero, one)
    for key in ("digest", "lr", "ticks", "count"):
        assert run.end(0)[key] == run.end(1)[key] == plain.end(0)[key], key


@pytest.mark.parametrize("raising", [[1], [1, 2]], ids=["one of two", "two of three"])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3, "gather_loss": True}], ids=["", "window"]
)
def test_an_optimizer_that_raises_and_a_loop_that_goes_on(
    tmp_path: Path, lighthouse: str, options: dict[str, object], raising: list[int]
) -> None:
    """Parts of the update are done. The process gives up its state, and takes its peers', also where most have
    raised; its script goes to their place, without a restart."""
    raises, groups = {"3": raising}, len(raising) + 1
    with running(tmp_path, lighthouse, raises=raises, epochs=3, **options) as run:
        run.wait(*(run.start(index, groups) for index in range(groups)))
    ends = [run.end(index) for index in range(groups)]
    for key in ("digest", "step", "ticks", "lr", "count"):
        assert len({end[key] for end in ends}) == 1, key
    steps = run.lines(0)
    assert len(steps) == ends[0]["step"]
    for index in raising:
        assert [line["step"] for line in run.lines(index, "raised")] == [4]
        lines = run.lines(index)
        assert compare(steps, lines) == len(lines) > 4  # those whom it has left do not wait
        assert lines[-1]["step"] == len(steps)
        assert len(run.lives(index)) == 1


def test_a_flipped_bit_is_named_and_healed(tmp_path: Path) -> None:
    """The member that differs takes its peers' state, and its script goes to their place."""
    options = {"flips": {"5": 1}, "holds": ["step-16"], "norm": False, "samples": 228, "epochs": 1}
    with (
        patient_lighthouse() as server,
        running(tmp_path, server.address(), **options) as run,
    ):
        groups = [run.start(index, 3, FT_COMPARE_STEPS="8") for index in range(3)]
        for index in (0, 2):
            run.until_held(index, "step-16")
        job = str(run.log)
        run.until(lambda: has_joined(server, job, "1", or_member=True), "group 1 to join again")
        run.go("step-16")
        run.wait(*groups)
    named = {*re.findall(r"1: its parameters at step (\d+) are not", run.output())}
    assert [5 <= int(step) < 5 + 8 for step in named] == [True], run.output()
    assert [bool(run.events(index, "heal_done")) for index in range(3)] == [False, True, False]
    for key in ("digest", "step", "ticks", "lr", "count"):
        assert len({run.end(index)[key] for index in range(3)}) == 1, key
    assert compare(run.lines(0), run.lines(2)) == len(run.lines(0)) == run.end(0)["step"]
    assert len(run.lives(1)) == 1


def test_one_whose_past_takes_as_long_as_training_comes_back(tmp_path: Path) -> None:
    """Its loop has work of its own in each batch. Its peer waits for it, a part of the timeout at a time: it is not
    evicted for that, and not said to be back before it is."""
    options = {"epochs": 1000, "step_delay_s": 0.02, "delays_past": True, "stay_s": 0.25}
    env = {"ACCELERATE_FAULT_TOLERANCE_TIMEOUT_S": "4", ENV_HEARTBEAT: "0.4"}
    timeouts = Timeouts.derive(4.0, heartbeat_timeout_s=1.2, join_timeout_s=PATIENCE_S)
    with (
        LighthouseServer(config=LighthouseConfig(timeouts=timeouts)) as server,
        running(tmp_path, server.address(), **options) as run,
    ):
        run.start(0, **env), run.start(1, **env)
        run.until_step(1, 10)
        os.kill(run.lives(1)[0], signal.SIGSTOP)
        missed = run.lines(0)[-1]["step"] + 150
        run.until_step(0, missed)
        os.kill(run.lives(1)[0], signal.SIGCONT)
        run.until_step(1, missed)
        run.until_step(1, run.lines(1)[-1]["step"] + 10)
        assert compare(run.lines(0), run.lines(1)) >= 10
        assert run.output().count("is back at") == 1
        assert len(run.lives(1)) == 1


@pytest.mark.parametrize(
    ("size", "local", "last"), [(1, "", 9), (2, "", 9), (1, "diloco", 10)], ids=["1", "2", "diloco"]
)
def test_told_to_end_the_step_under_way_is_the_last_and_costs_the_others_nothing(
    tmp_path: Path, lighthouse: str, size: int, local: str, last: int
) -> None:
    """A preemption. Of a group of two only one process is told: the other ends with it. With DiLoCo
    the end is at the next meeting, which is after each fifth step."""
    options = {"epochs": 2, "norm": False, "batch_size": BATCH // size, "local": local}
    with running(tmp_path, lighthouse, holds=["step-8"], **options) as run:
        zero, one = run.start(0, size=size), run.start(1, size=size)
        told = size  # the first process of the second group
        run.until_held(0, "step-8")
        run.until_held(told, "step-8")
        os.kill(run.lives(told)[0], signal.SIGTERM)
        run.go("step-8")
        run.wait(one, code=128 + signal.SIGTERM)
        run.wait(zero)
    assert run.events(0, "discard") == 0
    for index in range(told, told + size):
        assert [line["step"] for line in run.lines(index)] == list(range(1, last + 1))
        assert local or compare(run.lines(0), run.lines(index)) == last
    assert run.end(0)["step"] == run.lines(0)[-1]["step"] > last
