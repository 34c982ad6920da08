"""Groups of two ranks that hold shards (FSDP2): a rank is killed, its group leaves, and heals as it
comes back; the other group loses nothing but the step that it was in."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from lighthouse import LighthouseServer
from tests.harness.waiting import until
from tests.process.driver import Job, Worker, all_commit


def start_group(job: Job, number: int, *, asynchronous: bool, **more: Any) -> list[Worker]:
    options = {"shards": 2, "elements": 16, "seed": 7 + number, **more}
    return job.start_ranks(str(number), use_async_quorum=asynchronous, **options)


@pytest.mark.process
@pytest.mark.parametrize(
    ("asynchronous", "kills"),
    [(False, [("gather", 0), ("backward", 1)]), (True, [("between", 0)])],
)
def test_a_killed_rank_takes_its_group_alone_and_its_shards_heal(
    job: Job, asynchronous: bool, kills: list[tuple[str, int]]
) -> None:
    """Groups begin with other weights than each other; then ranks are killed, each in its phase."""
    healthy = start_group(job, 0, asynchronous=asynchronous)
    group = start_group(job, 1, asynchronous=asynchronous)
    for phase, number in kills:
        all_commit([*healthy, *group], 2)
        victim, sibling = group[number], group[1 - number]
        victim.hold(phase)
        victim.await_at(phase)
        for worker in healthy:
            worker.mark()
        victim.send_signal(signal.SIGKILL)
        assert sibling.await_end()
        for worker in healthy:
            worker.await_commit()
        group = start_group(job, 1, asynchronous=asynchronous)
        for worker in group:
            worker.await_event("heal_done")
            loaded = worker.await_report(lambda report: report["kind"] == "loaded")
            # A target needs no memory but that of its shards, unless its quorum was lost meanwhile.
            assert loaded["in_place"] or worker.discards_since(0)
    all_commit([*healthy, *group], 2)
    job.finish(together=True)
    assert all(not report["error"] for w in healthy for report in w.since("ended", 0))


@pytest.mark.process
def test_a_rank_may_serve_its_state_between_forward_and_backward_where_its_sibling_does_not(
    job: Job, lighthouse: LighthouseServer
) -> None:
    """What FSDP has gathered in forward stays with both. Else they would call unlike collectives in backward."""
    alone = {"asynchronous": False, "asks_after_forward": True, "expected_replicas": 0}
    early, late = healthy = start_group(job, 0, **alone)
    step = early.await_commits(2)["step"] + 20
    for worker in healthy:
        worker.hold("between", step=step)
    for worker in healthy:
        assert worker.await_at("between")["step"] == step
    group = start_group(job, 1, **alone)
    until(lambda: lighthouse.status()["jobs"][0]["waiting"] == ["1"], "the other group waits")
    late.hold("forward")
    for worker in healthy:
        worker.go()
    late.await_at("forward")
    early.await_event("serve")
    late.mark()
    for worker in group:
        worker.send_signal(signal.SIGKILL)
    late.await_event("quorum")  # without the other group: this rank's attempt is spent
    late.go()
    all_commit(healthy, 4)
    job.finish(together=True)
