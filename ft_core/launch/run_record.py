"""What happened in a run, reconstructed from the events of its replica groups. Draws nothing.

A *life* is one process of a replica group from its start to its end; a group that was killed and
restarted has two. Times are Unix seconds of one host, or of hosts with synchronized clocks.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END = "end"
"""Kind of the last event of a process that ends regularly."""
NEARLY_DONE_S = 0.2
"""For this long after a kill, the step that was under way may still be committed."""


@dataclass(slots=True)
class Life:
    """One process.

    Attributes:
        group, number: the replica group, and which of its lives this is (from 0).
        killed: whether it was killed; `note` is what the timeline says about that.
        events: its telemetry, in order (see ft_core/telemetry.py).
        result: what the process reports at its end.
    """

    group: int
    number: int
    pid: int
    started_s: float
    ended_s: float | None = None
    returncode: int | None = None
    killed: bool = False
    note: str = "SIGKILL, restarted at once"
    events: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """All events of this kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last event of this kind, or None."""
        return next((e for e in reversed(self.events) if e["kind"] == kind), None)


@dataclass(slots=True)
class Run:
    """All lives of all replica groups. `kill_s`: when replica group `victim` was killed, if known."""

    lives: list[Life] = field(default_factory=list)
    victim: int | None = None
    kill_s: float | None = None
    ended_s: float | None = None

    def groups(self) -> list[int]:
        """The replica groups, in order."""
        return sorted({life.group for life in self.lives})

    def lives_of(self, group: int) -> list[Life]:
        """The lives of one replica group, in order."""
        return [life for life in self.lives if life.group == group]

    def commit_times(self, group: int) -> list[tuple[float, int]]:
        """(time, step) of each commit that `group` reported."""
        return [
            (e["t"], e["step"]) for life in self.lives_of(group) for e in life.of_kind("commit")
        ]

    def committed_steps(self) -> int:
        """How many optimizer steps the job committed."""
        steps = [step for group in self.groups() for _, step in self.commit_times(group)]
        return max(steps) + 1 if steps else 0  # steps count from 0


@dataclass(frozen=True, slots=True)
class Gap:
    """The time from the last commit before a moment to the first one after it."""

    from_s: float
    until_s: float
    typical_s: float  # the median of the other steps

    @property
    def lost_s(self) -> float:
        """The part of the gap that a usual step does not explain."""
        return max(0.0, self.until_s - self.from_s - self.typical_s)


def gap_around(run: Run, group: int, moment_s: float) -> Gap | None:
    """The longest gap between two commits of `group` that contains `moment_s` or begins up to
    `NEARLY_DONE_S` later (a step that is nearly done is committed in spite of a kill).

    None if `group` did not commit both before and after `moment_s`.
    """
    times = [t for t, _ in run.commit_times(group)]
    before = [t for t in times if t <= moment_s]
    if len(before) < 2:
        return None
    near = [
        (a, b) for a, b in itertools.pairwise(times) if b > moment_s and a <= moment_s + NEARLY_DONE_S
    ]
    if not near:
        return None
    typical_s = statistics.median(b - a for a, b in itertools.pairwise(before))
    return Gap(*max(near, key=lambda pair: pair[1] - pair[0]), typical_s)


# ---------------------------------------------------------------- a folder of events


def event_file(folder: Path, group: int, pid: int) -> Path:
    """Where process `pid` of replica group `group` writes its events (`telemetry.JsonlSink`)."""
    return folder / f"events.{group}.{pid}.jsonl"


def read_run(folder: Path) -> Run:
    """The run whose processes wrote their events to `folder` (see `event_file`).

    A process that wrote no `END` and has a successor in its group was killed; the last one of these
    is the run's `victim`. Empty files are skipped.
    """
    lives = []
    for path in folder.glob("events.*.jsonl"):
        named = re.fullmatch(r"events\.(\d+)\.(\d+)\.jsonl", path.name)
        events = _events(path)
        if named is not None and events:
            group, pid = int(named[1]), int(named[2])
            lives.append(
                Life(group, 0, pid, events[0]["t"], events[-1]["t"], note="gone", events=events)
            )
    run = Run(sorted(lives, key=lambda life: (life.group, life.started_s)))
    for group in run.groups():
        mine = run.lives_of(group)
        for number, life in enumerate(mine):
            life.number = number
            life.killed = number < len(mine) - 1 and life.last(END) is None
            if life.killed and (run.kill_s is None or life.events[-1]["t"] > run.kill_s):
                run.victim, run.kill_s = group, life.events[-1]["t"]
    run.ended_s = max((life.ended_s or life.started_s for life in run.lives), default=None)
    return run


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError:  # half written by a killed process
            continue
    return events
