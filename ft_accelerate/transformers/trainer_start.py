"""Where a training starts: at which checkpoint, and for a process that comes back, at which one its
peers did.

`train(resume_from_checkpoint=True)`, and scripts that look for the last checkpoint themselves, find
a newer one when they are started again, and would count their epochs from there, while their peers
count from the one that *they* started with. So each start is noted in the output folder, and a
process that finds others in training starts where the note says.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any

from ft_accelerate.runtime.startup_collectives import others_train

log = logging.getLogger("ft_accelerate")

NOTE = ".ft_started_from.json"

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def started_from(output_dir: str, given: str | None, runtime: Any) -> str | None:
    """The checkpoint to start this `train` with: `given`, or that of the peers in training.

    A script may train several times: the n-th call is noted as such.
    """
    number = _calls[runtime] = _calls.get(runtime, 0) + 1
    path = Path(output_dir) / NOTE
    first = number == 1
    comes_back = others_train(runtime.group_ranks) if first else not runtime.live
    starts = [] if first and not comes_back else _read(path)
    if comes_back:
        if len(starts) < number:
            return given
        noted: str | None = starts[number - 1]
        if noted != given:
            log.info("the others started from %s, so this process does", noted or "the beginning")
        return noted
    starts[number - 1 :] = [given]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{NOTE}.{os.getpid()}")
    draft.write_text(json.dumps(starts))
    draft.replace(path)
    return given


def _read(path: Path) -> list[str | None]:
    try:
        starts: list[str | None] = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return starts
