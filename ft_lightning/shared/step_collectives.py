"""How far Lightning's collective calls reach.

| call | inside `training_step` | elsewhere |
|---|---|---|
| `barrier`, `broadcast`, `reduce_boolean_decision` | the replica group (`ft_core.shell.intra_group`) | the same |
| `reduce`, `log(sync_dist=True)` | the participants of the step | this process |
| `all_gather` | the participants of the step: `(world size, ...)` | `(1, ...)` |

What a `training_step` reduces belongs to its step, and is tried again with it. Elsewhere members
may be at different places, and a call that waits for peers could wait for a dead one. At the ends
of epochs and validations there are agreements (`trainer/agreements.py`), which gather bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ft_core.heal.format import byte_view
from ft_core.manager import Manager
from ft_core.shell.intra_group import IntraGroup
from ft_core.telemetry import VISIT

_OPS: dict[str, Any] = {
    "mean": ReduceOp.AVG,
    "avg": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "product": ReduceOp.PRODUCT,
}


_ROW_BYTES = 8


class CopyRanks:
    """The ranks of a replica group that hold a copy of the model each: a manager's collectives reach all
    of them, so there is nothing to do among themselves.

    Thread: the training loop's.
    """

    number, size = 0, 1
    """Of this rank, among those over which a participant of the manager's extends."""

    def reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce over the group's ranks, in place."""

    def reduced(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """As `reduce`, by Lightning's name for the operation: another tensor if there is something to do.
        Raises ValueError if there is no such operation."""
        return tensor

    def place(self, rank: int, world_size: int) -> tuple[int, int]:
        """The row in `gather_in_step` of the participant to which `rank` belongs, and how many rows there are."""
        return rank // self.size, world_size // self.size

    def gather(self, tensor: Tensor) -> Tensor:
        """A row for each of the group's ranks."""
        return tensor.unsqueeze(0)

    def merge(self, mine: list[Any]) -> list[list[Any]]:
        """The list of each of the group's ranks."""
        return [mine]

    def any(self, yes: bool) -> bool:
        """Whether it is so on any of the group's ranks."""
        return yes


class ShardRanks(CopyRanks):
    """The ranks of a replica group that share one copy: a manager's collectives reach the ranks of one
    number. What is to reach all goes over the group as well, by its default process group."""

    def __init__(self, in_group: IntraGroup) -> None:
        self._in_group = in_group
        self.number, self.size = dist.get_rank(), dist.get_world_size()

    def reduce(self, tensor: Tensor, op: Any) -> None:
        mean = op == ReduceOp.AVG
        dist.all_reduce(tensor, ReduceOp.SUM if mean else op)
        if mean and tensor.is_floating_point():
            tensor.div_(self.size)
        elif mean:
            tensor.div_(self.size, rounding_mode="trunc")

    def reduced(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        mine = tensor.detach().clone()
        self.reduce(mine, operation(reduce_op))
        return mine

    def gather(self, tensor: Tensor) -> Tensor:
        wire = tensor.detach().contiguous()
        rows = [torch.empty_like(wire) for _ in range(self.size)]
        dist.all_gather(rows, wire)
        return torch.stack(rows)

    def merge(self, mine: list[Any]) -> list[list[Any]]:
        return self._in_group.gather(mine)

    def any(self, yes: bool) -> bool:
        return self._in_group.decide(yes, all_of_them=False)


def operation(reduce_op: Any) -> Any:
    """torch's operation for Lightning's name. Raises ValueError if there is none."""
    op: Any = reduce_op
    if reduce_op is None:
        op = ReduceOp.AVG
    elif isinstance(reduce_op, str):
        op = _OPS.get(reduce_op.lower())
        if op is None:
            raise ValueError(f"reduce_op must be one of {', '.join(_OPS)}, got {reduce_op!r}")
    return op


def reduce_in_step(manager: Manager, tensor: Tensor, reduce_op: Any) -> Tensor:
    """`tensor` reduced in place over the participants of the open step.

    If the step fails, the result is undefined, and is discarded with the step.
    """
    op = operation(reduce_op)
    flat = _plain(tensor)
    manager.allreduce(flat, reduce_op=op).wait()
    return flat


def _plain(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy whose memory holds just its values, in order."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def gather_in_step(manager: Manager, tensor: Tensor, row: int, rows: int) -> Tensor:
    """Row `row` of each participant of the open step: shape `(rows, *tensor.shape)`, or `(participants, ...)` if they are
    more. Where none is there, a copy of another's: shapes stay, and means stay unbiased.

    All must pass tensors of one shape. They travel as a sum of bytes, to which each member adds its own.
    """
    manager.bind()  # the participants are fixed from here on
    mine = _plain(tensor.detach())
    wire = torch.zeros(
        (max(manager.num_participants(), 1), _ROW_BYTES + mine.nbytes),
        dtype=torch.uint8,
        device=mine.device,
    )
    # Of the quorum's members one that has come back is the last, so each says which row is its own.
    rank = manager.participating_rank()
    if rank is not None:
        label = torch.tensor([row], dtype=torch.int64, device=mine.device)
        wire[rank] = torch.cat([byte_view(label), byte_view(mine)])
    manager.allreduce(wire, reduce_op=ReduceOp.SUM).wait()
    there, order = wire[:, :_ROW_BYTES].reshape(-1).view(torch.int64).sort()
    if len(there) < rows:
        wanted = torch.arange(rows, device=mine.device)
        at = torch.searchsorted(there, wanted).clamp(max=len(there) - 1)
        order = order[torch.where(there[at] == wanted, at, wanted % len(there))]
    data = wire[order, _ROW_BYTES:].reshape(-1)
    return data.view(tensor.dtype).view(len(order), *tensor.shape)


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
    parameters = (p for p in module.parameters() if p.requires_grad)
    # Of a shard, this rank's part: no collective that only some ranks would call.
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in parameters)
    wanted = [part.reshape(-1)[:1].sum() for part in parts]
    return torch.stack([w.float() for w in wanted]).sum() * 0.0


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
    """Vote at the end of a step to which this member has contributed nothing, and whose state is not one
    that its loop could go on from: peers are not to compare it with theirs. Raises as `should_commit`."""
    manager.compare_states(False)
    manager.telemetry.emit(VISIT)
    try:
        manager.should_commit(no_update=True)
    finally:
        manager.compare_states(True)
