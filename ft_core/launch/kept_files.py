"""What the keeper of states writes to disk, in case it dies, too, or its whole machine.

One file per job, `keeper/JOB.state` in a folder that the user names, which is replaced whole after each
fetch. No process that trains waits for it. It is read where the keeper tells nothing on the board, and
counts by the same rules (`kept.py`): so it is of use to a job with an id of its own, which is the same
one when its launcher is started again. A job that ends well leaves no file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_core.launch.kept import Card

log = logging.getLogger("ft_core")

ENV_FOLDER = "FT_KEEP_STATE_DIR"
FOLDER = "keeper"


def file_of(folder: str, job_id: str) -> Path:
    """Where the state of a job is."""
    from lighthouse.files import file_name

    return Path(folder) / FOLDER / f"{file_name(job_id)}.state"


def environment(folder: str) -> dict[str, str]:
    """What tells processes of the folder; empty: there is none."""
    return {ENV_FOLDER: os.path.abspath(folder)} if folder else {}


def write(folder: str, card: Card, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write what is held (each part as `State.show` has packed it). Raises OSError or RuntimeError if the
    disk does not take it; then the file is as it was."""
    import torch  # here, since this module is imported with torch

    from lighthouse.files import remove_drafts, replace_whole

    file = file_of(folder, card.place[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(file.parent)
    held = [
        {
            "manifest": torch.frombuffer(bytearray(each["manifest"]), dtype=torch.uint8),
            "tensors": each["tensors"],
        }
        for each in parts
    ]
    whole = {"card": json.dumps(card.row()), "parts": held}
    with replace_whole(file) as draft:
        torch.save(whole, draft)


def read(job_id: str) -> tuple[Card, list[dict[str, Any]]] | None:
    """What was written of a job, if this process's supervisor has named a folder. Its tensors are read
    from the file when they are used."""
    import torch

    folder = os.environ.get(ENV_FOLDER, "")
    if not folder:
        return None
    file = file_of(folder, job_id)
    try:
        whole = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        parts = [
            {"manifest": each["manifest"].numpy().tobytes(), "tensors": each["tensors"]}
            for each in whole["parts"]
        ]
        return Card.of(json.loads(whole["card"])), parts
    except FileNotFoundError:
        return None
    except Exception as error:  # of any kind, if it is not one of ours
        log.warning("%s can't be read (%s): the job begins without it", file, error)
        return None


def forget(job_id: str, folder: str = "") -> None:
    """The job has ended well: a process of its training says so, and its supervisor once more when the
    keeper, which may just have written, is gone. `folder`: where it is not that of the environment."""
    folder = folder or os.environ.get(ENV_FOLDER, "")
    if not folder:
        return
    file = file_of(folder, job_id)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s can't be removed: %s", file, error)
