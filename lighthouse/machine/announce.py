"""What a job says: its effects, its messages about a quorum, its status for people. PURE.

A quorum is told as a difference to members that hold the last list, and in full to all others. N
members get few distinct messages, each built once: O(N) work per quorum change, not O(N^2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lighthouse.machine.ballot import Ballot
from lighthouse.machine.members import History, Members, MemberState
from lighthouse.machine.rules import Choice, Position
from lighthouse.wire.messages import (
    EACH,
    NO_QUORUM,
    ON_LAST,
    OWN,
    UNLIKE,
    Decision,
    JobKey,
    Join,
    Member,
    Peer,
    Quorum,
    Reply,
    Term,
    Waiting,
    member_delta,
)

EXPLAIN_EVERY_S = 1.0
MOST_NAMES = 8
JOIN_AGAIN = "waiting for all to join this lighthouse"
STEP_IN_PROGRESS = "waiting for the step in progress to end"
Delta = tuple[tuple[str, ...], tuple[Member, ...]]


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: deliver `message` to each of `peers`."""

    peers: tuple[Peer, ...]
    message: Reply


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: a line for the log. `quorum`: it is the one line of a quorum change. `refusal`: of a replica
    group that is told only its own part."""

    job: JobKey
    text: str
    quorum: bool = False
    refusal: bool = False


@dataclass(frozen=True, slots=True)
class Remember:
    """Effect: keep this over a restart of the lighthouse (optional; see docs/protocol.md)."""

    job: JobKey
    quorum_id: int
    members: tuple[str, ...]
    nonce: int = 0


Effect = Send | Note | Remember
"""What the machine asks its shell to do."""


class Announcer:
    """Builds one job's messages about quorums, and about waiting for them. One owner.

    Attributes:
        reason: why the quorum is what it is, or why there is none.
        left_out: by replica_id, why a member is left out of it.
        rests, bases: on what it rests; see `Quorum`.
    """

    def __init__(self, job: JobKey) -> None:
        self.reason = "no replica group waits"
        self.left_out: Mapping[str, str] = {}
        self.rests = ""
        self.bases: tuple[tuple[str, ...], ...] = ()
        self._job = job
        self._base_id = NO_QUORUM
        self._base: tuple[Member, ...] = ()
        self._explained_at = float("-inf")
        self._unsaid_until: float | None = None  # then `explain` says the newest reason

    # ------------------------------------------------------------------ why a member has to wait

    def explain(self, reason: str, members: Members, now: float) -> list[Effect]:
        """Tell all members why there is no quorum, at most once a second.

        A member that missed a change of the reason learns of it when it sends a heartbeat.
        """
        changed, self.reason = reason != self.reason, reason
        if not changed and self._unsaid_until is None:
            return []
        if now < self._explained_at + EXPLAIN_EVERY_S:
            if members.by_id:
                self._unsaid_until = self._explained_at + EXPLAIN_EVERY_S
            return []
        self._explained_at, self._unsaid_until = now, None
        all_members = list(members.by_id.values())
        for member in all_members:
            member.last_reason = reason
        return [
            Note(self._job, reason),
            *_send_all((m.peer for m in all_members), Waiting(self._job, reason)),
        ]

    def due(self, wake_at: float | None) -> float | None:
        """When to look again whether a quorum may form: `wake_at`, or to say why none does."""
        times = (wake_at, self._unsaid_until)
        return min((at for at in times if at is not None), default=None)

    def explain_to(self, member: MemberState, live: Ballot | None) -> Send:
        """Tell one member why it waits."""
        member.last_reason = self._waiting_reason(member, live)
        return Send((member.peer,), Waiting(self._job, member.last_reason))

    def is_news(self, member: MemberState, live: Ballot | None) -> bool:
        """Whether the reason for which `member` waits differs from the one it was told."""
        return member.last_reason != self._waiting_reason(member, live)

    def _waiting_reason(self, member: MemberState, live: Ballot | None) -> str:
        if live is None:
            return self.reason
        return self.left_out.get(member.replica_id, STEP_IN_PROGRESS)

    # ------------------------------------------------------------------ quorums

    def ended(self, live: Ballot) -> None:
        """`live` is over; members that voted in it certainly hold its member list."""
        self._base_id, self._base = live.quorum_id, live.members

    def rest_on(self, history: History, live: Ballot) -> None:
        """The quorum `live`, which is to be told, rests on what `history` says."""
        last = frozenset(m.replica_id for m in self._base)
        self.rests, self.bases = "", ()
        if history.each:
            self.rests = EACH
        elif history.bases == (frozenset(live.names),):
            self.rests = OWN
        elif history.bases == (last,):
            self.rests = ON_LAST
        else:
            self.bases = tuple(tuple(sorted(base)) for base in history.bases)

    def full(self, live: Ballot, member: MemberState) -> Quorum:
        """The live quorum in full, for one member."""
        return self._build(live, None, member.settle, member.control)

    def announce(self, live: Ballot, members: Iterable[MemberState]) -> list[Send]:
        """Tell the live quorum to those of `members` that belong to it."""
        groups: dict[int, tuple[Quorum, list[Peer]]] = {}
        for member, quorum in self._each(live, members):
            groups.setdefault(id(quorum), (quorum, []))[1].append(member.peer)
        return [Send(tuple(peers), quorum) for quorum, peers in groups.values()]

    def answer(
        self, decision: Decision, voters: list[MemberState], yes: set[str], live: Ballot | None
    ) -> list[Send]:
        """Tell `voters` the decision that ended a quorum, together with their next quorum.

        Under per-group commit, a step is committed for those in `yes` only.
        """
        following: dict[str, Quorum] = {}
        if live is not None:
            following = {m.replica_id: quorum for m, quorum in self._each(live, voters)}
        groups: dict[tuple[int, bool], tuple[Decision, list[Peer]]] = {}
        for member in voters:
            quorum = following.get(member.replica_id)
            committed = decision.committed and member.replica_id in yes
            key = (id(quorum), committed)
            if key not in groups:
                own = replace(
                    decision, committed=committed, next_quorum=quorum, waiting=quorum is None
                )
                groups[key] = (own, [])
            groups[key][1].append(member.peer)
        return [Send(tuple(peers), own) for own, peers in groups.values()]

    def _each(
        self, live: Ballot, members: Iterable[MemberState]
    ) -> list[tuple[MemberState, Quorum]]:
        """Those of `members` in `live`, each with its message; equal messages are one object."""
        delta = member_delta(self._base, live.members) if self._base_id != NO_QUORUM else None
        built: dict[tuple[bool, str, bytes], Quorum] = {}
        pairs = []
        for member in members:
            if member.replica_id not in live.living:
                continue
            by_delta = delta is not None and member.base_id == self._base_id
            key = (by_delta, member.settle, member.control)
            if key not in built:
                used = delta if by_delta else None
                built[key] = self._build(live, used, member.settle, member.control)
            pairs.append((member, built[key]))
        return pairs

    def _build(self, live: Ballot, delta: Delta | None, settle: str, control: bytes) -> Quorum:
        removed, changed = delta if delta is not None else ((), live.members)
        rests, bases = self.rests, self.bases
        if live.is_base:
            rests, bases = OWN, ()
        elif rests == ON_LAST and delta is None:
            rests, bases = "", (tuple(m.replica_id for m in self._base),)
        return Quorum(
            self._job,
            live.quorum_id,
            live.position.step,
            live.position.lineage,
            self._base_id if delta is not None else NO_QUORUM,
            removed,
            changed,
            self.reason,
            settle,
            control,
            live.nonce,
            live.genesis,
            live.held,
            compare=bool(live.unproven),
            rests=rests,
            bases=bases,
        )


def _send_all(peers: Iterable[Peer], message: Reply) -> list[Send]:
    targets = tuple(peers)
    return [Send(targets, message)] if targets else []


# ---------------------------------------------------------------- for people


def status_of(
    key: JobKey,
    term: Term,
    live: Ballot | None,
    members: Members,
    history: History,
    reason: str,
    most: int,
) -> dict[str, object]:
    """One job as JSON types. `reason`: why it waits, or why its quorum is what it is.

    "waiting" names the members outside the quorum; "highest_step" is the highest step that a
    connected member holds. Lists end after `most` entries; "left_off" says how many are missing.
    """
    head, all_members = history.head, members.by_id.values()
    listed = live.members if live else ()
    waiting = [m.name for m in all_members if live is None or m.replica_id not in live.living]
    return {
        "job_id": key.job_id,
        "room_id": key.room_id,
        "state": "live" if live else "forming",
        "reason": live.revoked if live and live.revoked else reason,
        "epoch": term.epoch,
        "nonce": term.nonce,
        "quorum_id": live.quorum_id if live else None,
        "step": head.step if head else 0,
        "lineage": head.lineage if head else "",
        "commits": history.commits,
        "discards": history.discards,
        "members": [
            {
                "replica_id": m.replica_id,
                "name": live.names[m.replica_id],
                "healing": m.healing,
                "gone": live.gone.get(m.replica_id, ""),
                "voted": m.replica_id in live.votes,
            }
            for m in listed[:most]
        ]
        if live
        else [],
        "waiting": waiting[:most],
        "left_off": max(0, len(listed) - most) + max(0, len(waiting) - most),
        "highest_step": max((m.position.step for m in all_members), default=0),
    }


def mismatch(join: Join, other: Join) -> str:
    """Why `join` can't train with `other`, as a sentence for a person; empty: it can.

    The sender may be a stranger: it is told its own schema, and the log tells both.
    """
    if len(other.addresses) != len(join.addresses):
        return (
            f"{join.name} has {len(join.addresses)} ranks and {other.name} "
            f"{len(other.addresses)}; {UNLIKE} number"
        )
    if other.schema != join.schema:
        return (
            f"{join.name} does not match {other.name}: it has {join.schema_text or 'no schema'}"
            f", and the lighthouse's log says what {other.name} has; {UNLIKE} model and settings, and "
            "separate jobs need job ids of their own (FT_JOB_ID)"
        )
    if other.group_commit != join.group_commit:
        kinds = {True: "commit=group", False: "commit=quorum"}
        return (
            f"{join.name} has {kinds[join.group_commit]} and {other.name} "
            f"{kinds[other.group_commit]}; {UNLIKE}"
        )
    return ""


def stops(join: Join, members: Members) -> str:
    """Why `join` would stop the quorum that is live, as a sentence for a person; empty: it would not."""
    asked, here = members.rules.min_replicas, len(members.by_id)
    if join.min_replicas <= max(asked, here + 1):
        return ""
    return (
        f"{join.name} asks for min_replica_size={join.min_replicas}, with which the {here} replica groups that "
        f"train here would wait for more: start it with theirs, {asked}"
    )


def foreign_states(choice: Choice, members: Members, head: Position | None) -> list[str]:
    """States with which no quorum of this job goes on: a person may miss their steps."""
    healing = (members.by_id[r] for r in choice.members if r in choice.healing)
    own = {members.by_id[r].genesis for r in choice.members if r not in choice.healing}
    return [
        f"{member.name} at step {member.position.step}"
        for member in healing
        if member.position.step > choice.position.step
        or (head is None and member.position.step > 0 and not member.was_member)
        or (member.position.step > 0 and member.genesis not in {0, *own})
    ]


def schemas(join: Join, other: Join) -> str:
    """For the log: what `join` and `other` have, if that differs."""
    if other.schema == join.schema:
        return ""
    mine, theirs = join.schema_text or join.schema, other.schema_text or other.schema
    return f"refused {join.name}: it has {mine}, and {other.name} has {theirs}"


def taken_id(replica_id: str) -> str:
    """Why another process can't join as `replica_id`, as a sentence for a person."""
    return (
        f"another process has joined as {replica_id!r}: it must end before one can take its place"
    )


def duplicate_name(name: str) -> str:
    """Why a newcomer called `name` is refused, as a sentence for a person."""
    return (
        f"another live process is called {name!r}: give every replica group a name of its own "
        "(replica_id, REPLICA_GROUP_ID), or separate jobs job ids of their own (FT_JOB_ID)"
    )


def short_list(names: list[str]) -> str:
    """`names` for a log line; beyond a few only their number."""
    shown = ", ".join(names[:MOST_NAMES])
    return f"[{shown}{f', … {len(names)} in all' if len(names) > MOST_NAMES else ''}]"
