"""Watches what a job's processes do and say; knows nothing of how the machines work.

Promises (numbers of docs/protocol.md, "What is promised"):
S1  All that configure a quorum see one member list; a process's and a term's ids only grow.
S2  At most one quorum of a job is live: a step is decided before the next quorum forms, and no
    later decision is made under an earlier id. Of one parent state one child is committed: a second one
    (a fork) only by a quorum at whose birth every living process that holds the first child was out of
    the lighthouse's reach, or evicted.
    So no two disjoint quorums commit a step side by side: every process that could hold the newer state was
    lost, not ignored.
S3  Equal (step, lineage) is equal state.
S4  A sum holds exactly the contributions of the members that the quorum does not count as healing (of all, where
    they heal first), each computed on the quorum's own state.
S5  What is applied was reduced under the quorum_id and step that its lineage names.
S6  A process that applied a step keeps it until it heals; a process told "discard" after a yes has no living
    peer that was told "commit", but where the lighthouse was started again, and could not reach that peer.
    No step is committed against a no, but of a process that was cut off or expelled, or has left, and by F5 by a
    lighthouse that was started again, where another member is away.

What is excused rests on a sentence of that page, each time:
- a fork past a holder out of reach (`_fork`), or whose messages to the lighthouse are lost (`Cluster._unreachable`): "if its
  only holder is away for longer than the join timeout, the job goes on without it";
- past a holder that is back after a quorum has gone back behind it, and has committed nothing (`_goes_back`): "the holder
  heals when it is back, also if nothing was committed meanwhile";
- two lighthouses, at the first step (`_fork`): "groups that begin at step 0 do not wait for all";
- two lighthouses, past a holder whose name had an earlier process, by a quorum for which all names were there or known to be
  dead (`_fork`): "a name whose process is known to be dead is not waited for, although it may be started again at another
  lighthouse, from another checkpoint";
- a no in a quorum that the lighthouse does not know (`_unanimous`), or an answer that it has lost with its memory (`_told`):
  F5 of "A step in doubt";
- a lighthouse without that memory tells a member to drop a step that a later quorum rests on, and to heal (`discarded`):
  "else: discard";
- "Per-group commit" promises neither S2 nor S6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lighthouse.wire.messages import (
    EACH,
    ON_LAST,
    TORN,
    Decision,
    Expelled,
    Member,
    Quorum,
    Refused,
    Reply,
    name_of,
    next_lineage,
)

if TYPE_CHECKING:
    from ft_core.replica.status import Outcome
    from tests.sim.plane import Sum

Position = tuple[int, str]
ID_BITS = 64


def key_of(nonce: int, quorum_id: int) -> int:
    """One number for a quorum of any lighthouse: two terms may give one quorum_id to two quorums."""
    return nonce << ID_BITS | quorum_id


def id_of(key: int) -> int:
    """The quorum_id of `key_of`."""
    return key & ((1 << ID_BITS) - 1)


class Violation(AssertionError):
    """A promise is broken."""


def state_after(state: int, total: Sum, holders: tuple[str, ...] = ()) -> int:
    """The model after one optimizer step: a hash of all that went into it. `holders`: of shares of the
    data, from then on."""
    parts = sorted((p.replica_id, p.state, p.batch) for p in total.parts)
    text = repr((state, parts, holders)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(slots=True)
class Birth:
    """A quorum as the lighthouse announced it. `life`: the lighthouse's; no other one counts its
    votes. `rests_on`: members of the lists of which its first commit needs half each. `roll`: all names were
    there, or known to be dead."""

    members: tuple[str, ...]
    reachable: frozenset[str]
    number: int
    life: int
    start: Position | None = None  # None: no process was told of it
    rests_on: frozenset[str] = frozenset()
    roll: bool = False


@dataclass(slots=True)
class Checker:
    """One job's watcher. `unreachable()` names the living processes that the lighthouse cannot
    have heard of in time (partitioned, paused, disconnected within the join timeout); `living()` all that
    live; `cut_since(t)` those whose messages may have been lost with a connection after t; `life()` counts
    the lighthouse's starts.
    """

    now: Callable[[], float]
    unreachable: Callable[[], frozenset[str]]
    living: Callable[[], frozenset[str]]
    cut_since: Callable[[float], frozenset[str]]
    life: Callable[[], int]
    group_commit: bool = False
    lighthouses: int = 1
    heals_first: bool = False
    births: dict[int, Birth] = field(default_factory=dict)
    lists: dict[int, tuple[str, ...]] = field(default_factory=dict)
    healing: dict[int, frozenset[str]] = field(default_factory=dict)
    last_ids: dict[int, int] = field(default_factory=dict)  # by the term's nonce
    ids: dict[str, int] = field(default_factory=dict)
    states: dict[Position, int] = field(default_factory=dict)
    at: dict[str, Position] = field(default_factory=dict)
    children: dict[Position, dict[Position, int]] = field(default_factory=dict)
    holders: dict[Position, set[str]] = field(default_factory=dict)
    noes: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    yes: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    settled: set[tuple[int, int]] = field(default_factory=set)  # committed by F5
    ballots: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    told: dict[tuple[int, int], dict[str, bool]] = field(default_factory=dict)
    controls: dict[tuple[int, int], bytes] = field(default_factory=dict)
    commit_times: dict[str, list[float]] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)
    commits: int = 0
    discards: int = 0
    heals: int = 0
    forks: int = 0
    ended_names: set[str] = field(default_factory=set)
    expelled: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)  # slower than the timeouts allow
    # A bit of its state, which nobody has noticed yet.
    flipped: set[str] = field(default_factory=set)

    @property
    def newest(self) -> Birth:
        """The quorum that was formed last."""
        return self.births[next(reversed(self.births))]

    def require(self, ok: bool, what: str) -> None:
        if not ok:
            raise Violation(f"at {self.now():.3f} s: {what}")

    # ------------------------------------------------------------------ what the lighthouse says

    def announced(self, nonce: int, quorum_id: int, members: tuple[str, ...]) -> None:
        """A lighthouse formed a quorum."""
        last = self.last_ids.get(nonce, 0)
        self.require(quorum_id > last, f"S1: quorum {quorum_id} after {last}")
        self.last_ids[nonce] = quorum_id
        reachable = self.living() - self.unreachable() - self.evicted
        birth = Birth(members, reachable, len(self.births), self.life())
        self.births[key_of(nonce, quorum_id)] = birth

    def starts(self, quorum: Quorum) -> None:
        """A lighthouse tells members of a quorum at which position it starts (or is by now)."""
        birth = self.births[key_of(quorum.nonce, quorum.quorum_id)]
        birth.start = birth.start or (quorum.step, quorum.lineage)
        lists = quorum.bases
        if quorum.rests == ON_LAST:
            lists = (self.births[key_of(quorum.nonce, quorum.base_id)].members,)
        birth.rests_on |= frozenset().union(*lists)
        birth.roll = birth.roll or quorum.rests == EACH

    def evicts(self, replica_id: str) -> None:
        """The lighthouse parts with a member that did not vote in time: it waits for it no more."""
        self.evicted.add(replica_id)

    def leaves(self, replica_id: str) -> None:
        """A process gives up its place in its quorum, and its vote with it, also if it is back later."""
        self.expelled.add(replica_id)
        for noes in self.noes.values():
            noes.pop(replica_id, None)

    def heard(self, replica_id: str, message: Reply) -> None:
        """A process received `message`."""
        if isinstance(message, Refused):
            held = "no state is held by" not in message.reason
            self.require(held, f"S3: {replica_id} is refused: {message.reason}")
        if isinstance(message, Expelled):
            # Memory fails only where a fault says so, and each process has updated its state. A group's
            # leader says `differs`, too, where a rank has given up its state.
            accused = message.differs and "its peers" in message.reason
            if accused and replica_id in self.flipped:
                self.flipped.remove(replica_id)
                accused = False
            self.require(not accused, f"S3: {replica_id} is expelled: {message.reason}")
            self.expelled.add(replica_id)
        if isinstance(message, Decision) and message.next_quorum is not None:
            message = message.next_quorum
        if isinstance(message, Quorum):
            birth = self.births.get(key_of(message.nonce, message.quorum_id))
            self.require(birth is not None, f"S1: quorum {message.quorum_id} was never announced")

    # ------------------------------------------------------------------ what processes do

    def born(self, replica_id: str, position: Position, state: int) -> None:
        self._holds(replica_id, position, state)

    def configured(self, replica_id: str, quorum_id: int, members: tuple[Member, ...]) -> None:
        """Here and below, `quorum_id` is a `key_of`."""
        before, own = self.ids.get(replica_id, 0), id_of(quorum_id)
        self.require(own > before, f"S1: {replica_id} in {own} after {before}")
        self.ids[replica_id] = own
        self.evicted.discard(replica_id)
        self.expelled.discard(replica_id)
        names = tuple(m.replica_id for m in members)
        self.same_members(quorum_id, self.births[quorum_id].members, names)
        behind = frozenset(m.replica_id for m in members if m.healing)
        known = self.healing.setdefault(quorum_id, behind)
        self.require(known == behind, f"S1: quorum {quorum_id} heals {known} or {behind}")
        self.require(len(behind) < len(names), f"S3: no member of {quorum_id} holds its state")

    def same_members(self, quorum_id: int, one: tuple[str, ...], two: tuple[str, ...]) -> None:
        self.require(one == two, f"S1: quorum {quorum_id} is {one} and {two}")

    def reduced(self, total: Sum) -> None:
        """All members of a group have met."""
        birth = self.births[total.quorum_id]
        contributors = [part.replica_id for part in total.parts]
        expected = set(birth.members)
        first = total.step == self._first_step(total.quorum_id, total.step)
        if first and not self.heals_first:
            expected -= self.healing[total.quorum_id]
        self.require(
            set(contributors) == expected,
            f"S4: {contributors} contributed, {sorted(expected)} should have",
        )
        bases = {part.state for part in total.parts}
        self.require(len(bases) == 1, f"S4: gradients of one sum come from states {bases}")

    def _first_step(self, quorum_id: int, step: int) -> int:
        return self.first_steps.setdefault(quorum_id, step)

    def votes_no(self, replica_id: str, quorum_id: int, step: int) -> None:
        self.noes.setdefault((quorum_id, step), {})[replica_id] = self.now()

    def votes_yes(self, replica_id: str, quorum_id: int, step: int) -> None:
        self.yes.setdefault((quorum_id, step), set()).add(replica_id)
        self.ballots.setdefault((quorum_id, step), (self.now(), self.life()))

    def committed(
        self,
        replica_id: str,
        before: Position,
        after: Position,
        state: int,
        total: Sum,
        outcome: Outcome,
        now: float,
    ) -> None:
        """A process applied a step."""
        quorum_id, step = total.quorum_id, total.step
        self.require(self.at[replica_id] == before, f"S6: {replica_id} lost {self.at[replica_id]}")
        nonce, number = quorum_id >> ID_BITS, id_of(quorum_id)
        expected = (before[0] + 1, next_lineage(before[1], nonce, number, step))
        self.require(
            step == before[0] and after == expected,
            f"S5: {replica_id} applied the sum of {quorum_id}/{step}, now at {after}",
        )
        self.require(
            {p.state for p in total.parts} == {self.states[before]},
            f"S4: {replica_id} applied gradients of another state",
        )
        self.require(
            outcome.participants == len(total.parts),
            f"S4: {outcome.participants} participants, {len(total.parts)} parts",
        )
        self.require(replica_id in self.yes.get((quorum_id, step), ()), "committed without a yes")
        self._unanimous(quorum_id, step)
        self._fork(replica_id, quorum_id, before, after)
        self._holds(replica_id, after, state)
        self._told(replica_id, quorum_id, step, committed=True)
        if outcome.control or outcome.reason not in ("settled on return", "own vote"):
            known = self.controls.setdefault((quorum_id, step), outcome.control)
            self.require(known == outcome.control, f"control of {quorum_id}/{step} differs")
        self.commits += 1
        self.commit_times.setdefault(replica_id, []).append(now)

    def discarded(
        self, replica_id: str, quorum_id: int, step: int, ok: bool, position: Position, heals: bool
    ) -> None:
        """A process was told that its step is dropped (`ok`: it had voted yes), and maybe to heal."""
        self.discards += 1
        self.require(self.at[replica_id] == position, f"S6: {replica_id} moved by a discard")
        forgotten = self.life() != self.births[quorum_id].life
        if ok and not (heals and forgotten):
            self._told(replica_id, quorum_id, step, committed=False)

    def healed(self, replica_id: str, position: Position, state: int) -> None:
        self.heals += 1
        self._holds(replica_id, position, state)

    def spoiled(self, replica_id: str, position: Position, state: int) -> None:
        """A process has begun to overwrite its state by one that it fetches."""
        if position[1].startswith(TORN):
            self.states.pop(position, None)  # the only position that names no state
        self._holds(replica_id, position, state)

    def ended(self, replica_id: str) -> None:
        """The process is no more."""
        self.ended_names.add(name_of(replica_id))
        position = self.at.pop(replica_id, None)
        if position is not None:
            self.holders[position].discard(replica_id)

    # ------------------------------------------------------------------ pieces

    def _holds(self, replica_id: str, position: Position, state: int) -> None:
        known = self.states.setdefault(position, state)
        self.require(known == state, f"S3: {replica_id} has another state at {position}")
        old = self.at.get(replica_id)
        if old is not None:
            self.holders[old].discard(replica_id)
        self.at[replica_id] = position
        self.holders.setdefault(position, set()).add(replica_id)

    def _fork(self, replica_id: str, quorum_id: int, before: Position, after: Position) -> None:
        """S2: a second child of `before` needs a quorum born while all of the first was lost."""
        children = self.children.setdefault(before, {})
        if after in children:
            return
        for other, other_id in children.items():
            self.forks += 1
            older, newer = sorted(
                ((other_id, other), (quorum_id, after)),
                key=lambda child: self.births[child[0]].number,
            )
            if self.group_commit:
                continue
            birth = self._goes_back(self.births[older[0]], before) or self.births[newer[0]]
            ignored = self._descendants(older[1]) & self.living()
            if self.lighthouses == 1:
                ignored &= birth.reachable
            elif before[0] == 0:  # being out of reach is no excuse; at step 0 none is needed
                ignored.clear()
            elif birth.roll:
                ignored = {r for r in ignored if name_of(r) not in self.ended_names}
            self.require(
                not ignored,
                f"S2: {before} has children of quorums {older[0]} and {newer[0]}, "
                f"though {sorted(ignored)} held the former",
            )
        children[after] = quorum_id

    def _goes_back(self, older: Birth, before: Position) -> Birth | None:
        """The first quorum after `older` that starts at `before` again. It gave up what came after, and
        the holders of that heal when they are back, also if this quorum commits nothing."""
        later = (b for b in self.births.values() if b.number > older.number and b.start == before)
        return next(later, None)

    def _unanimous(self, quorum_id: int, step: int) -> None:
        """S6: no step is committed against a member's no, unless that had been removed. A lighthouse that
        does not know the quorum counts no vote in it, also if the no has come to itself; it commits
        what may have been committed while a member of the quorum or of its bases is away, or has given
        up its state (F5)."""
        if self.group_commit or self.lighthouses > 1:
            return
        birth = self.births[quorum_id]
        torn = {r for r, (_, lineage) in self.at.items() if lineage.startswith(TORN)}
        some_away = not birth.rests_on.union(birth.members) <= set(self.newest.members) - torn
        if self.life() != birth.life and some_away:
            self.settled.add((quorum_id, step))  # those that were away hear of it later
        forgotten = (quorum_id, step) in self.settled
        for replica_id, voted_at in self.noes.get((quorum_id, step), {}).items():
            removed = replica_id in self.expelled or replica_id in self.cut_since(voted_at)
            against = replica_id in self.living() and not removed and not forgotten
            self.require(not against, f"S6: {quorum_id}/{step} committed against {replica_id}")

    def _descendants(self, position: Position) -> set[str]:
        """Processes whose state comes from `position`."""
        found, todo = set(), [position]
        while todo:
            here = todo.pop()
            found |= self.holders.get(here, set())
            todo += list(self.children.get(here, ()))
        return found

    def _told(self, replica_id: str, quorum_id: int, step: int, *, committed: bool) -> None:
        """S6: all that voted yes on one (quorum_id, step) hear the same."""
        told = self.told.setdefault((quorum_id, step), {})
        told[replica_id] = committed
        if self.group_commit or self.lighthouses > 1 or len(set(told.values())) == 1:
            return
        voted_at, life = self.ballots[(quorum_id, step)]
        # A lighthouse that lost its memory meanwhile settles by the members that it can reach.
        excused = (
            self.cut_since(voted_at) | self.unreachable() if self.life() != life else frozenset()
        )
        living = self.living() - excused
        yes = sorted(r for r, c in told.items() if c and r in living)
        no = sorted(r for r, c in told.items() if not c and r in living)
        self.require(
            not (yes and no), f"S6: {quorum_id}/{step}: commit for {yes}, discard for {no}"
        )
