"""The main process changes: what set-up it has skipped, and which run of a tracker goes on.

With transformers' own callbacks and handler, Accelerate's own Accelerator, and the trackers that are
installed; which process is the main one is scripted. `test_trainer.py` kills main processes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import ProgressCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from ft_accelerate.runtime.succession import OwedHooks
from ft_accelerate.runtime.tracker_runs import TrackerRuns


class Role:
    """What the hooks ask of a runtime."""

    def __init__(self) -> None:
        self.leads, self.denied = False, 0

    @property
    def leader(self) -> bool:
        self.denied += not self.leads
        return self.leads


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
            role, CallbackHandler.call_event, self.handler, event, self.args, self.state,
            self.control, **kwargs,
        )  # fmt: skip

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


class Counter(TrainerCallback):
    """Does not care which process this is."""

    def __init__(self) -> None:
        self.begun = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1


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


def test_a_run_is_continued_by_the_next_main_process() -> None:
    first, second, third = TrackerRuns(), TrackerRuns(), TrackerRuns()
    assert first.news(1) == b""  # nothing to tell: nothing is sent
    first.opened("wandb", "abc")
    second.hear(first.news(1))
    first.told(1)
    assert first.news(1) == b"" and first.news(2) != b""  # once in each quorum
    third.hear(first.news(2))
    assert second.to_continue("wandb") == third.to_continue("wandb") == "abc"
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
