"""Lighthouses for tests of real processes."""

from __future__ import annotations

from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.harness.waiting import PATIENCE_S


def patient_lighthouse(
    heartbeat_timeout_s: float = PATIENCE_S / 10,
    *,
    join_timeout_s: float = PATIENCE_S,
    connect_timeout_s: float = PATIENCE_S,
    heal_timeout_s: float = PATIENCE_S / 2,
    min_replicas: int = 1,
) -> LighthouseServer:
    """One that waits for slow processes: they import a framework first, several on a core. A process
    that is stopped is evicted after `heartbeat_timeout_s`; the end of one is noticed at once."""
    timeouts = Timeouts.derive(
        PATIENCE_S,
        heartbeat_timeout_s=heartbeat_timeout_s,
        heartbeat_s=min(1.0, heartbeat_timeout_s / 3),
        join_timeout_s=join_timeout_s,
        connect_timeout_s=connect_timeout_s,
        heal_timeout_s=heal_timeout_s,
    )
    config = LighthouseConfig(timeouts=timeouts, min_replicas=min_replicas)
    return LighthouseServer(config=config)


def has_joined(
    server: LighthouseServer, job_id: str, name: str, *, or_member: bool = False
) -> bool:
    """Whether a replica group waits at the lighthouse to be let in. `or_member`: or has been."""
    jobs = [job for job in server.status()["jobs"] if job["job_id"] == job_id]
    inside = any(m["name"] == name and not m["gone"] for job in jobs for m in job["members"])
    return (or_member and inside) or any(name in job["waiting"] for job in jobs)
