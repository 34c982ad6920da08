"""One live quorum and the ballot on its step: who has voted, who is gone, what comes out. PURE.

Theory. A ballot belongs to exactly one (quorum_id, step): one vote a member, the first one counts.
It is decided once no living member is silent: committed if all votes are yes and somebody alive
holds the result (per-group commit: if somebody alive voted yes), else discarded. A committed,
undisturbed ballot turns to the next step under the same quorum_id; any other ends the quorum.
All costs are O(1) a vote and O(members) a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lighthouse.machine.rules import Position
from lighthouse.wire.messages import GAVE_UP, PHASE_HEALING, PHASE_REDUCING, Member, Vote, healed


@dataclass(slots=True)
class Ballot:
    """See the module's docstring.

    Attributes:
        quorum_id, position, members: the live quorum and the state that its step starts from.
        names: what people call the members, by replica_id.
        silent: living members that have not voted on this step.
        since: when the step began.
        votes: by replica_id.
        gone: members that are dead, left or evicted, and why.
        revoked: why this step's collectives were called off; empty: they were not.
        revoker: the member that was the first to vote no or to go; empty: none.
        hung: those of the gone that were evicted because they did not vote.
        stalled: a member's collective waited for longer than its timeout.
        deadline: when silent members are to be evicted.
    """

    quorum_id: int
    position: Position
    members: tuple[Member, ...]
    names: dict[str, str]
    ids: frozenset[str]
    silent: set[str]
    since: float
    votes: dict[str, Vote] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    revoked: str = ""
    revoker: str = ""
    stalled: bool = False
    deadline: float | None = None

    @classmethod
    def open(
        cls,
        quorum_id: int,
        position: Position,
        members: tuple[Member, ...],
        names: dict[str, str],
        now: float,
    ) -> Ballot:
        """The ballot on the first step of a new quorum."""
        ids = frozenset(names)
        return cls(quorum_id, position, members, names, ids, set(ids), now)

    # ------------------------------------------------------------------ changes

    def cast(self, vote: Vote) -> bool:
        """Count `vote`, unless its sender has voted already; whether it counts."""
        if vote.replica_id not in self.silent:
            return False
        self.votes[vote.replica_id] = vote
        self.silent.discard(vote.replica_id)
        self.stalled = self.stalled or vote.stalled
        return True

    def lose(self, replica_id: str, cause: str) -> None:
        """A living member is gone."""
        self.gone[replica_id] = cause
        self.silent.discard(replica_id)

    def revoke(self, replica_id: str, reason: str, now: float, limit_s: float) -> None:
        """Call the step's collectives off; members have `limit_s` from `now` on to vote."""
        assert not self.revoked
        self.revoked, self.revoker = reason, replica_id
        limit = now + limit_s
        self.deadline = limit if self.deadline is None else min(self.deadline, limit)

    def turn(self, after: Position, now: float) -> None:
        """The step is committed and the quorum goes on with the next one."""
        assert not self.revoked and not self.gone and not self.silent
        self.position, self.votes, self.deadline, self.since = after, {}, None, now
        self.silent = set(self.ids)
        self.members = healed(self.members)

    # ------------------------------------------------------------------ questions

    def has(self, replica_id: str) -> bool:
        """Whether `replica_id` is a living member."""
        return replica_id in self.ids and replica_id not in self.gone

    def living(self) -> list[str]:
        """In rank order."""
        return [m.replica_id for m in self.members if m.replica_id not in self.gone]

    def healing(self) -> set[str]:
        return {m.replica_id for m in self.members if m.healing}

    def yes(self) -> set[str]:
        return {r for r, vote in self.votes.items() if vote.ok}

    def commits(self, group_commit: bool) -> bool:
        """What comes out, now that nobody is silent."""
        assert not self.silent
        yes = self.yes()
        # Somebody alive must hold the result, or committing it would lose the state itself.
        held = any(r not in self.gone for r in yes)
        return held and (group_commit or len(yes) == len(self.votes))

    def control(self) -> bytes:
        """Of the lowest-ranked member that voted yes."""
        yes = self.yes()
        first = next((m.replica_id for m in self.members if m.replica_id in yes), None)
        return self.votes[first].control if first is not None else b""

    def reduced(self) -> bool:
        """Whether anything was at stake: some member had started its collectives."""
        return any(vote.ok or vote.phase == PHASE_REDUCING for vote in self.votes.values())

    def undisturbed(self) -> bool:
        """Whether all members may work on under the same quorum_id."""
        return not self.revoked and not self.gone and not any(
            vote.leaving for vote in self.votes.values()
        )  # fmt: skip

    def blamed(self) -> list[str]:
        """After a stall: living members that were not reducing while another waited for them.

        Nobody, if that were all who hold the state and stay: one that computes for long looks
        like one that hangs, and evicting the last holder would throw the state away.
        """
        if not self.stalled:
            return []
        living = self.living()
        idle = [r for r in living
                if not self.votes[r].ok and self.votes[r].phase != PHASE_REDUCING]  # fmt: skip
        busy = set(living).difference(idle)
        kept = any(not self.is_behind(r) and not self.votes[r].leaving for r in busy)
        return idle if kept else []

    def is_behind(self, replica_id: str) -> bool:
        """Whether a living member does not stand at the quorum's position (yet)."""
        vote = self.votes[replica_id]
        return vote.lineage != self.position.lineage or vote.phase == PHASE_HEALING

    def costly(self) -> set[str]:
        """Members that cost the others this step: by a hang, or by a heal that failed.

        Not one that gave up its state as it healed: of a group of several ranks each may do so.
        """
        if not self.revoked:
            return set()
        gave_up = {r for r, cause in self.gone.items() if GAVE_UP in cause}
        healing, guilty = self.healing() - gave_up, set(self.blamed())
        guilty.update(r for r in self.gone if r in healing or r in self.hung)
        if self.revoker in healing and self.revoker in self.votes and not self.stalled:
            guilty.add(self.revoker)
        return guilty

    def check(self) -> None:
        """Assert every invariant."""
        ids = [m.replica_id for m in self.members]
        assert len(set(ids)) == len(ids), "a replica group is twice in a quorum"
        assert set(ids) == self.ids
        assert set(self.votes) <= self.ids and set(self.gone) <= self.ids
        assert self.living(), "a quorum without living members"
        assert self.silent == set(self.living()) - set(self.votes)
        assert self.silent, "all have voted, none decided"
        assert not self.revoked or self.deadline is not None, "a revoked step has no deadline"
        assert bool(self.revoked) == bool(self.revoker)
        for vote in self.votes.values():
            assert vote.quorum_id == self.quorum_id and vote.step == self.position.step
            assert not vote.ok or vote.lineage == self.position.lineage
