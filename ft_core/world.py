"""Who contributes to a step, and how the sum is scaled. Pure functions of the quorum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ft_core.replica import View


class WorldSizeMode(Enum):
    """The numerics of a step when more replica groups are there than `min_replica_size`.

    DYNAMIC: all that are healthy take part, and the mean is over all of them.
    FIXED_WITH_SPARES: `min_replica_size` take part; the rest are spares, which contribute nothing
    and step into a gap at once.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True)
class Participation:
    """One member's part in a step.

    Attributes:
        quorum_id: the quorum it holds for.
        replica_rank, replica_world_size: among all members.
        participants: how many contribute.
        rank: among the participants; None if this member contributes nothing.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    participants: int
    rank: int | None


def participation(
    view: View, replica_id: str, mode: WorldSizeMode, min_replica_size: int, *, healing: bool
) -> Participation:
    """The part of `replica_id` under `view`. `healing`: its own state is not the quorum's yet.

    Members that heal contribute nothing in the step in which they join. Who is who follows from
    the member list alone, so that all members agree without a message.
    """
    able = [m.replica_id for m in view.members if not m.healing]
    if mode is WorldSizeMode.FIXED_WITH_SPARES:
        able = able[:min_replica_size]
    mine = None if healing or replica_id not in able else able.index(replica_id)
    return Participation(
        view.quorum_id, view.rank_of(replica_id), len(view.members), len(able), mine
    )
