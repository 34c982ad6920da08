"""What a Fabric is told about ranks and the world, and how far its collectives reach.

As for a Trainer (`world_view.py`): `world_size` and `global_rank` are nominal, and what is reduced
while a step is under way goes over those who take part in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ft_core.environment import ENV_REPLICA_GROUP
from ft_lightning.shared.strategy_base import StrategyBase
from ft_lightning.shared.topology import ENV_NODE

_OF_TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricScopedMixin(StrategyBase, _Base):
    """The part of the strategy that answers questions about ranks, and reduces."""

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
            if _started_by_cli(os.environ):
                _leave_torchrun()
            self._find_scope(self._num_nodes)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Within the replica group: from its rank number `src`."""
        return obj if self._scope is None else self._in_group.broadcast(obj, src)


def _started_by_cli(env: Mapping[str, str]) -> bool:
    """Whether `fabric run` has had torchrun start this process, one of several."""
    several = env.get("WORLD_SIZE", "1") != "1" and "TORCHELASTIC_RUN_ID" in env
    return env.get("LT_CLI_USED") == "1" and several and ENV_REPLICA_GROUP not in env


def _leave_torchrun() -> None:
    """Of the processes that torchrun has started on this machine, the first one goes on, to look
    after the replica groups, and the others end: torchrun ends all when one dies."""
    if os.environ.get("LOCAL_RANK") != "0":
        raise SystemExit(0)
    os.environ[ENV_NODE] = os.environ.get("GROUP_RANK", "0")
    for name in list(os.environ):
        if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
