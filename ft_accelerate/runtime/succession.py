"""What a process left undone because it was not the main one, and does when it becomes the main one.

Callbacks of Trainer set themselves up in the main process only: they ask whether this is the main
process when training begins, and open a progress bar or a run of a tracker. If the main process dies,
the next one has to do that before anything is logged. Which callbacks these are is listed nowhere:
a hook is owed if it asked, in whatever way, and the answer was no.

A hook may also note that it has run (`_initialized`). So what it has changed in its callback is put
back before it runs again, unless something else has changed it since.

Accelerate's trackers start in the main process only, too. They start in the next one when it first
uses them. Trackers that name their runs (wandb, MLflow) continue that of the main process before
(`tracker_runs`). A tracker that cannot be set up here is left out, and the log says so: it must not
end a training that has survived the loss of a machine.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from ft_accelerate import seams
from ft_accelerate.runtime.process import while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.seams import Seam
from ft_core.launch import stored_runs
from ft_core.launch.import_hook import when_imported

log = logging.getLogger("ft_accelerate")

# ------------------------------------------------------------------ callbacks of Trainer

END_OF = {
    "on_init_end": "",
    "on_train_begin": "on_train_end",
    "on_epoch_begin": "on_epoch_end",
    "on_step_begin": "on_step_end",
}
"""Events that set something up, each with the one with which that ends."""
KEPT_ROWS = 1000
_MISSING = object()
_asked: list[bool] = [False]

CallEvent = Callable[..., Any]
"""transformers' own `CallbackHandler.call_event`."""


@dataclass(slots=True)
class _Owed:
    """A hook that has been told that this is not the main process."""

    event: str
    callback: Any
    changed: dict[str, tuple[Any, Any]]
    """Attributes that it has changed: (before, after)."""


class OwedHooks:
    """Hooks of the callbacks of one Trainer that this process owes. The loop's thread only."""

    def __init__(self) -> None:
        self._owed: list[_Owed] = []

    def call(
        self, runtime: Runtime, original: CallEvent, handler: Any, event: str, args: Any,
        state: Any, control: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`call_event` in any process."""
        if runtime.leader:
            self._pay(original, handler, event, args, state, control)
        elif event in END_OF:
            return self._note(runtime, original, handler, event, args, state, control, **kwargs)
        if self._owed:
            self._owed = [owed for owed in self._owed if END_OF[owed.event] != event]
        return original(handler, event, args, state, control, **kwargs)

    def _note(
        self, runtime: Runtime, original: CallEvent, handler: Any, event: str, args: Any,
        state: Any, control: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Call each callback's hook, and see which of them ask."""
        self._owed = [owed for owed in self._owed if owed.event != event]
        for callback in list(handler.callbacks):
            before, denied = dict(_attributes(callback)), runtime.denied
            with _watched(state), _only(handler, callback):
                control = original(handler, event, args, state, control, **kwargs)
                asked = _asked[0]
            if asked or runtime.denied != denied:
                after = _attributes(callback)
                changed = {
                    name: (before.get(name, _MISSING), value)
                    for name, value in after.items()
                    if before.get(name, _MISSING) is not value
                }
                self._owed.append(_Owed(event, callback, changed))
        return control

    def _pay(
        self, original: CallEvent, handler: Any, event: str, args: Any, state: Any, control: Any
    ) -> None:
        """This is the main process now: what sets up runs, in the order in which it was called."""
        owed, self._owed = self._owed, []
        for each in owed:
            if all(each.callback is not callback for callback in handler.callbacks):
                continue
            attributes = _attributes(each.callback)
            for name, (before, after) in each.changed.items():
                if attributes.get(name, _MISSING) is not after:
                    continue
                if before is _MISSING:
                    del attributes[name]
                else:
                    attributes[name] = before
            try:
                with _only(handler, each.callback):
                    original(handler, each.event, args, state, control)
                    if each.event == "on_train_begin":
                        # The row of an event that is under way is in the history already.
                        rows = state.log_history[: -1 if event == "on_log" else None]
                        known = _stored_by(each.callback)
                        if known is not None:
                            _write_again(original, handler, args, state, control, rows, known)
            except Exception as error:  # a tracker's own errors are of any kind
                name = type(each.callback).__name__
                log.warning(
                    "%s is left out from here on: this process is the main one now, and %s of it "
                    "failed (%s: %s)",
                    name, each.event, type(error).__name__, error,
                )  # fmt: skip
                handler.callbacks[:] = [c for c in handler.callbacks if c is not each.callback]


def _write_again(
    original: CallEvent, handler: Any, args: Any, state: Any, control: Any, rows: list[Any],
    known: dict[str, int],
) -> None:  # fmt: skip
    """Log what the main processes before had not written when they died.

    `rows`: of Trainer's history, which heals. `known`: last step of each name that is stored.
    """
    now = state.global_step, state.epoch
    try:
        for logged in rows[-KEPT_ROWS:]:
            step = logged["step"]
            missing = {n: v for n, v in logged.items() if n != "step" and step > known.get(n, -1)}
            state.global_step, state.epoch = step, logged.get("epoch")
            if missing:
                original(handler, "on_log", args, state, control, logs=missing)
    finally:
        state.global_step, state.epoch = now


def _stored_by(callback: Any) -> dict[str, int] | None:
    """The last step of each name of Trainer's that a callback's tracker has stored; None: it writes at
    once, or can't be asked."""
    kinds = {cls.__name__ for cls in type(callback).__mro__}
    if "WandbCallback" in kinds:
        import wandb
        from transformers.integrations.integration_utils import rewrite_logs

        if wandb.run is None:
            return None
        found = stored_runs.wandb_steps(wandb.run, "train/global_step")
        names = {f"eval_{n.removeprefix('eval/')}" for n in found if n.startswith("eval/")}
        names |= {n.removeprefix("train/") for n in found if n.startswith("train/")}
        stored = {name: next(iter(rewrite_logs({name: 0}))) for name in names}
        return {name: found[stored[name]] for name in names if stored[name] in found}
    if "MLflowCallback" in kinds:
        import mlflow

        run = mlflow.active_run()
        return run and stored_runs.mlflow_steps(mlflow.MlflowClient(), run.info.run_id)
    return None


def owed_hooks(handler: Any) -> OwedHooks:
    """Those of a Trainer's `CallbackHandler`."""
    found = _of_handler.get(handler)
    if found is None:
        found = _of_handler[handler] = OwedHooks()
    return found


_of_handler: weakref.WeakKeyDictionary[Any, OwedHooks] = weakref.WeakKeyDictionary()


def _attributes(callback: Any) -> dict[str, Any]:
    return getattr(callback, "__dict__", {})


@contextmanager
def _only(handler: Any, callback: Any) -> Iterator[None]:
    """The handler calls this callback alone."""
    all_of_them = handler.callbacks
    handler.callbacks = [callback]
    try:
        yield
    finally:
        handler.callbacks = all_of_them


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


# ------------------------------------------------------------------ Accelerate's trackers

_waiting: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""Accelerators whose trackers start when their process becomes the main one."""


@while_active
def init_trackers(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if self.is_main_process:
        _waiting.pop(self, None)
        original(self, *args, **kwargs)
    else:
        _waiting[self] = (args, kwargs)


@while_active
def with_trackers(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """For methods of Accelerator that use its trackers."""
    if self in _waiting and runtime.leader:
        given, named = _waiting.pop(self)
        try:
            self.init_trackers(*given, **named)
        except Exception as error:  # a tracker's own errors are of any kind
            self.trackers.clear()
            log.warning(
                "nothing is logged to trackers from here on: this process is the main one now, and "
                "init_trackers failed (%s: %s)",
                type(error).__name__, error,
            )  # fmt: skip
    return original(self, *args, **kwargs)


# ------------------------------------------------------------------ trackers that name their runs


def watch() -> None:
    """Hook into trackers when (or if) they are imported; idempotent."""
    when_imported("wandb", _on_wandb)
    when_imported("mlflow", _on_mlflow)


def _on_wandb(module: ModuleType) -> None:
    _put((Seam("wandb", "init", (), _wandb_init), Seam("wandb", "Run.finish", (), _over("wandb"))))


def _on_mlflow(module: ModuleType) -> None:
    _put(
        (
            Seam("mlflow", "start_run", ("run_id",), _mlflow_start_run),
            Seam("mlflow", "end_run", (), _over("mlflow")),
        )
    )


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


def _over(tracker: str) -> Callable[[Any], Any]:
    @while_active
    def over(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
        runtime.runs.closed(tracker)
        return original(*args, **kwargs)

    return over
