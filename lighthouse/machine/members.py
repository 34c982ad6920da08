"""Who is in a job: seats, the names and connections they hold, claims on names. PURE.

A seat is a replica group that is connected and has joined, member of the live quorum or not.
A claim is a newcomer whose name is still held by a process that may be dying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lighthouse.machine.effects import Peer
from lighthouse.machine.rules import Position
from lighthouse.wire.messages import NO_QUORUM, InDoubt, Join


@dataclass(slots=True)
class MemberState:
    """A replica group that is connected and has joined.

    `doubt`: its step in doubt, until it votes again; `settle`, `control`: what became of that.
    `base_id`: the last quorum whose member list it surely holds. `told`: why it waits, as it
    heard it last. `veteran`: it has been in a quorum of this job.
    """

    join: Join
    peer: Peer
    position: Position
    arrival: int
    doubt: InDoubt | None
    settle: str = ""
    control: bytes = b""
    base_id: int = NO_QUORUM
    told: str = ""
    veteran: bool = False

    @property
    def replica_id(self) -> str:
        return self.join.replica_id

    @property
    def name(self) -> str:
        return self.join.name


@dataclass(slots=True)
class NameConflict:
    """A newcomer whose name is still in use, and until when its holder may turn out dead."""

    join: Join
    peer: Peer
    expires: float


class Members:
    """All seats of a job by replica_id, by name and by connection."""

    def __init__(self) -> None:
        self._by_id: dict[str, MemberState] = {}
        self._by_name: dict[str, str] = {}
        self._by_peer: dict[Peer, set[str]] = {}
        self._arrivals = 0
        self.veterans = 0
        """How many of them have been in a quorum of this job."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[MemberState]:
        return iter(self._by_id.values())

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._by_id

    def __getitem__(self, replica_id: str) -> MemberState:
        return self._by_id[replica_id]

    def get(self, replica_id: str) -> MemberState | None:
        return self._by_id.get(replica_id)

    def any(self) -> MemberState | None:
        """Some seat, if there is one (all match each other)."""
        return next(iter(self._by_id.values()), None)

    def ids(self) -> set[str]:
        return set(self._by_id)

    def put(self, join: Join, peer: Peer) -> MemberState:
        """A replica group sits down, or says anew who it is (it keeps its place in the line)."""
        old = self.take(join.replica_id)
        if old is None:
            self._arrivals += 1
        arrival = self._arrivals if old is None else old.arrival
        seat = MemberState(join, peer, Position(join.step, join.lineage), arrival, join.in_doubt)
        assert join.name not in self._by_name, "two seats of one name"
        self._by_id[join.replica_id] = seat
        self._by_name[join.name] = join.replica_id
        self._by_peer.setdefault(peer, set()).add(join.replica_id)
        if join.quorum_id != NO_QUORUM:
            self.promote(seat)
        return seat

    def promote(self, seat: MemberState) -> None:
        """`seat` has been in a quorum."""
        self.veterans += not seat.veteran
        seat.veteran = True

    def take(self, replica_id: str) -> MemberState | None:
        """Remove a seat and return it."""
        seat = self._by_id.pop(replica_id, None)
        if seat is not None:
            del self._by_name[seat.join.name]
            self._forget_peer(seat)
            self.veterans -= seat.veteran
        return seat

    def move(self, seat: MemberState, peer: Peer) -> None:
        """`seat` speaks through `peer` from now on."""
        if seat.peer != peer:
            self._forget_peer(seat)
            seat.peer = peer
            self._by_peer.setdefault(peer, set()).add(seat.replica_id)

    def of_peer(self, peer: Peer) -> list[str]:
        """replica_ids that speak through `peer`, sorted."""
        return sorted(self._by_peer.get(peer, ()))

    def other_holder(self, name: str, replica_id: str) -> bool:
        """Whether another replica group than `replica_id` holds `name`."""
        return self._by_name.get(name, replica_id) != replica_id

    def _forget_peer(self, seat: MemberState) -> None:
        ids = self._by_peer[seat.peer]
        ids.discard(seat.replica_id)
        if not ids:
            del self._by_peer[seat.peer]

    def check(self) -> None:
        """Assert every invariant."""
        assert self._by_name == {s.join.name: r for r, s in self._by_id.items()}
        assert sum(len(ids) for ids in self._by_peer.values()) == len(self._by_id)
        assert self.veterans == sum(seat.veteran for seat in self)
        for replica_id, seat in self._by_id.items():
            assert seat.replica_id == replica_id
            assert replica_id in self._by_peer[seat.peer]
