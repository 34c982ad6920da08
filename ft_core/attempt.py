"""The way of one attempt at a step: into its quorum, to its state, and to an outcome that is taken.

A committed outcome and its update belong together: a member that has one without the other would
hold other weights than its peers at an equal version. So a vote whose answer the loop did not wait
for is settled before the next attempt, and a member that lacks an update goes back to the position
that it holds, or discards its state, and heals.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import timedelta

from ft_core.collectives.allreduce import find_weight
from ft_core.config import JobOptions
from ft_core.errors import GroupLeft, QuorumUnavailable
from ft_core.process_group import ProcessGroup
from ft_core.replica import events
from ft_core.replica.status import Attempt, Outcome, ReplicaStatus, Stage
from ft_core.shell.session import Session
from ft_core.state import CHANGED_WHILE_SERVED, State
from ft_core.step import Step
from ft_core.telemetry import StepRecord

log = logging.getLogger("ft_core")


class Attempts:
    """A manager's attempts, one after the other. Thread: the training loop's.

    Attributes:
        last_outcome: of the last attempt that has ended.
    """

    def __init__(
        self, options: JobOptions, group: ProcessGroup, step: Step, state: State, record: StepRecord
    ) -> None:
        self._options, self._group = options, group
        self._step, self._state, self._record = step, state, record
        self._quorum_wait_s = options.quorum_timeout_s
        self.last_outcome: Outcome | None = None

    # ------------------------------------------------------------------ the way in

    def begin(self, session: Session, timeout: timedelta | None) -> None:
        """See `Manager.start_quorum`."""
        if session.untaken:
            self._settle(session, timeout)
        elif session.control.status.attempt is not Attempt.CLOSED:
            self._abandon(session)
        self._step.open()
        self._record.begin()
        # Also where nothing is waited for now: the quorum may be lost before the first collective.
        limit_s = self._options.quorum_timeout_s
        self._quorum_wait_s = limit_s if timeout is None else timeout.total_seconds()
        in_step = self._options.async_quorum
        if in_step and self._options.group_world_size == 1:  # saving may be a collective
            before = session.control.status
            self._state.offer(behind=before.stage is not Stage.MEMBER or before.healing)
        status = session.control.submit(events.Begin(heal_in_step=in_step))
        if status.entered:
            self._step.part = status.part
        elif not in_step or status.stage is Stage.MEMBER:
            self.enter(session)

    def enter(self, session: Session, *, before_vote: bool = False) -> None:
        """Wait until this attempt may reduce (or has failed); serve and heal at its boundary.

        `before_vote`: with an asynchronous quorum the state is loaded here. Raises as
        `Manager.start_quorum`, and what a user's load function raises.
        """
        heal = before_vote or not self._options.async_quorum
        control, wait_s = session.control, self._quorum_wait_s
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            session.wait_for(lambda status: status.may_enter(heal=heal), deadline)
            session.check_refused()
            status = control.status
            if status.attempt is Attempt.FAILED:
                return
            if not status.may_enter(heal=heal):
                raise QuorumUnavailable(
                    f"no quorum within the timeout: {status.reason}; the lighthouse is "
                    f"{session.lighthouse}"
                )
            if not (heal and status.healing):
                break
            try:
                self._state.load(session)
            except BaseException as error:  # some of it is loaded
                reason = f"loading the healed state raised {type(error).__name__}: {error}"
                self.rejoin(session, events.Rejoin(reason))
                raise
        self._state.serve(session)
        self._step.part = control.submit(events.Entered()).part

    def bind(self, session: Session) -> None:
        """The first collective of the step: from here on it belongs to this quorum."""
        step = self._step
        while True:
            status = session.control.submit(events.Bind())
            if status.attempt is Attempt.BOUND:
                assert status.part is not None
                # Its collectives are refused if the process group is another quorum's by now.
                self._group.bind(status.part.quorum_id)
                step.part, step.bound_at = status.part, time.monotonic()
                if step.weighted:
                    find_weight(step)
                return
            if status.attempt is not Attempt.OPEN:
                step.fail(RuntimeError(status.failure or "not in a step"))
                return
            try:
                self.enter(session)
            except Exception as error:
                step.fail(error)
                return

    # ------------------------------------------------------------------ the way out

    def end(
        self, session: Session, timeout: timedelta | None, *, control: bytes, needed: int
    ) -> bool:
        """See `Manager.should_commit`. `needed`: how many groups must contribute."""
        vote = events.CastVote(True)  # waits for the answer to the one that was cast
        if not session.untaken:
            vote = self._make_vote(session, control, needed)
        status, outcome = session.await_outcome(vote, timeout)
        try:
            self._conclude(session, status, outcome)
        except BaseException as error:
            if outcome.committed:  # and the caller does not learn it
                self._unapplied(session, f"{type(error).__name__} after the vote: {error}")
            raise
        finally:
            session.untaken = False
        return outcome.committed

    def _make_vote(self, session: Session, control: bytes, needed: int) -> events.CastVote:
        """Wait for the step's collectives, and say yes or no."""
        step = self._step
        if session.control.status.attempt is Attempt.CLOSED:
            raise RuntimeError("should_commit must follow start_quorum")
        step.check()
        if not self._state.unchanged():
            step.fail(RuntimeError(CHANGED_WHILE_SERVED))
        step.drain()
        status = session.control.status
        if step.error is None and (status.attempt is Attempt.OPEN or status.healing):
            self.enter(session, before_vote=True)
        part = step.part = step.part or session.control.status.part
        if step.error is not None:
            return events.CastVote(False, f"{type(step.error).__name__}: {step.error}")
        if part is None or part.groups < needed:
            return events.CastVote(False, f"fewer than min_replica_size={needed} participants")
        return events.CastVote(True, control=control)

    def _conclude(self, session: Session, status: ReplicaStatus, outcome: Outcome) -> None:
        """Record the outcome of a step."""
        self.last_outcome, part = outcome, self._step.part
        if outcome.committed:
            if status.published is not None:
                # The optimizer is next. All members have voted, the healed ones too, so that none
                # reads the state any more, except where a group acts on its own vote.
                (session.plane.freeze if self._options.group_commit else session.plane.retire)()
            assert part is not None, "a yes without a quorum"
            self._state.batches_committed += part.participants
            self._step.end(True)
            self._record.committed(outcome.step, part.groups)
            return
        try:
            session.check_refused()
        except GroupLeft:
            pass  # there is no next step, which `start_quorum` says
        self._step.end(False)
        self._record.discarded(outcome.step, outcome.reason)

    def _settle(self, session: Session, timeout: timedelta | None) -> None:
        """The loop begins a step without having taken the outcome of the last one."""
        status, outcome = session.await_outcome(events.CastVote(True), timeout)
        if outcome.committed:
            reason = "the loop went on without the outcome of its vote"
            self._unapplied(session, reason)
            outcome = replace(outcome, committed=False, reason=reason)
        session.untaken = False
        self._conclude(session, status, outcome)

    def _unapplied(self, session: Session, reason: str) -> None:
        """The last step was committed, and the loop still holds the state before it."""
        step = session.control.status.step - 1
        log.warning("step %s was committed, but not applied here (%s): healing", step, reason)
        self.rejoin(session, events.Unapplied(reason))

    def _abandon(self, session: Session) -> None:
        """The loop began a step and never ended it: it counts as a no."""
        self._step.drain()
        self._step.end(False)
        self._record.abandoned(session.control.status.step)
        session.control.submit(events.CastVote(False, "the loop started over"))

    def rejoin(self, session: Session, event: events.Rejoin | events.Unapplied) -> None:
        """Leave the quorum, and serve no state any more; the next `begin` joins again."""
        self._step.drain()
        self._step.part = self._step.bound_at = None
        session.untaken = False
        session.control.submit(event)
        session.plane.retire()

    def update_failed(self, session: Session, error: BaseException) -> None:
        """See `Manager.update_failed`."""
        status = session.control.status
        alone = status.view is not None and len(status.view.members) == 1
        if alone and self._options.group_world_size == 1:
            return
        reason = f"the update of step {status.step - 1} raised {type(error).__name__}: {error}"
        log.warning("%s: this replica group discards its state, and heals", reason)
        self.rejoin(session, events.Rejoin(reason))
