"""What a schedule has one member do, inner step by inner step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ft_core.diloco.schedule import Schedule, ScheduleEvent


def trace(
    schedule: Schedule,
    inner_steps: int,
    *,
    start: int = 0,
    commits: Callable[[int], bool] = lambda attempt: True,
) -> Iterator[tuple[int, ScheduleEvent, int]]:
    """(inner step from 1, event, fragment) for a member that starts a slot at outer step `start`.

    `commits(n)`: whether attempt n (0, 1, ...) at an outer step is committed.
    """
    step, local_step, attempt = start, 0, 0
    for inner in range(1, inner_steps + 1):
        local_step += 1
        for event in schedule.due(step, local_step):
            yield inner, event, schedule.fragment_of(step)
            if event is ScheduleEvent.APPLY:
                step, local_step = step + commits(attempt), 0
                attempt += 1
