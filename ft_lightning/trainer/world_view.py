"""What a Trainer is told about ranks and the world, and how far its collectives reach.

Barriers, broadcasts and boolean decisions stay inside the replica group
(`ft_core.shell.intra_group`), which lives and dies as a whole: none of them waits for a group that
died. The quorum carries gradients, what is reduced or gathered inside `training_step`
(`driver.py`), the votes (`decisions.py`), and agreements at the ends of validations and epochs
(`agreements.py`).

`trainer.world_size` counts the processes of all configured groups, and `trainer.global_rank` is
this one's number among them; `trainer.strategy.num_participants` is how many contribute right now.
Training data is sharded over all configured processes. Validation, test and prediction data is not
sharded: each group computes the same metrics, so that early stopping and plateau schedulers decide
alike everywhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ft_core.launch.sigterm import Sigterm
from ft_lightning.shared.step_collectives import refuse_gradients
from ft_lightning.shared.strategy_base import StrategyBase
from lighthouse.files import machine_lock

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class _Ending(Sigterm):
    """Ends the fit instead of the process."""

    def __init__(self, strategy: ScopedMixin) -> None:
        super().__init__(strategy._awaits_quorum)
        self._strategy = weakref.ref(strategy)

    def end(self) -> None:
        strategy = self._strategy()
        if strategy is not None:  # else nothing of ours waits
            strategy._leave()


class ScopedMixin(StrategyBase, _Base):
    """The part of the strategy that answers questions about ranks, and ends a fit on SIGTERM."""

    _driver: Any
    _sigterm: Sigterm | None = None
    _prepare_lock: int | None = None
    _prepared = False

    @property
    def local_rank(self) -> int:
        """Among the processes of this replica group on this machine."""
        return self._scope.local_rank if self._scope else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.training:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": 1, "rank": 0}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the participants of the step, inside `training_step`; else as it is. In place.

        Raises ValueError for an operation that there is not. What peers cost (a death, say) is no
        error here: it is tried again before this returns. The loop's thread."""
        if not isinstance(tensor, torch.Tensor) or not self._reaches_peers():
            return tensor
        reduced: torch.Tensor = self._driver.reduce(tensor, reduce_op)
        return reduced

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Inside `training_step`: a row for each participant of the step, shape
        ``(participants, *shape)``, and all must bring one shape; else ``(1, *shape)``.

        Raises ValueError for a tensor through which gradients are to flow. The loop's thread."""
        if not self._reaches_peers():
            return tensor.unsqueeze(0)
        if sync_grads:
            refuse_gradients(tensor)
        rows: torch.Tensor = self._driver.gather(tensor)
        return rows

    def _reaches_peers(self) -> bool:
        """Whether this call belongs to an open step, which all try again if it fails."""
        return getattr(self._driver, "computing", False)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Of the replica group. Raises GroupBroken if another rank of it is gone. The loop's thread."""
        with self._where_ranks_meet():
            return self._in_group.decide(decision, all_of_them=all)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Within the replica group: from its rank number `src`. Raises GroupBroken if a rank is gone.
        The loop's thread."""
        if self._scope is None:
            return obj
        with self._where_ranks_meet():
            return self._in_group.broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Of the replica group. The first one after `prepare_data` lets the next process in. Raises
        GroupBroken if another rank is gone. The loop's thread."""
        first, self._prepared = not self._prepared, True
        self.release_machine()
        if self._scope is not None:
            with self._where_ranks_meet():
                self._in_group.barrier(limited=not first)

    def _where_ranks_meet(self) -> Any:
        """A rank that ends with an error does not wait for the others."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.interrupted:
            return self._in_group.local_only()
        return contextlib.nullcontext()

    def set_world_ranks(self) -> None:
        """Called by Lightning when the Trainer is made, and before a run."""
        if self._scope is None:
            self._find_scope(self.num_nodes)

    # ------------------------------------------------------------------ SIGTERM

    def on_train_start(self) -> None:
        super().on_train_start()
        self._sigterm = _Ending(self)
        self._sigterm.watch()  # calls Lightning's, which is there by now, first

    def teardown(self) -> None:
        if self._sigterm is not None:
            self._sigterm.unwatch()
            self._sigterm = None
        super().teardown()

    def _awaits_quorum(self) -> bool:
        """Whether the loop waits for peers. In a signal handler of its thread: takes no lock."""
        asks = getattr(self._driver, "waits", False)
        return asks and self._manager is not None and not self._manager.in_quorum()

    def _leave(self) -> None:
        """Raise what ends a fit on SIGTERM."""
        raise NotImplementedError

    # ------------------------------------------------------------------ prepare_data

    def release_machine(self) -> None:
        """Let the next process of this machine prepare its data."""
        if self._prepare_lock is not None:
            os.close(self._prepare_lock)
            self._prepare_lock = None


def schema(trainer: Any) -> dict[str, str]:
    """What replica groups must have in common; one that differs is refused when it joins."""
    module = trainer.lightning_module
    return {
        "batches an epoch": str(trainer.num_training_batches),
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "precision": str(trainer.precision),
        "gradient clipping": f"{trainer.gradient_clip_val} {trainer.gradient_clip_algorithm}",
        "optimizers": ", ".join(type(o).__name__ for o in trainer.optimizers),
        "schedulers": ", ".join(
            f"{type(c.scheduler).__name__} each {c.frequency} {c.interval}"
            for c in trainer.lr_scheduler_configs
        ),
        "optimization": "automatic" if module.automatic_optimization else "manual",
    }


def lock_machine(job_id: str) -> int:
    """Let one process of this script and user at a time prepare data on this machine.

    Returns a file descriptor that holds the lock until it is closed or the process ends.
    """
    return machine_lock("ft_lightning", f"{os.path.abspath(sys.argv[0])} {job_id}")
