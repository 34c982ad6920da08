"""How far Lightning's collective calls reach.

| call | inside `training_step` | elsewhere |
|---|---|---|
| `barrier`, `broadcast`, `reduce_boolean_decision` | the replica group (`ft_core.shell.intra_group`) | the same |
| `reduce`, `log(sync_dist=True)` | the participants of the step | this process |
| `all_gather` | the participants of the step: `(participants, ...)` | `(1, ...)` |

What a `training_step` reduces belongs to its step, and is tried again with it. Elsewhere members
may be at different places, and a call that waits for peers could wait for a dead one. At the ends
of epochs and validations there are agreements (`trainer/agreements.py`), which gather bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ft_core.heal.format import byte_view
from ft_core.manager import Manager

_OPS: dict[str, Any] = {
    "mean": ReduceOp.AVG,
    "avg": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "product": ReduceOp.PRODUCT,
}


def reduce_in_step(manager: Manager, tensor: Tensor, reduce_op: Any) -> Tensor:
    """`tensor` reduced in place over the participants of the open step.

    If the step fails, the result is undefined, and is discarded with the step.
    """
    op: Any = reduce_op
    if reduce_op is None:
        op = ReduceOp.AVG
    elif isinstance(reduce_op, str):
        op = _OPS.get(reduce_op.lower())
        if op is None:
            raise ValueError(f"reduce_op must be one of {', '.join(_OPS)}, got {reduce_op!r}")
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    manager.allreduce(flat, reduce_op=op).wait()
    return flat


def gather_in_step(manager: Manager, tensor: Tensor) -> Tensor:
    """One row for each participant of the open step: shape `(participants, *tensor.shape)`.

    All must pass tensors of one shape. Rows travel as a sum to which each member adds its own.
    """
    manager.bind()  # the participants are fixed from here on
    rows = torch.zeros(
        (manager.num_participants(), *tensor.shape), dtype=tensor.dtype, device=tensor.device
    )
    rank = manager.participating_rank()
    if rank is not None:
        rows[rank] = tensor
    wire = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    manager.allreduce(wire, reduce_op=ReduceOp.SUM).wait()
    return wire.to(tensor.dtype)


def gather_bytes(manager: Manager, mine: bytes) -> list[bytes]:
    """What each participant of the open step contributes, in the order of ranks.

    Lengths may differ. A member that does not participate calls this, too; its bytes are left out.
    An empty list: the step has failed.
    """
    if not manager.bind():
        return []
    rank = manager.participating_rank()
    sizes = torch.zeros(manager.num_participants(), dtype=torch.int64)
    if rank is not None:
        sizes[rank] = len(mine)
    manager.allreduce(sizes, reduce_op=ReduceOp.SUM).wait()
    if manager.errored() is not None:
        return []
    ends = sizes.cumsum(0).tolist()
    row = torch.zeros(ends[-1], dtype=torch.uint8)
    if ends[-1]:  # as all know
        if rank is not None and mine:
            row[ends[rank] - len(mine) : ends[rank]] = torch.frombuffer(
                bytearray(mine), dtype=torch.uint8
            )
        manager.allreduce(row, reduce_op=ReduceOp.SUM).wait()
        if manager.errored() is not None:
            return []
    data = row.numpy().tobytes()
    return [data[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]


def zero_loss(module: torch.nn.Module) -> Tensor:
    """A loss of zero that touches all parameters: the gradients of a batch that is left out."""
    wanted = [p.reshape(-1)[:1].sum() for p in module.parameters() if p.requires_grad]
    return torch.stack([w.float() for w in wanted]).sum() * 0.0


def refuse_gradients(tensor: Tensor) -> None:
    """Raise ValueError for `all_gather(tensor, sync_grads=True)` over replica groups."""
    if tensor.requires_grad:
        raise ValueError(
            "ft_ddp cannot send gradients back through all_gather: the replica groups that "
            "a loss was made of may be gone by then; gather detached tensors"
        )


def forget_unscaling(precision: Any, optimizer: Any) -> None:
    """A step of `optimizer` is left out. If user code has unscaled its gradients already, the next
    ones may be unscaled again."""
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def packed_tensor(tensor: Tensor) -> list[Any]:
    """A tensor in plain values: dtype, shape, bytes."""
    plain = tensor.detach().cpu().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    return [name, list(plain.shape), byte_view(plain).numpy().tobytes()]


def unpacked_tensor(packed: list[Any]) -> Tensor:
    """The reverse of `packed_tensor`; on the CPU."""
    dtype, shape, raw = packed
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if raw:
        byte_view(tensor).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return tensor


def end_step_as_stranger(manager: Manager) -> None:
    """Vote at the end of a step to which this member has contributed nothing, and whose state is none
    that its loop could go on from: peers are not to compare it with theirs. Raises as `should_commit`."""
    manager.compare_states(False)
    try:
        manager.should_commit(no_update=True)
    finally:
        manager.compare_states(True)
