"""What counts of what a member has done."""

from __future__ import annotations

import pytest

from ft_core.diloco.schedule import Windows


def test_unweighted_windows_count_one_unless_dropped() -> None:
    windows = Windows(2, 10, "")
    assert windows.weight(0) == 1.0
    windows.inner_step()
    windows.drop_all()
    assert windows.weight(0) == windows.weight(1) == 0.0
    windows.inner_step()
    assert windows.weight(0) == 1.0


def test_by_inner_steps_each_fragment_for_itself() -> None:
    windows = Windows(2, 10, "steps")
    for _ in range(5):
        windows.inner_step()
    windows.restart(0)
    for _ in range(5):
        windows.inner_step()
    assert (windows.weight(0), windows.weight(1)) == (0.5, 1.0)
    windows.drop_all()
    assert (windows.weight(0), windows.weight(1)) == (0.0, 0.0)


def test_by_samples() -> None:
    windows = Windows(1, 10, "samples")
    windows.add_samples(32)
    windows.inner_step()
    windows.add_samples(7)
    assert windows.weight(0) == 39.0
    with pytest.raises(ValueError, match="must not be negative"):
        windows.add_samples(-1)


def test_a_window_is_not_kept_while_it_is_unknown_whether_it_was_counted() -> None:
    windows = Windows(2, 10, "")
    windows.sent(1)
    assert windows.may_be_kept(0) and not windows.may_be_kept(1)
    windows.committed(1)
    assert windows.may_be_kept(1)
    windows.sent(0)
    windows.in_step()  # it still stands where the quorum stands: the outer step was discarded
    assert windows.may_be_kept(0)


def test_unknown_unit() -> None:
    with pytest.raises(ValueError, match="weighted must be"):
        Windows(1, 10, "often")
