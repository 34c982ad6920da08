"""What a process left undone because it was not the main one, and does when it becomes the main one.

Callbacks of Trainer set themselves up in the main process only: they ask whether this is the main
process when training begins, and open a progress bar or a run of a tracker. If the main process dies,
the next one has to do that before anything is logged. Which callbacks these are is listed nowhere:
a hook is owed if it asked, in whatever way, and the answer was no. Not so one that does something together with the
other processes, such as an evaluation: they do not come to it again.

A hook may also note that it has run (`_initialized`). So what it has changed in its callback is put
back before it runs again, unless something else has changed it since.

A tracker takes long to open, and the other processes would wait. So transformers' own callbacks for
trackers do it in a thread of its own, where the events that come meanwhile wait for it. First they log
again, from Trainer's history, what the tracker lacks. Callbacks of others run in the loop's thread.

Accelerate's own trackers are in `accelerate_trackers`. Those that name their runs (wandb, MLflow,
and Trainer's TensorBoard, by the folder) continue that of the main process before (`leadership.TrackerRuns`). A tracker that cannot be set up here is left
out, and the log says so: it must not end a training that has survived the loss of a machine.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ft_accelerate import seams
from ft_accelerate.runtime.process import while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.seams import Seam
from ft_core.launch import trackers
from ft_core.launch.import_hook import when_imported
from ft_core.launch.trackers import Opening

log = logging.getLogger("ft_accelerate")

# ------------------------------------------------------------------ callbacks of Trainer

END_OF = {
    "on_init_end": "",
    "on_train_begin": "on_train_end",
    "on_epoch_begin": "on_epoch_end",
    "on_step_begin": "on_step_end",
}
"""Events that set something up, each with the one with which that ends."""
INTEGRATIONS = "transformers.integrations.integration_utils"
KEPT_ROWS = 1000
_MISSING = object()
_asked: list[bool] = [False]

CallEvent = Callable[..., Any]
"""transformers' own `CallbackHandler.call_event`."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `CallbackHandler.call_event`, with its arguments."""

    original: CallEvent
    handler: Any
    event: str
    args: Any
    state: Any
    control: Any
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call it; returns the control."""
        return self.original(
            self.handler, self.event, self.args, self.state, self.control, **self.kwargs
        )

    def to(self, *callbacks: Any) -> _Call:
        """The same call, which these callbacks alone hear."""
        handler = copy.copy(self.handler)
        handler.callbacks = list(callbacks)
        return replace(self, handler=handler)


@dataclass(slots=True)
class _Owed:
    """A hook that has been told that this is not the main process."""

    event: str
    callback: Any
    changed: dict[str, tuple[Any, Any]]
    """Attributes that it has changed: (before, after)."""

    def is_over(self, event: str) -> bool:
        """Whether `event` ends what the hook sets up. A training ends what its callback's own hook ends: the
        rest serves an evaluation or a prediction behind it."""
        if event != END_OF[self.event]:
            return False
        if event != "on_train_end":
            return True
        from transformers import TrainerCallback

        ends = getattr(type(self.callback), "on_train_end", None)
        return ends is not TrainerCallback.on_train_end

    def put_back(self) -> None:
        """What it has changed is as before, unless something else has changed it since."""
        attributes = _attributes(self.callback)
        for name, (before, after) in self.changed.items():
            if attributes.get(name, _MISSING) is not after:
                continue
            if before is _MISSING:
                del attributes[name]
            else:
                attributes[name] = before


class OwedHooks:
    """Hooks of the callbacks of one Trainer that this process owes. The loop's thread only."""

    def __init__(self) -> None:
        self._owed: list[_Owed] = []
        self._opening: Opening | None = None
        self._late: list[Any] = []
        """Callbacks that are being set up alongside the training."""
        self._failed: list[Any] = []

    def call(
        self,
        runtime: Runtime,
        original: CallEvent,
        handler: Any,
        event: str,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> Any:
        """`call_event` in any process."""
        call = _Call(original, handler, event, args, state, control, kwargs)
        if runtime.leader:
            self._pay(runtime, call)
        elif event in END_OF:
            return self._note(runtime, call)
        if self._owed:
            self._owed = [owed for owed in self._owed if not owed.is_over(event)]
        if not self._late:
            return call.run()
        late = self._call_later(runtime, call)
        return call.to(*(each for each in handler.callbacks if not _is_in(late, each))).run()

    def _note(self, runtime: Runtime, call: _Call) -> Any:
        """Call each callback's hook, and see which of them ask."""
        self._owed = [owed for owed in self._owed if owed.event != call.event]
        for callback in list(call.handler.callbacks):
            before, denied = dict(_attributes(callback)), runtime.leadership.denied
            together = runtime.done_together
            with _watched(call.state):
                call = replace(call, control=call.to(callback).run())
                asked = _asked[0]
            if runtime.done_together != together:
                continue  # it evaluates, say, in which Trainer asks: alone it would wait for its peers
            if asked or runtime.leadership.denied != denied:
                after = _attributes(callback)
                changed = {
                    name: (before.get(name, _MISSING), value)
                    for name, value in after.items()
                    if before.get(name, _MISSING) is not value
                }
                self._owed.append(_Owed(call.event, callback, changed))
                trackers.prepare([_tracker_of(callback)])
        return call.control

    def _pay(self, runtime: Runtime, call: _Call) -> None:
        """This is the main process now: what sets up runs, in the order in which it was called."""
        owed, self._owed = self._owed, []
        # The row of an event that is under way is in the history already.
        rows = list(call.state.log_history[: -1 if call.event == "on_log" else None])
        beside: list[Callable[[], None]] = []
        for each in owed:
            if not _is_in(call.handler.callbacks, each.callback):
                continue
            each.put_back()
            then = replace(call, event=each.event, state=copy.copy(call.state), kwargs={})
            sets_up = partial(self._set_up, then.to(each.callback), each.callback, rows)
            if not _is_tracker(each.callback):
                sets_up()
            else:
                beside.append(sets_up)
                if not _is_in(self._late, each.callback):
                    self._late.append(each.callback)
        if beside:
            if self._opening is not None:
                self._opening.wait()
            self._opening = runtime.leadership.open(partial(_each, beside), _unexpected)
        self._drop_failed(call.handler)

    def _set_up(self, call: _Call, callback: Any, rows: list[Any]) -> None:
        """Run one hook that is owed; `call`: to its callback alone. Perhaps in a thread."""

        def run() -> None:
            call.run()
            known = _stored_by(callback) if call.event == "on_train_begin" else None
            if known is not None:
                _write_again(call, rows, known)

        self._try(callback, call.event, run)

    def _try(self, callback: Any, event: str, run: Callable[[], object]) -> None:
        """Leave the callback out from here on if `run` raises."""
        if _is_in(self._failed, callback):
            return
        try:
            run()
        except Exception as error:  # a tracker's own errors are of any kind
            log.warning(
                "%s is left out from here on: this process is the main one now, and %s of it "
                "failed (%s: %s)",
                type(callback).__name__,
                event,
                type(error).__name__,
                error,
            )
            self._failed.append(callback)

    def _drop_failed(self, handler: Any) -> None:
        if self._failed:
            kept = [each for each in handler.callbacks if not _is_in(self._failed, each)]
            handler.callbacks[:] = kept

    def _call_later(self, runtime: Runtime, call: _Call) -> list[Any]:
        """Have the callbacks that are being set up hear of this event in their turn; returns them."""
        assert self._opening is not None
        late = self._late
        told = replace(
            call,
            state=copy.copy(call.state),
            control=copy.copy(call.control),
            kwargs={n: dict(v) if isinstance(v, dict) else v for n, v in call.kwargs.items()},
        )

        def run() -> None:
            for callback in late:
                self._try(callback, told.event, told.to(callback).run)

        if call.event == "on_train_end":
            self._opening.wait()
        if self._opening.call(run):
            return late
        self._late = []
        self._drop_failed(call.handler)
        go_on_here(runtime)
        return []


def _write_again(call: _Call, rows: list[Any], known: dict[str, int]) -> None:
    """Log what the main processes before had not written when they died, to the callback of `call`.

    `rows`: of Trainer's history, which heals. `known`: last step of each name that is stored.
    """
    state = call.state
    now = state.global_step, state.epoch
    try:
        for logged in rows[-KEPT_ROWS:]:
            step = logged["step"]
            missing = {n: v for n, v in logged.items() if n != "step" and step > known.get(n, -1)}
            state.global_step, state.epoch = step, logged.get("epoch")
            if missing:
                replace(call, event="on_log", kwargs={"logs": missing}).run()
    finally:
        state.global_step, state.epoch = now


_TRACKERS = {
    "TensorBoardCallback": "tensorboard",
    "WandbCallback": "wandb",
    "MLflowCallback": "mlflow",
}


def _tracker_of(callback: Any) -> str:
    """The tracker that a callback writes to, of those whose stores can be read; "": another, or none."""
    kinds = (_TRACKERS.get(cls.__name__, "") for cls in type(callback).__mro__)
    return next(filter(None, kinds), "")


def _is_tracker(callback: Any) -> bool:
    """Whether it is one of transformers' own for trackers, which need nothing of the loop's thread."""
    return any(cls.__module__ == INTEGRATIONS for cls in type(callback).__mro__)


def _stored_by(callback: Any) -> dict[str, int] | None:
    """The last step of each name of Trainer's that a callback's tracker has stored; None: it can't be
    asked."""
    tracker, found = _tracker_of(callback), None
    if tracker == "mlflow":
        import mlflow

        run = mlflow.active_run()
        return run and trackers.mlflow_steps(mlflow.MlflowClient(), run.info.run_id)
    if tracker == "tensorboard" and callback.tb_writer is not None:
        found = trackers.tensorboard_steps(callback.tb_writer.log_dir)
    elif tracker == "wandb" and callback._wandb.run is not None:
        found = trackers.wandb_steps(callback._wandb.run, "train/global_step")
    if found is None:
        return None
    from transformers.integrations.integration_utils import rewrite_logs

    names = {f"eval_{n.removeprefix('eval/')}" for n in found if n.startswith("eval/")}
    names |= {n.removeprefix("train/") for n in found if n.startswith("train/")}
    stored = {name: next(iter(rewrite_logs({name: 0}))) for name in names}
    return {name: found[stored[name]] for name in names if stored[name] in found}


def owed_hooks(handler: Any) -> OwedHooks:
    """Those of a Trainer's `CallbackHandler`."""
    found = _of_handler.get(handler)
    if found is None:
        found = _of_handler[handler] = OwedHooks()
    return found


_of_handler: weakref.WeakKeyDictionary[Any, OwedHooks] = weakref.WeakKeyDictionary()


def _attributes(callback: Any) -> dict[str, Any]:
    return getattr(callback, "__dict__", {})


def _is_in(callbacks: Sequence[Any], callback: Any) -> bool:
    return any(each is callback for each in callbacks)


def _each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _unexpected(error: Exception) -> None:
    log.error("trackers could not be opened", exc_info=error)


@contextmanager
def _watched(state: Any) -> Iterator[None]:
    """Whether the state is asked for the main process is in `_asked`."""
    cls: Any = type(state)
    _asked[0] = False
    state.__class__ = _watching(cls)
    try:
        yield
    finally:
        state.__class__ = cls


@cache
def _watching(cls: Any) -> type:
    """`cls`, whose instances note that they are asked whether this is the main process."""

    def noting(name: str) -> property:
        def get(self: Any) -> Any:
            _asked[0] = True
            return vars(self)[name]

        def put(self: Any, value: Any) -> None:
            vars(self)[name] = value

        return property(get, put)

    names = ("is_world_process_zero", "is_local_process_zero")
    return type(cls.__name__, (cls,), {name: noting(name) for name in names})


# ------------------------------------------------------------------ trackers that name their runs


def watch() -> None:
    """Hook into trackers when (or if) they are imported; idempotent."""
    when_imported("wandb", _on_wandb)
    when_imported("mlflow", _on_mlflow)
    when_imported(INTEGRATIONS, _on_integrations)


def _on_wandb(module: ModuleType) -> None:
    _put((Seam("wandb", "init", (), _wandb_init), Seam("wandb", "Run.finish", (), _over("wandb"))))


def _on_mlflow(module: ModuleType) -> None:
    _put(
        (
            Seam("mlflow", "start_run", ("run_id",), _mlflow_start_run),
            Seam("mlflow", "end_run", (), _over("mlflow")),
        )
    )


def _on_integrations(module: ModuleType) -> None:
    begin = "TensorBoardCallback._init_summary_writer"
    _put((Seam(INTEGRATIONS, begin, ("self", "args"), _tensorboard_begin),))


def _put(names: tuple[Seam, ...]) -> None:
    try:
        seams.put(names, f"another version of {names[0].module}")
    except RuntimeError as error:
        log.warning("%s: each main process begins a run of its own", error)


@while_active
def _wandb_init(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
    if not runtime.leader:
        return original(*args, **kwargs)
    run = original(*args, **runtime.runs.for_wandb(kwargs, os.environ))
    runtime.runs.opened("wandb", str(run.id))
    return run


@while_active
def _mlflow_start_run(
    runtime: Runtime, original: Any, run_id: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if not runtime.leader:
        return original(run_id, *args, **kwargs)
    given = runtime.runs.for_mlflow({"run_id": run_id, **kwargs}, os.environ)
    run = original(given.pop("run_id"), *args, **given)
    if "mlflow" not in runtime.runs.mine:  # else it is one within that one
        runtime.runs.opened("mlflow", str(run.info.run_id))
    return run


@while_active
def _tensorboard_begin(
    runtime: Runtime, original: Any, self: Any, args: Any, log_dir: str | None = None
) -> None:
    """A run is a folder, which has the time in its name unless the script names it. It is not over with the
    training: an evaluation behind that is logged there, too. Another Trainer has an `output_dir` of its own."""
    known = runtime.runs.to_continue("tensorboard")
    if known is not None and Path(args.output_dir).absolute() in Path(known).absolute().parents:
        log_dir = known
    if not hasattr(self, "logging_dir"):  # transformers 4
        original(self, args, log_dir)
    else:
        self.logging_dir = log_dir or self.logging_dir
        original(self, args)
    if self.tb_writer is not None:
        runtime.runs.opened("tensorboard", str(self.tb_writer.log_dir))


def go_on_here(runtime: Runtime) -> None:
    """A thread has opened trackers for this one. An MLflow run belongs to a thread: continue it here."""
    mlflow, run = sys.modules.get("mlflow"), runtime.runs.mine.get("mlflow")
    if mlflow is not None and run is not None and mlflow.active_run() is None:
        mlflow.start_run(run_id=run)


def _over(tracker: str) -> Callable[[Any], Any]:
    @while_active
    def over(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
        runtime.runs.closed(tracker)
        return original(*args, **kwargs)

    return over
