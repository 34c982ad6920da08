"""Groups of two ranks that hold shards (FSDP2): a rank is killed, its group leaves, and heals as it
comes back; the other group loses nothing but the step that it was in."""

from __future__ import annotations

import signal

import pytest

from tests.process.driver import Job, Worker, all_commit


def start_group(job: Job, number: int, *, asynchronous: bool) -> list[Worker]:
    options = {"shards": 2, "elements": 16, "seed": 7 + number}
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
