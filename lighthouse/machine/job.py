"""The lighthouse's state machine: each job's members, live quorum, votes and decisions. PURE.

Theory (docs/protocol.md has the tables). A job is *forming* (it has no live quorum) or *live*. A
live quorum works on one step, and collects one vote from each member. The first no, death, leave or
eviction *revokes* it: the others are told to stop their collectives and to vote on what they have.
As soon as every living member has voted the step is *decided*: committed if all votes are yes, else
discarded (`ballot.py`). After a committed step of an unrevoked quorum that no member leaves and
no member waits to join, the same quorum_id goes on. Anything else ends the quorum, and the next
one forms by the rules in `rules.py`, at once where they allow it.

Rules held here, each checked by `check()` or by the simulator:
- votes count for exactly one (quorum_id, step), and the first one counts (S5);
- a process is a member only while it has promised itself to the job's term. A term's epoch is higher
  than all that its members have promised before, and its nonce is random: so quorum_ids grow for
  each process, and lineages never repeat, whatever lighthouses there are (S1);
- at most one quorum is live (S2); decisions are remembered so that a lost answer can be repeated;
- a yes whose lineage is not the quorum's comes from a diverged member, which is expelled and never
  counted; a no carries the lineage that its sender holds, so that a member that is still behind
  stays behind (S3).

`members.py` holds the members and what is remembered, `ballot.py` the live quorum, `forming.py` what
the next quorum is made of, `announce.py` the messages and effects. `server.py` gives all of it a
socket and a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lighthouse.config import LighthouseConfig
from lighthouse.machine import rules
from lighthouse.machine.announce import (
    JOIN_AGAIN,
    STEP_IN_PROGRESS,
    Announcer,
    Effect,
    Note,
    Remember,
    Send,
    duplicate_name,
    foreign_states,
    mismatch,
    schemas,
    short_list,
    status_of,
    stops,
    taken_id,
)
from lighthouse.machine.ballot import Ballot
from lighthouse.machine.forming import Forming
from lighthouse.machine.members import (
    History,
    Members,
    MemberState,
    is_plausible,
    update_positions,
)
from lighthouse.machine.newcomers import Newcomers
from lighthouse.wire.messages import (
    FINISHED,
    MAX_EPOCH,
    NO_QUORUM,
    NOT_KNOWN,
    TERM_BITS,
    TORN,
    DeathNotice,
    Decision,
    Expelled,
    Heartbeat,
    JobKey,
    Join,
    Leave,
    Peer,
    ReachQuery,
    ReachReport,
    Refused,
    Reply,
    Revoke,
    Term,
    Vote,
    Waiting,
    epoch_of,
    is_replica_id,
    name_of,
    same_process,
)

__all__ = ["Effect", "JobState", "Note", "Remember", "Send"]

MAX_JUMP = 2**20
"""Most epochs by which one process may move its job on: what peers say must not use up the numbers."""


class JobState:
    """One job's machine; see the module's docstring. Not thread-safe: one owner.

    Events (`handle`, `lost`, `expire`) return effects. `now` is in seconds of any monotonic clock.
    `nonce`: random, and of this object alone. `remembered`: replica_ids of the last quorum of an
    earlier lighthouse.
    """

    def __init__(
        self,
        key: JobKey,
        config: LighthouseConfig,
        nonce: int,
        remembered: tuple[str, ...] = (),
    ) -> None:
        self.key, self._config = key, config
        self._timeouts = config.timeouts
        self.term = Term(0, nonce)
        """What members must have promised themselves to. Read only."""
        self._formed = 0  # quorums of this term
        self._genesis = 0  # of the state with which it goes on; 0: there was no quorum yet
        self._least_epoch = 0  # of the next term; it starts as soon as no quorum is live
        self._members, self._newcomers = Members(), Newcomers()
        self._announcer = Announcer(key)
        self._live: Ballot | None = None
        self._history = History(remembered, self.term)
        self._forming = Forming(config, self._members, self._history, self._newcomers)
        self._effects: list[Effect] = []
        self._wake_at: float | None = None  # when to check again whether a quorum may form

    # ------------------------------------------------------------------ events

    def handle(
        self, peer: Peer, message: Join | Vote | Heartbeat | Leave | ReachReport, now: float
    ) -> list[Effect]:
        """A request from `peer`."""
        if not self._speaks_for(peer, message.replica_id):
            if isinstance(message, Join):
                self._send(peer, Refused(self.key, taken_id(message.replica_id)))
        elif isinstance(message, Join):
            if not self._history.is_old(message):
                self._on_join(peer, message, now)
        elif isinstance(message, Vote):
            self._on_vote(peer, message, now)
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(peer, message)
        elif isinstance(message, ReachReport):
            if broken := self._forming.reach_reported(message, self._live, now):
                self._revoke(message.replica_id, broken, now)
            self._wake_at = now
        elif self._history.leaves(message):
            self._on_leave(message, now)
        return self._take_effects(now)

    def death_notice(self, peer: Peer, notice: DeathNotice, now: float) -> list[Effect]:
        """A watcher says that the process of a replica group is dead."""
        if self._speaks_for(peer, notice.replica_id):
            self._forget(notice.replica_id, now, notice)
            self._remove(notice.replica_id, notice.cause or "process died", now)
        return self._take_effects(now)

    def alive(self, group: str) -> str:
        """The process of the replica group (or the process) `group` that is here; empty: none is."""
        here = {r: m.name for r, m in self._members.by_id.items()}
        here |= {r: name_of(r) for r in self._newcomers}
        if is_replica_id(group):
            return group if group in here else ""
        return next((r for r, name in here.items() if name == group), "")

    def declare_dead(self, group: str, now: float) -> list[Effect]:
        """A replica group (by name), or a process, is dead or will not come; it is not `alive`."""
        self._history.declare_dead(self._members, group)
        self._wake_at = now
        self._effects.append(Note(self.key, f"{group} was declared dead"))
        return self._take_effects(now)

    def _speaks_for(self, peer: Peer, replica_id: str) -> bool:
        """Whether `peer` may say something about `replica_id`: only its own process, and that
        process' watcher, present the identity under which it has joined. A member that is lost may live."""
        spoke = self._members.speaker(replica_id) or self._newcomers.speaker(replica_id)
        return spoke is None or spoke == peer or same_process(spoke, peer)

    def _forget(
        self, replica_id: str, now: float, ended: Leave | DeathNotice | None = None
    ) -> None:
        """`replica_id`, if it is a newcomer, waits no longer. `ended`: its state is gone."""
        waited_for = self._newcomers.forget(replica_id)
        if ended is not None:
            self._history.ended(self._members, ended)
        if (ended is not None or waited_for) and self._live is None:
            self._wake_at = now

    def lost(self, replica_id: str, cause: str, now: float) -> list[Effect]:
        """`replica_id` can't be reached; it may come back."""
        self._forget(replica_id, now)
        self._remove(replica_id, cause, now)
        return self._take_effects(now)

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        live = self._live
        if live is not None and live.deadline is not None and now >= live.deadline:
            self._evict_laggards(live, now)
        if (ask_at := self._forming.pairs.deadline()) is not None and now >= ask_at:
            for asked, other in self._forming.ask_pairs(now):
                self._send(asked.peer, ReachQuery(self.key, (other.entry(healing=False),)))
            self._wake_at = now
        self._let_in(now)
        for late in self._newcomers.expired(now):
            self._send(late.peer, Refused(self.key, duplicate_name(late.join.name)))
        if self._live is None and self._wake_at is not None and now >= self._wake_at:
            self._form_and_announce(now)
        return self._take_effects(now)

    def deadline(self) -> float | None:
        """When `expire` wants to be called; None: not before another event."""
        own = self._wake_at if self._live is None else self._live.deadline
        times = (self._newcomers.deadline(), own, self._forming.pairs.deadline())
        return min((at for at in times if at is not None), default=None)

    def replicas_of(self, peer: Peer) -> list[str]:
        """replica_ids of members and newcomers that are reached through `peer`."""
        return self._members.of_peer(peer) + self._newcomers.of_peer(peer)

    @property
    def blank(self) -> bool:
        """Whether nothing would be lost with this job: it has no member and had no quorum."""
        return self.empty and self._history.head is None and not self._history.missed

    @property
    def empty(self) -> bool:
        """Whether every member has left."""
        return not (self._members.by_id or self._newcomers)

    def _take_effects(self, now: float) -> list[Effect]:
        self._let_in(now)
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------------ requests

    def _on_join(self, peer: Peer, join: Join, now: float) -> None:
        member = self._members.by_id.get(join.replica_id)
        if member is not None and member.outdates(join):
            return
        if join.lineage.startswith(TORN):
            self._history.different.pop(join.replica_id, None)
        elif join.replica_id in self._history.different:  # it has not heard that it must heal
            self._expel_unknown(peer, join.replica_id, NO_QUORUM, "")
            return
        if join.promised != self.term:
            self._offer(peer, join, now)
            return
        if self._history.is_newer(join, self._genesis):
            self._offer(peer, join, now)
            return
        self._newcomers.follows(join.replica_id)
        live = self._live
        if member is not None and live is not None and join.replica_id in live.living:
            if join.quorum_id != live.quorum_id and join.left == member.join.left:
                # Its request crossed our answer, or our answer was lost: repeat it.
                self._reached(member, peer)
                self._send(peer, self._announcer.full(live, member))
                return
            # A message made it give up this quorum, or it has left: it joins as a newcomer.
            self._remove(join.replica_id, "started over", now)
            if self.term != join.promised:  # the step that it has ended was the last of the term
                self._offer(peer, join, now)
                return
        if refusal := self._refusal(join):
            self._send(peer, Refused(self.key, refusal))
        elif self._members.other_holder(join.name, join.replica_id):
            self._hold_back(peer, join, now)
        else:
            self._admit(peer, join, now)

    def _offer(self, peer: Peer, join: Join, now: float) -> None:
        """The sender has promised itself to another term, or to none: it must join again.

        If it has promised a higher one, or brings a state of a later one or of a branch that comes first, the
        job needs a new term. All members then join again.
        """
        replica_id = join.replica_id
        begun = self._history.head is not None
        epoch, least = rules.epochs(join, self.term, self._genesis, begun=begun)
        count = len(self._members.by_id) + len(self._newcomers)
        most = MAX_EPOCH // 2 if self.empty else self.term.epoch + MAX_JUMP
        if epoch > most:
            self._send(peer, Refused(self.key, f"epoch {epoch} is out of range: start again"))
        elif replica_id not in self._members.by_id and count >= self._config.max_replicas_per_job:
            self._send(peer, Refused(self.key, f"the job is full ({count} replica groups)"))
        else:
            self._remove(replica_id, "followed another lighthouse", now)
            self._newcomers.offer(replica_id, peer)
            self._least_epoch = max(self._least_epoch, least)
            if self._live is None and self._least_epoch > self.term.epoch:
                self._new_term(now)
            else:
                self._repeat_offer(replica_id)

    def _repeat_offer(self, replica_id: str) -> None:
        due = self._least_epoch > self.term.epoch  # the next term's, as soon as it has begun
        message = Waiting(
            self.key, STEP_IN_PROGRESS if due else JOIN_AGAIN, None if due else self.term
        )
        self._send(self._newcomers.offered[replica_id], message)

    def _new_term(self, now: float, least: int = 0) -> None:
        """A term above all that was promised: what this job knows of its members is as after a
        restart of the lighthouse, but for its decisions."""
        assert self._live is None
        self.term = Term(max(self._least_epoch, self.term.epoch + 1, least), self.term.nonce)
        self._formed = 0
        self._history.new_term(self._members, self.term)
        self._forming.new_term(now)
        for member in list(self._members.by_id.values()):
            self._members.take(member.replica_id)
            self._newcomers.offer(member.replica_id, member.peer)
        self._newcomers.offer_all()
        for replica_id in self._newcomers:
            self._repeat_offer(replica_id)

    def _refusal(self, join: Join) -> str:
        """Why `join` can't succeed, as a sentence for a person; empty: it can."""
        all_members = self._members.by_id
        known = all_members.get(join.replica_id)
        if known is not None and known.name != join.name:
            return f"{known.name!r} can't become {join.name!r}: start it under a new replica_id"
        count = len(all_members) + len(self._newcomers.held_back)
        if known is None and count >= self._config.max_replicas_per_job:
            return f"the job is full ({len(all_members)} replica groups)"
        other = next(iter(all_members.values()), None)  # any of them: all match each other
        if other is None:
            return ""
        if text := schemas(join, other.join):
            self._effects.append(Note(self.key, text, refusal=True))
        stopped = stops(join, self._members) if known is None and self._live else ""
        return mismatch(join, other.join) or stopped

    def _hold_back(self, peer: Peer, join: Join, now: float) -> None:
        """The name is in use: a restart may be faster than the news of the old process' death."""
        expires = now + 2 * self._timeouts.heartbeat_timeout_s
        self._newcomers.hold_back(join, peer, expires)
        self._send(peer, Waiting(self.key, f"the name {join.name!r} is still in use"))

    def _admit(self, peer: Peer, join: Join, now: float) -> None:
        if self._live is None and not self._members.by_id and not self._newcomers.held_back:
            self._forming.since = now
        self._newcomers.forget(join.replica_id)
        member = self._members.put(join, peer)
        self._history.recall(member)
        self._forming.joined(member)
        if self._live is None:
            self._form_and_announce(now)
        if member.replica_id not in self._members.by_id:
            return  # it was refused together with all others
        waits = self._live is None or member.replica_id not in self._live.living
        if waits and self._announcer.is_news(member, self._live):
            self._effects.append(self._announcer.explain_to(member, self._live))

    def _on_vote(self, peer: Peer, vote: Vote, now: float) -> None:
        live = self._live
        member = self._members.by_id.get(vote.replica_id)
        self._history.heard(vote)  # also where its step is decided
        if live is None or vote.quorum_id != live.quorum_id or vote.step != live.position.step:
            self._answer_late_vote(peer, vote, member)
            return
        if member is None or vote.replica_id not in live.living:
            why = live.gone.get(vote.replica_id, "not a member of this quorum")
            self._expel(peer, vote.quorum_id, why)
            return
        self._reached(member, peer)
        if not is_plausible(vote, live, member):
            self._expel(peer, vote.quorum_id, "its state is not what the quorum takes it for")
            self._remove(vote.replica_id, "diverged", now)
            return
        member.doubt, member.settle, member.control = None, "", b""
        if not live.cast(vote):
            return
        if not vote.ok:
            self._revoke(vote.replica_id, vote.reason or "voted no", now)
        elif live.deadline is None:
            live.deadline = now + self._timeouts.step_timeout_s
        if not live.silent:
            self._decide(live, now)

    def _answer_late_vote(self, peer: Peer, vote: Vote, member: MemberState | None) -> None:
        """A vote on a decided step: its answer was lost, so repeat it."""
        decision = self._history.decision(vote)
        if decision is None or member is None:
            self._expel_unknown(peer, vote.replica_id, vote.quorum_id, NOT_KNOWN)
            return
        self._reached(member, peer)
        if not vote.ok:  # per-group commit: others may have committed, this one has not
            decision = replace(decision, committed=False)
        live = self._live
        if live is None or vote.replica_id not in live.living:
            decision = replace(decision, waiting=True)
        elif live.quorum_id != vote.quorum_id:
            decision = replace(decision, next_quorum=self._announcer.full(live, member))
        self._send(peer, decision)

    def _on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        replica_id = heartbeat.replica_id
        live, member = self._live, self._members.by_id.get(replica_id)
        if member is None:
            if replica_id in self._newcomers.offered:
                self._repeat_offer(replica_id)
            elif replica_id not in self._newcomers.held_back:
                self._expel_unknown(peer, replica_id, heartbeat.quorum_id, NOT_KNOWN)
            return
        self._reached(member, peer)
        if live is None or replica_id not in live.living:
            if decision := self._history.end_of_doubt(member, heartbeat):
                self._send(peer, decision)
            if self._announcer.is_news(member, live):
                self._effects.append(self._announcer.explain_to(member, live))
        elif heartbeat.quorum_id != live.quorum_id:
            self._send(peer, self._announcer.full(live, member))
        elif live.revoked and replica_id in live.silent:
            self._send(peer, Revoke(self.key, live.quorum_id, live.position.step, live.revoked))

    def _on_leave(self, leave: Leave, now: float) -> None:
        self._forget(leave.replica_id, now, leave)
        if leave.differs:
            self._history.others_healed_from(leave.replica_id)
        if leave.reason == FINISHED and leave.replica_id in self._members.by_id:
            self._history.finish(self._members)
        cause = f"left: {leave.reason or 'shutdown'}"
        self._remove(leave.replica_id, cause, now, revoke=not leave.reduced)

    # ------------------------------------------------------------------ answers

    def _reached(self, member: MemberState, peer: Peer) -> None:
        """`member` has spoken through `peer`: the newest connection is the one that counts."""
        if member.peer != peer:
            self._members.move(member, peer)

    def _send(self, peer: Peer, message: Reply) -> None:
        self._effects.append(Send((peer,), message))

    def _expel(self, peer: Peer, quorum_id: int, why: str, *, hung: bool = False) -> None:
        self._send(peer, Expelled(self.key, quorum_id, why, hung))

    def _expel_unknown(self, peer: Peer, replica_id: str, quorum_id: int, why: str) -> None:
        """`replica_id` is not a member; it may have missed that its state is not its peers'."""
        different = self._history.different.get(replica_id, "")
        self._send(peer, Expelled(self.key, quorum_id, different or why, differs=bool(different)))

    # ------------------------------------------------------------------ losses

    def _revoke(self, replica_id: str, reason: str, now: float) -> None:
        live = self._live
        assert live is not None
        if live.revoked:
            return
        what = "ends" if reason == f"left: {FINISHED}" else "revoked"  # nothing is wrong then
        reason = f"{live.names[replica_id]}: {reason}"
        live.revoke(replica_id, reason, now, self._timeouts.revoke_timeout_s)
        self._effects.append(Note(self.key, f"step {live.position.step} {what}: {reason}"))
        if live.silent:
            peers = tuple(self._members.by_id[r].peer for r in sorted(live.silent))
            message = Revoke(self.key, live.quorum_id, live.position.step, reason)
            self._effects.append(Send(peers, message))

    def _remove(self, replica_id: str, cause: str, now: float, *, revoke: bool = True) -> None:
        """`replica_id` is no longer a member. `revoke`: the others' collectives can't end without it."""
        member = self._members.by_id.get(replica_id)
        if member is None:
            return
        live = self._live
        if (
            self._history.head is None
            and member.was_member
            and not self._history.is_dead(replica_id)
        ):
            self._history.missed.add(replica_id)
        if live is not None and replica_id in live.living:
            live.lose(replica_id, cause)
            if revoke:
                self._revoke(replica_id, cause, now)
            elif live.deadline is None:
                live.deadline = now + self._timeouts.step_timeout_s
            self._members.take(replica_id)
            if not live.silent:
                self._decide(live, now)
        else:
            self._members.take(replica_id)
            if live is None:
                self._wake_at = now  # check once for all members that go at this moment

    def _let_in(self, now: float) -> None:
        """Newcomers that were held back for names that are free by now join, whatever has freed these."""
        while (newcomer := self._newcomers.take_over(self._members.names)) is not None:
            self._on_join(newcomer.peer, newcomer.join, now)

    def _evict_laggards(self, live: Ballot, now: float) -> None:
        """The step's deadline has passed: members that have not voted are hung.

        A member that did not react to a revoke either was away as a whole, and may join as soon as
        it is back. If only its training loop hangs, it must not join before the loop goes on.
        """
        live.deadline = None
        hung = not live.revoked
        why = "did not vote before the step's deadline"
        for replica_id in sorted(live.silent):
            if self._live is live:
                peer = self._members.by_id[replica_id].peer
                self._expel(peer, live.quorum_id, f"evicted: {why}", hung=hung)
                live.hung.add(replica_id)
                self._remove(replica_id, f"evicted: {why}", now)

    # ------------------------------------------------------------------ decisions

    def _decide(self, live: Ballot, now: float) -> None:
        """Every living member has voted: decide the step."""
        if not self._part_with_different(live, now):
            return
        before = live.position
        yes, group_commit = live.yes(), self._members.rules.group_commit
        committed, control = live.result(yes, group_commit, self._forming.suffice(yes))
        decision = Decision(
            self.key,
            live.quorum_id,
            before.step,
            committed,
            live.reason(committed),
            control=control,
        )
        after = self._history.decided(decision, live)
        if not committed and live.reduced():
            self._history.discards += 1  # else nothing is lost
        self._forming.decided(live, committed, now)
        voters = {r: self._members.by_id[r] for r in live.in_rank_order()}
        update_positions(live, voters, committed, after)
        goes_on = committed and live.undisturbed() and self._least_epoch <= self.term.epoch
        if goes_on and not self._forming.admits(live, now):
            live.next_step(after, now)
            self._effects.append(Send(tuple(m.peer for m in voters.values()), decision))
        else:
            self._end(live, voters, decision, now)

    def _part_with_different(self, live: Ballot, now: float) -> bool:
        """Members whose state is not their peers' are no longer members, and the step is revoked.

        False: no member can tell which state is right; all are refused.
        """
        found = self._history.compared(live)
        for replica_id, why in found.different.items():
            self._revoke(replica_id, why, now)
            live.overrule(replica_id, why)
            member = self._members.take(replica_id)
            assert member is not None
            self._history.is_different(replica_id, f"{member.name}: {why}")
            self._expel_unknown(member.peer, replica_id, live.quorum_id, why)
        if found.hopeless:
            self._live = None
            self._forming.ended(live, False, now)
            self._effects.append(Note(self.key, found.hopeless))
            self._refuse_all(found.hopeless)
        return not found.hopeless

    def _end(
        self, live: Ballot, voters: Mapping[str, MemberState], decision: Decision, now: float
    ) -> None:
        """The live quorum is over: tell its members, and form the next one."""
        yes, blamed = live.yes(), set(live.blamed())
        self._live = None
        self._forming.ended(live, decision.committed, now)
        self._announcer.ended(live)
        answered = []
        for replica_id, member in voters.items():
            member.base_id = live.quorum_id
            if replica_id in blamed:
                why = "evicted: kept the others' collectives waiting"
                self._expel(member.peer, live.quorum_id, why, hung=True)
            else:
                answered.append(member)
            if live.votes[replica_id].leaving:
                self._history.died(self._members, replica_id, self.term, live.quorum_id)
            if replica_id in blamed or live.votes[replica_id].leaving:
                self._members.take(replica_id)
        if self._least_epoch > self.term.epoch:
            self._effects += self._announcer.answer(decision, answered, yes, None)
            self._new_term(now)
            return
        formed = self._form(now)
        self._effects += self._announcer.answer(decision, answered, yes, formed)
        if formed is not None:
            newcomers = (m for r, m in self._members.by_id.items() if r not in live.living)
            self._effects += self._announcer.announce(formed, newcomers)
        else:
            for member in answered:
                member.last_reason = ""  # its next heartbeat is answered with the reason

    # ------------------------------------------------------------------ forming

    def _form(self, now: float) -> Ballot | None:
        """Form the next quorum if the rules allow it, which the caller announces; else say why not."""
        assert self._live is None
        if self._formed + 1 >= 1 << TERM_BITS:
            self._new_term(now)
        self._history.recall(*self._members.by_id.values())  # of steps decided after their joins
        verdict = self._forming.verdict(now)
        self._announcer.left_out = self._forming.left_out
        doubt = self._forming.doubt
        if verdict.choice is not None and self._history.settle(self._members, *doubt):
            verdict = self._forming.verdict(now)
            if verdict.choice is None:
                self._history.unsettle(self._members)
        self._wake_at = verdict.wake_at
        if verdict.hopeless:
            self._refuse_all(verdict.reason)
            return None
        if verdict.choice is None:
            self._effects += self._announcer.explain(verdict.reason, self._members, now)
            self._wake_at = self._announcer.due(verdict.wake_at)
            return None
        best = self._members.holder(verdict.choice)
        if self._history.may_repeat(best):
            self._new_term(now, epoch_of(best.held) + 1)
            return None
        return self._start(verdict.choice, best, verdict.reason, now)

    def _form_and_announce(self, now: float) -> None:
        formed = self._form(now)
        if formed is not None:
            self._effects += self._announcer.announce(formed, self._members.by_id.values())

    def _refuse_all(self, reason: str) -> None:
        """The members that wait can never form a quorum."""
        for member in list(self._members.by_id.values()):
            self._send(member.peer, Refused(self.key, reason))
            self._members.take(member.replica_id)

    def _start(self, choice: rules.Choice, best: MemberState, reason: str, now: float) -> Ballot:
        """The quorum of `choice`, whose state `best` holds, is live."""
        self._formed += 1
        quorum_id = (self.term.epoch << TERM_BITS) + self._formed
        reason += self._history.notes(choice, self._members)
        members, names, foreign = [], {}, foreign_states(choice, self._members, self._history.head)
        for replica_id in choice.members:
            member = self._members.by_id[replica_id]
            self._members.mark_was_member(member)
            members.append(member.entry(healing=replica_id in choice.healing))
            names[replica_id] = member.name
        self._live = live = Ballot.open(
            quorum_id, self.term.nonce, choice.position, tuple(members), names, now
        )
        for replica_id in choice.members:
            self._members.by_id[replica_id].peers = len(members)
        live.held = best.held
        self._genesis = live.genesis = best.genesis or self._genesis or self._forming.genesis(live)
        self._history.start(choice.position, best.held, choice.healing)
        self._history.rest_on(*self._forming.rests_on(choice.members))
        self._announcer.rest_on(self._history, live)
        live.unproven = self._history.unproven & live.living
        self._announcer.reason = reason
        listed = short_list(list(names.values()))
        text = f"quorum {quorum_id}: {listed} at step {choice.position.step}"
        if choice.healing:
            behind = [names[r] for r in choice.members if r in choice.healing]
            text += f"; healing {short_list(behind)}"
        if foreign:
            text += f"; NOT TAKEN: the state of {short_list(foreign)}"
        text += "".join(f"; {sentence}" for sentence in self._forming.left_out.values())
        self._effects.append(Note(self.key, text, quorum=True))
        self._effects.append(Remember(self.key, quorum_id, choice.members, self.term.nonce))
        return live

    # ------------------------------------------------------------------ inspection

    def check(self) -> None:
        """Assert every invariant. O(members)."""
        self._members.check()
        all_members = self._members.by_id
        for replica_id, newcomer in self._newcomers.held_back.items():
            assert replica_id not in all_members, "both member and held back"
            assert newcomer.join.name in self._members.names, "held back for a name that is free"
        for state in all_members.values():
            assert state.join.promised == self.term, "counted, and not promised"
        live = self._live
        if live is None:
            return
        live.check()
        assert epoch_of(live.quorum_id) == self.term.epoch
        assert live.living <= set(all_members), "a living member of the quorum has not joined"
        assert self._history.head == live.position
        for member in live.members:
            if member.replica_id in live.living and not member.healing:
                assert all_members[member.replica_id].position == live.position, "S3: behind"

    def status(self, most: int) -> dict[str, object]:
        """This job for people and dashboards, as plain JSON types; lists of up to `most`."""
        reason = self._announcer.reason
        if self._live is not None:
            reason = "; ".join((reason, *self._forming.left_out.values()))
        return status_of(
            self.key, self.term, self._live, self._members, self._history, reason, most
        )
