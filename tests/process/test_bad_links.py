"""Two hosts with a link that loses packets, or is slow: real TCP, real processes, the default timeouts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.diloco_network import Link
from lighthouse import LighthouseServer
from tests.harness import networks
from tests.process.conftest import JobFactory

TIMEOUT_S, HEARTBEAT_S = 60.0, 0.2  # the defaults
COMMITS = 20
LINKS = {
    "5 % lost": (1_000.0, 0.005, 0.05),
    "15 % lost": (1_000.0, 0.005, 0.15),
    "50 kB/s": (0.4, 0.01, 0.0),
}
"""Mbit/s, seconds in one direction, and the share of packets that is lost."""


def _serve(network: str, host: str) -> LighthouseServer:
    with ThreadPoolExecutor(1, initializer=networks.enter, initargs=(network,)) as inside:
        return inside.submit(LighthouseServer, f"tcp://{host}:0").result()


@pytest.mark.process
@pytest.mark.parametrize("kind", LINKS)
def test_commits_go_on_over_a_bad_link(kind: str, make_job: JobFactory) -> None:
    """No commit is possible without both. A connection may be taken for lost now and then, and is made
    again: most steps need no new quorum, and equal versions are equal bits."""
    if not networks.available() or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("needs network namespaces and /dev/net/tun: root, and the command ip")
    with Link(*LINKS[kind]) as link, _serve(link.namespaces[0], link.addresses[0]) as server:
        job = make_job(
            server.address(),
            timeout_s=TIMEOUT_S,
            heartbeat_s=HEARTBEAT_S,
            min_replicas=2,
            expected_replicas=2,
            elements=64,
            stop_at=COMMITS,  # told to stop, one could begin a step without the other
        )
        workers = [job.start(str(side), network=link.namespaces[side]) for side in (0, 1)]
        for worker in workers:
            worker.await_commits(COMMITS)
        for worker in workers:
            assert not worker.await_end()
            quorums = [r for r in worker.since("event", 0) if r["event"] == "quorum"]
            assert len(quorums) < COMMITS / 2, quorums
        job.finish()
        job.close()
