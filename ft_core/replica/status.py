"""Where a rank stands: the values of its state machine (`ft_core.replica.machine`). PURE."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lighthouse.wire.messages import Member, healed, next_lineage


class Stage(Enum):
    """Where a rank stands with the lighthouse."""

    OUT = "out"
    JOINING = "joining"
    SEATED = "seated"
    MEMBER = "member"
    REFUSED = "refused"
    LEFT = "left"


class Attempt(Enum):
    """Where the training loop stands in its step."""

    CLOSED = "closed"
    OPEN = "open"
    PINNED = "pinned"
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

    @property
    def participants(self) -> int:
        """How many members contribute: all but those that heal."""
        return sum(not m.healing for m in self.members)

    def after_commit(self) -> View:
        """Its step is committed: the same quorum at the next one, and nobody is behind."""
        lineage = next_lineage(self.lineage, self.quorum_id, self.step)
        return View(self.quorum_id, self.step + 1, lineage, healed(self.members), self.reason)
