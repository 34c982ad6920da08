"""R8: a training that has finished is not started over by a member that comes back."""

from __future__ import annotations

from typing import Any

from lighthouse.machine.job import Effect, JobState, Send
from lighthouse.wire.messages import FINISHED, Leave, Quorum, Refused, Waiting, next_lineage
from tests.lighthouse.machine.test_job import KEY, LIMITS, TERM, full_job, join, vote_all

MOMENT = 10.0


def told(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def finished_job(*reasons: str) -> JobState:
    job, names = full_job(3)
    vote_all(job, names, 1, 0, "root")
    for name, reason in zip(names, reasons, strict=True):
        job.handle(name.encode(), Leave(KEY, name, reason), 2.0)
    return job


def test_one_who_comes_back_waits_and_is_sent_away() -> None:
    job = finished_job(FINISHED, FINISHED, FINISHED)
    effects = job.handle(b"again", join("again", expected_replicas=3), MOMENT)
    (waiting,) = told(effects, Waiting)
    assert "finished at step 1" in waiting.reason
    assert not told(effects, Quorum)
    deadline = job.deadline()
    assert deadline == MOMENT + LIMITS.connect_timeout_s
    (refused,) = told(job.expire(deadline), Refused)
    assert "does not start it over" in refused.reason
    assert job.empty


def test_all_members_that_come_start_anew() -> None:
    job = finished_job(FINISHED, FINISHED, FINISHED)
    effects: list[Effect] = []
    for name in ("x", "y", "z"):
        effects = job.handle(name.encode(), join(name), MOMENT)
    assert told(effects, Quorum)


def test_members_of_the_next_training_come_one_by_one() -> None:
    """Each takes longer to connect than the join timeout."""
    job = finished_job(FINISHED, FINISHED, FINISHED)
    effects: list[Effect] = []
    for number, name in enumerate(("x", "y", "z")):
        now = MOMENT + number * LIMITS.connect_timeout_s / 3
        assert not told(job.expire(now), Refused)
        effects = job.handle(name.encode(), join(name, expected_replicas=3), now)
    assert told(effects, Quorum)


def test_a_member_that_holds_the_last_step_goes_on() -> None:
    """A second `fit`, or a resumed checkpoint."""
    job = finished_job(FINISHED, FINISHED, FINISHED)
    lineage = next_lineage("root", TERM.nonce, 1, 0)
    effects = job.handle(b"x", join("x", step=1, lineage=lineage), MOMENT)
    assert not told(effects, Refused)
    assert told(job.expire(MOMENT + LIMITS.join_timeout_s), Quorum)


def test_members_that_only_shut_down_may_come_back() -> None:
    job = finished_job("shutdown", "shutdown", "shutdown")
    job.handle(b"again", join("again"), MOMENT)
    effects = job.expire(MOMENT + LIMITS.join_timeout_s)
    assert told(effects, Quorum)
