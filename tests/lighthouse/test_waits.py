"""When a wait is over."""

from __future__ import annotations

import pytest

from lighthouse import waits
from lighthouse.waits import PUT_OFF_S, READ_S, Overdue, in_time


def test_something_is_due_only_after_a_look_that_found_nothing() -> None:
    overdue = Overdue(look_s=0.5)
    assert not overdue.passed(None, 10.0)
    assert not overdue.passed(10.0, 9.9)
    assert not overdue.passed(10.0, 10.0)  # what came until then may be unread
    assert overdue.look_at(10.0) == 10.0
    assert not overdue.passed(10.0, 10.0, dry=False)
    assert overdue.passed(10.0, 10.0)
    assert overdue.look_at(20.0) == 20.0


def test_a_loop_that_was_away_looks_for_longer() -> None:
    overdue = Overdue(look_s=0.5)
    assert not overdue.passed(10.0, 15.0)
    assert overdue.look_at(10.0) == 15.5
    assert not overdue.passed(10.0, 15.4)
    assert not overdue.passed(16.0, 15.45)  # something has come: it waits for the next now
    assert not overdue.passed(16.0, 16.0)
    assert overdue.passed(16.0, 16.0)


def test_what_keeps_coming_puts_off_what_is_due_for_a_limited_time() -> None:
    overdue = Overdue()
    assert not overdue.passed(10.0, 10.0, dry=False)
    assert not overdue.passed(10.0, 10.0 + PUT_OFF_S - 0.01, dry=False)
    assert overdue.passed(10.0, 10.0 + PUT_OFF_S, dry=False)


class Stopped:
    """A clock, and a wait of the process that has it. It is stopped for 100 s in its first wait; what it waits for
    is there in the wait number `comes`."""

    def __init__(self, comes: int) -> None:
        self.now, self._comes = 0.0, comes
        self.asked: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.asked.append(seconds)
        self.now += seconds if self.asked[1:] else 100.0
        return len(self.asked) == self._comes


@pytest.mark.parametrize("comes", [1, 2, 3])
def test_what_another_thread_sets_is_in_time_where_both_were_away(
    monkeypatch: pytest.MonkeyPatch, comes: int
) -> None:
    process = Stopped(comes)
    monkeypatch.setattr(waits, "time", process)
    assert in_time(process.wait, 10.0) == (comes < 3)
    assert process.asked == [10.0, pytest.approx(READ_S)][:comes]
