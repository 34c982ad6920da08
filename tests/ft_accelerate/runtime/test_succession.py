"""The main process changes: what set-up it has skipped, and which run of a tracker goes on.

With transformers' own callbacks and handler, Accelerate's own Accelerator, and the trackers that are
installed; which process is the main one is scripted. `test_trainer.py` kills main processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from transformers import ProgressCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from ft_accelerate.runtime import process, trainer
from ft_accelerate.runtime.accelerate_trackers import NextTrackers, StandIn
from ft_accelerate.runtime.leadership import TrackerRuns
from ft_accelerate.runtime.succession import INTEGRATIONS, OwedHooks
from ft_core.launch import trackers
from ft_core.launch.trackers import Opening
from tests.harness.trackers import in_mlflow, in_tensorboard, make_mlflow
from tests.harness.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Accelerate and transformers changed in their older versions."""
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_IPEX"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Role:
    """What the hooks ask of a runtime."""

    def __init__(self) -> None:
        self.leads, self.denied, self.live, self.runs = False, 0, True, TrackerRuns()
        self.leadership, self.manager = self, None
        self.done_together = (0, 0)

    def still(self, manager: Any) -> bool:
        return self.leads

    @property
    def leader(self) -> bool:
        self.denied += not self.leads
        return self.leads

    def open(self, opens: Callable[[], None], failed: Callable[[Exception], None]) -> Opening:
        return Opening("opening", opens, failed)


class Fit:
    """A Trainer's events in one process."""

    def __init__(self, folder: Path, *callbacks: TrainerCallback) -> None:
        self.role, self.owed = Role(), OwedHooks()
        self.args = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
        self.state, self.control = TrainerState(max_steps=20), TrainerControl()
        every = [DefaultFlowCallback(), *callbacks]
        self.handler = CallbackHandler(every, None, None, None, None)

    def __call__(self, event: str, **kwargs: Any) -> None:
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.role.leader
        role: Any = self.role
        self.owed.call(
            role,
            CallbackHandler.call_event,
            self.handler,
            event,
            self.args,
            self.state,
            self.control,
            **kwargs,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self("on_step_begin")
            self.state.global_step += 1
            self("on_step_end")


class Tracker(TrainerCallback):
    """As those of transformers are written: it notes that it is set up, also where it did nothing."""

    def __init__(self) -> None:
        self.initialized, self.run, self.rows = False, None, []
        self.begins = self.epochs = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begins += 1
        if not self.initialized:
            self.initialized = True
            if state.is_world_process_zero:
                self.run = object()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.epochs += 1

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            assert self.run is not None, "You must call init() before log()"
            self.rows.append(state.global_step)


class Nested(Tracker):
    """Looks which process this is, and has other callbacks hear of an event of its own. `together`: it does something
    that all processes do."""

    def __init__(self) -> None:
        super().__init__()
        self.fit: Any = None
        self.together = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_epoch_begin(args, state, control)
        self.begins += 1
        if self.together:
            self.fit.role.done_together = (self.begins, 0)
        self.fit("on_step_begin")


class Slow(Tracker):
    """As `Tracker`, one of transformers' own: it is open when the test says so."""

    __module__ = INTEGRATIONS

    def __init__(self) -> None:
        super().__init__()
        self.may_open, self.broken = threading.Event(), False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            assert self.may_open.wait(PATIENCE_S)
            if self.broken:
                raise ConnectionError("no route to the tracker")
        super().on_train_begin(args, state, control, **kwargs)


class Counter(TrainerCallback):
    """Does not care which process this is."""

    def __init__(self) -> None:
        self.begun = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1


@pytest.mark.parametrize("together", [False, True])
def test_a_hook_in_which_others_are_called_is_owed_unless_all_have_done_it(
    tmp_path: Path, together: bool
) -> None:
    """One that evaluates is not called once more, to evaluate alone."""
    nested = Nested()
    nested.fit, nested.together = Fit(tmp_path, nested), together
    nested.fit("on_epoch_begin")
    assert (nested.begins, nested.epochs) == (1, 0)
    nested.fit.role.leads = True
    nested.fit("on_step_begin")
    assert (nested.begins, nested.epochs) == (1, 0 if together else 1)


def test_a_new_main_process_sets_up_what_it_has_skipped(tmp_path: Path) -> None:
    bar, tracker, counter = ProgressCallback(), Tracker(), Counter()
    fit = Fit(tmp_path, bar, tracker, counter)
    fit("on_train_begin")
    fit("on_epoch_begin")
    fit.steps(5)
    fit("on_log", logs={})
    assert tracker.run is None and bar.training_bar is None
    fit.role.leads = True
    fit.steps(2)
    fit("on_log", logs={"loss": 1.0})
    assert bar.training_bar.n == 7
    run = tracker.run
    assert run is not None and (tracker.begins, tracker.epochs, tracker.rows) == (1, 1, [7])
    assert counter.begun == 1
    fit.role.leads = False  # evicted, say, and back
    fit.steps(1)
    fit.role.leads = True
    fit.steps(1)
    assert tracker.run is run and bar.training_bar.n == 9
    fit("on_train_end")


def test_a_hook_whose_time_is_over_is_not_owed(tmp_path: Path) -> None:
    tracker = Tracker()
    fit = Fit(tmp_path, tracker)
    for _ in range(3):
        fit("on_epoch_begin")
        fit.steps(2)
        fit("on_epoch_end")
    fit.role.leads = True
    fit("on_evaluate", metrics={})
    assert tracker.epochs == 0


def test_what_no_hook_ends_is_owed_behind_the_training(tmp_path: Path) -> None:
    """It logs what an evaluation or a prediction finds there."""
    bar, tracker = ProgressCallback(), Tracker()
    fit = Fit(tmp_path, bar, tracker)
    fit("on_train_begin")
    fit.steps(2)
    fit("on_train_end")
    fit.role.leads = True
    fit("on_log", logs={"test_loss": 1.0})
    assert tracker.run is not None and tracker.rows == [2]
    assert bar.training_bar is None


def test_a_tracker_that_fails_in_the_new_main_process_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable(Tracker):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                raise ConnectionError("no route to the tracker")

    tracker = Tracker()
    fit = Fit(tmp_path, Unreachable(), tracker)
    fit("on_train_begin")
    fit.role.leads = True
    with caplog.at_level(logging.WARNING):
        fit("on_log", logs={})
    assert "Unreachable is left out" in caplog.text and "no route" in caplog.text
    assert tracker.rows == [0]


@pytest.mark.parametrize("broken", [False, True])
def test_the_loop_goes_on_while_a_tracker_is_opened(
    broken: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows wait, each with its own step; the end of the training waits for it."""
    slow, tracker = Slow(), Tracker()
    slow.broken = broken
    fit = Fit(tmp_path, slow, tracker)
    fit("on_train_begin")
    fit.role.leads = True
    for _ in range(3):
        fit.steps(1)
        fit("on_log", logs={})
    assert (slow.rows, tracker.rows) == ([], [1, 2, 3])
    slow.may_open.set()
    with caplog.at_level(logging.WARNING):
        fit("on_train_end")
    assert slow.rows == ([] if broken else [1, 2, 3])
    assert ("Slow is left out" in caplog.text) == broken
    fit("on_log", logs={})
    assert slow.rows == ([] if broken else [1, 2, 3, 3]) and tracker.rows == [1, 2, 3, 3]


class Rows(GeneralTracker):
    """A tracker of a user's, which is open when the test says so."""

    name, requires_logging_directory, main_process_only = "rows", False, False

    def __init__(self) -> None:
        super().__init__()
        self.may_open, self.broken = threading.Event(), False
        self.rows: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def start(self) -> None:
        assert self.may_open.wait(PATIENCE_S)
        if self.broken:
            raise ConnectionError("no route to the tracker")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append(step)


class Script:
    """A raw script in one process, which is not the main one when it begins."""

    def __init__(
        self,
        accelerator: Accelerator,
        given: dict[str, Any] | None = None,
        begun: bool = False,
        **config: Any,
    ) -> None:
        self.role, self.accelerator = Role(), accelerator
        role: Any = self.role
        start = Accelerator.init_trackers
        self.next = NextTrackers(
            role, accelerator, start, "job", config or None, given, begun=begun
        )

    def log(self, steps: range) -> None:
        for step in steps:
            values = {"loss": 1.0 / (step + 1)}
            self.next.log(lambda s=step, v=values: self.accelerator.log(v, s), values, step)  # type: ignore[misc]


@pytest.mark.parametrize("broken", [False, True])
def test_a_raw_loop_goes_on_while_its_trackers_are_opened(
    broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows()
    rows.broken = broken
    script = Script(Accelerator(cpu=True, log_with=rows), rate=1)
    script.log(range(3))
    script.role.leads = True
    script.log(range(3, 6))
    assert not rows.rows
    rows.may_open.set()
    with caplog.at_level(logging.WARNING):
        assert script.next.await_open()
    script.log(range(6, 8))
    # What a tracker that can't be asked had stored is not known: nothing is written again.
    assert rows.rows == ([] if broken else [{"rate": 1}, 3, 4, 5, 6, 7])
    assert ("nothing is logged to trackers from here on" in caplog.text) == broken


def test_a_main_process_that_was_stopped_writes_no_row_until_it_is_it_again() -> None:
    """Its successor writes them."""
    rows = Rows()
    rows.may_open.set()
    accelerator = Accelerator(cpu=True, log_with=rows)
    script = Script(accelerator, begun=True)
    accelerator.init_trackers("job")
    script.role.leads = True
    script.log(range(2))
    script.role.leads = False
    script.log(range(2, 4))
    assert script.next.await_open() is False
    script.role.leads = True
    script.log(range(4, 6))
    assert script.next.await_open()
    script.log(range(6, 7))
    assert rows.rows == [0, 1, 4, 5, 6]


def test_what_a_next_main_process_opens_is_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be looked up as WANDB, and imported beside the training, which waited."""
    names: list[str] = []
    monkeypatch.setattr(trackers, "prepare", names.extend)
    accelerator = Accelerator(cpu=True)
    accelerator.log_with = [LoggerType.WANDB, Rows()]
    Script(accelerator)
    assert names == ["wandb", "rows"]


def test_get_tracker_gives_what_becomes_the_tracker() -> None:
    """A script asks for it once, at its beginning, and uses it where it is the main process."""
    rows = Rows()
    rows.may_open.set()
    script = Script(Accelerator(cpu=True, log_with=rows))

    def find() -> Any:
        return script.accelerator.get_tracker("rows") if script.next.await_open() else None

    tracker = StandIn(find)
    tracker.log({}, step=1)
    tracker.log_images({}, step=1)
    script.role.leads = True
    tracker.log({}, step=2)
    assert rows.rows == [2] and tracker.tracker is rows.rows
    assert isinstance(tracker, GeneralTracker)


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_what_a_dead_main_process_had_not_stored_is_logged_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next main process of a raw script, into the same run. wandb: benchmarks/leader_deaths.py."""
    pytest.importorskip(kind)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    if kind == "mlflow":
        make_mlflow(tmp_path / "mlflow.db", "job")

    def begun() -> Accelerator:
        return Accelerator(cpu=True, log_with=kind, project_dir=str(tmp_path / "board"))

    before = begun()
    before.init_trackers("job", {"rate": 1})
    for step in range(5):
        before.log({"loss": 1.0 / (step + 1)}, step)
    run = before.get_tracker(kind, unwrap=True)
    given = {kind: {"run_id": run.info.run_id}} if kind == "mlflow" else {}
    before.end_training()
    script = Script(begun(), given, rate=1)
    if kind == "mlflow":
        script.role.runs.opened(kind, run.info.run_id)
    script.log(range(8))
    script.role.leads = True
    script.log(range(8, 10))
    script.next.await_open()
    script.accelerator.end_training()
    if kind == "tensorboard":
        assert in_tensorboard(tmp_path / "board", "loss") == list(range(10))
        assert len(list((tmp_path / "board" / "job").glob("*/hparams.yml"))) == 1
    else:
        assert in_mlflow(tmp_path / "mlflow.db", "job", "loss") == list(range(10))


def test_a_run_is_continued_by_the_next_main_process() -> None:
    first, second, third = TrackerRuns(), TrackerRuns(), TrackerRuns()
    assert first.news(1) == b""  # nothing to tell: nothing is sent
    first.opened("wandb", "abc")
    second.hear(first.news(1))
    first.told(1)
    assert first.news(1) == b"" and first.news(2) != b""  # once in each quorum
    third.hear(first.news(2))
    assert second.to_continue("wandb") == third.to_continue("wandb") == "abc"
    fourth = TrackerRuns()
    fourth.hear(second.news(3))  # before the second has opened it: it may be killed meanwhile
    assert fourth.to_continue("wandb") == "abc"
    second.opened("wandb", "abc")
    assert second.to_continue("wandb") is None  # another call begins another run
    third.hear(second.news(3))
    second.closed("wandb")
    third.hear(second.news(3))
    assert third.to_continue("wandb") is None


def test_what_the_script_says_of_its_runs_stays() -> None:
    runs = TrackerRuns()
    assert runs.for_wandb({"project": "p"}, {}) == {"project": "p"}
    runs.hear(b'{"wandb": "abc", "mlflow": "def"}')
    continued = {"project": "p", "id": "abc", "resume": "allow"}
    assert runs.for_wandb({"project": "p"}, {}) == continued
    assert runs.for_wandb({"id": "other"}, {}) == {"id": "other"}
    assert runs.for_wandb({"resume": "must"}, {}) == {"resume": "must", "id": "abc"}
    assert runs.for_wandb({}, {"WANDB_RUN_ID": "other"}) == {}
    assert runs.for_mlflow({"run_id": None}, {})["run_id"] == "def"
    assert runs.for_mlflow({"run_id": "other"}, {})["run_id"] == "other"
    assert runs.for_mlflow({"nested": True}, {}) == {"nested": True}


def test_a_save_of_a_model_is_told_which_process_is_the_main_one_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PEFT's `save_pretrained` has other arguments in between: what is no main process wrote a second file."""
    said: list[tuple[bool, bool]] = []

    def pefts(
        self: Any, save_directory: str, safe: bool = True, is_main_process: bool = True
    ) -> None:
        said.append((safe, is_main_process))

    runtime = SimpleNamespace(live=True, own_writes=SimpleNamespace(told=lambda: None))
    runtime.saves = SimpleNamespace(save=lambda writes, again: (writes(), again()))
    monkeypatch.setattr(process, "_runtime", runtime)
    seam = trainer.MODELS["peft.peft_model"]
    assert seam.replace is not None
    save = seam.replace(pefts)
    save(None, "folder", is_main_process=False)
    save(None, "folder", False)
    assert said == [(True, False), (True, True), (False, True)]
