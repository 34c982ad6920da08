"""The file of a CSVLogger, to which one leader after another writes. A leader may be killed while it does.

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
import warnings
from pathlib import Path
from typing import Any

from lighthouse.files import remove_drafts, replace_whole

log = logging.getLogger("ft_lightning")


def metrics_path(logger: Any) -> str:
    """Of a CSV logger's file; "": it has none."""
    directory = getattr(logger, "log_dir", None)
    return os.path.join(directory, "metrics.csv") if isinstance(directory, str) else ""


def size_of(path: str) -> int:
    """In bytes; -1: there is no such file."""
    return os.path.getsize(path) if os.path.isfile(path) else -1


def keep_metrics(logger: Any) -> None:
    """Let a CSV logger append to the metrics that it finds, which it would delete.

    Does nothing for loggers of other kinds, or for one that has begun to write already.
    """
    path = metrics_path(logger)
    aside = f"{path}.kept"
    if getattr(logger, "_experiment", 0) is not None:
        return
    if os.path.isfile(aside) and not os.path.isfile(path):
        os.replace(aside, path)  # another leader has died below
    if not os.path.isfile(path):
        return
    os.replace(path, aside)
    # For good, since another thread may change the filters meanwhile. It would be wrong in all cases.
    warnings.filterwarnings("ignore", "Experiment logs directory .* Previous log files")
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
