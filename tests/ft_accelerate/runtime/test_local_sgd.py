"""LocalSGD and DiLoCo in raw loops, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.harness import running
from tests.ft_accelerate.runtime.local_oracle import trained

pytestmark = pytest.mark.process


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


def test_streaming_diloco_is_what_its_formulas_say(tmp_path: Path, lighthouse: str) -> None:
    """Two groups of two processes; a fragment is on its way while its successor's steps go on."""
    names = [["net.0.weight", "net.0.bias"], ["net.4.weight", "net.4.bias"]]
    streaming = {"fragments": names, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
    options = {"local": "diloco", "norm": False, "local_steps": 8, "diloco": streaming}
    with running(tmp_path, lighthouse, **options) as run:
        run.wait(run.start(0, 2, 2), run.start(1, 2, 2))
    ends = [run.end(i) for i in range(4)]
    assert len({end["digest"] for end in ends}) == 1
    logs = [run.lines(i) for i in range(4)]
    expected = trained(logs, options, parts=[[0, 1], [2, 3]], delay=2, alpha=0.5)
    assert ends[0]["values"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)
    before = trained(logs, options, parts=[[0, 1], [2, 3]], delay=1, alpha=0.5)
    assert ends[0]["values"] != pytest.approx(before.tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("local", ["local_sgd", "diloco"])
def test_one_that_is_killed_between_meetings_comes_back_after_one(
    tmp_path: Path, lighthouse: str, local: str
) -> None:
    """Two groups of two processes; held where DiLoCo has a fragment on its way."""
    streaming = {
        "fragments": 2,
        "codec": "int4",
        "error_feedback": True,
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.3,
    }
    options = {"local": local, "samples": 160, "epochs": 4, "step_delay_s": 0.01}
    with running(tmp_path, lighthouse, holds=["step-11"], diloco=streaming, **options) as run:
        zero, one = run.start(0, 2, 2), run.start(1, 2, 2)
        one = run.killed_and_back(one, 1, hold="step-11", of=0, size=2)
        run.wait(zero, one)
    ends = [run.end(i) for i in range(4)]
    for key in ("digest", "ticks", "accuracy"):
        assert len({end[key] for end in ends}) == 1, key
    assert {end["step"] for end in ends} == {40}
    for index in (2, 3):
        _, second = run.lives(index)
        back = [line["step"] for line in run.lines(index) if line["pid"] == second]
        assert 12 <= back[0] <= 30
    assert run.events(0, "discard") <= 2  # in both processes: the meeting in which they were missed


@pytest.mark.parametrize("local", ["stock", "diloco"])
@pytest.mark.parametrize("hold", ["step-11", "eval-0"])
def test_one_that_others_wait_for_comes_back_in_a_meeting_or_in_an_evaluation(
    tmp_path: Path, lighthouse: str, local: str, hold: str
) -> None:
    """They do nothing without it (`min_replicas`). It takes the parameters that a peer has there, which optimizers have
    updated without a vote."""
    streaming = {"fragments": 2, "fragment_sync_delay": 1}
    options = {"local": local, "samples": 160, "epochs": 2, "diloco": streaming}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path, lighthouse, holds=[hold], **options) as run:
        zero, one = run.start(0, **both), run.start(1, **both)
        run.wait(zero, run.killed_and_back(one, 1, hold=hold, of=0, **both))
    ends = [run.end(i) for i in (0, 1)]
    for key in ("digest", "ticks", "accuracy"):
        assert ends[0][key] == ends[1][key], key
