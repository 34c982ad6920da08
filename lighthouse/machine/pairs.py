"""Members that can't connect to each other, and which of them a quorum leaves out. PURE.

Theory. All members reach the lighthouse, but two of them may not reach each other: the network
between them is cut, or one advertises an address that does not lead to it. A quorum with such a
*bad pair* can't make its process group, however often it is formed.

D1  A member whose process group can't be made names the members that it could not connect to. The
    word of one end makes the pair bad. One that does not come, since it is slow or has left, is not
    named: its kernel accepts connections. A member that can't make a group whatever the others do
    (its ranks can't connect to each other, say) names itself: it is a bad pair of its own.
    Nor can it be made where connections are accepted and their bytes go nowhere (a firewall, a proxy
    that is stuck). So a member that has been at it for a second names those of which it has heard
    nothing, again and again. Silence has two ends: the pair is bad when each has named the other and
    has spoken after the other did, so that none is just slow or stopped; or when one has named an
    end for three seconds that spoke after these, and hears of it. One end's silence says nothing.
    The first such pair ends the quorum. All others whose ends name each other, or that have been
    silent in one direction for two seconds, go with it: found one by one, each would cost a quorum.
D2  No quorum holds a bad pair. Left out is the member with the most bad pairs; of several with
    equally many, one that is behind; then the last in rank order; and so on until no bad pair is
    left. Where fewer members suffice, as few as possible are left out (within
    `MOST_WEIGHED`). The last member that holds the newest state stays.
D3  A bad pair rests for 1 s, then both ends are asked to connect to each other. If both can, they
    may be in one quorum again. Else it rests for twice as long, up to 60 s. An end that does not
    answer is asked again, since a message may be lost. So a standing cut costs no quorum. After 16
    commits together the pair's failures are forgotten. A pair that is silent can connect, so
    that only a quorum can try it, and a failure costs seconds: its first rest is 4 s, and all such
    pairs rest for as long as the one that has failed most often, so that one quorum tries all.
    Where no quorum can be formed without such a pair, there is no commit that a rest would spare:
    each is over after 1 s.
D4  A quorum that ends before any member has started a collective, for the second time in a row and
    with the same members, is formed again after a pause: 50 ms, 100 ms .. 5 s (`forming.py`). So no
    fault, known or not, makes quorums follow each other in a hot loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations, islice

from lighthouse.machine.members import MemberState
from lighthouse.wire.messages import LEFT_OUT, NO_QUORUM, Silence

Pair = frozenset[str]
"""The replica_ids of both ends; one only: a member that can't make a process group at all."""

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
FIRST_SILENT_REST_S = 4.0
ANSWER_S = 5.0
"""How long an end may take to say whether it can connect, before it is asked again."""
COMMITS_TO_FORGET = 16
MOST_PAIRS = 4_096
"""Pairs that are remembered; the oldest are forgotten first. As many ranks may say that they hear
nothing."""
ONE_WAY_S = 3.0
"""More than a report needs to arrive, so that one which is out of date makes no pair bad."""
ONE_WAY_ALSO_S = 2.0
"""The same, where another pair is known to be silent."""
MOST_WEIGHED = 20_000
"""Times bad pairs: choices of members to leave out that are looked at."""
MOST_NAMES = 4


def leave_out(
    order: Sequence[str], bad: Iterable[Pair], behind: Collection[str]
) -> dict[str, list[str]]:
    """D2: those of `order` (replica_ids in rank order) to leave out, each with the members that it
    can't reach. `behind`: those that do not hold the newest state."""
    pairs = {pair for pair in bad if pair <= set(order)}
    left = _one_by_one(order, pairs, behind)
    return _fewer(order, pairs, behind, len(left)) or left


def _fewer(
    order: Sequence[str], pairs: Set[Pair], behind: Collection[str], most: int
) -> dict[str, list[str]]:
    """The same with fewer members than `most`; empty: there is no such choice."""
    ends = {end for pair in pairs for end in pair}
    holders = set(order).difference(behind)
    worst_first = sorted((e for e in order[::-1] if e in ends), key=lambda end: end not in behind)
    choices = (c for count in range(1, most) for c in combinations(worst_first, count))
    for choice in islice(choices, MOST_WEIGHED // max(1, len(pairs))):
        if all(pair.intersection(choice) for pair in pairs) and not holders <= set(choice):
            return {
                end: [o for o in order if o != end and frozenset((end, o)) in pairs]
                for end in choice
            }
    return {}


def _one_by_one(
    order: Sequence[str], bad: Set[Pair], behind: Collection[str]
) -> dict[str, list[str]]:
    rank = {replica_id: index for index, replica_id in enumerate(order)}
    left, pairs = {}, set(bad)
    holders = set(order).difference(behind)
    while pairs:
        degree = Counter(end for pair in pairs for end in pair)
        for pair in pairs:
            if len(pair) == 1:  # bad with every other one
                degree[min(pair)] += len(order)
        if len(holders) == 1:
            del degree[min(holders)]
        if not degree:
            break  # the last holder can't make a process group: no other choice is better
        worst = max(degree, key=lambda end: (degree[end], end in behind, rank[end]))
        mine = {pair for pair in pairs if worst in pair}
        left[worst] = sorted({end for pair in mine for end in pair} - {worst}, key=rank.__getitem__)
        pairs -= mine
        holders.discard(worst)
    return left


@dataclass(slots=True)
class BadPair:
    """What is known of a pair that has failed. Times are of the machine's clock, in seconds.

    Attributes:
        failures: how often it has failed.
        until: when its rest is over, or when the answers must be there.
        asked: the ends that have not answered yet; empty: it rests, or is good again.
        good: both ends could connect since, or have rested if it is `silent`.
        silent: its ends can connect, and nothing gets through.
        commits: how many were made together since it is good.
    """

    failures: int = 0
    until: float = 0.0
    asked: set[str] = field(default_factory=set)
    good: bool = False
    silent: bool = False
    commits: int = 0

    def fail(self, now: float, *, silent: bool = False) -> None:
        """It has failed (again): it rests."""
        first_s = FIRST_SILENT_REST_S if silent else FIRST_REST_S
        rest_s = min(first_s * 2.0 ** min(self.failures, 16), LONGEST_REST_S)
        self.failures, self.until = self.failures + 1, now + rest_s
        self.good, self.silent, self.commits = False, silent, 0
        self.asked.clear()


Place = tuple[str, int]
"""A rank: the replica_id of its group, its number in it."""


@dataclass(slots=True)
class _Said:
    """What a rank has said of the quorum that is being connected: when for the first and the last
    time; since when it names others."""

    first: float
    last: float
    named: dict[Place, float]


class Silences:
    """Ranks of one quorum that hear nothing of each other, although they can connect (D1)."""

    def __init__(self) -> None:
        self._quorum_id = NO_QUORUM
        self._said: dict[Place, _Said] = {}

    def said(self, replica_id: str, silence: Silence, now: float) -> set[Pair]:
        """The pairs between which nothing gets through, if this rank's word shows one."""
        if silence.quorum_id != self._quorum_id:
            self._quorum_id = silence.quorum_id
            self._said.clear()
        mine = replica_id, silence.rank
        before = self._said.get(mine)
        if before is None and len(self._said) >= MOST_PAIRS:
            return set()
        first, since = (now, {}) if before is None else (before.first, before.named)
        places = zip(silence.members, silence.ranks, strict=True)
        named = {place: since.get(place, now) for place in places}
        self._said[mine] = _Said(first, now, named)
        if not any(self._apart(mine, other, now) for other in named):
            return set()
        return {
            frozenset((one[0], other[0]))
            for one, said in self._said.items()
            for other in said.named
            if self._also_apart(one, other)
        }

    def _apart(self, mine: Place, other: Place, now: float) -> bool:
        theirs, since = self._said.get(other), self._said[mine].named[other]
        if theirs is None:
            return False
        if mine in theirs.named:
            return theirs.last > since and now > theirs.named[mine]
        return theirs.last >= max(since, theirs.first) + ONE_WAY_S

    def _also_apart(self, one: Place, other: Place) -> bool:
        """The same, where another pair is."""
        theirs, since = self._said.get(other), self._said[one].named[other]
        if theirs is None:
            return False
        return one in theirs.named or theirs.last >= max(since, theirs.first) + ONE_WAY_ALSO_S


class Pairs:
    """The bad pairs of one job. One owner. `here`: the job's members by replica_id."""

    def __init__(self, here: Mapping[str, MemberState]) -> None:
        self._here = here
        self._pairs: dict[Pair, BadPair] = {}
        self._due_at: float | None = None  # what `deadline` says, unless `_changed`
        self._changed = False

    def __bool__(self) -> bool:
        """Whether a pair is remembered."""
        return bool(self._pairs)

    # ------------------------------------------------------------------ events

    def reported(
        self, replica_id: str, missed: Collection[str], reached: Iterable[str], now: float
    ) -> None:
        """D1, D3: `replica_id` could not connect to `missed`, and could connect to `reached`."""
        self._changed = True
        for other in missed:
            pair = frozenset((replica_id, other))
            if other in self._here:
                known = self._pairs.setdefault(pair, BadPair(good=True))
                if known.good or known.asked:  # else the other end has said so already
                    known.fail(now)
        for other in reached:
            found = self._pairs.get(frozenset((replica_id, other)))
            if found is not None and replica_id in found.asked:
                found.asked.discard(replica_id)
                found.good = not found.asked
        if missed:  # each question looks at all pairs: those of members that are gone make way
            for pair in [pair for pair in self._pairs if not pair <= self._here.keys()]:
                del self._pairs[pair]
        while len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def silent(self, pairs: Collection[Pair], now: float) -> None:
        """D1, D3: the ends of `pairs` can connect, and nothing gets through."""
        self._changed = True
        for pair in sorted(pairs, key=sorted):
            if pair <= self._here.keys():
                self._pairs.setdefault(pair, BadPair()).fail(now, silent=True)
        resting = [known for known in self._pairs.values() if known.silent and not known.good]
        until = max((known.until for known in resting), default=now)
        for known in resting:
            known.until = until

    def hurry(self, now: float) -> None:
        """D3: no quorum can be formed without a bad pair, so no rest spares a commit."""
        for known in self._pairs.values():
            if not (known.good or known.asked) and known.until > now + FIRST_REST_S:
                known.until, self._changed = now + FIRST_REST_S, True

    def committed(self, members: Collection[str]) -> None:
        """`members` have made a commit together, so all of them can connect."""
        self._changed = True
        for pair, known in list(self._pairs.items()):
            if all(end in members for end in pair):
                known.good, known.commits = True, known.commits + 1
                known.asked.clear()
                if known.commits >= COMMITS_TO_FORGET:
                    del self._pairs[pair]

    def expire(self, now: float) -> list[tuple[str, str]]:
        """D3: (asked, to reach) for each end that is to be asked now."""
        questions: list[tuple[str, str]] = []
        self._changed = True
        for pair, known in list(self._pairs.items()):
            if known.good or known.until > now:
                continue
            if not pair <= self._here.keys():
                del self._pairs[pair]  # an end is gone; one that returns is found out again
            elif known.silent or len(pair) == 1:
                known.good = True
            else:
                known.asked, known.until = known.asked or set(pair), now + ANSWER_S
                one, two = sorted(pair)
                questions += [(a, b) for a, b in ((one, two), (two, one)) if a in known.asked]
        return questions

    def deadline(self) -> float | None:
        """When `expire` wants to be called; None: not before another event. The server asks after each
        message, so it looks at all pairs only after a change."""
        if self._changed:
            resting = (known.until for known in self._pairs.values() if not known.good)
            self._due_at, self._changed = min(resting, default=None), False
        return self._due_at

    # ------------------------------------------------------------------ questions

    def bad(self) -> set[Pair]:
        """Pairs that no quorum may hold now."""
        return {pair for pair, known in self._pairs.items() if not known.good}

    def apart(self, replica_id: str, others: Collection[str]) -> bool:
        """Whether `replica_id` must not be in a quorum with (all of) `others`."""
        return any(
            replica_id in pair and all(end in others or end == replica_id for end in pair)
            for pair in self.bad()
        )

    def sentence(self, left: str, others: Sequence[str], now: float) -> str:
        """For people: why `left` is left out, and until when. Empty: it no longer need be.

        `others`: those that it can't reach.
        """
        pairs = [frozenset((left, other)) for other in others] or [frozenset((left,))]
        known = [self._pairs[pair] for pair in pairs if pair in self.bad()]
        if not known:
            return ""
        wait_s = max((one.until - now for one in known if not one.asked), default=0.0)
        name = self._here[left].name
        if not others:
            return f"{name} can't make a process group: it {LEFT_OUT} for {wait_s:.1f} s"
        shown = ", ".join(self._here[o].name for o in others[:MOST_NAMES] if o in self._here)
        shown += ", ..." * (len(others) > MOST_NAMES)
        again = f"they try again in {wait_s:.1f} s" if wait_s > 0 else "they try again now"
        return (
            f"{name} and {shown} can't connect to each other: {name} {LEFT_OUT} until they can, "
            f"and {again}"
        )
