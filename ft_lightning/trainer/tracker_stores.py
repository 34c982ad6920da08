"""What a logger's store holds already: how far a leader that died had come.

A logger writes in the order of steps, and may hold rows back in memory. So what is missing of a
metric is what follows its last step in the store. Read by the next leader, once, after it has opened
the logger. Any thread.
"""

from __future__ import annotations

import csv
import os
import re
from typing import Any

from ft_core.launch import stored_runs

_TRACKERS = {
    "TensorBoardLogger": "tensorboard", "WandbLogger": "wandb", "MLFlowLogger": "mlflow",
}  # fmt: skip


def kind_of(logger: Any) -> str:
    """The class of Lightning's that this logger is one of; "": another one, of which nothing is known."""
    known = ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger")
    return next((cls.__name__ for cls in type(logger).__mro__ if cls.__name__ in known), "")


def prepare(logger: Any) -> None:
    """As `stored_runs.prepare`, for what this logger writes to."""
    stored_runs.prepare([_TRACKERS.get(kind_of(logger), "")])


def last_steps(logger: Any) -> dict[str, int] | None:
    """The last step of each metric in the store of an open logger; None: it can't be asked."""
    readers = {
        "CSVLogger": _in_csv,
        "TensorBoardLogger": _in_tensorboard,
        "WandbLogger": _in_wandb,
        "MLFlowLogger": _in_mlflow,
    }
    reader = readers.get(kind_of(logger))
    return None if reader is None else reader(logger)


def stored_name(logger: Any, name: str) -> str:
    """The name under which the store has this metric."""
    prefix = getattr(logger, "_prefix", "")
    if prefix:
        name = f"{prefix}{logger.LOGGER_JOIN_CHAR}{name}"
    return re.sub("[^a-zA-Z0-9_/. -]+", "", name) if kind_of(logger) == "MLFlowLogger" else name


def _in_csv(logger: Any) -> dict[str, int]:
    last: dict[str, int] = {}
    try:
        with open(os.path.join(logger.log_dir, "metrics.csv"), newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value:
                        last[name] = int(row["step"])
    except FileNotFoundError:
        pass
    return last


def _in_tensorboard(logger: Any) -> dict[str, int] | None:
    return stored_runs.tensorboard_steps(logger.log_dir)


def _in_mlflow(logger: Any) -> dict[str, int]:
    return stored_runs.mlflow_steps(logger.experiment, logger.run_id)


def _in_wandb(logger: Any) -> dict[str, int]:
    return stored_runs.wandb_steps(logger.experiment, "trainer/global_step")
