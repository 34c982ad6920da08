"""The simulated data plane: process groups, all-reduce, state transfer.

A group of a quorum is made once all its members configured it. An operation is done once all
members have entered it; members finish at different times, and one that leaves (crash, abort) before
all have finished breaks it for the rest: some get an error, others hang until they are aborted or
their timeout ends, as measured with Gloo. A sum is the set of what was contributed.

Hosts may be cut off from each other, in one direction or both. A connection needs both directions, so
no group with such a pair is made: the lower rank, which dials, misses the other. Or they connect, and
what is sent goes nowhere: each rank says of which others it hears nothing. An operation that is
under way waits until the cut is mended, or until its ends notice that nothing is confirmed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.sim.clock import Clock

if TYPE_CHECKING:
    from tests.sim.checker import Checker
    from tests.sim.process import Process


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one participant adds: its gradient, computed on `state`; None of it when healing."""

    replica_id: str
    state: int
    batch: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The result of an all-reduce, equal on all members that finished."""

    quorum_id: int
    sequence: int
    step: int
    parts: frozenset[Contribution]


@dataclass(slots=True)
class Operation:
    entries: dict[str, tuple[int, Contribution | None]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    total: Sum | None = None
    broken: bool = False
    under_way: bool = False


@dataclass(slots=True)
class Group:
    quorum_id: int
    members: tuple[str, ...]
    joined: dict[str, Process] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    made: bool = False
    sequence: dict[str, int] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)


class Plane:
    """All process groups of one job."""

    def __init__(self, clock: Clock, rng: random.Random, checker: Checker) -> None:
        self._clock = clock
        self._rng = rng
        self._checker = checker
        self._groups: dict[int, Group] = {}
        self.step_s = 0.01
        self.connect_s = 0.5
        self.cuts: set[tuple[str, str]] = set()  # (from, to): slots, as hosts
        self.swallowed: set[tuple[str, str]] = set()  # the same; connections are accepted

    # ------------------------------------------------------------------ cuts

    def apart(self, one: str, other: str) -> bool:
        """Whether the hosts of two processes (or a process and itself) can't connect."""
        if not self.cuts:
            return False
        a, b = one.partition(":")[0], other.partition(":")[0]
        return (a, b) in self.cuts or (b, a) in self.cuts

    def missed(self, replica_id: str, members: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `members` to which `replica_id` has no connection."""
        return tuple(m for m in members if m != replica_id and self.apart(replica_id, m))

    def mend(self) -> None:
        """All cuts end: what waited goes on."""
        self.cuts.clear()
        self.swallowed.clear()
        for group in self._groups.values():
            for sequence, operation in group.operations.items():
                complete = len(operation.entries) == len(group.members)
                if complete and not operation.under_way and not operation.broken:
                    self._deliver(group, sequence, operation)

    # ------------------------------------------------------------------ groups

    def configure(self, process: Process, quorum_id: int, members: tuple[str, ...]) -> None:
        """`process` wants to be in the group; it hears through `process.group_made`."""
        group = self._groups.get(quorum_id)
        if group is None:
            group = self._groups[quorum_id] = Group(quorum_id, members)
        self._checker.same_members(quorum_id, group.members, members)
        group.joined[process.replica_id] = process
        mine = members.index(process.replica_id)
        missed = self.missed(process.replica_id, members[mine + 1 :])
        if missed:
            delay_s = self._rng.choice((0.001, self.connect_s))  # refused, or dropped
            text = f"can't connect to {missed}"
            self._clock.after(delay_s, process.group_made, quorum_id, text, missed)
        cut = self.cuts and any(self.missed(member, members) for member in members)
        complete = len(group.joined) == len(members)
        cut = cut or (complete and any(self.unheard(group, member) for member in members))
        self._clock.after(self.connect_s, self._tell_silence, group, process)
        if not cut and not group.left and complete:
            group.made = True
            for member in group.joined.values():
                self._clock.after(self._rng.random() * 0.01, member.group_made, quorum_id, "")

    def unheard(self, group: Group, replica_id: str) -> set[str]:
        """Members of which this one hears nothing: the lower rank speaks first."""
        members, mine = group.members, group.members.index(replica_id)
        found = set(members).difference(group.joined)
        for rank, other in enumerate(members):
            ways = (
                [(other, replica_id)] if rank < mine else [(replica_id, other), (other, replica_id)]
            )
            slots = [(a.partition(":")[0], b.partition(":")[0]) for a, b in ways]
            if rank != mine and self.swallowed.intersection(slots):
                found.add(other)
        return found

    def _tell_silence(self, group: Group, process: Process) -> None:
        if not group.made and process.connects(group.quorum_id):
            silent = sorted(self.unheard(group, process.replica_id))
            process.hears_nothing(group.quorum_id, tuple(silent))
            self._clock.after(self.connect_s / 2, self._tell_silence, group, process)

    def leave(self, replica_id: str, quorum_id: int) -> None:
        """`replica_id` aborted the group or died."""
        group = self._groups.get(quorum_id)
        if group is None or replica_id in group.left or replica_id not in group.members:
            return
        group.left.add(replica_id)
        if not group.made:
            for process in group.joined.values():  # connection refused, for some
                if process.replica_id != replica_id and self._rng.random() < 0.3:
                    delay_s = self._rng.random() * 0.05
                    self._clock.after(delay_s, process.group_made, quorum_id, "peer is gone")
        for sequence, operation in group.operations.items():
            if len(operation.finished) < len(group.members):
                self._break(group, sequence, operation)

    def _break(self, group: Group, sequence: int, operation: Operation) -> None:
        operation.broken = True
        for member in operation.entries:
            if member not in operation.finished and self._rng.random() < 0.5:
                process = group.joined[member]
                delay_s = self._rng.random() * 0.04
                self._clock.after(delay_s, process.reduced, group.quorum_id, sequence, None)

    def enter(self, process: Process, quorum_id: int, step: int, part: Contribution | None) -> int:
        """Start the next operation of this member; the answer comes through `process.reduced`."""
        group = self._groups[quorum_id]
        mine = process.replica_id
        assert group.made and mine in group.joined
        sequence = group.sequence.get(mine, 0)
        group.sequence[mine] = sequence + 1
        operation = group.operations.setdefault(sequence, Operation())
        operation.entries[mine] = (step, part)
        if group.left:
            self._break(group, sequence, operation)
        elif len(operation.entries) == len(group.members):
            self._meet(group, sequence, operation)
        return sequence

    def _meet(self, group: Group, sequence: int, operation: Operation) -> None:
        steps = {step for step, _ in operation.entries.values()}
        self._checker.require(len(steps) == 1, f"mismatched collective: steps {steps}")
        parts = frozenset(part for _, part in operation.entries.values() if part is not None)
        operation.total = Sum(group.quorum_id, sequence, steps.pop(), parts)
        self._checker.reduced(operation.total)
        group.operations.pop(sequence - 3, None)
        ends = [m for m in group.members if self.cuts and self.missed(m, group.members)]
        for member in ends:
            process = group.joined[member]
            self._clock.after(2 * self.connect_s, self._notice, group, sequence, operation, process)
        if not ends:
            self._deliver(group, sequence, operation)

    def _notice(self, group: Group, sequence: int, operation: Operation, process: Process) -> None:
        """Nothing that this member has sent was confirmed."""
        if not operation.under_way:
            missed = self.missed(process.replica_id, group.members)
            process.noticed(group.quorum_id, sequence, missed)

    def _deliver(self, group: Group, sequence: int, operation: Operation) -> None:
        operation.under_way = True
        base_s = self._rng.random() * self.step_s
        for member in group.members:
            delay_s = base_s + self._rng.random() * self.step_s
            self._clock.after(delay_s, self._finish, group, sequence, operation, member)

    def _finish(self, group: Group, sequence: int, operation: Operation, member: str) -> None:
        if operation.broken or member in group.left:
            return
        operation.finished.add(member)
        process = group.joined[member]
        process.reduced(group.quorum_id, sequence, operation.total)
