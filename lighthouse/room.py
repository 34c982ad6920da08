"""One room's state machine: who is here, the live quorum, its votes, what is decided. PURE.

Theory (DESIGN section 4; docs/protocol.md has the tables). A room is *forming* (no live quorum) or
*live*. A live quorum works on one step: it collects one vote a member. The first no, death, leave
or eviction *revokes* it: the others are told to stop their collectives and vote on what they have.
As soon as every living member has voted the step is *decided*: committed if all votes are yes,
else discarded. A committed step of an unrevoked quorum that nobody leaves and nobody waits to join
goes on under the same quorum_id; anything else ends the quorum, and the next one forms by the
rules in `quorum.py`, in the same breath where they allow it.

Rules held here, each checked by `check()` or by the simulator:
- votes count for exactly one (quorum_id, step), the first one counts (S5);
- quorum_id only grows, and starts above whatever any joiner has seen (S1);
- at most one live quorum (S2); the decided are remembered so that a lost answer can be repeated;
- a vote whose lineage is not the quorum's is a diverged member: expelled, never counted (S3).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lighthouse import quorum as rules
from lighthouse.config import LighthouseConfig
from lighthouse.messages import (
    NO_QUORUM,
    PHASE_HEALING,
    PHASE_REDUCING,
    Beat,
    Decision,
    Expelled,
    Join,
    Leave,
    Member,
    Quorum,
    Refused,
    Reply,
    Revoke,
    RoomKey,
    Vote,
    Waiting,
    member_delta,
    next_lineage,
)
from lighthouse.quorum import Position

Peer = bytes
"""Identity of a connection."""

REMEMBERED_DECISIONS = 1_024
EXPLAIN_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: deliver `message` to each of `peers`."""

    peers: tuple[Peer, ...]
    message: Reply


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: a line for the log; `quorum` True: the one line that a quorum change gets."""

    room: RoomKey
    text: str
    quorum: bool = False


@dataclass(frozen=True, slots=True)
class Remember:
    """Effect: keep this over a restart of the lighthouse (optional; see docs/protocol.md)."""

    room: RoomKey
    quorum_id: int
    members: tuple[str, ...]


Effect = Send | Note | Remember


@dataclass(slots=True)
class Seat:
    """A replica group that is connected and has joined."""

    join: Join
    peer: Peer
    position: Position
    arrival: int
    settle: str = ""
    base_id: int = NO_QUORUM  # last quorum whose member list the receiver holds


@dataclass(slots=True)
class Live:
    """The live quorum."""

    quorum_id: int
    position: Position
    members: tuple[Member, ...]
    ids: frozenset[str]
    silent: set[str]  # living members that have not voted on this step
    votes: dict[str, Vote] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    revoked: str = ""
    stalled: bool = False
    deadline: float | None = None

    def living(self) -> list[str]:
        """In rank order."""
        return [m.replica_id for m in self.members if m.replica_id not in self.gone]

    def healing(self) -> set[str]:
        return {m.replica_id for m in self.members if m.healing}


@dataclass(frozen=True, slots=True)
class Claim:
    """A newcomer whose name is still held by a process that may be dying."""

    join: Join
    peer: Peer
    expires: float


class Room:
    """See the module's docstring. Not thread-safe: one owner."""

    def __init__(
        self,
        key: RoomKey,
        config: LighthouseConfig,
        first_quorum_id: int,
        remembered: tuple[str, ...] = (),
    ) -> None:
        self.key = key
        self._config = config
        self._timeouts = config.timeouts
        self._next_id = first_quorum_id
        self._seats: dict[str, Seat] = {}
        self._names: dict[str, str] = {}
        self._min_replicas = config.min_replicas
        self._expected = config.expected_replicas
        self._group_commit = False
        self._claims: dict[str, Claim] = {}
        self._live: Live | None = None
        self._head: Position | None = None
        self._previous: tuple[str, ...] = ()
        self._previous_members: tuple[Member, ...] = ()
        self._previous_id = NO_QUORUM
        # replica_ids that may hold a newer state than anyone here (R5).
        self._missed: set[str] = set(remembered)
        self._decisions: OrderedDict[tuple[int, int], Decision] = OrderedDict()
        self._lineages: OrderedDict[str, None] = OrderedDict()
        self._since = 0.0
        self._wake_at: float | None = None
        self._boundary = ""
        self._reason = "nobody waits"
        self._told_at = float("-inf")
        self._arrivals = 0
        self._effects: list[Effect] = []
        self.commits = 0
        self.discards = 0

    # ------------------------------------------------------------------ events

    def handle(self, peer: Peer, message: Join | Vote | Beat | Leave, now: float) -> list[Effect]:
        """A request from `peer`."""
        if isinstance(message, Join):
            self._on_join(peer, message, now)
        elif isinstance(message, Vote):
            self._on_vote(peer, message, now)
        elif isinstance(message, Beat):
            self._on_beat(peer, message)
        else:
            self._on_leave(message, now)
        return self._drain()

    def lost(self, replica_id: str, cause: str, now: float) -> list[Effect]:
        """The process of `replica_id` is dead or unreachable."""
        self._claims.pop(replica_id, None)
        self._remove(replica_id, cause, now, may_return=True)
        return self._drain()

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        live = self._live
        if live is not None and live.deadline is not None and now >= live.deadline:
            self._evict_laggards(live, now)
        for replica_id, claim in list(self._claims.items()):
            if now >= claim.expires:
                del self._claims[replica_id]
                self._send(claim.peer, Refused(self.key, _duplicate_name(claim.join.name)))
        if self._live is None:
            self._form(now)
        return self._drain()

    def deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        times = [claim.expires for claim in self._claims.values()]
        if self._live is not None and self._live.deadline is not None:
            times.append(self._live.deadline)
        if self._live is None and self._wake_at is not None:
            times.append(self._wake_at)
        return min(times, default=None)

    def replicas_of(self, peer: Peer) -> list[str]:
        """replica_ids that speak through `peer`."""
        seated = [r for r, seat in self._seats.items() if seat.peer == peer]
        return seated + [r for r, claim in self._claims.items() if claim.peer == peer]

    @property
    def empty(self) -> bool:
        return not self._seats and not self._claims

    # ------------------------------------------------------------------ requests

    def _on_join(self, peer: Peer, join: Join, now: float) -> None:
        self._next_id = max(self._next_id, join.quorum_id + 1)
        seat = self._seats.get(join.replica_id)
        if seat is not None and self._is_living_member(join.replica_id):
            # Its request crossed our answer, or our answer was lost: repeat it.
            seat.peer = peer
            self._send(peer, self._full_quorum(seat))
            return
        refusal = self._refusal(join)
        if refusal:
            self._send(peer, Refused(self.key, refusal))
            return
        holder = self._holder_of(join.name, join.replica_id)
        if holder is not None:
            # A restarted process may be faster than the news of its predecessor's death.
            expires = now + 2 * self._timeouts.heartbeat_timeout_s
            self._claims.setdefault(join.replica_id, Claim(join, peer, expires))
            self._send(peer, Waiting(self.key, f"the name {join.name!r} is still in use"))
            return
        if self.empty and self._live is None:
            self._since = now
        if seat is None:
            self._arrivals += 1
        arrival = self._arrivals if seat is None else seat.arrival
        self._missed.discard(join.replica_id)
        if not self._previous:
            here = {*self._seats, join.replica_id}
            self._missed.update(r for r in join.last_members if r not in here)
        position = Position(join.step, join.lineage)
        self._seats[join.replica_id] = Seat(join, peer, position, arrival)
        self._names[join.name] = join.replica_id
        self._min_replicas = max(self._min_replicas, join.min_replicas)
        self._expected = max(self._expected, join.expected_replicas)
        self._group_commit = self._group_commit or join.group_commit
        if self._live is None:
            self._form(now, newcomer=peer)
        else:
            self._send(peer, Waiting(self.key, "waiting for the step in progress to end"))

    def _on_vote(self, peer: Peer, vote: Vote, now: float) -> None:
        live = self._live
        seat = self._seats.get(vote.replica_id)
        if live is None or vote.quorum_id != live.quorum_id or vote.step != live.position.step:
            self._answer_late_vote(peer, vote, seat)
            return
        if vote.replica_id not in live.ids:
            self._expel(peer, vote.quorum_id, "not a member of this quorum")
            return
        if vote.lineage != live.position.lineage and vote.ok:
            self._send(peer, Expelled(self.key, vote.quorum_id, "state diverged from the quorum's"))
            self._remove(vote.replica_id, "diverged", now, may_return=False)
            return
        if seat is None:
            # Its connection broke and came back within the step: the vote still counts.
            self._expel(peer, vote.quorum_id, "connection was lost during the step")
            return
        seat.peer = peer
        live.votes.setdefault(vote.replica_id, vote)
        live.silent.discard(vote.replica_id)
        if not vote.ok:
            live.stalled = live.stalled or vote.stalled
            self._revoke(f"{seat.join.name}: {vote.reason or 'voted no'}", now)
        elif live.deadline is None:
            live.deadline = now + self._timeouts.step_timeout_s
        self._evaluate(now)

    def _answer_late_vote(self, peer: Peer, vote: Vote, seat: Seat | None) -> None:
        """A vote on something already decided: its answer was lost, so repeat it."""
        decision = self._decisions.get((vote.quorum_id, vote.step))
        if decision is None or seat is None:
            self._expel(peer, vote.quorum_id, "this quorum is not known here")
            return
        seat.peer = peer
        if not vote.ok:  # per-group commit: others may have committed, this one has not
            decision = replace(decision, committed=False)
        if self._live is not None and self._live.quorum_id == vote.quorum_id:
            self._send(peer, decision)
        elif self._is_living_member(vote.replica_id):
            self._send(peer, replace(decision, next_quorum=self._full_quorum(seat)))
        else:
            self._send(peer, replace(decision, waiting=True))

    def _on_beat(self, peer: Peer, beat: Beat) -> None:
        live, seat = self._live, self._seats.get(beat.replica_id)
        if seat is None:
            self._expel(peer, beat.quorum_id, "not known here")
            return
        seat.peer = peer
        if live is None or not self._is_living_member(beat.replica_id):
            return
        if beat.quorum_id != live.quorum_id:
            self._send(peer, self._full_quorum(seat))
        elif live.revoked and beat.replica_id not in live.votes:
            self._send(peer, Revoke(self.key, live.quorum_id, live.position.step, live.revoked))

    def _on_leave(self, leave: Leave, now: float) -> None:
        self._claims.pop(leave.replica_id, None)
        self._remove(leave.replica_id, f"left: {leave.reason or 'shutdown'}", now, may_return=False)

    # ------------------------------------------------------------------ the live quorum

    def _revoke(self, reason: str, now: float) -> None:
        live = self._live
        assert live is not None
        if live.revoked:
            return
        live.revoked = reason
        limit = now + self._timeouts.revoke_timeout_s
        live.deadline = limit if live.deadline is None else min(live.deadline, limit)
        self._note(f"step {live.position.step} revoked: {reason}")
        message = Revoke(self.key, live.quorum_id, live.position.step, reason)
        self._send_all((self._seats[r].peer for r in sorted(live.silent)), message)

    def _remove(self, replica_id: str, cause: str, now: float, *, may_return: bool) -> None:
        """`replica_id` is no longer here, for whatever reason."""
        seat = self._unseat(replica_id)
        if seat is None:
            return
        if may_return and seat.position == self._head:
            self._missed.add(replica_id)
        live = self._live
        if live is not None and self._is_living_member(replica_id):
            live.gone[replica_id] = cause
            live.silent.discard(replica_id)
            self._revoke(f"{seat.join.name}: {cause}", now)
            self._evaluate(now)
        elif live is None:
            self._form(now)
        self._admit_claim(seat.join.name, now)

    def _unseat(self, replica_id: str) -> Seat | None:
        seat = self._seats.pop(replica_id, None)
        if seat is not None:
            del self._names[seat.join.name]
        return seat

    def _admit_claim(self, name: str, now: float) -> None:
        for replica_id, claim in list(self._claims.items()):
            if claim.join.name == name:
                del self._claims[replica_id]
                self._on_join(claim.peer, claim.join, now)
                return

    def _evict_laggards(self, live: Live, now: float) -> None:
        """The step's deadline has passed: who has not voted is hung."""
        live.deadline = None
        for replica_id in sorted(live.silent):
            if self._live is live:
                self._evict(replica_id, "did not vote before the step's deadline", now)

    def _evict(self, replica_id: str, why: str, now: float) -> None:
        seat = self._seats[replica_id]
        quorum_id = self._live.quorum_id if self._live else NO_QUORUM
        self._send(seat.peer, Expelled(self.key, quorum_id, f"evicted: {why}"))
        self._remove(replica_id, f"evicted: {why}", now, may_return=True)

    def _evaluate(self, now: float) -> None:
        """Decide the step if every living member has voted."""
        live = self._live
        assert live is not None
        if live.silent:
            return
        yes = {r for r, vote in live.votes.items() if vote.ok}
        # Somebody alive must hold the result, or committing it would lose the state itself.
        held = any(r not in live.gone for r in yes)
        committed = held and (len(yes) == len(live.votes) or self._group_commit)
        self._decide(live, committed, yes, now)

    def _decide(self, live: Live, committed: bool, yes: set[str], now: float) -> None:
        step, lineage = live.position.step, live.position.lineage
        blame = live.revoked or "ok"
        control = next((live.votes[m.replica_id].control for m in live.members
                        if m.replica_id in yes), b"")  # fmt: skip
        decision = Decision(self.key, live.quorum_id, step, committed, blame, control=control)
        self._remember_decision(decision)
        after = live.position
        if committed:
            self.commits += 1
            after = Position(step + 1, next_lineage(lineage, live.quorum_id, step))
            self._lineages[after.lineage] = None
            if len(self._lineages) > REMEMBERED_DECISIONS:
                self._lineages.popitem(last=False)
            # A vote by a dead member may be a commit that it learns of when it returns.
            self._missed &= set(live.votes)
        elif any(v.ok or v.phase == PHASE_REDUCING for v in live.votes.values()):
            self.discards += 1  # else nothing was reduced yet, and nothing is lost
        self._head = after
        self._update_positions(live, committed, after)
        if committed and self._goes_on(live):
            live.position, live.votes, live.deadline = after, {}, None
            live.silent = set(live.ids)
            live.members = _healed(live.members)
            self._send_all((self._seats[r].peer for r in live.living()), decision)
            return
        self._end(live, decision, yes, now)

    def _update_positions(self, live: Live, committed: bool, after: Position) -> None:
        healing = live.healing()
        for replica_id in live.living():
            vote, seat = live.votes[replica_id], self._seats[replica_id]
            if vote.ok or not committed:
                unhealed = replica_id in healing and vote.phase == PHASE_HEALING
                if not unhealed or vote.ok:
                    seat.position = after
            # else per-group commit: it voted no where others committed, and is behind now

    def _goes_on(self, live: Live) -> bool:
        """Whether the same quorum may work on the next step."""
        if live.revoked or live.gone or any(vote.leaving for vote in live.votes.values()):
            return False
        if len(self._seats) == len(live.members):
            return True  # nobody waits to join
        waiting = (seat for r, seat in self._seats.items() if r not in live.ids)
        return not any(seat.join.can_heal or seat.position == self._head for seat in waiting)

    def _end(self, live: Live, decision: Decision, yes: set[str], now: float) -> None:
        """The live quorum is over: tell its members, and form the next one."""
        living = live.living()
        peers = {r: self._seats[r].peer for r in living}
        self._live = None
        self._boundary = "commit" if decision.committed else "discard"
        self._previous = tuple(m.replica_id for m in live.members)
        self._previous_members, self._previous_id = live.members, live.quorum_id
        if decision.committed:
            self._previous_members = _healed(live.members)
        self._since = now
        blamed = self._to_evict(live) if live.stalled else []
        for replica_id in living:
            self._seats[replica_id].base_id = live.quorum_id
            if live.votes[replica_id].leaving:
                self._unseat(replica_id)
            elif replica_id in blamed:
                why = "evicted: kept the others' collectives waiting"
                self._send(peers[replica_id], Expelled(self.key, live.quorum_id, why))
                self._unseat(replica_id)
        self._form(now, announce=False)
        for replica_id in living:
            if replica_id in blamed:
                continue
            own = decision
            if decision.committed and replica_id not in yes:
                own = replace(decision, committed=False)
            seat = self._seats.get(replica_id)
            if self._is_living_member(replica_id) and seat is not None:
                own = replace(own, next_quorum=self._quorum_for(seat))
            else:
                own = replace(own, waiting=True)
            self._send(peers[replica_id], own)
        self._announce(skip=set(living))

    def _to_evict(self, live: Live) -> list[str]:
        """Members to blame for a stall: those not reducing while another waited for them."""
        return [r for r in live.living()
                if not live.votes[r].ok and live.votes[r].phase != PHASE_REDUCING]  # fmt: skip

    # ------------------------------------------------------------------ forming

    def _form(self, now: float, *, announce: bool = True, newcomer: Peer | None = None) -> None:
        """Form the next quorum if the rules allow; tell those who wait why not otherwise."""
        assert self._live is None
        verdict = self._verdict(now)
        if verdict.choice is not None and self._settle_doubts():
            verdict = self._verdict(now)
        self._wake_at = verdict.wake_at
        if verdict.choice is None:
            self._explain(verdict.reason, newcomer, now)
            return
        self._install(verdict.choice, verdict.reason)
        if announce:
            self._announce(skip=set())

    def _verdict(self, now: float) -> rules.Verdict:
        first = not self._previous and not self._missed
        expires = self._since + self._timeouts.join_timeout_s
        early = rules.too_early(
            len(self._seats), self._min_replicas, self._expected, first, expires, now
        )
        if early is not None:
            return early
        situation = rules.Situation(
            candidates=self._candidates(),
            min_replicas=self._min_replicas,
            expected_replicas=self._expected,
            previous=self._previous,
            missed=frozenset(self._missed),
            head=self._head,
            since=self._since,
            join_timeout_s=self._timeouts.join_timeout_s,
        )
        return rules.decide(situation, now)

    def _candidates(self) -> tuple[rules.Candidate, ...]:
        """All seats; but right after a discard newcomers that must heal are kept for the next
        commit if it works without them: a peer in the midst of its step could not serve them."""
        seats = self._seats
        if self._boundary == "discard":
            known = set(self._previous)
            kept = {r: s for r, s in seats.items() if r in known or s.position == self._head}
            if len(kept) >= self._min_replicas:
                seats = kept
        return tuple(
            rules.Candidate(r, s.join.name, s.position, s.join.can_heal, s.arrival)
            for r, s in seats.items()
        )

    def _explain(self, reason: str, newcomer: Peer | None, now: float) -> None:
        """Tell why there is no quorum: the newcomer at once, the others once a second at most."""
        message = Waiting(self.key, reason)
        if reason != self._reason and now >= self._told_at + EXPLAIN_EVERY_S:
            self._told_at = now
            self._note(reason)
            self._send_all((seat.peer for seat in self._seats.values()), message)
        elif newcomer is not None:
            self._send(newcomer, message)
        self._reason = reason

    def _install(self, choice: rules.Choice, reason: str) -> None:
        quorum_id = self._next_id
        self._next_id += 1
        members = []
        for replica_id in choice.members:
            join = self._seats[replica_id].join
            healing = replica_id in choice.healing
            members.append(Member(replica_id, len(join.addresses), join.addresses, healing))
        ids = frozenset(choice.members)
        self._live = Live(quorum_id, choice.position, tuple(members), ids, set(ids))
        if self._head is None or choice.position != self._head:
            self._lineages[choice.position.lineage] = None
        self._head = choice.position
        self._missed.clear()
        self._reason = reason
        names = [self._seats[r].join.name for r in choice.members]
        healing_names = [self._seats[r].join.name for r in choice.members if r in choice.healing]
        text = f"quorum {quorum_id}: {_short_list(names)} at step {choice.position.step}"
        if healing_names:
            text += f"; healing {_short_list(healing_names)}"
        self._effects.append(Note(self.key, text, quorum=True))
        self._effects.append(Remember(self.key, quorum_id, choice.members))

    def _announce(self, skip: set[str]) -> None:
        """Send the live quorum to its members (but `skip`), sharing one message where possible."""
        live = self._live
        if live is None:
            return
        for member in live.members:
            if member.replica_id not in skip:
                seat = self._seats[member.replica_id]
                self._send(seat.peer, self._quorum_for(seat))

    def _quorum_for(self, seat: Seat) -> Quorum:
        """The live quorum as `seat` must hear it: a difference where it knows the base."""
        live = self._live
        assert live is not None
        delta = None
        if seat.base_id and seat.base_id == self._previous_id:
            delta = member_delta(self._previous_members, live.members)
        if delta is None:
            return self._full_quorum(seat)
        settle, seat.settle = seat.settle, ""
        seat.base_id = live.quorum_id
        removed, changed = delta
        return Quorum(self.key, live.quorum_id, live.position.step, live.position.lineage,
                      self._previous_id, removed, changed, self._reason, settle)  # fmt: skip

    def _full_quorum(self, seat: Seat) -> Quorum:
        live = self._live
        assert live is not None
        settle, seat.base_id = seat.settle, live.quorum_id
        return Quorum(self.key, live.quorum_id, live.position.step, live.position.lineage,
                      NO_QUORUM, (), live.members, self._reason, settle)  # fmt: skip

    # ------------------------------------------------------------------ steps in doubt

    def _settle_doubts(self) -> bool:
        """Settle every step in doubt, now that a quorum can form; True if a position changed.

        What this lighthouse remembers decides. One without memory (it was restarted) asks the
        candidates: somebody holds the committed state, so it was committed; or all members of
        that quorum are here and in doubt, so all had voted yes, and committing loses nothing.
        Otherwise the step is dropped: nobody here has acted on it.
        """
        unsettled = [
            s for s in self._seats.values() if s.join.in_doubt is not None and not s.settle
        ]
        held = {seat.position.lineage for seat in self._seats.values()} if unsettled else set()
        doubts = Counter(s.join.in_doubt for s in unsettled)
        changed = False
        for seat in unsettled:
            doubt, last = seat.join.in_doubt, set(seat.join.last_members)
            assert doubt is not None
            committed = doubt.lineage_if_committed in self._lineages
            if not committed and not self._lineages:
                everybody = bool(last) and last <= set(self._seats) and doubts[doubt] == len(last)
                committed = doubt.lineage_if_committed in held or everybody
            seat.settle = "commit" if committed else "discard"
            if committed:
                seat.position = Position(doubt.step + 1, doubt.lineage_if_committed)
                changed = True
        return changed

    # ------------------------------------------------------------------ small things

    def _refusal(self, join: Join) -> str:
        if len(self._seats) >= self._config.max_replicas_per_room:
            return f"the room is full ({len(self._seats)} replica groups)"
        for seat in self._seats.values():
            other = seat.join
            if other.schema != join.schema:
                return (
                    f"{join.name} does not match {other.name}: {join.schema_text or join.schema}"
                    f" against {other.schema_text or other.schema}; start all replica groups "
                    "with the same model and settings"
                )
            if len(other.addresses) != len(join.addresses):
                return (
                    f"{join.name} has {len(join.addresses)} ranks and {other.name} "
                    f"{len(other.addresses)}; all replica groups need the same number"
                )
            break  # all seats match each other
        return ""

    def _holder_of(self, name: str, replica_id: str) -> str | None:
        holder = self._names.get(name)
        return None if holder == replica_id else holder

    def _is_living_member(self, replica_id: str) -> bool:
        live = self._live
        return live is not None and replica_id in live.ids and replica_id not in live.gone

    def _remember_decision(self, decision: Decision) -> None:
        self._decisions[(decision.quorum_id, decision.step)] = decision
        if len(self._decisions) > REMEMBERED_DECISIONS:
            self._decisions.popitem(last=False)

    def _expel(self, peer: Peer, quorum_id: int, why: str) -> None:
        self._send(peer, Expelled(self.key, quorum_id, why))

    def _send(self, peer: Peer, message: Reply) -> None:
        self._effects.append(Send((peer,), message))

    def _send_all(self, peers: Iterable[Peer], message: Reply) -> None:
        targets = tuple(peers)
        if targets:
            self._effects.append(Send(targets, message))

    def _note(self, text: str) -> None:
        self._effects.append(Note(self.key, text))

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------------ looking in

    def check(self) -> None:
        """Assert every invariant."""
        live = self._live
        if live is None:
            return
        ids = [m.replica_id for m in live.members]
        assert len(set(ids)) == len(ids), "a replica group is twice in a quorum"
        assert live.quorum_id < self._next_id
        assert set(live.votes) <= set(ids) and set(live.gone) <= set(ids)
        assert set(live.living()) <= set(self._seats), "a living member has no seat"
        assert live.living(), "a quorum without living members"
        assert live.silent == set(live.living()) - set(live.votes)
        assert live.silent, "all have voted, none decided"
        assert self._names == {s.join.name: r for r, s in self._seats.items()}
        assert not live.revoked or live.deadline is not None, "a revoked step has no deadline"
        assert self._head == live.position
        for vote in live.votes.values():
            assert vote.quorum_id == live.quorum_id and vote.step == live.position.step

    def status(self) -> dict[str, object]:
        """For people and dashboards; plain JSON types."""
        live = self._live
        return {
            "job_id": self.key.job_id,
            "room_id": self.key.room_id,
            "state": "live" if live else "forming",
            "reason": (live.revoked if live and live.revoked else self._reason),
            "quorum_id": live.quorum_id if live else None,
            "step": self._head.step if self._head else 0,
            "lineage": self._head.lineage if self._head else "",
            "commits": self.commits,
            "discards": self.discards,
            "members": [
                {
                    "replica_id": m.replica_id,
                    "name": self._seats[m.replica_id].join.name
                    if m.replica_id in self._seats
                    else m.replica_id,
                    "healing": m.healing,
                    "gone": live.gone.get(m.replica_id, ""),
                    "voted": m.replica_id in live.votes,
                }
                for m in (live.members if live else ())
            ],
            "waiting": [
                s.join.name for r, s in self._seats.items() if not self._is_living_member(r)
            ],  # fmt: skip
        }


def _healed(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """A committed step leaves nobody behind: receivers of the decision conclude the same."""
    return tuple(replace(m, healing=False) if m.healing else m for m in members)


def _duplicate_name(name: str) -> str:
    return (
        f"another live process is called {name!r}: give every replica group a name of its own "
        "(replica_id, REPLICA_GROUP_ID)"
    )


def _short_list(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return f"[{shown}{f', … {len(names)} in all' if len(names) > most else ''}]"
