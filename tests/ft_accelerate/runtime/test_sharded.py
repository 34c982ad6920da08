"""FSDP2 under Accelerate: two replica groups of two processes that share a model each. The oracle is
Accelerate's own HSDP over the same four processes, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ft_accelerate.harness import running
from tests.ft_accelerate.installed import installed
from tests.harness.waiting import PATIENCE_S
from tests.harness.workers import start

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("sharded_worker.py")
EVERYBODY = range(4)
ALIKE = ("weights", "moments", "sizes", "step", "norms", "lr", "processes", "sharded")
CONFIG = {
    "distributed_type": "FSDP",
    "use_cpu": True,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
    },
    "fault_tolerance_config": {"min_replicas": 2},
}
TWO = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}


def stock(folder: Path, **options: Any) -> list[dict[str, Any]]:
    with running(folder, worker=WORKER, **options) as plain:
        plain.wait(*plain.start_plain(4))
        return [plain.end(index) for index in EVERYBODY]


def assert_alike(mine: list[dict[str, Any]], expected: list[dict[str, Any]], but: str = "") -> None:
    for index in EVERYBODY:
        for key in [key for key in ALIKE if key != but]:
            assert mine[index][key] == expected[index][key], (index, key)
    assert [end["main"] for end in mine].count(True) == 1
    assert len({end["whole"] for end in (*mine, *expected)} - {""}) == 1


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "from_first": True}], ids=["plain", "accumulated"]
)
def test_weights_are_those_of_accelerate_s_own_mesh(
    tmp_path: Path, lighthouse: str, options: dict[str, Any]
) -> None:
    with running(tmp_path / "ft", lighthouse, WORKER, **options) as run:
        run.wait(*[run.start(index, 2, 2, **TWO) for index in (0, 1)])
        ends = [run.end(index) for index in EVERYBODY]
    expected = stock(tmp_path / "plain", **options)
    assert expected[0]["sharded"] == "DTensor"
    assert_alike(ends, expected)
    for key in ("right", "names"):
        assert all(end[key] == expected[0][key] for end in ends), key
    assert all(end["loss"] == pytest.approx(expected[0]["loss"]) for end in ends)


def test_in_bf16_groups_average_in_full_precision(tmp_path: Path, lighthouse: str) -> None:
    """Accelerate's own mesh averages over replicas in bf16, too: equal to its rounding. Also accumulated, and
    with activation checkpointing and weights that stay gathered."""
    options = {"precision": "bf16", "epochs": 1, "accumulate": 2, "recomputes": True}
    with running(tmp_path / "ft", lighthouse, WORKER, **options) as run:
        run.wait(*[run.start(index, 2, 2, **TWO) for index in (0, 1)])
        ends = [run.end(index) for index in EVERYBODY]
    expected = stock(tmp_path / "plain", **options)
    for mine, its in zip(ends, expected, strict=True):
        assert mine["norms"] == pytest.approx(its["norms"], rel=2**-6)
    assert ends[0]["weights"] == ends[2]["weights"] and ends[1]["weights"] == ends[3]["weights"]


def test_all_are_killed_and_go_on_from_what_they_have_saved(
    tmp_path: Path, lighthouse: str
) -> None:
    """The state is Accelerate's own: in both forms, in either direction."""
    once = {"shuffle": False, "saves": str(tmp_path / "saved")}
    with running(tmp_path / "ft", lighthouse, WORKER, **once, holds=["step-15"]) as run:
        groups = [run.start(index, 2, 2, **TWO) for index in (0, 1)]
        for index in EVERYBODY:
            run.until_held(index, "step-15")
        for group in groups:
            group.kill()
            run.wait(group, code=-signal.SIGKILL)
    names = {"SHARDED_STATE_DICT", "FULL_STATE_DICT"}
    assert {path.name for path in (tmp_path / "saved").iterdir() if path.name[0] != "."} == names
    once["saves"] = str(tmp_path / "stock")
    shards = {
        f"{what}_0/__{rank}_0.distcp"
        for what in ("pytorch_model_fsdp", "optimizer")
        for rank in EVERYBODY
    }  # stock: each of its four ranks may write some
    expected = stock(tmp_path / "plain", **once)
    for form in names:
        mine, its = (
            {str(path.relative_to(folder / form)) for path in (folder / form).rglob("*")}
            for folder in (tmp_path / "saved", tmp_path / "stock")
        )
        assert mine - shards == its - shards | {"ft_position.json"}, form
    # As stock resumes, too: Accelerate 1.11 takes something else from shards than what it has saved.
    again = {"shuffle": False, "resumes": str(tmp_path / "stock" / "SHARDED_STATE_DICT")}
    resumed = stock(tmp_path / "stock_again", **again)
    again["resumes"] = str(tmp_path / "saved" / "SHARDED_STATE_DICT")
    with running(tmp_path / "again", lighthouse, WORKER, **again) as run:
        run.wait(*[run.start(index, 2, 2, **TWO) for index in (0, 1)])
        assert_alike([run.end(index) for index in EVERYBODY], resumed)
    again["resumes"] = str(tmp_path / "saved" / "FULL_STATE_DICT")
    assert_alike(stock(tmp_path / "resumed", **again), expected, but="norms")


def test_a_process_is_killed_and_its_group_and_a_spare_come_back_with_their_shards(
    tmp_path: Path,
) -> None:
    """`accelerate launch` with all of it in the config file. No step is trained without both shares of the
    data, so the fault must not show in the numbers. The hot spare has read the other share: it ends, and computes
    the dead group's when it is started again. One that is late, and has not read the batch of that step, goes on."""
    folder = tmp_path / "ft"
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    dies = {"3": 13, "5": 13}  # the one whose group has the second share
    options = {"log": str(folder), "by_code": False, "dies": dies}
    command = [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        str(config),
        "--use_fault_tolerance",
        "--num_processes",
        "6",
        "--fault_tolerance_spares",
        "1",
        str(WORKER),
        json.dumps(options),
    ]
    with (folder / "said").open("wb") as output:
        launcher = start("accelerate", command, env=installed(folder), stdout=output, stderr=output)
    expected = stock(tmp_path / "plain")
    try:
        code = launcher.wait(PATIENCE_S)
    finally:
        launcher.end()
    said = (folder / "said").read_text()
    assert code == 0, said
    assert said.count("was killed by SIGKILL; it is started again") == 1, said
    # One group of the two that come back may be too late, since none waits for it.
    everybody = range(6)
    paths = {index: folder / f"{index}.end" for index in everybody}
    ends = {index: json.loads(path.read_text()) for index, path in paths.items() if path.exists()}
    assert {0, 1} <= ends.keys() and ({2, 3} <= ends.keys() or {4, 5} <= ends.keys())
    lives = [len((folder / f"{index}.started").read_text().split()) for index in everybody]
    both, dead, spare = [1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 1, 1], [1, 1, 1, 1, 2, 2]
    neither = [1] * 6  # the spare goes on, and the dead group is sent away before its script begins
    assert lives in (both, dead, spare, neither), said
    for index in ends:
        for key in ("weights", "moments", "sizes", "step", "lr", "processes"):
            assert ends[index][key] == expected[index % 2][key], (index, key)
