"""How a new quorum is told: as a difference where the receiver holds the last one, else in full.

N members get few distinct messages, each built once: O(N) work a quorum change, not O(N^2). PURE.
"""

from __future__ import annotations

from collections.abc import Iterable

from lighthouse.ballot import Ballot
from lighthouse.messages import NO_QUORUM, Member, Quorum, RoomKey, member_delta
from lighthouse.seats import Seat

Delta = tuple[tuple[str, ...], tuple[Member, ...]]


class Announcer:
    """Builds the `Quorum` messages of one room."""

    def __init__(self, room: RoomKey) -> None:
        self._room = room
        self._base_id = NO_QUORUM
        self._base: tuple[Member, ...] = ()

    def ended(self, live: Ballot) -> None:
        """`live` is over; who voted in it surely holds its member list."""
        self._base_id, self._base = live.quorum_id, live.members

    def full(self, live: Ballot, seat: Seat, reason: str) -> Quorum:
        """The live quorum in full, for one receiver."""
        return self._build(live, None, reason, seat.settle, seat.control)

    def each(self, live: Ballot, seats: Iterable[Seat], reason: str) -> dict[str, Quorum]:
        """The live quorum as each of `seats` must hear it; equal messages are one object."""
        delta = member_delta(self._base, live.members) if self._base_id != NO_QUORUM else None
        built: dict[tuple[bool, str, bytes], Quorum] = {}
        told = {}
        for seat in seats:
            by_delta = delta is not None and seat.base_id == self._base_id
            key = (by_delta, seat.settle, seat.control)
            if key not in built:
                built[key] = self._build(
                    live, delta if by_delta else None, reason, seat.settle, seat.control
                )
            told[seat.replica_id] = built[key]
        return told

    def _build(
        self, live: Ballot, delta: Delta | None, reason: str, settle: str, control: bytes
    ) -> Quorum:
        removed, changed = delta if delta is not None else ((), live.members)
        return Quorum(
            self._room,
            live.quorum_id,
            live.position.step,
            live.position.lineage,
            self._base_id if delta is not None else NO_QUORUM,
            removed,
            changed,
            reason,
            settle,
            control,
        )
