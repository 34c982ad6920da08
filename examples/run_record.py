"""What happened in a run, as the replica groups' own events tell it; and the numbers drawn from it.

No IO in here. A *life* is one process of a replica group from its start to its end; a group that
was killed and restarted has two. Times are Unix seconds (one host, one clock).
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Life:
    """One process. `events`: its telemetry, in order (see ft_core/telemetry.py)."""

    group: int
    number: int
    pid: int
    started_s: float
    ended_s: float | None = None
    returncode: int | None = None
    killed: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)  # what it says at its end

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        return next((e for e in reversed(self.events) if e["kind"] == kind), None)


@dataclass(slots=True)
class Run:
    """All lives of all replica groups; `kill_s` is when `victim` was killed."""

    lives: list[Life] = field(default_factory=list)
    victim: int | None = None
    kill_s: float | None = None
    ended_s: float | None = None

    def groups(self) -> list[int]:
        return sorted({life.group for life in self.lives})

    def lives_of(self, group: int) -> list[Life]:
        return [life for life in self.lives if life.group == group]

    def commit_times(self, group: int) -> list[tuple[float, int]]:
        """(time, step) of each commit that `group` has seen."""
        return [
            (e["t"], e["step"]) for life in self.lives_of(group) for e in life.of_kind("commit")
        ]

    def committed_steps(self) -> int:
        """Optimizer steps of the job: steps count from 0."""
        steps = [step for group in self.groups() for _, step in self.commit_times(group)]
        return max(steps) + 1 if steps else 0


@dataclass(frozen=True, slots=True)
class Gap:
    """From the last commit before a moment to the first one after it."""

    from_s: float
    until_s: float
    typical_s: float  # what a step takes otherwise: the median

    @property
    def lost_s(self) -> float:
        return max(0.0, self.until_s - self.from_s - self.typical_s)


def gap_around(run: Run, group: int, moment_s: float) -> Gap | None:
    """None if `group` did not commit both before and after `moment_s`."""
    times = [t for t, _ in run.commit_times(group)]
    before = [t for t in times if t <= moment_s]
    after = [t for t in times if t > moment_s]
    if len(before) < 2 or not after:
        return None
    typical_s = statistics.median(b - a for a, b in itertools.pairwise(before))
    return Gap(before[-1], after[0], typical_s)


@dataclass(frozen=True, slots=True)
class Row:
    """One replica group in the summary. `None`: does not apply to it."""

    group: int
    committed: int
    discarded: int
    lost_ms: float | None
    process_start_ms: float | None
    heal_ms: float | None
    heal_bytes: int | None
    digest: str
    accuracy: float | None
    end: str


def summarize(run: Run) -> list[Row]:
    """A row for each replica group."""
    rows = []
    for group in run.groups():
        lives = run.lives_of(group)
        heals = [e for life in lives[1:] for e in life.of_kind("heal_done")]
        gap = gap_around(run, group, run.kill_s) if run.kill_s is not None else None
        rows.append(
            Row(
                group=group,
                committed=len(run.commit_times(group)),
                discarded=sum(len(life.of_kind("discard")) for life in lives),
                lost_ms=gap.lost_s * 1000 if gap else None,
                process_start_ms=_start_ms(lives),
                heal_ms=heals[-1]["seconds"] * 1000 if heals else None,
                heal_bytes=heals[-1]["bytes"] if heals else None,
                digest=str(lives[-1].result.get("digest", "")),
                accuracy=lives[-1].result.get("val_accuracy"),
                end=", ".join(_end_of(life) for life in lives),
            )
        )
    return rows


def faults_of(run: Run) -> list[str]:
    """Sentences that say what went wrong; none: the run did what it promises."""
    faults = []
    for group in run.groups():
        lives = run.lives_of(group)
        last = lives[-1]
        if last.returncode != 0:
            faults.append(f"replica group {group} ended with exit code {last.returncode}")
        if group != run.victim and len(lives) > 1:
            faults.append(f"replica group {group} was restarted, although nobody killed it")
        if group == run.victim and len(lives) > 1 and last.last("heal_done") is None:
            faults.append(
                f"replica group {group} did not heal: it came back too late "
                "(give the run more --steps) or its heal failed"
            )
    if run.kill_s is None:
        faults.append("nobody was killed: the run ended before the step of --kill-at")
    digests = {row.group: row.digest for row in summarize(run)}
    if "" in digests.values():
        missing = [str(group) for group, digest in digests.items() if not digest]
        faults.append(f"no digest from replica group {', '.join(missing)}")
    elif len(set(digests.values())) > 1:
        faults.append("the replica groups' weights differ")
    return faults


def _start_ms(lives: list[Life]) -> float | None:
    """From the restart to the first word from the new process's manager."""
    if len(lives) < 2:
        return None
    first = next((e for e in lives[-1].events if e["kind"] in ("waiting", "quorum")), None)
    return None if first is None else (first["t"] - lives[-1].started_s) * 1000


def _end_of(life: Life) -> str:
    if life.killed:
        return "SIGKILL"
    return "running" if life.returncode is None else f"exit {life.returncode}"
