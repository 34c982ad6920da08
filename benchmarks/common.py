"""Shared by the benchmarks: the machine's description, JSON output, statistics."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import date
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def machine() -> dict[str, Any]:
    """The machine and versions, for comparison."""
    import torch

    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    figures: Any,
    json_file: Path | None,
) -> None:
    """Print the table; write the figures if asked for."""
    about = machine()
    table = Table(title=title, caption=", ".join(f"{k} {v}" for k, v in about.items()))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=120 if not sys.stdout.isatty() else None).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": about, "figures": figures}, indent=2) + "\n")


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def of_two_processes(
    context: SpawnContext, worker: Callable[..., None], *given: Any
) -> dict[int, Any]:
    """What `worker(rank, *given, barrier, results)` puts into `results` as (rank, figures), by rank."""
    results, barrier = context.Queue(), context.Barrier(2)
    workers = [
        context.Process(target=worker, args=(rank, *given, barrier, results)) for rank in range(2)
    ]
    for process in workers:
        process.start()
    both = dict(results.get(timeout=900) for _ in workers)
    for process in workers:
        process.join(60)
    return both


def start_lighthouse(
    *options: str, host: str = "127.0.0.1", under: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """A lighthouse in a process of its own, and its address. `under`: the command that runs it, as one that
    puts it into another network."""
    own = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen(
        [*under, sys.executable, "-m", "lighthouse", "--bind", f"tcp://{host}:0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((own, os.environ.get("PYTHONPATH", "")))},
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return process, address


def torchft_version() -> str | None:
    """Version of the installed torchft, None if it is not installed (the extra `bench` installs it)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torchft")
    except PackageNotFoundError:
        return None
