"""LocalSGD and DiLoCo in raw loops, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerate.harness import running

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

STEPS = 19


def test_accelerate_s_own_class_gives_the_same_weights(tmp_path: Path, lighthouse: str) -> None:
    options = {"local": "stock", "norm": False, "epochs": 1}
    with running(tmp_path / "plain", **options) as plain:
        plain.wait(*plain.start_plain(), code=None)
    with running(tmp_path / "ft", lighthouse, **options) as run:
        run.wait(run.start(0), run.start(1))
    for index in (0, 1):
        assert run.end(index)["weights"] == plain.end(0)["weights"]
        assert run.end(index)["accuracy"] == plain.end(index)["accuracy"]
        assert [x["weights"] for x in run.lines(index)] == [
            x["weights"] for x in plain.lines(index)
        ]


@pytest.mark.parametrize("local", ["local_sgd", "diloco"])
def test_one_that_is_killed_between_meetings_comes_back_after_one(
    tmp_path: Path, lighthouse: str, local: str
) -> None:
    options = {"local": local, "epochs": 4, "step_delay_s": 0.01}
    with running(tmp_path, lighthouse, holds=["step-12"], **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-12", of=0)
        run.wait(zero, one)
    ends = [run.end(i) for i in (0, 1)]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["step"] == ends[1]["step"] == 4 * STEPS
    assert ends[0]["ticks"] == ends[1]["ticks"]
    assert ends[0]["accuracy"] == ends[1]["accuracy"]
    back = [line["step"] for line in run.lines(1) if line["pid"] == one.pid]
    assert 13 <= back[0] <= 3 * STEPS
    assert run.events(0, "discard") <= 1  # the meeting in which it was missed
