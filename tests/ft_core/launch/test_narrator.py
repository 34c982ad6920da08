"""What a person sees of a run: a line for each thing that happens to it, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ft_core.launch.narrator import LOST, UNLIKE, Narrator
from ft_core.telemetry import COMMIT, DISCARD, HEAL_DONE, QUORUM, REVOKED, VISIT, WAITING, Event
from lighthouse.wire.messages import NOT_HELD


class Told:
    """The narrator of group 0, and what it has said since one looked last."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        *,
        deaths: bool = True,
        returns: bool = True,
        ends: bool = False,
    ) -> None:
        self.step, self._capsys = 0, capsys
        self.sink = Narrator(
            "ft_lightning",
            "0",
            3,
            "tcp://h:1",
            lambda: f"step {self.step:,}" if self.step else "",
            deaths=deaths,
            returns=returns,
            ends=ends,
        )

    def __call__(self, kind: str, **data: Any) -> list[str]:
        self.sink(Event(kind, data))
        return self._capsys.readouterr().err.splitlines()

    def quorum(
        self,
        *members: str,
        rank: int = 0,
        healing: tuple[str, ...] = (),
        reason: str = "",
        step: int = 0,
    ) -> list[str]:
        data = {"members": members, "replica_rank": rank, "healing": healing, "reason": reason}
        return self(QUORUM, quorum_id=1, **data)

    def commit(self) -> list[str]:
        self.step += 1
        return self(COMMIT, step=self.step, participants=3, seconds=0.1)


def test_the_first_member_tells_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys)
    start = "ft_lightning: training with 3 of 3 replica groups; the lighthouse is tcp://h:1"
    assert told.quorum("0:a", "1:a", "2:a") == [start]
    assert told.commit() == []
    assert told(REVOKED, quorum_id=1, reason="1: process died") == []
    gone = "ft_lightning: group 1 is gone (process died); 2 of 3 replica groups go on"
    assert told.quorum("0:a", "2:a") == [gone]
    assert told.quorum("0:a", "1:b", "2:a", healing=("1:b",)) == []  # it tells that itself
    gone = "ft_lightning: group 1 is gone; 2 of 3 replica groups go on"
    assert told.quorum("0:a", "2:a") == [gone]  # a later quorum was not told why
    assert told.quorum("0:a", "1:b", "2:a", healing=("1:b",)) == []
    told(REVOKED, quorum_id=3, reason="2: left: finished")
    assert told.quorum("0:a", "1:b") == []
    assert told.quorum("0:a", "1:b", rank=1) == told.quorum("0:a", rank=1) == []


def test_steps_that_are_lost_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """By the place of the script: the lighthouse counts its agreements as well, so its step 54 is no step of
    the script's."""
    reason = f"2 replica groups at step 50; step 54 {NOT_HELD}"
    for rank in (0, 1):
        told = Told(capsys)
        told.step = 20
        lines = told.quorum("0:b", "1:b", rank=rank, reason=reason)
        said = f"ft_lightning: the job goes back to step 20: what was committed later {NOT_HELD}"
        assert lines[1:] == [said] * (rank == 0)
    # The first member has just been started again.
    lines = told.quorum("1:b", "0:b", rank=1, healing=("1:b",), reason=reason)
    assert lines == [said]
    # It has no place yet: a script that has loaded a checkpoint by itself may be anywhere.
    lines = Told(capsys).quorum("0:b", "1:b", reason=reason)
    assert lines[1:] == [f"ft_lightning: the job goes back: what was committed later {NOT_HELD}"]


def test_deaths_that_a_supervisor_tells_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, deaths=False)
    told.quorum("0:a", "1:a", "2:a")
    told(REVOKED, quorum_id=1, reason="1: process died")
    assert told.quorum("0:a", "2:a") == []
    why = "evicted: did not vote before the step's deadline"
    told(REVOKED, quorum_id=2, reason=f"2: {why}")
    (line,) = told.quorum("0:a")
    assert line == f"ft_lightning: group 2 is gone ({why}); 1 of 3 replica groups go on"


@pytest.mark.parametrize("first", ["0:a", "1:a"])
def test_one_that_is_at_its_end_while_others_go_on(
    capsys: pytest.CaptureFixture[str], first: str
) -> None:
    """`first`: of the members. The first one that is left tells it."""
    for ends in (False, True):
        told = Told(capsys, deaths=False, ends=ends)
        members = sorted(["0:a", "1:a", "2:a"], key=lambda member: member != first)
        told.quorum(*members, rank=members.index("0:a"))
        told(REVOKED, quorum_id=1, reason="1: left: finished")
        line = f"ft_lightning: group 1 is at the end of its script; 2 of 3 replica groups go on: {UNLIKE}"
        assert told.quorum("0:a", "2:a") == []
        assert told.commit() == [line] * ends
        assert told.commit() == []


def test_all_that_come_to_their_end_one_after_the_other_have_not_parted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three that had trained alike ended within a moment, and a line said that they had not."""
    told = Told(capsys, deaths=False, ends=True)
    told.quorum("0:a", "1:a", "2:a")
    told.commit()
    for gone, left in (("1", ("0:a", "2:a")), ("2", ("0:a",))):
        told(REVOKED, quorum_id=1, reason=f"{gone}: left: finished")
        assert told.quorum(*left) == []


def test_one_that_has_healed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys)
    told.step = 1203
    assert told.quorum("1:a", "0:b", rank=1, healing=("0:b",)) == []
    assert told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=()) == []
    (line,) = told.commit()
    assert line.startswith("ft_lightning: group 0 is back at step 1,204 after ")
    assert told.commit() == []
    for _ in range(3):  # let in at an agreement, where no state can be given
        told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=())
        assert told(VISIT) == told.commit() == []
    told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=())
    assert len(told.commit()) == 1
    told = Told(capsys, returns=False)  # where the framework's integration knows better when it is
    told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=())
    assert told.commit() == []


def test_one_that_the_others_went_on_without_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys)
    told(
        WAITING, reason="expelled: not known here"
    )  # a lighthouse that was started before this process
    for reason, why in (
        ("not known here", f" ({LOST})"),
        ("evicted: kept the others waiting", " (evicted: kept the others waiting)"),
        ("", ""),
    ):
        told.quorum("0:a", "1:a")
        told.commit()
        if reason:
            assert told(WAITING, reason=f"expelled: {reason}") == []
        assert told(WAITING, reason="waiting for the step in progress to end") == []
        told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=())
        (line,) = told.commit()
        assert line.endswith(f" is back at step {told.step}{why}"), line


@pytest.mark.parametrize("age_s", [0.01, math.inf])
def test_a_time_that_is_not_known_or_rounds_to_nothing_is_not_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    monkeypatch.setattr("ft_core.launch.narrator.age_s", lambda: age_s)
    monkeypatch.setattr("ft_core.launch.narrator.time.monotonic", lambda: 1000.0)
    told = Told(capsys)
    told.quorum("1:a", "0:b", rank=1, healing=("0:b",))
    told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=())
    assert told.commit() == ["ft_lightning: group 0 is back at step 1"]


def test_one_that_was_evicted_before_its_first_commit_was_away_since_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process had begun 100 s before: it imported libraries, and waited for its peers."""
    now = 1000.0
    monkeypatch.setattr("ft_core.launch.narrator.age_s", lambda: 0.0)
    monkeypatch.setattr("ft_core.launch.narrator.time.monotonic", lambda: now)
    told = Told(capsys)
    now += 100
    told.quorum("0:a", "1:a")
    now += 7
    told(WAITING, reason="expelled: evicted: kept the others waiting")
    told.quorum("0:a", "1:a", healing=("0:a",))
    told(HEAL_DONE, step=9, bytes=1, seconds=0.1, sources=())
    now += 1
    (line,) = told.commit()
    assert line.startswith("ft_lightning: group 0 is back at step 1 after 8.0 s (evicted")


def test_discards_that_repeat_are_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys)
    told.quorum("0:a", "1:a", "2:a")
    for _ in range(2):
        lines = [told(DISCARD, step=5, reason="no way", seconds=0.1) for _ in range(12)]
        said = [index + 1 for index, line in enumerate(lines) if line]
        assert said == [3, 10]
        place = f"step {told.step}" if told.step else "the first step"
        assert lines[2] == [f"ft_lightning: {place} was discarded 3 times in a row: no way"]
        told.commit()
