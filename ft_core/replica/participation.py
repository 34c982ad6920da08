"""Who contributes to a step, and how the sum is scaled. Pure functions of the quorum.

Ranks of a replica group hold shards of one copy of the model, or a whole copy each (`RanksHold`).
With shards, a rank's collectives reach those of its own `group_rank` in the other groups, and a
participant is a group. With copies they reach all ranks of all groups, group after group, and a
participant is a rank: nothing that averages or counts needs to know which ranks live together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ft_core.replica.status import View
from lighthouse.wire.messages import Member


class WorldSizeMode(Enum):
    """The numerics of a step when more replica groups are there than `min_replica_size`.

    DYNAMIC: all that are healthy take part, and the mean is over all of them.
    FIXED_WITH_SPARES: `min_replica_size` take part; the rest are spares, which contribute nothing
    and step into a gap at once.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class RanksHold(Enum):
    """What the ranks of one replica group hold. See the module's docstring."""

    SHARDS = "shards"
    COPIES = "copies"


@dataclass(frozen=True, slots=True)
class CopyIndex:
    """A rank's place in its replica group, as far as collectives see it."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Participation:
    """One member's part in a step.

    Attributes:
        quorum_id: the quorum it holds for.
        replica_rank, replica_world_size: among all members.
        participants: how many contribute: groups, or ranks that each hold a copy.
        rank: among the participants; None if this member contributes nothing.
        groups: how many replica groups contribute.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    participants: int
    rank: int | None
    groups: int


def participation(
    view: View,
    replica_id: str,
    mode: WorldSizeMode,
    min_replica_size: int,
    *,
    healing: bool,
    place: CopyIndex = CopyIndex(),
) -> Participation:
    """The part of `replica_id` under `view`. `healing`: its own state is not the quorum's yet.
    `place`: of this rank among those of its group that hold a copy each.

    Members that heal contribute nothing in the step in which they join. Who is who follows from
    the member list alone, so that all members agree without a message.
    """
    able = [m.replica_id for m in view.members if not m.healing]
    if mode is WorldSizeMode.FIXED_WITH_SPARES:
        able = able[:min_replica_size]
    mine = None if healing or replica_id not in able else able.index(replica_id)
    return Participation(
        quorum_id=view.quorum_id,
        replica_rank=view.rank_of(replica_id),
        replica_world_size=len(view.members),
        participants=len(able) * place.size,
        rank=None if mine is None else mine * place.size + place.rank,
        groups=len(able),
    )


class ParticipationRule:
    """One rank's participation from step to step: nothing is counted in the steady state.

    `place`, `mode`, `min_replica_size`: as in `participation`. One thread at a time.
    """

    def __init__(self, mode: WorldSizeMode, min_replica_size: int, place: CopyIndex) -> None:
        self.mode, self._min_replica_size, self._place = mode, min_replica_size, place
        self._known: Participation | None = None
        self._members: tuple[Member, ...] = ()
        self._behind = False

    def under(self, view: View, replica_id: str, *, behind: bool) -> Participation:
        """The participation of `replica_id`; `behind`: the quorum counts it as healing."""
        known = self._known
        # One tuple of members serves from step to step.
        if (
            known is None
            or view.members is not self._members
            or known.quorum_id != view.quorum_id
            or behind != self._behind
        ):
            known = participation(
                view, replica_id, self.mode, self._min_replica_size, healing=behind,
                place=self._place,
            )  # fmt: skip
            self._known, self._members, self._behind = known, view.members, behind
        return known
