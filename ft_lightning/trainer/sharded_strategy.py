"""The strategy "ft_fsdp": replica groups of several ranks that share one copy of the model.

Inside a group everything is as under Lightning's `ModelParallelStrategy`, over the group's ranks:
`configure_model` shards the model over `self.device_mesh` ("data_parallel", "tensor_parallel"), and
torch's default process group is the group. The replicate dimension is the quorum.

| call | ft_ddp: ranks hold copies | ft_fsdp: ranks share one |
|---|---|---|
| the manager's collectives | reach all ranks of all groups | the ranks of one number |
| `reduce`, `all_gather` in a step | the manager's | over the group's ranks first (`ShardRanks`) |
| the same elsewhere | this process | the ranks of the group |
| validation data | each rank has all of it | divided over "data_parallel", as in stock |
| checkpoint | rank 0 of the leading group writes | all ranks of the leading group, or rank 0 the whole |
| what heals | the whole state | each rank its own shards |
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from ft_core.collectives.sharded import RetryableShards
from ft_core.heal import digest
from ft_lightning.shared.registration import SHARDED
from ft_lightning.shared.shard_groups import ShardGroupMixin, reshard
from ft_lightning.trainer import healing, leader
from ft_lightning.trainer.later_rows import make_up_rows
from ft_lightning.trainer.saves import local_path
from ft_lightning.trainer.strategy import FTDDPMixin
from lighthouse.files import remove_whole


class FTFSDPMixin(ShardGroupMixin, FTDDPMixin):
    """Strategy for models that are sharded over the ranks of a replica group (FSDP2, tensor
    parallelism), and replicated over groups that may die at any time.

    A group that (re)starts takes its shards of model and optimizers from its peers, rank by rank, and
    joins them at their step. ``group_size`` is by default ``data_parallel_size`` times
    ``tensor_parallel_size``; else the devices are divided by NUM_REPLICA_GROUPS, which is 2 if nothing
    says it. "auto" is the rest of the group for ``data_parallel_size``, and 1 for ``tensor_parallel_size``.

    Its options are those of `__init__`, and of Lightning's ModelParallelStrategy. Threads as in
    `FTDDPMixin`.
    """

    strategy_name = SHARDED
    _shards: RetryableShards | None = None
    _is_as_it_is = False

    def _prepare(self) -> None:
        super()._prepare()
        if self._options.validation == "sharded":
            raise ValueError(
                "ft_fsdp divides validation over the ranks of each replica group: leave out "
                'validation="sharded"'
            )

    @property
    def _module(self) -> Any:
        return self.lightning_module

    # ------------------------------------------------------------------ ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one tensor-parallel group have the same data."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        return self._data_part(of_all=trainer is not None and trainer.training)

    # ------------------------------------------------------------------ set-up

    def _setup_stock_environment(self) -> None:
        """ModelParallelStrategy's, over the ranks of this group. Raises ValueError."""
        accelerator: Any = self.accelerator
        accelerator.setup_device(self.root_device)
        self.setup_distributed()
        self._ranks = self._setup_shards()
        self._module._device_mesh = self._device_mesh

    def _setup_evaluation(self, trainer: Any) -> None:
        self._stock_class.setup(self, trainer)

    def _adopt_model(self) -> None:
        assert self._driver is not None
        data = self.device_mesh["data_parallel"].size()
        self._shards = self._driver.adopt_shards(self._module, data)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, gradients are added up in this group, and not averaged over the groups."""
        if self._shards is None:
            yield
            return
        self._shards.require_backward_grad_sync = False
        try:
            yield
        finally:
            self._shards.require_backward_grad_sync = True

    # ------------------------------------------------------------------ state

    def _lineage(self) -> str:
        """That of all shards, in the order of ranks: a state has one name in all ranks of a group."""
        mine = healing.lineage_of_start(self._trainer, allow_objects=self._job.heal_allow_objects)
        return f"start-{digest(self._in_group.gather(mine))}"

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Within it, state dicts have this rank's shards, as in memory; no collective is called."""
        before, self._is_as_it_is = self._is_as_it_is, True
        try:
            yield
        finally:
            self._is_as_it_is = before

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state, gathered by the group's ranks; within `as_it_is` this rank's
        shards."""
        if self._is_as_it_is:
            state: dict[str, Any] = self._module.state_dict()
            return state
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state, gathered by the group's ranks; within `as_it_is` this rank's
        shards."""
        if self._is_as_it_is:
            state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
            return state
        state = super().optimizer_state(optimizer)
        if not self._save_distributed_checkpoint and self.scope.group_rank == 0 < self.global_rank:
            # The stock method numbers parameters in one process only, and another group may lead.
            stock = importlib.import_module(self._stock_class.__module__)
            # Before 2.6.1 there is none, and parts that are compiled fail in the stock method, too.
            align = getattr(stock, "_align_compiled_param_names_with_module", None)
            if align is not None:
                state = align(state, self.model)
            kind = OptimStateKeyType.PARAM_ID
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, kind, self._module)
        return state

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True within `as_it_is`; else `load_checkpoint` restores the optimizers itself."""
        return self._is_as_it_is

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load this rank's shards within `as_it_is`; else `load_checkpoint` has done it."""
        if self._is_as_it_is:
            self._module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load this rank's shards within `as_it_is`; else `load_checkpoint` has done it."""
        if self._is_as_it_is:
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            ):
                optimizer.load_state_dict(state)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Called on all. The ranks of the leading group write a folder together; with
        ``save_distributed_checkpoint=False`` its rank 0 writes one file. See `CheckpointMixin`.

        If a rank of the leading group dies meanwhile, the next leading group writes it."""
        if storage_options is not None:
            raise TypeError("ft_fsdp takes no storage_options: it does not use the CheckpointIO")
        super().save_checkpoint(checkpoint, filepath)

    @property
    def _saves_here(self) -> bool:
        return self._save_distributed_checkpoint or super()._saves_here

    def _writes_checkpoint(self) -> bool:
        if not self._save_distributed_checkpoint:
            return super()._writes_checkpoint()
        with self.where_ranks_meet():
            leads: bool = self._in_group.from_rank_0(self._still_leads)
        if leads and self._over and self._checkpoints.held:
            self._make_up_saves()
        return leads

    def _on_takeover(self) -> None:
        """Rank 0 finds it out, alone. A folder is written by all ranks, where they meet next."""
        if self._save_distributed_checkpoint and self._checkpoints.held:
            leader.keep_logs(self._trainer)
            make_up_rows()
        else:
            super()._on_takeover()

    def teardown(self) -> None:
        """Called by Lightning when a run is over: first write what a lost leader has not
        written."""
        if self._over and self._save_distributed_checkpoint and self._checkpoints.held:
            self._writes_checkpoint()
        super().teardown()
        if self.lightning_module is not None:
            # Which pass was the last one differs between groups that trained and one that passed over the fit.
            reshard(self._module)

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if not self._save_distributed_checkpoint and Path(filepath).is_dir():
            remove_whole(Path(filepath))
        super()._write(checkpoint, filepath, storage_options)

    def _checkpoint_writer(self) -> tuple[Any, bool]:
        if not self._save_distributed_checkpoint:
            return super()._checkpoint_writer()
        return _Folder(self, self._from("fabric.strategies.model_parallel")), False


class _Folder:
    """Writes a checkpoint as a folder to which each rank of a group writes its shards: in the place of
    Lightning's CheckpointIO. A folder of that name is there as a whole, or not at all."""

    def __init__(self, strategy: FTFSDPMixin, stock: Any) -> None:
        self._strategy, self._stock = strategy, stock

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Called on all ranks of one group. Raises what any of them raises."""
        folder = Path(str(local_path(path) or path))
        rest = dict(checkpoint)
        shards = {"state_dict": rest.pop("state_dict")}
        for number, state in enumerate(rest.pop("optimizer_states", [])):
            shards[f"optimizer_{number}"] = state

        def write(draft: Path) -> None:
            draft.mkdir(parents=True, exist_ok=True)
            self._stock._distributed_checkpoint_save(shards, draft)
            if self._strategy.scope.group_rank == 0:
                torch.save(rest, draft / self._stock._METADATA_FILENAME)

        with self._strategy.where_ranks_meet():
            self._strategy.write_as_group(folder, write)
