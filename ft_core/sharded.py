"""HSDP whose replicate dimension is a quorum: FSDP2 inside a replica group, a manager between groups.

    fully_shard(model, mesh=mesh)            # torch's, over the ranks of this replica group
    replicate(model, manager)                # gradients are averaged over the replica groups

FSDP reduces the gradients of each `fully_shard`ed module over the group's ranks. Then it calls a hook,
which averages the shard that this rank holds with the ranks of the same number in the other groups.

Streams. On CUDA FSDP runs the hook on a stream of its own, so the average overlaps with the rest of
backward. The CPU has no streams: FSDP divides, casts and accumulates the gradient when the hook
returns. So there the hook waits, as torch's HSDP does.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ft_core.collectives.allreduce import average, check_devices
from ft_core.manager import Manager

_DIVIDED_AFTER = (torch.float32, torch.bfloat16)
"""No sum of a few gradients overflows in these."""

_numbers: weakref.WeakKeyDictionary[Manager, int] = weakref.WeakKeyDictionary()


def replicate(
    model: nn.Module, manager: Manager, *, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
) -> nn.Module:
    """Average the gradients of a `fully_shard`ed model over the replica groups; returns `model`.

    Call it once, after the last `fully_shard` and before the first step. Each backward that
    synchronizes gradients must be within a step of the manager. Members compare the parameters
    (`Manager.register_compared`). The state that heals is what the manager was given: sharded state
    dicts, as `model.state_dict()` and `optimizer.state_dict()` return them.

    Args:
        model: holds one or several modules to which `fully_shard` was applied, and no other
            parameters that are trained. A group's device mesh may have any dimensions.
        manager: of this rank, with `ranks_hold="shards"`.
        reduce_op: AVG; or SUM, for a loss that is divided by a constant for all groups together. FSDP's
            own divisor (`set_gradient_divide_factor`) concerns the ranks of a group.

    Raises ValueError if there is nothing to replicate, or a parameter's gradient would not or could not be.
    Thread: the training loop's; autograd's threads reduce.
    """
    if reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise ValueError(f"reduce_op must be AVG or SUM, got {reduce_op}")
    if manager.ranks_hold != "shards":
        raise ValueError('replicate() is for Manager(ranks_hold="shards")')
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    check_covered(model, sharded)
    check_devices(model.parameters())

    def hook(gradient: Tensor) -> None:
        _average(manager, gradient, reduce_op)

    for module in sharded:
        module.set_all_reduce_hook(hook)
    number = _numbers.get(manager, 0)
    _numbers[manager] = number + 1
    key = "sharded" if number == 0 else f"sharded.{number}"
    manager.register_schema(key, describe_shards(model))
    me = weakref.ref(model)

    def compared() -> list[Tensor]:
        model = me()
        return [] if model is None else shards_of(model)

    manager.register_compared(key, compared)
    return model


def _average(manager: Manager, gradient: Tensor, op: ReduceOp.RedOpType) -> None:
    """Reduce one gradient in place, on the current stream. Fails the step, and raises nothing."""
    step = manager.step
    # Gloo's means are divided sums: with three groups the last bits differ from those of scaled parts.
    divides = op == ReduceOp.AVG and not step.weighted
    if divides and gradient.is_cpu and gradient.dtype in _DIVIDED_AFTER:
        average(step, gradient)
    else:
        manager.start_allreduce(gradient, op).wait()


def check_covered(model: nn.Module, sharded: Iterable[nn.Module]) -> None:
    """Raise ValueError unless the modules `sharded` hold all parameters of `model` that are trained."""
    covered = {p for module in sharded for p in module.parameters() if isinstance(p, DTensor)}
    if not covered:
        raise ValueError("there is no fully_shard()ed module: call fully_shard(model) first")
    left = [n for n, p in model.named_parameters() if p.requires_grad and p not in covered]
    if left:
        raise ValueError(
            f"no fully_shard()ed module holds {left[0]!r} ({len(left)} such parameters): their "
            "gradients would not be averaged; call fully_shard(model) for the root too, or freeze them"
        )


def describe_shards(model: nn.Module) -> str:
    """One line that is equal for this rank of all replica groups: a digest of shapes and placements."""
    lines, parameters = [], dict(model.named_parameters())
    for name, p in parameters.items():
        line = f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        if isinstance(p, DTensor):
            line += f" {tuple(p.to_local().shape)} {p.placements} {tuple(p.device_mesh.shape)}"
        lines.append(line)
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()
    meshes = {p.device_mesh for p in parameters.values() if isinstance(p, DTensor)}
    sizes = ", ".join(sorted("x".join(map(str, mesh.shape)) for mesh in meshes))
    return f"{len(parameters)} tensors sharded over {sizes} ranks ({digest})"


def shards_of(model: nn.Module) -> list[Tensor]:
    """The parameters as they are between steps, wherever FSDP has gathered them meanwhile."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.parameters())
