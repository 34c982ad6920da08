"""Fits under a quorum of two and of three: equal to stock `ddp`, to each other, and to the promises.

docs/lightning_tests.md says what each test shows. The runs are made once for all tests: two pairs of
processes, and one of three each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.imports import RequirementCache
from torchmetrics.classification import MulticlassAccuracy

from lighthouse import LighthouseServer
from tests.ft_lightning.harness import Scenarios
from tests.ft_lightning.trainer.scenarios import BATCHES, SAMPLES
from tests.ft_lightning.trainer.stream_scenarios import CHANGED_AT
from tests.ft_lightning.trainer.validation_scenarios import LOADERS, VAL_BATCH
from tests.harness.lighthouses import patient_lighthouse

pytestmark = pytest.mark.process

AS_STOCK = (
    "accumulate",
    "bf16",
    "fp16",
    "gan",
    "every_second_step",
    "own_samplers",
    "shared",
    "by_hand",
    "rest_left_out",
    "window_left_out",
    "seldom",
    "contrastive",
    "stopping_stream",
    "sharpness",
)
IN_WINDOWS = ("accumulate", "every_second_step", "window_left_out", "stopping_stream")
"""In a window buffers are a group's own."""
RETRIED = {
    "accumulate:retry": {"1": 0, "10": 1},
    "fp16:retry": {"2": 0, "9": 1},
    "gan:retry": {"4": 1, "9": 0, "13": 1, "20": 1},
    "every_second_step:retry": {"3": 1},
    "shared:retry": {"1": 1, "4": 0, "5": 1, "6": 0, "7": 1, "8": 0, "17": 1},
    "by_hand:retry": {"3": 0, "4": 1, "8": 0},
    "window_left_out:retry": {"9": 1},
    "contrastive:retry": {"3": 0, "4": 1, "9": 1},
    "sharpness:retry": {"3": 0, "4": 1, "9": 1},
}
"""Steps (votes) at which one replica's attempt fails, after its peer's gradients have travelled."""
OWN = (
    "nothing_on_one",
    "scopes",
    "stops",
    "clocks",
    "saves_by_the_clock",
    "plateau_by_step",
    "differing_rate",
    "leftovers",
    "refusals",
    "failing_saves",
    "resume",
    "resume_within",
    "around",
    "sharded:one",
    "sharded:two",
    "sharded:tiny",
    "replicated:one",
    "stream:plain",
    "stream:dataset",
    "stream:unknown length",
    "stream:loader",
    "endless",
    "endless:empty",
)

Runs = dict[str, Scenarios]


@pytest.fixture(scope="module")
def coordinator() -> Iterator[LighthouseServer]:
    """No process hangs here: one that stands still is one that the machine has no time for."""
    with patient_lighthouse(heartbeat_timeout_s=25.0) as server:
        yield server


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any, coordinator: LighthouseServer) -> Runs:
    def make(name: str, groups: int, **options: Any) -> Scenarios:
        run = Scenarios(tmp_path_factory.mktemp(name), coordinator.address(), **options)
        try:
            run.run(groups)
        finally:
            run.close()
        return run

    return {
        "stock": make("stock", 2, run=AS_STOCK, strategy="ddp"),
        "ours": make("ours", 2, run=[*AS_STOCK, *RETRIED, *OWN], inject=RETRIED),
        "stock of 3": make("stock3", 3, run=["accumulate"], strategy="ddp"),
        "ours of 3": make("ours3", 3, run=["accumulate"]),
    }


def both(runs: Runs, name: str) -> tuple[Any, Any]:
    return runs["ours"].result(0, name), runs["ours"].result(1, name)


@pytest.mark.parametrize("name", AS_STOCK)
def test_two_groups_train_as_two_processes_of_stock_ddp_do(runs: Runs, name: str) -> None:
    """Bit for bit: parameters and buffers after each batch, what `sync_dist` logs, the scale."""
    stock = runs["stock"].result(0, name)  # its other rank's buffers are its own
    for ours in both(runs, name):
        assert ours["participants"] == [2], "one was evicted: it stood still for too long"
        for key in ("lrs", "steps", "logged", "epoch", "stopped", "scale"):
            assert ours.get(key) == stock.get(key), key
        assert ours["metrics"]["train"] == pytest.approx(stock["metrics"]["train"], rel=1e-6)
    assert runs["ours"].result(0, name)["digests"] == stock["digests"]
    if name != "gan":  # whose two forwards a batch leave stock's ranks with different buffers
        assert ours["metrics"]["val"] == pytest.approx(stock["metrics"]["val"], rel=1e-5)


def test_three_groups_train_as_three_processes_of_stock_ddp_do(runs: Runs) -> None:
    """To rounding: a sum of three has no order that all implementations share."""
    stock = runs["stock of 3"].result(0, "accumulate")
    ours = [runs["ours of 3"].result(rank, "accumulate") for rank in range(3)]
    assert ours[0]["digests"][-1] == ours[1]["digests"][-1] == ours[2]["digests"][-1]
    for key in ("lrs", "steps", "epoch", "stopped"):
        assert ours[0][key] == stock[key], key
    assert ours[0]["logged"] == pytest.approx(stock["logged"], rel=1e-3)


@pytest.mark.parametrize(
    "name", [*AS_STOCK, "nothing_on_one", "plateau_by_step", "differing_rate", "failing_saves"]
)
def test_replicas_are_equal_after_every_step(runs: Runs, name: str) -> None:
    mine, other = both(runs, name)
    at_step = dict(zip(mine["steps"], zip(mine["digests"], mine["lrs"], strict=True), strict=True))
    for step, seen in zip(
        other["steps"], zip(other["digests"], other["lrs"], strict=True), strict=True
    ):
        if name not in IN_WINDOWS:
            assert at_step[step] == seen
    assert mine["digests"][-1] == other["digests"][-1]
    assert len(other["steps"]) > len(mine["steps"]) // 2  # one that heals leaves out some
    assert mine["metrics"] == other["metrics"]


@pytest.mark.parametrize("name", RETRIED)
def test_a_discarded_step_leaves_no_trace(runs: Runs, name: str) -> None:
    """Not in parameters, counters, schedules, the loss scale, nor in what was logged, at any batch."""
    for rank in (0, 1):
        plain = runs["ours"].result(rank, name.partition(":")[0])
        retried = runs["ours"].result(rank, name)
        for key in ("digests", "lrs", "steps", "logged", "epoch", "stopped", "scale", "metrics"):
            assert retried.get(key) == plain.get(key), key


@pytest.mark.parametrize("name", [*AS_STOCK, *RETRIED])
def test_user_code_runs_once_a_batch(runs: Runs, name: str) -> None:
    """`training_step` and hooks, whether a step is discarded or not: as often as under `ddp`."""
    stock = runs["stock"].result(0, name.partition(":")[0])
    for ours in both(runs, name):
        assert ours["runs"] == stock["runs"]
        assert len(ours["runs"]) == len(ours["digests"])
        assert ours["hooks"] == stock["hooks"]


def test_two_optimizers_are_two_steps_a_batch(runs: Runs) -> None:
    for name in ("gan", "gan:retry"):
        assert runs["ours"].result(1, name)["steps"] == list(range(2, 4 * BATCHES + 1, 2))


def test_training_step_may_return_none_on_one_replica(runs: Runs) -> None:
    assert both(runs, "nothing_on_one")[0]["steps"] == list(range(1, 2 * BATCHES + 1))


def test_collectives_reach_as_far_as_documented(runs: Runs) -> None:
    for rank, seen in enumerate(both(runs, "scopes")):
        assert seen["gradient"] == [[3.0, 30.0], [300.0, 3000.0]][rank]
        assert seen["gathered"] == [[1.0, 2.0], [2.0, 2.0]]
        assert not seen["gradients flow"]  # as under `ddp`: not to the own row, either
        assert [seen[op] for op in ("mean", "sum", "max", "min")] == [
            [1.5, 2.0],
            [3.0, 4.0],
            [2.0, 2.0],
            [1.0, 2.0],
        ]
        assert seen["alone"] == [True, True, True]


def test_all_stop_at_the_same_step(runs: Runs) -> None:
    mine, other = both(runs, "stops")
    assert mine == other
    assert mine["step"][:2] == [4, 1]  # in `training_step` of the fourth batch: with its commit
    assert mine["batch end"][:2] == [5, 1]  # after it: with the next commit
    assert mine["follower"][:2] == [BATCHES, 1]  # not the leader's wish: asked at the epoch's end
    assert mine["local metric"][:2] == [BATCHES, 1]
    assert mine["clock"][0] <= 2
    assert mine["over before"] == [0, 0, []]


def test_validation_by_the_clock_is_at_the_same_steps(runs: Runs) -> None:
    mine, other = both(runs, "clocks")
    if mine["at"] is None:
        pytest.skip("this Lightning validates after a number of batches only")
    assert mine["at"] == other["at"]
    assert len(mine["at"]) >= 2


def test_saves_by_the_clock_are_at_the_same_steps(runs: Runs) -> None:
    mine, other = both(runs, "saves_by_the_clock")
    assert mine["at"] == other["at"]
    assert len(set(mine["at"])) >= 3  # none yet, and two that were saved
    assert mine["files"] == mine["at"][-1:]


def test_a_plateau_scheduler_on_local_metrics_follows_the_leader(runs: Runs) -> None:
    mine, other = both(runs, "plateau_by_step")
    assert mine["lrs"][-1] < 0.1
    assert mine["heals"] == other["heals"] == 0


def test_a_differing_learning_rate_is_never_trained_with(runs: Runs) -> None:
    mine, other = both(runs, "differing_rate")
    assert mine["healed"] and other["healed"]
    assert max(other["lrs"]) == 0.01


def test_a_timer_goes_on_from_the_time_of_its_peers(runs: Runs) -> None:
    """Not from that and its own: `max_time` would be over too early in a group that heals where it is."""
    for seen in both(runs, "differing_rate"):
        assert seen["healed"]
        assert seen["elapsed_s"] < 1000


def test_a_fit_leaves_nothing_behind(runs: Runs) -> None:
    for found in both(runs, "leftovers"):
        assert found == {"Net": [[], 0, []], "Failing": [[], 0, []]}


def test_what_cannot_work_is_said(runs: Runs) -> None:
    for said in both(runs, "refusals"):
        assert "LBFGS evaluates the loss several times" in said["lbfgs"]
        assert "finds a learning rate with one replica group only" in said["finder"]
    said = runs["ours"].result(0, "refusals")
    assert "LocalSGD and DiLoCo cannot find a learning rate" in said["outer"]
    assert "not supported with distributed strategies" in said["batch size"]  # Lightning's own


def test_a_failing_save_ends_nothing_and_costs_no_file(runs: Runs) -> None:
    mine, _ = both(runs, "failing_saves")
    assert mine["steps"][-1] == 2 * BATCHES
    assert mine["files"] == ["step=4.ckpt"]


def test_a_job_is_resumed_with_another_number_of_groups(runs: Runs) -> None:
    result = runs["ours"].result(0, "resume")
    assert result["epoch"] == 3
    assert result["steps"] == list(range(2 * BATCHES + 1, 4 * BATCHES + 1))  # one shard: all of it
    assert result["to"] > result["from"] > 2 * BATCHES
    assert result["batches"] > 4 * BATCHES


def test_a_resume_within_an_epoch_goes_on_with_the_samples_that_are_left(runs: Runs) -> None:
    """With another number of groups, and once more with the same."""
    mine, other = both(runs, "resume_within")
    if RequirementCache("lightning<2.6"):
        pytest.skip("Lightning 2.5 resumes past the epoch in which max_steps has ended a fit")
    parts = [*other["seen"], *mine["seen"]]
    assert [len(part) for part in parts] == [20, 20, 28, 28]
    assert len({sample for part in parts for sample in part}) == SAMPLES
    assert len(set(mine["next"])) == len(mine["next"]) == SAMPLES
    batches = SAMPLES // 4
    second, third = mine["runs"]
    assert second == [[0, number] for number in range(batches - 14, batches - 5)]
    assert third == [
        *([0, number] for number in range(batches - 7, batches)),
        *([1, number] for number in range(batches)),
    ]


def test_a_checkpoint_holds_the_managers_place(runs: Runs, tmp_path: Path) -> None:
    saved = torch.load(runs["ours"].log / "resume" / "last.ckpt", weights_only=False)
    assert saved["ft_lightning"]["step"] > saved["global_step"]
    assert saved["ft_lightning"]["batches_committed"] > 2 * BATCHES


@pytest.mark.parametrize("name", ["sharded:one", "sharded:two", "sharded:tiny", "replicated:one"])
def test_a_validation_gives_the_metrics_of_the_whole_set(runs: Runs, name: str) -> None:
    """Divided or not, with shares that are uneven or empty: as one process computes them."""
    mine, other = both(runs, name)
    validations = len(mine["truth"])
    assert mine["shown"] == other["shown"] and len(mine["shown"]) == validations == 2
    for shown, truth in zip(mine["shown"], mine["truth"], strict=True):
        # Not of the whole set, but of its own: what a hook logs apart from the batches.
        assert shown.pop("once a member") == (3.0 if "replicated" in name else 6.0)
        assert shown == pytest.approx(truth, rel=1e-5)
    for index, size in enumerate(LOADERS[name.partition(":")[2]]):
        batches = [(index, batch) for batch in range(-(-size // VAL_BATCH))]
        seen = [
            [tuple(place) for place in each["seen"] if place[0] == index] for each in (mine, other)
        ]
        if "replicated" in name:
            assert seen == [batches * validations] * 2
        else:
            assert sorted(seen[0] + seen[1]) == sorted(batches * validations)
            assert abs(len(seen[0]) - len(seen[1])) <= validations
    total = sum(-(-size // VAL_BATCH) for size in LOADERS[name.partition(":")[2]])
    assert mine["counted"] == other["counted"] == [[total, total]] * validations


def test_torchmetrics_objects_in_training_are_those_of_all_at_the_epochs_end(runs: Runs) -> None:
    mine, other = both(runs, "sharded:one")
    guesses, labels = zip(*mine["learnt"], *other["learnt"], strict=True)
    assert len(guesses) == SAMPLES
    expected = MulticlassAccuracy(3)(torch.tensor(guesses), torch.tensor(labels))
    assert mine["trained"] == other["trained"] == pytest.approx(float(expected))


def test_a_learning_rate_is_found_before_a_fit_of_one_group(runs: Runs) -> None:
    found, steps = both(runs, "around")[0]["found"]
    # The fit of Lightning 2.5.0 lacks the steps of the search.
    assert (found, steps) == (
        True,
        2 * BATCHES - (15 if RequirementCache("lightning==2.5.0") else 0),
    )


@pytest.mark.parametrize("kind", ["plain", "dataset", "unknown length", "loader"])
def test_streams_come_back_at_their_place_if_they_have_a_state(runs: Runs, kind: str) -> None:
    """An iterable dataset (or its loader) with `state_dict`; a plain one starts over, as is said."""
    mine, other = both(runs, f"stream:{kind}")
    assert (mine["heals"], other["heals"]) == (0, 1)
    assert mine["digests"][-1] == other["digests"][-1]
    right = [(step, (step - 1) % BATCHES) for step in range(1, 2 * BATCHES + 1)]
    assert [tuple(place) for place in mine["places"]] == right
    healed = [tuple(place) for place in other["places"]]
    before, after = healed[:CHANGED_AT], healed[CHANGED_AT:]
    assert before == right[:CHANGED_AT]
    step, batch = after[0]
    assert CHANGED_AT + 1 < step < BATCHES
    assert other["said"] == (kind == "plain")
    assert after == right[step - 1 :] if kind != "plain" else batch == 0


def test_streams_of_unknown_length_end_in_all_with_the_first(runs: Runs) -> None:
    mine, other = both(runs, "endless")
    assert mine["participants"] == other["participants"] == [2]
    batches = [[epoch, batch] for epoch in range(3) for batch in range(5)]
    assert mine["runs"] == other["runs"] == batches
    assert mine["digests"] == other["digests"]
    assert mine["metrics"]["val"] == other["metrics"]["val"]
    assert mine["epoch"] == other["epoch"] == 3


def test_a_stream_without_a_batch_ends_its_group_alone(runs: Runs) -> None:
    """It would come to the end of its fit at once, and its peers would hear that the training is over."""
    mine, other = both(runs, "endless:empty")
    assert (mine["runs"], other["said"]) == ([], "")
    assert mine["said"].startswith("the training data of rank 0 has no batch")
    assert other["runs"] == [[epoch, batch] for epoch in range(3) for batch in range(8)]


def test_one_speaks_and_nobody_writes_before_the_first_quorum(runs: Runs) -> None:
    """What is logged then the first leader writes, once. Also: a strategy can be copied in a fit, a Trainer
    pickled after it, and after one without a step group 0 writes."""
    first, second = both(runs, "around")
    assert (first["heard"], second["heard"]) == (1, 0)
    assert (first["saved"], second["saved"]) == (True, False)
    assert (first["writer"], second["writer"]) == (True, False)
    for seen in (first, second):
        assert not seen["wrote"] and seen["loggers"] and seen["manager"]
        assert seen["pickled"] == [BATCHES, True]
        assert seen["copied"] == [True, True]
    rows = (runs["ours"].log / "around" / "version_0" / "metrics.csv").read_text().splitlines()
    early = rows[0].split(",").index("early")
    assert [row.split(",")[early] for row in rows[1:]].count("1.0") == 1  # the first leader's, once
