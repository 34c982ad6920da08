"""Several ranks, one replica group: the leader's state machine. PURE.

Theory. Towards the lighthouse a replica group is one member with one voice. Each rank runs the
same replica machine (`ft_core.replica.machine`) and speaks the same protocol, but to the group's leader,
which speaks for all of them:

- *Join*: when every rank has asked to join, the group joins with all their addresses. Ranks at
  different positions make a torn state: the group then says so, and heals.
- *Vote*: all ranks yes is the group's yes, unless they have not made as many updates since the last commit: one of
  them has left one out, so the group gives up its state. The first no is the group's no, at once; the other
  ranks are told to stop. A group that was healing stays behind unless all its ranks have healed:
  its no waits until that is known.
- *Reach* (`ReachQuery`): all ranks are asked. What one rank misses, the group misses;
  it reaches a member if all its ranks do.
- *Attempts*: all ranks make the same ones (see `machine.py`). After a no they hear of the next quorum
  when each of them has said what has become of its attempt.
- What the lighthouse says goes to all ranks. Its quorums also say how many attempts are spent. So it is asked once for
  all of them: an answer to each rank would cost as many messages as there are pairs of ranks.
- *Leave*: the first leave is the group's. If that rank is to join again (it has given up its state, or
  its place), the group goes on: the other ranks do the same. What one rank is denied for good, all are.
- *Leaving*: a rank that is told to end says so in a vote. The whole group leaves with it: the other
  ranks are refused with `LEFT`, and end too.
- A rank that is gone breaks the group: the others end with an error and the launcher starts the
  group anew; the lighthouse hears a goodbye, so that the other groups train on at once.

It has no timers: the ranks repeat what is not answered. `GroupServer` gives it sockets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lighthouse.machine.job import Send
from lighthouse.wire.messages import (
    DENIED,
    GAVE_UP,
    MAX_DIGEST_BYTES,
    MAX_NONCE,
    MAX_REASON_CHARS,
    NO_QUORUM,
    NO_TERM,
    NOT_COUNTED,
    PHASE_HEALING,
    TORN,
    Decision,
    Expelled,
    Heartbeat,
    JobKey,
    Join,
    Leave,
    Peer,
    Quorum,
    ReachQuery,
    ReachReport,
    Refused,
    Reply,
    Request,
    Revoke,
    Status,
    Term,
    Vote,
    Waiting,
)

BROKEN = "replica group broken: "
"""A `Refused` whose reason starts with this comes from the rank's own group, not from the lighthouse."""
OF_NO_LIGHTHOUSE = MAX_NONCE
"""Nonce of the term of a group whose ranks have promised themselves to several terms of one epoch."""
LEFT_QUORUM = "its replica group has left this quorum"
"""What a rank is told that votes in it all the same."""
LEFT = "replica group left: "
"""The same, where a rank was told to end and has left with the group's vote."""


@dataclass(frozen=True, slots=True)
class SendUp:
    """Effect: say `message` to the lighthouse."""

    message: Request


GroupEffect = Send | SendUp


def peer_of(rank: int) -> Peer:
    """Identity under which `rank` speaks to its leader."""
    return b"rank-%d" % rank


def rank_of(peer: Peer) -> int | None:
    """The rank behind `peer`, None if it is not a rank's."""
    text = peer.removeprefix(b"rank-")
    return int(text) if peer.startswith(b"rank-") and text.isdigit() else None


class GroupLeader:
    """See the module's docstring. Not thread-safe: one owner.

    Attributes:
        unanswered: the last join, vote or leave, which may have been lost with a connection; None: a
            decision or a quorum came after it.
    """

    def __init__(self, group_world_size: int) -> None:
        self.unanswered: Request | None = None
        self._size = group_world_size
        self._joins: dict[int, Join] = {}
        self._last_join: Join | None = None
        self._sent: Join | None = None  # the group's last one
        self._offered = NO_TERM  # the last term that all ranks were told of
        self._joined = False  # the group's join was sent, and it has not left since
        self._member = False  # and has led to a quorum
        self._votes: dict[int, Vote] = {}
        self._decided = (
            NO_QUORUM,
            0,
        )  # (quorum_id, step) of the last decision that its ranks were told
        self._newest = NO_QUORUM  # the last quorum that the lighthouse has announced
        self._group_left = 0  # how often
        self._said_no: tuple[int, int] | None = None
        self._no_sent: tuple[int, int, bool] | None = None  # to the lighthouse; whether torn
        self._healing = False  # the group is a healing member of its quorum
        self._broken = ""  # why this group is over
        self._leavers: set[int] = set()  # ranks whose vote was their last
        self._last_vote: tuple[int, int] | None = None  # with which a rank leaves
        self._left: set[int] = set()
        self._gone: set[int] = set()  # and have closed their connections
        self._reached: dict[str, set[int]] = {}  # ranks that reach a member, by its replica_id
        self._spent = 0  # attempts, of the rank that has spent most
        self._late: set[int] = set()  # after the group's no: ranks that have not voted
        self._held: list[Decision | Quorum] = []  # until they have
        self._effects: list[GroupEffect] = []

    # ------------------------------------------------------------------ events

    def handle(self, peer: Peer, message: Request) -> list[GroupEffect]:
        """A request from a rank."""
        rank = rank_of(peer)
        if rank is None or rank >= self._size:
            return []
        if self._broken:
            self._left.discard(rank)  # it wants to go on
            self._send([rank], Refused(_job(message), self._broken))
        elif isinstance(message, Join):
            self._on_join(rank, message)
        elif isinstance(message, Vote):
            self._on_vote(rank, message)
        elif isinstance(message, Heartbeat):
            if rank == 0:
                self._effects.append(SendUp(message))
            if self._said_no is not None and message.quorum_id != self._said_no[0]:
                self._accounted_for(rank)  # it is not in that quorum, and will not vote
        elif isinstance(message, Leave):
            self._on_leave(rank, message)
        elif isinstance(message, ReachReport):
            self._on_reach_report(rank, message)
        return self._drain()

    def from_lighthouse(self, message: Reply) -> list[GroupEffect]:
        """What the lighthouse says to the group."""
        if isinstance(message, Decision | Quorum):
            self.unanswered = None
            heard = message if self._member else self._as_newcomer(message)
            quorum = heard.next_quorum if isinstance(heard, Decision) else heard
            if quorum is not None and self._follows(quorum):
                self._newest = quorum.quorum_id
            if heard is not None:
                self._held.append(heard)
                self._hear_held()
        elif isinstance(message, Expelled):
            self._on_expelled(message)
        elif not isinstance(message, Status):
            if isinstance(message, Waiting) and message.offer is not None:
                self._offered = message.offer
            if isinstance(message, ReachQuery):
                self._reached = {member.replica_id: set() for member in message.members}
            self._send(range(self._size), message)
        return self._drain()

    def _as_newcomer(self, message: Decision | Quorum) -> Decision | Quorum | None:
        """What of it concerns a group that is in no quorum. An answer to a join is complete and comes
        alone; all else was made before the lighthouse heard that this group has left."""
        if isinstance(message, Decision):  # a rank may be in doubt of its step
            return replace(message, next_quorum=None, waiting=True)
        return message if self._joined and message.base_id == NO_QUORUM else None

    def _follows(self, quorum: Quorum) -> bool:
        """Whether it is of the term that this group has promised itself to, and not of a lighthouse that was left."""
        return self._sent is not None and self._sent.promised == quorum.term

    def _hear_held(self) -> None:
        """Decisions and quorums, in order, once it is known what has become of each rank's attempt."""
        while self._held and not self._late:
            message = self._held.pop(0)
            if isinstance(message, Quorum):
                message = self._on_quorum(message)
            elif message.committed and self._said_no == (message.quorum_id, message.step):
                # Per-group commit: the group is behind, also its ranks that have voted yes.
                self._start_over()
                why = "committed without this group"
                self._send(range(self._size), Expelled(message.job, message.quorum_id, why))
                return
            elif self._last_vote == (message.quorum_id, message.step):
                self._send(range(self._size), message)
                self._dismiss(message.job)
                return
            else:
                self._on_decision(message)
                if message.next_quorum is not None:
                    message = replace(message, next_quorum=self._on_quorum(message.next_quorum))
            self._send(range(self._size), message)

    def _on_decision(self, message: Decision) -> None:
        key = (message.quorum_id, message.step)
        if key <= self._decided:
            return  # said once more, to a rank that had not heard it
        self._decided = key
        self._votes.clear()
        if message.committed:
            self._healing = False

    def _on_expelled(self, message: Expelled) -> None:
        """It concerns a group that is a member: one that has left may have joined again since what
        this answers, and its ranks, which repeat their joins, need not be told to."""
        if message.quorum_id not in (self._newest, NO_QUORUM):
            return
        if self._held:  # from a quorum that the ranks have not heard of
            message = replace(message, quorum_id=NO_QUORUM)
        if self._member:
            self._start_over()
        self._send(range(self._size), message)

    def _accounted_for(self, rank: int) -> None:
        self._late.discard(rank)
        self._hear_held()

    def disconnected(self, peer: Peer) -> list[GroupEffect]:
        """The connection of a rank is gone."""
        rank = rank_of(peer)
        if rank is None or self._broken:
            return []
        self._gone.add(rank)
        if rank not in self._left or self._rejoining:
            self._break(rank)
        return self._drain()

    def _dismiss(self, job: JobKey) -> None:
        """The group has left with its last vote: tell the ranks that were not told to end."""
        self._broken = _left(min(self._leavers))
        stay = [r for r in range(self._size) if r not in self._gone | self._leavers]
        self._send(stay, Refused(job, self._broken))

    @property
    def _rejoining(self) -> bool:
        return bool(self._joins) and not self._joined

    def _break(self, rank: int) -> None:
        """A rank is missing for good: end the group, here and at the lighthouse."""
        self._broken = (
            f"{BROKEN}rank {rank} is gone; this rank ends so that the launcher can restart "
            "the group"
        )
        if rank in self._leavers:
            self._broken = _left(rank)
        job, last = JobKey(), self._last_join
        if last is not None:
            job = last.job
            self._group_leaves(
                Leave(job, last.replica_id, f"rank {rank} is gone", promised=last.promised)
            )
        self._send(
            (r for r in range(self._size) if r not in self._gone), Refused(job, self._broken)
        )

    def check(self) -> None:
        """Assert every invariant."""
        steps = {(v.quorum_id, v.step) for v in self._votes.values()}
        assert len(steps) <= 1, "votes of two steps side by side"

    # ------------------------------------------------------------------ requests

    def _on_join(self, rank: int, join: Join) -> None:
        self._joins[rank] = self._last_join = join
        self._spent = max(self._spent, join.attempt)
        self._accounted_for(rank)
        if self._gone:
            self._left.discard(rank)
            self._break(min(self._gone))
            return
        self._left.discard(rank)
        if len(self._joins) < self._size:
            return
        joins = [self._joins[r] for r in range(self._size)]
        newest = max((j.promised for j in joins), key=lambda term: (term.epoch, term.nonce))
        others = [r for r in range(self._size) if joins[r].promised != newest]
        late = [r for r in others if newest.outranks(joins[r].promised)]
        if late:  # they have not heard of the term, which rank 0 may have followed already
            told = late if newest != self._offered else [rank] if rank in late else []
            self._offered = newest
            self._send(told, Waiting(join.job, "its group follows another lighthouse", newest))
            return
        first = joins[0]
        if others:  # can't follow it: no lighthouse is to count this group; all get a higher one
            newest = Term(newest.epoch, OF_NO_LIGHTHOUSE)
        schemas = {j.schema for j in joins}
        torn = any((j.step, j.lineage) != (first.step, first.lineage) for j in joins)
        doubts = {j.in_doubt for j in joins}
        group = replace(
            first,
            addresses=tuple(j.addresses[0] for j in joins),
            promised=newest,
            step=min(j.step for j in joins) if torn else first.step,
            lineage=f"{TORN}{first.replica_id}" if torn else first.lineage,
            in_doubt=first.in_doubt if len(doubts) == 1 else None,
            basis=None if torn else first.basis,
            can_heal=all(j.can_heal for j in joins),
            schema=first.schema if len(schemas) == 1 else "|".join(sorted(schemas))[:200],
            attempt=0,
            left=self._group_left,
        )
        # Its repetition is rank 0's: each answer goes to all ranks.
        if rank == 0 or not self._joined or group != self._sent:
            self._joined, self._sent = True, group
            self._effects.append(SendUp(group))

    def _on_vote(self, rank: int, vote: Vote) -> None:
        key = (vote.quorum_id, vote.step)
        if key <= self._decided:  # which this rank has not heard, or it has more to say: alone
            self._effects.append(SendUp(vote))
            self._accounted_for(rank)
            return
        if any((v.quorum_id, v.step) != key for v in self._votes.values()):
            if key < max((v.quorum_id, v.step) for v in self._votes.values()):
                return  # of a step that is long over
            self._votes.clear()
        again = rank in self._votes
        self._votes[rank] = vote
        self._spent = max(self._spent, vote.attempt)
        if vote.leaving:
            self._leavers.add(rank)
        if self._member:
            self._speak(vote, again)
        else:  # this rank heard of the quorum after it had joined again
            self._send([rank], Expelled(vote.job, vote.quorum_id, LEFT_QUORUM))
        self._accounted_for(rank)

    def _speak(self, newest: Vote, again: bool) -> None:
        """Say the group's no, or its yes if all ranks have voted; `newest` was counted last, and is a
        repetition if `again`."""
        against = [v for v in self._votes.values() if not v.ok]
        if against:
            self._say_no(against[0] if newest.ok else newest, again)
        elif len(self._votes) == self._size and not self._differ():
            if any(v.leaving for v in self._votes.values()):
                self._last_vote = (newest.quorum_id, newest.step)
            self._effects.append(SendUp(_common([self._votes[r] for r in range(self._size)])))

    def _differ(self) -> bool:
        """Whether the ranks' updates since the last commit differ; the group gives up its state then. The other
        groups would hear of the fewest, and could have as few."""
        join = self._last_join
        counts = {v.updates: r for r, v in self._votes.items() if v.updates != NOT_COUNTED}
        if join is None or len(counts) < 2:
            return False
        (fewest, one), *_, (most, other) = sorted(counts.items())
        why = f"since the last commit rank {one} has made {fewest} updates, and rank {other} {most}"
        leave = Leave(
            join.job, join.replica_id, GAVE_UP + why, promised=join.promised, differs=True
        )
        self._group_leaves(leave)
        self._start_over()
        self._send(range(self._size), Expelled(join.job, NO_QUORUM, why, differs=True))
        return True

    def _say_no(self, vote: Vote, again: bool) -> None:
        """The first no is the group's; a rank's repetition is passed on as a repetition. What the other ranks
        vote is not: each answer goes to all ranks.

        A no of a group that heals says whether all of its ranks have healed by now, or the
        lighthouse would take it for behind forever: it waits for the others' votes, which are
        asked for at once.
        """
        key = (vote.quorum_id, vote.step)
        if self._said_no != key:
            self._said_no = key
            others = [r for r in range(self._size) if r not in self._votes]
            self._late = set(others)
            self._send(others, Revoke(vote.job, vote.quorum_id, vote.step, vote.reason or "no"))
        if self._healing:
            if any(v.phase == PHASE_HEALING for v in self._votes.values()):
                vote = replace(vote, phase=PHASE_HEALING)
            elif len(self._votes) < self._size:
                return
        if vote.leaving:
            self._last_vote = key
        vote = replace(vote, torn=any(v.torn for v in self._votes.values()))
        if self._no_sent != (*key, vote.torn) or again or vote.leaving:
            self._no_sent = (*key, vote.torn)
            self._effects.append(SendUp(vote))

    def _on_reach_report(self, rank: int, report: ReachReport) -> None:
        for other in report.reached:
            self._reached.setdefault(other, set()).add(rank)
        all_reach = tuple(
            other for other in report.reached if len(self._reached[other]) == self._size
        )
        if report.missed or all_reach or report.silence is not None:
            self._effects.append(SendUp(replace(report, reached=all_reach)))

    def _on_leave(self, rank: int, leave: Leave) -> None:
        """The first leave is the group's, which cannot go on without one of its ranks."""
        join = self._joins.get(rank)
        if join is not None and leave.left <= join.left:
            return  # it has joined since
        self._left.add(rank)
        if self._joined:
            # The collectives of its other ranks may still need this group.
            self._group_leaves(replace(leave, reduced=leave.reduced and self._size == 1))
            self._joined = False
            if leave.comes_back:
                why = f"rank {rank} {leave.reason}"[:MAX_REASON_CHARS]
                differs = leave.reason.startswith(GAVE_UP)
                told = Expelled(leave.job, NO_QUORUM, why, differs=differs)
                self._send(range(self._size), told)
        if leave.reason.startswith(DENIED):
            self._send(range(self._size), Refused(leave.job, leave.reason))
        if self._member:
            self._start_over()
        # Else the others still wait for their first quorum, and need not join again.
        self._joins.pop(rank, None)

    def _group_leaves(self, leave: Leave) -> None:
        self._group_left += 1
        leave = replace(leave, quorum_id=self._newest, left=self._group_left)
        self._effects.append(SendUp(leave))

    def _start_over(self) -> None:
        """The group is no longer a member: its ranks must join again."""
        self._joins.clear()
        self._late.clear()
        self._held.clear()
        self._joined = self._member = False
        self._offered = NO_TERM

    def _on_quorum(self, quorum: Quorum) -> Quorum:
        """What the ranks hear of it."""
        group = self._last_join
        if group is None or not self._follows(quorum):
            return quorum
        self._member = True
        for member in quorum.changed:  # a difference that leaves this group out leaves it as it is
            if member.replica_id == group.replica_id:
                self._healing = member.healing
        return replace(quorum, attempt=self._spent)

    # ------------------------------------------------------------------ small things

    def _send(self, ranks: Iterable[int], message: Reply) -> None:
        peers = tuple(peer_of(r) for r in ranks if r not in self._left)
        if peers:
            self._effects.append(Send(peers, message))

    def _drain(self) -> list[GroupEffect]:
        effects, self._effects = self._effects, []
        for effect in effects:
            if isinstance(effect, SendUp) and isinstance(effect.message, Join | Vote | Leave):
                self.unanswered = effect.message
        return effects


def _common(votes: list[Vote]) -> Vote:
    """The yes of a group whose ranks have voted so, in their order.

    A group has updated its state as often as each of its ranks has. Its digest covers the ranks'. It
    can give its state if each of them can.
    """
    digests = [vote.digest for vote in votes]
    digest = b""
    if all(digests):
        digest = hashlib.blake2b(b"".join(digests), digest_size=MAX_DIGEST_BYTES).digest()
    return replace(
        votes[0],
        leaving=any(vote.leaving for vote in votes),
        updates=min(vote.updates for vote in votes),
        digest=digest,
        admits=all(vote.admits for vote in votes),
    )


def _left(rank: int) -> str:
    return f"{LEFT}rank {rank} was told to end, and this one ends with it"


def _job(message: Request) -> JobKey:
    return getattr(message, "job", JobKey())
