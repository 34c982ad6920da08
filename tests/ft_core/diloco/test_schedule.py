"""The pure clock: which fragment is launched and applied after which inner step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.diloco.schedule import Schedule, ScheduleEvent
from tests.ft_core.diloco.reference import trace

LAUNCH, APPLY = ScheduleEvent.LAUNCH, ScheduleEvent.APPLY


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    fragments = draw(st.integers(1, 9))
    sync_every = draw(st.integers(fragments, 60))
    delay = draw(st.integers(0, sync_every // fragments - 1))
    return Schedule(sync_every, fragments, delay)


def test_diloco_is_one_fragment_without_delay() -> None:
    assert list(trace(Schedule(3), 7)) == [
        (3, LAUNCH, 0),
        (3, APPLY, 0),
        (6, LAUNCH, 0),
        (6, APPLY, 0),
    ]


def test_streaming_staggers_fragments_and_overlaps() -> None:
    assert list(trace(Schedule(6, 2, 1), 9)) == [
        (2, LAUNCH, 0),
        (3, APPLY, 0),
        (5, LAUNCH, 1),
        (6, APPLY, 1),
        (8, LAUNCH, 0),
        (9, APPLY, 0),
    ]


def test_a_discarded_outer_step_is_tried_again_in_the_next_slot() -> None:
    found = list(trace(Schedule(4, 2), 8, commits=lambda attempt: attempt != 1))
    assert [(inner, fragment) for inner, event, fragment in found if event is APPLY] == [
        (2, 0),
        (4, 1),
        (6, 1),
        (8, 0),
    ]


@given(schedules(), st.integers(0, 1000), st.integers(1, 4))
def test_every_fragment_exactly_once_a_window(schedule: Schedule, start: int, windows: int) -> None:
    """From any outer step on: `windows` windows are `windows` outer steps of each fragment."""
    found = list(trace(schedule, windows * schedule.sync_every, start=start))
    for event in ScheduleEvent:
        fragments = [f for _, e, f in found if e is event]
        assert sorted(fragments) == sorted(list(range(schedule.fragments)) * windows)
        first = schedule.fragment_of(start)
        assert fragments == [(first + i) % schedule.fragments for i in range(len(fragments))]


@given(schedules(), st.integers(0, 100))
def test_launch_comes_the_delay_before_apply_and_one_is_on_its_way_at_a_time(
    schedule: Schedule, start: int
) -> None:
    found = list(trace(schedule, 3 * schedule.sync_every, start=start))
    for launch, apply in zip(found[::2], found[1::2], strict=True):
        assert (launch[1], apply[1]) == (LAUNCH, APPLY)
        assert launch[2] == apply[2]
        assert apply[0] - launch[0] == schedule.delay


@given(schedules(), st.integers(0, 50), st.lists(st.booleans(), max_size=30))
def test_the_order_survives_discards(schedule: Schedule, start: int, outcomes: list[bool]) -> None:
    """What is sent depends on the number of committed steps alone, not on what was discarded."""

    def commits(attempt: int) -> bool:
        return attempt >= len(outcomes) or outcomes[attempt]

    found = trace(schedule, 200, start=start, commits=commits)
    step = start
    for attempt, fragment in enumerate(f for _, event, f in found if event is APPLY):
        assert fragment == step % schedule.fragments
        step += commits(attempt)


@given(schedules())
def test_slots_are_equal_to_one_step_and_fill_the_window(schedule: Schedule) -> None:
    lengths = [schedule.slot_steps(f) for f in range(schedule.fragments)]
    assert sum(lengths) == schedule.sync_every
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) == schedule.shortest_slot > schedule.delay


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0,), "sync_every must be at least 1, got 0"),
        ((4, 0), "fragments must be at least 1"),
        ((3, 4), "sync_every=3 leaves no inner step to each of 4 fragments"),
        ((8, 2, -1), "fragment_sync_delay must not be negative"),
        ((8, 2, 4), "fragment_sync_delay=4 must be smaller than the 4 inner steps"),
        ((4, 1, 4), "fragment_sync_delay=4 must be smaller than the 4 inner steps"),
    ],
)
def test_refused(arguments: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Schedule(*arguments)
