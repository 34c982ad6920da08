"""What a job knows of replica groups: its members, and its history. PURE.

A member of a job is connected and has joined. It is in the live quorum, or it waits for the next
one.

The history: decisions, the head, and the members that may hold a newer state. All of it is bounded,
and none of it survives the lighthouse. A job without a past learns it from the replica groups that
join (`takeover`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lighthouse.machine import fence
from lighthouse.machine.ballot import Ballot, Comparison, compare
from lighthouse.machine.rules import Choice, Position, founders
from lighthouse.wire.messages import (
    NO_QUORUM,
    NO_TERM,
    NOT_HELD,
    OTHERS_FINISHED,
    SETTLED,
    TORN,
    DeathNotice,
    Decision,
    Heartbeat,
    InDoubt,
    Join,
    Leave,
    Member,
    Peer,
    Term,
    Vote,
    epoch_of,
    is_replica_id,
    name_of,
    next_lineage,
)


@dataclass(frozen=True, slots=True)
class JobRules:
    """What a member asks of its job. `group_commit` is equal in all members."""

    min_replicas: int = 1
    expected_replicas: int = 0
    group_commit: bool = False


@dataclass(slots=True)
class MemberState:
    """A replica group that has joined a job.

    Attributes:
        join: its newest `Join`.
        peer: the connection that reaches it.
        position: the state that it holds.
        arrival: its number in the order of arrival; kept when it joins again.
        doubt: its step in doubt, until it votes again.
        settle, control: what became of that step ("commit", "discard"; empty: not settled), and
            the control bytes of its decision.
        base_id: the newest quorum whose member list it certainly holds.
        last_reason: why it waits, as it was told last; empty: it was not told.
        was_member: it has been in a quorum of this job.
        genesis, held: see `Join`; of the state that it holds now.
        peers: how many members its last quorum had.
        too_late: it was here, with less than the last step, when the first of the others said that the
            training has finished, so it does not belong to the next one.
    """

    join: Join
    peer: Peer
    position: Position
    arrival: int
    doubt: InDoubt | None
    settle: str = ""
    control: bytes = b""
    base_id: int = NO_QUORUM
    last_reason: str = ""
    was_member: bool = False
    genesis: int = 0
    held: int = NO_QUORUM
    peers: int = 0
    too_late: bool = False
    rules: JobRules = field(init=False)

    def __post_init__(self) -> None:
        join = self.join
        self.rules = JobRules(join.min_replicas, join.expected_replicas, join.group_commit)

    @property
    def replica_id(self) -> str:
        """`name:incarnation`, new at every start."""
        return self.join.replica_id

    @property
    def name(self) -> str:
        """Of the replica group; the same after a restart."""
        return self.join.name

    def reports(self, branch: int) -> bool:
        """Whether its last quorum was of the branch of that genesis (0: of any), as far as it says."""
        basis = self.join.basis
        return basis is None or branch in (0, basis.genesis)

    def outdates(self, join: Join) -> bool:
        """Whether its process has voted in a newer quorum than `join` knows, which came late."""
        return join.quorum_id < self.base_id

    def entry(self, *, healing: bool) -> Member:
        """As it is listed in a quorum."""
        addresses = self.join.addresses
        return Member(self.replica_id, len(addresses), addresses, healing)


class Members:
    """All members of a job by replica_id, by name and by connection. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self.by_id: dict[str, MemberState] = {}
        """By replica_id. Read only: `put` and `take` change it."""
        self.were_members = 0
        """How many of them have been in a quorum of this job. Read only."""
        self.rules = JobRules()
        """What holds for the job: the strictest that a member asks for. Read only."""
        self._rules: Counter[JobRules] = Counter()
        self._by_name: dict[str, str] = {}
        self._by_peer: dict[Peer, set[str]] = {}
        self._lost: OrderedDict[str, Peer] = OrderedDict()
        self._arrivals = 0

    def put(self, join: Join, peer: Peer) -> MemberState:
        """Add the sender of `join`, or replace what is known of it (its arrival number stays)."""
        old = self.take(join.replica_id)
        if old is None:
            self._arrivals += 1
        arrival = self._arrivals if old is None else old.arrival
        member = MemberState(join, peer, Position(join.step, join.lineage), arrival, join.in_doubt)
        member.genesis, member.held = join.genesis, join.held
        member.peers = len(join.last_members)
        member.too_late = old is not None and old.too_late
        assert join.name not in self._by_name, "two members of one name"
        self.by_id[join.replica_id] = member
        self._by_name[join.name] = join.replica_id
        self._by_peer.setdefault(peer, set()).add(join.replica_id)
        self._count_rules(member, 1)
        if join.quorum_id != NO_QUORUM:
            self.mark_was_member(member)
        return member

    def mark_was_member(self, member: MemberState) -> None:
        """`member` has been in a quorum. Idempotent."""
        self.were_members += not member.was_member
        member.was_member = True

    def take(self, replica_id: str) -> MemberState | None:
        """Remove a member and return it; None if there is none."""
        member = self.by_id.pop(replica_id, None)
        if member is not None:
            del self._by_name[member.name]
            self._forget_peer(member)
            self._count_rules(member, -1)
            self.were_members -= member.was_member
            self._lost[replica_id] = member.peer
            if len(self._lost) > REMEMBERED_DEAD:
                self._lost.popitem(last=False)
        return member

    def speaker(self, replica_id: str) -> Peer | None:
        """The connection that reaches, or has reached last, a member that is here or was; None: not known."""
        member = self.by_id.get(replica_id)
        return self._lost.get(replica_id) if member is None else member.peer

    def _count_rules(self, member: MemberState, by: int) -> None:
        """One more, or one less, asks for what `member` does. Not each step: see `rules`."""
        self._rules[member.rules] += by
        if not self._rules[member.rules]:
            del self._rules[member.rules]
        self.rules = JobRules(
            max((rules.min_replicas for rules in self._rules), default=1),
            max((rules.expected_replicas for rules in self._rules), default=0),
            any(rules.group_commit for rules in self._rules),
        )

    @property
    def names(self) -> Collection[str]:
        """Of all members."""
        return self._by_name.keys()

    def move(self, member: MemberState, peer: Peer) -> None:
        """From now on `peer` reaches `member`."""
        self._forget_peer(member)
        member.peer = peer
        self._by_peer.setdefault(peer, set()).add(member.replica_id)

    def of_peer(self, peer: Peer) -> list[str]:
        """replica_ids that are reached through `peer`, sorted."""
        return sorted(self._by_peer.get(peer, ()))

    def branch(self) -> int:
        """The genesis of the states that come first where two branches of the job meet (R2); 0: no quorum has held
        any that is here."""
        sizes: Counter[int] = Counter()
        for member in self.by_id.values():
            if member.held and not member.position.lineage.startswith(TORN):
                sizes[member.genesis] = max(sizes[member.genesis], member.peers)
        return max(
            sizes, key=lambda genesis: (founders(genesis), sizes[genesis], genesis), default=0
        )

    def holder(self, choice: Choice) -> MemberState:
        """One of those that hold the state of `choice`; where its origin differs, the newest."""
        holders = (self.by_id[r] for r in choice.members if r not in choice.healing)
        return max(holders, key=lambda member: member.held)

    def other_holder(self, name: str, replica_id: str) -> bool:
        """Whether a member other than `replica_id` has `name`."""
        return self._by_name.get(name, replica_id) != replica_id

    def _forget_peer(self, member: MemberState) -> None:
        ids = self._by_peer[member.peer]
        ids.discard(member.replica_id)
        if not ids:
            del self._by_peer[member.peer]

    def check(self) -> None:
        """Assert every invariant. O(members)."""
        count, were_members = len(self.by_id), 0
        assert len(self._by_name) == sum(map(len, self._by_peer.values())) == count
        for replica_id, member in self.by_id.items():
            assert member.join.replica_id == replica_id == self._by_name[member.join.name]
            assert replica_id in self._by_peer[member.peer]
            were_members += member.was_member
        assert self.were_members == were_members
        assert self._rules.total() == count
        if len(self._rules) < 2:
            assert all(member.rules in self._rules for member in self.by_id.values())
        else:
            assert self._rules == Counter(member.rules for member in self.by_id.values())


def update_positions(
    live: Ballot, voters: Mapping[str, MemberState], committed: bool, after: Position
) -> None:
    """The step of `live` is decided, and `after` is the quorum's position from now on."""
    held = live.quorum_id if committed else live.held
    for replica_id, member in voters.items():
        vote = live.votes[replica_id]
        if vote.ok or not (committed or live.is_behind(replica_id)):
            member.position, member.held, member.genesis = after, held, live.genesis
        elif vote.lineage.startswith(TORN):
            member.position = Position(0, vote.lineage)
        # else it is behind: still, or (per-group commit) from now on


def is_plausible(vote: Vote, live: Ballot, member: MemberState) -> bool:
    """A yes must come from the quorum's own state; a no tells which state its sender holds."""
    if vote.lineage == live.position.lineage:
        return True
    if vote.ok:
        return False
    return vote.lineage == member.position.lineage or vote.lineage.startswith(TORN)


# ---------------------------------------------------------------- history


REMEMBERED_DECISIONS = 1_024
REMEMBERED_DEAD = 16_384
NO_BALLOT: fence.Ballot = (NO_TERM.epoch, NO_TERM.nonce)
_NOTHING = (0, False, NO_QUORUM, 0)


class History:
    """The decisions and commits that this lighthouse has seen in one job. One owner.

    Attributes:
        head: position of the last quorum or commit of this term; None: no quorum was formed yet.
        finished: a member that left has said that the training is complete, and each quorum since had
            a member that was in one before: it makes steps that the other has not made.
        missed: before the first quorum of a term: members of the newest quorum that one of those
            here was in, which are not here and not known to be dead.
        bases: lists of members of each of which the next commit needs half (F2 of `fence.py`).
        each: members all of which must say yes to the next commit, but those that are dead; if it is
            not empty, `bases` do not count.
        dead: replica groups, by name, of which no process is here since the last one has died or
            left; True: one was declared dead. Read only: `died` and `joined` change it.
        different: why the state of members was not their peers', by replica_id, until they have
            joined without a state. Read only: `is_different` changes it.
        unproven: members that have healed, and no step was committed since: what they hold was
            compared with no other state.
        suspect: those of them that may have healed from a member whose state was not its peers'.
        torn: those of them that may have healed from a state while its member's loop changed it.
        commits, discards: how many steps were committed, and how many discarded after work.
    """

    def __init__(self, missed: tuple[str, ...], term: Term = NO_TERM) -> None:
        self.head: Position | None = None
        self.finished = False
        self.missed = set(missed)
        self._remembered = frozenset(missed)  # by the file of an earlier lighthouse
        self.bases: tuple[fence.Members, ...] = ()
        self.each: fence.Members = frozenset()
        self.committed = False  # a step in this term
        self.began: tuple[int, int] = (NO_QUORUM, 0)  # (held, step) of this term's first quorum
        self.dead: OrderedDict[str, bool] = OrderedDict()
        self._ballot: fence.Ballot = (term.epoch, term.nonce)
        self._dead_ids: OrderedDict[str, tuple[fence.Ballot, int]] = OrderedDict()
        self.different: OrderedDict[str, str] = OrderedDict()
        self._said: OrderedDict[str, tuple[int, bool, int, int]] = OrderedDict()
        self.unproven: set[str] = set()
        self.suspect: set[str] = set()
        self.torn: set[str] = set()
        self.commits = 0
        self.discards = 0
        # By (quorum_id, step): the lineage from which it started, too.
        self._decisions: OrderedDict[tuple[int, int], tuple[str, Decision]] = OrderedDict()
        self._lineages: OrderedDict[str, bytes] = OrderedDict()

    def decision(self, vote: Vote) -> Decision | None:
        """The decision on the step of `vote`; None if it is not (or no longer) known, or if the quorum is another
        lighthouse's, which may have the number of one of this lighthouse."""
        before, decision = self._decisions.get((vote.quorum_id, vote.step), ("", None))
        return None if vote.ok and vote.lineage != before else decision

    def _has_decided(self, doubt: InDoubt) -> bool:
        at = doubt.quorum_id, doubt.step
        before, _ = self._decisions.get(at, ("", None))
        return doubt.lineage_if_committed == next_lineage(before, self._ballot[1], *at)

    def start(self, position: Position, held: int, healing: frozenset[str] = frozenset()) -> None:
        """A quorum starts from `position`: every step that led there is committed."""
        self.unproven |= healing
        if self.head is None:
            self.began = (held, position.step)
        if self.head != position:
            self._commit(position.lineage, b"")
        self.head = position
        self.missed.clear()

    def finish(self, members: Members) -> None:
        """A member says that the training has finished. If it is the first, those that hold less than its
        last step came too late."""
        head = self.head
        if head is not None and not self.finished:
            for member in members.by_id.values():
                member.too_late = member.position.step < head.step
        self.finished = True

    def notes(self, choice: Choice, members: Members) -> str:
        """What is added to the reason of this quorum, which is about to start."""
        newest = 0 if self.head is None or self.finished else self.head.step
        lost = f"; step {newest} {NOT_HELD}" if choice.position.step < newest else ""
        self.finished &= any(members.by_id[r].was_member for r in choice.members)
        return f"; {OTHERS_FINISHED}" if self.finished else lost

    def decided(self, decision: Decision, live: Ballot) -> Position:
        """Record the decision on the step of `live`; returns the new head."""
        before = live.position
        self._decisions[(decision.quorum_id, decision.step)] = before.lineage, decision
        if len(self._decisions) > REMEMBERED_DECISIONS:
            self._decisions.popitem(last=False)
        if decision.committed:
            lineage = next_lineage(before.lineage, live.nonce, decision.quorum_id, decision.step)
            self._commit(lineage, decision.control)
            self.commits += 1
            self.committed = True
            self.unproven.clear()  # those that did not say yes are behind now, and heal again
            self.suspect.clear()
            self.torn.clear()
            self.head = Position(before.step + 1, lineage)
            if not live.is_base:
                live.is_base = True
                self.bases, self.each = (frozenset(live.names),), frozenset()
        else:
            self.head = before
        return self.head

    # ------------------------------------------------------------------ which members are dead

    def died(
        self,
        members: Members,
        replica_id: str,
        promised: Term = NO_TERM,
        quorum_id: int = NO_QUORUM,
        *,
        leave: Leave | None = None,
    ) -> None:
        """The process `replica_id` is dead, or has left: its state is gone with it.

        `promised`, `quorum_id`: see `DeathNotice`. `leave`: its own word; it may join again, and name an
        earlier quorum then: of a group's ranks not all have heard of the last one.
        """
        self.missed.discard(replica_id)
        ballot, seen = self._dead_ids.get(replica_id, (NO_BALLOT, NO_QUORUM))
        # Another word on the same death may say less: a person's says nothing of quorums.
        said = max(ballot, (promised.epoch, promised.nonce)), max(seen, quorum_id)
        self._dead_ids[replica_id] = said
        if leave is None:
            self._has_said(replica_id, promised, quorum_id)
        member = members.by_id.get(replica_id)
        name = member.name if member is not None else name_of(replica_id)
        lives = leave is not None and leave.comes_back  # the roll waits for its name
        if not (lives or members.other_holder(name, replica_id)):
            self._name_died(name)
        if len(self._dead_ids) > REMEMBERED_DEAD:
            self._dead_ids.popitem(last=False)

    def _name_died(self, name: str, *, declared: bool = False) -> None:
        self.dead[name] = declared or self.dead.get(name, False)
        if len(self.dead) > REMEMBERED_DEAD:
            self.dead.popitem(last=False)

    def ended(self, members: Members, word: Leave | DeathNotice) -> None:
        """`died`, by the word of the process or of its watcher."""
        leave = word if isinstance(word, Leave) else None
        self.died(members, word.replica_id, word.promised, word.quorum_id, leave=leave)

    def declare_dead(self, members: Members, group: str) -> None:
        """A replica group (by name), or one of its processes, is dead or will not come; it is not here."""
        if is_replica_id(group):
            self.died(members, group)
            return
        self._name_died(group, declared=True)
        for replica_id in [r for r in self.missed if name_of(r) == group]:
            self.died(members, replica_id)

    def joined(self, replica_id: str, name: str) -> None:
        """The process `replica_id` of `name` lives."""
        self.missed.discard(replica_id)
        self._dead_ids.pop(replica_id, None)
        self.dead.pop(name, None)

    def is_old(self, join: Join) -> bool:
        """Whether the sender of `join` has said something newer. Its promise, its last quorum, and how
        often it has left only grow."""
        return self._has_said(join.replica_id, join.promised, join.quorum_id, join.left)

    def leaves(self, leave: Leave) -> bool:
        """Note that its sender has left; False: it has joined since, or this is a repetition."""
        known = self._said.get(leave.replica_id, _NOTHING)
        if leave.left <= known[-1]:
            return False
        promised = leave.promised.epoch, leave.promised != NO_TERM, NO_QUORUM
        self._note(leave.replica_id, (*max(known[:3], promised), leave.left))
        return True

    def _has_said(self, replica_id: str, promised: Term, quorum_id: int, left: int = 0) -> bool:
        """Note what a process has said of itself; True if it had said more before."""
        said = promised.epoch, promised != NO_TERM, quorum_id, left
        if said < self._said.get(replica_id, said):
            return True
        self._note(replica_id, said)
        return False

    def _note(self, replica_id: str, said: tuple[int, bool, int, int]) -> None:
        self._said[replica_id] = said
        if len(self._said) > REMEMBERED_DEAD:
            self._said.popitem(last=False)

    def is_newer(self, join: Join, genesis: int) -> bool:
        """Whether the sender of `join` holds a newer state than the one with which this term has gone on, of
        which no commit is known: it must not be told to heal from that, so all start a new term."""
        if self.head is None or self.committed or join.genesis not in (0, genesis):
            return False
        earlier = join.held > 0 and epoch_of(join.quorum_id) < self._ballot[0]
        return (
            earlier and (join.held, join.step) > self.began and join.lineage not in self._lineages
        )

    def may_repeat(self, holder: MemberState) -> bool:
        """Whether another lighthouse has made the state of `holder` in a term as late as this one, so that
        its quorum_ids may be those that this term gives."""
        made_here = holder.position.lineage in self._lineages
        return holder.held > 0 and self._ballot[0] <= epoch_of(holder.held) and not made_here

    def is_dead(self, replica_id: str) -> bool:
        """Whether the state of `replica_id` is gone."""
        return replica_id in self._dead_ids or self.dead.get(name_of(replica_id), False)

    def others_healed_from(self, replica_id: str) -> None:
        """Its state is not its peers', and it discards it: others that have healed since the last commit may hold
        the same, also those that heal on in another quorum."""
        self.unproven.discard(replica_id)
        self.suspect = (self.suspect | self.unproven) - {replica_id}

    def compared(self, live: Ballot) -> Comparison:
        """What the votes of its living members say; see `compare`."""
        votes = {r: vote for r, vote in live.votes.items() if r in live.living}
        return compare(votes, live.unproven, self.suspect, self.torn, live.names)

    def heard(self, vote: Vote) -> None:
        """If its sender has changed what it served, all that have healed since the last commit may hold that."""
        if vote.torn:
            self.torn |= self.unproven - {vote.replica_id}

    def is_different(self, replica_id: str, why: str) -> None:
        """The state of `replica_id` is not its peers', which it is told."""
        if replica_id in self.torn:  # as are all that may have read the same; no other is suspect
            self.torn.discard(replica_id)
            self.unproven.discard(replica_id)
        else:
            self.others_healed_from(replica_id)
        self.different[replica_id] = why
        if len(self.different) > REMEMBERED_DECISIONS:
            self.different.popitem(last=False)

    # ------------------------------------------------------------------ which members suffice

    def _dead_of(self, lists: Collection[fence.Members]) -> dict[str, fence.Ballot]:
        """Those of `lists` that are dead, and what they had promised."""
        found = {}
        for replica_id in {r for members in lists for r in members}:
            if replica_id in self._dead_ids:
                found[replica_id] = self._dead_ids[replica_id][0]
            elif self.dead.get(name_of(replica_id), False):
                found[replica_id] = NO_BALLOT
        return found

    def suffice(self, here: Collection[str]) -> bool:
        """Whether a step that those of `here` say yes to is committed (F2)."""
        if self.each:
            dead = self._dead_of((self.each,))
            needed = {r for r in self.each if r not in dead or dead[r] > self._ballot}
            return bool(needed) and needed.issubset(here)
        return self.half_of(self.bases, here)

    def half_of(self, bases: Collection[fence.Members], here: Collection[str]) -> bool:
        """Whether those of `here` are half of each base, or all of it but the dead."""
        if all(base.issubset(here) for base in bases):
            return True  # the usual case
        dead = self._dead_of(bases)
        return all(fence.enough(here, base, self._ballot, dead, more=False) for base in bases)

    def lacking(self, here: Collection[str]) -> set[str]:
        """Members on which the next commit rests that are not here, and not known to be dead."""
        lists = (self.each, *self.bases) if self.each else self.bases
        return {r for members in lists for r in members if r not in here and not self.is_dead(r)}

    def reported(self, join: Join, here: Collection[str], *, missed: bool) -> None:
        """`join` says on which members its last quorum rests: they live, as far as is known. `missed`: they are
        waited for."""
        basis = join.basis
        lists = [join.last_members]
        if basis is not None and not basis.committed:
            lists += basis.bases
        for replica_id in (r for names in lists for r in names):
            if replica_id not in here and not self.is_dead(replica_id):
                self.dead.pop(name_of(replica_id), None)  # another process of that name lives
                if missed:
                    self.missed.add(replica_id)

    def takeover(self, members: Members, branch: int, *, complete: bool) -> fence.Takeover | None:
        """What this term, which had no quorum yet, goes on with (F3, F5), by the reports of those whose last quorum was
        of `branch` (`Members.branch`; 0: of any); None: it has to wait."""
        reporting = {r: m for r, m in members.by_id.items() if m.join.basis is not None}
        joins = {r: m.join for r, m in reporting.items() if m.reports(branch)}
        top = max((join.quorum_id for join in joins.values()), default=NO_QUORUM)
        latest = [join for join in joins.values() if join.quorum_id == top]
        if not reporting and self._remembered:  # else what they say is newer, or of another branch
            here, lists = members.by_id.keys(), (self._remembered,)
            dead = self._dead_of(lists)
            enough = fence.enough(here, self._remembered, self._ballot, dead, more=True)
            return fence.Takeover(lists, "", "either") if enough else None
        if not latest or any(quorum_id > top for _, quorum_id in self._dead_ids.values()):
            return None  # one that is dead has seen a newer quorum: all names are needed (F7)
        first = max(latest, key=lambda join: (len(join.last_members), join.last_members))
        record = _record(first)
        dead = self._dead_of((record.members, *record.bases))
        reports = {r: _promise(join) for r, join in joins.items()}
        obituaries = {
            r: (ballot, fence.Promise(NO_QUORUM, False, 0, "", NO_QUORUM))
            for r, ballot in dead.items()
        }
        return fence.takeover(self._ballot, reports, obituaries, record, complete=complete)

    def rest_on(self, bases: tuple[fence.Members, ...], each: Collection[str] = ()) -> None:
        """What the next commit needs."""
        self.bases, self.each = bases, frozenset(each)

    def new_term(self, members: Members, term: Term) -> None:
        """All must join again: any of those that have been in a quorum may hold the newest state."""
        self.head, self.committed = None, False
        self._ballot = term.epoch, term.nonce
        self.rest_on(())
        self.missed.update(m.replica_id for m in members.by_id.values() if m.was_member)

    def _commit(self, lineage: str, control: bytes) -> None:
        self._lineages[lineage] = control
        if len(self._lineages) > REMEMBERED_DECISIONS:
            self._lineages.popitem(last=False)

    # ------------------------------------------------------------------ steps in doubt

    def recall(self, *members: MemberState) -> None:
        """Settle the steps in doubt of `members` whose commit is known here."""
        for member in members:
            doubt = member.doubt
            if doubt is not None and doubt.lineage_if_committed in self._lineages:
                self._commits(member, doubt)

    def end_of_doubt(self, member: MemberState, heartbeat: Heartbeat) -> Decision | None:
        """For `member`, which waits for a quorum that may not come: those that have committed its step in doubt may
        have finished and left. None: what became of the step is not known, or it has heard it."""
        doubt = member.doubt
        if doubt is None or member.settle != "commit" or heartbeat.step != doubt.step:
            return None
        said = heartbeat.job, doubt.quorum_id, doubt.step, True, SETTLED
        return Decision(*said, waiting=True, control=member.control)

    def _commits(self, member: MemberState, doubt: InDoubt) -> None:
        member.settle = "commit"
        member.control = self._lineages.get(doubt.lineage_if_committed, b"")
        member.position = Position(doubt.step + 1, doubt.lineage_if_committed)
        member.held = doubt.quorum_id

    def settle(self, members: Members, doubt: str, branch: int) -> bool:
        """Settle every step in doubt, now that a quorum can form; True if a position changed.

        What this lighthouse remembers decides, and what a member holds. `doubt`: else, what becomes
        of the step of the newest quorum (`fence.Takeover`) of `branch`; "": that quorum was of this term. Any other
        is discarded: the newest quorum has started from something else.
        """
        all_members = members.by_id.values()
        unsettled = [m for m in all_members if m.doubt is not None and not m.settle]
        if not unsettled:
            return False
        held = {m.position.lineage for m in all_members}
        top = max((m.join.quorum_id for m in all_members if m.reports(branch)), default=NO_QUORUM)
        doubts = Counter(m.doubt for m in unsettled)
        changed = False
        for member in unsettled:
            known = member.doubt
            assert known is not None
            lineage = known.lineage_if_committed
            committed = lineage in held
            if not committed and known.quorum_id == top and not self._has_decided(known):
                everyone = member.join.last_members
                all_yes = doubts[known] == len(everyone) and all(
                    r in members.by_id for r in everyone
                )
                committed = doubt == "commit" or (doubt == "either" and all_yes)
            if committed:
                self._commits(member, known)
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
                member.held = member.join.held
                self.recall(member)


def _record(join: Join) -> fence.Record:
    """The last quorum of the sender of `join`."""
    basis, members = join.basis, frozenset(join.last_members)
    assert basis is not None
    bases = tuple(frozenset(names) for names in basis.bases)
    if basis.each:
        bases = tuple(frozenset((name,)) for name in join.last_members)
    return fence.Record(members, bases, basis.step, basis.lineage)


def _promise(join: Join) -> fence.Promise:
    doubt = None if join.in_doubt is None else join.in_doubt.lineage_if_committed
    known = join.basis is not None and join.basis.committed
    return fence.Promise(join.quorum_id, known, join.step, join.lineage, join.held, doubt)
