"""Scripts that train more than once: a process that comes back trains nothing that is over."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_core.launch.restarts import OVER_EXIT_CODE
from lighthouse import LighthouseServer
from tests.ft_lightning.harness import ASKS, Run, running
from tests.harness import workers
from tests.harness.script import digest

pytestmark = pytest.mark.process
WORKER = Path(__file__).with_name("fits_worker.py")
ROOT = Path(__file__).resolve().parents[3]
KINDS = ("epochs", "trained")


def results(run: Run, name: int) -> list[dict[str, Any]]:
    """What each fit of a group has ended with, whichever of its lives."""
    return [{key: line[key] for key in line if key != "pid"} for line in run.lines(name, "fits")]


def killed_in_training(run: Run, name: int, place: str) -> None:
    """Both groups come to `place`, where that one is killed. It comes back, and both train to the end."""
    supervisor = run.start()
    for each in (0, 1):
        run.until_held(each, place)
    killed_and_asks_again(run, name, run.lines(name, "trained")[0]["pid"])
    run.go(place)
    run.wait(supervisor)


def killed_and_asks_again(run: Run, name: int, pid: int) -> None:
    """Group `name`, whose process is `pid`, until its next life asks for a quorum."""
    asked = run.events(name, *ASKS)
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.events(name, *ASKS) > asked, "the next life to ask for a quorum")


def group_1_is_killed_between_two_fits(run: Run) -> None:
    """A whole job with `holds=["after:1"]`: its next life passes over the first fit."""
    supervisor = run.start()
    for name in (0, 1):
        run.until_held(name, "after:1")
    os.kill(run.lines(1, "fits")[0]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.lines(1, "fits")) == 2, "the first fit to be passed over")
    run.go("after:1")
    run.wait(supervisor)


def test_killed_in_the_second_fit_it_does_not_train_the_first_with_its_peers(
    tmp_path: Path, lighthouse: str
) -> None:
    """Group 1 dies in the second fit. Its next life begins with the first one, which is over, and no
    checkpoint of its end may be used."""
    options: dict[str, Any] = {"strategy": {"timeout_s": 20, "resume": False}}
    with running(tmp_path, lighthouse, worker=WORKER, holds=["step:2:2"], **options) as run:
        first, second = run.start(0), run.start(1)
        run.until_held(0, "step:2:2")
        run.until_held(1, "step:2:2")
        os.kill(second.pid, signal.SIGKILL)
        run.wait(second, code=-signal.SIGKILL)
        back = run.start(1)
        run.wait(back, code=OVER_EXIT_CODE)
        assert "is at training 1 of its script, which is over for its peers" in run.output()
        trained = run.lines(1, "trained")
        run.go("step:2:2")
        run.wait(first)
    assert {line["pid"] for line in trained} == {second.pid}
    assert [line["fit"] for line in run.lines(0, "fits")] == [1, 2]
    assert [line["fit"] for line in run.lines(1, "fits")] == [1]
    assert run.lines(0, "fits")[0]["digest"] == run.lines(1, "fits")[0]["digest"]
    for line in run.lines(0, "trained") + trained:
        assert line["folds"] == [line["fit"]]


def test_a_group_whose_training_data_has_length_0_ends_with_a_sentence(
    tmp_path: Path, lighthouse: str
) -> None:
    """Before it joins. It came to the end of its fit in silence."""
    with running(tmp_path, lighthouse, worker=WORKER, has_data=False) as run:
        run.wait(run.start(0), code=1)
        assert "the training data of rank 0 has no batch, and each of the 2 ranks" in run.output()
    assert run.lines(0, "fits") == []


@pytest.mark.parametrize("anew", [False, True])
def test_a_fit_that_failed_and_is_called_again_is_the_same_training(
    tmp_path: Path, lighthouse: str, anew: bool
) -> None:
    """All groups fail, and train on. Then group 1 dies: its next life, with its first call, joins them.
    `anew`: the script makes a new Trainer for the same model, which begins at step 0."""
    options: dict[str, Any] = {"fails": ["0", "1"], "holds": ["step:1:6"], "anew": anew}
    with running(tmp_path, lighthouse, worker=WORKER, **options) as run:
        first, second = run.start(0), run.start(1)
        for name in (0, 1):
            run.until_held(name, "step:1:6")
        second.kill()
        run.wait(second, code=-signal.SIGKILL)
        back = run.start_again(1)
        run.go("step:1:6")
        run.wait(first, back)
    assert {line["fit"] for line in run.lines(1, "trained") if line["pid"] == back.pid} == {1, 2}
    assert results(run, 0) == results(run, 1)
    assert [line["fit"] for line in run.lines(1, "fits")] == [1, 2]


@pytest.mark.parametrize("anew", [False, True])
def test_a_group_whose_fit_failed_and_is_called_again_is_back_with_its_peers(
    tmp_path: Path, coordinator: LighthouseServer, anew: bool
) -> None:
    """The other one has not failed, and trains on."""
    options: dict[str, Any] = {"fails": ["1"], "holds": ["step:1:5"], "fits": 1, "anew": anew}
    with running(tmp_path, coordinator.address(), worker=WORKER, **options) as run:
        first, second = run.start(0), run.start(1)
        run.until_held(0, "step:1:5")
        run.until_waiting(coordinator, "1", or_member=True)
        run.go("step:1:5")
        run.wait(first, second)
    assert results(run, 0) == results(run, 1)


def test_groups_that_begin_with_weights_of_their_own_run_the_first_forward_with_the_first_ones(
    tmp_path: Path, lighthouse: str
) -> None:
    """As under `ddp`, which broadcasts them when it wraps the model; here they differ until the first batch."""
    with running(tmp_path, lighthouse, worker=WORKER, fits=1, unlike=True) as run:
        run.wait(run.start(0), run.start(1))
    mine, theirs = (run.lines(name, "starts")[0]["weights"] for name in (0, 1))
    assert mine != theirs
    used = [[line["weights"] for line in run.lines(name, "trained")] for name in (0, 1)]
    assert used[0][0] == mine
    assert used[0] == used[1]


@pytest.mark.parametrize("place", ["step:2:2", "after:1"])
def test_a_fit_that_is_over_is_passed_over_with_its_results(
    tmp_path: Path, lighthouse: str, place: str
) -> None:
    """Group 1 dies in the second fit, or between the two, where no peer trains. It is started again,
    by a loop, or by a launcher that counts; and takes part in the second fit."""
    with running(tmp_path, lighthouse, worker=WORKER, holds=[place]) as run:
        first, second = run.start(0), run.start(1)
        run.until_held(0, place)
        run.until_held(1, place)
        os.kill(second.pid, signal.SIGKILL)
        run.wait(second, code=-signal.SIGKILL)
        asked = run.events(1, *ASKS)
        counted = {"FT_RESTARTS": "1"} if place == "after:1" else {}
        back = run.start(1, **counted)
        run.until(lambda: len(run.lines(1, "fits")) == 2, "the first fit to be passed over")
        if place == "step:2:2":  # the other would train on without it
            run.until(lambda: run.events(1, *ASKS) > asked, "group 1 to join")
        run.go(place)
        run.wait(first, back)
        assert run.output().count("training 1 of the script is over; its state is that of ") == 1
        if place == "step:2:2":
            assert run.output().count("ft_lightning: group 1 is gone (") == 1
            assert run.output().count("ft_lightning: group 1 is back at step ") == 1
    ended = [results(run, name) for name in (0, 1)]
    assert ended[1] == [ended[0][0], *ended[0]]
    assert {line["fit"] for line in run.lines(1, "trained") if line["pid"] == back.pid} == {2}


@pytest.mark.parametrize("saves", [False, True])
def test_a_fit_that_saved_nothing_is_passed_over_under_a_supervisor(
    tmp_path: Path, saves: bool
) -> None:
    """Group 1 dies between two fits. Its next life has the results of the first one while the other
    is still between them, and trains the second one with it. `saves`: a validation at the end of the last
    epoch has saved, before the epoch was counted."""
    options: dict[str, Any] = {"devices": 2, "checkpoints": saves, "validates_each": 0.5}
    options["scores"] = [2.0, 1.0, 0.0] if saves else []
    with running(tmp_path, worker=WORKER, holds=["after:1"], **options) as run:
        group_1_is_killed_between_two_fits(run)
    mine, theirs = (results(run, name) for name in (0, 1))
    assert theirs == [mine[0], *mine]
    assert bool(list(tmp_path.rglob("*.ckpt"))) == saves


NO_FOLDER = """
import os, shutil, sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = Trainer(strategy="ft_ddp", accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=2, logger=False,
                  limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
model = BoringModel()
for epochs in (1, 2):
    trainer.fit_loop.max_epochs = epochs
    trainer.fit(model)
    shutil.rmtree(os.environ["FT_LIGHTNING_ENDS"], ignore_errors=True)
"""


PREPARES = """
import time
from datetime import timedelta
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ft_lightning import FTDDPStrategy

class Model(BoringModel):
    def prepare_data(self):
        time.sleep(epochs)  # the second time longer than the ranks wait for each other elsewhere

strategy = FTDDPStrategy(group_size=2, timeout=timedelta(seconds=1))
trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=1, logger=False,
                  limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = Model()
for epochs in (0, 2):
    trainer.fit_loop.max_epochs = epochs or 1
    trainer.fit(model)
"""


def test_ranks_wait_for_the_data_of_a_later_fit_as_for_the_firsts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PREPARES)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    done = workers.run("lightning", [str(script)], env={**env, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]


def test_where_the_supervisors_folder_was_removed_fits_end_well(tmp_path: Path) -> None:
    """As what cleans /tmp does in a long training. All had ended with the error, at the end of the fit."""
    script = tmp_path / "train.py"
    script.write_text(NO_FOLDER)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    done = workers.run(
        "lightning", [str(script), str(tmp_path)], env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the end of the fit could not be kept" in done.stderr
    assert "of an earlier fit could not be kept" in done.stderr


def test_a_fit_whose_end_replaces_the_weights_is_passed_over_with_these(tmp_path: Path) -> None:
    """Stochastic weight averaging puts the averages into the model in `on_train_end`, after the last checkpoint."""
    options: dict[str, Any] = {"devices": 2, "epochs": 3, "averages": True}
    with running(tmp_path, worker=WORKER, holds=["after:1"], **options) as run:
        group_1_is_killed_between_two_fits(run)
    mine, theirs = (results(run, name) for name in (0, 1))
    assert theirs == [mine[0], *mine]


def test_a_fit_that_was_passed_over_leaves_no_step_behind_for_the_next_one(tmp_path: Path) -> None:
    """One Trainer, which trains on: nobody lacks a state. The one that had loaded the end of the first fit was ahead, by
    the steps that were agreements, and the others' first batch did not count."""
    options: dict[str, Any] = {"devices": 2, "again": True}
    with running(tmp_path, worker=WORKER, holds=["after:1"], **options) as run:
        group_1_is_killed_between_two_fits(run)
        assert [run.events(name, "heal_start") for name in (0, 1)] == [0, 0]
    mine, theirs = (results(run, name) for name in (0, 1))
    assert theirs == [mine[0], *mine]


@pytest.mark.parametrize("dies", [False, True])
def test_all_save_to_the_folder_of_the_one_that_has_validated_before_the_fit(
    tmp_path: Path, lighthouse: str, dies: bool
) -> None:
    """Which has opened its logger, so that the others find its folder taken, and a callback keeps the folder that it
    had then. They looked for the best checkpoint elsewhere. `dies`: in the second fit; its next life validates, too."""
    options: dict[str, Any] = {
        "validates_first": True,
        "tests": True,
        "scores": [4.0, 3.0, 2.0, 1.0],
    }
    options |= {"again": True, "holds": ["before", "step:2:10"]}
    with running(tmp_path, lighthouse, worker=WORKER, **options) as run:
        first = run.start(0)
        run.until_held(0, "before")
        second = run.start(1)
        run.until_held(1, "before")
        run.go("before")
        for name in (0, 1):
            run.until_held(name, "step:2:10")
        if dies:
            second.kill()
            run.wait(second, code=-signal.SIGKILL)
            second = run.start_again(1)
        run.go("step:2:10")
        run.wait(first, second)
    mine, theirs = (results(run, name) for name in (0, 1))
    assert theirs == ([mine[0], *mine] if dies else mine)
    assert [path.name for path in tmp_path.glob("lightning_logs/*/checkpoints")] == ["checkpoints"]


KEEPS: dict[str, dict[str, Any]] = {
    "the newest": {},
    "the best": {"scores": [2.0, 3.0, 1.0, 4.0]},
    "the last one": {"save_last": True},
}


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_fit_is_passed_over_whose_checkpoint_a_later_one_has_removed(
    tmp_path: Path, keeps: str
) -> None:
    """One Trainer, which trains on: its second fit keeps its newest checkpoint only (Lightning's default), or
    its best, which it has removed then, or has written another last.ckpt. Group 1 dies after that, in the second
    fit."""
    options: dict[str, Any] = {"devices": 2, "again": True, "tests": True, **KEEPS[keeps]}
    with running(tmp_path, worker=WORKER, holds=["step:2:13"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "step:2:13")
        left = {path.name for path in tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt")}
        assert left - {"last.ckpt"} == {"epoch=2-step=12.ckpt"}
        killed_and_asks_again(run, 1, run.lines(1, "fits")[0]["pid"])
        run.go("step:2:13")
        run.wait(supervisor)
    mine, theirs = (results(run, name) for name in (0, 1))
    assert [line["step"] for line in mine] == [8, 16]
    for line in (*mine, *theirs):
        line.pop("best")  # the file has moved
    assert theirs == [mine[0], *mine]


@pytest.mark.parametrize("saves_each", [0, 4])
def test_one_that_comes_back_when_its_peer_needs_it_to_end_the_fit(
    tmp_path: Path, saves_each: int
) -> None:
    """Its peer has saved the last step, which leaves nothing to train, and is at the end of the epoch, or in the
    validation before it (`saves_each`), which takes both of them (`min_replicas`). The process began with that
    checkpoint, trained nothing and was done, and its peer waited for ever."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "saves_each": saves_each}
    options["strategy"] = {"timeout_s": 20, "min_replicas": 2}
    with running(tmp_path, worker=WORKER, holds=["dump:1:8", "life:2"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "dump:1:8")
        os.kill(run.lines(1, "trained")[0]["pid"], signal.SIGKILL)
        run.go("dump:1:8")
        run.until_held(1, "life:2")
        saved = "lightning_logs/*/checkpoints/epoch=1-step=8.ckpt"
        run.until(lambda: any(tmp_path.glob(saved)), "the last step to be saved")
        run.go("life:2")
        run.wait(supervisor)
    assert [line["step"] for line in results(run, 0)] == [8]


@pytest.mark.parametrize(
    ("checkpoints", "counts"),
    [(True, ""), (False, ""), (True, "data"), (False, "data"), (True, "model"), (False, "model")],
)
def test_loaders_that_are_reloaded_in_each_epoch_are_its_peers(
    tmp_path: Path, checkpoints: bool, counts: str
) -> None:
    """The third epoch has more batches than those before, in one of which a group that comes back begins. `counts`:
    how many follows from the state of the data module or the module, which asking for loaders changes."""
    options: dict[str, Any] = {"devices": 2, "fits": 1, "epochs": 4, "grows": 1, "counts": counts}
    with running(
        tmp_path, worker=WORKER, holds=["step:1:4"], checkpoints=checkpoints, **options
    ) as run:
        killed_in_training(run, 1, "step:1:4")
    mine, theirs = (results(run, name) for name in (0, 1))
    assert [line["step"] for line in mine] == [1 + 2 + 3 + 4]
    assert theirs == mine
    trained = [line["step"] for line in run.lines(1, "trained")]
    assert trained == [*range(4), *range(5, 10)]


def test_a_validation_has_the_loaders_that_its_peers_have_asked_for(tmp_path: Path) -> None:
    """In the fourth epoch they are those of the third, and the next life of a group begins in the fourth."""
    options: dict[str, Any] = {"devices": 2, "fits": 1, "epochs": 4, "grows": 2}
    with running(tmp_path, worker=WORKER, holds=["step:1:6"], **options) as run:
        killed_in_training(run, 1, "step:1:6")
    mine, theirs = (
        {(line["epoch"], line["fold"]) for line in run.lines(name, "validated")} for name in (0, 1)
    )
    assert mine == theirs == {(0, -1), (1, -1), (2, -3), (3, -3)}
    assert results(run, 0) == results(run, 1)


def test_random_numbers_are_those_without_faults(tmp_path: Path) -> None:
    """Dropout, and orders that a sampler draws from torch's generator: in the epoch under way, and in later ones."""
    options: dict[str, Any] = {"devices": 2, "fits": 1, "epochs": 3, "draws": True}
    options["strategy"] = {"timeout_s": 20, "min_replicas": 2}
    with running(tmp_path / "whole", worker=WORKER, **options) as whole:
        whole.wait(whole.start())
    with running(tmp_path / "killed", worker=WORKER, holds=["step:1:6"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "step:1:6")
        os.kill(run.lines(1, "trained")[0]["pid"], signal.SIGKILL)
        run.go("step:1:6")
        run.wait(supervisor)
    ends = [results(each, name)[-1]["digest"] for each in (whole, run) for name in (0, 1)]
    assert len(set(ends)) == 1
    assert len({line["pid"] for line in run.lines(1, "trained")}) == 2


def test_random_numbers_behind_a_fit_that_is_passed_over_are_those_without_faults(
    tmp_path: Path,
) -> None:
    """The second fit's dropout, and its orders: the groups would read some samples twice, and others not at all."""
    options: dict[str, Any] = {"devices": 2, "draws": True, "again": True}
    options["strategy"] = {"timeout_s": 20, "min_replicas": 2}
    with running(tmp_path / "whole", worker=WORKER, **options) as whole:
        whole.wait(whole.start())
    with running(tmp_path / "killed", worker=WORKER, holds=["after:1"], **options) as run:
        group_1_is_killed_between_two_fits(run)
    ends = [results(each, name)[-1]["digest"] for each in (whole, run) for name in (0, 1)]
    assert len(set(ends)) == 1


def test_the_leader_dies_before_it_has_recorded_the_end_of_a_fit(tmp_path: Path) -> None:
    """A fit that stopped early: no counter says that it is over. The other, which is at its end, too, records
    it; and both train the next one."""
    options: dict[str, Any] = {"devices": 2, "stops": True}
    with running(tmp_path, worker=WORKER, holds=["end:1", "after:1"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "end:1")
        leader = 0 if run.lines(0, "ends")[0]["leader"] else 1
        os.kill(run.lines(leader, "ends")[0]["pid"], signal.SIGKILL)
        run.go("end:1")
        run.until_held(1 - leader, "after:1")
        run.until(lambda: len(run.lines(leader, "fits")) == 1, "the fit to be passed over")
        run.go("after:1")
        run.wait(supervisor)
    mine, theirs = (results(run, name) for name in (1 - leader, leader))
    assert [line["step"] for line in mine] == [4, 4]
    assert theirs == mine


def test_one_that_can_not_pass_over_a_fit_ends_while_its_peers_are_between_two(
    tmp_path: Path,
) -> None:
    """They are in no training that the lighthouse knows, and it waits for none of them."""
    options: dict[str, Any] = {"devices": 2, "strategy": {"timeout_s": 20, "resume": False}}
    with running(tmp_path, worker=WORKER, holds=["after:1"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "after:1")
        os.kill(run.lines(1, "fits")[0]["pid"], signal.SIGKILL)
        run.until(lambda: "which is over for its peers" in run.output(), "group 1 to end")
        run.go("after:1")
        run.wait(supervisor)
        told = [line for line in run.output().splitlines() if "replica group 1" in line]
    assert len(told) == 2 and "was killed by SIGKILL" in told[0], told
    assert told[1].startswith("ft_lightning: replica group 1: this process is at training 1 of its")
    assert [line["fit"] for line in run.lines(0, "fits")] == [1, 2]
    assert [line["fit"] for line in run.lines(1, "fits")] == [1]


@pytest.mark.parametrize("place", ["step:1:7", "save:8"])
def test_one_that_comes_back_just_when_a_fit_ends_passes_over_it(
    tmp_path: Path, place: str
) -> None:
    """Group 1 dies, and asks for a quorum again when the other is at its last step, or behind it."""
    with running(tmp_path, worker=WORKER, holds=[place], devices=2) as run:
        supervisor = run.start()
        run.until(lambda: any(run._is_held(name, place) for name in (0, 1)), "the end of the fit")
        holds = 0 if run._is_held(0, place) else 1
        killed = 1 - holds
        killed_and_asks_again(run, killed, run.lines(killed, "trained")[0]["pid"])
        run.go(place)
        run.wait(supervisor)
    mine, theirs = (results(run, name) for name in (holds, killed))
    assert [line["fit"] for line in mine] == [1, 2]
    assert theirs == mine


def test_one_that_comes_back_when_the_process_that_has_ended_the_fit_is_dead_too(
    tmp_path: Path,
) -> None:
    """Group 1 is about to join in the first fit, which the other has ended. That one has died since, so that
    neither the board nor the lighthouse knows: the record does."""
    holds = ["step:1:7", "life:2", "begin:1:3", "after:1"]
    with running(tmp_path, worker=WORKER, holds=holds, devices=2) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "step:1:7")
        os.kill(run.lines(1, "trained")[0]["pid"], signal.SIGKILL)
        run.until_held(1, "life:2")
        os.kill(int((tmp_path / "1.started").read_text().split()[-1]), signal.SIGKILL)
        run.until_held(1, "begin:1:3")
        run.go("step:1:7")
        run.until_held(0, "after:1")
        os.kill(run.lines(0, "fits")[0]["pid"], signal.SIGKILL)
        run.until_held(0, "life:2")
        asked = run.events(1, *ASKS)
        run.go("begin:1:3")
        run.until_held(1, "after:1")
        assert run.events(1, *ASKS) == asked, "it would have waited for the connect timeout"
        run.go("life:2")
        run.go("after:1")
        run.wait(supervisor)
    mine, theirs = (results(run, name) for name in (0, 1))
    assert mine == [theirs[0], *theirs]
    assert [line["fit"] for line in theirs] == [1, 2]


def test_it_comes_back_by_its_checkpoint_where_a_callback_has_replaced_the_scheduler(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Stochastic weight averaging: a fit that is resumed has no scheduler until its first epoch starts. Its
    peers, which have begun with one, take it."""
    options: dict[str, Any] = {"fits": 1, "epochs": 3, "averages": True, "ckpt_path": "last"}
    address = coordinator.address()
    with running(tmp_path, address, worker=WORKER, holds=["step:1:6"], **options) as run:
        first, second = run.start(0), run.start(1)
        run.until_held(0, "step:1:6")
        run.until_held(1, "step:1:6")
        os.kill(second.pid, signal.SIGKILL)
        run.wait(second, code=-signal.SIGKILL)
        run.until_gone(coordinator, "1")
        back = run.start(1)
        run.until_waiting(coordinator, "1", or_member=True)
        run.go("step:1:6")
        run.wait(first, back)
    (mine,), (theirs,) = run.lines(0, "fits"), run.lines(1, "fits")
    assert mine["digest"] == theirs["digest"]
    assert [line["step"] for line in run.lines(1, "trained") if line["pid"] == back.pid][-1] == 11


def test_the_start_of_an_epoch_is_told_in_one_that_comes_back_by_a_checkpoint_from_within_it(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Lightning leaves that hook out in a fit that is resumed within an epoch. What callbacks set up there was missing
    at the epoch's end: stochastic weight averaging had no scheduler, and the next epoch began with another rate."""
    options: dict[str, Any] = {"fits": 1, "epochs": 4, "averages": True, "validates_each": 0.5}
    with running(
        tmp_path, coordinator.address(), worker=WORKER, holds=["step:1:10"], **options
    ) as run:
        first, second = run.start(0), run.start(1)
        for name in (0, 1):
            run.until_held(name, "step:1:10")
        second.kill()
        run.wait(second, code=-signal.SIGKILL)
        run.until_gone(coordinator, "1")
        back = run.start(1, FT_RESTARTS="1")
        run.until_waiting(coordinator, "1", or_member=True)
        run.go("step:1:10")
        run.wait(first, back)
    lines = {kind: [x for x in run.lines(1, kind) if x["pid"] == back.pid] for kind in KINDS}
    assert [line["epoch"] for line in lines["epochs"]] == [2, 3]
    assert [line["step"] for line in lines["trained"]] == [11, 12, 13, 14, 15]
    assert results(run, 0) == results(run, 1)


def test_weights_are_averaged_alike_in_one_that_comes_back_by_an_older_checkpoint(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Stochastic weight averaging: the process has begun with the average of its checkpoint when it takes
    its peer's, of one more epoch."""
    options: dict[str, Any] = {"fits": 1, "epochs": 4, "averages": True, "ckpt_path": "last"}
    options["holds"] = ["step:1:6", "begin:1:2", "step:1:10"]
    with running(tmp_path, coordinator.address(), worker=WORKER, **options) as run:
        first, second = run.start(0), run.start(1)
        run.until_held(0, "step:1:6")
        run.until_held(1, "step:1:6")
        os.kill(second.pid, signal.SIGKILL)
        run.wait(second, code=-signal.SIGKILL)
        back = run.start(1)
        run.until_held(1, "begin:1:2")
        run.go("step:1:6")
        run.until_held(0, "step:1:10")
        run.go("begin:1:2")
        run.until_waiting(coordinator, "1", or_member=True)
        run.go("step:1:10")
        run.wait(first, back)
    (mine,), (theirs,) = run.lines(0, "fits"), run.lines(1, "fits")
    assert mine["digest"] == theirs["digest"]
    trained = [line["step"] for line in run.lines(1, "trained") if line["pid"] == back.pid]
    assert 10 < trained[0] < 14, "it has averaged with its peer's number"


def test_a_leader_dies_in_its_last_save_and_the_next_one_saves_again(
    tmp_path: Path, lighthouse: str
) -> None:
    """No step follows. The older file goes, and the file that the dead one was writing, too."""
    options: dict[str, Any] = {"fits": 1, "epochs": 2}
    with running(tmp_path, lighthouse, worker=WORKER, holds=["save:8"], **options) as run:
        first, second = run.start(0), run.start(1)
        run.until(lambda: any(run._is_held(name, "save:8") for name in (0, 1)), "the last save")
        leader = 0 if run._is_held(0, "save:8") else 1
        folder = next(tmp_path.glob("lightning_logs/version_*/checkpoints"))
        assert [path.name for path in folder.glob("*.ckpt")] == ["epoch=0-step=4.ckpt"]
        assert len(list(folder.glob(".*.part"))) == 1
        killed, other = (first, second) if leader == 0 else (second, first)
        os.kill(killed.pid, signal.SIGKILL)
        run.wait(killed, code=-signal.SIGKILL)
        run.until_held(1 - leader, "save:8")
        run.go("save:8")
        run.wait(other)
        assert [path.name for path in folder.iterdir()] == ["epoch=1-step=8.ckpt"]
        checkpoint = torch.load(folder / "epoch=1-step=8.ckpt", weights_only=False)
        (done,) = run.lines(1 - leader, "fits")
        state = {
            f"net.{name}": checkpoint["state_dict"][f"net.{name}"] for name in ("weight", "bias")
        }
        assert digest(state) == done["digest"]


def test_a_leader_dies_in_a_save_of_one_of_two_callbacks(tmp_path: Path, lighthouse: str) -> None:
    """The second one adds to the dict of its best checkpoints, which the first one's checkpoint holds: the file was
    taken for one whose weights had been changed, and was missing."""
    options: dict[str, Any] = {"fits": 1, "scores": [0.5, 0.4], "keeps_all": True}
    with running(tmp_path, lighthouse, worker=WORKER, holds=["save:8"], **options) as run:
        groups = [run.start(0), run.start(1)]
        run.until(lambda: any(run._is_held(name, "save:8") for name in (0, 1)), "the last saves")
        leader = 0 if run._is_held(0, "save:8") else 1
        os.kill(groups[leader].pid, signal.SIGKILL)
        run.wait(groups[leader], code=-signal.SIGKILL)
        run.until_held(1 - leader, "save:8")
        run.go("save:8")
        run.wait(groups[1 - leader])
    (folder,) = tmp_path.glob("lightning_logs/version_*/checkpoints")
    names = {"epoch=1-step=8.ckpt", "all-epoch=0.ckpt", "all-epoch=1.ckpt"}
    assert {path.name for path in folder.iterdir()} == names
    first = torch.load(folder / "epoch=1-step=8.ckpt", weights_only=False)["callbacks"]
    best = [name for each in first.values() for name in each["best_k_models"] if "all" in name]
    assert [Path(name).name for name in best] == ["all-epoch=0.ckpt"], "as the leader would have"


def test_the_leader_dies_after_the_fit_and_what_it_logged_stays(tmp_path: Path) -> None:
    """Under a supervisor, before a validation that follows the fit: its next life passes over the fit. One
    of the two that are left logs the validation, behind the rows of the fit."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "validates": True}
    with running(tmp_path, worker=WORKER, holds=["after:1"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "after:1")
        (rows,) = [path.read_text() for path in tmp_path.glob("lightning_logs/*/metrics.csv")]
        assert len(rows.splitlines()) == 3  # a header, and each epoch's validation
        os.kill(run.lines(0, "fits")[0]["pid"], signal.SIGKILL)
        run.until(lambda: len(run.lines(0, "fits")) == 2, "the fit to be passed over")
        run.go("after:1")
        run.wait(supervisor)
        assert "will be deleted" not in run.output()
    (after,) = [path.read_text() for path in tmp_path.glob("lightning_logs/*/metrics.csv")]
    assert after.startswith(rows) and len(after.splitlines()) == 4


@pytest.mark.parametrize("ahead", ["the leader", "the other"])
def test_rows_of_evaluations_after_a_fit_are_logged_once(tmp_path: Path, ahead: str) -> None:
    """The leader dies in the test, and the other is in the validation before it. Or the leader is in the
    validation, and the other may be at its end, where it waits. Its row of the validation had been logged twice,
    or by none."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "validates": True, "tests": True}
    places = ["after:1", "validate:1", "test:1"]
    with running(tmp_path, worker=WORKER, holds=[*places, "life:2"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "after:1")
        leader = 0 if run.lines(0, "ends")[0]["leader"] else 1
        first = leader if ahead == "the leader" else 1 - leader
        pids = [run.lines(name, "fits")[0]["pid"] for name in (0, 1)]
        os.kill(pids[1 - first], signal.SIGSTOP)
        for place in places[:2]:
            run.go(place)
        if first == leader:
            run.until_held(first, "test:1")
        else:
            run.until_held(first, "validate:1")
        (tmp_path / "go.validate:1").unlink()
        os.kill(pids[1 - first], signal.SIGCONT)
        run.until_held(1 - first, "validate:1")
        os.kill(pids[leader], signal.SIGKILL)
        run.until(lambda: "was killed by SIGKILL" in run.output(), "the supervisor to see it")
        for place in ("validate:1", "test:1"):
            run.go(place)
        run.wait(supervisor)
    with next(tmp_path.glob("lightning_logs/*/metrics.csv")).open() as file:
        rows = [(row["step"], name) for row in csv.DictReader(file) for name in row if row[name]]
    logged = [each for each in rows if each[1] not in ("step", "epoch")]
    assert logged == [("3", "val_loss"), ("7", "val_loss"), ("8", "val_loss"), ("8", "test_loss")]


def test_the_leader_dies_in_the_last_evaluation_and_the_other_is_at_its_end(tmp_path: Path) -> None:
    """It logs the row, and writes what the script saves then. It had ended before it knew of the death."""
    options: dict[str, Any] = {
        "fits": 1,
        "devices": 2,
        "tests": True,
        "holds": ["test:1", "life:2"],
    }
    with running(tmp_path, worker=WORKER, **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "test:1")
        leader = 0 if run.lines(0, "ends")[0]["leader"] else 1
        pid = run.lines(leader, "fits")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        run.go("test:1")
        run.until(lambda: run.lines(1 - leader, "tested"), "the other to be at the end of the test")
        assert not run.lines(1 - leader, "tests")
        os.kill(pid, signal.SIGKILL)
        run.until(lambda: "was killed by SIGKILL" in run.output(), "the supervisor to see it")
        run.wait(supervisor)
        assert "missing" not in run.output()
    (rows,) = [path.read_text() for path in tmp_path.glob("lightning_logs/*/metrics.csv")]
    assert rows.splitlines()[0].count("test_loss") == 1
    (done,) = run.lines(1 - leader, "tests")
    assert done["leader"]


def test_the_first_one_dies_in_an_evaluation_before_any_fit_and_logs_it_when_it_is_back(
    tmp_path: Path,
) -> None:
    """Also where the script has no fit. No process wrote, and the exit code was 0."""
    options: dict[str, Any] = {"fits": 0, "devices": 2, "validates_first": True}
    with running(tmp_path, worker=WORKER, holds=["validate:1", "life:2"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "validate:1")
        os.kill(run.lives(0)[0], signal.SIGKILL)
        run.go("life:2")
        run.until(lambda: len(run.lives(0)) == 2, "its next life")
        run.go("validate:1")
        run.wait(supervisor)
    (rows,) = [path.read_text() for path in tmp_path.glob("lightning_logs/*/metrics.csv")]
    assert rows.splitlines()[0].count("val_loss") == 1 and len(rows.splitlines()) == 2


def test_the_leader_dies_in_a_hook_of_an_evaluations_end(tmp_path: Path) -> None:
    """As a `BasePredictionWriter` that writes on epoch end. The other had been through that hook, and wrote nothing
    there: what the leader had not written was missing, and the exit code was 0."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "tests": True}
    with running(tmp_path, worker=WORKER, holds=["test_end:1", "life:2"], **options) as run:
        supervisor = run.start()
        run.until(lambda: any(run._is_held(name, "test_end:1") for name in (0, 1)), "the hook")
        leader = 0 if run._is_held(0, "test_end:1") else 1
        run.until(lambda: run.lines(1 - leader, "tested"), "the other to be at the end of the test")
        os.kill(run.lines(leader, "fits")[0]["pid"], signal.SIGKILL)
        run.until_held(1 - leader, "test_end:1")
        run.go("test_end:1")
        run.wait(supervisor)
        assert "missing" not in run.output()
    assert not run.lines(leader, "summaries")
    assert len(run.lines(1 - leader, "summaries")) == 1


@pytest.mark.parametrize("all_of_them", [True, False])
def test_the_last_step_of_those_that_are_told_to_end_is_logged_once(
    tmp_path: Path, all_of_them: bool
) -> None:
    """SIGTERM in a step, to all processes (the row of that step was logged by none), or to the leader."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "logs": True, "told": all_of_them}
    with running(tmp_path, worker=WORKER, holds=["step:1:5", "life:2"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "step:1:5")
        if all_of_them:
            supervisor.terminate()
        else:
            os.kill(run.lines(0, "trained")[0]["pid"], signal.SIGTERM)
        run.go("step:1:5")
        run.wait(supervisor, code=128 + signal.SIGTERM if all_of_them else 0)
    with next(tmp_path.glob("lightning_logs/*/metrics.csv")).open() as file:
        logged = [row["step"] for row in csv.DictReader(file) if row["loss"]]
    assert logged == [str(step) for step in range(6 if all_of_them else 8)]


def test_one_that_is_told_to_end_alone_has_not_finished_and_comes_back(tmp_path: Path) -> None:
    """Its exit code said that it had trained to the end: the other waited for it without an end."""
    options: dict[str, Any] = {"fits": 1, "devices": 2}
    options["strategy"] = {"timeout_s": 20, "min_replicas": 2}
    with running(tmp_path, worker=WORKER, holds=["step:1:5"], **options) as run:
        supervisor = run.start()
        for name in (0, 1):
            run.until_held(name, "step:1:5")
        os.kill(run.lines(1, "trained")[0]["pid"], signal.SIGTERM)
        run.go("step:1:5")
        run.wait(supervisor)
        assert f"failed with exit code {128 + signal.SIGTERM}; it is started again" in run.output()
    assert results(run, 0) == results(run, 1)
    assert len(results(run, 1)) == 1


def test_the_leader_dies_in_the_scripts_own_save_after_the_fit(tmp_path: Path) -> None:
    """Which the other has passed: it writes that file when it writes on, after the fit. No older one: the
    leader had met it since."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "saves": True, "validates": True}
    with running(tmp_path, worker=WORKER, holds=["final", "after:1", "life:2"], **options) as run:
        supervisor = run.start()
        run.until(lambda: any(run._is_held(name, "final") for name in (0, 1)), "the save")
        leader = 0 if run._is_held(0, "final") else 1
        run.until_held(1 - leader, "after:1")
        assert not (tmp_path / "final.ckpt").exists()
        (before,) = tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt")
        written = before.stat()
        os.kill(run.lines(leader, "fits")[0]["pid"], signal.SIGKILL)
        run.until(lambda: "was killed by SIGKILL" in run.output(), "the supervisor to see it")
        run.go("final")
        run.go("after:1")
        run.wait(supervisor)
        (done,) = run.lines(1 - leader, "fits")
    assert before.stat().st_ino == written.st_ino
    checkpoint = torch.load(tmp_path / "final.ckpt", weights_only=False)
    state = {f"net.{name}": checkpoint["state_dict"][f"net.{name}"] for name in ("weight", "bias")}
    assert digest(state) == done["digest"]


def test_the_leader_dies_when_python_shuts_down_and_nothing_is_missing(tmp_path: Path) -> None:
    """Its script had written all, and the launcher said that something is missing, and failed."""
    options: dict[str, Any] = {"fits": 1, "devices": 2, "saves": True}
    with running(tmp_path, worker=WORKER, holds=["final", "exit", "life:2"], **options) as run:
        supervisor = run.start()
        run.until(lambda: any(run._is_held(name, "final") for name in (0, 1)), "the save")
        leader = 0 if run._is_held(0, "final") else 1
        run.go("final")
        run.until_held(leader, "exit")
        os.kill(run.lines(leader, "fits")[0]["pid"], signal.SIGKILL)
        run.until(lambda: "was killed by SIGKILL" in run.output(), "the supervisor to see it")
        run.go("exit")
        run.wait(supervisor)
    assert (tmp_path / "final.ckpt").exists()
    assert "missing" not in run.output()


EVICTED = """
import sys
from pathlib import Path
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import TorchCheckpointIO
import ft_lightning
from lighthouse.wire.messages import Expelled

class Files(TorchCheckpointIO):
    def __init__(self, model):
        self.model = model

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        self.model.wrote(path)

class Model(BoringModel):
    def __init__(self, before, within):
        super().__init__()
        self.before, self.within = before, within
        self.evict_within = True

    def evict(self):
        control = self.trainer.strategy.manager._session.control
        view = control.status.view
        control.submit(Expelled(control._replica._template.job, view.quorum_id, "evicted", hung=True))
        assert self.trainer.strategy.manager.evicted()

    def wrote(self, path):
        if self.evict_within and ".within" in str(path):
            self.evict_within = False
            self.evict()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.within)
            assert not self.within.exists(), "it does not lead any more"
            self.expected = self.values()
        if batch_idx == 3:
            assert self.within.exists(), "an outer step has followed"
            self.evict()
            self.trainer.save_checkpoint(self.before)
            assert not self.before.exists(), "it does not lead"
            self.expected += self.values()

    def values(self):
        state = self.trainer.strategy.lightning_module_state_dict()
        return [{name: value.clone() for name, value in state.items()}]

kinds = {
    "ft_ddp": "ft_ddp",
    "group": ft_lightning.FTDDPStrategy(commit="group"),
    "ft_diloco": ft_lightning.FTDiLoCoStrategy(sync_every=3),
    "ft_local_sgd": ft_lightning.FTLocalSGDStrategy(sync_every=3),
}
for name, strategy in kinds.items():
    files = [Path(sys.argv[1]) / f"{name}.{when}" for when in ("within", "before")]
    model = Model(files[1], files[0])
    Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=6, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            plugins=[Files(model)]).fit(model)
    for path, steps, expected in zip(files, (2, 4), model.expected, strict=True):
        found = torch.load(path, weights_only=False)
        assert found["global_step"] == steps, name
        assert found["ft_lightning"]["step"] == (steps if "_" not in name or name == "ft_ddp" else steps // 3)
        assert all(torch.equal(found["state_dict"][key], expected[key]) for key in expected), name
    assert len(list(Path(sys.argv[1]).glob(f"*{name}.*"))) == 2, "no draft is left"
"""


def test_a_leader_that_was_evicted_for_nothing_saves_when_it_leads_again(tmp_path: Path) -> None:
    """Before it saves, or while it does; under each strategy of one process a group. No other group has
    taken over: nothing that it was to write is lost."""
    (tmp_path / "train.py").write_text(EVICTED)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    env |= {"PYTHONPATH": str(ROOT), "FT_JOB_ID": str(tmp_path)}
    done = workers.run("lightning", ["train.py", str(tmp_path)], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
