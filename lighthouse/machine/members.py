"""The members of a job: replica groups that have joined, their names and their connections. PURE.

A member of a job is connected and has joined. It is in the live quorum, or it waits for the next
one. A name conflict is a newcomer whose name still belongs to a member whose process may be dying.
"""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.machine.rules import Position
from lighthouse.wire.messages import NO_QUORUM, InDoubt, Join, Peer


@dataclass(slots=True)
class MemberState:
    """A replica group that has joined a job.

    Attributes:
        join: its newest `Join`.
        peer: the connection that reaches it.
        position: the state that it holds.
        arrival: its number in the order of arrival; kept when it joins again.
        doubt: its step in doubt, until it votes again.
        settle, control: what became of that step ("commit", "discard"; empty: not settled), and
            the control bytes of its decision.
        base_id: the newest quorum whose member list it certainly holds.
        last_reason: why it waits, as it was told last; empty: it was not told.
        was_member: it has been in a quorum of this job.
    """

    join: Join
    peer: Peer
    position: Position
    arrival: int
    doubt: InDoubt | None
    settle: str = ""
    control: bytes = b""
    base_id: int = NO_QUORUM
    last_reason: str = ""
    was_member: bool = False

    @property
    def replica_id(self) -> str:
        return self.join.replica_id

    @property
    def name(self) -> str:
        return self.join.name


@dataclass(slots=True)
class NameConflict:
    """A newcomer whose name is in use. At `expires` (machine's clock) it is refused."""

    join: Join
    peer: Peer
    expires: float


class Members:
    """All members of a job by replica_id, by name and by connection. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self.by_id: dict[str, MemberState] = {}
        """By replica_id. Read only: `put` and `take` change it."""
        self.were_members = 0
        """How many of them have been in a quorum of this job. Read only."""
        self._by_name: dict[str, str] = {}
        self._by_peer: dict[Peer, set[str]] = {}
        self._arrivals = 0

    def put(self, join: Join, peer: Peer) -> MemberState:
        """Add the sender of `join`, or replace what is known of it (its arrival number stays)."""
        old = self.take(join.replica_id)
        if old is None:
            self._arrivals += 1
        arrival = self._arrivals if old is None else old.arrival
        member = MemberState(join, peer, Position(join.step, join.lineage), arrival, join.in_doubt)
        assert join.name not in self._by_name, "two members of one name"
        self.by_id[join.replica_id] = member
        self._by_name[join.name] = join.replica_id
        self._by_peer.setdefault(peer, set()).add(join.replica_id)
        if join.quorum_id != NO_QUORUM:
            self.mark_was_member(member)
        return member

    def mark_was_member(self, member: MemberState) -> None:
        """`member` has been in a quorum. Idempotent."""
        self.were_members += not member.was_member
        member.was_member = True

    def take(self, replica_id: str) -> MemberState | None:
        """Remove a member and return it; None if there is none."""
        member = self.by_id.pop(replica_id, None)
        if member is not None:
            del self._by_name[member.name]
            self._forget_peer(member)
            self.were_members -= member.was_member
        return member

    def move(self, member: MemberState, peer: Peer) -> None:
        """From now on `peer` reaches `member`."""
        self._forget_peer(member)
        member.peer = peer
        self._by_peer.setdefault(peer, set()).add(member.replica_id)

    def of_peer(self, peer: Peer) -> list[str]:
        """replica_ids that are reached through `peer`, sorted."""
        return sorted(self._by_peer.get(peer, ()))

    def other_holder(self, name: str, replica_id: str) -> bool:
        """Whether another member than `replica_id` has `name`."""
        return self._by_name.get(name, replica_id) != replica_id

    def _forget_peer(self, member: MemberState) -> None:
        ids = self._by_peer[member.peer]
        ids.discard(member.replica_id)
        if not ids:
            del self._by_peer[member.peer]

    def check(self) -> None:
        """Assert every invariant. O(members)."""
        assert self._by_name == {m.name: r for r, m in self.by_id.items()}
        assert sum(len(ids) for ids in self._by_peer.values()) == len(self.by_id)
        assert self.were_members == sum(m.was_member for m in self.by_id.values())
        for replica_id, member in self.by_id.items():
            assert member.replica_id == replica_id
            assert replica_id in self._by_peer[member.peer]
