"""One job's state machine: who is here, the live quorum, its votes, what is decided. PURE.

Theory (docs/protocol.md has the tables). A job is *forming* (no live quorum) or
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
`forming.py` what the next quorum is made of, `announce.py` how all of it is said.
"""

from __future__ import annotations

from dataclasses import replace

from lighthouse.config import LighthouseConfig
from lighthouse.machine import rules
from lighthouse.machine.announce import Announcer
from lighthouse.machine.ballot import Ballot
from lighthouse.machine.describe import mismatch, status_of
from lighthouse.machine.effects import Effect, Note, Peer, Remember, Send
from lighthouse.machine.forming import Forming
from lighthouse.machine.history import History
from lighthouse.machine.members import Members, MemberState, NameConflict
from lighthouse.machine.rules import Position
from lighthouse.wire.messages import (
    FINISHED,
    TORN,
    Decision,
    Heartbeat,
    JobKey,
    Join,
    Leave,
    Member,
    Refused,
    Revoke,
    Vote,
    Waiting,
)

__all__ = ["Effect", "JobState", "Note", "Peer", "Remember", "Send"]


class JobState:
    """See the module's docstring. Not thread-safe: one owner."""

    def __init__(
        self,
        key: JobKey,
        config: LighthouseConfig,
        first_quorum_id: int,
        remembered: tuple[str, ...] = (),
    ) -> None:
        self.key = key
        self._config = config
        self._timeouts = config.timeouts
        self._next_id = first_quorum_id
        self._seats = Members()
        self._claims: dict[str, NameConflict] = {}
        self._live: Ballot | None = None
        self._history = History(remembered)
        self._forming = Forming(config, self._seats, self._history)
        self._voice = Announcer(key)
        self._group_commit = False
        self._wake_at: float | None = None  # when to look again whether a quorum may form

    # ------------------------------------------------------------------ events

    def handle(self, peer: Peer, message: Join | Vote | Heartbeat | Leave, now: float) -> list[Effect]:
        """A request from `peer`."""
        if isinstance(message, Join):
            self._on_join(peer, message, now)
        elif isinstance(message, Vote):
            self._on_vote(peer, message, now)
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(peer, message)
        else:
            self._on_leave(message, now)
        return self._voice.drain()

    def lost(self, replica_id: str, cause: str, now: float) -> list[Effect]:
        """The process of `replica_id` is dead or unreachable."""
        self._claims.pop(replica_id, None)
        self._remove(replica_id, cause, now, may_return=True)
        return self._voice.drain()

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        live = self._live
        if live is not None and live.deadline is not None and now >= live.deadline:
            self._evict_laggards(live, now)
        for replica_id, claim in list(self._claims.items()):
            if now >= claim.expires:
                del self._claims[replica_id]
                self._voice.send(claim.peer, Refused(self.key, _duplicate_name(claim.join.name)))
        if self._live is None and self._wake_at is not None and now >= self._wake_at:
            self._form_and_tell(now)
        return self._voice.drain()

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
                self._voice.send(peer, self._voice.full(live, seat))
                return
            # It was told something that made it give up this quorum: take it at its word.
            self._remove(join.replica_id, "started over", now, may_return=True)
            seat = None
        if seat is not None and seat.join == join:  # repeated: it has heard nothing yet
            self._seats.move(seat, peer)
            self._voice.explain_to(seat, self._live)
            return
        refusal = self._refusal(join)
        if refusal:
            self._voice.send(peer, Refused(self.key, refusal))
        elif self._seats.other_holder(join.name, join.replica_id):
            self._claim(peer, join, now)
        else:
            self._seat(peer, join, now)

    def _claim(self, peer: Peer, join: Join, now: float) -> None:
        """A restarted process may be faster than the news of its predecessor's death."""
        expires = now + 2 * self._timeouts.heartbeat_timeout_s
        claim = self._claims.setdefault(join.replica_id, NameConflict(join, peer, expires))
        claim.join, claim.peer = join, peer
        self._voice.send(peer, Waiting(self.key, f"the name {join.name!r} is still in use"))

    def _seat(self, peer: Peer, join: Join, now: float) -> None:
        if self.empty and self._live is None:
            self._forming.since = now
        self._claims.pop(join.replica_id, None)
        seat = self._seats.put(join, peer)
        self._forming.joined(join)
        self._group_commit = self._group_commit or join.group_commit
        if self._live is None:
            self._form_and_tell(now)
        if seat.replica_id not in self._seats:
            return  # sent away
        waits = self._live is None or not self._live.has(seat.replica_id)
        if waits and self._voice.is_news(seat, self._live):
            self._voice.explain_to(seat, self._live)

    def _on_vote(self, peer: Peer, vote: Vote, now: float) -> None:
        live = self._live
        seat = self._seats.get(vote.replica_id)
        if live is None or vote.quorum_id != live.quorum_id or vote.step != live.position.step:
            self._answer_late_vote(peer, vote, seat)
            return
        if seat is None or not live.has(vote.replica_id):
            why = live.gone.get(vote.replica_id, "not a member of this quorum")
            self._voice.expel(peer, vote.quorum_id, why)
            return
        self._seats.move(seat, peer)
        if not _is_plausible(vote, live, seat):
            self._voice.expel(peer, vote.quorum_id, "its state is not what the quorum takes it for")
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

    def _answer_late_vote(self, peer: Peer, vote: Vote, seat: MemberState | None) -> None:
        """A vote on something already decided: its answer was lost, so repeat it."""
        decision = self._history.decision(vote.quorum_id, vote.step)
        if decision is None or seat is None:
            self._voice.expel(peer, vote.quorum_id, "this quorum is not known here")
            return
        self._seats.move(seat, peer)
        if not vote.ok:  # per-group commit: others may have committed, this one has not
            decision = replace(decision, committed=False)
        live = self._live
        if live is not None and live.has(vote.replica_id):
            if live.quorum_id == vote.quorum_id:
                self._voice.send(peer, decision)
            else:
                full = self._voice.full(live, seat)
                self._voice.send(peer, replace(decision, next_quorum=full))
        else:
            self._voice.send(peer, replace(decision, waiting=True))

    def _on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        live, seat = self._live, self._seats.get(heartbeat.replica_id)
        if seat is None:
            if heartbeat.replica_id not in self._claims:
                self._voice.expel(peer, heartbeat.quorum_id, "not known here")
            return
        self._seats.move(seat, peer)
        if live is None or not live.has(heartbeat.replica_id):
            if self._voice.is_news(seat, live):
                self._voice.explain_to(seat, self._live)
        elif heartbeat.quorum_id != live.quorum_id:
            self._voice.send(peer, self._voice.full(live, seat))
        elif live.revoked and heartbeat.replica_id in live.silent:
            self._voice.send(
                peer, Revoke(self.key, live.quorum_id, live.position.step, live.revoked)
            )

    def _on_leave(self, leave: Leave, now: float) -> None:
        self._claims.pop(leave.replica_id, None)
        member = leave.replica_id in self._seats
        self._remove(leave.replica_id, f"left: {leave.reason or 'shutdown'}", now, may_return=False)
        if member:
            self._history.finished = leave.reason == FINISHED

    # ------------------------------------------------------------------ the live quorum

    def _revoke(self, replica_id: str, reason: str, now: float) -> None:
        live = self._live
        assert live is not None
        if live.revoked:
            return
        reason = f"{live.names[replica_id]}: {reason}"
        live.revoke(replica_id, reason, now, self._timeouts.revoke_timeout_s)
        self._voice.emit(Note(self.key, f"step {live.position.step} revoked: {reason}"))
        message = Revoke(self.key, live.quorum_id, live.position.step, reason)
        self._voice.send_all((self._seats[r].peer for r in sorted(live.silent)), message)

    def _remove(self, replica_id: str, cause: str, now: float, *, may_return: bool) -> None:
        """`replica_id` is no longer here, for whatever reason."""
        seat = self._seats.get(replica_id)
        if seat is None:
            return
        head = self._history.head
        if may_return and (seat.position == head or (head is None and seat.veteran)):
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
        peer = self._seats[replica_id].peer
        self._voice.expel(peer, self._live.quorum_id, f"evicted: {why}", hung=hung)
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
        self._forming.decided(live, decision.committed, now)
        self._update_positions(live, decision.committed, after)
        if decision.committed and live.undisturbed() and not self._forming.admits(live, now):
            peers = [self._seats[r].peer for r in live.living()]
            live.turn(after, now)
            self._voice.send_all(peers, decision)
            return
        self._end(live, decision, now)

    def _update_positions(self, live: Ballot, committed: bool, after: Position) -> None:
        for replica_id in live.living():
            vote, seat = live.votes[replica_id], self._seats[replica_id]
            if vote.ok or not (committed or live.is_behind(replica_id)):
                seat.position = after
            elif vote.lineage.startswith(TORN):
                seat.position = Position(0, vote.lineage)
            # else it is behind: still, or (per-group commit) from now on

    def _end(self, live: Ballot, decision: Decision, now: float) -> None:
        """The live quorum is over: tell its members, and form the next one."""
        living, yes = live.living(), live.yes()
        blamed = set(live.blamed())
        self._live = None
        self._forming.ended(live, decision.committed, now)
        self._voice.ended(live)
        answered, told = [], set(living)
        for replica_id in living:
            seat = self._seats[replica_id]
            seat.base_id = live.quorum_id
            if replica_id in blamed:
                why = "evicted: kept the others' collectives waiting"
                self._voice.expel(seat.peer, live.quorum_id, why, hung=True)
                if seat.position == self._history.head:
                    self._history.missed.add(replica_id)
            else:
                answered.append(seat)
            if replica_id in blamed or live.votes[replica_id].leaving:
                self._seats.take(replica_id)
        self._form(now)
        self._voice.answer(decision, answered, yes, self._live)
        if self._live is not None:
            self._voice.announce(self._live, (s for s in self._seats if s.replica_id not in told))
        else:
            for seat in answered:
                seat.told = ""  # its next heartbeat is answered with the reason

    # ------------------------------------------------------------------ forming

    def _form(self, now: float) -> bool:
        """Form the next quorum if the rules allow (the caller announces it); else say why not."""
        assert self._live is None
        verdict = self._forming.verdict(now)
        if verdict.choice is not None and self._history.settle(self._seats):
            verdict = self._forming.verdict(now)
            if verdict.choice is None:
                self._history.unsettle(self._seats)
        self._wake_at = verdict.wake_at
        if verdict.hopeless:
            self._send_away(verdict.reason)
            return False
        if verdict.choice is None:
            self._voice.explain(verdict.reason, self._seats, now)
            return False
        self._install(verdict.choice, verdict.reason, now)
        return True

    def _send_away(self, reason: str) -> None:
        """Nothing can come of those who wait."""
        for seat in list(self._seats):
            self._voice.send(seat.peer, Refused(self.key, reason))
            self._seats.take(seat.replica_id)

    def _form_and_tell(self, now: float) -> None:
        if self._form(now):
            assert self._live is not None
            self._voice.announce(self._live, self._seats)

    def _install(self, choice: rules.Choice, reason: str, now: float) -> None:
        quorum_id = self._next_id
        self._next_id += 1
        members, names = [], {}
        for replica_id in choice.members:
            seat = self._seats[replica_id]
            self._seats.promote(seat)
            join = seat.join
            healing = replica_id in choice.healing
            members.append(Member(replica_id, len(join.addresses), join.addresses, healing))
            names[replica_id] = join.name
        self._live = Ballot.open(quorum_id, choice.position, tuple(members), names, now)
        self._history.start(choice.position)
        self._voice.reason = reason
        text = f"quorum {quorum_id}: {_short_list(list(names.values()))} at step "
        text += str(choice.position.step)
        if choice.healing:
            behind = [names[r] for r in choice.members if r in choice.healing]
            text += f"; healing {_short_list(behind)}"
        self._voice.emit(Note(self.key, text, quorum=True))
        self._voice.emit(Remember(self.key, quorum_id, choice.members))

    # ------------------------------------------------------------------ looking in

    def _refusal(self, join: Join) -> str:
        known = self._seats.get(join.replica_id)
        if known is not None and known.name != join.name:
            return (
                f"{known.name!r} can't become {join.name!r}: start it again under a new replica_id"
            )
        if known is None and (
            len(self._seats) + len(self._claims) >= self._config.max_replicas_per_job
        ):
            return f"the job is full ({len(self._seats)} replica groups)"
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
        return status_of(self.key, self._live, self._seats, self._history, self._voice.reason)


def _is_plausible(vote: Vote, live: Ballot, seat: MemberState) -> bool:
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
