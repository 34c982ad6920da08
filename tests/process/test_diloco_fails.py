"""Members of LocalSGD and DiLoCo are killed in inner steps, in the overlap, and in the vote.

What must follow: the survivors commit again without waiting for a timeout; the member comes back,
heals and commits; equal (step, lineage) has meant bitwise equal global state, outer optimizer
included, in all processes at all times.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from lighthouse import LighthouseServer
from tests.process.conftest import ENDLESS_S, JobFactory
from tests.process.driver import Job, await_voted, frozen

STREAMING = {
    "kind": "DiLoCo",
    "sync_every": 8,
    "fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.5,
    "codec": "int8",
    "error_feedback": True,
    "bucket_bytes": 256,
}
DILOCO = {"kind": "DiLoCo", "sync_every": 4, "keep_windows": True, "weighted": True}
LOCAL = {"kind": "LocalSGD", "sync_every": 4}


@pytest.mark.parametrize(
    ("outer", "phase", "use_async_quorum"),
    [
        (STREAMING, "inner", False),
        (STREAMING, "overlap", False),
        (STREAMING, "overlap", True),
        (STREAMING, "voting", False),
        (DILOCO, "vote", False),
        (DILOCO, "inner", True),
        (LOCAL, "vote", True),
        (LOCAL, "voting", False),
    ],
    ids=lambda value: str(value.get("kind")) if isinstance(value, dict) else str(value),
)
def test_sigkill(
    make_job: JobFactory,
    endless: LighthouseServer,
    outer: dict[str, Any],
    phase: str,
    use_async_quorum: bool,
) -> None:
    job: Job = make_job(
        endless.address(), timeout_s=ENDLESS_S, outer=outer, use_async_quorum=use_async_quorum
    )
    survivors = job.start_all(3)
    victim = survivors.pop()
    if phase == "voting":
        # The victim has voted and waits for the answer, because a peer has not voted.
        survivors[0].hold("vote")
        survivors[0].await_at("vote")
        await_voted(endless, victim.name)
    else:
        victim.hold(phase)
        victim.await_at(phase)
    for survivor in survivors:
        survivor.mark()
    victim.send_signal(signal.SIGKILL)
    if phase == "voting":
        survivors[0].go()
    for survivor in survivors:
        survivor.await_commit()
    back = job.start("2")
    back.await_event("heal_done")
    healed_to = back.await_commits(3)["step"]
    for survivor in survivors:
        survivor.await_commit(after_step=healed_to)
    job.finish()
    reports = job.all_steps()
    states = {(r["step"], r["lineage"]) for r in reports if r["committed"]}
    assert len(states) < sum(r["committed"] for r in reports), "no state was reported by two"


@pytest.mark.parametrize(("phase", "counted"), [("vote", True), ("inner", False)])
def test_a_window_counts_once(
    make_job: JobFactory, lighthouse: LighthouseServer, phase: str, counted: bool
) -> None:
    """A member is away (SIGSTOP) while the others commit. What it had sent before was counted, and
    is dropped when it comes back; what it had not sent is kept, since it asked for that."""
    job: Job = make_job(lighthouse.address(), outer=DILOCO)
    survivors = job.start_all(3)
    victim = survivors.pop()
    victim.hold(phase)
    victim.await_at(phase)
    starts = [survivor.count() for survivor in survivors]
    for worker in (*survivors, victim):
        worker.mark()
    with frozen(victim):
        last = [survivor.await_commits(2)["step"] for survivor in survivors]
    if not counted:
        victim.await_event("quorum")  # else it may send in the old one, and can't keep that
    victim.go()
    loaded = victim.await_report(lambda r: r["kind"] == "loaded")
    assert (loaded["drift"] == 0) is counted
    for survivor, start in zip(survivors, starts, strict=True):
        assert bool(survivor.discards_since(start)) is not counted
    victim.await_commit(after_step=max(last))
    for survivor in survivors:
        survivor.await_commit(after_step=max(last))
    job.finish()
