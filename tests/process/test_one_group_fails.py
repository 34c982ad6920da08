"""One replica group of three is killed, stopped or asked to leave, in each phase of a step.

What must follow: the survivors commit again without waiting for a timeout; where all living
members had finished the collectives, the very step commits; the group comes back, heals and
commits; and equal (step, lineage) has meant equal bits in all processes at all times.
"""

from __future__ import annotations

import signal

import pytest

from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.process.conftest import ENDLESS_S, JobFactory
from tests.process.driver import Job, Worker, align, all_commit, await_voted, frozen

PHASES = ("begin", "forward", "allreduce", "reducing", "vote", "voting")
FINISHED = ("vote", "voting")  # all collectives of the step are done


def lead_to(
    phase: str, victim: Worker, survivors: list[Worker], lighthouse: LighthouseServer
) -> Worker:
    """Bring `victim` into `phase`; returns the worker that `go` sets free again (the victim or a survivor).

    In the phases of `FINISHED` all others have finished the collectives, too: that one member has
    its sum says nothing of the others', which may still be under way.
    """
    peer, third = survivors
    align(victim, peer)
    if phase == "reducing":
        # The victim waits inside its all-reduce, because the peer has not begun that one.
        victim.watch("reducing")
        peer.hold("allreduce")
        victim.go()
        peer.go()
        peer.await_at("allreduce")
        victim.await_at("reducing")
        return peer
    if phase == "voting":
        # The victim has voted yes and waits for the answer, because the peer has not voted.
        peer.hold("vote")
        victim.go()
        peer.go()
        peer.await_at("vote")
        await_voted(lighthouse, victim.name, third.name)
        return peer
    peer.go()
    if phase != "begin":
        victim.hold(phase)
        victim.go()
        victim.await_at(phase)
    if phase == "vote":
        await_voted(lighthouse, peer.name, third.name)
    return victim


@pytest.mark.parametrize("phase", PHASES)
def test_sigkill(make_job: JobFactory, endless: LighthouseServer, phase: str) -> None:
    job = make_job(endless.address(), timeout_s=ENDLESS_S)
    survivors = job.start_all(3)
    victim = survivors.pop()
    held = lead_to(phase, victim, survivors, endless)
    starts = [survivor.count() for survivor in survivors]
    for survivor in survivors:
        survivor.mark()
    victim.send_signal(signal.SIGKILL)
    if held is not victim:
        held.go()
    for survivor in survivors:
        survivor.await_commit()
    most = 0 if phase in FINISHED else 1
    for survivor, start in zip(survivors, starts, strict=True):
        discards = survivor.discards_since(start)
        assert len(discards) <= most, discards
    back = job.start("2")
    back.await_event("heal_done")
    healed_to = back.await_commits(3)["step"]
    for survivor in survivors:
        survivor.await_commit(after_step=healed_to)
    job.finish()


@pytest.mark.parametrize("phase", PHASES)
def test_sigstop_and_sigcont(job: Job, lighthouse: LighthouseServer, phase: str) -> None:
    survivors = job.start_all(3)
    victim = survivors.pop()
    held = lead_to(phase, victim, survivors, lighthouse)
    for survivor in survivors:
        survivor.mark()
    with frozen(victim):
        if held is not victim:
            held.go()
        last = [survivor.await_commits(5)["step"] for survivor in survivors]
    if held is victim:
        victim.go()
    victim.mark()
    victim.await_commit(after_step=max(last))
    for survivor in survivors:
        survivor.await_commit(after_step=max(last))
    job.finish()


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_is_a_leave_that_costs_nothing(
    job: Job, lighthouse: LighthouseServer, phase: str
) -> None:
    survivors = job.start_all(3)
    leaver = survivors.pop()
    held = lead_to(phase, leaver, survivors, lighthouse)
    starts = [survivor.count() for survivor in survivors]
    leaver.send_signal(signal.SIGTERM)
    held.go()
    assert leaver.await_end() == ""
    all_commit(survivors)
    for survivor, start in zip(survivors, starts, strict=True):
        assert survivor.discards_since(start) == []
    job.finish()


def test_two_of_three_are_killed_at_once(job: Job) -> None:
    first, second, third = job.start_all(3)
    align(second, third)  # held in unlike steps, they would wait for each other
    for victim in (second, third):
        victim.hold("forward")
        victim.go()
    for victim in (second, third):
        victim.await_at("forward")
    first.mark()
    second.send_signal(signal.SIGKILL)
    third.send_signal(signal.SIGKILL)
    first.await_commits(3)
    for name in ("1", "2"):
        back = job.start(name)
        back.await_event("heal_done")
        back.await_commits(3)
    job.finish()


def test_killed_again_and_again(job: Job) -> None:
    """Three lives of one group; each heals."""
    survivors = job.start_all(3)
    victim = survivors.pop()
    for _ in range(2):
        victim.hold("allreduce")
        victim.await_at("allreduce")
        victim.send_signal(signal.SIGKILL)
        victim = job.start("2")
        victim.await_event("heal_done")
        victim.await_commits(3)
    all_commit(survivors)
    job.finish()


def test_a_hung_loop_is_evicted(make_job: JobFactory) -> None:
    """Its process beats, but does not vote: at the step's deadline the others go on without it,
    and it joins again when its loop goes on."""
    limit_s = 4.0
    timeouts = Timeouts.derive(limit_s, heartbeat_timeout_s=0.9, revoke_timeout_s=2.0)
    with LighthouseServer(config=LighthouseConfig(timeouts=timeouts)) as lighthouse:
        job = make_job(lighthouse.address(), timeout_s=limit_s)
        *others, hung = job.start_all(3)
        hung.hold("forward")
        hung.await_at("forward")
        for other in others:
            other.mark()
        last = [other.await_commits(3)["step"] for other in others]
        hung.go()
        hung.await_commit(after_step=max(last))
        job.finish()
