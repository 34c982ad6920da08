"""Where a rank stands: the values that its machine shows, and what it contributes to a step. PURE.

Ranks of a replica group hold shards of one copy of the model, or a whole copy each (`RanksHold`).
With shards, a rank's collectives reach the ranks of its own `group_rank` in the other groups, and a
participant is a group. With copies they reach all ranks of all groups, group after group, and a
participant is a rank: what averages or counts need not know which ranks form a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from lighthouse.wire.messages import (
    EACH,
    ON_LAST,
    OWN,
    PHASE_HEALING,
    PHASE_IDLE,
    PHASE_OPEN,
    PHASE_REDUCING,
    TOO_FEW_LEFT,
    Basis,
    InDoubt,
    Join,
    Member,
    Quorum,
    healed,
    next_lineage,
)

INITIAL = "init-"
"""Start of the lineage of a state without history; its digest follows."""


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


def phase_of(attempt: Attempt, *, healing: bool, waits: bool) -> str:
    """What a rank says it was doing when it votes no. `waits`: its loop is at its step's boundary."""
    if attempt is Attempt.BOUND or attempt is Attempt.VOTED:
        return PHASE_REDUCING
    if healing:
        return PHASE_HEALING
    return PHASE_OPEN if attempt is Attempt.OPEN and not waits else PHASE_IDLE


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
    nonce: int = 0
    genesis: int = 0
    held: int = 0
    compare: bool = False
    basis: Basis | None = None

    @classmethod
    def of(cls, quorum: Quorum, members: tuple[Member, ...], base: tuple[Member, ...] = ()) -> View:
        """`quorum` with its full member list; `base`: that of the receiver's last quorum."""
        q = quorum
        on = {OWN: members, ON_LAST: base}.get(q.rests)
        bases = q.bases if on is None else (tuple(m.replica_id for m in on),)
        basis = Basis(q.step, q.lineage, each=q.rests == EACH, bases=bases, genesis=q.genesis)
        return cls(
            q.quorum_id,
            q.step,
            q.lineage,
            members,
            q.reason,
            q.nonce,
            q.genesis,
            q.held,
            q.compare,
            basis,
        )

    def recall(self, join: Join, *, in_doubt: bool, knows: bool) -> Join:
        """`join` of a rank whose last quorum this was. `in_doubt`: it has said yes to its step, and
        has heard no answer. `knows`: it has not given up what it had heard."""
        doubt = InDoubt(self.quorum_id, self.step, self.position_after()[1]) if in_doubt else None
        last_members = tuple(m.replica_id for m in self.members)
        return replace(
            join,
            quorum_id=self.quorum_id,
            last_members=last_members,
            in_doubt=doubt,
            basis=self.basis if knows else None,
            genesis=join.genesis or (self.genesis if doubt else 0),
        )

    def rank_of(self, replica_id: str) -> int:
        """Replica rank of a member."""
        return next(i for i, m in enumerate(self.members) if m.replica_id == replica_id)

    @property
    def position(self) -> tuple[int, str]:
        """(step, lineage), where its step starts."""
        return self.step, self.lineage

    @property
    def origin(self) -> tuple[int, int]:
        """(genesis, held) of the state at `position`; see `Join`."""
        return (self.genesis, self.held) if self.held else (0, 0)

    def position_after(self) -> tuple[int, str]:
        """What a commit of its step makes of (step, lineage)."""
        lineage = next_lineage(self.lineage, self.nonce, self.quorum_id, self.step)
        return self.step + 1, lineage

    def after_commit(self) -> View:
        """Its step is committed: the same quorum at the next one, and no member is behind."""
        step, lineage = self.position_after()
        own, basis = self.quorum_id, self.basis
        # Its first commit has healed them all.
        members = self.members if self.held == own else healed(self.members)
        if basis is not None and not basis.committed:
            basis = Basis(basis.step, basis.lineage, committed=True, genesis=basis.genesis)
        return View(
            own,
            step,
            lineage,
            members,
            self.reason,
            self.nonce,
            self.genesis,
            own,
            basis=basis,
        )


@dataclass(frozen=True, slots=True)
class Participation:
    """One member's part in a step.

    Attributes:
        quorum_id: the quorum it holds for.
        replica_rank, replica_world_size: among all members.
        participants: how many contribute: groups, or ranks that each hold a copy.
        rank: among the participants; None if this member contributes nothing.
        groups: how many replica groups contribute.
        share: of the data, which this group holds (`ft_core.replica.shares`); None: none.
        reads: the share whose batch it computes now: its own, or the one that it holds next; None: any.
        heir: it was given its share within this step, since too few hold one; others that hold theirs wait.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    participants: int
    rank: int | None
    groups: int
    share: int | None = None
    reads: int | None = None
    heir: bool = False


class ReplicaStatus(NamedTuple):
    """Where a rank stands: what the shell and the training loop see of the machine. One is made after
    each event, and a named tuple is made faster than a frozen dataclass.

    Attributes:
        stage, attempt: with the lighthouse; in the loop's step.
        outside: this rank has asked to be let in, or was told that it is out, and no quorum with it has formed
            since: the others may have one. Not where its quorum has ended and waits for enough members.
        step, lineage: position of this rank's state.
        view: the quorum; None: there was none yet.
        part: this rank's participation in the quorum's step; None where `view` is.
        entered: the loop is in the step, not at its boundary, where the state and the process group
            may change.
        ready: collectives of this attempt may start.
        healing: a member whose state is not the quorum's yet.
        state_fetched: the state that this rank must load has arrived.
        overwriting: this rank's state may be overwritten by the one that is being fetched.
        targets: members that heal from this rank's state; empty if this one was behind itself when
            the quorum formed.
        published: position of the state that is served to them; None: nothing is served.
        outcome: what became of the attempt; None: it is not over.
        reason: what this rank waits for, or why it was refused.
        failure: why the attempt has failed.
        wants_group: quorum_id for which the process group is (to be) configured; 0: for none now.
        deadline: when `Replica.expire` wants to be called, or None.
        origin: (genesis, held) of this rank's state; see `Join`.
    """

    stage: Stage
    outside: bool
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
    origin: tuple[int, int]

    @property
    def refused(self) -> bool:
        """Whether no quorum with this rank will form, for the `reason` that the lighthouse has given."""
        left_behind = self.stage is Stage.WAITING and self.reason.startswith(TOO_FEW_LEFT)
        return left_behind or self.stage is Stage.REFUSED

    @property
    def still_read(self) -> bool:
        """Whether members may still read what is published: those that heal in this step, or, under
        per-group commit, in the one before. No member of the quorum is further behind: this one's next
        vote waits until all have voted on that step."""
        published = self.published
        return published is not None and (bool(self.targets) or self.step == published[0] + 1)

    def may_enter(self, *, heal: bool) -> bool:
        """Whether a loop that waits at its step's boundary, also to `heal`, may go on (or must look
        again)."""
        if self.attempt is Attempt.FAILED or self.refused or self.stage is Stage.LEFT:
            return True
        if not self.ready:
            return False
        return not (heal and self.healing) or self.state_fetched


# ---------------------------------------------------------------- participation


class WorldSizeMode(Enum):
    """Which members contribute when there are more replica groups than `min_replica_size`.

    DYNAMIC: all that are healthy, and the mean is over all of them.
    FIXED_WITH_SPARES: `min_replica_size` of them. The rest are spares, which contribute nothing and
    fill a gap at once.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class RanksHold(Enum):
    """What the ranks of one replica group hold. See the module's docstring."""

    SHARDS = "shards"
    COPIES = "copies"


@dataclass(frozen=True, slots=True)
class CopyIndex:
    """A rank's number among those of its replica group that hold a copy each, and their number."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class ParticipationRule:
    """How a rank's participation follows from a quorum.

    Attributes:
        mode, min_replica_size: see `WorldSizeMode`.
        place: of this rank in its replica group.
        heals_first: members heal before they compute, so those that heal contribute, too.
    """

    mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    min_replica_size: int = 1
    place: CopyIndex = CopyIndex()
    heals_first: bool = False

    def part(self, view: View, replica_id: str, *, behind: bool) -> Participation:
        """The participation of `replica_id` under `view`. `behind`: its state is not the quorum's.

        Unless they do so before they compute, members that heal contribute nothing in the step in which
        they join. Ranks follow from the member list alone, so that all members agree without a message.
        """
        able = [m.replica_id for m in view.members if self.heals_first or not m.healing]
        if self.mode is WorldSizeMode.FIXED_WITH_SPARES:
            able = able[: self.min_replica_size]
        mine = None if behind or replica_id not in able else able.index(replica_id)
        place = self.place
        return Participation(
            quorum_id=view.quorum_id,
            replica_rank=view.rank_of(replica_id),
            replica_world_size=len(view.members),
            participants=len(able) * place.size,
            rank=None if mine is None else mine * place.size + place.rank,
            groups=len(able),
        )


class Relations:
    """What a quorum means for one rank; replaced only where one of these changes, not each step.

    Attributes:
        key: `view`'s members and id, if there is one; whether this rank is a member, and whether its state is the
            quorum's.
        part: its participation; None: there was no quorum yet.
        targets: members that heal from its state; empty if it was behind itself when the quorum
            formed: it has healed since, but the others do not take it for a source.
    """

    def __init__(
        self,
        rule: ParticipationRule,
        replica_id: str,
        view: View | None,
        member: bool,
        healed: bool,
    ) -> None:
        self.key = view and (view.members, view.quorum_id), member, healed
        self.part: Participation | None = None
        self.targets: tuple[Member, ...] = ()
        if view is None:
            return
        self.part = rule.part(view, replica_id, behind=member and not healed)
        healing = tuple(m for m in view.members if m.healing)
        if member and healed and not any(m.replica_id == replica_id for m in healing):
            self.targets = healing
