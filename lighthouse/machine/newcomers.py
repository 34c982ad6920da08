"""Processes that speak for a replica group and are not members of the job yet. PURE.

One is *held back* while its name still belongs to a member whose process may be dying: a restart may be
faster than the news of a death. Or it was *offered* the job's term, under which it must join again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from lighthouse.wire.messages import Join, Peer


@dataclass(slots=True)
class HeldBack:
    """A newcomer whose name is in use. At `expires` (machine's clock) it is refused."""

    join: Join
    peer: Peer
    expires: float


class Newcomers:
    """Those of one job, by replica_id; none is both held back and offered the term. One owner.

    Attributes:
        held_back, offered: read only.
    """

    def __init__(self) -> None:
        self.held_back: dict[str, HeldBack] = {}
        self.offered: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self.held_back) + len(self.offered)

    def __iter__(self) -> Iterator[str]:
        yield from self.held_back
        yield from self.offered

    def hold_back(self, join: Join, peer: Peer, expires: float) -> None:
        """`expires` counts from its first join."""
        held_back = self.held_back.setdefault(join.replica_id, HeldBack(join, peer, expires))
        held_back.join, held_back.peer = join, peer

    def offer(self, replica_id: str, peer: Peer) -> None:
        """It is offered the term through `peer`."""
        self.held_back.pop(replica_id, None)
        self.offered[replica_id] = peer

    def offer_all(self) -> None:
        """A new term has begun, in which all must join again: names are compared then."""
        for replica_id, held_back in list(self.held_back.items()):
            self.offer(replica_id, held_back.peer)

    def follows(self, replica_id: str) -> None:
        """It joins under the term, if it was offered that."""
        self.offered.pop(replica_id, None)

    def forget(self, replica_id: str) -> bool:
        """It waits no longer, or is a member now. Returns whether it was offered the term."""
        self.held_back.pop(replica_id, None)
        return self.offered.pop(replica_id, None) is not None

    def speaker(self, replica_id: str) -> Peer | None:
        """The connection through which it has spoken."""
        held_back = self.held_back.get(replica_id)
        return self.offered.get(replica_id) if held_back is None else held_back.peer

    def of_peer(self, peer: Peer) -> list[str]:
        """Those that are reached through `peer`."""
        return [replica_id for replica_id in self if self.speaker(replica_id) == peer]

    def take_over(self, names: Collection[str]) -> HeldBack | None:
        """The first one whose name is none of `names`, which are in use: it is held back no longer."""
        for replica_id, held_back in self.held_back.items():
            if held_back.join.name not in names:
                return self.held_back.pop(replica_id)
        return None

    def expired(self, now: float) -> list[HeldBack]:
        """Those that have waited for their names for too long; they wait no longer."""
        late = [r for r, held_back in self.held_back.items() if now >= held_back.expires]
        return [self.held_back.pop(replica_id) for replica_id in late]

    def deadline(self) -> float | None:
        """When the first one expires; None: none is held back."""
        return min((each.expires for each in self.held_back.values()), default=None)
