"""The way of one attempt at a step: into its quorum, to its state, and to an outcome that is taken.

A committed outcome and its update belong together: a member that has one without the other would
hold other weights than its peers at an equal version. So a vote whose answer the loop did not wait
for is settled before the next attempt, and a member that lacks an update goes back to the position
that it holds, or discards its state, and heals. An update is due from the commit on: each vote says
how many updates there were since, so that a member that has left one out differs from its peers.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

from ft_core.collectives.allreduce import find_weight
from ft_core.config import JobOptions
from ft_core.errors import (
    GroupLeft,
    ProcessGroupError,
    QuorumUnavailable,
    StepInDoubt,
    TooManyDiscards,
)
from ft_core.heal.digests import ComparedState, Digest
from ft_core.heal.objects import naming_option
from ft_core.launch import kept_files
from ft_core.launch.board import Slot, slot
from ft_core.launch.kept import Card, Version
from ft_core.launch.warm.learn import report as report_modules
from ft_core.process_group import ProcessGroup
from ft_core.replica import events
from ft_core.replica.shares import Shares
from ft_core.replica.status import (
    Attempt,
    Outcome,
    Participation,
    RanksHold,
    ReplicaStatus,
    Stage,
    View,
)
from ft_core.shell.group_server import GroupRendezvous
from ft_core.shell.session import Session, schema_digest
from ft_core.state import CHANGED_WHILE_SERVED, State
from ft_core.step import Step
from ft_core.telemetry import COMMIT, DISCARD, KEPT, Telemetry
from lighthouse.wire.messages import NOT_COUNTED

log = logging.getLogger("ft_core")

BEHIND = "this member is behind, and takes no state in this step"
FIRST_CHECKS = 3
"""After so many commits it is checked that the state can travel."""


class Attempts:
    """A manager's attempts, one after the other. Thread: the training loop's.

    Attributes:
        step: the one under way.
        last_outcome: of the last attempt that has ended.
        behind: it should have taken a state, and its loop uses its own.
        start: the version with which this process begins.
        opened: its session; None before the first `open_session` that succeeds.
        compared: what votes say about this rank's state.
    """

    def __init__(
        self, options: JobOptions, group: ProcessGroup, state: State, telemetry: Telemetry
    ) -> None:
        self._options, self._group = options, group
        self._state, self._telemetry = state, telemetry
        self.step = Step(
            group, weighted=options.weighted, bind=self.bind, on_error=self._tell_error
        )
        self._quorum_wait_s = options.quorum_timeout_s
        self._began_at = 0.0
        # An integration's first commits may be agreements, at which it serves no whole state.
        self._checks_left = 0 if options.expected_replicas == 1 else FIRST_CHECKS
        self._discards_in_a_row = 0
        self._untaken = False  # a vote was cast, and the loop does not know its outcome
        self.compared = ComparedState(options.compare_steps)
        self._slot = slot() if options.trains else Slot()
        self._supervised = self._slot.there
        self._bound: View | None = None  # under which the last attempt was bound
        self._may_show = (
            False  # the last vote has committed a step after which the state may travel
        )
        # Where this process serves its states; None: no observer can know.
        self._card: Card | None = None
        self.start = Version(0, "", 0, 0)
        self.opened: Session | None = None
        self.rendezvous = GroupRendezvous(options)
        self.last_outcome: Outcome | None = None
        self.behind = False

    @property
    def session(self) -> Session:
        """What is `opened`. Raises RuntimeError before the first `Manager.start_quorum`, QuorumUnavailable
        while there was none that succeeded."""
        if self.opened is None:
            if self.step.underway:
                raise QuorumUnavailable("no quorum: start_quorum has raised; call it again")
            raise RuntimeError("call start_quorum (the wrapped optimizer's zero_grad) first")
        return self.opened

    def open_session(
        self,
        replica_id: str,
        room_id: str,
        schema: str,
        allow_heal: bool,
        timeout: timedelta | None,
    ) -> Session:
        """The first step: now the state exists that the join must describe. Raises as `Manager.start_quorum`,
        HealError, and what loading a kept state raises."""
        place = self._options.job_id, room_id, schema_digest(schema)
        if allow_heal and self._options.trains:
            self._begin_with_kept(place, timeout)
        start = self.start
        lineage = start.lineage or self._state.first_lineage(self._options)
        self._state.prepare()
        lineage = self._meet(lineage, timeout)
        self.opened = session = Session(
            self._options,
            self._group,
            replica_id=replica_id,
            room_id=room_id,
            rendezvous=self.rendezvous,
            can_heal=allow_heal,
            step=start.step,
            lineage=lineage,
            origin=(start.genesis, start.held),
            schema=schema,
            telemetry=self._telemetry,
            into=lambda: self._state.room_to_receive(
                self.session, in_step=self._options.async_quorum
            ),
            waited_s=self.step.waited_s,
        )
        self._be_observed(place)
        return session

    def _be_observed(self, place: tuple[str, ...]) -> None:
        """Tell an observer where the states of this process, which is about to join, are served.
        `place`: see `Card`."""
        options = self._options
        if options.group_rank < options.parts:
            source = self.session.plane.source
            card = Card(source, place, token=options.token, parts=options.parts)
            self._card = card if self._slot.tell(card.row(), options.group_rank) else None
        self.session.plane.when_diverged = self._disown_kept

    def _disown_kept(self) -> None:
        """K4 of `ft_core.launch.kept`. Any thread."""
        self._slot.forget_kept(self._options.parts)
        kept_files.forget(self._options.job_id)

    # ------------------------------------------------------------------ the way in

    def _meet(self, lineage: str, timeout: timedelta | None) -> str:
        """Wait for the other ranks of this replica group, before there is a session. Returns the
        lineage to begin with; see `GroupRendezvous.meet`.

        Raises QuorumUnavailable: the step has begun then, and can only fail.
        """
        self.step.open()
        as_rank_0 = partial(self._state.begin_as_rank_0, self._options)
        return self.rendezvous.meet(lineage, self._meeting_s(timeout), as_rank_0)

    def _begin_with_kept(self, place: tuple[str, ...], timeout: timedelta | None) -> None:
        """Load the state that the supervisor's keeper holds, if that is to be begun with."""
        self.step.open()
        agree = partial(self.rendezvous.from_rank_0, "kept", limit_s=self._meeting_s(timeout))
        kept = self._state.begin_with_kept(self._options, place, self.start, agree)
        if kept is not None:
            self.start = kept
            self._telemetry.emit(KEPT, step=kept.step)

    def _meeting_s(self, timeout: timedelta | None) -> float:
        limit_s, away_s = self._patience_s(timeout), self._options.timeouts.connect_timeout_s
        return away_s if limit_s is None else min(limit_s, away_s)

    def _patience_s(self, timeout: timedelta | None) -> float | None:
        """How long a `Manager.start_quorum` called with `timeout` waits."""
        return self._options.quorum_timeout_s if timeout is None else timeout.total_seconds()

    def begin(
        self, timeout: timedelta | None, *, takes_state: bool = True, stays: bool = False
    ) -> None:
        """See `Manager.start_quorum`. `stays`: not if its present quorum ends (`Manager.try_start_quorum`)."""
        session = self.session
        if session.hangs:
            session.back()
        if self._untaken:
            self._settle(timeout)
        elif session.control.status.attempt is not Attempt.CLOSED:
            self._abandon()
        if self._checks_left and self.last_outcome is not None and self.last_outcome.committed:
            # Now the optimizers have a state, and nothing is lost yet.
            self._checks_left -= 1
            with naming_option(self._options):
                self._state.check(allow_objects=self._options.heal_allow_objects)
        self.step.open()
        self._state.is_used, self.behind = not takes_state, False
        may_show, self._may_show = self._may_show, False
        self._began_at = time.monotonic()
        # Also where nothing is waited for now: the quorum may be lost before the first collective.
        self._quorum_wait_s = self._patience_s(timeout)
        in_step = self._options.async_quorum
        shards = self._options.ranks_hold is RanksHold.SHARDS
        # No collective saves a shard.
        if in_step and (shards or self._options.group_world_size == 1):
            before = session.control.status
            self._state.offer(behind=before.stage is not Stage.MEMBER or before.healing)
        status = session.control.submit(events.Begin(heal_in_step=in_step))
        if status.entered:
            if self._is_new(status.view):
                session.refuse_to_go_back(status)
            self.step.part = self.part(status)
            if may_show and self._card is not None:
                self._state.show(session, allow_objects=self._options.heal_allow_objects)
        elif stays or not in_step or status.stage is Stage.MEMBER or self._state.sharded():
            self.enter(begins=True, stays=stays)
        self.step.is_begun = True

    def _is_new(self, view: View | None) -> bool:
        """Whether no attempt was bound to this quorum yet. Two lighthouses may give theirs one number."""
        bound = self._bound
        if bound is None or view is None:
            return True
        return (view.quorum_id, view.nonce) != (bound.quorum_id, bound.nonce)

    def enter(
        self, *, begins: bool = False, before_vote: bool = False, stays: bool = False
    ) -> None:
        """Wait until this attempt may reduce (or has failed); serve and heal at its boundary.

        `begins`: the loop has computed nothing in it. `before_vote`: with an asynchronous quorum the
        state is loaded here. `stays`: as in `begin`. Raises as `Manager.start_quorum`, and what a user's load
        function raises.
        """
        session = self.session
        control, wait_s = session.control, self._quorum_wait_s
        deadline = None if wait_s is None else time.monotonic() + wait_s
        takes = not self._state.is_used

        def heals(status: ReplicaStatus) -> bool:
            # One that can't be committed may be lost before each vote, so that no state is ever loaded.
            lost = status.part is not None and status.part.groups < self._options.min_replicas
            return before_vote or not self._options.async_quorum or (begins and takes and lost)

        def is_out(status: ReplicaStatus) -> bool:
            return stays and status.stage is not Stage.MEMBER

        while True:
            may = session.wait_for(
                lambda s: is_out(s) or s.may_enter(heal=takes and heals(s)), deadline
            )
            status = control.status
            if is_out(status):
                raise QuorumUnavailable(f"its quorum has ended: {status.reason}")
            session.check_refused()
            heal = heals(status)
            if status.attempt is Attempt.FAILED:
                control.submit(events.Entered())
                return
            if heal and not takes and status.healing:
                self.behind = True
                return
            if not status.may_enter(heal=heal):
                if may:  # the quorum is another one since
                    continue
                raise QuorumUnavailable(
                    f"no quorum within {wait_s:g} s: {status.reason}; the lighthouse is "
                    f"{session.lighthouse}. Start what it waits for, or set a longer quorum timeout"
                )
            if not (heal and status.healing):
                break
            self._state.updates = NOT_COUNTED
            try:
                self._state.load(session)
            except BaseException as error:  # some of it is loaded
                reason = f"loading the healed state raised {type(error).__name__}: {error}"
                self.rejoin(events.Rejoin(reason))
                raise
        session.refuse_to_go_back(status)
        # The loop may be in its step already, where the quorum has become another one.
        if self.tell_if_torn():
            self._state.serve(session)
        self.step.part = self.part(control.submit(events.Entered()))
        self._slot.join()

    def part(self, status: ReplicaStatus) -> Participation | None:
        """This rank's participation in the quorum's step; None: there was no quorum yet."""
        part, view, shares = status.part, status.view, self._state.shares
        if shares is None or part is None or view is None:
            return part
        return shares.part(view, part, self.session.replica_id)

    def standing(self) -> Participation | None:
        """The part in the quorum that this rank is in now; None: it is in none."""
        status = None if self.opened is None else self.opened.control.status
        return self.part(status) if status is not None and status.stage is Stage.MEMBER else None

    def bind(self) -> None:
        """The first collective of the step: from here on it belongs to this quorum."""
        step = self.step
        try:
            session = self.session
        except QuorumUnavailable as error:
            step.fail(error)
            return
        before = step.part  # the loop computes by it, whichever quorums come meanwhile
        while True:
            status = session.control.submit(events.Bind())
            if status.attempt is Attempt.BOUND:
                part = self.part(status)
                assert part is not None
                # Its collectives are refused if the process group is another quorum's by now.
                self._group.bind(part.quorum_id)
                step.part, step.bound_at, self._bound = part, time.monotonic(), status.view
                if before is not None and before.share != part.share:
                    step.fail(RuntimeError(f"took over share {part.share} of the data in a step"))
                    return
                if step.weighted:
                    find_weight(step)
                return
            if status.attempt is not Attempt.OPEN:
                step.fail(RuntimeError(status.failure or "not in a step"))
                return
            try:
                self.enter()
                if self.behind:
                    raise RuntimeError(BEHIND)
            except Exception as error:
                step.fail(error)
                return

    def _tell_error(self, reason: str) -> None:
        """Any thread: the step has failed, tell the others now."""
        error, since = self.step.error, self.step.bound_at
        if self.opened is not None:
            follows = isinstance(error, ProcessGroupError)
            waited_s = time.monotonic() - since if follows and since is not None else 0.0
            self.opened.fail(reason, waited_s, follows=follows)

    # ------------------------------------------------------------------ the way out

    def end(self, timeout: timedelta | None, *, control: bytes, needed: int, admits: bool) -> bool:
        """See `Manager.should_commit`. `needed`: how many groups must contribute."""
        # Where one was cast already, this waits for its answer.
        untaken = self._untaken
        vote = events.CastVote(True) if untaken else self._make_vote(control, needed, admits)
        status, outcome = self._await_outcome(vote, timeout)
        try:
            self._conclude(status, outcome)
        except BaseException as error:
            if outcome.committed:  # and the caller does not learn it
                self._unapplied(f"{type(error).__name__} after the vote: {error}")
            raise
        finally:
            self._untaken = False
        self._may_show = outcome.committed and admits
        return outcome.committed

    def _make_vote(self, control: bytes, needed: int, admits: bool) -> events.CastVote:
        """Wait for the step's collectives, and say yes or no."""
        session, step = self.session, self.step
        if session.control.status.attempt is Attempt.CLOSED:
            raise RuntimeError(
                "should_commit (the wrapped optimizer's step) must follow start_quorum (its zero_grad), once each step"
            )
        step.check()
        if self._state.shares is not None:
            step.bind()  # a commit moves them, by the members of this very quorum
        self._state.before_vote()
        if not self.tell_if_torn():
            step.fail(RuntimeError(CHANGED_WHILE_SERVED))
        status, digest = session.control.status, None
        settled = status.attempt is Attempt.BOUND and not status.healing
        if settled and step.error is None:
            digest = self._digest(status)  # a device computes it before this thread waits for that
        step.drain()
        status = session.control.status
        if step.error is None and (status.attempt is Attempt.OPEN or status.healing):
            self.enter(before_vote=True)
            if self.behind:
                step.fail(RuntimeError(BEHIND))
        part = step.part = step.part or self.part(session.control.status)
        if step.error is not None:
            return events.CastVote(False, f"{type(step.error).__name__}: {step.error}")
        if part is None or part.groups < needed:
            return events.CastVote(False, f"fewer than min_replica_size={needed} participants")
        if not settled:
            digest = self._digest(session.control.status)
        return events.CastVote(
            True,
            control=control,
            updates=self._state.updates if self.compared.equal else NOT_COUNTED,
            digest=b"" if digest is None else digest.finish(),
            admits=admits,
        )

    def close(self) -> None:
        """This rank leaves for good, maybe in a step."""
        self.compared.clear()
        if self.opened is not None:
            self.tell_if_torn()

    def tell_if_torn(self) -> bool:
        """Before a vote, and before what is served is forgotten: tell the others if the loop has changed
        what they may have read. Whether it has not."""
        control = self.session.control
        # What is not published has been withdrawn.
        if control.status.published is None or self._state.unchanged():
            return True
        control.submit(events.ServedTorn(CHANGED_WHILE_SERVED))
        return False

    def _digest(self, status: ReplicaStatus) -> Digest | None:
        """The digest of what members compare at this step, or of all of it if a member has healed."""
        view = status.view
        if view is None or len(view.members) == 1:
            return None
        return self.compared.at(view.step, whole=view.compare)

    def _await_outcome(
        self, vote: events.CastVote, timeout: timedelta | None
    ) -> tuple[ReplicaStatus, Outcome]:
        """Cast `vote` (or wait once more for the answer to one that was cast). Raises StepInDoubt."""
        session, away_s = self.session, self._options.timeouts.connect_timeout_s
        limit_s = math.inf if timeout is None else timeout.total_seconds()
        self._untaken, now = True, time.monotonic()
        deadline, is_away = now + limit_s, False
        while True:
            # Peers may be late for longer than the lighthouse may be away. It ends their delay, or it
            # says for which groups the job waits, as it does at the start of a step.
            look = away_s + (session.control.away_since or now)
            outside = session.refuse_if_others_are_past
            status = session.control.vote(vote, min(deadline, look), outside)
            if status.outcome is not None:
                return status, status.outcome
            session.check_refused()
            now, away = time.monotonic(), session.control.away_since
            is_away = away is not None and now >= away + away_s
            if is_away or now >= deadline:
                break
        why = f"has been away for {away_s:g} s" if is_away else f"gave none within {limit_s:g} s"
        raise StepInDoubt(
            f"no answer to the vote on step {status.step}: the lighthouse at {session.lighthouse} "
            f"{why}; is it alive? ({status.reason})"
        )

    def _conclude(self, status: ReplicaStatus, outcome: Outcome) -> None:
        """Record the outcome of a step."""
        session = self.session
        self.last_outcome, part = outcome, self.step.part
        seconds = time.monotonic() - self._began_at
        if outcome.committed:
            self._state.committed()
            if status.published is not None:
                # The optimizer is next. All members have voted, the healed ones too, so that none
                # reads the state any more, except where a group acts on its own vote.
                self._state.retire(session, copy=self._options.group_commit)
            elif self._state.shows:
                version = self._state.settle(session)
                if version is not None and self._card is not None:
                    self._card = replace(self._card, version=version)
                    self._slot.tell(self._card.row(), self._options.group_rank)
            assert part is not None, "a yes without a quorum"
            self._state.batches_committed += part.participants
            if self._state.shares is not None:
                self._move_shares(self._state.shares, part)
            self.step.end(True)
            self._discards_in_a_row, step = 0, outcome.step
            if self._supervised:
                self._slot.committed(step, trains=self._state.trains)
            report_modules()
            self._telemetry.emit(COMMIT, step=step, participants=part.groups, seconds=seconds)
            return
        try:
            session.check_refused()
        except GroupLeft:
            pass  # there is no next step, which `start_quorum` says
        self.step.end(False)
        reason = outcome.reason
        self._telemetry.emit(DISCARD, step=outcome.step, reason=reason, seconds=seconds)
        log.info("step %s discarded: %s", outcome.step, reason)
        self._discards_in_a_row += 1
        limit = self._options.max_retries
        if limit is not None and self._discards_in_a_row > limit:
            raise TooManyDiscards(
                f"{self._discards_in_a_row} steps in a row were discarded, which is more than max_retries={limit}, "
                f"the last because: {reason}. Mend that, or set a larger max_retries, or None for no limit"
            )

    def _move_shares(self, shares: Shares, part: Participation) -> None:
        """A step is committed: each share of the data that has lost its holder gets another one, if it is a step of
        the training."""
        assert self._bound is not None and self.last_outcome is not None
        self.last_outcome = replace(self.last_outcome, participants=part.groups)
        if not self._state.trains:
            return
        self._state.shares = after = shares.after(self._bound)
        for share, (old, new) in enumerate(zip(shares.holders, after.holders, strict=True)):
            if old and old != new:
                log.info(
                    "share %s of the data: %s takes over from %s", share, new or "no group", old
                )

    def _settle(self, timeout: timedelta | None) -> None:
        """The loop begins a step without having taken the outcome of the last one."""
        status, outcome = self._await_outcome(events.CastVote(True), timeout)
        if outcome.committed:
            reason = "the loop went on without the outcome of its vote"
            self._unapplied(reason)
            outcome = replace(outcome, committed=False, reason=reason)
        self._untaken = False
        self._conclude(status, outcome)

    def _unapplied(self, reason: str) -> None:
        """The last step was committed, and the loop still holds the state before it."""
        session = self.session
        step = session.control.status.step - 1
        log.warning("step %s was committed, but not applied here (%s): healing", step, reason)
        self.rejoin(events.Unapplied(reason))

    def _abandon(self) -> None:
        """The loop began a step and never ended it: it counts as a no."""
        session = self.session
        self.step.drain()
        self.step.end(False)
        step = session.control.status.step
        self._telemetry.emit(DISCARD, step=step, reason="never ended", seconds=0.0)
        session.control.submit(events.CastVote(False, "the loop started over"))

    def rejoin(self, event: events.Rejoin | events.Unapplied) -> None:
        """Leave the quorum, and serve no state any more; the next `begin` joins again."""
        session = self.session
        self.step.drain()
        self.step.part = self.step.bound_at = None
        self._untaken = self.behind = False
        if isinstance(event, events.Rejoin):
            self.tell_if_torn()
        if not isinstance(event, events.Rejoin) or event.discard_state:
            self._state.updates = NOT_COUNTED
        session.control.submit(event)
        self._state.retire(session)

    def update_failed(self, error: BaseException) -> None:
        """See `Manager.update_failed`."""
        session = self.session
        status = session.control.status
        # Members that are about to heal from this one hold nothing yet.
        holders = () if status.view is None else (m for m in status.view.members if not m.healing)
        alone = [m.replica_id for m in holders] == [session.replica_id]
        if alone and self._options.group_world_size == 1:
            return
        reason = f"the update of step {status.step - 1} raised {type(error).__name__}: {error}"
        log.warning("%s: %s", reason, events.DISCARDS_STATE)
        self.rejoin(events.Rejoin(reason))
