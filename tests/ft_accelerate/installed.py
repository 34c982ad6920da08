"""The package as pip installs it, for child processes of a test: its entry points are found, or what they do is done."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ft_core.environment import ENV_WARM
from tests.harness.script import options_of

REPO = Path(__file__).resolve().parents[2]


def installed(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which the entry points of pyproject.toml are installed.

    `folder`: empty, of the test. Nothing of ours that the test's own environment holds is in it.
    """
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = folder / "pytorch_ft-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytorch-ft\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    ours = ("ACCELERATE_", "FT_", "TORCHFT_", "REPLICA_", "NUM_REPLICA_", "MASTER_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(REPO)])
    env[ENV_WARM] = "0"  # see tests/conftest.py
    env["HF_HOME"] = str(folder / "hf")
    env["OMP_NUM_THREADS"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    return {**env, **more}


def accelerate(command: str) -> list[str]:
    """The console script `accelerate`, by its entry point."""
    code = "import sys; from accelerate.commands.accelerate_cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, command]


def is_fault_tolerant() -> bool:
    """Whether the launcher has asked for fault tolerance. Else a worker script runs plain Accelerate."""
    return os.environ.get("ACCELERATE_USE_FAULT_TOLERANCE") == "true"


def run_script(options: Mapping[str, Any], run: Callable[[dict[str, Any]], object]) -> None:
    """A worker script with these default options: `run(given)`. It need not import ours."""
    given = options_of(options)
    if is_fault_tolerant():
        from ft_accelerate.install import install  # what the installed package does by itself

        install()
    run(given)
    if not is_fault_tolerant():
        sys.stdout.flush()
        os._exit(0)  # torch's own Gloo group now and then aborts or hangs at exit, when all is done
