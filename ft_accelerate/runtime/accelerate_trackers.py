"""Accelerate's trackers (`init_trackers`, `log`) in a process that may become the main one.

They start in the main process. If it dies they start in the next one, when that first uses them: in a
thread of its own, since it may take seconds.

| this process | `log` | `get_tracker` |
|---|---|---|
| has been the main one from the beginning | the trackers' own | theirs |
| is not the main one, or was evicted while it was stopped | the row is kept | a stand-in, which does nothing |
| is it now, and its trackers are being opened | waits | waits for them |
| ... are open | the trackers' own | theirs |

One that becomes the main one again goes on with its own trackers, as if it opened them. A tracker of the
script's own may do in `__init__` what only the main process does: that is done where it is opened.

What the dead process had not stored is logged again from the rows that were kept: those with a step,
of a script that calls `log` in all processes, as Accelerate's own examples do.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker
from torch.utils.weak import WeakIdKeyDictionary

from ft_accelerate.runtime.process import active, while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.succession import go_on_here
from ft_core.launch import trackers
from ft_core.launch.trackers import Opening

log = logging.getLogger("ft_accelerate")

KEPT_ROWS = 1000
"""In each process: far more than any tracker holds back."""
Row = tuple[dict[str, Any], int]
Rows = list[Row]


class NextTrackers:
    """The trackers of one Accelerator. The loop's thread; `_catch_up` runs in a thread of its own.

    `begun`: this is the main process, and has opened them.
    """

    def __init__(
        self,
        runtime: Runtime,
        accelerator: Any,
        init: Callable[..., None],
        project: str,
        config: Any = None,
        init_kwargs: Any = None,
        *,
        begun: bool = False,
    ) -> None:
        self._runtime, self._init, self._project = runtime, init, project
        self._config, self._init_kwargs = config, init_kwargs
        self._accelerator: weakref.ref[Any] = weakref.ref(accelerator)
        self._rows: deque[Row] = deque(maxlen=KEPT_ROWS)
        self._opening: Opening | None = None
        self._begun = begun
        self._behind = not begun
        """Whether another process may have written since this one has."""
        if not begun:
            trackers.prepare(map(_name_of, accelerator.log_with))

    def log(self, write: Callable[[], None], values: Any, step: int | None) -> None:
        """The script logs a row, which `write` does."""
        if not self._leads():
            self._behind = True
            if self._runtime.live and step is not None:
                self._rows.append((dict(values), step))
            return
        opening = self._open()
        if opening is None or not opening.call(write):
            go_on_here(self._runtime)
            write()

    def await_open(self) -> bool:
        """Open the trackers if this is the main process, and wait for them. False: it is not."""
        if not self._leads():
            return False
        opening = self._open()
        if opening is not None:
            opening.wait()
        go_on_here(self._runtime)
        return True

    def _leads(self) -> bool:
        return self._runtime.leadership.still(self._runtime.manager)

    def _open(self) -> Opening | None:
        if self._behind and (self._opening is None or self._opening.over):
            self._behind, rows = False, list(self._rows)
            self._rows.clear()
            catch_up = partial(self._catch_up, rows)
            self._opening = self._runtime.leadership.open(catch_up, self._fail)
        return self._opening

    def _catch_up(self, rows: Rows) -> None:
        accelerator: Any = self._accelerator()
        if not self._begun:
            self._begun = True
            _make(accelerator)
            self._init(accelerator, self._project, None, self._init_kwargs)
            for tracker in accelerator.trackers:
                if self._config is not None and not _has_config(tracker):
                    tracker.store_init_configuration(self._config)
        for tracker in accelerator.trackers:
            known = _stored_by(tracker)
            if known is not None:
                self._write_again(tracker, known, rows)

    def _write_again(self, tracker: Any, known: dict[str, int], rows: Rows) -> None:
        """Log what the tracker lacks. `known`: last step of each name that is stored."""
        for values, step in rows:
            missing = {
                name: value
                for name, value in values.items()
                if hasattr(value, "__float__") and step > known.get(name, -1)
            }
            if missing:
                tracker.log(missing, step=step)

    def _fail(self, error: Exception) -> None:
        accelerator = self._accelerator()
        if accelerator is not None:
            accelerator.trackers.clear()
        log.warning(
            "nothing is logged to trackers from here on: this process is the main one now, and "
            "init_trackers failed (%s: %s)",
            type(error).__name__,
            error,
        )


def _name_of(tracker: Any) -> str:
    """Of one of Accelerate's `LoggerType`, whose own name is in capitals, or of a tracker."""
    return str(getattr(tracker, "value", None) or tracker.name)


def _has_config(tracker: Any) -> bool:
    """TensorBoard shows a run of its own for each time that the configuration is stored."""
    return tracker.name == "tensorboard" and any(Path(tracker.logging_dir).glob("*/hparams.yml"))


def _stored_by(tracker: Any) -> dict[str, int] | None:
    """The last step of each name that a tracker has stored; None: it can't be asked."""
    if tracker.name == "tensorboard":
        return trackers.tensorboard_steps(tracker.logging_dir)
    if tracker.name == "wandb":
        return trackers.wandb_steps(tracker.run, "_step")
    if tracker.name == "mlflow":
        import mlflow

        return trackers.mlflow_steps(mlflow.MlflowClient(), tracker.active_run.info.run_id)
    return None


class StandIn(GeneralTracker):  # type: ignore[misc]
    """What `get_tracker` returns where this is not the main process: the tracker, once it is."""

    def __init__(self, find: Callable[[], Any]) -> None:
        super().__init__(_blank=True)
        self._find = find

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        found = self._find()
        return _nothing if found is None else getattr(found, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A method of a tracker where this is not the main process."""


# ------------------------------------------------------------------ what stands in Accelerator

_next: weakref.WeakKeyDictionary[Any, NextTrackers] = weakref.WeakKeyDictionary()
"""Of Accelerators for which the script has called `init_trackers` in this process."""
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_unmade: MutableMapping[Any, Callable[[], None]] = WeakIdKeyDictionary()
"""Of trackers whose `__init__` has left out what only the main process does: what does it."""


class StateOfTracker:
    """`PartialState()` for a tracker's decorated methods: they ask it what to call here."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def on_main_process(self, function: Any) -> Any:
        """The function, or what does nothing but keep an `__init__` for later."""
        found = self._state.on_main_process(function)
        if active() is None or found is function or function.__name__ != "__init__":
            return found

        def keep(tracker: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(tracker, GeneralTracker):
                itself = weakref.ref(tracker)
                _unmade[tracker] = lambda: function(itself(), *args, **kwargs)

        return keep


def state_of_trackers(state: Any) -> Any:
    """A `Seam.replace` for the class `PartialState` in the module of the trackers."""
    return lambda: StateOfTracker(state())


def _make(accelerator: Any) -> None:
    """This is the main process, which it was not where the script has made its trackers."""
    for tracker in accelerator.log_with:
        make = _unmade.pop(tracker, None)
        if make is not None:
            make()


@while_active
def init_trackers(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Start the trackers in the main process; the others keep the arguments."""
    _next.pop(self, None)
    main = bool(self.is_main_process)
    if main:
        _make(self)
        original(self, *args, **kwargs)
    given = dict(zip(("project_name", "config", "init_kwargs"), args, strict=False)) | kwargs
    project = given.pop("project_name")
    _next[self] = NextTrackers(runtime, self, original, project, **given, begun=main)


@while_active
def log_row(
    runtime: Runtime,
    original: Any,
    self: Any,
    values: Any,
    step: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write a row in the main process; the others keep it (see the module's docstring)."""

    def write() -> None:
        original(self, values, step, *args, **kwargs)

    found = _next.get(self)
    if found is not None:
        found.log(write, values, step)
        return
    write()
    if self.log_with and not self.trackers and runtime.leader and self not in _warned:
        _warned.add(self)
        if runtime.leadership.denied:
            log.warning(
                "nothing is logged to trackers from here on: this process is the main one now, and the "
                "script has called init_trackers in the main process only. Call it in all processes: "
                "those that are not the main one open nothing"
            )


@while_active
def get_tracker(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The tracker, or a `StandIn` where this is not the main process."""
    found = _next.get(self)
    if found is None:
        return original(self, *args, **kwargs)

    def find() -> Any:
        return original(self, *args, **kwargs) if found.await_open() else None

    own = find()
    return StandIn(find) if own is None else own


def finish(accelerator: Any) -> None:
    """Before `end_training`: what a dead main process had not stored is stored."""
    found = _next.get(accelerator)
    if found is not None:
        found.await_open()
