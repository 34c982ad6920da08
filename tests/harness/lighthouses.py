"""Lighthouses for tests of real processes."""

from __future__ import annotations

from typing import Any

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
    """Whether a replica group waits at the lighthouse to be let in. `or_member`: or has been. One that
    has just died may still count as a member: wait until it no longer does (`is_member`)."""
    waits = any(name in job["waiting"] for job in _jobs(server, job_id))
    return waits or (or_member and is_member(server, job_id, name))


def is_member(server: LighthouseServer, job_id: str, name: str) -> bool:
    """Whether a replica group is in the quorum, as far as the lighthouse knows."""
    members = (member for job in _jobs(server, job_id) for member in job["members"])
    return any(member["name"] == name and not member["gone"] for member in members)


def _jobs(server: LighthouseServer, job_id: str) -> list[Any]:
    return [job for job in server.status()["jobs"] if job["job_id"] == job_id]
