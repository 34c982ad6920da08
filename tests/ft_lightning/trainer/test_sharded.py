"""Trainers whose replica groups have two ranks with one model between them: equal to torch's own HSDP
without faults, and healed shard by shard after them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ft_core.launch.rank_group import free_port
from lighthouse import LighthouseServer
from tests.ft_lightning.harness import Line, Run
from tests.harness.runs import ended
from tests.harness.trackers import in_csv

pytestmark = pytest.mark.process

WORKER = Path(__file__).parent / "sharded_worker.py"
BITWISE = ["plain", "half", "mixed", "tensor", "folder", "full"]
"""Half and mixed precision, tensor parallelism inside, and a fit that goes on from a checkpoint: a folder to which
all ranks write, or one file. Gradients are clipped, and a plateau scheduler follows the validation."""
STEPS, SAMPLES = 6, 48


def sharded(log: Path, lighthouse: str = "", **options: Any) -> Any:
    return ended(Run(log, lighthouse, WORKER, **options))


def result(run: Run, rank: int, case: str) -> Line:
    found: Line = json.loads((run.log / f"{rank}.{case}").read_text())
    return found


def test_numbers_are_those_of_the_stock_strategy(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Bit for bit, also where one rank's part of a step has failed: all ranks try it again."""
    with sharded(tmp_path / "stock", strategy="stock", cases=[*BITWISE, "accumulate"]) as stock:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
        stock.wait(*[stock.start(LOCAL_RANK=str(rank), **world) for rank in range(4)])
    options = {"cases": [*BITWISE, "accumulate"], "inject": {"2": 1, "3": 2}}
    with sharded(tmp_path / "ours", coordinator.address(), **options) as run:
        run.wait(*run.start_ranks(0, size=2, groups=2), *run.start_ranks(1, size=2, groups=2))
    for case in BITWISE:
        for rank in range(4):
            theirs, ours = result(stock, rank, case), result(run, rank, case)
            assert ours["digest"] == theirs["digest"], (case, rank)
            assert ours["step"] == theirs["step"]
            assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
            lines = [[x for x in each.lines(rank) if x["case"] == case] for each in (stock, run)]
            for mine, other in zip(*lines, strict=True):
                assert mine["samples"] == other["samples"]
                assert mine["rows"] == other["rows"]
    # With activation checkpointing, too. Stock averages each of the accumulated batches on its own, which rounds otherwise.
    theirs, ours = (result(each, 0, "accumulate") for each in (stock, run))
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    assert ours["step"] == theirs["step"] == STEPS // 2
    assert [result(run, rank, "plain")["leader"] for rank in range(4)].count(True) == 1
    assert run.events(0, "discard") >= 2


def test_parameters_are_shards_after_a_fit_whatever_its_last_pass_was(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Here a validation. A group that came back after the end and passed over the fit had whole ones after its sanity
    check, where its peers had shards: a script that asked for `full_tensor()` failed there alone."""
    with sharded(tmp_path, coordinator.address()) as run:
        run.wait(*run.start_ranks(0, size=2, groups=2), *run.start_ranks(1, size=2, groups=2))
    assert [result(run, rank, "plain")["whole"] for rank in range(4)] == [[]] * 4


def test_ranks_of_a_group_that_are_each_their_machines_first_prepare_data_by_turns(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Machines that each have a rank of several groups: the one that waits for its turn must not be
    waited for by the one whose turn it is."""
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with sharded(tmp_path, coordinator.address(), nodes=2) as run:
        run.wait(
            *[
                each
                for group in (0, 1)
                for each in run.start_ranks(group, size=2, groups=2, **alone)
            ]
        )
    said = (tmp_path / "prepared").read_text().split("\n")[:-1]
    turns = [(begin.split()[0], end) for begin, end in zip(said[::2], said[1::2], strict=True)]
    assert sorted(rank for rank, _ in turns) == ["0", "1", "2", "3"]
    assert [end for _, end in turns] == [f"{rank} ends" for rank, _ in turns]


def test_a_killed_rank_takes_its_group_alone_and_its_shards_heal(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """In the middle of a backward. Groups begin with other weights than each other."""
    options = {"own_start": True, "dies": {"2": 3}, "holds": ["step:4"]}
    with sharded(tmp_path, coordinator.address(), **options) as run:
        run.lose_a_rank_and_heal(coordinator, STEPS)


def test_a_rank_of_the_leading_group_dies_in_the_save_of_a_folder(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Its other rank ends, too, though a save that fails ends no fit. The next leading group writes it."""
    with sharded(tmp_path, coordinator.address(), cases=["folder"], dies_in_save=True) as run:
        started = [*run.start_ranks(0, size=2, groups=2), *run.start_ranks(1, size=2, groups=2)]
        run.until(lambda: any(tmp_path.glob("*.died")), "the save")
        (path,) = tmp_path.glob("*.died")
        number = int(path.stem)
        run.wait(started[number], code=-signal.SIGKILL)
        run.wait(started[number - 1], code=None)
        others = [rank for rank in range(4) if rank // 2 != number // 2]
        run.wait(*[started[rank] for rank in others])
    assert [result(run, rank, "folder")["leader"] for rank in others] == [True, False]
    (folder,) = (tmp_path / "folder" / "saved").iterdir()
    assert (folder.name, len(list(folder.glob("*.distcp")))) == ("first.ckpt", 2)


def test_the_leading_group_dies_in_the_scripts_own_save_after_the_fit(tmp_path: Path) -> None:
    """Which the other group has passed. Its ranks write that folder together, where they meet next."""
    options: dict[str, Any] = {"after_fit": True, "dies_in_save": True, "devices": 4}
    options |= {"options": {"keep_state_s": 0, "warm_start": False}}
    with sharded(tmp_path, holds=["dies_in_save", "saved", "life:2"], **options) as run:
        supervisor = run.start()
        run.until(lambda: any(tmp_path.glob("*.died")), "the save")
        (path,) = tmp_path.glob("*.died")
        others = [rank for rank in range(4) if rank // 2 != int(path.stem) // 2]
        for rank in others:
            run.until_held(rank, "saved")
        assert not (tmp_path / "final.ckpt").exists()
        run.go("dies_in_save")
        run.until(lambda: "is started again" in run.output(), "the supervisor to see it")
        run.go("saved")
        run.wait(supervisor)
    assert [result(run, rank, "plain")["leader"] for rank in others] == [True, False]
    assert len(list((tmp_path / "final.ckpt").glob("*.distcp"))) == 2


@pytest.mark.parametrize("place", ["step", "end"])
def test_a_rank_of_the_leading_group_dies_in_the_last_test(tmp_path: Path, place: str) -> None:
    """Its row is logged, and the script has an end. The row was missing; or it was there, the other group had
    ended, and the job's exit code was that of the dead rank."""
    options: dict[str, Any] = {"dies_in_test": place, "devices": 4}
    options |= {"options": {"keep_state_s": 0, "warm_start": False}}
    with sharded(tmp_path, holds=["dies_in_test", "life:2"], **options) as run:
        supervisor = run.start()
        run.until(lambda: any(tmp_path.glob("*.died")), "the test")
        (path,) = tmp_path.glob("*.died")
        first = 2 - int(path.stem) // 2 * 2  # of the other group
        run.until((tmp_path / f"{first}.tested").exists, "the other group's test")
        run.go("dies_in_test")
        run.wait(supervisor)
        assert "missing" not in run.output()
    assert [result(run, first + rank, "plain")["leader"] for rank in (0, 1)] == [True, False]
    assert len(in_csv(tmp_path / "logs", "test_loss")) == 1


def test_a_hot_spare_of_two_ranks_takes_over_within_a_step(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """A rank is killed in a backward, and both shares are needed: both ranks of the spare drop their batch, and
    compute those of the dead group's share. Each sample counts once."""
    options = {"options": {"spares": 1, "min_replicas": 2}, "dies": {"2": 1}}
    with sharded(tmp_path, coordinator.address(), **options) as run:
        dead, other, spare = (run.start_ranks(index, size=2, groups=3) for index in range(3))
        run.wait(dead[1], code=-signal.SIGKILL)
        run.wait(dead[0], code=None)
        run.wait(*other, *spare)
    lines = [run.lines(rank) for rank in range(6)]
    counted = [(line["share"], line["samples"]) for each in lines for line in each]
    seen = [x for share, samples in counted if share is not None for x in samples]
    assert sorted(seen) == list(range(SAMPLES))
    assert [line["share"] for line in lines[4]] == [None, None, 0, 0, 0, 0]
    for rank in (2, 3):
        mine, theirs = (
            [line["digest"] for line in each] for each in (lines[rank], lines[rank + 2])
        )
        assert mine == theirs
        assert len(mine) == STEPS
