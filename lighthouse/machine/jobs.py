"""All jobs of one lighthouse. PURE.

`job.py` has the state machine of one job; here events find theirs.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from lighthouse.config import LighthouseConfig
from lighthouse.machine.announce import Effect, Send
from lighthouse.machine.job import JobState
from lighthouse.machine.members import REMEMBERED_DEAD
from lighthouse.wire.messages import (
    DeathNotice,
    Declared,
    DeclareDead,
    JobKey,
    Join,
    Peer,
    Refused,
    Request,
    Status,
    StatusRequest,
    Vote,
)

STATUS_MEMBERS = 4_096
"""Members that a status lists, so that its size has a bound."""


class Lighthouse:
    """Routes events to jobs. Not thread-safe: one owner.

    `handle`, `disconnected` and `expire` take an event and `now` (seconds, any monotonic clock)
    and return effects; `deadline` says when `expire` wants to be called.
    `nonces` returns a new random number of 1 to `MAX_NONCE` at each call.
    `remembered` maps jobs to the (quorum_id, members) that an earlier lighthouse left behind.
    `on_failure` is told of an exception of a job's rules: that job starts over, as after a restart
    of the lighthouse, and the others go on. None: it is raised.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        nonces: Callable[[], int],
        remembered: Mapping[JobKey, tuple[int, tuple[str, ...]]] | None = None,
        on_failure: Callable[[JobKey, Exception], None] | None = None,
    ) -> None:
        self.config = config
        self._nonces = nonces
        self._on_failure = on_failure
        self._jobs: dict[JobKey, JobState] = {}
        self._declared: OrderedDict[tuple[str, str], None] = OrderedDict()  # (job_id, member)
        self._notices: OrderedDict[tuple[JobKey, str], tuple[Peer, DeathNotice]] = OrderedDict()
        for key, (_, members) in (remembered or {}).items():
            self._jobs[key] = JobState(key, config, nonces(), remembered=members)

    def handle(self, peer: Peer, message: Request, now: float) -> list[Effect]:
        """A decoded request from `peer`."""
        if isinstance(message, StatusRequest):
            return [Send((peer,), Status(json.dumps(self.status())))]
        if isinstance(message, DeclareDead):
            return self._declare_dead(peer, message, now)
        if isinstance(message, DeathNotice):
            return self._on_death_notice(peer, message, now)
        if isinstance(message, Join):
            self._forget_deaths(message)
        job = self._jobs.get(message.job)
        if job is None:
            if isinstance(message, Join) and (elsewhere := self._job_of(peer)) is not None:
                reason = f"this connection has joined job {elsewhere.job_id!r}: connect again for another"
                return [Send((peer,), Refused(message.job, reason))]
            if isinstance(message, Join) and not self._has_capacity():
                reason = f"this lighthouse is full ({len(self._jobs)} jobs)"
                return [Send((peer,), Refused(message.job, reason))]
            job = JobState(message.job, self.config, self._nonces())
            if isinstance(message, Join):  # others are answered, but leave nothing behind
                self._jobs[message.job] = job
                self._tell_of_deaths(job, now)
        try:
            effects = job.handle(peer, message, now)
        except Exception as error:
            return self._start_over(job, error)
        if not isinstance(message, Vote) and job.blank:
            self._jobs.pop(job.key, None)
        return effects

    def _on_death_notice(self, peer: Peer, notice: DeathNotice, now: float) -> list[Effect]:
        job = self._jobs.get(notice.job)
        if job is None:  # its peers may not have found this lighthouse yet
            self._notices[notice.job, notice.replica_id] = peer, notice
            if len(self._notices) > REMEMBERED_DEAD:
                self._notices.popitem(last=False)
            return []
        try:
            return job.death_notice(peer, notice, now)
        except Exception as error:
            return self._start_over(job, error)

    def _forget_deaths(self, join: Join) -> None:
        """The sender of `join` lives."""
        self._declared.pop((join.job.job_id, join.name), None)
        self._declared.pop((join.job.job_id, join.replica_id), None)
        self._notices.pop((join.job, join.replica_id), None)

    def _tell_of_deaths(self, job: JobState, now: float) -> None:
        """`job` is new: what was said of its members before counts."""
        for job_id, member in self._declared:
            if job_id == job.key.job_id:
                job.declare_dead(member, now)
        for watcher, notice in [n for k, n in self._notices.items() if k[0] == job.key]:
            job.death_notice(watcher, notice, now)

    def _declare_dead(self, peer: Peer, message: DeclareDead, now: float) -> list[Effect]:
        """For all rooms of a job, those that have no member yet included."""
        job_id, member = message.job_id, message.member
        rooms = [job for key, job in self._jobs.items() if key.job_id == job_id]
        alive = next(filter(None, (room.alive(member) for room in rooms)), "")
        if alive:
            text = f"{alive} is connected, so it lives: end its process first"
            return [Send((peer,), Declared(job_id, member, False, text))]
        effects: list[Effect] = []
        for room in rooms:
            try:
                effects += room.declare_dead(member, now)
            except Exception as error:
                effects += self._start_over(room, error)
        self._declared[job_id, member] = None
        if len(self._declared) > REMEMBERED_DEAD:
            self._declared.popitem(last=False)
        text = f"job {job_id!r} does not wait for {member}, until it joins"
        if not rooms:
            text += "; no replica group of it is here yet"
        return [*effects, Send((peer,), Declared(job_id, member, True, text))]

    def _start_over(self, job: JobState, error: Exception) -> list[Effect]:
        """The rules of `job` have failed; see `on_failure`."""
        if self._on_failure is None:
            raise error
        # Its members' next messages find it unknown: they join again with what they hold.
        self._jobs.pop(job.key, None)
        self._on_failure(job.key, error)
        return []

    def serves(self, peer: Peer) -> bool:
        """Whether a replica group is reached through `peer`."""
        return self._job_of(peer) is not None

    def _job_of(self, peer: Peer) -> JobKey | None:
        return next((key for key, job in self._jobs.items() if job.replicas_of(peer)), None)

    def _has_capacity(self) -> bool:
        """Whether one more job fits, if need be in place of one that all members have left."""
        if len(self._jobs) < self.config.max_jobs:
            return True
        left = next((key for key, job in self._jobs.items() if job.empty), None)
        if left is None:
            return False
        del self._jobs[left]
        return True

    def disconnected(self, peer: Peer, now: float) -> list[Effect]:
        """The connection of `peer` is gone: the replica groups behind it are unreachable."""
        effects: list[Effect] = []
        for job in list(self._jobs.values()):
            try:
                for replica_id in job.replicas_of(peer):
                    effects += job.lost(replica_id, "connection closed", now)
                if job.blank:
                    del self._jobs[job.key]
            except Exception as error:
                effects += self._start_over(job, error)
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        effects: list[Effect] = []
        for job in list(self._jobs.values()):
            wanted = job.deadline()
            if wanted is None or wanted > now:
                continue
            try:
                effects += job.expire(now)
                if job.blank:
                    del self._jobs[job.key]
            except Exception as error:
                effects += self._start_over(job, error)
        return effects

    def deadline(self) -> float | None:
        """When `expire` wants to be called; None: not before another event."""
        times = (job.deadline() for job in self._jobs.values())
        return min((t for t in times if t is not None), default=None)

    def check(self) -> None:
        """Assert every invariant of every job."""
        for job in self._jobs.values():
            job.check()

    def status(self) -> dict[str, object]:
        """All jobs, as plain JSON types, with up to `STATUS_MEMBERS` members in all."""
        return {"jobs": list(self.statuses())}

    def statuses(self) -> Iterator[dict[str, object]]:
        """The same, one job after the other; other calls may come in between."""
        jobs = list(self._jobs.values())
        most = max(1, STATUS_MEMBERS // max(1, len(jobs)))
        return (job.status(most) for job in jobs)
