"""Fabric loops whose replica groups have two ranks with one model between them: equal to torch's own HSDP
without faults, and healed shard by shard after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_core.launch.rank_group import free_port
from lighthouse import LighthouseServer
from tests.ft_lightning.harness import Run
from tests.harness.runs import ended

pytestmark = pytest.mark.process

WORKER = Path(__file__).parent / "sharded_worker.py"
CASES = ["plain", "string", "accumulate", "folder", "full"]
"""By object and by string, accumulation, and a loop that goes on from a checkpoint: a folder to which all ranks
write, or one file. Gradients are clipped."""
STEPS = 6


def sharded(log: Path, lighthouse: str = "", **options: Any) -> Any:
    return ended(Run(log, lighthouse, WORKER, **options))


def test_numbers_are_those_of_the_stock_strategy(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Bit for bit, also where one rank's part of a step has failed: all ranks try it again."""
    with sharded(tmp_path / "stock", strategy="stock", cases=CASES) as stock:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
        stock.wait(*[stock.start(LOCAL_RANK=str(rank), **world) for rank in range(4)])
    options = {"cases": CASES, "inject": {"2": 1, "3": 2}}
    with sharded(tmp_path / "ours", coordinator.address(), **options) as run:
        run.wait(*run.start_ranks(0, size=2, groups=2), *run.start_ranks(1, size=2, groups=2))
    for case in CASES:
        results = [
            [json.loads((each.log / f"{rank}.{case}").read_text()) for rank in range(4)]
            for each in (stock, run)
        ]
        for rank, (theirs, ours) in enumerate(zip(*results, strict=True)):
            lines = [[x for x in each.lines(rank) if x["case"] == case] for each in (stock, run)]
            for mine, other in zip(*lines, strict=True):
                for key in ("step", "samples", "rows", "digest"):
                    assert mine[key] == other[key], (case, rank, mine["step"], key)
                assert mine["mean"] == pytest.approx(other["mean"], abs=2e-5)
            assert {**ours, "leader": 0} == {**theirs, "leader": 0}, (case, rank)
        assert [ours["leader"] for ours in results[1]].count(True) == 1
    assert run.events(0, "discard") >= 2


def test_a_model_that_is_sharded_as_one_is_saved_and_loaded_after_a_validation(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """FSDP keeps its outermost module whole after a forward without a backward: no parameter is sharded then,
    and stock finds no model in the state."""
    with sharded(tmp_path, coordinator.address(), cases=["one"]) as run:
        run.wait(*run.start_ranks(0, size=2, groups=1))
    for rank in (0, 1):
        steps = [line["step"] for line in run.lines(rank)]
        assert steps == list(range(1, len(steps) + 1))
        assert json.loads((tmp_path / f"{rank}.one").read_text())["step"] == len(steps)


def test_a_killed_rank_takes_its_group_alone_and_its_shards_heal(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """In the middle of a backward. Groups begin with other weights than each other."""
    options = {"own_start": True, "dies": {"2": 3}, "holds": ["step:4"]}
    with sharded(tmp_path, coordinator.address(), **options) as run:
        run.lose_a_rank_and_heal(coordinator, STEPS)
        # Let in where it heals: not between the rounds of a batch.
        assert run.events(1, "visit") == 0
