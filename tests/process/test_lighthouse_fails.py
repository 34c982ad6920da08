"""The lighthouse is killed and started again on its port, at any moment: no step is lost, no
replica group restarts, no member heals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.process.conftest import HEARTBEAT_TIMEOUT_S, JobFactory
from tests.process.driver import LighthouseProcess, Worker, align, all_commit

StartLighthouse = Callable[[int], LighthouseProcess]
PHASES = ("begin", "forward", "allreduce", "vote")


def restart(lighthouse: LighthouseProcess, start: StartLighthouse) -> LighthouseProcess:
    lighthouse.process.kill()
    lighthouse.process.wait()
    return start(lighthouse.port)


def check_nothing_lost(workers: list[Worker], starts: list[int]) -> None:
    """Steps follow each other without a hole or a repetition, and without a heal; ids grow."""
    for worker, start in zip(workers, starts, strict=True):
        steps = [r["step"] for r in worker.since("step", start) if r["committed"]]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        events = worker.since("event", start)
        assert not [e for e in events if e["event"] == "heal_start"]
        ids = [e["quorum_id"] for e in events if e["event"] == "quorum"]
        assert ids == sorted(set(ids))
        assert ids, "the new lighthouse has made a quorum"


@pytest.mark.parametrize("phase", PHASES)
def test_one_member_is_in_a_phase(
    make_job: JobFactory, lighthouse_process: StartLighthouse, phase: str
) -> None:
    """One member is held in the phase; the others go as far as they get without it."""
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address)
    workers = job.start_all(3)
    workers[1].hold(phase)
    workers[1].await_at(phase)
    starts = [worker.count() for worker in workers]
    restart(lighthouse, lighthouse_process)
    workers[1].go()
    all_commit(workers, 5)
    check_nothing_lost(workers, starts)
    job.finish()


@pytest.mark.parametrize("phase", PHASES)
def test_all_members_are_in_a_phase(
    make_job: JobFactory, lighthouse_process: StartLighthouse, phase: str
) -> None:
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address)
    workers = job.start_all(3)
    align(*workers)
    if phase != "begin":
        for worker in workers:
            worker.hold(phase)
            worker.go()
        for worker in workers:
            worker.await_at(phase)
    starts = [worker.count() for worker in workers]
    lighthouse.process.kill()
    lighthouse.process.wait()
    for worker in workers:
        worker.go()  # they vote, and no lighthouse is there to hear it
    lighthouse_process(lighthouse.port)
    all_commit(workers, 5)
    check_nothing_lost(workers, starts)
    job.finish()


def test_again_and_again_at_no_chosen_moment(
    make_job: JobFactory, lighthouse_process: StartLighthouse
) -> None:
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address)
    workers = job.start_all(3)
    starts = [worker.count() for worker in workers]
    for _ in range(4):
        lighthouse = restart(lighthouse, lighthouse_process)
        all_commit(workers)
    check_nothing_lost(workers, starts)
    job.finish()


def test_lighthouse_dies_while_a_group_heals(
    make_job: JobFactory, lighthouse_process: StartLighthouse
) -> None:
    """The states travel from peer to peer; the group that heals is taken in either way."""
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address, ballast_bytes=64 << 20)
    *survivors, victim = job.start_all(3)
    victim.send_signal(signal.SIGKILL)
    all_commit(survivors, 2)
    target = job.start("2", holds=["load"])
    target.await_at("load")
    restart(lighthouse, lighthouse_process)
    target.go()
    all_commit([*survivors, target])
    job.finish()


def test_lighthouse_and_a_group_die_together(
    make_job: JobFactory, lighthouse_process: StartLighthouse
) -> None:
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address)
    *survivors, victim = job.start_all(3)
    victim.hold("allreduce")
    victim.await_at("allreduce")
    for survivor in survivors:
        survivor.mark()
    victim.send_signal(signal.SIGKILL)
    restart(lighthouse, lighthouse_process)
    for survivor in survivors:
        survivor.await_commits(3)
    back = job.start("2")
    back.await_event("heal_done")
    back.await_commits(3)
    job.finish()


def test_lighthouse_is_stopped_for_a_while(
    make_job: JobFactory, lighthouse_process: StartLighthouse
) -> None:
    """A lighthouse that hangs keeps all members waiting, and costs nothing else."""
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address)
    workers = job.start_all(3)
    workers[0].hold("vote")
    workers[0].await_at("vote")
    os.kill(lighthouse.serving, signal.SIGSTOP)
    workers[0].go()
    time.sleep(2 * HEARTBEAT_TIMEOUT_S)  # the fault itself: long enough to be taken for dead
    os.kill(lighthouse.serving, signal.SIGCONT)
    all_commit(workers, 5)
    job.finish()


def test_lighthouse_stays_away(make_job: JobFactory, lighthouse_process: StartLighthouse) -> None:
    """A member that waits for a quorum and one that waits for an answer end with a sentence that helps."""
    lighthouse = lighthouse_process(0)
    job = make_job(lighthouse.address, timeout_s=3.0)
    at_start, voting = job.start_all(2)
    align(at_start, voting)
    voting.go()
    lighthouse.process.kill()
    at_start.go()
    errors = {at_start.await_end().partition(":")[0], voting.await_end().partition(":")[0]}
    assert errors <= {"LighthouseUnavailable", "StepInDoubt"}
