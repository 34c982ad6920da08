"""One replica group writes: logs, checkpoints, configuration. It may die, and another takes over.

Before its first quorum nobody knows who that is, so nobody writes. Then it is the first of those
who take part (`FTDDPMixin._on_quorum`). What the one before has written stays.
"""

from __future__ import annotations

import csv
import logging
import os
from typing import Any

log = logging.getLogger("ft_lightning")


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
    """LightningCLI's callback, which at set-up had found nobody to write."""
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
