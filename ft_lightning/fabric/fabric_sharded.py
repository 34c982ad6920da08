"""The strategy "ft_fsdp" of Fabric: replica groups of several ranks that share one copy of each model.

As `ft_lightning.trainer.sharded_strategy` for a Trainer. What a loop reduces or gathers goes over the ranks
of the group first, at every call, and then over the groups as with copies (`fabric_agreements.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ft_core.collectives.retry import RetryableReducer
from ft_core.collectives.sharded import RetryableShards
from ft_core.heal import digest
from ft_lightning.fabric.fabric_strategy import FTFabricMixin
from ft_lightning.shared.registration import SHARDED
from ft_lightning.shared.shard_groups import ShardGroupMixin, reshard
from ft_lightning.shared.strategy_base import NoLongerLeads


def shard_whole(model: nn.Module, mesh: Any) -> nn.Module:
    """The model as the script has sharded it, before `fabric.setup`; if it has not, all of it as one."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


class FTFabricFSDPMixin(ShardGroupMixin, FTFabricMixin):
    """Strategy for models that are sharded over the ranks of a replica group (FSDP2, tensor
    parallelism), and replicated over groups that may die at any time.

    ``parallelize_fn(model, device_mesh)`` shards a model over the group's ranks, as under Lightning's
    ModelParallelStrategy; without it a model is taken as the script has sharded it over
    ``strategy.device_mesh``, or sharded as one. ``group_size`` is by default ``data_parallel_size`` times
    ``tensor_parallel_size``; else the devices are divided by NUM_REPLICA_GROUPS, which is 2 if nothing
    says it.

    Its options are those of `__init__`, and of Lightning's ModelParallelStrategy. Threads as in
    `FTFabricMixin`.
    """

    strategy_name = SHARDED
    _backward_sync_control: Any

    def __init__(
        self, parallelize_fn: Callable[[Any, Any], Any] | None = None, **options: Any
    ) -> None:
        """As Lightning's strategy takes its function. `options`: those of `StrategyBase.__init__`."""
        super().__init__(parallelize_fn=parallelize_fn or shard_whole, **options)

    def _prepare(self) -> None:
        super()._prepare()
        self._shards: dict[nn.Module, RetryableShards] = {}
        self._backward_sync_control = _SyncControl(self._backward_sync_control, self._shards)

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        self._supervise()
        accelerator: Any = self.accelerator
        accelerator.setup_device(self.root_device)
        self._set_world_ranks()
        self._ranks = self._setup_shards()
        self._find_loggers()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._data_part(of_all=True)

    def setup_module(self, module: nn.Module) -> Any:
        """Called by `fabric.setup` and `setup_module`."""
        if not self._started:
            module = self._stock_class.setup_module(self, module)
        return super().setup_module(module)

    def _wrap(self, reducer: RetryableReducer, module: nn.Module) -> Any:
        data = self.device_mesh["data_parallel"].size()
        shards = self._shards[module] = RetryableShards(reducer, module, data_parallel=data)
        self._wrapped.append(shards)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Called by `fabric.setup` and `setup_optimizers`. Raises ValueError for one that was made before
        its model was sharded: it holds other parameters."""
        trained = {p for model in self._models for p in model.parameters()}
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if not held <= trained:
            raise ValueError(
                "this optimizer holds parameters that no model has: fabric.setup shards a model, which "
                "gives it others. Make the optimizer after model = fabric.setup(model), and call "
                "fabric.setup_optimizers(optimizer)"
            )
        return super().setup_optimizer(optimizer)

    def _agree_on_start(self) -> str:
        """Each rank has its own shards: the name covers all of them, in their order."""
        return digest(self._in_group.gather(self._name_of_start()))

    # ------------------------------------------------------------------ checkpoints

    def _save(self, path: Any, state: dict[str, Any], **options: Any) -> bool:
        """The ranks of the leading group write together. If one of them dies meanwhile, the next leading
        group does."""
        if options["storage_options"] is not None:
            raise TypeError("ft_fsdp takes no storage_options: it does not use the CheckpointIO")
        if not self._in_group.from_rank_0(self._still_leads):
            return False
        stock = self._from("fabric.strategies.model_parallel")
        whole = not self._save_distributed_checkpoint
        kept = {"filter": options["filter"], "rank": self.scope.group_rank}

        def write(draft: Path) -> None:
            reshard(state)
            stock._save_checkpoint(path=draft, state=state, full_state_dict=whole, **kept)

        try:
            self.write_as_group(Path(path), write)
        except NoLongerLeads:
            return False
        if self.is_global_zero:
            self._remember(path)
        return True

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Called by `fabric.load`, on all. Of a folder, stock leaves plain values in place of objects
        that load their own state (schedulers, the progress): they load them here."""
        given = dict(state) if isinstance(state, dict) else {}
        reshard(state if isinstance(state, nn.Module) else given)
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        for key, thing in given.items():
            if state[key] is not thing and hasattr(thing, "load_state_dict"):
                thing.load_state_dict(state[key])
                state[key] = thing
        return rest


class _SyncControl:
    """Within `fabric.no_backward_sync`, gradients are added up in this rank. In the place of Lightning's."""

    def __init__(self, stock: Any, shards: dict[nn.Module, RetryableShards]) -> None:
        self._stock, self._shards = stock, shards

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._within(module, enabled)

    @contextmanager
    def _within(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        shards = self._shards.get(module)
        with self._stock.no_backward_sync(module, enabled):
            if shards is not None:
                shards.require_backward_grad_sync = not enabled
            try:
                yield
            finally:
                if shards is not None:
                    shards.require_backward_grad_sync = True
