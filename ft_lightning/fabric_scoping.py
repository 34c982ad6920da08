"""What a Fabric is told about ranks and the world, and how far its collectives reach.

As for a Trainer (`scoping.py`): `world_size` and `global_rank` are nominal, and what is reduced
while a step is under way goes over those who take part in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.manager import Manager
from ft_lightning.nominal import NominalRanks
from ft_lightning.scoping import act_as_leader

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricScopedMixin(NominalRanks, _Base):
    """The part of the strategy that answers questions about ranks, and reduces."""

    _manager: Manager | None = None
    _open = False

    @property
    def local_rank(self) -> int:
        """Number of the process's device on this machine: 0 prints (`fabric.print`)."""
        return self._scope.device if self._scope else 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the leader: the first of those that take part; it saves."""
        return self._leader

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _set_world_ranks(self) -> None:
        """Called by Fabric's connector when the Fabric is made."""
        if self._scope is None:
            scope = self._find_scope(self._num_nodes)
            self._leader = scope.rank == 0 and scope.restarts == 0
            act_as_leader(self._leader, scope)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Within the replica group: from its rank number `src`."""
        return obj if self._scope is None else self._in_group.broadcast(obj, src)
