"""Leadership moves: loggers of the next leader, and hooks that it has skipped.

Which process is the leader is scripted; loggers are Lightning's own, and their stores are read.
`test_replicas.py` kills leaders.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning_utilities.core.imports import RequirementCache
from lightning_utilities.core.rank_zero import rank_zero_only

from ft_lightning.trainer import loggers
from ft_lightning.trainer.leader import SkippedHooks, is_guarded
from ft_lightning.trainer.loggers import Loggers, Relay, keep_metrics, log_places

ROLE: Any = rank_zero_only


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it


class Process:
    """What one process has of a fit: its loggers. Which one is the leader is a matter of the test."""

    def __init__(self, *loggers: Any) -> None:
        self.trainer: Any = SimpleNamespace(loggers=list(loggers))
        self.has_successor = False
        self.loggers = Loggers(self.trainer, lambda: None, self.still_leads)
        self.relays: list[Relay] = self.loggers._relays

    def meet(self, leads: bool, *, takes_over: bool = False, begins: bool = False) -> None:
        ROLE.rank = 0 if leads else 1
        self.loggers.in_quorum(leads, takes_over=takes_over, begins=begins)

    def log(self, leads: bool, metrics: dict[str, float], step: int) -> None:
        """As Lightning does, after each row."""
        ROLE.rank = 0 if leads else 1
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics=metrics, step=step)
            logger.save()

    def still_leads(self) -> bool:
        """As a strategy's: the lighthouse has told by now that another one leads."""
        if self.has_successor:
            ROLE.rank = 1
        return not self.has_successor

    def open(self) -> None:
        for relay in self.relays:
            relay.await_open()


def steps_in_csv(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]


def make_csv(folder: Path) -> Logger:
    return CSVLogger(folder, "csv")


def make_tensorboard(folder: Path) -> Logger:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder, "tensorboard")


def make_mlflow(folder: Path) -> Logger:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from lightning.pytorch.loggers import MLFlowLogger

    return MLFlowLogger("name", tracking_uri=f"sqlite:///{folder}/mlflow.db")


def steps_of(folder: Path, make: Any) -> list[int]:
    """Of the metric "loss" in the one run that there is."""
    if make is make_csv:
        (path,) = folder.glob("csv/*/metrics.csv")
        return steps_in_csv(path)
    if make is make_tensorboard:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (version,) = folder.glob("tensorboard/*")
        found = EventAccumulator(str(version)).Reload()
        return [event.step for event in found.Scalars("loss")]
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("name").experiment_id])
    return [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]


@pytest.mark.parametrize("make", [make_csv, make_tensorboard, make_mlflow])
def test_the_next_leader_goes_on_in_the_same_place_and_writes_what_is_missing(
    tmp_path: Path, make: Callable[[Path], Logger]
) -> None:
    """The first leader dies between two rows, the second one before it has written anything."""
    processes = [Process(make(tmp_path)) for _ in range(3)]
    for index, process in enumerate(processes):
        process.meet(index == 0)
    for step in range(6):
        for index, process in enumerate(processes):
            if index or step < 4:  # the leader has died before it wrote the last two
                process.log(index == 0, {"loss": 1.0, "epoch": 0.0}, step)
        told = processes[0].loggers.news()
        for process in processes if told else ():
            process.loggers.hear(told)
    processes[1].meet(True, takes_over=True)
    processes[1].open()
    processes[2].meet(False)
    processes[2].log(False, {"loss": 1.0, "epoch": 0.0}, 6)
    processes[2].meet(True, takes_over=True)
    processes[2].log(True, {"loss": 1.0, "epoch": 0.0}, 7)
    processes[2].open()
    processes[2].log(True, {"loss": 1.0, "epoch": 0.0}, 8)
    assert steps_of(tmp_path, make) == list(range(9))
    for process in processes:
        process.loggers.end()
        process.trainer.loggers[0].finalize("success")  # ends TensorBoard's threads


def test_one_that_heals_keeps_the_rows_that_its_peers_have_logged(tmp_path: Path) -> None:
    """It was away when they logged, and leads when the leader dies, which has held these rows back."""
    leader, back = processes = [Process(CSVLogger(tmp_path, "csv")) for _ in range(2)]
    for process in processes:
        process.meet(process is leader)
    logger = leader.trainer.loggers[0]
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step)
    back.loggers.hear(leader.loggers.news() or [])
    back.loggers.take_rows(leader.loggers.rows())
    for process in processes:
        ROLE.rank = 0 if process is leader else 1
        process.trainer.loggers[0].log_metrics({"loss": 1.0, "text": "of no number"}, 3)
    assert [step for _, step in leader.loggers.rows()[0]] == [0, 1, 2]
    back.meet(True, takes_over=True)
    back.open()
    back.log(True, {"loss": 1.0}, 4)
    assert steps_of(tmp_path, make_csv) == list(range(5))
    back.loggers.end()


@pytest.mark.parametrize("make", [make_csv, make_tensorboard, make_mlflow])
def test_a_leader_that_was_stopped_meanwhile_writes_nothing_until_it_leads_again(
    tmp_path: Path, make: Callable[[Path], Logger]
) -> None:
    """It goes on between two of its steps, where it has not met its peers yet."""
    stopped, other = processes = [Process(make(tmp_path)) for _ in range(2)]
    for process in processes:
        process.meet(process is stopped)
        process.log(process is stopped, {"loss": 1.0}, 0)
    other.loggers.hear(stopped.loggers.news() or [])
    other.meet(True, takes_over=True)
    for step in (1, 2):
        other.log(True, {"loss": 1.0}, step)
    other.open()
    stopped.has_successor = True
    stopped.log(True, {"loss": 2.0}, 1)
    stopped.log(False, {"loss": 2.0}, 2)
    stopped.meet(False)
    other.log(True, {"loss": 1.0}, 3)
    stopped.has_successor = False
    stopped.log(False, {"loss": 1.0}, 4)
    stopped.meet(True, takes_over=True)
    stopped.open()
    stopped.log(True, {"loss": 1.0}, 5)
    assert steps_of(tmp_path, make) == list(range(6))
    for process in processes:
        process.loggers.end()
        process.trainer.loggers[0].finalize("success")  # ends TensorBoard's threads


@pytest.mark.parametrize("dies", ["row", "columns", "opening"])
def test_a_leader_that_is_killed_while_it_writes_costs_no_row_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """A file is written in pieces. The next leader has kept the last rows only."""
    monkeypatch.setattr(loggers, "KEPT_ROWS", 2)
    leader, other = (Process(CSVLogger(tmp_path, "csv")) for _ in range(2))
    leader.meet(True)
    other.meet(False)
    for step in range(6):
        leader.log(True, {"loss": 1.0}, step)
        other.log(False, {"loss": 1.0}, step)
    other.loggers.hear(leader.loggers.news() or [])
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    if dies == "row":
        path.write_bytes(path.read_bytes()[:-3])
    elif (child := os.fork()) == 0:
        ROLE.rank = 0
        die = {"columns": (csv.DictWriter, "writerows"), "opening": (ExperimentWriter, "__init__")}
        with contextlib.suppress(BaseException), monkeypatch.context() as patch:
            patch.setattr(*die[dies], lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
            if dies == "columns":
                leader.log(True, {"accuracy": 1.0}, 6)
            else:
                keep_metrics(CSVLogger(tmp_path, "csv", version=0))
        os._exit(0)
    else:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    other.meet(True, takes_over=True)
    other.open()
    other.log(True, {"loss": 1.0}, 6)
    assert steps_in_csv(path) == list(range(7))
    # Lightning 2.5.0 writes its file of hyperparameters with each row.
    more = ["hparams.yaml"] if RequirementCache("lightning==2.5.0") else []
    assert sorted(each.name for each in path.parent.iterdir()) == [*more, "metrics.csv"]


def test_a_file_to_which_two_write_for_a_moment_keeps_its_rows_and_columns(tmp_path: Path) -> None:
    """A leader that was stopped, and has not heard yet that it has a successor."""
    stopped, other = (Process(CSVLogger(tmp_path, "csv")) for _ in range(2))
    stopped.meet(True)
    stopped.log(True, {"loss": 1.0, "epoch": 0.0}, 0)
    other.meet(False)
    other.loggers.hear(stopped.loggers.news() or [])
    other.meet(True, takes_over=True)
    other.open()
    other.log(True, {"loss": 1.0, "accuracy": 0.5}, 1)
    stopped.log(True, {"loss": 1.0, "rate": 0.1}, 1)
    other.log(True, {"loss": 1.0, "accuracy": 0.5}, 2)
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    assert steps_in_csv(path) == [0, 1, 1, 2]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["accuracy"] for row in rows] == ["", "0.5", "", "0.5"]
    assert [row["rate"] for row in rows] == ["", "", "0.1", ""]


class Beside(Logger):
    """Of another kind, in the folder of a CSV logger, as TensorBoard's is by default."""

    _experiment = None

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.found: list[list[str]] = []

    @property
    def log_dir(self) -> str:
        return self._folder

    @property
    def experiment(self) -> Any:
        self.found.append(os.listdir(self.log_dir))
        return self

    name = version = "beside"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Writes nothing."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""


def test_a_logger_leaves_the_file_of_another_in_its_folder_alone(tmp_path: Path) -> None:
    """The next leader opens each in a thread of its own."""
    first = Process(CSVLogger(tmp_path, "csv"))
    first.meet(True)
    first.log(True, {"loss": 1.0}, 0)
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    beside = Beside(path.parent)
    second = Process(beside)
    second.meet(False)
    second.meet(True, takes_over=True)
    second.open()
    assert beside.found and all("metrics.csv" in found for found in beside.found)


def test_the_next_leader_opens_a_folder_without_rows_and_does_not_warn_of_their_loss(
    tmp_path: Path,
) -> None:
    """The first one has died before its first row: only hyperparameters are there."""
    first = CSVLogger(tmp_path, "csv", version=0)
    first.log_hyperparams({"batch_size": 4})
    first.save()
    assert list(tmp_path.glob("csv/*/*")), "Lightning finds the folder in use"
    second = CSVLogger(tmp_path, "csv", version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_metrics(second)
        _ = second.experiment


def test_a_logger_is_opened_beside_the_training_and_calls_wait_in_order(tmp_path: Path) -> None:
    may_open, threads = threading.Event(), []

    class Slow(CSVLogger):
        @property
        def experiment(self) -> Any:
            if ROLE.rank == 0 and self._experiment is None:
                threads.append(threading.current_thread())
                may_open.wait()
            return CSVLogger.experiment.fget(self)  # type: ignore[attr-defined]

    process = Process(Slow(tmp_path, "csv"))
    process.meet(False)
    process.log(False, {"loss": 1.0}, 0)
    process.meet(True, takes_over=True)
    for step in (1, 2, 3):
        process.log(True, {"loss": 1.0}, step)  # returns, though the logger can't be opened yet
    assert [relay.opens for relay in process.relays] == [True]
    may_open.set()
    process.loggers.end()
    assert threading.main_thread() not in threads
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    assert steps_in_csv(path) == [0, 1, 2, 3]


class Unreachable(CSVLogger):
    @property
    def experiment(self) -> Any:
        raise ConnectionError("no route to the tracker")


def test_a_logger_that_the_next_leader_cannot_open_either_ends_a_fit_that_begins(
    tmp_path: Path,
) -> None:
    process = Process(Unreachable(tmp_path, "gone"))
    process.meet(False, begins=True)
    with pytest.raises(ConnectionError, match="no route"):
        process.meet(True, takes_over=True, begins=True)


def test_a_logger_that_cannot_be_opened_does_not_end_the_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(Unreachable(tmp_path, "gone"), CSVLogger(tmp_path, "csv"))
    process.meet(False)
    with caplog.at_level(logging.WARNING):
        process.meet(True, takes_over=True)
        process.open()
    assert "Unreachable logs nothing from here on" in caplog.text and "no route" in caplog.text
    process.log(True, {"loss": 1.0}, 0)
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    assert steps_in_csv(path) == [0]


def test_one_that_leaves_the_others_writes_nothing_more(tmp_path: Path) -> None:
    process = Process(CSVLogger(tmp_path, "csv", flush_logs_every_n_steps=100))
    process.meet(True)
    (logger,) = process.trainer.loggers
    logger.log_metrics({"loss": 1.0}, 0)
    process.loggers.before_leaving()
    (path,) = tmp_path.glob("csv/*/metrics.csv")
    assert steps_in_csv(path) == [0]
    process.loggers.leave()
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("failed")
    assert steps_in_csv(path) == [0]


def test_all_loggers_write_where_the_leader_does(tmp_path: Path) -> None:
    """Whichever comes first: a version is chosen when a logger is first used, and files are there."""
    leader, other = (Process(CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")) for _ in range(2))
    leader.meet(True)
    leader.log(True, {"loss": 1.0}, 0)
    other.meet(False)
    told = leader.loggers.news()
    assert told is not None
    for process in (leader, other):
        process.loggers.hear(told)
    assert leader.loggers.news() is None and other.loggers.news() is None
    assert log_places(other.trainer) == log_places(leader.trainer) == [{"_version": 0}] * 2
    leader.meet(True)
    assert leader.loggers.news() == told  # a new quorum may have a new member


def test_a_run_that_begins_with_the_first_row_is_told_then(tmp_path: Path) -> None:
    """A module without hyperparameters: nothing opens the logger before the first step is committed."""

    class Tracker(Logger):
        """Has a run that begins when it is used, as wandb's and MLflow's loggers do."""

        name, version = "tracker", None

        def __init__(self) -> None:
            super().__init__()
            self._run_id: str | None = None

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self._run_id = self._run_id or "a run"

    leader, other = Process(Tracker()), Process(Tracker())
    for process in (leader, other):
        process.meet(process is leader)
    for step in range(3):  # the vote on a step comes before its row
        told = leader.loggers.news()
        assert (told is None) == (step == 2)
        for process in (leader, other) if told is not None else ():
            process.loggers.hear(told or [])
        leader.log(True, {"loss": 1.0}, step)
    assert log_places(other.trainer) == [{"_run_id": "a run"}]


def test_a_copy_of_a_logger_is_of_its_own_class(tmp_path: Path) -> None:
    process = Process(CSVLogger(tmp_path, "csv"))
    (logger,) = process.trainer.loggers
    assert type(copy.deepcopy(logger)) is CSVLogger is not type(logger)
    process.loggers.end()
    assert type(logger) is CSVLogger


# ---------------------------------------------------------------------- hooks


class Monitor(Callback):
    """As ThroughputMonitor is written."""

    def __init__(self) -> None:
        self.called: list[str] = []

    @rank_zero_only
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.called.append(f"setup {TrainerFn(stage).value}")

    @rank_zero_only
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.called.append(trainer.state.stage.value)

    @rank_zero_only
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.called.append(f"batch {batch_idx}")

    @rank_zero_only
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.called.append(trainer.state.stage.value)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.called.append("epoch")


class Module(LightningModule):
    started = 0

    @rank_zero_only
    def on_train_start(self) -> None:
        self.started += 1


@pytest.fixture
def fit() -> Any:
    state = TrainerState(fn=TrainerFn.FITTING, stage=RunningStage.VALIDATING)
    return SimpleNamespace(callbacks=[Monitor()], lightning_module=Module(), state=state)


def test_the_next_leader_calls_what_was_skipped_here_and_only_that(fit: Any) -> None:
    ROLE.rank = 1
    skipped = SkippedHooks()
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        skipped.begins(hook)
    for batch in range(3):
        skipped.begins("on_train_batch_start", "data", batch)
        if batch < 2:
            skipped.ends("on_train_batch_start")
    skipped.begins("on_validation_start")
    ROLE.rank = 0
    skipped.run(fit)
    (monitor,) = fit.callbacks
    # "epoch" has no guard; each is called in its own stage, as Lightning calls it
    assert monitor.called == ["setup fit", "train", "batch 2", "validate"]
    assert fit.lightning_module.started == 1 and fit.state.stage == "validate"
    skipped.run(fit)
    ROLE.rank = 1  # it was evicted, and its peers train
    skipped.begins("on_train_batch_start", "data", 9)
    ROLE.rank = 0
    skipped.run(fit)
    assert monitor.called[4:] == ["batch 9"]


def test_what_was_called_as_rank_zero_is_not_called_again(fit: Any) -> None:
    skipped = SkippedHooks()  # the group that prints before there is a leader
    skipped.begins("on_train_start")
    skipped.run(fit)
    assert fit.callbacks[0].called == []


def test_the_guard_is_told_under_other_decorators() -> None:
    import functools

    def loud(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    assert is_guarded(Monitor().setup) and is_guarded(loud(Monitor.setup))
    assert not is_guarded(Monitor().on_train_epoch_start) and not is_guarded(loud(print))
