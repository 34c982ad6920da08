"""When a job forms its next quorum, and out of whom: prepares what `quorum.py` decides. PURE.

Keeps what only matters between quorums: who was in the last one, since when the job waits, how
many it wants, and who is better left out for a while.
"""

from __future__ import annotations

from lighthouse.config import LighthouseConfig
from lighthouse.machine import rules
from lighthouse.machine.ballot import Ballot
from lighthouse.machine.history import History, Patience
from lighthouse.machine.members import Members, MemberState
from lighthouse.wire.messages import Join

SHORTEST_PAUSE, LONGEST_PAUSE = 1 / 8, 8
"""In heal timeouts: how long a replica group stays out that keeps costing the others a step."""


class Forming:
    """One job's view on its next quorum. `since`: when waiting for it began."""

    def __init__(self, config: LighthouseConfig, seats: Members, history: History) -> None:
        limits = config.timeouts
        self._seats, self._history = seats, history
        self._join_timeout_s = limits.join_timeout_s
        self._torn_timeout_s = limits.timeout_s  # a source's replacement needs time to start
        self._min_replicas = config.min_replicas
        self._expected = config.expected_replicas
        self._previous: tuple[str, ...] = ()  # members of the last quorum, in rank order
        self._heard_of: set[int] = set()  # quorums before this lighthouse, told by their members
        self._after_discard = False
        self._patience = Patience(
            SHORTEST_PAUSE * limits.heal_timeout_s, LONGEST_PAUSE * limits.heal_timeout_s
        )
        self.since = 0.0

    # ------------------------------------------------------------------ what happened

    def joined(self, join: Join) -> None:
        """A replica group has sat down."""
        missed = self._history.missed
        if join.replica_id in missed:
            missed.discard(join.replica_id)
            self._seats.promote(self._seats[join.replica_id])
        if not self._previous and join.quorum_id not in self._heard_of:
            self._heard_of.add(join.quorum_id)  # its other members bring the same list
            missed.update(r for r in join.last_members if r not in self._seats)
        self._min_replicas = max(self._min_replicas, join.min_replicas)
        self._expected = max(self._expected, join.expected_replicas)

    def decided(self, live: Ballot, committed: bool, now: float) -> None:
        """Who has cost the others this step is taken back later and later."""
        if committed and self._patience:
            for replica_id in live.yes():
                self._patience.succeeded(live.names[replica_id])
        for replica_id in live.costly():
            self._patience.failed(live.names[replica_id], now - live.since, now)

    def ended(self, live: Ballot, committed: bool, now: float) -> None:
        """The quorum of `live` is over."""
        self._previous = tuple(member.replica_id for member in live.members)
        self._heard_of.clear()
        self._after_discard = not committed
        self.since = now

    # ------------------------------------------------------------------ questions

    def admits(self, live: Ballot, now: float) -> bool:
        """Whether somebody waits who could be in a next quorum: then a commit ends this one."""
        if len(self._seats) == len(live.members):
            return False
        return any(
            self._may_enter(seat, now) for seat in self._seats if seat.replica_id not in live.ids
        )

    def _may_enter(self, seat: MemberState, now: float) -> bool:
        if not self._patience.allows(seat.name, now):
            return False
        head = self._history.head
        if head is not None and (seat.position == head or seat.position.step > head.step):
            return True
        return seat.join.can_heal or (seat.doubt is not None and not seat.settle)

    def verdict(self, now: float) -> rules.Verdict:
        """Apply the rules to who is here."""
        missed, head = self._history.missed, self._history.head
        held = head is not None and any(seat.position == head for seat in self._seats)
        if self._history.finished and head is not None:
            late = rules.too_late(
                len(self._seats),
                self._expected,
                any(seat.position.step >= head.step for seat in self._seats),
                head.step,
                self.since + self._join_timeout_s,
                now,
            )
            if late is not None:
                return late
        early = rules.too_early(
            len(self._seats),
            self._min_replicas,
            self._expected,
            self._seats.veterans == 0,
            self.since + self._join_timeout_s,
            now,
            0 if held else len(missed),
        )
        if early is not None:
            return early
        situation = rules.Situation(
            candidates=self._candidates(now),
            min_replicas=self._min_replicas,
            expected_replicas=self._expected,
            previous=self._previous,
            missed=frozenset(missed),
            head=head,
            since=self.since,
            join_timeout_s=self._join_timeout_s,
            torn_timeout_s=self._torn_timeout_s,
            has_past=self._seats.veterans > 0,
        )
        return rules.decide(situation, now)

    def _candidates(self, now: float) -> tuple[rules.Candidate, ...]:
        """All seats, but for those that would only cost the holders of the head a step: who must
        heal right after a discard (a peer in the midst of its step could not serve them), and who
        keeps hanging or failing to heal. They wait for a later commit if it works without them."""
        head, known = self._history.head, set(self._previous) if self._after_discard else None
        everybody = tuple(_candidate(seat) for seat in self._seats)
        kept = tuple(
            c for c in everybody
            if (c.position == head or known is None or c.replica_id in known)
            and self._patience.allows(c.name, now)
        )  # fmt: skip
        if len(kept) == len(everybody) or len(kept) < self._min_replicas:
            return everybody
        best = rules.newest(everybody, head)
        if not any(c.position == best for c in kept):
            return everybody  # nobody is left out who holds the newest state alone
        return kept


def _candidate(seat: MemberState) -> rules.Candidate:
    return rules.Candidate(
        seat.replica_id, seat.name, seat.position, seat.join.can_heal, seat.arrival
    )
