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

import atexit
import contextlib
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from ft_core.heal import digest
from ft_core.kept_shards import RetryableShards
from ft_core.shell.group_server import group_store
from ft_lightning.shared.launch_env import LaunchEnv
from ft_lightning.shared.step_collectives import ShardRanks
from ft_lightning.trainer import healing
from ft_lightning.trainer.leader import KEY
from ft_lightning.trainer.storage import local_path
from ft_lightning.trainer.strategy import FTDDPMixin

FEWEST_GROUPS = 2
"""One can go on when another dies, and the shards are as small as that allows."""
DRAFT = ".draft"
"""What a folder's name ends with while its ranks write to it."""


class FTFSDPMixin(FTDDPMixin):
    """Strategy for models that are sharded over the ranks of a replica group (FSDP2, tensor
    parallelism), and replicated over groups that may die at any time.

    A group that (re)starts takes its shards of model and optimizers from its peers, rank by rank, and
    joins them at their step. ``group_size`` is by default ``data_parallel_size`` times
    ``tensor_parallel_size``; else the devices are divided by NUM_REPLICA_GROUPS, which is 2 if nothing
    says it. "auto" is the rest of the group for ``data_parallel_size``, and 1 for ``tensor_parallel_size``.

    Its options are those of `__init__`, and of Lightning's ModelParallelStrategy. Threads as in
    `FTDDPMixin`.
    """

    strategy_name = "ft_fsdp"
    _stock_name = "ModelParallelStrategy"
    _ranks_hold = "shards"
    _serves_spares = False
    _shards: RetryableShards | None = None
    _store: Any = None
    # Of Lightning's strategy:
    _data_parallel_size: Any
    _tensor_parallel_size: Any
    _save_distributed_checkpoint: bool
    _device_mesh: Any
    device_mesh: Any
    _is_as_it_is = False

    def _refuse_stock_options(self, given: dict[str, Any]) -> None:
        """All of ModelParallelStrategy's work."""

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

    def _group_size(self, launched: LaunchEnv, devices: int, num_nodes: int) -> int | None:
        sizes = self._data_parallel_size, self._tensor_parallel_size
        size: int | None = self._options.group_size
        if size is None and "auto" not in sizes:
            size = sizes[0] * sizes[1]
        started = launched.ranked or launched.slurm or launched.replica.name or num_nodes > 1
        if size is None and not started and devices > 1:
            groups = self._options.num_replica_groups or launched.replica.num_groups or FEWEST_GROUPS
            if devices % groups:
                raise ValueError(
                    f"devices={devices} cannot be divided into {groups} replica groups that share one "
                    "copy of the model each: say group_size, or num_replica_groups"
                )
            size = devices // groups
        return size

    def _mesh_sizes(self) -> tuple[int, int]:
        """(data parallel, tensor parallel). Raises ValueError if they don't make a group."""
        size = self.scope.group_size
        data, tensor = self._data_parallel_size, self._tensor_parallel_size
        if tensor == "auto":
            tensor = 1 if data == "auto" else max(1, size // data)
        if data == "auto":
            data = max(1, size // tensor)
        if data * tensor != size:
            raise ValueError(
                f"data_parallel_size={data} times tensor_parallel_size={tensor} must be the number of "
                f"processes of a replica group, which has {size} (group_size)"
            )
        return data, tensor

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one tensor-parallel group have the same data."""
        mesh = self.device_mesh["data_parallel"]
        size, rank = mesh.size(), mesh.get_local_rank()
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.training:
            scope = self.scope
            return {"num_replicas": scope.num_groups * size, "rank": scope.index * size + rank}
        return {"num_replicas": size, "rank": rank}

    # ------------------------------------------------------------------ set-up

    def _setup_stock_environment(self) -> None:
        """ModelParallelStrategy's, over the ranks of this group. Raises ValueError."""
        accelerator: Any = self.accelerator
        accelerator.setup_device(self.root_device)
        self.setup_distributed()
        data, tensor = self._mesh_sizes()
        self._join_group()
        self._ranks = ShardRanks(self._in_group)
        if self._device_mesh is None:
            setup = self._from("fabric.strategies.model_parallel")._setup_device_mesh
            self._device_mesh = setup(data, tensor, data * tensor, self.root_device)
        self._module._device_mesh = self._device_mesh

    def _join_group(self) -> None:
        """Make torch's default process group that of this replica group."""
        scope, size = self.scope, self.scope.group_size
        if dist.is_initialized():
            if dist.get_world_size() != size:
                raise ValueError(
                    f"torch's default process group has {dist.get_world_size()} processes, and is to "
                    f"be this replica group with {size}: leave out init_process_group"
                )
            return
        timeout: Any = self._timeout
        self._store = dist.HashStore()
        if size > 1:
            store = group_store(
                scope.store_addr, scope.store_port, timeout.total_seconds(),
                hosts=scope.group_rank == 0,
            )  # fmt: skip
            self._store = dist.PrefixStore(f"ft_lightning/{scope.restarts}", store)
        backend = self._process_group_backend
        find = self._from("fabric.utilities.distributed")
        device = self.root_device
        dist.init_process_group(
            backend or find._get_default_process_group_backend_for_device(device),
            store=self._store,
            rank=scope.group_rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
        )
        atexit.register(_leave_group)

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
        if self._is_as_it_is:
            state: dict[str, Any] = self._module.state_dict()
            return state
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._is_as_it_is:
            state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
            return state
        state = super().optimizer_state(optimizer)
        if not self._save_distributed_checkpoint and self.scope.group_rank == 0 < self.global_rank:
            # The stock method numbers parameters in one process only, and another group may lead.
            stock = importlib.import_module(self._stock_class.__module__)
            state = stock._align_compiled_param_names_with_module(state, self.model)
            kind = OptimStateKeyType.PARAM_ID
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, kind, self._module)
        return state

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self._is_as_it_is

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._is_as_it_is:
            self._module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
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

        If a rank of the leading group dies meanwhile, there is no such folder."""
        if storage_options is not None:
            raise TypeError("ft_fsdp takes no storage_options: it does not use the CheckpointIO")
        if not self._save_distributed_checkpoint:
            if self.is_global_zero and Path(filepath).is_dir():
                _make_way(filepath)
            super().save_checkpoint(checkpoint, filepath)
            return
        if not self._group_leads:
            return
        if self._manager is not None:
            place = {**self._manager.state_dict(), "world_size": self.world_size}
            checkpoint = {**checkpoint, KEY: place}
        weights_only = "optimizer_states" not in checkpoint
        stock = self._from("fabric.strategies.model_parallel")
        whole = self._checkpoints.save(
            _Folder(self, stock), checkpoint, filepath, None, plain=False
        )
        if whole and self._resumption is not None and self.is_global_zero and not weights_only:
            self._resumption.saved(filepath)


class _Folder:
    """Writes a checkpoint as a folder to which each rank of a group writes its shards: in the place of
    Lightning's CheckpointIO. A folder of that name is there as a whole, or not at all."""

    def __init__(self, strategy: FTFSDPMixin, stock: Any) -> None:
        self._strategy, self._stock = strategy, stock

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Called on all ranks of one group. Raises what any of them raises."""
        strategy = self._strategy
        folder = Path(strategy.broadcast(str(local_path(path) or path)))
        first, draft = strategy.scope.group_rank == 0, folder.with_name(folder.name + DRAFT)
        rest = dict(checkpoint)
        shards = {"state_dict": rest.pop("state_dict")}
        for number, state in enumerate(rest.pop("optimizer_states", [])):
            shards[f"optimizer_{number}"] = state
        if first:
            _make_way(draft)
            draft.mkdir(parents=True)
        strategy.barrier()
        self._stock._distributed_checkpoint_save(shards, draft)
        if first:
            torch.save(rest, draft / self._stock._METADATA_FILENAME)
            _make_way(folder)
            draft.rename(folder)
        strategy.barrier()


def _make_way(path: Any) -> None:
    """Remove a checkpoint that another one replaces."""
    if Path(path).is_dir():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
