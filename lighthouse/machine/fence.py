"""Which members suffice for a commit, and for going on at another lighthouse. PURE.

Theory. Several lighthouses may decide for one job without knowing of each other, and a member that
can't be reached may still train. The members are the memory. Each has promised itself to one term
(F1), and its vote counts for that term alone. A quorum rests on lists of members, its *bases*:

F2  A commit needs the yes of half of each base. From then on the quorum rests on its own list.
F3  A term without a quorum takes over with the reports of more than half of each list on which the
    newest quorum rests. So the two share a member, which says what was committed, or that it is in doubt.
F4  A death counts if it is proven, and the term is known that the dead had promised. The dead counts
    as one of the half (F2) of that term, and for no takeover. A list of which all others are proven
    dead needs only those that live, but at least one: the state of a list that is dead is lost.
F5  A step in doubt is committed where it may have been committed.
F6  The newest state is that of the newest quorum, then that of the highest step.
F7  Without a quorum among them, or without the half, all names of the job are needed: then no member
    is elsewhere. The first commit needs all of them.

The rules hold for whatever messages are lost, late or repeated, and whatever clocks say.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

Ballot = tuple[int, int]
"""(epoch, nonce) of a term. Ballots are ordered."""
Members = frozenset[str]


@dataclass(frozen=True, slots=True)
class Promise:
    """What a member says when it promises itself to a term.

    Attributes:
        quorum: the last quorum that it took; 0: none.
        committed: it knows of a commit under it.
        step, lineage, held: its state, and the newest quorum in which that was the position.
        doubt: the lineage that its step in doubt would have made, if it has voted yes and heard nothing.
    """

    quorum: int
    committed: bool
    step: int
    lineage: Hashable
    held: int
    doubt: Hashable = None


@dataclass(frozen=True, slots=True)
class Record:
    """The newest quorum, as its members report it: its members, bases, and the state it started from."""

    members: Members
    bases: tuple[Members, ...]
    step: int
    lineage: Hashable


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a new term goes on with.

    Attributes:
        bases: the lists of which its first commit needs half each.
        source: the member whose state is taken.
        doubt: what becomes of that member's step in doubt: "commit", "discard" or "either"; "": it
            has none.
    """

    bases: tuple[Members, ...]
    source: str
    doubt: str = ""


def enough(
    here: Collection[str],
    members: Members,
    ballot: Ballot,
    dead: Mapping[str, Ballot],
    *,
    more: bool,
) -> bool:
    """Whether those of `members` that are `here` suffice for a commit (F2), or, `more`, for a takeover (F3).

    `dead`: members that are proven dead, and the ballots that they had promised.
    """
    present = members.intersection(here)
    if not present:
        return False
    if present >= members - _harmless(members, ballot, dead):
        return True
    if more:
        return 2 * len(present) > len(members)
    served = {m for m in members if dead.get(m) == ballot}
    return 2 * len(present | served) >= len(members)


def may_have_committed(
    lists: Iterable[Members], here: Collection[str], yes: Collection[str]
) -> bool:
    """Whether a step can be committed if all that are away, and `yes` of those here, said yes to it."""
    for members in lists:
        voted = {m for m in members if m not in here or m in yes}
        if 2 * len(voted) < len(members) and not voted >= members.intersection(here):
            return False
    return True


def takeover(
    ballot: Ballot,
    reports: Mapping[str, Promise],
    obituaries: Mapping[str, tuple[Ballot, Promise]],
    record: Record | None,
    *,
    complete: bool,
) -> Takeover | None:
    """What the term of `ballot` starts from; None: it has to wait.

    Args:
        reports: of the members that have promised themselves to it.
        obituaries: of members that are proven dead: what they had promised, and where they stood.
        record: of the newest quorum that one of them names; None: none of them was in one.
        complete: all names of the job are here (F7).
    """
    dead = {name: promised for name, (promised, _) in obituaries.items()}
    each = tuple(frozenset((name,)) for name in sorted(reports))
    if record is None:
        return Takeover(each, _newest(reports)) if complete else None
    known = [*reports.values(), *(report for _, report in obituaries.values())]
    top = max(report.quorum for report in known)
    sure = any(report.committed for report in known if report.quorum == top)
    bases = (record.members,) if sure else _bases(reports, record, top)
    if not all(enough(reports, members, ballot, dead, more=True) for members in bases):
        if not complete:
            return None
        bases = tuple(dict.fromkeys((*bases, *each)))
    source = _newest(reports, top, record)
    chosen = _state(reports[source], record)
    doubters = {
        name
        for name, report in reports.items()
        if report.quorum == top and report.doubt is not None and report.lineage == chosen[1]
    }
    if not doubters:
        return Takeover(bases, source)
    everyone = record.members.union(*bases)
    if everyone <= set(reports) | _harmless(everyone, ballot, dead):
        return Takeover(bases, source, "either")  # none of those that are away can have acted on it
    lists = (record.members,) if sure else record.bases
    committed = may_have_committed(lists, reports, doubters)
    return Takeover(bases, source, "commit" if committed else "discard")


def _bases(reports: Mapping[str, Promise], record: Record, top: int) -> tuple[Members, ...]:
    """The lists on which a quorum rests without a known commit: its own, too, if there may be one."""
    said_yes = {
        name
        for name, report in reports.items()
        if report.quorum == top and (report.doubt is not None or report.step > record.step)
    }
    if may_have_committed(record.bases, reports, said_yes):
        return tuple(dict.fromkeys((*record.bases, record.members)))
    return record.bases


def _harmless(members: Members, ballot: Ballot, dead: Mapping[str, Ballot]) -> Members:
    """Those that are dead, and have promised no later ballot."""
    return frozenset(m for m in members if m in dead and dead[m] <= ballot)


def _state(report: Promise, record: Record | None) -> tuple[int, Hashable]:
    """Where a member stands: at its doubt, if the newest quorum started from its outcome."""
    if record is not None and report.doubt is not None and report.doubt == record.lineage:
        return record.step, record.lineage
    return report.step, report.lineage


def _newest(reports: Mapping[str, Promise], top: int = 0, record: Record | None = None) -> str:
    """F6: the member that holds the newest state."""

    def rank(name: str) -> tuple[int, int, str]:
        report = reports[name]
        settled = record is not None and report.doubt is not None and report.doubt == record.lineage
        return top if settled else report.held, _state(report, record)[0], name

    return max(reports, key=rank)
