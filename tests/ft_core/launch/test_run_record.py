"""Time that a run has lost, as its events tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_core.launch.run_record import Life, Run, draw, gap_around


def run_with_commits_at(*times: float) -> Run:
    events = [{"kind": "commit", "t": t, "step": step} for step, t in enumerate(times)]
    return Run([Life(0, 0, 1, 0.0, events=events)])


@pytest.mark.parametrize("killed_at", [2.05, 1.99], ids=["in its step", "as a step ends"])
def test_the_step_that_was_disturbed_is_the_longest_near_the_kill(killed_at: float) -> None:
    run = run_with_commits_at(1.8, 1.9, 2.0, 2.5, 2.6)
    gap = gap_around(run, 0, killed_at)
    assert gap is not None
    assert (gap.from_s, gap.until_s) == (2.0, 2.5)
    assert gap.lost_s == pytest.approx(0.4)


def test_what_is_slow_long_after_is_something_else() -> None:
    gap = gap_around(run_with_commits_at(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 9.0), 0, 1.15)
    assert gap is not None
    assert gap.lost_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("moment", [0.5, 9.0])
def test_a_group_that_is_not_there_before_and_after_has_no_gap(moment: float) -> None:
    assert gap_around(run_with_commits_at(1.0, 1.1, 1.2), 0, moment) is None


def test_a_life_that_ends_before_its_first_quorum_is_drawn(tmp_path: Path) -> None:
    """The picture is what a failed run is looked at with."""
    commits = [{"kind": "commit", "t": t, "step": step} for step, t in enumerate((1.0, 1.1, 1.2))]
    quorum = {"kind": "quorum", "t": 0.5, "members": ["0", "1"]}
    lives = [
        Life(0, 0, 1, 0.0, events=[quorum, *commits]),
        Life(1, 0, 2, 0.0, ended_s=0.4, killed=True),
    ]
    draw(Run(lives), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 0
