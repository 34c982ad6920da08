"""One live quorum and the ballot on its step: the votes, the losses, the result. PURE.

Theory. A ballot belongs to exactly one (quorum_id, step). Each member has one vote, and the first
one counts. The ballot is decided once no living member is silent. It commits if all votes are yes
and a living member holds the result; under per-group commit, if a living member voted yes. Else
the step is discarded. After a committed, undisturbed ballot the same quorum_id goes on with the
next step; any other result ends the quorum.
All costs are O(1) per vote and O(members) per decision.

Members at an equal (step, lineage) hold equal states, if each of them has applied what was
committed, and no memory has failed. A yes tells two things about the state that its sender holds: how
often it was updated since the last commit, and a digest of a part of it. Members that differ
from what more than half of the others say hold another state. Where counts have no majority, the largest
one counts: a loop that has caught an exception has left out an update, and has not made one more.
Members that have healed since the last commit do not decide what is right. If a member turns out to differ that
they may have healed from, they are suspect until the next commit: one that says no digest differs, too. If the loop of a
member says that it has changed the state that it served, which is right, all that have healed are torn, whatever they say. Where digests have no
majority no member can tell which state is the right one, once all have said theirs: a no says nothing
of its sender's state, discards the step, and all compare again in its next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lighthouse.machine.rules import Position
from lighthouse.wire.messages import (
    GAVE_UP,
    GAVE_UP_PLACE,
    NONE_IS_RIGHT,
    NOT_COUNTED,
    PHASE_HEALING,
    PHASE_REDUCING,
    Member,
    Vote,
    healed,
)


@dataclass(slots=True)
class Ballot:
    """See the module's docstring. Times are of the machine's clock, in seconds.

    Attributes:
        quorum_id, nonce: of the live quorum, and of its term.
        position, members: the state that its step starts from, and the quorum's members.
        names: the members' names by replica_id.
        living: members that are not gone.
        silent: living members that have not voted on this step.
        healing: members that did not hold `position` when the quorum formed.
        unproven: those that have healed since the last commit, in this quorum or in one before.
        since: when the step began.
        votes: by replica_id.
        gone: members that are dead, left or evicted, and why.
        hung: those of `gone` that were evicted because they did not vote.
        revoked: why this step's collectives were stopped; empty: they were not.
        revoker: the first member that voted no or was lost; empty: none.
        stalled: a member's collective waited longer than its timeout.
        genesis, held: see `Quorum`; of `position`.
        deadline: when silent members are to be evicted.
        is_base: a commit is known under this quorum: the next one rests on its members.
    """

    quorum_id: int
    nonce: int
    position: Position
    members: tuple[Member, ...]
    names: dict[str, str]
    living: set[str]
    silent: set[str]
    healing: frozenset[str]
    since: float
    votes: dict[str, Vote] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    revoked: str = ""
    revoker: str = ""
    stalled: bool = False
    deadline: float | None = None
    genesis: int = 0
    held: int = 0
    unproven: Set[str] = frozenset()
    is_base: bool = False

    @classmethod
    def open(
        cls,
        quorum_id: int,
        nonce: int,
        position: Position,
        members: tuple[Member, ...],
        names: dict[str, str],
        now: float,
    ) -> Ballot:
        """The ballot on the first step of a new quorum."""
        healing = frozenset(m.replica_id for m in members if m.healing)
        everyone = set(names)
        return cls(
            quorum_id, nonce, position, members, names, everyone, everyone.copy(), healing, now
        )

    # ------------------------------------------------------------------ changes

    def cast(self, vote: Vote) -> bool:
        """Count `vote`; False if its sender has voted already, or is not a living member."""
        if vote.replica_id not in self.silent:
            return False
        self.votes[vote.replica_id] = vote
        self.silent.discard(vote.replica_id)
        self.stalled = self.stalled or vote.stalled
        return True

    def overrule(self, replica_id: str, cause: str) -> None:
        """A member has voted on a state that is not its peers': its yes is void, and it is gone."""
        self.votes[replica_id] = replace(self.votes[replica_id], ok=False)
        self.lose(replica_id, cause)

    def lose(self, replica_id: str, cause: str) -> None:
        """A living member is gone."""
        self.gone[replica_id] = cause
        self.living.discard(replica_id)
        self.silent.discard(replica_id)

    def revoke(self, replica_id: str, reason: str, now: float, limit_s: float) -> None:
        """Stop the step's collectives; members have `limit_s` from `now` on to vote."""
        assert not self.revoked
        self.revoked, self.revoker = reason, replica_id
        limit = now + limit_s
        self.deadline = limit if self.deadline is None else min(self.deadline, limit)

    def next_step(self, after: Position, now: float) -> None:
        """The step is committed, and the quorum goes on with the next one from `after`."""
        assert not self.revoked and not self.gone and not self.silent
        self.position, self.votes, self.deadline, self.since = after, {}, None, now
        self.held = self.quorum_id
        self.silent = set(self.living)
        if self.healing:
            self.members, self.healing = healed(self.members), frozenset()
        self.unproven = frozenset()

    # ------------------------------------------------------------------ questions

    def in_rank_order(self) -> list[str]:
        """The living members' replica_ids."""
        return [m.replica_id for m in self.members if m.replica_id in self.living]

    def yes(self) -> set[str]:
        """Members that voted yes, whether they still live or not."""
        return {r for r, vote in self.votes.items() if vote.ok}

    def result(self, yes: Set[str], group_commit: bool, enough: bool) -> tuple[bool, bytes]:
        """(committed, control bytes), now that no living member is silent, of the votes `yes`.

        `enough`: those that said yes suffice (F2 of `fence.py`).
        The control bytes are the lowest-ranked yes voter's; empty for a discard.
        """
        assert not self.silent
        if not (enough and self.commits(yes, group_commit)):
            return False, b""
        first = next(m.replica_id for m in self.members if m.replica_id in yes)
        return True, self.votes[first].control

    def reason(self, committed: bool) -> str:
        """Of its decision, for people."""
        if cause := self._cause():
            return f"{self.names[cause]}: {self.votes[cause].reason or 'voted no'}"
        return self.revoked or ("ok" if committed else "its members suffice no more")

    def _cause(self) -> str:
        """The member of whose making this discard is, where the first no followed from another one that came
        later. Empty: none."""
        first = self.votes.get(self.revoker)
        if first is None or not first.follows:
            return ""
        return next((r for r, vote in self.votes.items() if not vote.ok and not vote.follows), "")

    def commits(self, yes: Set[str], group_commit: bool) -> bool:
        """Whether the votes commit the step; `yes`: those that say yes."""
        # If no living member held the result, committing it would lose the state itself.
        held = not yes.isdisjoint(self.living)
        return held and (group_commit or len(yes) == len(self.votes))

    def reduced(self) -> bool:
        """Whether work was at stake: some member had started its collectives."""
        return any(vote.ok or vote.phase == PHASE_REDUCING for vote in self.votes.values())

    def admits(self) -> bool:
        """Whether all members can give their state to a newcomer at the next step."""
        return all(vote.admits for vote in self.votes.values())

    def undisturbed(self) -> bool:
        """Whether all members can go on under the same quorum_id."""
        if self.revoked or self.gone:
            return False
        return not any(vote.leaving for vote in self.votes.values())

    def blamed(self) -> list[str]:
        """After a stall: living members that were not reducing while another waited for them.

        Empty if all others would leave or do not hold the state: a member that computes for long
        looks like one that hangs, and evicting the last holder would lose the state.
        """
        if not self.stalled:
            return []
        living = self.in_rank_order()
        idle = [r for r in living if not self._was_reducing(r)]
        busy = set(living).difference(idle)
        kept = any(not self.is_behind(r) and not self.votes[r].leaving for r in busy)
        return idle if kept else []

    def _was_reducing(self, replica_id: str) -> bool:
        vote = self.votes[replica_id]
        return vote.ok or vote.phase == PHASE_REDUCING

    def is_behind(self, replica_id: str) -> bool:
        """Whether a living member does not hold the quorum's position (yet)."""
        vote = self.votes[replica_id]
        return vote.lineage != self.position.lineage or vote.phase == PHASE_HEALING

    def costly(self) -> set[str]:
        """Members that cost the others this step, by a hang or by a failed heal.

        A member that heals does not answer for a peer that dies or says no of its own accord, though its own
        no, of the collective that failed with that, may come first.
        A member that gave up its state or place while it healed is not one of them: in a group of
        several ranks each rank may do so, and one that has far to go leaves so as not to hold up the
        others.
        """
        if not self.revoked:
            return set()
        gave_up = {
            r for r, cause in self.gone.items() if GAVE_UP in cause or GAVE_UP_PLACE in cause
        }
        healing, guilty = self.healing - gave_up, set(self.blamed())
        guilty.update(r for r in self.gone if r in healing or r in self.hung)
        cause = self._cause() or self.revoker
        if cause in healing and cause in self.votes and not self.stalled:
            if not (self.votes[cause].follows and self.gone):
                guilty.add(cause)
        return guilty

    def check(self) -> None:
        """Assert every invariant. O(members)."""
        ids = [m.replica_id for m in self.members]
        assert len(set(ids)) == len(ids), "a replica group is twice in a quorum"
        assert set(ids) == set(self.names)
        assert set(self.votes) <= set(ids) and set(self.gone) <= set(ids)
        assert self.healing == {m.replica_id for m in self.members if m.healing}
        assert self.living == set(ids) - set(self.gone)
        assert self.living, "a quorum without living members"
        assert self.silent == self.living - set(self.votes)
        assert self.silent, "all have voted, but the step is not decided"
        assert not self.revoked or self.deadline is not None, "a revoked step has no deadline"
        assert bool(self.revoked) == bool(self.revoker)
        for vote in self.votes.values():
            assert vote.quorum_id == self.quorum_id and vote.step == self.position.step
            assert not vote.ok or vote.lineage == self.position.lineage


# ---------------------------------------------------------------- what the votes say of the state

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        different: members whose state is not their peers', by replica_id, and how it is known.
        hopeless: why no member can tell which state is right, as a sentence for a person; empty: one
            can.
    """

    different: Mapping[str, str] = field(default_factory=dict)
    hopeless: str = ""


ALIKE = Comparison()

WHY_APART = (
    "If one of them had come back from a death, something that changes parameters is in no state_dict (slow "
    "weights that an optimizer keeps in an attribute, say) and did not heal: add it there. If none had, "
    "suspect a machine's memory"
)


def compare(
    votes: Mapping[str, Vote],
    unproven: Set[str],
    suspect: Set[str],
    torn: Set[str],
    names: Mapping[str, str],
) -> Comparison:
    """Compare what the votes of one step say.

    `votes`: those of the living members, by replica_id. `unproven`: members that have healed since
    the last commit. `suspect`: those of them that may have healed from a member that differed.
    `torn`: those of them that may have read a state while it changed, whatever their digests say.
    `names`: for people, by replica_id. O(members).
    """
    if not torn.isdisjoint(votes):
        why = "the state from which it has healed was changed meanwhile"
        others = {replica_id: vote for replica_id, vote in votes.items() if replica_id not in torn}
        found = compare(others, unproven, suspect, frozenset(), names)
        return replace(found, different={**dict.fromkeys(torn & {*votes}, why), **found.different})
    alike = len({(vote.updates, vote.digest) for vote in votes.values()}) < 2
    if alike and suspect.isdisjoint(votes):
        return ALIKE
    said = {replica_id: vote for replica_id, vote in votes.items() if vote.ok}
    step = max((vote.step for vote in said.values()), default=0)
    counts = {r: vote.updates for r, vote in said.items() if vote.updates != NOT_COUNTED}
    right = _majority(counts.values()) if counts else 0
    right = max(counts.values(), default=0) if right is None else right
    different = {
        r: f"it has made {_times(count)} after step {step - 1}, and its peers {_times(right)}"
        for r, count in counts.items()
        if count != right
    }
    digests = {r: vote.digest for r, vote in said.items() if vote.digest and r not in different}
    judges = [digest for r, digest in digests.items() if r not in unproven]
    held = _majority(judges or digests.values())
    if digests and held is None:
        if _unheard(votes, unproven, said[min(digests)].lineage):
            return Comparison(different)
        told = ", ".join(f"{names[r]}: {digest.hex()}" for r, digest in sorted(digests.items()))
        return Comparison(
            hopeless=f"the members hold different parameters at step {step}, and {NONE_IS_RIGHT} of "
            f"them ({told[:1_000]}): start again from a checkpoint. {WHY_APART}"
        )
    why = f"its parameters at step {step} are not those of its peers"
    different |= {r: why for r, digest in digests.items() if digest != held}
    why = "it has healed from a member whose state is not that of its peers"
    suspect = unproven if different else suspect
    different |= {r: why for r in suspect if r in said and r not in digests | different}
    return Comparison(different)


def _unheard(votes: Mapping[str, Vote], unproven: Set[str], lineage: str) -> bool:
    """Whether a member that holds `lineage`, and is no member that has just healed, said no: it may decide
    the next attempt's comparison."""
    return any(
        not vote.ok and vote.lineage == lineage and vote.phase != PHASE_HEALING
        for replica_id, vote in votes.items()
        if replica_id not in unproven
    )


def _majority(values: Iterable[T]) -> T | None:
    """The value of more than half of them; None: there is none."""
    counts = Counter(values)
    if not counts:
        return None
    [(value, count)] = counts.most_common(1)
    return value if 2 * count > counts.total() else None


def _times(updates: int) -> str:
    return {0: "no update", 1: "one update"}.get(updates, f"{updates} updates")
