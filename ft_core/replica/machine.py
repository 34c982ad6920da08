"""The replica's state machine: what one rank of a replica group does next. PURE.

Theory (docs/protocol.md). A rank is *out*, *joining* (a `Join` was sent), *waiting* (the
lighthouse knows it, no quorum yet), a *member* of a quorum, *refused* or *left*. As a member it works on one
step at a time. The training loop opens an *attempt* at the step with `Begin`, *binds* it to the
quorum with its first collective, and ends it with `CastVote`:

    closed --Begin--> open --Bind--> bound --CastVote--> voted --decision--> closed
                       |              |
                       +--- quorum ---+-- quorum revoked: its collectives fail --> failed
                            changes: nothing was reduced, so the attempt just goes on

A failed attempt has sent the lighthouse a no; the loop learns it from `CastVote`, which is then
answered with a discard at once. A voted attempt whose answer is lost is *in doubt*: the rank joins
again, says so, and is told commit or discard (`Quorum.settle`).

An outcome is *taken* by the loop, or the position does not move: a commit without its update would
leave this rank with different weights from its peers at the same position. While the loop does not wait
for the answer to its vote, what the lighthouse says is not read, as if the network was slow.

The ranks of a replica group run one loop: they must make the same attempts, each under the same
quorum and with the same end, or one would reduce a batch while another repeats it. A rank says with
its joins and votes how many attempts it has *spent* (bound, failed or ended). The leader tells all of
them the largest number with each quorum, and an attempt that one rank has spent fails on the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from ft_core.replica import events
from ft_core.replica.events import DISCARDS_STATE, Abort, Effect, Remark, Transmit, Withdraw
from ft_core.replica.status import (
    Attempt,
    Outcome,
    ParticipationRule,
    Relations,
    ReplicaStatus,
    Stage,
    View,
    phase_of,
)
from lighthouse.wire import messages
from lighthouse.wire.messages import GAVE_UP, NO_QUORUM, NONE_IS_RIGHT, PHASE_HEALING, TORN


class Replica:
    """See the module's docstring.

    Args:
        template: the `Join` to send; its position, quorum and doubt are filled in here.
        resend_s: an unanswered request is repeated after this.
        revoke_grace_s: a bound attempt whose quorum is revoked may still vote yes within this if
            its collectives are all done.
        rule: how this rank's participation follows from a quorum.
    """

    def __init__(
        self,
        template: messages.Join,
        *,
        resend_s: float,
        revoke_grace_s: float,
        rule: ParticipationRule | None = None,
    ) -> None:
        self._template, self.replica_id = template, template.replica_id
        self.promised = template.promised  # the term that this rank obeys, until a higher one
        self._resend_s, self._revoke_grace_s = resend_s, revoke_grace_s
        self._rule = rule or ParticipationRule()
        self._relations: Relations | None = None
        self.stage, self.outside, self.attempt = Stage.OUT, True, Attempt.CLOSED
        self.step, self.lineage = template.step, template.lineage
        self.origin = template.genesis, template.held
        self.view: View | None = None
        self.healed = True  # own state is the quorum's
        self.outcome: Outcome | None = None
        self.reason, self.failure = "not joined yet", ""
        self.published: tuple[int, str] | None = None  # implies `healed`
        self.leaving = False  # the next vote says that it is the last one
        self._configured, self._revoked = NO_QUORUM, False
        self._knows = True  # what has become of its own votes in the last quorum
        self._vote: messages.Vote | None = None
        self._before = (template.step, template.lineage)  # position before the last vote
        self._unattended = False  # voted, and the loop does not wait for the answer
        self._unread: events.ReplicaEvent | None = None  # the first message since
        self._untold = ""  # why what it has served is torn, which it says under its next quorum
        self._unanswered: messages.Vote | None = None  # per-group commit: decision still to come
        self._loop_waits = False  # at its step's boundary: it uses neither the state nor the group
        self._pardoned = False  # evicted as hung in this attempt: one that only waits does not hang
        self._begun = 0  # attempts, all in all
        self._spent_in_group = messages.ONE_RANK  # of them, by any rank of its group
        self._left = 0  # how often
        self._differed = 0  # how often its state was not that of its peers, since its last commit
        self._heal_in_step, self._overwriting, self._connected = False, False, True
        self._fetching: events.FetchState | None = None
        self._fetched: tuple[int, str] | None = None
        self._resend_at: float | None = None
        self._grace_at: float | None = None
        self.status = self._seen()
        """After the last event. Read only."""

    def handle(self, event: events.ReplicaEvent, now: float) -> list[Effect]:
        """Take an event; return what the shell must do. Replies to something older are ignored."""
        name = _HANDLERS.get(type(event))
        if name is None:
            return []
        unread = self._unattended and type(event) in _ANSWERS
        handler = self._leave_unread if unread else getattr(self, name)
        effects: list[Effect] = handler(event, now)
        self.status = self._seen()
        return effects

    def _leave_unread(self, event: events.ReplicaEvent, now: float) -> list[Effect]:
        self._unread = self._unread or event  # later ones come again: this rank repeats itself
        if isinstance(event, messages.Expelled) and event.differs and self._concerns(event):
            return self._serve_nothing(event.reason, True)
        return []

    # ------------------------------------------------------------------ the training loop

    def _on_begin(self, event: events.Begin, now: float) -> list[Effect]:
        assert self.attempt in (Attempt.CLOSED, Attempt.OPEN), f"begin while {self.attempt.value}"
        if self.attempt is Attempt.CLOSED:
            self.attempt, self.outcome, self.failure = Attempt.OPEN, None, ""
            self._begun += 1
            self._pardoned, self._grace_at = False, None  # which the attempt before was given
            self._fail_if_spent()
        self._heal_in_step = event.heal_in_step
        # In the steady state there is nothing to wait for, to serve or to heal.
        self._loop_waits = bool(self.targets or self.published) or not (self.ready and self.healed)
        if self.view is not None and self.healing and not self._revoked:
            return self._fetch(self.view)
        return self._join(now) if self.stage is Stage.OUT else []

    def _fail_if_spent(self) -> None:
        """Another rank of this group has spent the attempt that is open here."""
        if self.attempt is Attempt.OPEN and self._begun <= self._spent_in_group:
            self.attempt, self.failure = Attempt.FAILED, "another rank of this group has lost it"

    def _on_entered(self, event: events.Entered, now: float) -> list[Effect]:
        self._loop_waits = False
        if self._overwriting and not self._heal_in_step:  # the loop may change what is written now
            self._fetching = self._fetched = None
        return []

    def _on_bind(self, event: events.Bind, now: float) -> list[Effect]:
        may_reduce = self.ready and not self._loop_waits and (self.healed or self._heal_in_step)
        if self.attempt is Attempt.OPEN and may_reduce:
            self.attempt = Attempt.BOUND
        elif self.attempt is Attempt.OPEN and self.stage is Stage.LEFT:
            self.attempt, self.failure = Attempt.FAILED, "this member has left its quorum"
        return []

    def _on_fail(self, event: events.Fail, now: float) -> list[Effect]:
        return self._fail(event.reason, now, stalled=event.stalled, follows=event.follows)

    def _fail(self, reason: str, now: float, **said: bool) -> list[Effect]:
        if self.attempt not in (Attempt.OPEN, Attempt.BOUND):
            return []
        phase = self._phase()
        self.attempt = Attempt.FAILED
        self.failure = reason
        return self._vote_no(reason, now, phase=phase, **said)

    def _on_served_torn(self, event: events.ServedTorn, now: float) -> list[Effect]:
        effects = self._serve_nothing(event.reason) + self._fail(event.reason, now, torn=True)
        if self._vote is None:  # a newer quorum has failed the attempt, or there is none now
            effects += self._vote_no(event.reason, now, torn=True)
        elif not (self._vote.ok or self._vote.torn):  # its no was of something else
            self._vote = replace(self._vote, torn=True)
            effects += self._send_vote(now)
        self._untold = event.reason if self._vote is None else ""
        return effects

    def _on_stop_waiting(self, event: events.StopWaiting, now: float) -> list[Effect]:
        self._unattended = self.attempt is Attempt.VOTED
        return []

    def _on_cast_vote(self, event: events.CastVote, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._unattended:
            unread, self._unread, self._unattended = self._unread, None, False
            effects = [] if unread is None else self.handle(unread, now)
            return effects + (self._repeat(now) if self.attempt is Attempt.VOTED else [])
        if self.attempt in (Attempt.VOTED, Attempt.CLOSED):
            return []
        if self.attempt is Attempt.OPEN and self._loop_waits:
            self._begun -= 1  # the loop has waited in vain, and will begin this one once more
        if not event.ok:
            effects = self._fail(event.reason or "the loop voted no", now)
        elif not self.may_vote:
            effects = self._fail("lost the quorum before the vote", now)
        if self.attempt is Attempt.FAILED:
            self._close(Outcome(self.step, False, self.failure))
            return effects
        view = self.view
        assert view is not None and self.healed
        self.attempt, self._before = Attempt.VOTED, (self.step, self.lineage)
        self._vote = self._ballot(
            view,
            True,
            control=event.control,
            leaving=self.leaving,
            updates=event.updates,
            digest=event.digest,
            admits=event.admits,
        )
        # Per-group commit keeps one vote in flight: the next one waits for its decision.
        return [] if self._unanswered is not None else self._cast(view, now)

    def _on_leave_after_step(self, event: events.LeaveAfterStep, now: float) -> list[Effect]:
        self.leaving = True
        return []

    def _on_depart(self, event: events.Depart, now: float) -> list[Effect]:
        return self._leave(event.reason, event.reduced and self.attempt is Attempt.BOUND)

    def _leave(self, reason: str, reduced: bool = False) -> list[Effect]:
        if self.stage in (Stage.LEFT, Stage.REFUSED):
            return []
        was_out, self.stage = self.stage is Stage.OUT, Stage.LEFT
        self._resend_at = self._grace_at = None
        if self.attempt is not Attempt.CLOSED:
            self._close(Outcome(self.step, False, f"left: {reason}"))
        return [] if was_out else [self._goodbye(reason, reduced)]

    def _goodbye(self, reason: str, reduced: bool = False) -> Transmit:
        job, own_id, self._left = self._template.job, self.replica_id, self._left + 1
        last = self.view.quorum_id if self.view else NO_QUORUM
        said = reason, reduced, self.promised, self._left
        return Transmit(messages.Leave(job, own_id, *said, quorum_id=last))

    def _on_rejoin(self, event: events.Rejoin, now: float) -> list[Effect]:
        held = self.healed and not event.discard_state
        kept = (self.step, self.lineage) if held else None
        effects = self._rejoin(event.reason, kept, messages.GAVE_UP_PLACE if held else GAVE_UP)
        return effects + self._join(now) if event.join_now and self.stage is Stage.OUT else effects

    def _on_unapplied(self, event: events.Unapplied, now: float) -> list[Effect]:
        return self._rejoin(event.reason, self._before)

    def _rejoin(
        self,
        reason: str,
        position: tuple[int, str] | None,
        leaves: str = GAVE_UP,
        diverged: bool = False,
    ) -> list[Effect]:
        if self.stage in (Stage.LEFT, Stage.REFUSED):
            return []
        self._knows = self._knows and position is not None and self.attempt is not Attempt.VOTED
        effects = self._serve_nothing(reason, diverged)
        effects += [Abort(self.view.quorum_id, reason)] if self.view else []
        effects += self._leave(f"{leaves}{reason}"[:500])
        self.step, self.lineage = position or (0, f"{TORN}{self.replica_id}")
        self.stage, self.outside, self.healed, self._revoked = Stage.OUT, True, False, True
        self._vote = self._unanswered = self._fetching = self._fetched = None
        return effects

    def _serve_nothing(self, reason: str, diverged: bool = False) -> list[Effect]:
        """Others may not have this state, or soon may not."""
        self.published = None
        return [Withdraw(reason, diverged)]

    # ------------------------------------------------------------------ process group and state

    def _on_configured(self, event: events.Configured, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            return []  # ended by this process itself
        effects = self._on_tried(events.Tried(event.missed, ()), now) if event.missed else []
        if self.view is not None and event.quorum_id == self.view.quorum_id and not self._revoked:
            if event.error:
                return effects + self._lost_group(f"process group: {event.error}", now)
            self._configured = event.quorum_id
        return effects

    def _on_query(self, message: messages.ReachQuery, now: float) -> list[Effect]:
        return [events.TryToReach(message.members)]

    def _on_tried(self, event: events.Tried, now: float) -> list[Effect]:
        said = self._template.job, self.replica_id, event.missed, event.reached, event.silence
        return [Transmit(messages.ReachReport(*said))]

    def _on_fetched(self, event: events.Fetched, now: float) -> list[Effect]:
        fetch = event.fetch
        if self._fetching is not fetch:
            return []  # superseded by another one, also of the same state: that one may be in memory
        self._fetching = None
        view, key = self.view, (fetch.step, fetch.lineage)
        if view is None or not self.healing or (view.step, view.lineage) != key:
            return []
        if not event.error:
            self._fetched = key
            return []
        self.reason = f"{messages.DENIED if event.denied else 'heal failed: '}{event.error}"
        if event.denied:
            refused = messages.Refused(self._template.job, self.reason)
            return [self._goodbye(self.reason[:500]), *self._on_refused(refused, now)]
        if self.attempt is Attempt.BOUND:
            return [Remark(self.reason), *self._fail(self.reason, now)]
        return [Remark(self.reason), *self._vote_no(self.reason, now, phase=PHASE_HEALING)]

    def _on_overwrite(self, event: events.Overwrite, now: float) -> list[Effect]:
        in_step = self.attempt in (Attempt.OPEN, Attempt.BOUND)
        free = in_step if event.in_step else self._loop_waits
        self._overwriting = free and self.healing
        if self._overwriting:
            self.step, self.lineage = 0, f"{TORN}{self.replica_id}"
        return []

    def _on_fetch_again(self, event: events.FetchAgain, now: float) -> list[Effect]:
        assert self.state_fetched and self.view is not None
        self._fetched = None
        return self._fetch(self.view)

    def _on_loaded(self, event: events.Loaded, now: float) -> list[Effect]:
        view = self.view
        if view is not None and self.state_fetched and not self.healed:  # else told to discard it
            (self.step, self.lineage), self.origin = view.position, view.origin
            self.healed, self._overwriting, self._fetched = True, False, None
        return []

    def _on_published(self, event: events.Published, now: float) -> list[Effect]:
        held = self.healed and event.position == (self.step, self.lineage)
        self.published = event.position if held else None
        return []

    # ------------------------------------------------------------------ the lighthouse

    def _on_disconnected(self, event: events.Disconnected, now: float) -> list[Effect]:
        self._connected = False
        return []

    def _on_connected(self, event: events.Connected, now: float) -> list[Effect]:
        self._connected = True
        return self._repeat(now)

    def expire(self, now: float) -> list[Effect]:
        """Time has reached `deadline()`."""
        effects: list[Effect] = []
        if self._grace_at is not None and now >= self._grace_at:
            self._grace_at = None
            effects += self._fail("quorum revoked", now, follows=True) if self._revoked else []
        if self._resend_at is not None and now >= self._resend_at:
            effects += self._repeat(now)
        self.status = self._seen()
        return effects

    def _on_refused(self, message: messages.Refused, now: float) -> list[Effect]:
        """For good. A step that has begun is over, too: its vote will not be answered."""
        if self.stage is Stage.LEFT:
            return []
        self.stage, self.reason, self.outside = Stage.REFUSED, message.reason, True
        self._resend_at = self._grace_at = None
        if self.attempt in (Attempt.OPEN, Attempt.BOUND):
            self.attempt, self.failure = Attempt.FAILED, message.reason
        hopeless = NONE_IS_RIGHT in message.reason
        effects = self._serve_nothing(message.reason, True) if hopeless else []
        if self.view is None or self._revoked:
            return effects
        self._revoked = True
        return [*effects, Abort(self.view.quorum_id, message.reason)]

    def _on_waiting(self, message: messages.Waiting, now: float) -> list[Effect]:
        """The lighthouse knows this rank; from here on heartbeats keep its place."""
        if (offer := message.offer) is not None:
            if self.stage not in (Stage.JOINING, Stage.WAITING):
                return []
            if offer.outranks(self.promised):
                self.promised = offer  # no other lighthouse is heard until one offers a higher term
            # Also to one that it can't follow, which must hear of the promise.
            return self._join(now)
        if self.stage is Stage.JOINING:
            self.stage = Stage.WAITING
            self._resend_at = now + self._resend_s
        if self.stage is not Stage.WAITING or self.reason == message.reason:
            return []
        self.reason = message.reason
        return [Remark(message.reason)]

    def _on_decision(self, message: messages.Decision, now: float) -> list[Effect]:
        view = self.view
        if view is None or message.quorum_id != view.quorum_id:
            return []
        if self._unanswered is not None and message.step == self._unanswered.step:
            return self._late_decision(message, now)
        in_doubt = self.attempt is Attempt.VOTED and self.stage in (Stage.JOINING, Stage.WAITING)
        told = self.stage is Stage.MEMBER or (in_doubt and message.committed)  # which is for good
        if message.step != view.step or not told:
            return []
        vote = self._vote
        if message.committed:
            if vote is None or not vote.ok:  # the others have voted for it: this rank is behind now
                late = messages.Expelled(self._template.job, view.quorum_id, "committed without me")
                return self._on_expelled(late, now)
            self._advance(view)
        if self.attempt is Attempt.VOTED:
            groups, control = self._contributing, message.control
            self._close(Outcome(view.step, message.committed, message.reason, groups, control))
        self._vote = None
        if vote is not None and vote.leaving and not in_doubt:  # else it has joined again
            self.stage = Stage.LEFT
        self._resend_at = now + self._resend_s
        effects = self._after_decision(message, now)
        if self._revoked:  # it is still the same quorum: that the next step is lost was said before
            effects += self._vote_no("quorum revoked", now, follows=True)
        return effects

    def _after_decision(self, message: messages.Decision, now: float) -> list[Effect]:
        """The next quorum: the same, the one that came along, or none yet."""
        if self.stage is Stage.LEFT:
            self._resend_at = None
            return []
        if message.next_quorum is not None:
            return self._on_quorum(message.next_quorum, now)
        if not message.waiting:
            return []
        self.stage, self.reason = Stage.WAITING, "waiting for the next quorum"
        if self.attempt is Attempt.BOUND:  # per-group commit: one step ahead of the decision
            self.attempt, self.failure = Attempt.FAILED, "the quorum ended during the step"
            return [Abort(message.quorum_id, self.failure)]
        return []

    def _late_decision(self, message: messages.Decision, now: float) -> list[Effect]:
        """Per-group commit: the answer to a vote that this rank has already acted on."""
        self._unanswered = None
        view, over = self.view, message.next_quorum is not None or message.waiting
        if over or view is None or self._vote is None or self.attempt is not Attempt.VOTED:
            return self._after_decision(message, now)
        return self._cast(view, now)

    def _on_quorum(self, message: messages.Quorum, now: float) -> list[Effect]:
        if self.stage in (Stage.OUT, Stage.LEFT, Stage.REFUSED):
            return []
        old = self.view
        if message.term != self.promised:  # of a lighthouse that was left, or that it is back at
            return self._join(now) if self.stage is Stage.WAITING else []
        if old is not None and message.quorum_id <= old.quorum_id:
            return []  # a repetition, or one that this rank has left behind
        if message.base_id and (old is None or message.base_id != old.quorum_id):
            return self._repeat(now)  # a difference to something unknown here: ask for all
        members = messages.apply_delta(old.members if old is not None else (), message)
        mine = next((m for m in members if m.replica_id == self.replica_id), None)
        if mine is None:
            return []
        in_group = message.attempt != messages.ONE_RANK
        self._end_doubt(message, heals=in_group and mine.healing)
        effects = self._superseded()
        self.stage, self.outside = Stage.MEMBER, False
        self.view = View.of(message, members, old.members if old is not None else ())
        self._knows, self.reason = True, message.reason
        untold, self._untold = self._untold, ""
        self._vote = self._unanswered = None
        self._revoked, self._grace_at = False, None
        self._resend_at = now + self._resend_s
        # Ranks of one group heal together, also those that have healed already.
        held = (self.step, self.lineage) == (message.step, message.lineage)
        self.healed = held and not (in_group and mine.healing)
        self.origin = self.view.origin if held else self.origin
        effects += [] if self.healed else self._serve_nothing("this member must heal")
        self._fail_if_bound(message)
        self._spent_in_group = max(self._spent_in_group, message.attempt)
        self._fail_if_spent()
        if mine.healing and not self.healed:
            effects += self._fetch(self.view)  # first: to configure blocks the thread of both
        rank = self.view.rank_of(self.replica_id)
        effects.append(events.Configure(message.quorum_id, members, rank, message.reason))
        if not self.healed and not mine.healing:
            # The lighthouse takes this state for another one: a no says which it is.
            return effects + self._vote_no("its state is another one", now, phase=PHASE_HEALING)
        if untold and self.healed:
            effects += self._vote_no(untold, now, torn=True)
        if in_group and self._spent > message.attempt:  # the other ranks must hear of it
            effects += self._vote_no("lost its step before", now)
        return effects

    def _superseded(self) -> list[Effect]:
        """A newer quorum is here while this one's group is being made: its others may never come."""
        if self.view is None or self._revoked or self._configured == self.view.quorum_id:
            return []
        return [Abort(self.view.quorum_id, "a newer quorum is here")]

    def _fail_if_bound(self, message: messages.Quorum) -> None:
        """Under a new quorum an attempt goes on only if it has reduced nothing (S5), stands at
        the quorum's position, and need not serve its state at the step's boundary."""
        if self.attempt is Attempt.BOUND:
            self.attempt, self.failure = Attempt.FAILED, "the quorum changed during the step"
        elif self.attempt is Attempt.OPEN and not self._loop_waits:
            position = (message.step, message.lineage)
            if not self.healed and not self._heal_in_step:
                self.attempt, self.failure = Attempt.FAILED, "this replica group must heal"
            elif self.targets and self.published != position:
                self.attempt, self.failure = Attempt.FAILED, "a peer must heal from this state"

    def _fetch(self, view: View) -> list[Effect]:
        now, sources = self._fetching, tuple(m for m in view.members if not m.healing)
        if view.position in (self._fetched, now and (now.step, now.lineage)):
            return []
        self._fetched = None  # the new one takes its place
        self._fetching = events.FetchState(view.step, view.lineage, sources)
        return [self._fetching]

    def _on_revoke(self, message: messages.Revoke, now: float) -> list[Effect]:
        view = self.view
        if view is None or self.stage is not Stage.MEMBER or message.quorum_id != view.quorum_id:
            return []
        if self._revoked:
            return self._repeat(now)
        return [
            Remark(f"step {message.step}: {message.reason}"),
            *self._lost_group(message.reason, now),
        ]

    def _lost_group(self, reason: str, now: float) -> list[Effect]:
        """The quorum's collectives are over: vote with what is there."""
        view = self.view
        assert view is not None
        self._revoked = True
        effects: list[Effect] = [Abort(view.quorum_id, reason)]
        if self.attempt is Attempt.BOUND:
            self._grace_at = now + self._revoke_grace_s  # its collectives may all be done
            return effects
        return effects + self._vote_no(reason, now, follows=True)

    def _on_expelled(self, message: messages.Expelled, now: float) -> list[Effect]:
        view = self.view
        if not self._concerns(message):
            return []
        if message.differs and not self.lineage.startswith(TORN):
            self._differed += GAVE_UP not in message.reason  # of another rank: no heal has shown it
            if self._differed <= events.MAX_HEALS:
                return self._discard_state(message.reason, now)
            why = f"{message.reason}, {events.DIFFERS_AGAIN}"
            refused = messages.Refused(self._template.job, why)
            return [*self._rejoin(why, None, diverged=True), *self._on_refused(refused, now)]
        if message.differs:  # what it has fetched, or fetches now
            self._fetching = self._fetched = None
        if self.stage not in (Stage.WAITING, Stage.MEMBER):
            return []  # joining: the answer to something older
        in_doubt, self.reason = self.attempt is Attempt.VOTED, message.reason
        hangs = message.hung and not in_doubt and (not self._loop_waits or self._pardoned)
        self._pardoned = self._pardoned or message.hung
        effects: list[Effect] = [Remark(events.EXPELLED + message.reason, hangs)]
        if view is not None and self.stage is Stage.MEMBER:
            effects.append(Abort(view.quorum_id, message.reason))
        self.stage, self.outside, self._revoked = Stage.OUT, True, True
        self._resend_at = self._grace_at = self._unanswered = None
        if not in_doubt:
            self._vote = None
        if self.attempt is Attempt.BOUND or (self.attempt is Attempt.OPEN and hangs):
            self.attempt, self.failure = Attempt.FAILED, message.reason
        if not hangs:  # else it must not come back; a loop that lives sees it, and begins again
            effects += self._join(now)
        return effects

    def _concerns(self, message: messages.Expelled) -> bool:
        return self.view is None or message.quorum_id in (self.view.quorum_id, NO_QUORUM)

    def _discard_state(self, reason: str, now: float) -> list[Effect]:
        """This state is not the peers', or a rank of this group has discarded its own."""
        attempt, waits = self.attempt, self._loop_waits
        effects = self._rejoin(reason, None, diverged=GAVE_UP not in reason)
        if attempt is Attempt.OPEN and waits:  # for a state to begin with: it may be another one
            self.attempt, self.outcome, self._loop_waits = Attempt.OPEN, None, True
            effects += self._join(now)
        elif attempt not in (Attempt.CLOSED, Attempt.VOTED):  # the loop does not know yet
            self.attempt, self.failure, self.outcome = Attempt.FAILED, reason, None
        return [Remark(f"{reason}: {DISCARDS_STATE}"), *effects]

    # ------------------------------------------------------------------ what the status tells

    def _seen(self) -> ReplicaStatus:
        relations, view = self._related(), self.view
        wants_group = NO_QUORUM if view is None or self._revoked else view.quorum_id
        return ReplicaStatus(
            self.stage,
            self.outside,
            self.attempt,
            self.step,
            self.lineage,
            view,
            relations.part,
            self.attempt is Attempt.OPEN and not self._loop_waits,
            self.ready,
            self.healing,
            self.state_fetched,
            self._overwriting,
            relations.targets,
            self.published,
            self.outcome,
            self.reason,
            self.failure,
            wants_group,
            self.deadline(),
            self.origin,
        )

    def deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        resend, grace = self._resend_at, self._grace_at
        return resend if grace is None else grace if resend is None else min(resend, grace)

    @property
    def ready(self) -> bool:
        """Collectives of this attempt may start."""
        view, member = self.view, self.stage is Stage.MEMBER and not self._revoked
        return member and view is not None and self._configured == view.quorum_id

    @property
    def may_vote(self) -> bool:
        """A yes counts. Not the same as `ready`: the collectives of a bound attempt may all be done
        when its quorum is revoked. Then its yes still counts, and the step may still commit."""
        if self.stage is not Stage.MEMBER or not self.healed:
            return False
        return self.attempt is Attempt.BOUND or (self.attempt is Attempt.OPEN and self.ready)

    @property
    def healing(self) -> bool:
        """A member whose state is not the quorum's yet."""
        return self.stage is Stage.MEMBER and not self.healed

    @property
    def state_fetched(self) -> bool:
        """The state that this rank must load has arrived."""
        return bool(self._fetched and self.view and self._fetched == self.view.position)

    @property
    def targets(self) -> tuple[messages.Member, ...]:
        """Members that heal from this rank's state."""
        return self._related().targets

    def _related(self) -> Relations:
        view, member, known = self.view, self.stage is Stage.MEMBER, self._relations
        key = view and (view.members, view.quorum_id), member, self.healed
        if known is None or known.key != key:
            known = Relations(self._rule, self.replica_id, view, member, self.healed)
            self._relations = known
        return known

    @property
    def _contributing(self) -> int:
        """How many replica groups contribute to the step that is under way."""
        known = self._relations  # as before this event
        return known.part.groups if known is not None and known.part is not None else 0

    @property
    def _spent(self) -> int:
        """How many attempts this rank has spent; one that has reduced nothing yet is not."""
        return self._begun - (self.attempt is Attempt.OPEN)

    def _phase(self) -> str:
        return phase_of(self.attempt, healing=self.healing, waits=self._loop_waits)

    # ------------------------------------------------------------------ pieces

    def _join(self, now: float) -> list[Effect]:
        self.stage, self.outside, (genesis, held) = Stage.JOINING, True, self.origin
        join = replace(
            self._template,
            step=self.step,
            lineage=self.lineage,
            promised=self.promised,
            genesis=genesis,
            held=held,
            attempt=self._spent,
            left=self._left,
        )
        if self.view is not None:
            join = self.view.recall(join, in_doubt=self.attempt is Attempt.VOTED, knows=self._knows)
        self._resend_at = now + self._resend_s
        return [Transmit(join)]

    def _send_vote(self, now: float) -> list[Effect]:
        assert self._vote is not None
        self._resend_at = now + self._resend_s
        return [Transmit(self._vote)]

    def _cast(self, view: View, now: float) -> list[Effect]:
        """Send the yes; under per-group commit act on it at once, if it is the whole group's and not the last."""
        effects, alone = self._send_vote(now), self._spent_in_group == messages.ONE_RANK
        if self._template.group_commit and alone and not self.leaving:
            self._advance(view)
            self._close(Outcome(view.step, True, "own vote", self._contributing, b""))
            self._unanswered, self._vote = self._vote, None
        return effects

    def _vote_no(self, reason: str, now: float, phase: str = "", **said: bool) -> list[Effect]:
        """Tell the others no, once; the quorum is over for this rank. `phase`: it was in, if not in this one."""
        view = self.view
        if self.stage is not Stage.MEMBER or view is None or self._vote is not None:
            return []
        leaving = self.leaving and self.attempt is Attempt.FAILED
        self._vote = self._ballot(
            view, False, reason=reason[:500], phase=phase or self._phase(), leaving=leaving, **said
        )
        aborts = [] if self._revoked else [Abort(view.quorum_id, reason)]
        self._revoked = True
        return [*aborts, *self._send_vote(now)]

    def _ballot(self, view: View, ok: bool, **said: Any) -> messages.Vote:
        job, own_id, asked = self._template.job, self.replica_id, (view.quorum_id, view.step)
        return messages.Vote(job, own_id, *asked, self.lineage, ok, attempt=self._spent, **said)

    def _repeat(self, now: float) -> list[Effect]:
        """Send again what is unanswered; else say where this rank believes it is."""
        if not self._connected or self.stage in (Stage.OUT, Stage.LEFT, Stage.REFUSED):
            self._resend_at = None  # `connected` repeats; a socket's queue need not fill meanwhile
            return []
        self._resend_at = now + self._resend_s
        if self.stage is Stage.JOINING:
            return self._join(now)
        if self._unanswered is not None:
            return [Transmit(self._unanswered)]
        if self._vote is not None and self.stage is Stage.MEMBER:
            return self._send_vote(now)
        # A rank of a group that has left its quorum has no vote there that others could wait for.
        quorum_id = self.view.quorum_id if self.view and not self.outside else NO_QUORUM
        said = self._template.job, self.replica_id, quorum_id, self.step
        return [Transmit(messages.Heartbeat(*said))]

    def _end_doubt(self, quorum: messages.Quorum, *, heals: bool) -> None:
        """What became of the step in doubt. A group that `heals` has not made it: a rank said no."""
        view = self.view
        if self.attempt is not Attempt.VOTED or view is None:
            return
        after = view.position_after()
        made = quorum.settle == "commit" or (quorum.step, quorum.lineage) == after
        if committed := made and not heals:
            (self.step, self.lineage), self.origin = after, (view.genesis, view.quorum_id)
        control = quorum.control if committed else b""
        self._close(Outcome(view.step, committed, messages.SETTLED, self._contributing, control))

    def _advance(self, view: View) -> None:
        """The step of `view` is committed: move on under the same quorum."""
        self.view, self._differed = (new := view.after_commit()), 0
        self.step, self.lineage, self.origin = new.step, new.lineage, (new.genesis, new.held)

    def _close(self, outcome: Outcome) -> None:
        self.outcome, self.attempt = outcome, Attempt.CLOSED
        self._unattended, self._unread, self._loop_waits = False, None, False

    def check(self) -> None:
        """Assert every invariant."""
        if self.stage is Stage.MEMBER:
            assert self.view is not None and not self.outside
            assert any(m.replica_id == self.replica_id for m in self.view.members)
            assert not self.healed or (self.step, self.lineage) == self.view.position
            vote, asked = self._vote, (self.view.quorum_id, self.view.step)
            assert vote is None or (vote.quorum_id, vote.step) == asked
        assert self.attempt is not Attempt.VOTED or (self._vote is not None and self._vote.ok)
        assert self.attempt is not Attempt.BOUND or self.stage is Stage.MEMBER
        assert (self.outcome is None) or self.attempt is Attempt.CLOSED
        assert self.published is None or self.healed, "serves a state that is not the quorum's"


_HANDLERS = events.handlers(Replica)
_ANSWERS = {*get_args(messages.Reply)} - {messages.ReachQuery}  # to what the loop has sent
