"""The lighthouse's state machine: all rooms. PURE; `server.py` gives it a socket and a clock."""

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
    """Routes events to rooms. Four methods: `handle`, `disconnected`, `expire`, `deadline`.

    `remembered` maps rooms to the (quorum_id, members) that an earlier life left behind.
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
        self._rooms: dict[JobKey, JobState] = {}
        for key, (quorum_id, members) in (remembered or {}).items():
            first = max(first_id, quorum_id + 1)
            self._rooms[key] = JobState(key, config, first, remembered=members)

    def handle(self, peer: Peer, message: Request, now: float) -> list[Effect]:
        """A decoded request from `peer` at `now` (seconds, monotonic)."""
        if isinstance(message, StatusRequest):
            return [Send((peer,), Status(json.dumps(self.status())))]
        room = self._rooms.get(message.room)
        if isinstance(message, DeathNotice):
            if room is None:
                return []
            return room.lost(message.replica_id, message.cause or "process died", now)
        if room is None:
            if isinstance(message, Join) and not self._make_room():
                reason = f"this lighthouse is full ({len(self._rooms)} rooms)"
                return [Send((peer,), Refused(message.room, reason))]
            room = JobState(message.room, self.config, self._first_id)
            if isinstance(message, Join):  # others are answered, but leave nothing behind
                self._rooms[message.room] = room
        return room.handle(peer, message, now)

    def _make_room(self) -> bool:
        """Whether one more room fits, at the price of one that everybody has left."""
        if len(self._rooms) < self.config.max_rooms:
            return True
        left = next((key for key, room in self._rooms.items() if room.empty), None)
        if left is None:
            return False
        del self._rooms[left]
        return True

    def disconnected(
        self, peer: Peer, now: float, cause: str = "connection closed"
    ) -> list[Effect]:
        """The connection of `peer` is gone: whoever spoke through it is dead or unreachable."""
        effects: list[Effect] = []
        for room in self._rooms.values():
            for replica_id in room.replicas_of(peer):
                effects += room.lost(replica_id, cause, now)
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        effects: list[Effect] = []
        for room in self._rooms.values():
            wanted = room.deadline()
            if wanted is not None and wanted <= now:
                effects += room.expire(now)
        return effects

    def deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        times = (room.deadline() for room in self._rooms.values())
        return min((t for t in times if t is not None), default=None)

    def check(self) -> None:
        """Assert every invariant of every room."""
        for room in self._rooms.values():
            room.check()

    def status(self) -> dict[str, object]:
        """All rooms, as plain JSON types."""
        return {"rooms": [room.status() for room in self._rooms.values()]}
