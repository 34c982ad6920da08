"""The lighthouse's state machine: all jobs. PURE; `server.py` gives it a socket and a clock."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lighthouse.config import LighthouseConfig
from lighthouse.machine.job import Effect, JobState, Note, Peer, Remember, Send
from lighthouse.wire.messages import (
    DeathNotice,
    JobKey,
    Join,
    Refused,
    Request,
    Status,
    StatusRequest,
)

__all__ = ["Effect", "Lighthouse", "Note", "Peer", "Remember", "Send", "first_quorum_id"]


def first_quorum_id(wall_clock_ms: int) -> int:
    """quorum_id from which a lighthouse started at `wall_clock_ms` counts (S1 over restarts).

    A thousand ids a millisecond: a lighthouse would have to change quorums faster than that for
    a later start to fall behind; and each `Join` lifts the counter over what its sender has seen.
    """
    return wall_clock_ms * 1_000


class Lighthouse:
    """Routes events to jobs. Four methods: `handle`, `disconnected`, `expire`, `deadline`.

    `remembered` maps jobs to the (quorum_id, members) that an earlier life left behind.
    Not thread-safe: one owner.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        first_id: int,
        remembered: Mapping[JobKey, tuple[int, tuple[str, ...]]] | None = None,
    ) -> None:
        self.config = config
        self._first_id = first_id
        self._jobs: dict[JobKey, JobState] = {}
        for key, (quorum_id, members) in (remembered or {}).items():
            first = max(first_id, quorum_id + 1)
            self._jobs[key] = JobState(key, config, first, remembered=members)

    def handle(self, peer: Peer, message: Request, now: float) -> list[Effect]:
        """A decoded request from `peer` at `now` (seconds, monotonic)."""
        if isinstance(message, StatusRequest):
            return [Send((peer,), Status(json.dumps(self.status())))]
        job = self._jobs.get(message.job)
        if isinstance(message, DeathNotice):
            if job is None:
                return []
            return job.lost(message.replica_id, message.cause or "process died", now)
        if job is None:
            if isinstance(message, Join) and not self._has_capacity():
                reason = f"this lighthouse is full ({len(self._jobs)} jobs)"
                return [Send((peer,), Refused(message.job, reason))]
            job = JobState(message.job, self.config, self._first_id)
            if isinstance(message, Join):  # others are answered, but leave nothing behind
                self._jobs[message.job] = job
        return job.handle(peer, message, now)

    def _has_capacity(self) -> bool:
        """Whether one more job fits, at the price of one that everybody has left."""
        if len(self._jobs) < self.config.max_jobs:
            return True
        left = next((key for key, job in self._jobs.items() if job.empty), None)
        if left is None:
            return False
        del self._jobs[left]
        return True

    def disconnected(
        self, peer: Peer, now: float, cause: str = "connection closed"
    ) -> list[Effect]:
        """The connection of `peer` is gone: whoever spoke through it is dead or unreachable."""
        effects: list[Effect] = []
        for job in self._jobs.values():
            for replica_id in job.replicas_of(peer):
                effects += job.lost(replica_id, cause, now)
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        effects: list[Effect] = []
        for job in self._jobs.values():
            wanted = job.deadline()
            if wanted is not None and wanted <= now:
                effects += job.expire(now)
        return effects

    def deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        times = (job.deadline() for job in self._jobs.values())
        return min((t for t in times if t is not None), default=None)

    def check(self) -> None:
        """Assert every invariant of every job."""
        for job in self._jobs.values():
            job.check()

    def status(self) -> dict[str, object]:
        """All jobs, as plain JSON types."""
        return {"jobs": [job.status() for job in self._jobs.values()]}
