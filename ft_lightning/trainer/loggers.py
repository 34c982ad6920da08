"""The loggers of one fit in one process: the leader writes, and the others could go on.

| this process | its rows (`log_metrics`) | other methods | `experiment` |
|---|---|---|---|
| waits for the first quorum | wait: the leader is not known | nothing | a dummy |
| follows | are kept only | the logger's own, which do nothing | the logger's dummy |
| leads, and the logger is being opened | wait | wait | waits |
| leads | the logger's own | the logger's own | the logger's own |
| led, and was stopped meanwhile | as one that follows | as one that follows | as one that follows |
| has left the others, which go on | nothing | nothing | a dummy |

The first leader opens its loggers as under stock `ddp`: in the loop's thread, where an error ends the
fit. So does each next one while no second step is made: where none of them can open a logger (a folder that
can't be written), the job ends, too. Later, when leadership moves, all others would wait for that. So the
next leader opens them in a thread of its own, and its calls wait in order. It first asks the store how far the dead leader had come
(`_last_steps`), and writes what is missing from the rows that it has kept. Each process keeps its last rows, the
leader, too: a peer that heals takes them (`Loggers.rows`), since that may lead before all of them are in the store.

All write to one place: a version of a directory, or a run that is continued. Which one that is the
leader says with the commit of a step, once in each quorum; and it is part of the state that heals.

To the file of a CSVLogger one leader after another appends. A leader may be killed while it does.

| it dies | what it leaves | the next leader |
|---|---|---|
| while it appends rows | a half row at the end | cuts it off, and writes that row from those that it has kept |
| while new columns are added | the file as it was, and a draft | removes the draft |
| while it opens the file | the file under another name | gives it its name back |

Lightning's own writer begins by deleting the file, and adds columns by writing it anew, in its place: all
rows before would be lost with the process.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from ft_core.launch import trackers
from ft_core.launch.trackers import Opening
from ft_lightning.trainer.batches import adopt, release
from lighthouse.files import remove_drafts, replace_whole

log = logging.getLogger("ft_lightning")

KEPT_ROWS = 1000
"""Of each logger, in each process: far more than any logger holds back."""
METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize")
MAX_PLACES = 12
"""Loggers whose places travel with a commit, which has room for 1,024 bytes."""


class Part(Enum):
    """What this process does with a logger."""

    WAITS = "waits"
    FOLLOWS = "follows"
    LEADS = "leads"
    LEFT = "left"


class Relay:
    """One logger. Made and asked in the loop's thread; `_open` runs in a thread of its own.

    Raises TypeError for a logger whose class has no subclasses.
    """

    def __init__(
        self,
        logger: Any,
        dummy: Callable[[], Any],
        still_leads: Callable[[], bool],
        counts: Callable[[], bool],
    ) -> None:
        release(logger)
        self.logger, self._cls, self._dummy = logger, type(logger), dummy
        self._still_leads, self._counts = still_leads, counts
        self.part = Part.WAITS
        self._written = -1  # size of a CSV file when this process last wrote to it
        self._rows: deque[tuple[dict[str, Any], Any]] = deque(maxlen=KEPT_ROWS)
        self._opening: Opening | None = None
        self._last: dict[str, int] | None = None  # while it is opened: of each name that is stored
        adopt(logger, self._methods)

    def _methods(self, cls: Any) -> dict[str, Any]:
        relay = self

        def method(name: str) -> Any:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return relay.call(name, args, kwargs)

            return call

        def reduce(self: Any, protocol: Any) -> Any:  # a copy, or a pickle, is of its own class
            make, given, *rest = cls.__reduce_ex__(self, protocol)
            return (make, tuple(cls if each is type(self) else each for each in given), *rest)

        found: dict[str, Any] = {name: method(name) for name in METHODS if hasattr(cls, name)}
        if hasattr(cls, "experiment"):
            found["experiment"] = property(lambda self: relay.experiment())
        return {**found, "__reduce_ex__": reduce}

    # ------------------------------------------------------------------ what Lightning calls

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        """A method of the logger."""
        if self._writes() and not self._still_leads():
            self.follow()
        if name == "log_metrics" and not self._counts():
            return None
        if self.part is not Part.LEFT and name == "log_metrics":
            row = _row(*args, **kwargs)
            if row is not None:
                self._rows.append(row)
        if self._is_silent():
            return None
        if self._opening is not None and not self._opening.here:
            later = partial(self._call, name, args, kwargs)
            if name != "finalize" and self._opening.call(later):
                return None
            self._opening.wait()
            self._last = None  # what comes from here on is new
            if self._is_silent():  # it could not be opened
                return None
        return self._call(name, args, kwargs)

    def experiment(self) -> Any:
        """What the logger's `experiment` is."""
        if self._is_silent():
            return self._dummy()
        self.await_open()
        own: Any = super(type(self.logger), self.logger)
        return own.experiment

    def await_open(self) -> None:
        """Until the logger is open, if it is being opened."""
        if self._opening is not None:
            self._opening.wait()

    @property
    def opens(self) -> bool:
        """Whether the logger is being opened."""
        return self._opening is not None and not self._opening.over

    def _is_silent(self) -> bool:
        return self.part in (Part.WAITS, Part.LEFT)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        if self._last is not None and name == "log_metrics":
            row = _row(*args, **kwargs)
            missing = row and self._missing(*row)
            if not row or not missing:
                return None
            args, kwargs = (missing, row[1]), {}
        writes = name == "save" and self.part is not Part.FOLLOWS
        if not writes or _kind_of(self.logger) != "CSVLogger":
            return getattr(self._cls, name)(self.logger, *args, **kwargs)
        path = metrics_path(self.logger)
        if size_of(path) != self._written:  # another leader may have added columns
            read_columns(self.logger, path)
        add_columns(self.logger, path)
        try:
            return getattr(self._cls, name)(self.logger, *args, **kwargs)
        finally:
            self._written = size_of(path)

    def _missing(self, metrics: Mapping[str, Any], step: Any) -> dict[str, Any]:
        """What the store lacks of a row."""
        assert self._last is not None
        known = self._last
        names = {name: _stored_name(self.logger, name) for name in metrics}
        new = [n for n in metrics if (step or 0) > known.get(names[n], -1)]
        if _kind_of(self.logger) == "CSVLogger" and any(name != "epoch" for name in new):
            return dict(metrics)  # a row is one line
        return {name: metrics[name] for name in new}

    # ------------------------------------------------------------------ leadership

    def follow(self) -> None:
        """Another process writes."""
        if self._writes() and _kind_of(self.logger) in ("CSVLogger", "TensorBoardLogger"):
            # Others write to its files: they are opened anew if this process leads again.
            close = getattr(getattr(self.logger, "_experiment", None), "close", None)
            if close is not None:
                close()
            self.logger._experiment = None
        self.part = Part.FOLLOWS

    def lead(self, *, takes_over: bool, begins: bool = False) -> None:
        """This process writes from now on."""
        if self.part is Part.LEADS:
            return
        self.await_open()  # that it was opening when it last lost the lead
        self.part = Part.LEADS
        opens = partial(self._open, list(self._rows))
        if takes_over and begins:
            opens()
            self._last = None
        elif takes_over:
            self._opening = Opening("ft_lightning logger", opens, self._fail)

    def begin(self) -> None:
        """This process is the first to write in this fit: write what it logged before the first quorum."""
        if self._rows:
            self._last = _last_steps(self.logger)  # of a fit that goes on
            for row in self._rows:
                self._call("log_metrics", row, {})
            self._last = None

    def rows(self) -> list[Any]:
        """The rows that are kept and consist of plain numbers, which travel to a peer that heals."""
        return [[row, step] for row, step in self._rows if _is_plain(row, step)]

    def take_rows(self, rows: Sequence[Any]) -> None:
        """Keep those of a peer, which has logged while this process was away."""
        if self.part is not Part.LEFT:
            self._rows = deque(((row, step) for row, step in rows), maxlen=KEPT_ROWS)

    def _open(self, kept: Sequence[Any]) -> None:
        keep_metrics(self.logger)
        if hasattr(self._cls, "experiment"):
            _ = self.logger.experiment
        self._last = _last_steps(self.logger)
        for row in kept if self._last is not None else ():
            self._call("log_metrics", row, {})
        if hasattr(self._cls, "save"):
            self._call("save", (), {})

    def _fail(self, error: Exception) -> None:
        self.part = Part.LEFT
        self._rows.clear()
        log.warning(
            "%s logs nothing from here on: this process leads now, and could not open it (%s: %s)",
            self._cls.__name__,
            type(error).__name__,
            error,
        )

    def _writes(self) -> bool:
        return self.part is Part.LEADS and not self.opens

    def before_leaving(self) -> None:
        """The others may go on after the next vote: write what this process holds back."""
        if self._writes() and hasattr(self._cls, "save"):
            self._call("save", (), {})
        if _kind_of(self.logger) == "WandbLogger":  # which must have ended when another begins
            self.leave()

    def leave(self) -> None:
        """This process ends, and the others go on: it writes nothing more."""
        writes = self._writes()
        experiment = getattr(self.logger, "_experiment", None)
        if writes and _kind_of(self.logger) == "WandbLogger" and experiment:
            experiment.finish()
        self.part = Part.LEFT

    def end(self) -> None:
        """The fit is over: the logger is itself again."""
        if self.part is not Part.LEFT:
            self.await_open()
            release(self.logger)


def _row(metrics: Any = None, step: Any = None, *rest: Any) -> tuple[dict[str, Any], Any] | None:
    return (dict(metrics), step) if isinstance(metrics, Mapping) else None


def _is_plain(row: Mapping[str, Any], step: Any) -> bool:
    return all(type(each) in (int, float) for each in (*row.values(), step or 0))


# ---------------------------------------------------------------------- all of a fit


class Loggers:
    """The loggers of one fit (`trainer`), or of a Fabric. The loop's thread."""

    def __init__(
        self,
        trainer: Any,
        dummy: Callable[[], Any],
        still_leads: Callable[[], bool] = lambda: True,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        """`still_leads()`: of this process, which has been the leader. `counts()`: whether what is logged now
        is of the training.

        Raises TypeError for a logger whose class has no subclasses; then none is changed."""
        self._trainer = trainer
        self._relays: list[Relay] = []
        self._leads = self._untold = False
        try:
            for logger in trainer.loggers:
                self._relays.append(Relay(logger, dummy, still_leads, counts))
                trackers.prepare([_TRACKERS.get(_kind_of(logger), "")])
        except TypeError:
            self.end()
            raise

    def in_quorum(self, leads: bool, *, takes_over: bool, begins: bool = False) -> None:
        """Membership has changed, and with it perhaps the leader. `begins`: at most one step has been made
        (the one before which the first leader has failed), so that little is lost by an error: raises what a
        logger raises that can't be opened."""
        self._leads, self._untold = leads, True
        for relay in self._relays:
            if relay.part is Part.LEFT:
                continue
            if leads:
                relay.lead(takes_over=takes_over, begins=begins)
            else:
                relay.follow()

    def begin(self) -> None:
        """As `Relay.begin`, of all."""
        for relay in self._relays:
            relay.begin()

    def before_leaving(self) -> None:
        """As `Relay.before_leaving`, of all."""
        for relay in self._relays:
            relay.before_leaving()

    def leave(self) -> None:
        """As `Relay.leave`, of all."""
        for relay in self._relays:
            relay.leave()

    def end(self) -> None:
        """As `Relay.end`, of all."""
        for relay in self._relays:
            relay.end()

    def rows(self) -> list[Any]:
        """As `Relay.rows`, of each."""
        return [relay.rows() for relay in self._relays]

    def take_rows(self, told: Sequence[Any]) -> None:
        """As `Relay.take_rows`, of each."""
        for relay, rows in zip(self._relays, told, strict=False):
            relay.take_rows(rows)

    def news(self) -> list[Any] | None:
        """What the leader adds to its vote: where it writes. None: all members of this quorum know."""
        if not (self._leads and self._untold):
            return None
        return log_places(self._trainer)[:MAX_PLACES]

    def hear(self, told: list[Any]) -> None:
        """What came with a commit."""
        if not self._leads:
            adopt_log_places(self._trainer, told)
        elif all(not relay.opens and is_known(relay.logger) for relay in self._relays):
            self._untold = False


def log_places(trainer: Any) -> list[Any]:
    """Where each logger writes, as its attributes that say so."""
    return [_place(logger) for logger in trainer.loggers]


def _place(logger: Any) -> dict[str, Any]:
    found = vars(logger)
    if _has_version(logger):
        return {"_version": logger.version}
    place = {name: found[name] for name in ("_id", "_run_id") if found.get(name) is not None}
    run = getattr(found.get("_experiment"), "id", None)
    if "_id" in found and isinstance(run, str):
        place["_id"] = run
    return place


def is_known(logger: Any) -> bool:
    """Whether `_place` has all that others need: a run has an id once the logger is used."""
    names = vars(logger).keys() & {"_id", "_run_id"}
    return not names or not names.isdisjoint(_place(logger))


def adopt_log_places(trainer: Any, told: Sequence[Any]) -> None:
    """Write to the leader's directories and runs; a process would choose, or begin, others. Checkpoints go along: a
    callback that was set up for `trainer.validate` before the fit has its folder from that."""
    callbacks = getattr(trainer, "checkpoint_callbacks", ())  # a Fabric has none
    folder = _checkpoint_folder(trainer) if callbacks else ""
    for logger, place in zip(trainer.loggers, told, strict=False):
        found = vars(logger)
        if found.get("_experiment") is not None or found.get("_initialized"):
            continue
        for name in place.keys() & found.keys():
            found[name] = place[name]
        if "_id" in place and isinstance(found.get("_wandb_init"), dict):
            found["_wandb_init"]["id"] = place["_id"]
    for callback in callbacks:
        if folder and getattr(callback, "dirpath", None) == folder:
            callback.dirpath = _checkpoint_folder(trainer)


def _checkpoint_folder(trainer: Any) -> str:
    """Where a ModelCheckpoint saves that was not told; "": it does not follow from a version of a directory."""
    logger = next(iter(trainer.loggers), None)
    if logger is None or not _has_version(logger):
        return ""
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    root = trainer.default_root_dir if logger.save_dir is None else logger.save_dir
    return os.path.join(root, str(logger.name), version, "checkpoints")


def _has_version(logger: Any) -> bool:
    names = ("_version", "_experiment")
    return all(name in vars(logger) for name in names) and hasattr(logger, "log_dir")


def released(trainer: Any) -> None:
    """Give all loggers their own classes back, whatever has changed them."""
    for logger in trainer.loggers:
        release(logger)


_TRACKERS = {
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
}


def _kind_of(logger: Any) -> str:
    """The Lightning class of this logger; "": another one, about which nothing is known."""
    known = ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger")
    return next((cls.__name__ for cls in type(logger).__mro__ if cls.__name__ in known), "")


def _last_steps(logger: Any) -> dict[str, int] | None:
    """The last step of each metric in the store of an open logger; None: it can't be asked. Any thread.

    A logger writes in the order of steps, and may hold rows back in memory. So what is missing of a
    metric is what follows its last step in the store.
    """
    kind = _kind_of(logger)
    if kind == "CSVLogger":
        return steps_in(metrics_path(logger))
    if kind == "TensorBoardLogger":
        return trackers.tensorboard_steps(logger.log_dir)
    if kind == "WandbLogger":
        return trackers.wandb_steps(logger.experiment, "trainer/global_step")
    if kind == "MLFlowLogger":
        return trackers.mlflow_steps(logger.experiment, logger.run_id)
    return None


def _stored_name(logger: Any, name: str) -> str:
    """The name under which the store has this metric."""
    prefix = getattr(logger, "_prefix", "")
    if prefix:
        name = f"{prefix}{logger.LOGGER_JOIN_CHAR}{name}"
    return re.sub("[^a-zA-Z0-9_/. -]+", "", name) if _kind_of(logger) == "MLFlowLogger" else name


# ---------------------------------------------------------------------- the file of a CSVLogger


def metrics_path(logger: Any) -> str:
    """Of a CSV logger's file; "": it has none."""
    directory = getattr(logger, "log_dir", None)
    return os.path.join(directory, "metrics.csv") if isinstance(directory, str) else ""


def size_of(path: str) -> int:
    """In bytes; -1: there is no such file."""
    return os.path.getsize(path) if os.path.isfile(path) else -1


def keep_metrics(logger: Any) -> None:
    """Let a CSV logger append to the metrics that it finds, which it would delete.

    Does nothing for loggers of other kinds, which may write to the same folder, and be opened in other
    threads; or for one that has begun to write already.
    """
    if _kind_of(logger) != "CSVLogger" or logger._experiment is not None:
        return
    # For good, since another thread may change the filters meanwhile. It would be wrong in all cases.
    warnings.filterwarnings("ignore", "Experiment logs directory .* Previous log files")
    path = metrics_path(logger)
    aside = f"{path}.kept"
    if os.path.isfile(aside) and not os.path.isfile(path):
        os.replace(aside, path)  # another leader has died below
    if not os.path.isfile(path):
        return
    os.replace(path, aside)
    try:
        _ = logger.experiment
    finally:
        os.replace(aside, path)
    remove_drafts(os.path.dirname(path))
    _cut_half_row(Path(path))
    read_columns(logger, path)
    log.info("%s: appending to what was logged before", path)


def _cut_half_row(path: Path) -> None:
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < size_of(str(path)):
        os.truncate(path, whole)


def read_columns(logger: Any, path: str) -> None:
    """Let a CSV logger write its rows under the columns that its file has, if there is one."""
    if os.path.isfile(path):
        with open(path, newline="") as file:
            logger.experiment.metrics_keys = list(csv.DictReader(file).fieldnames or ())


def add_columns(logger: Any, path: str) -> None:
    """Give the file the columns of the rows that the logger is about to write, if there is one."""
    writer = logger.experiment
    columns = sorted({"step"}.union(writer.metrics_keys, *writer.metrics))
    if not os.path.isfile(path) or columns == writer.metrics_keys or not writer.metrics:
        return
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    with replace_whole(path) as draft, draft.open("w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
    writer.metrics_keys = columns


def steps_in(path: str) -> dict[str, int]:
    """The last step of each column in the file."""
    last: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError), open(path, newline="") as file:
        for row in csv.DictReader(file):
            step = row.get("step") or ""
            for name, value in row.items():
                if value and step.isdigit():  # else two processes have written at once
                    last[name] = int(step)
    return last
