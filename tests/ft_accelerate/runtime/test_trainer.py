"""transformers' Trainer and TRL's SFTTrainer, untouched, under `ft-accelerate launch`.

The oracle is the same script on torch's DistributedDataParallel. With `min_replicas` at the number
of replica groups no step is trained without one of them, so that a training with faults must end
with the same bits as one without.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from tests.ft_accelerate.installed import installed
from tests.harness.script import digest
from tests.harness.trackers import (
    in_mlflow,
    in_tensorboard,
    in_wandb,
    installed_trackers,
    make_mlflow,
)
from tests.harness.waiting import PATIENCE_S
from tests.harness.workers import start

VERSION = Version(pytest.importorskip("transformers").__version__)
load_file = pytest.importorskip("safetensors.torch").load_file

HERE = Path(__file__).parent
TRAINER = HERE / "trainer_script.py"
SFT = HERE / "sft_script.py"
CONFIG = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}
OURS_ALONE = ("training_loss", "logs", "world", "torn", "seen")
"""Of a report: what differs between the processes of plain DDP, too, or knows of the faults."""
SFT_ROW = ("step", "num_tokens", "entropy", "mean_token_accuracy")
"""Of a row of TRL's SFTTrainer: what it counts by itself."""

BEST = ("--patience", "1000")
"""The best model is saved (with each epoch's evaluation), the best two are kept, and the best one is
loaded at the end."""

BEST_PATH = "" if Version("5.4") > VERSION else "checkpoint-21"
"""The name of the best one, which Trainer's state did not say before."""

Report = dict[str, Any]
pytestmark = pytest.mark.process
enters_the_loop = pytest.mark.skipif(
    Version("5.3") > VERSION,
    reason="its Trainer runs through its past: its peers may end before it is there",
)
resumes = pytest.mark.skipif(
    Version("5.18") > VERSION, reason="its Trainer cannot resume on CPU with several processes"
)

fsdp = pytest.mark.skipif(Version("5.14") > VERSION, reason="its Trainer took FSDP 1 on its own")


def reports(out: Path, processes: int = 2, *, spares: bool = False) -> list[Report]:
    """`spares`: no process waits for one that comes back, so that it may be too late to make a report."""
    paths = [out / f"{index}.end" for index in range(processes)]
    ends = [json.loads(path.read_text()) for path in paths if not spares or path.exists()]
    return [{name: value for name, value in end.items() if name != "pid"} for end in ends]


def run(command: list[str], env: dict[str, str], out: Path, code: int = 0) -> str:
    """Run Python with `command` to the end, with this exit code; returns what the launcher said."""
    with (out / "output").open("wb") as output:
        launcher = start("transformers", command, env=env, stdout=output, stderr=output)
    try:
        ended = launcher.wait(PATIENCE_S)
    finally:
        launcher.end()
    said = (out / "output").read_text()
    assert ended == code, said[-8000:]
    return said


def plain(script: Path, out: Path, *argv: str) -> list[Report]:
    """The script on plain DDP, two processes."""
    out.mkdir()
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        "--out",
        str(out),
        *argv,
    ]
    env = installed(out / "site", ACCELERATE_USE_CPU="1", FT_ACCELERATE_AUTOLOAD="0")
    run(command, env, out)
    return reports(out)


def launched(
    script: Path, out: Path, processes: int, section: dict[str, int], *argv: str
) -> list[str]:
    """Python's arguments to launch the script, with its config file in `out`."""
    ours = {"timeout_s": 30, "keep_state_s": 0, **section}
    given = {**CONFIG, "num_processes": processes, "fault_tolerance_config": ours}
    config = out / "ft.yaml"
    config.write_text(yaml.safe_dump(given))
    return [
        "-m",
        "ft_accelerate.launch.command",
        "launch",
        "--config_file",
        str(config),
        str(script),
        "--out",
        str(out),
        *argv,
    ]


def protected(
    script: Path,
    out: Path,
    *argv: str,
    kills: str = "",
    min_replicas: int = 2,
    group_size: int = 1,
    spares: int = 0,
    hold: Path | None = None,
    **more: str,
) -> tuple[list[Report], str]:
    """The same script in two replica groups, and spares."""
    out.mkdir(exist_ok=True)
    processes = (2 + spares) * group_size
    section = {"min_replicas": min_replicas, "group_size": group_size, "spares": spares}
    command = launched(script, out, processes, section, *argv)
    env = installed(out / "site", TRAINER_KILLS=kills, TRAINER_HOLD=str(hold or ""), **more)
    env["FT_EVENT_LOG"] = str(out / "events")
    said = run(command, env, out)
    assert said.count("was killed by SIGKILL; it is started again") == len(kills.split()), said
    found = reports(out, processes, spares=spares > 0)
    assert [report["torn"] for report in found] == [[]] * len(found)
    assert not (left := list((out / "checkpoints").glob(".ft_saving/**/*"))), (left, said)
    return found, said


def same(report: Report, other: Report) -> None:
    """Weights, moments, steps, rates, metrics and checkpoints are equal, bit for bit."""
    for name in report:
        if name not in OURS_ALONE:
            assert report[name] == other[name], name


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return plain(TRAINER, tmp_path_factory.mktemp("trainer") / "plain", *BEST)


def test_without_faults_trainer_is_plain_ddp_bit_for_bit(
    oracle: list[Report], tmp_path: Path
) -> None:
    """Weights, optimizer, LR, every logged loss and metric, checkpoints, of each process."""
    found, _ = protected(TRAINER, tmp_path / "ft", *BEST)
    for report, expected in zip(found, oracle, strict=True):
        assert report == {**expected, "torn": []}
    assert found[0]["checkpoints"] == ["checkpoint-14", "checkpoint-21"]
    assert found[0]["best_checkpoint"] == BEST_PATH


def test_killed_in_turn_in_training_evaluation_and_at_an_epochs_end(
    oracle: list[Report], tmp_path: Path
) -> None:
    """The main one, too, again and again, and in writing the best checkpoint, which the next one writes
    then. Every process heals into the middle of Trainer's own loop. Progress bar and tracker, which a
    process sets up in `on_train_begin` only if it is the main one, go on in the next main process. What is
    decided by an evaluation (what is the best, whether to stop) is decided once, also in one that has
    missed it."""
    kills = (
        "1:0:on_step_end:4 0:0:on_prediction_step:2 1:1:on_evaluate:1 1:2:on_epoch_end:1 "
        "0:1:on_substep_end:10 1:3:writing:1"
    )
    out, trackers = tmp_path / "ft", installed_trackers()
    out.mkdir()
    if "mlflow" in trackers:
        make_mlflow(out / "mlflow.db", "Default")
    found, said = protected(
        TRAINER,
        out,
        *BEST,
        kills=kills,
        TRAINER_REPORT_TO=" ".join(trackers) or "none",
        WANDB_MODE="offline",
        WANDB_DIR=str(out),
        MLFLOW_TRACKING_URI=f"sqlite:///{out}/mlflow.db",
    )
    tracked = [int(text) for text in (out / "tracked").read_text().split()]
    assert sorted(tracked) == sorted([*range(5, 21, 5), 7, 14, 21, 21])  # each row once
    assert "21/21" in said
    if "tensorboard" in trackers:
        assert in_tensorboard(out / "checkpoints" / "runs", "train/loss") == list(range(5, 21, 5))
    if "mlflow" in trackers:
        assert in_mlflow(out / "mlflow.db", "Default", "loss") == list(range(5, 21, 5))
    if "wandb" in trackers:
        assert in_wandb(out, "train/loss", "train/global_step") == list(range(5, 21, 5))
    for report, expected in zip(found, oracle, strict=True):
        same(report, expected)
        steps = [(e.get("step"), e.get("eval_loss")) for e in report["logs"]]
        assert steps == [(e.get("step"), e.get("eval_loss")) for e in expected["logs"]]


@pytest.mark.parametrize(
    ("compiled", "kills"),
    [
        ((), "0:0:on_prediction_step:1 1:0:on_step_end:4"),
        (("--compile",), "0:0:on_prediction_step:1"),  # each process compiles, which takes long
    ],
    ids=["plain", "compiled"],
)
def test_killed_in_an_evaluation_before_the_training(
    oracle: list[Report], compiled: tuple[str, ...], kills: str, tmp_path: Path
) -> None:
    """Accelerate has the model prepared by then, for evaluations, and plain DDP would average no gradient. One
    that is started again trains at once: its peer, who may not go on with fewer, does not wait for it there."""
    found, said = protected(
        TRAINER, tmp_path / "ft", "--evaluate_first", *compiled, *BEST, kills=kills
    )
    assert "failed with" not in said
    for report, expected in zip(found, oracle, strict=True):
        same(report, expected)


def test_killed_in_a_prediction_after_the_training(tmp_path: Path) -> None:
    """Its script's training ends before it is where its peers are, and it goes on to them."""
    kills = "1:0:on_prediction_step:5 1:1:on_prediction_step:3"
    options = ("--epochs", "1", "--predict")
    found, said = protected(TRAINER, tmp_path / "ft", *options, kills=kills)
    assert said.count("killed by SIGKILL") == 2 and "failed with" not in said
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["logs"] == found[1]["logs"]


def test_what_the_next_main_process_logs_after_the_training_is_in_the_folder_of_the_training(
    tmp_path: Path,
) -> None:
    """A run of TensorBoard is a folder. That evaluation's row was in one of its own, in the working directory."""
    if "tensorboard" not in installed_trackers():
        pytest.skip("no TensorBoard")
    options = ("--epochs", "1", "--predict")
    kills = "0:0:on_prediction_step:5"
    protected(TRAINER, tmp_path / "ft", *options, kills=kills, TRAINER_REPORT_TO="tensorboard")
    folder = tmp_path / "ft" / "checkpoints" / "runs"
    assert len(list(folder.iterdir())) == 1
    assert in_tensorboard(folder, "eval/loss") == [7, 7]


def test_a_batch_sampler_of_the_scripts_own_hears_the_epoch_that_one_enters(tmp_path: Path) -> None:
    """Trainer tells it to none that is behind a loader which skips batches: the samples were those of epoch 0."""
    found, _ = protected(TRAINER, tmp_path / "ft", "--epochs_batches", kills="1:0:on_step_begin:10")
    for report, expected in zip(
        found, plain(TRAINER, tmp_path / "plain", "--epochs_batches"), strict=True
    ):
        same(report, expected)


@enters_the_loop
def test_a_batch_for_which_numbers_are_drawn_as_it_is_read_is_that_of_a_run_without_faults(
    tmp_path: Path,
) -> None:
    """Accelerate reads it one batch early. One that came back drew for it once it was asked for, and all that
    followed (masks, dropout) was drawn from other numbers than its peers'."""
    options = ("--masked", *BEST)
    kills = "1:0:on_step_end:4 0:0:on_step_begin:9 1:1:on_step_begin:9"
    found, _ = protected(TRAINER, tmp_path / "ft", *options, kills=kills)
    for report, expected in zip(found, plain(TRAINER, tmp_path / "plain", *options), strict=True):
        same(report, expected)


@enters_the_loop
@pytest.mark.parametrize("more", [(), ("--evaluate_at_start",)], ids=["missed", "at_start"])
def test_workers_that_stay_are_made_once_where_one_enters_a_later_epoch(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """Torch draws a number for them in the first pass over a loader, which the process had missed: that over the
    evaluation's data, or over the training's. It drew in a later one, and its dropout was another from there on."""
    options = ("--persistent", *more)
    found, _ = protected(TRAINER, tmp_path / "ft", *options, kills="1:0:on_step_begin:10")
    for report, expected in zip(found, plain(TRAINER, tmp_path / "plain", *options), strict=True):
        same(report, expected)


def test_a_hot_spare_takes_over_the_share_of_one_that_is_killed(
    oracle: list[Report], tmp_path: Path
) -> None:
    """Both shares are needed: the spare computes that of the dead process in the same step. No batch is lost,
    nor counted twice."""
    kills = "1:0:on_step_begin:9"
    found, said = protected(TRAINER, tmp_path / "ft", *BEST, kills=kills, spares=1)
    assert "replica group 2 takes over share 1 of the data within a step that needs it" in said
    assert len(found) >= 2
    for report in found:
        same(report, oracle[0])
        assert report["world"][0] == 2


def test_the_others_go_on_and_the_killed_one_catches_up(tmp_path: Path) -> None:
    """`min_replicas` 1, `max_steps`, the best model loaded at the end: all end on the same step.

    Their sampler draws from torch's own generator: the epoch that one enters has their order."""
    found, _ = protected(
        TRAINER,
        tmp_path / "ft",
        "--max_steps",
        "60",
        *BEST,
        "--grouped",
        kills="0:0:on_step_end:10",
        min_replicas=1,
        hold=tmp_path,
    )
    same(*found)
    assert found[0]["global_step"] == found[0]["ticks"] == 60


@enters_the_loop
@pytest.mark.parametrize(
    ("hold", "more"),
    [
        pytest.param("on_step_begin:19", (), id="before_the_mean_of_losses"),
        pytest.param("on_step_end:20", (), id="before_the_sum_of_operations"),
        pytest.param("on_step_end:19", ("--tokens",), id="before_the_sum_of_tokens"),
    ],
)
def test_one_that_comes_back_between_a_step_and_its_row_has_its_peers_row(
    hold: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Norm, rate, tokens: what Trainer has read before the operation at which that process arrives. Its history
    may be written to the trackers and to trainer_state.json, if the others die."""
    found, said = protected(
        TRAINER,
        tmp_path / "ft",
        "--max_steps",
        "25",
        *more,
        kills="0:0:on_step_end:10",
        min_replicas=1,
        hold=tmp_path,
        TRAINER_HOLD_AT=hold,
    )
    assert "replica group 0 is back" in said
    same(*found)
    back, other = ([row for row in report["logs"] if "train_loss" not in row] for report in found)
    assert back == other
    assert found[0]["seen"] == found[1]["seen"]


@enters_the_loop
def test_one_that_comes_back_to_the_evaluation_that_ends_the_training_ends_with_its_peers(
    tmp_path: Path,
) -> None:
    """Callbacks have decided by its metrics, which that process does not tell to its own: they are of the past."""
    found, _ = protected(
        TRAINER,
        tmp_path / "ft",
        *BEST,
        "--stop_at",
        "14",
        kills="0:0:on_step_end:5",
        min_replicas=1,
        hold=tmp_path,
        TRAINER_HOLD_AT="on_evaluate:14",
    )
    same(*found)
    assert found[0]["global_step"] == 14
    assert found[0]["best_checkpoint"] == "checkpoint-14"


def test_a_callback_has_a_checkpoint_written_in_which_the_main_process_dies(tmp_path: Path) -> None:
    """What it has decided by an evaluation is decided in the process that comes back behind that, too."""
    options = ("--epochs", "2", "--save_better")
    expected = plain(TRAINER, tmp_path / "plain", *options)
    found, said = protected(TRAINER, tmp_path / "ft", *options, kills="0:0:writing:1")
    assert "failed with" not in said
    for report, its in zip(found, expected, strict=True):
        same(report, its)
    assert found[0]["checkpoints"] == ["checkpoint-14", "checkpoint-7"]


@pytest.mark.parametrize(
    "kills", ["1:0:on_step_begin:10 0:0:on_step_begin:12", "0:0:on_step_begin:5"]
)
def test_a_callback_evaluates_where_each_epoch_begins(tmp_path: Path, kills: str) -> None:
    """In the epoch that one enters, which comes back, no batch of that evaluation is taken for one of the training.
    And the next main process does not evaluate once more, alone."""
    options = ("--epochs", "2", "--evaluate_each_first")
    expected = plain(TRAINER, tmp_path / "plain", *options)
    found, said = protected(TRAINER, tmp_path / "ft", *options, kills=kills)
    assert "failed with" not in said
    for report, its in zip(found, expected, strict=True):
        same(report, its)


@resumes
def test_resuming_from_the_last_checkpoint(tmp_path: Path) -> None:
    """A second job resumes, and one of its processes is started again when newer checkpoints are
    there: it must not begin from those, nor from one whose writer had died. Nor has the limit of
    checkpoints deleted the one that it must begin from."""
    out = tmp_path / "ft"
    protected(TRAINER, out, "--save_steps", "7", "--max_steps", "7")
    (out / "checkpoints" / "checkpoint-7" / "trainer_state.json").stat()
    torn = out / "checkpoints" / ".ft_saving" / "checkpoint-8.0"
    (torn / "checkpoint-8").mkdir(parents=True)  # what a main process that dies leaves behind
    found, _ = protected(
        TRAINER,
        out,
        "--save_steps",
        "7",
        "--max_steps",
        "21",
        "--limit",
        "1",
        "--resume",
        kills="1:0:on_step_end:11",
    )
    same(*found)
    assert found[0]["global_step"] == 21
    assert found[0]["checkpoints"] == ["checkpoint-21", "checkpoint-7"]


@resumes
def test_all_die_and_the_job_goes_on_from_the_checkpoint_that_it_has_written(
    tmp_path: Path,
) -> None:
    """`train()` as most scripts call it. An older checkpoint of another job, with more steps, is left
    alone."""
    out = tmp_path / "ft"
    steps = ("--save_steps", "4", "--max_steps", "12")
    expected, _ = protected(TRAINER, out, *steps)
    shutil.move(out / "checkpoints" / "checkpoint-12", out / "checkpoints" / "checkpoint-99")
    found, said = protected(TRAINER, out, *steps, kills="0:0:on_step_end:7 1:0:on_step_end:7")
    assert said.count("it goes on from") == 1
    assert "checkpoint-4 (resume_from_checkpoint=False starts anew)" in said
    assert "the job goes back: " in said  # its loop's place does not say from where
    for report in (*expected, *found):
        report.pop("checkpoints")
    same(found[0], found[1])
    same(found[0], expected[0])


@resumes
def test_one_that_comes_after_the_last_step_does_not_say_that_it_goes_on(tmp_path: Path) -> None:
    """It finds its job's checkpoint, and nobody in training: the other has left, and goes on with its script.
    It does not wait for the connect timeout to learn that."""
    command = launched(
        TRAINER,
        tmp_path,
        2,
        {"min_replicas": 1, "timeout_s": 600},
        "--save_steps",
        "4",
        "--max_steps",
        "4",
        "--await_late",
    )
    env = installed(
        tmp_path / "site",
        TRAINER_KILLS="0:0:on_step_end:2",
        TRAINER_HOLD=str(tmp_path),
        TRAINER_HOLD_AT="on_train_begin:-1",
        FT_EVENT_LOG=str(tmp_path / "events"),
    )
    said = run(command, env, tmp_path)
    assert (tmp_path / "checkpoints" / "checkpoint-4").is_dir()
    assert "this process came back too late" in said
    assert "goes on from" not in said


def test_a_save_that_fails_in_each_main_process_ends_the_job(tmp_path: Path) -> None:
    """Behind the operations of a save, which are no progress. Each process that comes back is the main one, and
    fails, when the one before is gone."""
    section = {"min_replicas": 2}
    more = ("--save_steps", "4", "--max_steps", "8", "--full_disk")
    command = launched(TRAINER, tmp_path, 2, section, *more)
    env = installed(tmp_path / "site", TRAINER_KILLS="1:0:on_step_end:3")
    said = run(command, env, tmp_path, code=1)
    assert "an error of the script, so nothing is started again" in said
    assert said.count("failed with exit code 1; it is started again") <= 3


def test_the_main_process_dies_in_the_scripts_last_save_and_the_other_writes(
    tmp_path: Path,
) -> None:
    """In `save_model` after `train`, which the other has passed, as the rest of the script: nothing was
    written, and the exit code was that of SIGKILL."""
    command = launched(TRAINER, tmp_path, 2, {}, "--max_steps", "4", "--save_model")
    env = installed(tmp_path / "site", TRAINER_KILLS="0:0:writing_last:1")
    said = run(command, env, tmp_path)
    assert "was killed by SIGKILL" in said
    written = load_file(tmp_path / "final" / "model.safetensors")
    written["lm_head.weight"] = written["transformer.wte.weight"]  # tied
    assert digest(written) == json.loads((tmp_path / "1.end").read_text())["weights"]
    assert (tmp_path / "checkpoints" / "train_results.json").exists()
    state = json.loads((tmp_path / "checkpoints" / "trainer_state.json").read_text())
    assert state["is_world_process_zero"] and state["is_local_process_zero"]


@fsdp
def test_the_main_process_dies_in_the_last_save_of_a_model_of_two_processes(tmp_path: Path) -> None:
    """Those of the other group write it together, and whoever comes back too late meanwhile does not end that."""
    section = {"min_replicas": 2, "group_size": 2}
    options = ("--max_steps", "4", "--fsdp", "--save_model")
    command = launched(TRAINER, tmp_path, 4, section, *options)
    env = installed(tmp_path / "site", TRAINER_KILLS="0.0:0:writing_last:1")
    said = run(command, env, tmp_path)
    assert said.count("the main process has died at the end of the script: this process saves") == 1
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert "training_args.bin" in names
    assert load_file(tmp_path / "final" / "model.safetensors")
    assert (tmp_path / "checkpoints" / "trainer_state.json").exists()


def test_the_main_process_dies_in_the_last_checkpoint_and_the_other_writes_it(
    tmp_path: Path,
) -> None:
    """It was absent, also where it was the only one; and the exit code was 0."""
    command = launched(TRAINER, tmp_path, 2, {}, "--save_steps", "4", "--max_steps", "4")
    env = installed(tmp_path / "site", TRAINER_KILLS="0:0:writing:1")
    said = run(command, env, tmp_path)
    assert "was killed by SIGKILL" in said
    written = load_file(tmp_path / "checkpoints" / "checkpoint-4" / "model.safetensors")
    written["lm_head.weight"] = written["transformer.wte.weight"]  # tied
    assert digest(written) == json.loads((tmp_path / "1.end").read_text())["weights"]


@enters_the_loop
def test_one_that_comes_back_behind_a_save_and_an_evaluation_does_what_its_peers_did(
    tmp_path: Path,
) -> None:
    """No evaluation was before the save, so it is written without Trainer's barrier for the best checkpoint. Where the
    peers are now there is a best one: the process that came back waited at that barrier, which answered with what
    they had agreed on about the save; and so on, until it ended."""
    found, said = protected(
        TRAINER,
        tmp_path / "ft",
        "--save_steps",
        "4",
        "--max_steps",
        "4",
        "--evaluated",
        "8",
        kills="0:0:writing:1",
        min_replicas=1,
        hold=tmp_path,
        TRAINER_HOLD_AT="predicting:",
    )
    assert "failed with" not in said
    same(*found)
    assert found[0]["checkpoints"] == ["checkpoint-4"]


def test_replica_groups_of_two_processes(oracle: list[Report], tmp_path: Path) -> None:
    """One process of a group is killed; the group comes back as a whole. The oracle's two processes
    have had the same batches in two halves: equal to rounding, and all four bit for bit."""
    found, _ = protected(
        TRAINER,
        tmp_path / "ft",
        *BEST,
        "--batch_size",
        "2",
        group_size=2,
        kills="1.1:0:on_step_end:12",
    )
    for report in found:
        same(report, found[0])
        assert report["checkpoints"] == oracle[0]["checkpoints"]
        assert (report["global_step"], report["lr"]) == (oracle[0]["global_step"], oracle[0]["lr"])
    assert [report["world"] for report in found] == [[4, index] for index in range(4)]
    assert found[0]["best"] == pytest.approx(oracle[0]["best"], rel=1e-3)


@fsdp
def test_fsdp_in_replica_groups_of_two_processes(oracle: list[Report], tmp_path: Path) -> None:
    """Each life of a group reads and writes checkpoints as one, and the best one at the end."""
    found, _ = protected(
        TRAINER,
        tmp_path / "ft",
        *BEST,
        "--batch_size",
        "2",
        "--fsdp",
        group_size=2,
        kills="1.1:0:on_step_end:12 0.0:0:writing:2",
    )
    for report, other in zip(found, [*found[2:], *found[:2]], strict=True):
        same(report, other)
        assert report["checkpoints"] == oracle[0]["checkpoints"]
        assert report["global_step"] == oracle[0]["global_step"]
    assert found[0]["weights"] != found[1]["weights"]
    assert found[0]["best"] == pytest.approx(oracle[0]["best"], rel=1e-3)


def test_a_reference_model_that_dpo_moves_is_the_peers(tmp_path: Path) -> None:
    """`sync_ref_model` of TRL: a callback moves a model that the Trainer does not train. A process that came back had that
    of the beginning, and the training went on by other losses."""
    pytest.importorskip("trl")
    expected = plain(SFT, tmp_path / "plain", "--dpo")
    found, _ = protected(
        SFT, tmp_path / "ft", "--dpo", kills="1:0:on_step_end:5 0:0:on_step_end:10"
    )
    for report, wanted in zip(found, expected, strict=True):
        same(report, wanted)


@enters_the_loop
def test_a_callback_that_freezes_a_part_where_an_epoch_begins_does_so_in_one_that_comes_back(
    tmp_path: Path,
) -> None:
    """By the epoch in Trainer's state, which was 0 where the peers' epoch was entered."""
    pytest.importorskip("trl")
    expected = plain(SFT, tmp_path / "plain", "--freezes")
    found, _ = protected(SFT, tmp_path / "ft", "--freezes", kills="1:0:on_step_end:9")
    for report, wanted in zip(found, expected, strict=True):
        same(report, wanted)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_sft_trainer_of_trl(lora: bool, tmp_path: Path) -> None:
    """`lora`: PEFT's adapter is trained, and its weights alone are in the checkpoints. A process that comes back
    has its peers' count of tokens, and what the next row's means are made of."""
    pytest.importorskip("trl")
    if lora:
        pytest.importorskip("peft")
    more = ["--lora"] * lora
    expected = plain(SFT, tmp_path / "plain", *more)
    found, _ = protected(SFT, tmp_path / "ft", *more, kills="1:0:on_step_end:5 0:0:on_step_end:10")
    for report, wanted in zip(found, expected, strict=True):
        same(report, wanted)
        rows, wanted_rows = (
            [{name: row.get(name) for name in SFT_ROW} for row in each["logs"]]
            for each in (report, wanted)
        )
        assert rows == wanted_rows
