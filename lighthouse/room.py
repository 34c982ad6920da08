"""One room's state machine: who is here, the live quorum, its votes, what is decided. PURE.

Theory (DESIGN section 4; docs/protocol.md has the tables). A room is *forming* (no live quorum) or
*live*. A live quorum works on one step: it collects one vote a member. The first no, death, leave
or eviction *revokes* it: the others are told to stop their collectives and vote on what they have.
As soon as every living member has voted the step is *decided*: committed if all votes are yes,
else discarded (`ballot.py`). A committed step of an unrevoked quorum that nobody leaves and nobody
waits to join goes on under the same quorum_id; anything else ends the quorum, and the next one
forms by the rules in `quorum.py`, in the same breath where they allow it.

Rules held here, each checked by `check()` or by the simulator:
- votes count for exactly one (quorum_id, step), the first one counts (S5);
- quorum_id only grows, and starts above whatever any joiner has seen (S1);
- at most one live quorum (S2); the decided are remembered so that a lost answer can be repeated;
- a yes whose lineage is not the quorum's is a diverged member's: expelled, never counted; a no
  carries the lineage that its sender really holds, so that one still behind stays behind (S3).

`ballot.py` holds the live quorum, `seats.py` who is here, `history.py` what is remembered,
`announce.py` how a quorum is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lighthouse import quorum as rules
from lighthouse.announce import Announcer
from lighthouse.ballot import Ballot
from lighthouse.config import LighthouseConfig
from lighthouse.describe import mismatch, status_of
from lighthouse.effects import Effect, Note, Peer, Remember, Send
from lighthouse.history import History, Patience
from lighthouse.messages import (
    NO_QUORUM,
    TORN,
    Beat,
    Decision,
    Expelled,
    Join,
    Leave,
    Member,
    Refused,
    Reply,
    Revoke,
    RoomKey,
    Vote,
    Waiting,
)
from lighthouse.quorum import Position
from lighthouse.seats import Claim, Seat, Seats

__all__ = ["Effect", "Note", "Peer", "Remember", "Room", "Send"]

EXPLAIN_EVERY_S = 1.0
STEP_IN_PROGRESS = "waiting for the step in progress to end"
SHORTEST_PAUSE, LONGEST_PAUSE = 1 / 8, 8
"""In heal timeouts: how long a replica group stays out that keeps costing the others a step."""


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
        self._seats = Seats()
        self._claims: dict[str, Claim] = {}
        self._live: Ballot | None = None
        self._history = History(remembered)
        longest_s = LONGEST_PAUSE * config.timeouts.heal_timeout_s
        self._patience = Patience(SHORTEST_PAUSE * config.timeouts.heal_timeout_s, longest_s)
        self._announcer = Announcer(key)
        self._min_replicas = config.min_replicas
        self._expected = config.expected_replicas
        self._group_commit = False
        self._previous: tuple[str, ...] = ()  # members of the last quorum, in rank order
        self._has_past = bool(remembered)  # R6 is for a room's very first quorum
        self._after_discard = False
        self._since = 0.0
        self._wake_at: float | None = None
        self._reason = "nobody waits"
        self._told_at = float("-inf")
        self._effects: list[Effect] = []

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
        if self._live is None and self._wake_at is not None and now >= self._wake_at:
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
        claims = [r for r, claim in self._claims.items() if claim.peer == peer]
        return self._seats.of_peer(peer) + claims

    @property
    def empty(self) -> bool:
        return not self._seats and not self._claims

    # ------------------------------------------------------------------ requests

    def _on_join(self, peer: Peer, join: Join, now: float) -> None:
        self._next_id = max(self._next_id, join.quorum_id + 1)
        live, seat = self._live, self._seats.get(join.replica_id)
        if seat is not None and live is not None and live.has(join.replica_id):
            if join.quorum_id != live.quorum_id:
                # Its request crossed our answer, or our answer was lost: repeat it.
                self._seats.move(seat, peer)
                self._send(peer, self._announcer.full(live, seat, self._reason))
                return
            # It was told something that made it give up this quorum: take it at its word.
            self._remove(join.replica_id, "started over", now, may_return=True)
            seat = None
        if seat is not None and seat.join == join:  # repeated: it has heard nothing yet
            self._seats.move(seat, peer)
            self._explain_to(seat)
            return
        refusal = self._refusal(join)
        if refusal:
            self._send(peer, Refused(self.key, refusal))
        elif self._seats.other_holder(join.name, join.replica_id):
            self._claim(peer, join, now)
        else:
            self._seat(peer, join, now)

    def _claim(self, peer: Peer, join: Join, now: float) -> None:
        """A restarted process may be faster than the news of its predecessor's death."""
        expires = now + 2 * self._timeouts.heartbeat_timeout_s
        claim = self._claims.setdefault(join.replica_id, Claim(join, peer, expires))
        claim.join, claim.peer = join, peer
        self._send(peer, Waiting(self.key, f"the name {join.name!r} is still in use"))

    def _seat(self, peer: Peer, join: Join, now: float) -> None:
        if self.empty and self._live is None:
            self._since = now
        seat = self._seats.put(join, peer)
        self._history.missed.discard(join.replica_id)
        if not self._previous:
            missing = (r for r in join.last_members if r not in self._seats)
            self._history.missed.update(missing)
        self._has_past = self._has_past or join.quorum_id != NO_QUORUM
        self._min_replicas = max(self._min_replicas, join.min_replicas)
        self._expected = max(self._expected, join.expected_replicas)
        self._group_commit = self._group_commit or join.group_commit
        if self._live is None:
            self._form(now)
        if self._live is None or not self._live.has(seat.replica_id):
            self._explain_to(seat)

    def _on_vote(self, peer: Peer, vote: Vote, now: float) -> None:
        live = self._live
        seat = self._seats.get(vote.replica_id)
        if live is None or vote.quorum_id != live.quorum_id or vote.step != live.position.step:
            self._answer_late_vote(peer, vote, seat)
            return
        if seat is None or not live.has(vote.replica_id):
            why = live.gone.get(vote.replica_id, "not a member of this quorum")
            self._expel(peer, vote.quorum_id, why)
            return
        self._seats.move(seat, peer)
        if not _is_plausible(vote, live, seat):
            self._expel(peer, vote.quorum_id, "its state is not what the quorum takes it for")
            self._remove(vote.replica_id, "diverged", now, may_return=False)
            return
        seat.doubt, seat.settle, seat.control = None, "", b""
        if not live.cast(vote):
            return
        if not vote.ok:
            self._revoke(vote.replica_id, vote.reason or "voted no", now)
        elif live.deadline is None:
            live.deadline = now + self._timeouts.step_timeout_s
        self._evaluate(now)

    def _answer_late_vote(self, peer: Peer, vote: Vote, seat: Seat | None) -> None:
        """A vote on something already decided: its answer was lost, so repeat it."""
        decision = self._history.decision(vote.quorum_id, vote.step)
        if decision is None or seat is None:
            self._expel(peer, vote.quorum_id, "this quorum is not known here")
            return
        self._seats.move(seat, peer)
        if not vote.ok:  # per-group commit: others may have committed, this one has not
            decision = replace(decision, committed=False)
        live = self._live
        if live is not None and live.has(vote.replica_id):
            if live.quorum_id == vote.quorum_id:
                self._send(peer, decision)
            else:
                full = self._announcer.full(live, seat, self._reason)
                self._send(peer, replace(decision, next_quorum=full))
        else:
            self._send(peer, replace(decision, waiting=True))

    def _on_beat(self, peer: Peer, beat: Beat) -> None:
        live, seat = self._live, self._seats.get(beat.replica_id)
        if seat is None:
            if beat.replica_id not in self._claims:
                self._expel(peer, beat.quorum_id, "not known here")
            return
        self._seats.move(seat, peer)
        if live is None or not live.has(beat.replica_id):
            if seat.told != self._waiting_reason():
                self._explain_to(seat)
        elif beat.quorum_id != live.quorum_id:
            self._send(peer, self._announcer.full(live, seat, self._reason))
        elif live.revoked and beat.replica_id in live.silent:
            self._send(peer, Revoke(self.key, live.quorum_id, live.position.step, live.revoked))

    def _on_leave(self, leave: Leave, now: float) -> None:
        self._claims.pop(leave.replica_id, None)
        self._remove(leave.replica_id, f"left: {leave.reason or 'shutdown'}", now, may_return=False)

    # ------------------------------------------------------------------ the live quorum

    def _revoke(self, replica_id: str, reason: str, now: float) -> None:
        live = self._live
        assert live is not None
        if live.revoked:
            return
        reason = f"{live.names[replica_id]}: {reason}"
        live.revoke(replica_id, reason, now, self._timeouts.revoke_timeout_s)
        self._note(f"step {live.position.step} revoked: {reason}")
        message = Revoke(self.key, live.quorum_id, live.position.step, reason)
        self._send_all((self._seats[r].peer for r in sorted(live.silent)), message)

    def _remove(self, replica_id: str, cause: str, now: float, *, may_return: bool) -> None:
        """`replica_id` is no longer here, for whatever reason."""
        seat = self._seats.get(replica_id)
        if seat is None:
            return
        if may_return and seat.position == self._history.head:
            self._history.missed.add(replica_id)
        live = self._live
        if live is not None and live.has(replica_id):
            live.lose(replica_id, cause)
            self._revoke(replica_id, cause, now)
            self._seats.take(replica_id)
            self._evaluate(now)
        else:
            self._seats.take(replica_id)
            if live is None:
                self._wake_at = now  # look again, once for all who go at this moment
        self._admit_claim(seat.name, now)

    def _admit_claim(self, name: str, now: float) -> None:
        for replica_id, claim in list(self._claims.items()):
            if claim.join.name == name:
                del self._claims[replica_id]
                self._on_join(claim.peer, claim.join, now)
                return

    def _evict_laggards(self, live: Ballot, now: float) -> None:
        """The step's deadline has passed: who has not voted is hung.

        One that did not react to a revoke either was away as a whole, and may join at once when
        it is back; one whose loop alone hangs must come back with its loop.
        """
        live.deadline = None
        hung = not live.revoked
        for replica_id in sorted(live.silent):
            if self._live is live:
                self._evict(replica_id, "did not vote before the step's deadline", now, hung=hung)

    def _evict(self, replica_id: str, why: str, now: float, *, hung: bool) -> None:
        assert self._live is not None
        message = Expelled(self.key, self._live.quorum_id, f"evicted: {why}", hung)
        self._send(self._seats[replica_id].peer, message)
        self._live.hung.add(replica_id)
        self._remove(replica_id, f"evicted: {why}", now, may_return=True)

    def _evaluate(self, now: float) -> None:
        """Decide the step if every living member has voted."""
        live = self._live
        assert live is not None
        if live.silent:
            return
        before = live.position
        decision = Decision(
            self.key,
            live.quorum_id,
            before.step,
            live.commits(self._group_commit),
            live.revoked or "ok",
            control=live.control(),
        )
        if not decision.committed:
            decision = replace(decision, control=b"")
        after = self._history.decided(decision, before)
        if decision.committed:
            # A vote by a dead member may be a commit that it learns of when it returns.
            if self._history.missed:
                self._history.missed.intersection_update(live.votes)
        elif live.reduced():
            self._history.discards += 1  # else nothing is lost
        self._book_costs(live, decision, now)
        self._update_positions(live, decision.committed, after)
        if decision.committed and live.undisturbed() and not self._admits(live, now):
            peers = [self._seats[r].peer for r in live.living()]
            live.turn(after, now)
            self._send_all(peers, decision)
            return
        self._end(live, decision, now)

    def _book_costs(self, live: Ballot, decision: Decision, now: float) -> None:
        """Who has cost the others this step is taken back later and later."""
        if decision.committed and self._patience:
            for replica_id in live.yes():
                self._patience.succeeded(live.names[replica_id])
        for replica_id in live.costly():
            self._patience.failed(live.names[replica_id], now - live.since, now)

    def _update_positions(self, live: Ballot, committed: bool, after: Position) -> None:
        for replica_id in live.living():
            vote, seat = live.votes[replica_id], self._seats[replica_id]
            if vote.ok or not (committed or live.is_behind(replica_id)):
                seat.position = after
            elif vote.lineage.startswith(TORN):
                seat.position = Position(0, vote.lineage)
            # else it is behind: still, or (per-group commit) from now on

    def _admits(self, live: Ballot, now: float) -> bool:
        """Whether somebody waits who could be in a next quorum."""
        if len(self._seats) == len(live.members):
            return False
        return any(self._may_enter(seat, now) for seat in self._seats if seat.replica_id not in live.ids)

    def _may_enter(self, seat: Seat, now: float) -> bool:
        head = self._history.head
        if not self._patience.allows(seat.name, now):
            return False
        if head is not None and (seat.position == head or seat.position.step > head.step):
            return True
        if seat.doubt is not None and not seat.settle:
            return True
        return seat.join.can_heal

    def _end(self, live: Ballot, decision: Decision, now: float) -> None:
        """The live quorum is over: tell its members, and form the next one."""
        living, yes = live.living(), live.yes()
        blamed = set(live.blamed())
        self._live = None
        self._after_discard = not decision.committed
        self._previous = tuple(m.replica_id for m in live.members)
        self._announcer.ended(live)
        self._since = now
        answered = []
        for replica_id in living:
            seat = self._seats[replica_id]
            seat.base_id = live.quorum_id
            if replica_id in blamed:
                why = "evicted: kept the others' collectives waiting"
                self._send(seat.peer, Expelled(self.key, live.quorum_id, why, True))
                if seat.position == self._history.head:
                    self._history.missed.add(replica_id)
            else:
                answered.append(seat)
            if replica_id in blamed or live.votes[replica_id].leaving:
                self._seats.take(replica_id)
        self._form(now, announce=False)
        self._answer(decision, answered, yes)
        self._announce(skip=set(living))

    # ------------------------------------------------------------------ forming

    def _form(self, now: float, *, announce: bool = True) -> None:
        """Form the next quorum if the rules allow; tell those who wait why not otherwise."""
        assert self._live is None
        verdict = self._verdict(now)
        if verdict.choice is not None and self._history.settle(self._seats):
            verdict = self._verdict(now)
            if verdict.choice is None:
                self._history.unsettle(self._seats)
        self._wake_at = verdict.wake_at
        if verdict.choice is None:
            self._explain(verdict.reason, now)
            return
        self._install(verdict.choice, verdict.reason, now)
        if announce:
            self._announce(skip=set())

    def _verdict(self, now: float) -> rules.Verdict:
        missed, head = self._history.missed, self._history.head
        held = head is not None and any(seat.position == head for seat in self._seats)
        waits_for = 0 if held else len(missed)
        expires = self._since + self._timeouts.join_timeout_s
        early = rules.too_early(
            len(self._seats), self._min_replicas, self._expected,
            not self._previous and not self._has_past, expires, now, waits_for,
        )  # fmt: skip
        if early is not None:
            return early
        situation = rules.Situation(
            candidates=self._candidates(held, now),
            min_replicas=self._min_replicas,
            expected_replicas=self._expected,
            previous=self._previous,
            missed=frozenset(missed),
            head=head,
            since=self._since,
            join_timeout_s=self._timeouts.join_timeout_s,
            has_past=self._has_past,
        )
        return rules.decide(situation, now)

    def _candidates(self, held: bool, now: float) -> tuple[rules.Candidate, ...]:
        """All seats, but for those that would only cost the holders of the head a step: who must
        heal right after a discard (a peer in the midst of its step could not serve them), and who
        keeps hanging or failing to heal. They wait for a later commit if it works without them."""
        head, known = self._history.head, set(self._previous) if self._after_discard else None
        kept = [
            seat for seat in self._seats
            if (seat.position == head or known is None or seat.replica_id in known)
            and self._patience.allows(seat.name, now)
        ]  # fmt: skip
        chosen = kept if held and len(kept) >= self._min_replicas else self._seats
        return tuple(
            rules.Candidate(s.replica_id, s.name, s.position, s.join.can_heal, s.arrival)
            for s in chosen
        )

    def _install(self, choice: rules.Choice, reason: str, now: float) -> None:
        quorum_id = self._next_id
        self._next_id += 1
        members, names = [], {}
        for replica_id in choice.members:
            join = self._seats[replica_id].join
            healing = replica_id in choice.healing
            members.append(Member(replica_id, len(join.addresses), join.addresses, healing))
            names[replica_id] = join.name
        self._live = Ballot.open(quorum_id, choice.position, tuple(members), names, now)
        self._history.start(choice.position)
        self._reason = reason
        text = f"quorum {quorum_id}: {_short_list(list(names.values()))} at step "
        text += str(choice.position.step)
        if choice.healing:
            behind = [names[r] for r in choice.members if r in choice.healing]
            text += f"; healing {_short_list(behind)}"
        self._effects.append(Note(self.key, text, quorum=True))
        self._effects.append(Remember(self.key, quorum_id, choice.members))

    # ------------------------------------------------------------------ telling

    def _answer(self, decision: Decision, voters: list[Seat], yes: set[str]) -> None:
        """The decision and what comes next, in as few distinct messages as possible."""
        live = self._live
        members = [s for s in voters if live is not None and live.has(s.replica_id)]
        quorums = self._announcer.each(live, members, self._reason) if live is not None else {}
        groups: dict[tuple[int, bool], tuple[Decision, list[Peer]]] = {}
        for seat in voters:
            following = quorums.get(seat.replica_id)
            committed = decision.committed and seat.replica_id in yes
            key = (id(following), committed)
            if key not in groups:
                own = replace(
                    decision, committed=committed, next_quorum=following, waiting=following is None
                )
                groups[key] = (own, [])
            groups[key][1].append(seat.peer)
        for own, peers in groups.values():
            self._send_all(peers, own)

    def _announce(self, skip: set[str]) -> None:
        """Send the live quorum to its members (but `skip`)."""
        live = self._live
        if live is None:
            return
        told = [self._seats[m.replica_id] for m in live.members if m.replica_id not in skip]
        groups: dict[int, list[Peer]] = {}
        quorums = self._announcer.each(live, told, self._reason)
        for seat in told:
            groups.setdefault(id(quorums[seat.replica_id]), []).append(seat.peer)
        by_id = {id(quorum): quorum for quorum in quorums.values()}
        for number, peers in groups.items():
            self._send_all(peers, by_id[number])

    def _explain(self, reason: str, now: float) -> None:
        """Tell all why there is no quorum, once a second at most: later ones learn it by beats."""
        changed, self._reason = reason != self._reason, reason
        if changed and now >= self._told_at + EXPLAIN_EVERY_S:
            self._told_at = now
            self._note(reason)
            for seat in self._seats:
                seat.told = reason
            self._send_all((seat.peer for seat in self._seats), Waiting(self.key, reason))

    def _waiting_reason(self) -> str:
        return self._reason if self._live is None else STEP_IN_PROGRESS

    def _explain_to(self, seat: Seat) -> None:
        seat.told = self._waiting_reason()
        self._send(seat.peer, Waiting(self.key, seat.told))

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

    def _refusal(self, join: Join) -> str:
        if join.replica_id not in self._seats and (
            len(self._seats) + len(self._claims) >= self._config.max_replicas_per_room
        ):
            return f"the room is full ({len(self._seats)} replica groups)"
        other = self._seats.any()
        return mismatch(join, other.join) if other is not None else ""

    @property
    def commits(self) -> int:
        return self._history.commits

    @property
    def discards(self) -> int:
        return self._history.discards

    def check(self) -> None:
        """Assert every invariant. O(members)."""
        self._seats.check()
        for claim in self._claims.values():
            assert claim.join.replica_id not in self._seats, "both seated and claiming"
        live = self._live
        if live is None:
            return
        live.check()
        assert live.quorum_id < self._next_id
        assert set(live.living()) <= self._seats.ids(), "a living member has no seat"
        assert self._history.head == live.position
        for member in live.members:
            if live.has(member.replica_id) and not member.healing:
                assert self._seats[member.replica_id].position == live.position, "S3: behind"

    def status(self) -> dict[str, object]:
        """For people and dashboards; plain JSON types."""
        return status_of(
            self.key, self._live, self._seats, self._history, self._reason
        )


def _is_plausible(vote: Vote, live: Ballot, seat: Seat) -> bool:
    """A yes must come from the quorum's own state; a no tells where its sender really stands."""
    if vote.lineage == live.position.lineage:
        return True
    if vote.ok:
        return False
    return vote.lineage == seat.position.lineage or vote.lineage.startswith(TORN)


def _duplicate_name(name: str) -> str:
    return (
        f"another live process is called {name!r}: give every replica group a name of its own "
        "(replica_id, REPLICA_GROUP_ID)"
    )


def _short_list(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return f"[{shown}{f', … {len(names)} in all' if len(names) > most else ''}]"
