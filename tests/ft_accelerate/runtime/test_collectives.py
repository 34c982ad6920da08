"""Each operation of docs/accelerate_semantics.md, with a replica group away, back, and there.

Three groups bring 1, 2 and 3. In one run of three processes group 2 (which brings 3) is away in the
first two calls of each operation, heals in the third, and takes part in the fourth.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import accelerate
import pytest

from tests.ft_accelerate.harness import running
from tests.harness.lighthouses import patient_lighthouse

pytestmark = pytest.mark.process

EXPECTED: dict[str, tuple[Any, Any]] = {  # (one is away, all are there)
    "gather": ([1.0, 2.0, 1.0], [1.0, 2.0, 3.0]),
    "gather_nested": (
        [[1, 2, 1], [False, True, False]],
        [[1, 2, 3], [False, True, True]],
    ),
    "gather_conjugate": (
        [[0.0, -1.0], [0.0, -2.0], [0.0, -1.0]],
        [[0.0, -1.0], [0.0, -2.0], [0.0, -3.0]],
    ),
    "gather_for_metrics": ([1, 2, 1], [1, 2, 3]),
    "gather_embeddings": ([[1.0, 2.0, 1.0], 4.5], [[1.0, 2.0, 3.0], 6.0]),
    "gather_object": (["p1", "p2"], ["p1", "p2", "p3"]),
    "reduce_sum": (4.5, 6.0),
    "reduce_imaginary": (-4.5, -6.0),
    "reduce_int": (5, 6),
    "reduce_mean": (1.5, 2.0),
    "reduce_max": (2.0, 3.0),
    "broadcast": ([1], [3]),
    "broadcast_object_list": (["p1"], ["p3"]),
    "pad_across_processes": ([1, -1, 2, 2, 1, -1], [1, -1, -1, 2, 2, -1, 3, 3, 3]),
    "check_trigger": (True, True),
    "wait_for_everyone": ("out", "out"),
    "main_process_first": ("in", "in"),
}
if importlib.util.find_spec("torchmetrics"):
    EXPECTED["torchmetrics_sum"] = (6.0, 14.0)
    EXPECTED["torchmetrics_cat"] = ([1, 2, 2, 1], [1, 2, 2, 3, 3, 3])

TWO_EXCHANGES = ("gather_embeddings", "gather_nested", "pad_across_processes")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the three processes have written."""
    folder = tmp_path_factory.mktemp("collectives")
    worker = Path(__file__).with_name("collectives_worker.py")
    names = [*EXPECTED, "save_state", "load_state", "log"]
    with patient_lighthouse() as server:
        with running(folder, server.address(), worker, operations=names, group=2) as run:
            run.wait(*[run.start(index, 3) for index in range(3)])
    tracked = [len(p.read_text().splitlines()) for p in sorted(folder.glob("tracked.*"))]
    return [{**run.end(index), "tracked": tracked, "folder": folder} for index in range(3)]


@pytest.mark.parametrize("name", list(EXPECTED))
def test_reaches_over_the_quorum_while_membership_changes(
    ends: list[dict[str, Any]], name: str
) -> None:
    if name == "reduce_max" and "MAX" not in inspect.getsource(accelerate.utils.operations.reduce):
        pytest.skip("this Accelerate has no such reduction")
    away, there = EXPECTED[name]
    third = (
        there if name in TWO_EXCHANGES else away
    )  # it heals in the second one of the call before
    for index, end in enumerate(ends):
        assert end["results"][name] == [away, away, third, there], f"process {index}"


def test_all_train_on_from_equal_weights(ends: list[dict[str, Any]]) -> None:
    assert ends[0]["weight"] == ends[1]["weight"] == ends[2]["weight"]
    assert sum(end["main"] for end in ends) == 1


def test_a_script_that_parts_from_the_others_is_told_and_they_go_on(
    ends: list[dict[str, Any]],
) -> None:
    assert "is at gather" in ends[2]["parted"] and "are at a gradient step" in ends[2]["parted"]
    assert ends[0]["parted"] == ends[1]["parted"] != ends[0]["weight"]


def test_save_state_is_written_by_the_main_process_and_numbered_alike(
    ends: list[dict[str, Any]],
) -> None:
    numbers = [end["results"]["save_state"] for end in ends]
    assert numbers[:2] == [[1, 2, 3, 4]] * 2
    assert numbers[2][-1] == 4  # the one that came back goes on with its peers' number
    assert (ends[0]["folder"] / "state" / "model.safetensors").exists()
    assert [end["results"]["load_state"] for end in ends] == [["loaded"] * 4] * 3


def test_trackers_hear_each_value_once(ends: list[dict[str, Any]]) -> None:
    assert sum(ends[0]["tracked"]) == 4
