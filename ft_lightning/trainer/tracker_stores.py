"""What a logger's store holds already: how far a leader that died had come.

A logger writes in the order of steps, and may hold rows back in memory. So what is missing of a
metric is what follows its last step in the store. Read by the next leader, once, after it has opened
the logger. Any thread.
"""

from __future__ import annotations

import csv
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
"""Of wandb's files, whose records are framed as those of LevelDB's log."""
HEADER = struct.Struct("<IHB")
FULL, FIRST, LAST = 1, 2, 4


def kind_of(logger: Any) -> str:
    """The class of Lightning's that this logger is one of; "": another one, of which nothing is known."""
    known = ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger")
    return next((cls.__name__ for cls in type(logger).__mro__ if cls.__name__ in known), "")


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
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:  # tensorboardX writes, and there is nothing that reads
        return None
    last: dict[str, int] = {}
    for path in sorted(Path(logger.log_dir).glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                last[value.tag] = max(event.step, last.get(value.tag, 0))
    return last


def _in_mlflow(logger: Any) -> dict[str, int]:
    client, run = logger.experiment, logger.run_id
    return {
        name: max(metric.step for metric in client.get_metric_history(run, name))
        for name in client.get_run(run).data.metrics
    }


def _in_wandb(logger: Any) -> dict[str, int]:
    """Of a run that goes on. Continues its numbers of rows, too, which wandb counts in each process."""
    run = logger.experiment
    if not run.offline:  # what the server has
        step = run.summary.get("trainer/global_step", -1)
        return dict.fromkeys(run.summary.keys(), int(step))
    last: dict[str, int] = {}
    rows = 0
    for path in sorted(Path(run.dir).parent.parent.glob(f"*-{run.id}/run-{run.id}.wandb")):
        for row in wandb_rows(path):
            rows = max(rows, int(row.get("_step", -1)) + 1)
            for name in row:
                last[name] = max(int(row.get("trainer/global_step", 0)), last.get(name, 0))
    if rows:
        run.log({}, step=rows)
    return last


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in a file of wandb's, up to where it is torn."""
    from wandb.proto import wandb_internal_pb2 as protocol

    for packed in _records(path.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(packed)
        if record.WhichOneof("record_type") == "history":
            yield {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _records(data: bytes) -> Iterator[bytes]:
    at, record = HEADER.size, b""  # after the file's own header
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if not FULL <= kind <= LAST or at + size > len(data):
            return
        record = data[at : at + size] if kind in (FULL, FIRST) else record + data[at : at + size]
        at += size
        if kind in (FULL, LAST):
            yield record
