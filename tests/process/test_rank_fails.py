"""Replica groups of two ranks, of which one is killed or stopped: the whole group is the unit that
fails. The other rank ends with an error that says so, the launcher (here: the test) starts both
again, and both heal; the other group trains on."""

from __future__ import annotations

import signal

import pytest

from tests.process.driver import Job, Worker, all_commit, frozen


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "allreduce", "vote"])
def test_one_rank_is_killed(job: Job, phase: str, rank: int) -> None:
    survivors, group = job.start_ranks("0"), job.start_ranks("1")
    all_commit([*survivors, *group])
    victim, other = group[rank], group[1 - rank]
    victim.hold(phase)
    victim.await_at(phase)
    for survivor in survivors:
        survivor.mark()
    victim.send_signal(signal.SIGKILL)
    for survivor in survivors:
        survivor.await_commit()
    assert other.await_end().startswith("GroupBroken")
    back = job.start_ranks("1")
    for worker in back:
        worker.await_event("heal_done")
    all_commit([*survivors, *back])
    job.finish(end_of_group=True)


def test_a_rank_that_is_stopped_for_long_ends_its_group(job: Job) -> None:
    survivors, group = job.start_ranks("0"), job.start_ranks("1")
    all_commit([*survivors, *group])
    other, victim = group
    stop_in_a_step(victim, survivors)
    assert other.await_end().startswith("GroupBroken")
    assert victim.await_end().startswith("GroupBroken")
    back = job.start_ranks("1")
    all_commit([*survivors, *back])
    job.finish(end_of_group=True)


def test_a_leader_that_is_stopped_for_a_moment_heals_with_its_group(job: Job) -> None:
    """The lighthouse misses it at once, so that the others train on; its own group waits longer."""
    survivors, group = job.start_ranks("0"), job.start_ranks("1")
    all_commit([*survivors, *group])
    stop_in_a_step(group[0], survivors)
    for worker in group:
        worker.await_event("heal_done")
    all_commit([*survivors, *group])
    job.finish(end_of_group=True)


def stop_in_a_step(victim: Worker, survivors: list[Worker]) -> None:
    """SIGSTOP, until the other group has gone on without it."""
    victim.hold("allreduce")
    victim.await_at("allreduce")
    for survivor in survivors:
        survivor.mark()
    with frozen(victim):
        for survivor in survivors:
            survivor.await_commits(3)
    victim.go()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_the_source_is_killed(job: Job, rank: int) -> None:
    """Group 0 serves the state and loses a rank: group 1 starts over with its fresh peer."""
    source, group = job.start_ranks("0"), job.start_ranks("1")
    all_commit([*source, *group])
    group[0].send_signal(signal.SIGKILL)
    assert group[1].await_end().startswith("GroupBroken")
    source[rank].hold("publish")
    target = job.start_ranks("1")
    source[rank].await_at("publish")
    source[rank].send_signal(signal.SIGKILL)
    assert source[1 - rank].await_end().startswith("GroupBroken")
    fresh = job.start_ranks("0")
    all_commit([*target, *fresh])
    for worker in (*target, *fresh):
        worker.stop(end_of_group=True)
