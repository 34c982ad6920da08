"""What a job says: collects effects, and tells a new quorum in as few distinct messages as possible.

A quorum is told as a difference where the receiver holds the last one, else in full. N members get
few distinct messages, each built once: O(N) work a quorum change, not O(N^2). PURE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lighthouse.machine.ballot import Ballot
from lighthouse.machine.effects import Effect, Note, Peer, Send
from lighthouse.machine.members import Members, MemberState
from lighthouse.wire.messages import (
    NO_QUORUM,
    Decision,
    Expelled,
    JobKey,
    Member,
    Quorum,
    Reply,
    Waiting,
    member_delta,
)

EXPLAIN_EVERY_S = 1.0
STEP_IN_PROGRESS = "waiting for the step in progress to end"
Delta = tuple[tuple[str, ...], tuple[Member, ...]]


class Announcer:
    """One job's voice. `reason`: why its quorum is what it is, or why there is none."""

    def __init__(self, job: JobKey) -> None:
        self.reason = "nobody waits"
        self._job = job
        self._base_id = NO_QUORUM
        self._base: tuple[Member, ...] = ()
        self._told_at = float("-inf")
        self._effects: list[Effect] = []

    # ------------------------------------------------------------------ single messages

    def send(self, peer: Peer, message: Reply) -> None:
        self._effects.append(Send((peer,), message))

    def send_all(self, peers: Iterable[Peer], message: Reply) -> None:
        targets = tuple(peers)
        if targets:
            self._effects.append(Send(targets, message))

    def expel(self, peer: Peer, quorum_id: int, why: str, *, hung: bool = False) -> None:
        self.send(peer, Expelled(self._job, quorum_id, why, hung))

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def drain(self) -> list[Effect]:
        """Everything said since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------------ why one has to wait

    def explain(self, reason: str, seats: Members, now: float) -> None:
        """Tell all why there is no quorum, once a second at most: later ones learn it by heartbeats."""
        changed, self.reason = reason != self.reason, reason
        if changed and now >= self._told_at + EXPLAIN_EVERY_S:
            self._told_at = now
            self.emit(Note(self._job, reason))
            for seat in seats:
                seat.told = reason
            self.send_all((seat.peer for seat in seats), Waiting(self._job, reason))

    def explain_to(self, seat: MemberState, live: Ballot | None) -> None:
        """Tell one that waits."""
        seat.told = self._waiting_reason(live)
        self.send(seat.peer, Waiting(self._job, seat.told))

    def is_news(self, seat: MemberState, live: Ballot | None) -> bool:
        """Whether `seat` waits for another reason than it has heard."""
        return seat.told != self._waiting_reason(live)

    def _waiting_reason(self, live: Ballot | None) -> str:
        return self.reason if live is None else STEP_IN_PROGRESS

    # ------------------------------------------------------------------ quorums

    def ended(self, live: Ballot) -> None:
        """`live` is over; who voted in it surely holds its member list."""
        self._base_id, self._base = live.quorum_id, live.members

    def full(self, live: Ballot, seat: MemberState) -> Quorum:
        """The live quorum in full, for one receiver."""
        return self._build(live, None, seat.settle, seat.control)

    def announce(self, live: Ballot, seats: Iterable[MemberState]) -> None:
        """Send the live quorum to those of `seats` that are its members."""
        groups: dict[int, tuple[Quorum, list[Peer]]] = {}
        told = [seat for seat in seats if live.has(seat.replica_id)]
        for seat, quorum in zip(told, self._each(live, told), strict=True):
            groups.setdefault(id(quorum), (quorum, []))[1].append(seat.peer)
        for quorum, peers in groups.values():
            self.send_all(peers, quorum)

    def answer(
        self, decision: Decision, voters: list[MemberState], yes: set[str], live: Ballot | None
    ) -> None:
        """The decision on a quorum that is over, and which one is next for whom."""
        following: dict[str, Quorum] = {}
        if live is not None:
            members = [seat for seat in voters if live.has(seat.replica_id)]
            quorums = self._each(live, members)
            following = {s.replica_id: q for s, q in zip(members, quorums, strict=True)}
        groups: dict[tuple[int, bool], tuple[Decision, list[Peer]]] = {}
        for seat in voters:
            quorum = following.get(seat.replica_id)
            committed = decision.committed and seat.replica_id in yes
            key = (id(quorum), committed)
            if key not in groups:
                own = replace(
                    decision, committed=committed, next_quorum=quorum, waiting=quorum is None
                )
                groups[key] = (own, [])
            groups[key][1].append(seat.peer)
        for own, peers in groups.values():
            self.send_all(peers, own)

    def _each(self, live: Ballot, seats: list[MemberState]) -> list[Quorum]:
        """The live quorum as each of `seats` must hear it; equal messages are one object."""
        delta = member_delta(self._base, live.members) if self._base_id != NO_QUORUM else None
        built: dict[tuple[bool, str, bytes], Quorum] = {}
        told = []
        for seat in seats:
            by_delta = delta is not None and seat.base_id == self._base_id
            key = (by_delta, seat.settle, seat.control)
            if key not in built:
                built[key] = self._build(
                    live, delta if by_delta else None, seat.settle, seat.control
                )
            told.append(built[key])
        return told

    def _build(self, live: Ballot, delta: Delta | None, settle: str, control: bytes) -> Quorum:
        removed, changed = delta if delta is not None else ((), live.members)
        return Quorum(
            self._job,
            live.quorum_id,
            live.position.step,
            live.position.lineage,
            self._base_id if delta is not None else NO_QUORUM,
            removed,
            changed,
            self.reason,
            settle,
            control,
        )
