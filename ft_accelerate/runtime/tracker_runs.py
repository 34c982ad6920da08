"""Which runs of trackers the main process has open, so that the next one continues them. PURE.

A tracker that names its runs would begin another run in the next main process. So all processes know
the ids: they travel with the commit of a step (`Manager.should_commit(control=)`), whenever they or
the quorum have changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 1000
"""Of the ids together; what is longer does not travel, and the next main process begins runs."""


class TrackerRuns:
    """The open runs: one id for each tracker, by its name. The loop's thread; `opened` also from the thread
    that opens trackers for it."""

    def __init__(self) -> None:
        self.mine: dict[str, str] = {}
        """That this process has opened."""
        self._theirs: dict[str, str] = {}
        self._changes = 0
        self._told = (0, 0)

    def opened(self, tracker: str, run: str) -> None:
        """This process writes to `run`."""
        self.mine[tracker] = run
        self._theirs.pop(tracker, None)
        self._changes += 1

    def closed(self, tracker: str) -> None:
        """It is over: it is not to be continued."""
        self._theirs.pop(tracker, None)
        if self.mine.pop(tracker, None) is not None:
            self._changes += 1

    def to_continue(self, tracker: str) -> str | None:
        """The run that the main process before had open when it was heard from last."""
        return None if tracker in self.mine else self._theirs.get(tracker)

    def for_wandb(self, given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of `wandb.init` in the main process. What the script gives stays."""
        known = self.to_continue("wandb")
        if known is None or (given.get("id") or environ.get("WANDB_RUN_ID")) not in (None, known):
            return given
        resume = given.get("resume")
        if resume is None and "WANDB_RESUME" not in environ:
            resume = "allow"
        return {**given, "id": known, "resume": resume}

    def for_mlflow(self, given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of `mlflow.start_run` in the main process. What the script gives stays."""
        known = self.to_continue("mlflow")
        if known is None or given.get("run_id") or "MLFLOW_RUN_ID" in environ:
            return given
        return given if given.get("nested") else {**given, "run_id": known}

    def news(self, quorum_id: int) -> bytes:
        """What the main process adds to its vote; nothing if all members of this quorum know it."""
        if not self._changes or self._told == (quorum_id, self._changes):
            return b""
        packed = json.dumps({**self._theirs, **self.mine}).encode()
        return packed if len(packed) <= MAX_BYTES else b""

    def told(self, quorum_id: int) -> None:
        """The vote has been committed that brought the news."""
        self._told = quorum_id, self._changes

    def hear(self, packed: bytes) -> None:
        """What the main process has added. If this one is it next, and is killed before it has opened
        them, the one after that must know them, too: so they are news again."""
        self._theirs = json.loads(packed)
        self._changes += 1
