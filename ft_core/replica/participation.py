"""Which members contribute to a step, and how many. Pure functions of the quorum. PURE.

Ranks of a replica group hold shards of one copy of the model, or a whole copy each (`RanksHold`).
With shards, a rank's collectives reach the ranks of its own `group_rank` in the other groups, and a
participant is a group. With copies they reach all ranks of all groups, group after group, and a
participant is a rank: what averages or counts need not know which ranks form a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ft_core.replica.status import Participation, View


class WorldSizeMode(Enum):
    """Which members contribute when there are more replica groups than `min_replica_size`.

    DYNAMIC: all that are healthy, and the mean is over all of them.
    FIXED_WITH_SPARES: `min_replica_size` of them. The rest are spares, which contribute nothing and
    fill a gap at once.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class RanksHold(Enum):
    """What the ranks of one replica group hold. See the module's docstring."""

    SHARDS = "shards"
    COPIES = "copies"


@dataclass(frozen=True, slots=True)
class CopyIndex:
    """A rank's number among those of its replica group that hold a copy each, and their number."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class ParticipationRule:
    """How a rank's participation follows from a quorum.

    Attributes:
        mode, min_replica_size: see `WorldSizeMode`.
        place: of this rank in its replica group.
    """

    mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    min_replica_size: int = 1
    place: CopyIndex = CopyIndex()

    def part(self, view: View, replica_id: str, *, behind: bool) -> Participation:
        """The participation of `replica_id` under `view`. `behind`: its state is not the quorum's.

        Members that heal contribute nothing in the step in which they join. Ranks follow from the
        member list alone, so that all members agree without a message.
        """
        able = [m.replica_id for m in view.members if not m.healing]
        if self.mode is WorldSizeMode.FIXED_WITH_SPARES:
            able = able[: self.min_replica_size]
        mine = None if behind or replica_id not in able else able.index(replica_id)
        place = self.place
        return Participation(
            quorum_id=view.quorum_id,
            replica_rank=view.rank_of(replica_id),
            replica_world_size=len(view.members),
            participants=len(able) * place.size,
            rank=None if mine is None else mine * place.size + place.rank,
            groups=len(able),
        )
