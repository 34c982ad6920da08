"""One replica group writes: logs, checkpoints, configuration. It may die, and another takes over.

| when | writes | says what rank zero says |
|---|---|---|
| the only replica group there is to be | it does, as under stock `ddp` | it does |
| until the first quorum of a fit | none: the leader is not known | group 0, if it was not restarted |
| in a quorum | the first participant (`FTDDPMixin._on_quorum`) | the same |
| after a fit without a quorum | group 0: no other has done more | the same |

What the one before has written stays.
"""

from __future__ import annotations

import csv
import logging
import os
from typing import Any

from ft_lightning.shared.strategy_base import act_as_leader
from ft_lightning.shared.topology import Scope
from ft_lightning.trainer.batches import adopt, release
from ft_lightning.trainer.hooks import refuse_search

log = logging.getLogger("ft_lightning")


def before_quorum(trainer: Any, scope: Scope, dummy: Any) -> bool:
    """A fit is being set up; whether this group writes already. The loop's thread.

    Loggers open their files at their first use as rank zero, under a version number that follows
    from the files there are: all groups have to choose one before any opens. So until the first
    quorum the loggers of the group that speaks are silent. `dummy()`: the experiment of a logger
    that is not rank zero's. Raises ValueError for what several groups cannot agree about.
    """
    first = scope.index == 0 and scope.group_rank == 0
    if scope.num_groups == 1:
        act_as_leader(first, scope)
        for logger in trainer.loggers if first and scope.restarts else ():
            keep_metrics(logger)
        return first
    refuse_search(trainer)
    speaks = first and scope.restarts == 0
    try:
        for logger in trainer.loggers if speaks else ():
            adopt(logger, _silent(dummy))
    except TypeError:  # of a class that has no subclasses
        _release(trainer)
        speaks = False
    act_as_leader(speaks, scope)
    return False


def in_quorum(trainer: Any, scope: Scope, leads: bool) -> None:
    """Who leads is known, for the first time or anew."""
    act_as_leader(leads, scope)
    _release(trainer)


def without_quorum(trainer: Any, scope: Scope) -> bool:
    """Whether this group writes after a fit without a quorum: it took no step, or failed before.

    One that was started again may have peers whose files are newer than what it failed with.
    """
    _release(trainer)
    risky = scope.num_groups > 1 and scope.restarts > 0 and trainer.interrupted
    leads = scope.index == 0 and scope.group_rank == 0 and not risky
    act_as_leader(leads, scope)
    return leads


def _release(trainer: Any) -> None:
    for logger in trainer.loggers:
        release(logger)


def _silent(dummy: Any) -> Any:
    """A logger that has nothing to write to yet, but knows its name, version and directories."""

    def methods(cls: Any) -> dict[str, Any]:
        def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
            return None

        names = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize")
        silent: dict[str, Any] = {name: nothing for name in names if hasattr(cls, name)}
        if hasattr(cls, "experiment"):
            silent["experiment"] = property(lambda self: dummy())
        return silent

    return methods


def begin(trainer: Any, log_hyperparams: Any, *, takes_over: bool) -> None:
    """This group writes from now on: first what set-up would have written.

    `log_hyperparams(trainer)`: Lightning's own. `takes_over`: from another. The loop's thread.
    """
    for logger in trainer.loggers:
        keep_metrics(logger)
    if trainer.enable_autolog_hparams:
        log_hyperparams(trainer)
    for callback in trainer.callbacks:
        if not takes_over and hasattr(callback, "summarize") and hasattr(callback, "_max_depth"):
            callback.on_fit_start(trainer, trainer.lightning_module)  # the model's summary
        if hasattr(callback, "save_config") and not getattr(callback, "already_saved", True):
            _save_config(trainer, callback)


def _save_config(trainer: Any, callback: Any) -> None:
    """LightningCLI's callback, which at set-up had found no leader."""
    directory, name = trainer.log_dir, getattr(callback, "config_filename", "")
    if directory and name and os.path.exists(os.path.join(directory, name)):
        callback.already_saved = True  # by the leader before this one
        return
    callback.setup(trainer, trainer.lightning_module, "fit")


def keep_metrics(logger: Any) -> None:
    """A CSV logger deletes the metrics that it finds: let it go on after them instead.

    Does nothing for loggers of other kinds, or one that has begun to write already.
    """
    directory = getattr(logger, "log_dir", None)
    if getattr(logger, "_experiment", 0) is not None or not isinstance(directory, str):
        return
    path = os.path.join(directory, "metrics.csv")
    if not os.path.isfile(path):
        return
    aside = f"{path}.kept"
    os.replace(path, aside)
    try:
        writer = logger.experiment
    finally:
        os.replace(aside, path)
    with open(path, newline="") as file:
        writer.metrics_keys = list(csv.DictReader(file).fieldnames or ())
    log.info("%s: goes on after what was logged before", path)


def directories(trainer: Any) -> list[Any]:
    """Which version of its directory each logger writes to; None: it has no such thing."""
    return [
        logger.version if _has_version(logger) else None
        for logger in trainer.loggers
    ]  # fmt: skip


def adopt_directories(trainer: Any, versions: list[Any]) -> None:
    """A process that came later has counted its peers' directory: write to theirs instead."""
    for logger, version in zip(trainer.loggers, versions, strict=False):
        if version is not None and _has_version(logger) and logger._experiment is None:
            logger._version = version


def _has_version(logger: Any) -> bool:
    names = ("_version", "_experiment")
    return all(name in vars(logger) for name in names) and hasattr(logger, "log_dir")
