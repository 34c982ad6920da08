"""The rules by which a quorum forms. Pure functions: no clock, no IO, no state.

Theory. A job has at most one live quorum, and the next one forms only when its step is decided, so
two quorums of a job never run side by side. What is left to decide is when the candidates suffice,
and from which state they go on:

R1  Fewer than `min_replicas` candidates: wait.
R2  They go on from the job's own head as long as one of them holds it: however many steps a
    newcomer brings along, they are not this job's. Else from the newest position: the one that was
    held in the newest quorum, and the highest step of those; one that no quorum has held comes last,
    whatever its step. Where two branches meet (jobs of different genesis), the one that more groups
    have begun wins, then the one whose last quorum had more members. At equal rank it is the one that
    most candidates hold, else that of the first by order. All others are behind and heal (R3). A torn
    state (partly overwritten) is not a position: its holder heals. If all candidates are torn they wait
    up to `torn_timeout_s` for one that is whole; then they are refused and must start again.
R3  A candidate that is behind and may not heal (`can_heal` False) is left out.
R4  If a candidate holds the job's head, and the candidates suffice for a commit (`fence.py`), form at
    once.
R5  Else the members on which the next commit rests are waited for, until the join timeout; then as many
    as suffice. The first quorum of a term waits in the same way for processes that are connected and
    about to join (`forming.py`).
R6  If no candidate has been in a quorum of the job yet, if the job would go back behind its head since all
    its holders are dead, or if too few are here, the next quorum waits for the *roll*: until as many
    replica groups are here as the job is meant to have, since any of them may hold a newer state. Each
    name is one process. One that was declared dead is not waited for; after the join timeout, nor are
    those that are known to be dead. The rest is waited for until `go_on_at`. A job that names no
    number, or has no step to lose, waits for stragglers, until the join timeout.
R7  Ranks: members of the last quorum keep their order. Newcomers follow in natural order of their
    names when a job starts, and in order of arrival later.
R8  If the last members said that the training has finished, candidates that come with less than its
    last step start it over only if as many come as are expected. Fewer are refused when the connect
    timeout is over: the other processes of the next training may take that long to come. At once, if
    all of them were here already when the first member said so: they belong to that training. Members
    that go on after others have finished, and are fewer than `min_replicas`, are told so after the
    same time: their loops are longer. Those that ask for no quorum are at their own ends, so none is
    refused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lighthouse.wire.messages import (
    DECLARE_DEAD,
    MAX_NONCE,
    OTHERS_FINISHED,
    OVER,
    TOO_FEW_LEFT,
    TORN,
    Join,
    Term,
    epoch_of,
)

MOST_NAMED = 8
"""Members that a reason to wait names; of more it gives the number."""
NONCE_BITS = 48
"""Of a genesis; the bits above it are its `founders`."""


@dataclass(frozen=True, slots=True)
class Position:
    """The version of a state: the number of commits, and a hash over their history."""

    step: int
    lineage: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica group that waits for a quorum. `genesis`, `held`: see `MemberState`."""

    replica_id: str
    name: str
    position: Position
    can_heal: bool = True
    arrival: int = 0
    genesis: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Roll:
    """Which of a job's replica groups are here (R6). Times are in seconds.

    Attributes:
        expected: how many are waited for until the join timeout; 0: not known.
        wished: how many the job has, as its members say, else the lighthouse's option.
        needed: how many must be here, or be known to be dead, after it; 0: none need be.
        here: names of those that are here.
        dead: names of those that are dead, none of which is here; True: one was declared dead.
        since: when waiting began (the first candidate arrived, or the last quorum ended).
        join_timeout_s: see `Timeouts`.
        go_on_after_s: see `LighthouseConfig`.
    """

    expected: int = 0
    wished: int = 0
    needed: int = 0
    here: Collection[str] = ()
    dead: Mapping[str, bool] = field(default_factory=dict)
    since: float = 0.0
    join_timeout_s: float = 5.0
    go_on_after_s: float = math.inf

    @property
    def expires(self) -> float:
        """When the join timeout is over."""
        return self.since + self.join_timeout_s

    def wait(self, now: float) -> tuple[str, float]:
        """(what is waited for, until when). If that is not after `now`, it is given up."""
        if not self.expected:
            return "waiting for stragglers until the join timeout", self.expires
        before = now < self.expires or not self.needed
        go_on_at = self.since + self.go_on_after_s
        count, until = (self.expected, self.expires) if before else (self.needed, go_on_at)
        missing = count - len(self.here) - (sum(self.dead.values()) if before else len(self.dead))
        if missing <= 0:
            return "", now
        text = f"waiting for {missing} of {count} expected replica groups"
        if before:
            return text, until
        text += f" ({self._who(count, missing)})"
        if now < go_on_at:
            text += f"; each has to join or be declared dead: {DECLARE_DEAD}"
            if go_on_at < math.inf:
                text += f"; at the latest {self.go_on_after_s:g} s after the start of the wait"
        return text, until

    def _who(self, count: int, missing: int) -> str:
        """Which are missing, if the names are numbers; else which are here."""
        if missing <= MOST_NAMED:
            numbers = {str(number) for number in range(count)}
            if numbers.issuperset(self.here):
                return ", ".join(sorted(numbers.difference(self.here, self.dead), key=int))
        named = sorted(self.here, key=natural)[:MOST_NAMED]
        return f"here: {', '.join(named)}{', ...' * (len(self.here) > MOST_NAMED)}"


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the rules depend on. Times are in seconds.

    Attributes:
        candidates: the replica groups that wait.
        min_replicas: see `LighthouseConfig`.
        roll: which of the job's replica groups are here.
        previous: replica_ids of the last quorum in rank order; empty: there was none.
        head: position of the last commit that this lighthouse knows.
        branch: genesis of the states that come first where none is at `head`.
        torn_timeout_s: how long candidates wait if all of them hold torn states.
    """

    candidates: tuple[Candidate, ...]
    min_replicas: int
    roll: Roll = Roll()
    previous: tuple[str, ...] = ()
    head: Position | None = None
    branch: int = 0
    torn_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The next quorum: replica_ids in rank order, its position, and the members that must heal."""

    members: tuple[str, ...]
    position: Position
    healing: frozenset[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A choice or none, the reason, and when time alone may change the answer (None: never).

    `hopeless`: nothing can change the answer; the candidates must start again.
    """

    choice: Choice | None
    reason: str
    wake_at: float | None = None
    hopeless: bool = False


def too_early(
    roll: Roll, min_replicas: int, first: bool, now: float, missed: Collection[str] = ()
) -> Verdict | None:
    """R1, R5 and R6 by numbers alone, in constant time; None: ask `decide`.

    Without it, a job that fills up with N replica groups would examine all of them N times.
    `first`: no candidate has been in a quorum yet. `missed`: members of an earlier quorum to wait
    for (R5).
    """
    count = len(roll.here)
    if count < min_replicas:
        return Verdict(None, f"waiting for {min_replicas - count} of min_replicas={min_replicas}")
    if missed and now < roll.expires:
        return Verdict(None, missing(missed), roll.expires)
    return waiting(*roll.wait(now), now) if first else None


def waiting(reason: str, until: float, now: float) -> Verdict | None:
    """None: there is no reason to wait, or no longer one."""
    if not reason or now >= until:
        return None
    return Verdict(None, reason, until if until < math.inf else None)


def too_late(roll: Roll, held: bool, step: int, until: float, now: float) -> Verdict | None:
    """R8, after a training that has finished at `step`; None: ask the other rules.

    `held`: a candidate holds that step, or a later one. `until`: when too few are refused.
    """
    if held or len(roll.here) >= roll.wished:
        return None
    reason = (
        f"{OVER} at step {step}, and a replica group that comes back does not start it over: that "
        f"takes all {roll.wished}, or another job id"
    )
    if now >= until:
        return Verdict(None, reason, hopeless=True)
    return Verdict(None, reason, until)


def too_few_left(roll: Roll, min_replicas: int, until: float, now: float) -> Verdict | None:
    """R8, for members that go on after others have finished; None: ask the other rules.

    `until`: when one that has died has had its time to come back.
    """
    short = min_replicas - len(roll.here)
    if short <= 0:
        return None
    if now < until:
        reason = f"waiting for {short} of min_replicas={min_replicas}; {OTHERS_FINISHED}"
        return Verdict(None, reason, until)
    return Verdict(
        None,
        f"{TOO_FEW_LEFT} for min_replicas={min_replicas}: this loop or its data is longer than "
        "theirs",
    )


def decide(situation: Situation, now: float) -> Verdict:
    """Apply R1 to R7 at `now` (seconds, any monotonic clock)."""
    if not situation.candidates:
        return Verdict(None, "no replica group waits")
    position = newest(situation.candidates, situation.head, situation.branch)
    if position is None:
        give_up = situation.roll.since + situation.torn_timeout_s
        wake_at = give_up if now < give_up else None
        return Verdict(None, _TORN, wake_at, hopeless=wake_at is None)
    able = [c for c in situation.candidates if c.can_heal or c.position == position]
    short = situation.min_replicas - len(able)
    if short > 0:
        refused = len(situation.candidates) - len(able)
        extra = f"; {refused} behind and not allowed to heal" if refused else ""
        return Verdict(None, f"waiting for {short} of min_replicas={situation.min_replicas}{extra}")
    choice = Choice(
        members=rank_order(able, situation.previous),
        position=position,
        healing=frozenset(c.replica_id for c in able if c.position != position),
    )
    return Verdict(choice, f"{len(able)} replica groups at step {position.step}")


def newest(
    candidates: Iterable[Candidate], head: Position | None, branch: int = 0
) -> Position | None:
    """R2; None if no candidate holds a whole state. `branch`: see `Situation`."""
    whole = [c for c in candidates if not c.position.lineage.startswith(TORN)]
    if not whole:
        return None
    if head is not None and any(c.position == head for c in whole):
        return head

    def rank(c: Candidate) -> tuple[bool, int, int]:
        return bool(c.held) and c.genesis == branch, c.held, c.position.step

    top = max(map(rank, whole))
    counts = Counter(c.position for c in whole)
    best = [c for c in whole if rank(c) == top]
    most = max(counts[c.position] for c in best)
    best = [c for c in best if counts[c.position] == most]
    return min(best, key=lambda c: (natural(c.name), c.arrival)).position


def genesis(nonce: int, groups: int) -> int:
    """That of a state which begins with a quorum of `groups` replica groups, in the term of `nonce`; 0: the job does
    not say how many it has, and may begin with any of them."""
    return min(groups, MAX_NONCE >> NONCE_BITS) << NONCE_BITS | nonce % (1 << NONCE_BITS)


def founders(genesis: int) -> int:
    """With how many replica groups a state has begun. They were all of them, unless some had not come by the join
    timeout: so of two branches the one that more have begun is the job, and the other one did not know of it."""
    return genesis >> NONCE_BITS


def epochs(join: Join, term: Term, genesis: int, *, begun: bool) -> tuple[int, int]:
    """Where the sender of `join` has not promised itself to `term`, in which the job goes on with states of `genesis`
    (0: there was none yet; `begun`: it had a quorum in this term): (the highest epoch that the sender knows, the
    least of a term that it may follow)."""
    epoch = join.promised.epoch
    least = 0 if term.outranks(join.promised) else epoch + 1
    if join.held and genesis in (0, join.genesis):
        seen = epoch_of(join.held)  # what is committed here must be newer
        if seen > term.epoch or not genesis:
            epoch, least = max(epoch, seen), max(least, seen + 1)
    elif begun and join.quorum_id and founders(join.genesis) > founders(genesis):
        least = max(least, term.epoch + 1)  # a branch that comes first (R2)
    return epoch, least


def rank_order(candidates: Sequence[Candidate], previous: Sequence[str]) -> tuple[str, ...]:
    """R7: replica_ids of `candidates` in rank order; `previous`: the last quorum's."""
    by_id = {c.replica_id: c for c in candidates}
    kept = [replica_id for replica_id in previous if replica_id in by_id]
    known = set(kept)
    fresh = [c for c in candidates if c.replica_id not in known]
    if kept:
        fresh.sort(key=lambda c: c.arrival)
    else:
        fresh.sort(key=lambda c: (natural(c.name), c.arrival))
    return (*kept, *(c.replica_id for c in fresh))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which "replica_10" follows "replica_9"."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts if p)


_TORN = (
    "no waiting replica group holds a whole state, since the source of its heal is gone or can't be reached, or an "
    "update of its own has raised: it goes on when one is back that does. If none is left, start the replica groups "
    "again, from a checkpoint if there is one"
)


def missing(missed: Collection[str]) -> str:
    """Why a job waits: members of its last quorum are not back."""
    named = f" ({', '.join(sorted(missed))})" if len(missed) <= MOST_NAMED else ""
    return f"waiting for {len(missed)} members of the last quorum to come back{named}"
