"""What the terminal shows during a run: a table that changes, and lines that stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from run_record import Row

from ft_core.launch.run_record import Life, Run

REFRESHES_PER_S = 10


class View:
    """Shows `run` until `close`. On a terminal the table changes in place; elsewhere (a log, a
    pipe) only the lines of `say` and an occasional table are printed. Any thread may `say`."""

    def __init__(self, run: Run, total_steps: int, *, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._run, self._total = run, total_steps
        self._origin = time.time()
        self._lock = threading.Lock()
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, get_renderable=self.table, refresh_per_second=REFRESHES_PER_S
            )
            self._live.start()

    def say(self, line: str, style: str = "") -> None:
        """Print a line that stays. Any thread."""
        with self._lock:
            stamp = f"{time.time() - self._origin:6.2f} s "
            self.console.print(Text.assemble((stamp, "dim"), (line, style)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def table(self) -> Table:
        """The present state of all replica groups."""
        committed = self._run.committed_steps()
        table = Table(
            title=f"{committed} steps and agreements committed; ends after {self._total} steps"
        )
        for name in ("replica group", "process", "state", "step", "loss", "quorum", "discards"):
            table.add_column(name, justify="right" if name in ("step", "loss") else "left")
        for group in self._run.groups():
            table.add_row(*self._cells(self._run.lives_of(group)))
        return table

    def _cells(self, lives: list[Life]) -> tuple[str, ...]:
        life = lives[-1]
        quorum, loss, commit = life.last("quorum"), life.last("loss"), life.last("commit")
        discards = sum(len(each.of_kind("discard")) for each in lives)
        return (
            str(life.group),
            str(life.pid),
            _state_of(life),
            "" if commit is None else str(commit["step"]),
            "" if loss is None else f"{loss['loss']:.4f}",
            "" if quorum is None else "{" + ", ".join(names_in(quorum)) + "}",
            str(discards),
        )


def names_in(quorum: dict[str, Any]) -> list[str]:
    """Names of the members of a quorum event: a replica_id is name:incarnation."""
    return [str(member).rpartition(":")[0] for member in quorum["members"]]


def _state_of(life: Life) -> str:
    if life.killed:
        return "[red]killed[/red]"
    if life.returncode is not None:
        return f"ended ({life.returncode})"
    kind = next(
        (e["kind"] for e in reversed(life.events) if e["kind"] not in ("loss", "serve")), ""
    )
    return {
        "": "[dim]starting[/dim]",
        "commit": "[green]training[/green]",
        "discard": "[yellow]step discarded[/yellow]",
        "revoked": "[yellow]quorum revoked[/yellow]",
        "heal_start": "[yellow]healing[/yellow]",
        "heal_done": "[green]healed[/green]",
        "waiting": "[dim]waiting[/dim]",
        "quorum": "[green]in a quorum[/green]",
    }.get(kind, kind)


def summary_table(rows: list[Row], total_steps: int) -> Table:
    """The numbers of the run, a column for each replica group. "Lost": from the last commit before
    the kill to the first one after it, less a normal step; for the killed group this includes the
    start of the new process."""
    table = Table(title=f"{total_steps} steps and agreements committed by the job")
    table.add_column("replica group")
    for row in rows:
        table.add_column(str(row.group), justify="right")
    equal = len({row.digest for row in rows}) == 1 and bool(rows[0].digest)
    verdict = "[green]equal[/green]" if equal else "[red]DIFFER[/red]"
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("steps committed", lambda row: str(row.committed)),
        ("steps discarded", lambda row: str(row.discarded)),
        ("lost to the failure", lambda row: _ms(row.lost_ms)),
        ("  of it start of the process", lambda row: _ms(row.process_start_ms)),
        ("from the kill to its next step that counts", lambda row: _ms(row.back_ms)),
        ("heal time", lambda row: "" if row.heal_ms is None else f"{row.heal_ms:.1f} ms"),
        ("heal bytes", lambda row: "" if row.heal_bytes is None else f"{row.heal_bytes:,}"),
        ("validation accuracy", lambda row: "" if row.accuracy is None else f"{row.accuracy:.3f}"),
        ("weights' digest", lambda row: row.digest or "none"),
        ("weights", lambda row: verdict),
        ("process", lambda row: row.end),
    ]
    for name, cell in lines:
        table.add_row(name, *(cell(row) for row in rows))
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} ms"
