"""What a job remembers: decisions, the head, whom it misses, who keeps failing to heal. PURE.

All of it is bounded and none of it survives the lighthouse; a job without a past learns it from
those who join (`settle`, R5 of `quorum.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from lighthouse.machine.members import Members, MemberState
from lighthouse.machine.rules import Position
from lighthouse.wire.messages import Decision, InDoubt, next_lineage

REMEMBERED_DECISIONS = 1_024
REMEMBERED_FAILURES = 1_024
MAX_DOUBLINGS = 16


class History:
    """Decisions and commits that this lighthouse has seen.

    `head`: position of the last quorum or commit; None: no quorum was formed yet.
    `finished`: the last who left said that the training is at its end, and no quorum followed.
    `missed`: replica_ids that may hold a newer state than anyone here (R5).
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
        return self._decisions.get((quorum_id, step))

    def start(self, position: Position) -> None:
        """A quorum starts from `position`: whatever led there is committed."""
        if self.head != position:
            self._commit(position.lineage, b"")
        self.head = position
        self.finished = False
        self.missed.clear()

    def decided(self, decision: Decision, before: Position) -> Position:
        """Book the decision on a step that started from `before`; the position after it."""
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

    def settle(self, seats: Members) -> bool:
        """Settle every step in doubt, now that a quorum can form; True if a position changed.

        What this lighthouse remembers decides. One without memory (it was restarted) asks those
        who are here: somebody holds the committed state, so it was committed; or all members of
        that quorum are here and in doubt, so all had voted yes, and committing loses nothing.
        Otherwise the step is dropped: nobody here has acted on it.
        """
        unsettled = [s for s in seats if s.doubt is not None and not s.settle]
        if not unsettled:
            return False
        held = {seat.position.lineage for seat in seats}
        doubts = Counter(s.doubt for s in unsettled)
        changed = False
        for seat in unsettled:
            doubt = seat.doubt
            assert doubt is not None
            if self._was_committed(seat, doubt, seats, held, doubts[doubt]):
                seat.settle = "commit"
                seat.control = self._lineages.get(doubt.lineage_if_committed, b"")
                seat.position = Position(doubt.step + 1, doubt.lineage_if_committed)
                changed = True
            else:
                seat.settle = "discard"
        return changed

    def unsettle(self, seats: Members) -> None:
        """No quorum formed after all: whoever comes next may know more."""
        for seat in seats:
            if seat.settle and seat.doubt is not None:
                seat.settle, seat.control = "", b""
                seat.position = Position(seat.join.step, seat.join.lineage)

    def _was_committed(
        self, seat: MemberState, doubt: InDoubt, seats: Members, held: set[str], doubters: int
    ) -> bool:
        lineage = doubt.lineage_if_committed
        if lineage in self._lineages or lineage in held:
            return True
        if self._lineages:
            return False
        last = seat.join.last_members
        return bool(last) and doubters == len(last) and all(r in seats for r in last)


class Patience:
    """Growing pauses for replica groups that hang or fail to heal: each time costs the others.

    By name, since a process that dies healing comes back under a new replica_id.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, name: str, cost_s: float, now: float) -> None:
        """`name` has cost its peers a step that began `cost_s` ago.

        The pause is at least twice as long as what it cost, and doubles from time to time.
        """
        count = self._failures.pop(name, (0, 0.0))[0] + 1
        pause_s = max(self._shortest_s, 2 * cost_s) * 2 ** min(count - 1, MAX_DOUBLINGS)
        self._failures[name] = (count, now + min(pause_s, self._longest_s))
        if len(self._failures) > REMEMBERED_FAILURES:
            self._failures.popitem(last=False)

    def succeeded(self, name: str) -> None:
        """`name` has its part in a commit."""
        self._failures.pop(name, None)

    def __bool__(self) -> bool:
        """Whether anybody has failed lately."""
        return bool(self._failures)

    def allows(self, name: str, now: float) -> bool:
        """Whether `name` may try again."""
        return name not in self._failures or now >= self._failures[name][1]
