"""`torch.distributed` as Accelerate's own functions see it: over all replica groups.

Each function has the meaning of torch's for a world of all configured processes. Rows of processes
that are away are copies of rows of those that are there, so that shapes are what the script expects
and means stay unbiased; sums are scaled up likewise. With a `group` they are torch's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ft_accelerate.runtime.checked_collectives import (
    CheckedCollectives,
    Kind,
    check_alike,
    fill,
    present,
)
from ft_accelerate.runtime.runtime import Runtime
from ft_core.collectives.ops import fill_neutral

_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


class Collectives:
    """The functions, by the names that they have in torch. `current()` gives the runtime."""

    def __init__(self, current: Callable[[], Runtime]) -> None:
        self._current = current

    def get_world_size(self, group: Any = None) -> int:
        return dist.get_world_size(group) if group is not None else self._current().num_processes

    def get_rank(self, group: Any = None) -> int:
        return dist.get_rank(group) if group is not None else self._current().process_index

    def init_process_group(self, backend: Any = None, **kwargs: Any) -> None:
        """A world of this process alone, which no other's end can break; it needs no port."""
        kwargs.update(rank=0, world_size=1, store=dist.HashStore())
        kwargs.pop("init_method", None)
        dist.init_process_group(backend=backend, **kwargs)

    # ------------------------------------------------------------------ tensors

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is not None:
            return dist.all_gather(tensor_list, tensor, group, async_op)
        for place, row in zip(tensor_list, self._rows(tensor), strict=True):
            _put(place, row)
        return None

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is not None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        rows = torch.cat([row.reshape(-1) for row in self._rows(input_tensor)])
        output_tensor.copy_(rows.view_as(output_tensor))
        return None

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        runtime = self._current()
        payload = _bytes(tensor)

        def attempt(
            collectives: CheckedCollectives, agree: Callable[..., Any]
        ) -> list[Tensor] | None:
            said = agree(payload.numel(), _signature(tensor))
            if said is None:
                return None
            check_alike(said, "gather")
            here = present(said)
            nbytes = said[here[0]][2]
            table = collectives.rows(payload, nbytes)
            return fill([_typed(row, tensor) for row in table.unbind()], here)

        def alone() -> list[Tensor]:
            return [tensor.detach().clone() for _ in range(runtime.num_processes)]

        rows: list[Tensor] = runtime.operation(
            Kind.GATHER, attempt, alone, lambda r: sum(x.nbytes for x in r)
        )
        return rows

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is not None:
            return dist.all_reduce(tensor, op, group, async_op)
        if op not in (ReduceOp.SUM, ReduceOp.MAX):
            raise ValueError(
                f"accelerator.reduce over replica groups takes sum, mean and max: {op}"
            )
        runtime = self._current()
        kind = Kind.SUM if op == ReduceOp.SUM else Kind.MAX

        def attempt(collectives: CheckedCollectives, agree: Callable[..., Any]) -> Tensor | None:
            said = agree(tensor.nbytes, _signature(tensor))
            if said is None:
                return None
            check_alike(said, "reduce")
            here = len(present(said))
            nbytes = said[present(said)[0]][2]
            mine = tensor if tensor.nbytes == nbytes else _typed(_bytes(tensor), tensor, nbytes)
            if said[runtime.process_index] is None:
                mine = mine.clone()
                fill_neutral(mine, "max" if kind is Kind.MAX else "sum")
            total = collectives.reduce(mine, op)
            return total if kind is Kind.MAX else _scaled(total, runtime.num_processes, here)

        def alone() -> Tensor:
            mine = tensor.detach().clone()
            return mine if kind is Kind.MAX else mine * runtime.num_processes

        _put(tensor, runtime.operation(kind, attempt, alone, lambda r: int(r.nbytes)))
        return None

    def broadcast(
        self, tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is not None:
            return dist.broadcast(tensor, src, group, async_op)
        payload = _bytes(tensor)

        def attempt(collectives: CheckedCollectives, agree: Callable[..., Any]) -> Tensor | None:
            said = agree(payload.numel(), _signature(tensor))
            if said is None:
                return None
            check_alike(said, "broadcast")
            here = present(said)
            source = src if src in here else here[0]
            return _typed(collectives.from_one(payload, said[source][2], source), tensor)

        result = self._current().operation(
            Kind.BROADCAST, attempt, lambda: tensor.detach().clone(), lambda r: int(r.nbytes)
        )
        _put(tensor, result)
        return None

    # ------------------------------------------------------------------ objects, barriers

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Processes that are away leave an empty list: their objects can't be made up."""
        if group is not None:
            dist.all_gather_object(object_list, obj, group)
            return
        num_processes = self._current().num_processes
        texts = self._objects(pickle.dumps(obj))
        for index in range(num_processes):
            object_list[index] = pickle.loads(texts[index]) if texts[index] else []

    def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, group: Any = None, device: Any = None
    ) -> None:
        if group is not None:
            dist.broadcast_object_list(object_list, src, group, device)
            return
        texts = self._objects(pickle.dumps(list(object_list)))
        source = texts[src] or next(text for text in texts if text)
        object_list[:] = pickle.loads(source)

    def _objects(self, mine: bytes) -> list[bytes]:
        """What every process has pickled; b"" where one is away."""
        runtime = self._current()
        payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8)

        def attempt(
            collectives: CheckedCollectives, agree: Callable[..., Any]
        ) -> list[bytes] | None:
            said = agree(len(mine))
            if said is None:
                return None
            longest = max(row[2] for row in said if row is not None)
            table = collectives.rows(payload, longest).cpu()
            return [
                bytes(table[index, : row[2]].numpy().tobytes()) if row is not None else b""
                for index, row in enumerate(said)
            ]

        def alone() -> list[bytes]:
            return [
                mine if index == runtime.process_index else b""
                for index in range(runtime.num_processes)
            ]

        texts: list[bytes] = runtime.operation(
            Kind.OBJECTS, attempt, alone, lambda r: sum(map(len, r))
        )
        return texts

    def barrier(self, group: Any = None, **kwargs: Any) -> None:
        if group is not None:
            dist.barrier(group, **kwargs)
            return
        self._current().operation(Kind.BARRIER, lambda collectives, agree: agree(), lambda: True)


def nothing_to_synchronize(tensor: Tensor, src: int = 0, group: Any = None) -> None:
    """`broadcast` of generators' states: healed at the start, and drawn from alike ever since."""
    if group is not None:
        dist.broadcast(tensor, src, group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _typed(data: Tensor, like: Tensor, nbytes: int = 0) -> Tensor:
    """Bytes (made `nbytes` long, if given) as a tensor like `like`.

    The others' tensors may be of another length than that of a process that is only coming back:
    theirs counts.
    """
    if nbytes:
        data = torch.nn.functional.pad(data[:nbytes], (0, max(0, nbytes - data.numel())))
    values = data.clone().view(like.dtype).to(like.device)
    if values.numel() == like.numel():
        return values.view(like.shape)
    inner = like.shape[1:]
    return values.view(-1, *inner) if values.numel() % max(1, inner.numel()) == 0 else values


def _put(place: Tensor, value: Tensor) -> None:
    if place.shape != value.shape:
        place.resize_(value.shape)
    place.copy_(value)


def _signature(tensor: Tensor) -> tuple[int, ...]:
    kind = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else len(_DTYPES)
    return (kind, *tensor.shape)


def _scaled(total: Tensor, num_processes: int, here: int) -> Tensor:
    """The participants' sum, scaled as if each process that is away had brought their mean."""
    if here == num_processes:
        return total
    if total.is_floating_point() or total.is_complex():
        return total * (num_processes / here)
    return (total * num_processes + here // 2).div(here, rounding_mode="floor").to(total.dtype)
