"""R8: a training that has finished is not started over by one who comes back."""

from __future__ import annotations

from typing import Any

from lighthouse.machine.effects import Effect, Send
from lighthouse.machine.job import JobState
from lighthouse.wire.messages import FINISHED, Leave, Quorum, Refused, Waiting, next_lineage
from tests.unit.test_room import KEY, LIMITS, full_room, join, vote_all

MOMENT = 10.0


def told(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def finished_room(*reasons: str) -> JobState:
    room, names = full_room(3)
    vote_all(room, names, 1, 0, "root")
    for name, reason in zip(names, reasons, strict=True):
        room.handle(name.encode(), Leave(KEY, name, reason), 2.0)
    return room


def test_one_who_comes_back_waits_and_is_sent_away() -> None:
    room = finished_room(FINISHED, FINISHED, FINISHED)
    effects = room.handle(b"again", join("again", expected_replicas=3), MOMENT)
    (waiting,) = told(effects, Waiting)
    assert "finished at step 1" in waiting.reason
    assert not told(effects, Quorum)
    deadline = room.deadline()
    assert deadline == MOMENT + LIMITS.join_timeout_s
    (refused,) = told(room.expire(deadline), Refused)
    assert "does not start it over" in refused.reason
    assert room.empty


def test_all_who_come_start_anew() -> None:
    room = finished_room(FINISHED, FINISHED, FINISHED)
    effects: list[Effect] = []
    for name in ("x", "y", "z"):
        effects = room.handle(name.encode(), join(name), MOMENT)
    assert told(effects, Quorum)


def test_one_who_holds_the_last_step_goes_on() -> None:
    """A second `fit`, or a resumed checkpoint."""
    room = finished_room(FINISHED, FINISHED, FINISHED)
    lineage = next_lineage("root", 1, 0)
    effects = room.handle(b"x", join("x", step=1, lineage=lineage), MOMENT)
    assert not told(effects, Refused)
    assert told(room.expire(MOMENT + LIMITS.join_timeout_s), Quorum)


def test_those_who_only_shut_down_may_come_back() -> None:
    room = finished_room("shutdown", "shutdown", "shutdown")
    room.handle(b"again", join("again"), MOMENT)
    effects = room.expire(MOMENT + LIMITS.join_timeout_s)
    assert told(effects, Quorum)
