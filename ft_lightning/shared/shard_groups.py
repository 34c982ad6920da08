"""Replica groups whose ranks share one copy of the model: what the strategies of Trainer and Fabric share.

Inside a group all is Lightning's ModelParallelStrategy, over the group's ranks: torch's default process
group is the group, and so is the device mesh. The replicate dimension is the quorum.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ft_core.launch.ending import unless_forked
from ft_core.process_group.nccl import outlive_nccl_errors
from ft_core.shell.group_store import store_of_life
from ft_lightning.shared.launch_env import LaunchEnv
from ft_lightning.shared.step_collectives import ShardRanks
from ft_lightning.shared.strategy_base import NoLongerLeads, StrategyBase
from lighthouse.files import draft_of, put_whole, remove_drafts, remove_whole

FEWEST_GROUPS = 2
"""One can go on when another dies, and the shards are as small as that allows."""


def reshard(state: nn.Module | dict[str, Any]) -> None:
    """After a forward without a backward (a validation) FSDP keeps the outermost module whole. Stock, which
    looks for sharded parameters, would find no model in one that is sharded as one."""
    for thing in state.values() if isinstance(state, dict) else [state]:
        for module in thing.modules() if isinstance(thing, nn.Module) else ():
            if isinstance(module, FSDPModule):
                module.reshard()


class ShardGroupMixin(StrategyBase):
    """The part of a strategy that makes a replica group's mesh. The loop's thread."""

    _stock_name = "ModelParallelStrategy"
    _ranks_hold = "shards"
    # Of Lightning's strategy:
    _data_parallel_size: Any
    _tensor_parallel_size: Any
    _save_distributed_checkpoint: bool
    _process_group_backend: str | None
    _timeout: Any
    _device_mesh: Any
    device_mesh: Any

    def _refuse_stock_options(self, given: dict[str, Any]) -> None:
        """All of ModelParallelStrategy's work."""

    def _group_size(self, launched: LaunchEnv, devices: int, num_nodes: int) -> int | None:
        sizes = self._data_parallel_size, self._tensor_parallel_size
        size: int | None = self._options.group_size
        if size is None and "auto" not in sizes:
            size = sizes[0] * sizes[1]
        started = launched.ranked or launched.slurm or launched.replica.name or num_nodes > 1
        if size is None and not started and devices > 1:
            groups = (
                self._options.num_replica_groups or launched.replica.num_groups or FEWEST_GROUPS
            )
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

    def _data_part(self, *, of_all: bool) -> dict[str, int]:
        """What a sampler is to divide the data by: over the ranks of all shares, or of this group. Ranks of
        one tensor-parallel group have the same data."""
        mesh = self.device_mesh["data_parallel"]
        size, rank = mesh.size(), mesh.get_local_rank()
        if of_all:
            return {
                "num_replicas": self._job.data_shares * size,
                "rank": self.share * size + rank,
            }
        return {"num_replicas": size, "rank": rank}

    def _setup_shards(self) -> ShardRanks:
        """Make the process group and the mesh. Raises ValueError for sizes that do not fit."""
        data, tensor = self._mesh_sizes()
        self._join_group()
        if self._device_mesh is None:
            setup = self._from("fabric.strategies.model_parallel")._setup_device_mesh
            self._device_mesh = setup(data, tensor, data * tensor, self.root_device)
        return ShardRanks(self._in_group)

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
        where = scope.store_addr, scope.store_port
        store = store_of_life(*where, timeout, rank=scope.group_rank, size=size)
        backend = self._process_group_backend
        find = self._from("fabric.utilities.distributed")
        device = self.root_device
        backend = backend or find._get_default_process_group_backend_for_device(device)
        outlive_nccl_errors(backend)
        dist.init_process_group(
            backend,
            store=store,
            rank=scope.group_rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
        )
        atexit.register(unless_forked(_leave_group))

    # ------------------------------------------------------------------ checkpoints

    def write_as_group(self, path: Path, write: Callable[[Path], None]) -> None:
        """Have all ranks of this group `write` a file or folder, which is there as a whole, or not at all.
        Called on all of them. Raises what any of them raises; on all of them NoLongerLeads, if another group
        has become the leading one meanwhile."""
        path = Path(self._in_group.broadcast(str(path)))
        # One that was stopped has another.
        draft = Path(self._in_group.broadcast(str(draft_of(path))))
        if self.scope.group_rank == 0:
            remove_whole(draft)
            draft.parent.mkdir(parents=True, exist_ok=True)
        self._in_group.barrier()
        write(draft)

        def name() -> bool:
            leads = self._still_leads()
            if leads:
                put_whole(draft, path)
                remove_drafts(path.parent)
            else:
                remove_whole(draft)
            return leads

        if not self._in_group.from_rank_0(name):
            raise NoLongerLeads


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
