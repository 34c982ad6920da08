"""Processes die and stop while one of them heals. The state holds 64 MiB, so that it takes time."""

from __future__ import annotations

import signal

import pytest

from lighthouse import LighthouseServer
from tests.process.conftest import JobFactory
from tests.process.driver import Job, Worker, all_commit, frozen

BALLAST_BYTES = 64 << 20


@pytest.fixture
def job(make_job: JobFactory, lighthouse: LighthouseServer) -> Job:
    return make_job(lighthouse.address(), ballast_bytes=BALLAST_BYTES)


def killed_one(job: Job) -> list[Worker]:
    """Three groups, of which the third has been killed; the survivors."""
    survivors = job.start_all(3)
    victim = survivors.pop()
    victim.send_signal(signal.SIGKILL)
    all_commit(survivors, 2)
    return survivors


def heal_begins(job: Job, source: Worker, moment: str) -> Worker:
    """The third group is back, and heals ("heal_start"), or `source` is held in its snapshot ("publish")."""
    if moment == "publish":
        source.hold("publish")
    target = job.start("2")
    if moment == "publish":
        source.await_at("publish")
    else:
        target.await_event("heal_start")
    return target


@pytest.mark.parametrize("moment", ["heal_start", "load"])
def test_target_is_killed(job: Job, moment: str) -> None:
    """While the state is on its way, and when it has just arrived."""
    survivors = killed_one(job)
    target = job.start("2", holds=["load"])
    if moment == "load":
        target.await_at("load")
    else:
        target.await_event("heal_start")
    target.send_signal(signal.SIGKILL)
    all_commit(survivors)
    back = job.start("2")
    back.await_event("heal_done")
    all_commit([*survivors, back])
    job.finish()


@pytest.mark.parametrize("moment", ["heal_start", "publish"])
def test_source_is_killed(job: Job, moment: str) -> None:
    """One of two sources, while it serves and while it takes its snapshot."""
    source, other = killed_one(job)
    target = heal_begins(job, source, moment)
    source.send_signal(signal.SIGKILL)
    target.await_commits(3)
    all_commit([other])
    back = job.start("0")
    back.await_event("heal_done")
    all_commit([other, target, back])
    job.finish()


def test_last_source_is_killed(job: Job) -> None:
    """No process holds the state any more: once a whole one is there, the job starts over from it,
    and says so by its steps."""
    source, other = killed_one(job)
    other.stop()
    source.hold("publish")
    target = job.start("2")
    source.await_at("publish")
    source.send_signal(signal.SIGKILL)
    fresh = job.start("0")
    assert target.await_commit()["step"] < 10
    for worker in (target, fresh):
        # The target may have started over alone, and be far ahead in reports.
        worker.await_commits(3)
    for worker in (target, fresh):
        worker.mark()
    steps = [worker.await_commit()["step"] for worker in (target, fresh)]
    fresh.stop()
    target.stop()
    assert max(steps) - min(steps) < 10


@pytest.mark.parametrize("moment", ["heal_start", "load"])
def test_target_is_stopped_for_a_while(job: Job, moment: str) -> None:
    survivors = killed_one(job)
    target = job.start("2", holds=["load"] if moment == "load" else [])
    if moment == "load":
        target.await_at("load")
    else:
        target.await_event("heal_start")
    for survivor in survivors:
        survivor.mark()
    with frozen(target):
        for survivor in survivors:
            survivor.await_commits(3)
    if moment == "load":
        target.go()
    all_commit([*survivors, target])
    job.finish()


@pytest.mark.parametrize("moment", ["heal_start", "publish"])
def test_source_is_stopped_for_a_while(job: Job, moment: str) -> None:
    source, other = killed_one(job)
    target = heal_begins(job, source, moment)
    with frozen(source):
        target.await_commits(3)
        all_commit([other])
    if moment == "publish":
        source.go()
    all_commit([source, other, target])
    job.finish()


def test_target_leaves_on_sigterm(job: Job) -> None:
    """A group that is told to go while it heals does so, and the others do not mind."""
    survivors = killed_one(job)
    target = job.start("2", holds=["load"])
    target.await_at("load")
    target.send_signal(signal.SIGTERM)
    target.go()
    assert target.await_end() == ""
    all_commit(survivors)
    job.finish()
