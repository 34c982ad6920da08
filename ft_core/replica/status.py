"""Where a rank stands: the values that its state machine shows. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lighthouse.wire.messages import Member, healed, next_lineage


class Stage(Enum):
    """Where a rank stands with the lighthouse."""

    OUT = "out"
    JOINING = "joining"
    WAITING = "waiting"
    MEMBER = "member"
    REFUSED = "refused"
    LEFT = "left"


class Attempt(Enum):
    """Where the training loop stands in its step."""

    CLOSED = "closed"
    OPEN = "open"
    BOUND = "bound"
    FAILED = "failed"
    VOTED = "voted"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt."""

    step: int
    committed: bool
    reason: str = ""
    participants: int = 0
    control: bytes = b""


@dataclass(frozen=True, slots=True)
class View:
    """The quorum as this rank sees it."""

    quorum_id: int
    step: int
    lineage: str
    members: tuple[Member, ...]
    reason: str = ""

    def rank_of(self, replica_id: str) -> int:
        return next(i for i, m in enumerate(self.members) if m.replica_id == replica_id)

    def after_commit(self) -> View:
        """Its step is committed: the same quorum at the next one, and no member is behind."""
        lineage = next_lineage(self.lineage, self.quorum_id, self.step)
        return View(self.quorum_id, self.step + 1, lineage, healed(self.members), self.reason)


@dataclass(frozen=True, slots=True)
class Participation:
    """One member's part in a step.

    Attributes:
        quorum_id: the quorum it holds for.
        replica_rank, replica_world_size: among all members.
        participants: how many contribute: groups, or ranks that each hold a copy.
        rank: among the participants; None if this member contributes nothing.
        groups: how many replica groups contribute.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    participants: int
    rank: int | None
    groups: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Where a rank stands: what the shell and the training loop see of the machine.

    Attributes:
        stage, attempt: with the lighthouse; in the loop's step.
        step, lineage: position of the own state.
        view: the quorum; None: there was none yet.
        part: this rank's participation in the quorum's step; None where `view` is.
        entered: the loop is in the step, not at its boundary, where the state and the process group
            may change.
        ready: collectives of this attempt may start.
        healing: a member whose state is not the quorum's yet.
        state_fetched: the state that this rank must load has arrived.
        overwriting: the own state may be overwritten by the one that is being fetched.
        targets: members that heal from this rank's state; empty if this one is behind itself.
        published: position of the state that is served to them; None: nothing is served.
        outcome: what became of the attempt; None: it is not over.
        reason: what this rank waits for, or why it was refused.
        failure: why the attempt has failed.
        wants_group: quorum_id for which the process group is (to be) configured; 0: for none now.
        deadline: when `Replica.expire` wants to be called, or None.
    """

    stage: Stage
    attempt: Attempt
    step: int
    lineage: str
    view: View | None
    part: Participation | None
    entered: bool
    ready: bool
    healing: bool
    state_fetched: bool
    overwriting: bool
    targets: tuple[Member, ...]
    published: tuple[int, str] | None
    outcome: Outcome | None
    reason: str
    failure: str
    wants_group: int
    deadline: float | None

    def may_enter(self, *, heal: bool) -> bool:
        """Whether a loop that waits at its step's boundary, also to `heal`, may go on (or must look
        again)."""
        if self.attempt is Attempt.FAILED or self.stage in (Stage.REFUSED, Stage.LEFT):
            return True
        if not self.ready:
            return False
        return not (heal and self.healing) or self.state_fetched
