"""Where a rank stands, as its machine keeps it, and what follows from that. PURE.

`machine.py` changes it; nothing here does.
"""

from __future__ import annotations

from ft_core.replica.events import FetchState
from ft_core.replica.status import (
    Attempt,
    Outcome,
    ParticipationRule,
    Relations,
    ReplicaStatus,
    Stage,
    View,
)
from lighthouse.wire.messages import (
    NO_QUORUM,
    PHASE_HEALING,
    PHASE_IDLE,
    PHASE_OPEN,
    PHASE_REDUCING,
    Join,
    Member,
    Reply,
    Vote,
)


class Standing:
    """The fields of `machine.Replica`, which has its arguments.

    Attributes:
        status: after the last event. Replaced, never changed.
    """

    def __init__(
        self,
        template: Join,
        *,
        resend_s: float,
        revoke_grace_s: float,
        rule: ParticipationRule | None = None,
    ) -> None:
        self._template = template
        self.promised = template.promised  # the term that this rank obeys, until a higher one
        self._resend_s = resend_s
        self._revoke_grace_s = revoke_grace_s
        self._rule = rule or ParticipationRule()
        self._relations: Relations | None = None
        self.replica_id = template.replica_id
        self.stage = Stage.OUT
        self.attempt = Attempt.CLOSED
        self.step, self.lineage = template.step, template.lineage
        self.origin = template.genesis, template.held
        self.view: View | None = None
        self.healed = True  # own state is the quorum's
        self.outcome: Outcome | None = None
        self.reason = "not joined yet"
        self.failure = ""
        self.published: tuple[int, str] | None = None
        self.leaving = False  # the next vote says that it is the last one
        self._configured = NO_QUORUM
        self._revoked = False
        self._vote: Vote | None = None
        self._before = (template.step, template.lineage)  # position before the last vote
        self._unattended = False  # voted, and the loop does not wait for the answer
        self._unread: Reply | None = None  # the first message since
        self._unanswered: Vote | None = None  # per-group commit: decision still to come
        self._loop_waits = False  # at its step's boundary: it uses neither the state nor the group
        self._begun = 0  # attempts, all in all
        self._spent_in_group = 0  # of them, by this rank or another one of its group
        self._heal_in_step = False
        self._fetching: FetchState | None = None
        self._fetched: tuple[int, str] | None = None
        self._overwriting = False
        self._connected = True
        self._resend_at: float | None = None
        self._grace_at: float | None = None
        self.status = self._status()

    def _status(self) -> ReplicaStatus:
        relations = self._related()
        return ReplicaStatus(
            self.stage, self.attempt, self.step, self.lineage, self.view, relations.part,
            self.attempt is Attempt.OPEN and not self._loop_waits, self.ready, self.healing,
            self.state_fetched, self._overwriting, relations.targets, self.published,
            self.outcome, self.reason, self.failure, self.wants_group, self.deadline(), self.origin,
        )  # fmt: skip

    def deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        resend, grace = self._resend_at, self._grace_at
        return resend if grace is None else grace if resend is None else min(resend, grace)

    # ------------------------------------------------------------------ what the status tells

    @property
    def ready(self) -> bool:
        """Collectives of this attempt may start."""
        view = self.view
        return (
            self.stage is Stage.MEMBER
            and view is not None
            and self._configured == view.quorum_id
            and not self._revoked
        )

    @property
    def may_vote(self) -> bool:
        """A yes counts. Not the same as `ready`: the collectives of a bound attempt may all be done
        when its quorum is revoked. Then its yes still counts, and the step may still commit."""
        if self.stage is not Stage.MEMBER or not self.healed or self._vote is not None:
            return False
        return self.attempt is Attempt.BOUND or (self.attempt is Attempt.OPEN and self.ready)

    @property
    def healing(self) -> bool:
        """A member whose state is not the quorum's yet."""
        return self.stage is Stage.MEMBER and not self.healed

    @property
    def wants_group(self) -> int:
        """quorum_id for which the process group is (to be) configured; 0: for none now."""
        return NO_QUORUM if self.view is None or self._revoked else self.view.quorum_id

    @property
    def state_fetched(self) -> bool:
        """The state that this rank must load has arrived."""
        view = self.view
        return view is not None and self._fetched == (view.step, view.lineage)

    @property
    def targets(self) -> tuple[Member, ...]:
        """Members that heal from this rank's state."""
        return self._related().targets

    def _related(self) -> Relations:
        view, member, known = self.view, self.stage is Stage.MEMBER, self._relations
        key = view and view.members, view and view.quorum_id, member, self.healed
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
        if self.attempt is Attempt.BOUND or self.attempt is Attempt.VOTED:
            return PHASE_REDUCING
        if self.healing:
            return PHASE_HEALING
        return PHASE_OPEN if self.attempt is Attempt.OPEN and not self._loop_waits else PHASE_IDLE
