"""Which state the keeper of states takes, and which process begins with it. PURE.

The keeper (`state_keeper.py`) is a checkpoint in memory: an observer that fetches the state of a
member at intervals. It is not a member, so it has no vote, and no quorum waits for it. What it holds has
a version like any state, and a process that starts compares that with its own:

| rule | |
|---|---|
| K1 | the keeper takes a version only when its source says that it has committed a step from it, unchanged. Of a replica group whose ranks hold shards: when all of its ranks say so of one version |
| K2 | of one job, room and genesis, a newer version (F6: the last quorum, then the step) replaces an older one, and never the other way round; a version of another genesis replaces any |
| K3 | a process that starts (of a replica group of several: its rank 0, for all), and whose supervisor has no other process that trains, begins with what the keeper holds, if that is of its job, room and schema, and newer than its own state (its checkpoint). It joins with that position, as it would with a checkpoint's |
| K4 | a member that learns that its state is not its peers' takes back what it has shown, and what the keeper holds, in memory and on disk: it may be that state. The keeper's next version counts again |

All else follows from the rules for checkpoints (docs/protocol.md): a member that lives holds the head of
the job, or a newer state, and wins; of several positions the newest one wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Version:
    """Of a state: its position, and what `lighthouse.wire.messages.Join` says of it."""

    step: int
    lineage: str
    genesis: int
    held: int

    def newer_than(self, other: Version) -> bool:
        """F6. Both are of one genesis, or `other` has none: it has been in no quorum yet."""
        if not other.held:  # a fresh start, or a checkpoint that does not say it
            return self.step >= other.step
        return (self.held, self.step) > (other.held, other.step)

    def begins_with(self, own: Version) -> bool:
        """K3: whether a process that holds `own` begins with this one."""
        return own.genesis in (0, self.genesis) and self.newer_than(own)


@dataclass(frozen=True, slots=True)
class Card:
    """What a process says about a state on the supervisor's board.

    Attributes:
        address: of the heal server that serves it.
        place: whose it is: job, room, and what all members must have alike.
        version: a member: the newest one that an observer may have fetched, and that did not change
            before its step was committed. The keeper: what it holds. None: none.
        token: which the heal server asks for. The keeper tells none: its readers know it.
        parts: into how many the state is divided, of which this is that of one rank.
    """

    address: str
    place: tuple[str, ...]
    version: Version | None = None
    token: str = ""
    parts: int = 1

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Card:
        """What `row` has made."""
        version = row["version"] and Version(**row["version"])
        return cls(row["address"], tuple(row["place"]), version, row["token"], row["parts"])


def takes(kept: Card | None, shown: Card) -> bool:
    """K2: whether the keeper, which holds `kept`, takes the version of `shown`."""
    if shown.version is None:
        return False
    if kept is None or kept.version is None or kept.place != shown.place:
        return True
    other = kept.version.genesis != shown.version.genesis
    return other or shown.version.newer_than(kept.version)
