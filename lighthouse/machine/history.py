"""What a job remembers: its decisions, its head, and the members that may hold a newer state. PURE.

All of it is bounded, and none of it survives the lighthouse. A job without a past learns it from
the replica groups that join (`settle`; R5 of `rules.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from lighthouse.machine.members import Members, MemberState
from lighthouse.machine.rules import Position
from lighthouse.wire.messages import Decision, InDoubt, next_lineage

REMEMBERED_DECISIONS = 1_024


class History:
    """The decisions and commits that this lighthouse has seen in one job. One owner.

    Attributes:
        head: position of the last quorum or commit; None: no quorum was formed yet.
        finished: the last members that left said that the training is complete, and no quorum
            has formed since.
        missed: replica_ids that may hold a newer state than any member (R5).
        commits, discards: how many steps were committed, and how many discarded after work.
    """

    def __init__(self, missed: tuple[str, ...]) -> None:
        self.head: Position | None = None
        self.finished = False
        self.missed = set(missed)
        self.commits = 0
        self.discards = 0
        self._decisions: OrderedDict[tuple[int, int], Decision] = OrderedDict()
        self._lineages: OrderedDict[str, bytes] = OrderedDict()

    def decision(self, quorum_id: int, step: int) -> Decision | None:
        """The decision on a step; None if it is not (or no longer) known."""
        return self._decisions.get((quorum_id, step))

    def start(self, position: Position) -> None:
        """A quorum starts from `position`: every step that led there is committed."""
        if self.head != position:
            self._commit(position.lineage, b"")
        self.head = position
        self.finished = False
        self.missed.clear()

    def decided(self, decision: Decision, before: Position) -> Position:
        """Record the decision on a step that started from `before`; returns the new head."""
        self._decisions[(decision.quorum_id, decision.step)] = decision
        if len(self._decisions) > REMEMBERED_DECISIONS:
            self._decisions.popitem(last=False)
        if decision.committed:
            lineage = next_lineage(before.lineage, decision.quorum_id, decision.step)
            self._commit(lineage, decision.control)
            self.commits += 1
            self.head = Position(before.step + 1, lineage)
        else:
            self.head = before
        return self.head

    def _commit(self, lineage: str, control: bytes) -> None:
        self._lineages[lineage] = control
        if len(self._lineages) > REMEMBERED_DECISIONS:
            self._lineages.popitem(last=False)

    def settle(self, members: Members) -> bool:
        """Settle every step in doubt, now that a quorum can form; True if a position changed.

        What this lighthouse remembers decides. A restarted one remembers nothing and asks the
        members. If one of them holds the committed state, the step was committed. If all members
        of that quorum are here and in doubt, all had voted yes, and committing loses nothing.
        Otherwise the step is discarded: no member has acted on it.
        """
        all_members = members.by_id.values()
        unsettled = [m for m in all_members if m.doubt is not None and not m.settle]
        if not unsettled:
            return False
        held = {m.position.lineage for m in all_members}
        doubts = Counter(m.doubt for m in unsettled)
        changed = False
        for member in unsettled:
            doubt = member.doubt
            assert doubt is not None
            if self._was_committed(member, doubt, members, held, doubts[doubt]):
                member.settle = "commit"
                member.control = self._lineages.get(doubt.lineage_if_committed, b"")
                member.position = Position(doubt.step + 1, doubt.lineage_if_committed)
                changed = True
            else:
                member.settle = "discard"
        return changed

    def unsettle(self, members: Members) -> None:
        """Undo `settle`, since no quorum formed after all: a later member may know more."""
        for member in members.by_id.values():
            if member.settle and member.doubt is not None:
                member.settle, member.control = "", b""
                member.position = Position(member.join.step, member.join.lineage)

    def _was_committed(
        self, member: MemberState, doubt: InDoubt, members: Members, held: set[str], doubters: int
    ) -> bool:
        lineage = doubt.lineage_if_committed
        if lineage in self._lineages or lineage in held:
            return True
        if self._lineages:
            return False
        last = member.join.last_members
        return bool(last) and doubters == len(last) and all(r in members.by_id for r in last)
