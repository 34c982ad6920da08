"""What a Fabric is told about ranks and the world, and how far its collectives reach.

As for a Trainer (`scoping.py`): `world_size` and `global_rank` are nominal, the replica group is
one process, and what is reduced while a step is under way goes over those who take part in it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ft_core.manager import Manager
from ft_lightning.collectives import gather_in_step, reduce_in_step
from ft_lightning.nominal import NominalRanks
from ft_lightning.options import Options
from ft_lightning.scope import resolve
from ft_lightning.scoping import act_as_leader

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricScopedMixin(NominalRanks, _Base):
    """The part of the strategy that answers questions about ranks, and reduces."""

    _options: Options
    _manager: Manager | None = None
    _open = False

    @property
    def local_rank(self) -> int:
        """Number of the process's device on this machine: 0 prints (`fabric.print`)."""
        return self._scope.device if self._scope else 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this group is the leader: the first of those that take part; it saves."""
        return self._leader

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _set_world_ranks(self) -> None:
        """Called by Fabric's connector when the Fabric is made."""
        if self._scope is None:
            devices = len(self.parallel_devices or ())
            self._scope = resolve(
                os.environ,
                devices=devices,
                num_nodes=self._num_nodes,
                num_replica_groups=self._options.num_replica_groups,
                replica_name=self._options.replica_name,
                lighthouse=self._options.lighthouse,
            )
            self._leader = self._scope.index == 0 and self._scope.restarts == 0
            act_as_leader(self._leader, self._scope)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Between fetching a batch and `optimizer.step()`: over all who take part. Else as it is."""
        if not isinstance(tensor, Tensor) or not self._open or self._manager is None:
            return tensor
        with torch.no_grad():
            target = tensor.clone() if tensor.requires_grad else tensor
            return reduce_in_step(self._manager, target, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As `all_reduce`: `(participants, *shape)` within a step, else the tensor as it is."""
        if not self._open or self._manager is None:
            return tensor
        if sync_grads and tensor.requires_grad:
            raise ValueError(
                "ft_ddp cannot send gradients back through all_gather: the replica groups that "
                "a loss was made of may be gone by then; gather detached tensors"
            )
        with torch.no_grad():
            return gather_in_step(self._manager, tensor)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Of the replica group, which is one process: nobody waits for a group that may be dead."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Within the replica group, which is one process."""
        return obj
