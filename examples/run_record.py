"""The figures of a run in which one replica group was killed, and the faults found in it.

This module does no IO. ft_core/launch/run_record.py defines runs and lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.launch.run_record import Life, Run, gap_around


@dataclass(frozen=True, slots=True)
class Row:
    """One replica group in the summary. `None`: does not apply to it."""

    group: int
    committed: int
    discarded: int
    step_ms: float | None  # a usual one
    lost_ms: float | None  # to the kill
    lost_to_return_ms: float | None
    process_start_ms: float | None
    back_ms: float | None
    heal_ms: float | None
    heal_bytes: int | None
    digest: str
    accuracy: float | None
    end: str


def summarize(run: Run) -> list[Row]:
    """A row for each replica group."""
    rows = []
    again = run.lives_of(run.victim)[1:] if run.victim is not None else []
    healed = next((e["t"] for life in again for e in life.of_kind("heal_done")), None)
    for group in run.groups():
        lives = run.lives_of(group)
        return_gap = gap_around(run, group, healed) if healed is not None else None
        heals = [e for life in lives[1:] for e in life.of_kind("heal_done")]
        gap = gap_around(run, group, run.kill_s) if run.kill_s is not None else None
        rows.append(
            Row(
                group=group,
                committed=len(run.commit_times(group)),
                discarded=sum(len(life.of_kind("discard")) for life in lives),
                step_ms=gap.typical_s * 1000 if gap else None,
                lost_ms=gap.lost_s * 1000 if gap else None,
                lost_to_return_ms=return_gap.lost_s * 1000 if return_gap else None,
                process_start_ms=_start_ms(lives),
                back_ms=_back_ms(run, lives),
                heal_ms=heals[-1]["seconds"] * 1000 if heals else None,
                heal_bytes=heals[-1]["bytes"] if heals else None,
                digest=str(lives[-1].result.get("digest", "")),
                accuracy=lives[-1].result.get("val_accuracy"),
                end=", ".join(_end_of(life) for life in lives),
            )
        )
    return rows


def faults_of(run: Run) -> list[str]:
    """Sentences that say what went wrong; empty: nothing did."""
    faults = []
    for group in run.groups():
        lives = run.lives_of(group)
        last = lives[-1]
        if last.returncode != 0:
            faults.append(f"replica group {group} ended with exit code {last.returncode}")
        if group != run.victim and len(lives) > 1:
            faults.append(f"replica group {group} was restarted, although it was not killed")
        if group == run.victim and len(lives) > 1 and last.last("heal_done") is None:
            faults.append(
                f"replica group {group} did not heal: it came back too late "
                "(give the run more --steps) or its heal failed"
            )
    if run.kill_s is None:
        faults.append("no process was killed: the run ended before the step of --kill-at")
    digests = {row.group: row.digest for row in summarize(run)}
    if "" in digests.values():
        missing = [str(group) for group, digest in digests.items() if not digest]
        faults.append(f"no digest from replica group {', '.join(missing)}")
    elif len(set(digests.values())) > 1:
        faults.append("the replica groups' weights differ")
    return faults


def _start_ms(lives: list[Life]) -> float | None:
    """From the restart to the first event of the new process's manager."""
    if len(lives) < 2:
        return None
    first = next((e for e in lives[-1].events if e["kind"] in ("waiting", "quorum")), None)
    return None if first is None else (first["t"] - lives[-1].started_s) * 1000


def _back_ms(run: Run, lives: list[Life]) -> float | None:
    """From the kill to the first step to which the new process, and all others, have contributed."""
    if len(lives) < 2 or run.kill_s is None:
        return None
    commits = lives[-1].of_kind("commit")
    first = next((e for e in commits if e["participants"] == len(run.groups())), None)
    return None if first is None else (first["t"] - run.kill_s) * 1000


def _end_of(life: Life) -> str:
    if life.killed:
        return "SIGKILL"
    return "running" if life.returncode is None else f"exit {life.returncode}"
