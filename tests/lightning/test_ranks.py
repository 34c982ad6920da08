"""Replica groups of several processes that torchrun starts, around real Fabric loops."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lighthouse import LighthouseServer
from tests.lightning.harness import running
from tests.lightning.test_membership import until_waiting

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
WORKER = Path(__file__).with_name("fabric_worker.py")
TORCHRUN = [
    "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1",
]  # fmt: skip
AGREE = ("epoch", "batch_idx", "digest", "lr", "loss", "ranks", "count")


def test_torchrun_restarts_its_group_which_heals(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Two torchruns of two processes each; one process dies, and takes its group along."""
    options = {"worker": WORKER, "devices": 2, "epochs": 10, "step_delay_s": 0.05, "hold": 8}
    with running(tmp_path, coordinator.address(), **options) as run:
        started = [run.start(index, 2, TORCHRUN) for index in (0, 1)]
        for rank in range(4):
            run.until_step(rank, 3)
        first = [run.lives(rank)[0] for rank in range(4)]
        os.kill(first[2], signal.SIGKILL)
        until_waiting(run, coordinator, "1")
        run.go()
        run.wait(*started)
    lines = [run.lines(rank) for rank in range(4)]
    alone = {line["step"]: line for line in lines[0]}
    assert list(alone) == list(range(1, 51))
    for rank in (2, 3):
        healed = [line for line in lines[rank] if line["pid"] != first[rank]]
        assert healed[0]["step"] > 8
        assert len(healed) > 5
    for mine in lines[1:]:
        for line in mine:
            other = alone[line["step"]]
            for key in AGREE:
                assert line[key] == other[key], (line["step"], key)
            assert not set(line["batch"]) & set(other["batch"])
    assert lines[0][0]["ranks"] == lines[0][-1]["ranks"] == [0, 1, 2, 3]
    ends = [run.end(rank) for rank in range(4)]
    assert len({end["digest"] for end in ends}) == 1
    assert [(end["rank"], end["world_size"], end["epoch"]) for end in ends] == [
        (rank, 4, 10) for rank in range(4)
    ]
    assert [len(run.lives(rank)) for rank in range(4)] == [1, 1, 2, 2]
