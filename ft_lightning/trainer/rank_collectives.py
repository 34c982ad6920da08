"""What Lightning's Trainer, and a script's own calls, ask of the processes together: who they are, and collectives.

Inside a `training_step` they reach all participants of the step, and are tried again with it. Elsewhere they stay
inside the replica group, which lives and dies as a whole.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ft_lightning.shared.step_collectives import CopyRanks, operation
from ft_lightning.shared.strategy_base import StrategyBase
from ft_lightning.trainer.batches import Preparing
from ft_lightning.trainer.driver import GatherInStep, StepDriver


class CollectivesMixin(StrategyBase):
    """The part of the strategy that ranks and collectives go through. The loop's thread."""

    lightning_module: Any
    _driver: StepDriver | None = None
    _ranks = CopyRanks()
    """Of this replica group, for what is to reach all ranks of all groups."""
    _preparing = Preparing()
    _prepared = False
    """Data, for the run under way."""

    @property
    def local_rank(self) -> int:
        """Among the processes of this replica group on this machine."""
        return self._scope.local_rank if self._scope else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Training data are divided over `world_size` processes; other data are not divided."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.training:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": 1, "rank": 0}

    @property
    def is_in_step(self) -> bool:
        return self._driver_of_step() is not None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the participants of the step, inside `training_step`; else over the ranks of
        this group that share one copy (with copies: this rank alone). In place.

        Raises ValueError for an unknown operation. A peer's death is not an error here: the
        reduction is tried again before this returns. The loop's thread."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        driver = self._driver_of_step()
        if driver is None:
            self._ranks.reduce(tensor, operation(reduce_op))
            return tensor
        return driver.reduce(tensor, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Inside `training_step`: a row for each rank, shape ``(world size, *shape)``, and all must bring one shape; else
        ``(1, *shape)``. Rows of a group that is away are copies of another's. `sync_grads`: the gradient of a row is the
        sum of all ranks' of it; else none flow, not to this rank's own row, either. The loop's thread."""
        driver = self._driver_of_step()
        tensor = tensor if sync_grads else tensor.detach()
        if driver is None:
            return self._ranks.gather(tensor)
        return GatherInStep.apply(tensor, driver, self.global_rank, self.world_size)

    def _driver_of_step(self) -> StepDriver | None:
        """What reduces in the open step, which all try again if it fails; None: no step is open."""
        return self._driver if getattr(self._driver, "computing", False) else None

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Of the replica group. Raises GroupBroken if another rank of it is gone. The loop's thread."""
        with self.where_ranks_meet():
            return self._in_group.decide(decision, all_of_them=all)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Within the replica group: from its rank number `src`. Raises GroupBroken if a rank is gone.
        The loop's thread."""
        if self._scope is None:
            return obj
        with self.where_ranks_meet():
            return self._in_group.broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Of the replica group. The first one of a run is after `prepare_data`, which may take long. Raises
        GroupBroken if another rank is gone. The loop's thread."""
        first, self._prepared = not self._prepared, True
        self._preparing.release()
        if self._scope is not None:
            with self.where_ranks_meet():
                self._in_group.barrier(limited=not first)

    def where_ranks_meet(self) -> Any:
        """A rank that ends with an error does not wait for the others."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.interrupted:
            return self._in_group.local_only()
        return contextlib.nullcontext()
