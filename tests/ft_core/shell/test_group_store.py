"""The process group of a replica group's own ranks, in a group that torchrun starts again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ft_core import init_process_group
from ft_core.launch.rank_group import free_port
from tests.harness.waiting import PATIENCE_S

SCRIPT = """
import os, signal
import torch, torch.distributed as dist
from ft_core import init_process_group

init_process_group("gloo")
life, total = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.ones(1)
dist.all_reduce(total)
line = f"life {life}, rank {dist.get_rank()}: {int(total)} ranks\\n"
os.write(1, line.encode())  # whole: print would write the line end apart
if life == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_starts_again_find_each_other(tmp_path: Path) -> None:
    """torchrun's store still has the addresses of those before; torch's own groups take them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    options = ["--max-restarts=1", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*torchrun, *options, str(script)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert {"life 1, rank 0: 2 ranks", "life 1, rank 1: 2 ranks"} <= {*done.stdout.splitlines()}


def test_without_a_launcher_it_is_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    init_process_group("gloo")
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert (dist.get_world_size(), total.item()) == (1, 1.0)
    finally:
        dist.destroy_process_group()
