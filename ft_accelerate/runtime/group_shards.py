"""FSDP2: a replica group of several processes shares one copy of the model.

Accelerate's mesh is ("dp_replicate", "dp_shard"). Here the mesh has the second dimension only, over the
processes of this group; the first is the quorum. What Accelerate does within a mesh it does as it is.

| | processes hold copies | processes hold shards |
|---|---|---|
| torch's default process group | this process | this replica group |
| a gradient | all processes | FSDP: the group; then the processes of one number in all groups |
| `gather`, `reduce`, ... | all processes | those of one number, then the group |
| what heals | the whole state | each process its own shards |

The processes of a group forward together: FSDP gathers weights. So a model answers from memory, in the
script's past, where it can do so in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from ft_accelerate.options import FSDP1, uses
from ft_accelerate.runtime.models import Memory
from ft_accelerate.runtime.process import active, while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.startup import GroupRanks
from ft_core.collectives.sharded import RetryableShards

SHARD, REPLICATE = "dp_shard", "dp_replicate"
REFUSED = ("tp_size", "cp_size", "sp_size")


def choose(runtime: Runtime, plugin: Any, parallelism: Any) -> None:
    """An Accelerator is made with these, or with what the environment says. Raises ValueError for what
    is not possible here. Without a ParallelismConfig the processes of a replica group share the model."""
    if plugin is None and not uses("FSDP"):
        return
    plugin = plugin or FullyShardedDataParallelPlugin()
    if parallelism is None and uses("PARALLELISM_CONFIG"):
        parallelism = ParallelismConfig()
    if plugin.fsdp_version != 2:
        raise ValueError(FSDP1)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("fault tolerance can't average what FSDP offloads: leave out cpu_offload")
    ranks = runtime.group_ranks
    size = ranks.place.group_world_size
    has = ranks.num_processes // size, size
    if has[1] == 1:
        raise ValueError(
            "FSDP shards a model over the processes of a replica group, and there is one process in "
            f"each: set {SHARD}_size in the ParallelismConfig, and the same fault_tolerance_group_size"
        )
    if parallelism is not None:
        for name in REFUSED:
            if getattr(parallelism, name, 1) > 1:  # Accelerate 1.11 has no sp_size
                raise ValueError(
                    f"fault tolerance takes {REPLICATE}_size and {SHARD}_size of a "
                    f"ParallelismConfig: leave out {name}"
                )
        asked = parallelism.dp_replicate_size, parallelism.dp_shard_size
        if asked != has:
            raise ValueError(
                f"the ParallelismConfig asks for {asked[0]} replicas of {asked[1]} processes, and there "
                f"are {has[0]} replica groups of {has[1]}: let {REPLICATE}_size be the number of "
                f"replica groups (without hot spares), and {SHARD}_size their size (group_size)"
            )
    ranks.hold_shards()


def mark(state: Any) -> None:
    """Have Accelerate shard on the CPU, too: it asks for several GPUs by their distributed type."""
    runtime = active()
    sharding = runtime is not None and runtime.group_ranks.shards
    if sharding and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


@while_active
def build_device_mesh(runtime: Runtime, original: Any, self: Any, device_type: str) -> Any:
    """The part of the mesh within this replica group, with the names that Accelerate asks for."""
    if not runtime.group_ranks.shards:
        return original(self, device_type)
    mesh = init_device_mesh(
        device_type, (runtime.group_ranks.place.group_world_size,), mesh_dim_names=(SHARD,)
    )
    for name in ("dp", "dp_shard_cp", "dp_cp"):
        mesh._flatten(name)
    return mesh


@while_active
def fsdp_dim_names(runtime: Runtime, original: Any, self: Any) -> Any:
    """Without the replicate dimension, which is the quorum."""
    return [name for name in original(self) if name != REPLICATE]


@while_active
def mesh_of_loaders(runtime: Runtime, original: Any, self: Any) -> Any:
    """None, so that data is divided over all processes of all groups."""
    return None if runtime.group_ranks.shards else original(self)


class OfGroup:
    """An Accelerator as it is within one replica group, for what reads and writes its shards."""

    def __init__(self, accelerator: Any, ranks: GroupRanks) -> None:
        self._accelerator, self._ranks = accelerator, ranks
        self.process_index = ranks.place.group_rank
        self.is_main_process = self.process_index == 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def wait_for_everyone(self) -> None:
        """Wait for the ranks of the replica group."""
        self._ranks.from_rank_0(lambda: None)


@while_active
def load_full_state_dict(
    runtime: Runtime, original: Any, accelerator: Any, *args: Any, **kwargs: Any
) -> Any:
    """With `cpu_ram_efficient_loading`: each group's first process has the weights, and gives them to the
    others of its group."""
    return original(OfGroup(accelerator, runtime.group_ranks), *args, **kwargs)


@while_active
def save_shards(
    runtime: Runtime, original: Any, plugin: Any, accelerator: Any, *args: Any, **kwargs: Any
) -> Any:
    """The processes of the leading group write one copy of the model, or of its moments, together."""
    ranks = runtime.group_ranks
    if not ranks.from_rank_0(lambda: runtime.live and runtime.leadership.group_leads):
        return None
    return original(plugin, OfGroup(accelerator, ranks), *_raw(args), **_raw_named(kwargs))


@while_active
def load_shards(
    runtime: Runtime, original: Any, plugin: Any, accelerator: Any, *args: Any, **kwargs: Any
) -> Any:
    """The processes of each group read one copy together."""
    group = OfGroup(accelerator, runtime.group_ranks)
    return original(plugin, group, *_raw(args), **_raw_named(kwargs))


def _raw(args: Iterable[Any]) -> list[Any]:
    """Without Accelerate's wrapper of an optimizer: torch has a fresh one step with zeros, to find what its
    state consists of, and that is not a step of the script."""
    return [each.optimizer if isinstance(each, AcceleratedOptimizer) else each for each in args]


def _raw_named(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(kwargs, _raw(kwargs.values()), strict=True))


CHECKPOINTS = {
    "save_fsdp_model": save_shards,
    "save_fsdp_optimizer": save_shards,
    "load_fsdp_model": load_shards,
    "load_fsdp_optimizer": load_shards,
}
"""Functions of Accelerate, in each module that has them under its own name."""


@while_active
def prepare(runtime: Runtime, original: Any, self: Any, *args: Any) -> Any:
    """`Accelerator._prepare_fsdp2`: the model that it returns averages its gradients."""
    result = original(self, *args)
    for model in result:
        if isinstance(model, nn.Module):
            ranks = runtime.group_ranks
            shards = RetryableShards(runtime.reducer, model, data_parallel=ranks.sharers)
            _make_alike(model, Memory(runtime.position, ranks.all_agree), shards)
            runtime.trains(model)
    return result


def _make_alike(model: Any, memory: Memory, shards: RetryableShards) -> None:
    """Give `model` what a `FaultTolerantModel` has. It stays an FSDPModule of its class."""
    stock = type(model)

    def __call__(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return memory.forward(
            self,
            lambda _: stock.__call__(self, *inputs, **kwargs),
            inputs,
            kwargs,
            counts=GradientState().sync_gradients,
        )

    names = {
        "__call__": __call__,
        "trained": lambda self: shards.trained(),
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
    }
    model.__class__ = type(stock.__name__, (stock,), names)
