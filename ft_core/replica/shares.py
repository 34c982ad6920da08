"""PURE. Hot spares: which members of a quorum work on which share of the data.

A job of N + k replica groups with `spares=k` has N shares. Each share has at most one holder; a member
that holds none is a spare: it takes part in each step with weight 0, so that its state is that of
the others after each commit.

| when | what becomes of the shares |
|---|---|
| a holder dies, or leaves | its share is vacant for the rest of the step, whose mean is over those that are left |
| the step is committed | vacant shares go to members without one, in the order of their ranks: from the next step on they contribute, and know it before they fetch their batch |
| the one that died comes back | it heals, and is a spare, if its share has another holder |
| fewer holders are left than `min_replicas` | no step could be committed before the shares move: they move at once |
| no group has held a share yet | a group takes the share of its own number; what is left goes by rank |

The holders are part of the state: they move with each commit, are a function of the state before and of
the members of the quorum, and travel with each heal and checkpoint. So members at one position agree
on them without a message, and the lighthouse knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft_core.replica.status import Participation, View
from lighthouse.wire.messages import name_of

VACANT = ""
Holders = tuple[str, ...]
"""By share: the name of the replica group that holds it, or VACANT."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The holder of each share after the last committed step.

    Attributes:
        holders: see `Holders`.
        least: with fewer holders no step can be committed.
    """

    holders: Holders
    least: int = 1

    @classmethod
    def vacant(cls, count: int, least: int) -> Shares:
        """Those of a job whose first step is to come."""
        return cls((VACANT,) * count, least)

    def within(self, view: View) -> Holders:
        """The holder of each share in the step of `view`: members that heal hold none."""
        able = [name_of(m.replica_id) for m in view.members if not m.healing]
        left = tuple(name if name in able else VACANT for name in self.holders)
        enough = len(self.holders) - left.count(VACANT) >= self.least
        return left if enough else _filled(left, able)

    def after(self, view: View) -> Shares:
        """Those when the step of `view` is committed: all of its members have healed."""
        members = [name_of(m.replica_id) for m in view.members]
        kept = [old if old in members else VACANT for old in self.holders]
        left = tuple(name or old for name, old in zip(self.within(view), kept, strict=True))
        return replace(self, holders=_filled(left, members))

    def loaded(self, holders: Sequence[str]) -> Shares:
        """Those of a peer or of a checkpoint. Of another number of shares: all are vacant."""
        same = len(holders) == len(self.holders)
        return replace(self, holders=tuple(holders) if same else (VACANT,) * len(self.holders))

    def part(self, view: View, part: Participation, replica_id: str) -> Participation:
        """`part` of `replica_id` in the step of `view`, to which members contribute that hold a share."""
        holders, size = self.within(view), part.participants // part.groups
        names = [name_of(m.replica_id) for m in view.members if not m.healing]
        contribute = [name for name in names if name in holders]
        name, rank = name_of(replica_id), None
        contributes = part.rank is not None and name in contribute
        if part.rank is not None and contributes:
            rank = contribute.index(name) * size + part.rank % size
        share = holders.index(name) if contributes else None
        soon = holders if contributes else self.after(view).holders
        held = share is None or self.holders[share] == name
        return replace(
            part,
            participants=len(contribute) * size,
            rank=rank,
            groups=len(contribute),
            share=share,
            reads=soon.index(name) if name in soon else None,
            heir=not held and self._is_late(name, share, contribute),
        )

    def _is_late(self, name: str, share: int | None, contribute: Sequence[str]) -> bool:
        """Whether `name` has its share only since this step began, and others had theirs before."""
        # The first step of all, where a group reads the share of its number.
        if not any(self.holders):
            return name != str(share) and len(contribute) > 1
        return any(each in contribute for each in self.holders)


def _filled(left: Holders, able: Sequence[str]) -> Holders:
    """`left`, whose vacant shares go to those of `able` that hold none."""
    holders = list(left)
    fresh = not any(left)
    if fresh:
        for name in able:
            if name.isdecimal() and int(name) < len(holders):
                holders[int(name)] = name
    spares = [name for name in able if name not in holders]
    for share, name in enumerate(holders):
        if name == VACANT and spares:
            holders[share] = spares.pop(0)
    return tuple(holders)
