"""Groups of two ranks that hold shards (FSDP2): a rank is killed, its group leaves, and heals as it
comes back; the other group loses nothing but the step that it was in."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.process.driver import Job, Worker

StartGroup = Callable[[str], list[Worker]]


@pytest.fixture
def start_group(job: Job) -> Iterator[StartGroup]:
    stores = []

    def start(name: str, **options: object) -> list[Worker]:
        limit = timedelta(seconds=20)
        store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        stores.append(store)
        return [
            job.start(name, rank=rank, shards=2, elements=16, seed=7 + int(name),
                      expected_replicas=2, store_port=store.port, **options)
            for rank in (0, 1)
        ]  # fmt: skip

    yield start
    stores.clear()


def all_commit(workers: list[Worker]) -> None:
    for worker in workers:
        worker.mark()
    for worker in workers:
        worker.await_commits(2)


@pytest.mark.process
@pytest.mark.parametrize(
    ("asynchronous", "kills"),
    [(False, [("gather", 0), ("backward", 1)]), (True, [("between", 0)])],
)
def test_a_killed_rank_takes_its_group_alone_and_its_shards_heal(
    job: Job, start_group: StartGroup, asynchronous: bool, kills: list[tuple[str, int]]
) -> None:
    """Groups begin with other weights than each other; then ranks are killed, each in its phase."""
    healthy = start_group("0", use_async_quorum=asynchronous)
    group = start_group("1", use_async_quorum=asynchronous)
    for phase, number in kills:
        all_commit([*healthy, *group])
        victim, sibling = group[number], group[1 - number]
        victim.hold(phase)
        victim.await_at(phase)
        for worker in healthy:
            worker.mark()
        victim.send_signal(signal.SIGKILL)
        assert sibling.await_end()
        for worker in healthy:
            worker.await_commit()
        group = start_group("1", use_async_quorum=asynchronous)
        for worker in group:
            worker.await_event("heal_done")
            loaded = worker.await_report(lambda report: report["kind"] == "loaded")
            # A target needs no memory but that of its shards, unless its quorum was lost meanwhile.
            assert loaded["in_place"] or worker.discards_since(0)
    all_commit([*healthy, *group])
    job.finish(together=True)
    assert all(not report["error"] for w in healthy for report in w.since("ended", 0))
