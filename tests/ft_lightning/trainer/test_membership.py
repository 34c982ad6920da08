"""Real Trainers that die and come back in the places where it is hard: the others go on, and agree.

Mid-epoch and in accumulation windows: `test_replicas.py`.
"""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest

from lighthouse import LighthouseServer
from tests.ft_lightning.harness import compare, running
from tests.harness.trackers import in_csv

pytestmark = pytest.mark.process

BATCHES = 19  # of one of two replicas: 152 samples, 4 a batch


def test_the_leader_dies_in_a_validation_and_comes_back_in_the_next(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Nothing waits for it; another one writes on; it heals at a batch, and writes nothing.

    The validation is replicated, and calls collectives. What is agreed at its end, and at the epoch's,
    is not disturbed: the group is let in once, where it can heal.
    """
    holds = ["val batch:1:2", "validation:2"]
    options = {"max_epochs": 4, "holds": holds, "checkpoints": True, "logs": True, "gathers": True}
    with running(tmp_path, coordinator.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        for rank in (0, 1):
            run.until_held(rank, "val batch:1:2")
        assert [line["leader"] for line in run.lines(0)] == [True] * len(run.lines(0))
        before = (tmp_path / "logs/version_0/metrics.csv").read_text().splitlines()
        zero.kill()
        zero.wait()
        run.go("val batch:1:2")
        run.until_held(1, "validation:2")
        again = run.start(0)
        run.until_waiting(coordinator, "0")
        discards = run.events(1, "discard")
        run.go("validation:2")
        run.wait(one, again)
        assert run.events(1, "discard") == discards
        assert run.events(0, "heal_start") == 1
    lines = [run.lines(rank) for rank in (0, 1)]
    healed = [line for line in lines[0] if line["pid"] == again.pid]
    # Let in at the end of a validation; it has begun with the first batch of the next epoch.
    assert healed[0]["epoch"] == 3
    assert healed[0]["batch_idx"] in (0, 1)
    assert compare(*lines) >= 2 * BATCHES + len(healed)
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["step"] == run.end(1)["step"] == 4 * BATCHES
    assert not run.end(0)["leader"] and run.end(1)["leader"]
    assert not any(line["leader"] for line in healed)
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {"version_0"}
    check_files(tmp_path, before)


def check_files(tmp_path: Path, before: list[str]) -> None:
    folder = tmp_path / "logs" / "version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    trained = [int(row["step"]) for row in rows if row.get("train_loss")]
    assert trained == list(range(4 * BATCHES))  # by two leaders, each step once
    assert len(rows) > len(before) > 2 * BATCHES
    assert [int(r["step"]) for r in rows if r.get("val_loss")] == [
        BATCHES * epoch - 1 for epoch in (1, 2, 3, 4)
    ]
    assert "batch_size: 4" in (folder / "hparams.yaml").read_text()
    saved = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert len(saved) == 4 * BATCHES // 10


@pytest.mark.parametrize("gan", [False, True])
def test_one_that_hangs_in_a_batch_abandons_it_and_heals(
    tmp_path: Path, strict_coordinator: LighthouseServer, gan: bool
) -> None:
    """It is evicted, and finds at the end of a backward that its peers are far ahead: nothing of
    its batch is applied, and it goes on at their place. Its peers' code runs once a batch. A weight
    average, of buffers, too, comes along."""
    options = {"max_epochs": 4, "gan": gan, "logs": not gan, "holds": ["step:12", "step:30"]}
    with running(tmp_path, strict_coordinator.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        for rank in (0, 1):
            run.until_held(rank, "step:12")
        one.send_signal(signal.SIGSTOP)
        run.go("step:12")
        run.until_held(0, "step:30")
        one.send_signal(signal.SIGCONT)
        run.until_waiting(strict_coordinator, "1")
        run.go("step:30")
        run.wait(zero, one)
    lines = [run.lines(rank) for rank in (0, 1)]
    steps = [line["step"] for line in lines[0]]
    updates = 2 if gan else 1
    assert steps == list(range(updates, 4 * BATCHES * updates + 1, updates))
    assert compare(*lines) == len(lines[1]) > BATCHES
    assert lines[1][12 // updates]["step"] > 30
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["runs"] == [[x["epoch"], x["batch_idx"]] for x in lines[0]]
    seen = [[x["epoch"], x["batch_idx"]] for x in lines[1]]
    assert run.end(1)["runs"] == [
        *seen[: 12 // updates],
        [0, 12 // updates],
        *seen[12 // updates :],
    ]


def test_one_let_in_between_two_steps_of_a_batch_heals_at_the_next(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Peers are in the midst of user code, which no state can bring along: the newcomer leaves them
    alone, and heals where the next batch begins. Theirs runs once. Batches have as many steps as the
    ones before: so it is not let in before."""
    options = {"max_epochs": 2, "gan": True, "holds": ["step:12"]}
    with running(tmp_path, coordinator.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        for rank in (0, 1):
            run.until_held(rank, "step:12")
        one.kill()
        one.wait()
        again = run.start(1)
        run.until_waiting(coordinator, "1")
        discards = run.events(0, "discard")
        run.go("step:12")
        run.wait(zero, again)
        assert run.events(0, "discard") - discards <= 1  # of the step in which the other one died
        assert run.events(1, "heal_start") == 1
    lines = [run.lines(rank) for rank in (0, 1)]
    healed = [line for line in lines[1] if line["pid"] == again.pid]
    # Let in before the batch's first step or after it: then the second one ends without it, and it
    # has asked for the next place before it left this one.
    assert healed and healed[0]["step"] in (14, 16)
    assert compare(*lines) == len(lines[1])
    assert [line["step"] for line in lines[0]] == list(range(2, 4 * BATCHES + 1, 2))
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["runs"] == [[x["epoch"], x["batch_idx"]] for x in lines[0]]
    assert run.end(1)["runs"] == [[x["epoch"], x["batch_idx"]] for x in healed]


def test_a_batch_that_too_few_could_finish_ends_the_fit(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """A group dies in the second step of a batch, and no step may be taken without it. It can't be
    healed there: that is said, and its peer does not try for ever."""
    options = {"gan": True, "dies": {"15": 1}, "strategy_options": {"min_replicas": 2}}
    with running(tmp_path, coordinator.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        run.wait(one, code=-signal.SIGKILL)
        run.start(1)
        run.wait(zero, code=1)
        assert "min_replicas=2 does not let the others finish the batch" in run.output()
    assert run.lines(0)[-1]["step"] == 14


def test_one_that_hangs_between_epochs_is_left_behind_and_heals(
    tmp_path: Path, strict_coordinator: LighthouseServer
) -> None:
    """It is evicted while it validates; it comes to a round of epochs ago, and goes on alone.

    The validation was to be divided: each does all of it. Its peer is before a batch when it asks for a
    quorum in the midst of its validation, and could give it its state: it takes that afterwards, so
    that the validation is of one set of weights.
    """
    options = {
        "max_epochs": 5,
        "strategy_options": {"validation": "sharded"},
        "holds": ["validation:1", "step:48"],
    }
    with running(tmp_path, strict_coordinator.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        for rank in (0, 1):
            run.until_held(rank, "validation:1")
        one.send_signal(signal.SIGSTOP)
        run.go("validation:1")
        run.until_held(0, "step:48")
        asked = len(run.lines(1, "agreements"))
        one.send_signal(signal.SIGCONT)
        run.until(lambda: len(run.lines(1, "agreements")) > asked, "1 to tally its validation")
        run.until_waiting(strict_coordinator, "1")
        run.go("step:48")
        run.wait(zero, one)
    lines = [run.lines(rank) for rank in (0, 1)]
    assert compare(*lines) > 3 * BATCHES
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["step"] == run.end(1)["step"] == 5 * BATCHES
    validations = [run.validations(rank) for rank in (0, 1)]
    assert [sorted(each[1]["batches"]) for each in validations] == [[0, 1, 2, 3]] * 2
    assert [each[4]["batches"] for each in validations] == [[0, 2], [1, 3]]


def test_the_leader_dies_in_a_divided_validation_and_is_let_in_at_an_epochs_end(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Its share is done by the other one; it is let in between epochs, and begins with a batch."""
    holds = ["val batch:1:2", "end:2"]
    options = {"max_epochs": 4, "holds": holds, "strategy_options": {"validation": "sharded"}}
    with running(tmp_path, coordinator.address(), **options) as run:
        zero, one = run.start(0), run.start(1)
        run.until_held(0, "val batch:1:2")
        zero.kill()
        zero.wait()
        run.go("val batch:1:2")
        run.until_held(1, "end:2")
        again = run.start(0)
        run.until_waiting(coordinator, "0")
        discards = run.events(1, "discard")
        run.go("end:2")
        run.wait(one, again)
        assert run.events(1, "discard") == discards
        assert run.events(0, "heal_start") == 1
    zeros, ones = run.validations(0), run.validations(1)
    assert [zeros[0]["batches"], ones[0]["batches"]] == [[0, 2], [1, 3]]
    assert ones[1]["batches"] == [1, 3, 0, 2]
    assert ones[2]["batches"] == [0, 1, 2, 3]
    assert [zeros[3]["batches"], ones[3]["batches"]] == [
        [1, 3],
        [0, 2],
    ]  # the one that stayed is first
    assert zeros[3]["val_loss"] == ones[3]["val_loss"]
    lines = [run.lines(rank) for rank in (0, 1)]
    healed = [line for line in lines[0] if line["pid"] == again.pid]
    assert healed[0]["epoch"] == 3
    assert healed[0]["batch_idx"] == BATCHES - len(healed) in (0, 1)
    assert compare(*lines) == 2 * BATCHES + len(healed)
    assert run.end(0)["digest"] == run.end(1)["digest"]


@pytest.mark.parametrize("min_replicas", [1, 2])
def test_a_leader_that_is_the_last_to_finish_writes_what_is_its_to_write(
    tmp_path: Path, lighthouse: str, min_replicas: int
) -> None:
    """Its peers have left, and it is in no quorum if more than one must be there: none has one without it."""
    options = {"logs": True, "strategy_options": {"min_replicas": min_replicas}}
    with running(tmp_path, lighthouse, holds=["row:1"], **options) as run:
        groups = [run.start(0), run.start(1)]
        run.until(lambda: any(tmp_path.glob("*.end")), "the other one to finish")
        run.go("row:1")
        run.wait(*groups)
    assert len(in_csv(tmp_path / "logs", "ended")) == 2


def test_one_is_let_in_while_the_fit_goes_on_that_was_told_to_stop(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Lightning takes `min_steps` to want an epoch, too: behind each batch follows another, and not the epoch's end."""
    options = {"max_epochs": 2, "min_steps": 15, "asks_to_stop": 2, "dies": {"5": 1}}
    with running(tmp_path, coordinator.address(), holds=["step:8"], **options) as run:
        zero, one = run.start(0), run.start(1)
        run.wait(one, code=-signal.SIGKILL)
        run.until_held(0, "step:8")
        again = run.start(1)
        run.until_waiting(coordinator, "1")
        run.go("step:8")
        run.wait(zero, again)
    compare(run.lines(0), run.lines(1))
    ends = [run.end(rank) for rank in (0, 1)]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["step"] == ends[1]["step"] == BATCHES
