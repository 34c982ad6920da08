"""`torch.distributed` under fault tolerance: over all replica groups, or refused.

Accelerate's functions look up the global name `torch` of their module when they run. Giving four of
its modules another value for that name changes `gather`, `reduce`, `broadcast`, ... for everyone, also
for code that has imported these functions before. Each function here means what torch's does in a world
of all configured processes. Rows of processes that are away are copies of rows of those that are there,
so that shapes are what the script expects and means stay unbiased; sums are scaled up likewise. With a
`group` they are torch's own.

torch itself stays as it is, except for a refusal: `torch.distributed.all_reduce(x)` in a script would
reduce over this one process and look as if it had worked. Libraries that know about process groups of
their own are left alone. And scripts and samplers that ask it for the number of processes are told of all.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ft_accelerate.runtime.checked_collectives import (
    CheckedCollectives,
    Kind,
    check_alike,
)
from ft_accelerate.runtime.leadership import LIBRARIES
from ft_accelerate.runtime.process import active, current
from ft_accelerate.runtime.runtime import Runtime
from ft_core.collectives.allreduce import fill_neutral
from ft_core.process_group.nccl import outlive_nccl_errors

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]

# ------------------------------------------------------------------ the functions, as torch has them


def get_world_size(group: Any = None) -> int:
    """The number of configured processes, alive or not."""
    return dist.get_world_size(group) if _is_own(group) else current().num_processes


def get_rank(group: Any = None) -> int:
    """Among the configured processes."""
    return dist.get_rank(group) if _is_own(group) else current().process_index


def init_process_group(backend: Any = None, **kwargs: Any) -> None:
    """Of this process alone, or of its replica group (`GroupRanks.default_group`)."""
    kwargs.update(current().group_ranks.default_group())
    kwargs.pop("init_method", None)
    outlive_nccl_errors(backend)
    dist.init_process_group(backend=backend, **kwargs)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """A tensor of each configured process."""
    if _is_own(group):
        return dist.all_gather(tensor_list, tensor, group, async_op)
    for place, row in zip(tensor_list, _rows(tensor), strict=True):
        _put(place, row)
    return None


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """A row of each configured process, in `output_tensor`."""
    if _is_own(group):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    rows = torch.cat([row.reshape(-1) for row in _rows(input_tensor)])
    output_tensor.copy_(rows.view_as(output_tensor))
    return None


def _rows(tensor: Tensor) -> list[Tensor]:
    """`tensor` of every process; copies of others' where one is away."""
    num_processes = current().num_processes
    payload = _bytes(tensor)

    def attempt(collectives: CheckedCollectives) -> list[Tensor] | None:
        here = collectives.check(payload.numel(), _signature(tensor))
        if here is None:
            return None
        check_alike(here, "gather")
        nbytes = next(iter(here.values())).nbytes
        rows = [_typed(row, tensor) for row in collectives.rows(payload, nbytes).unbind()]
        contributors = list(here)
        return [
            row if index in here else rows[contributors[index % len(contributors)]]
            for index, row in enumerate(rows)
        ]

    def alone() -> list[Tensor]:
        return [tensor.detach().clone() for _ in range(num_processes)]

    rows: list[Tensor] = current().operation(
        Kind.GATHER, attempt, alone, lambda r: sum(x.nbytes for x in r)
    )
    return rows


class _GatherWithGradients(torch.autograd.Function):
    """The rows of all configured processes. The gradient of a row is the sum of what all have of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.index = current().process_index
        return torch.cat(_rows(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        all_reduce(total)
        return total.chunk(current().num_processes)[ctx.index]


def gather_embeddings(
    runtime: Runtime, original: Any, tensor: Tensor, with_grad: bool = False
) -> Tensor:
    """sentence-transformers' `all_gather`: what all processes have, along the first dimension. Without
    `with_grad` gradients reach this process's own part only."""
    if with_grad:
        gathered: Tensor = _GatherWithGradients.apply(tensor)
        return gathered
    rows = _rows(tensor)
    rows[runtime.process_index] = tensor
    return torch.cat(rows)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """In place; a sum is scaled up for processes that are away. Raises ValueError for operations other
    than SUM and MAX."""
    if _is_own(group):
        return dist.all_reduce(tensor, op, group, async_op)
    if op not in (ReduceOp.SUM, ReduceOp.MAX):
        raise ValueError(f"accelerator.reduce over replica groups takes sum, mean and max: {op}")
    runtime = current()
    kind = Kind.SUM if op == ReduceOp.SUM else Kind.MAX

    def attempt(collectives: CheckedCollectives) -> Tensor | None:
        here = collectives.check(tensor.nbytes, _signature(tensor))
        if here is None:
            return None
        check_alike(here, "reduce")
        nbytes = next(iter(here.values())).nbytes
        mine = tensor if tensor.nbytes == nbytes else _typed(_bytes(tensor), tensor, nbytes)
        if collectives.process_index not in here:
            mine = mine.clone()
            fill_neutral(mine, "max" if kind is Kind.MAX else "sum")
        total = collectives.reduce(_resolved(mine), op)
        return total if kind is Kind.MAX else _scaled(total, runtime.num_processes, len(here))

    def alone() -> Tensor:
        mine = tensor.detach().clone()
        return mine if kind is Kind.MAX else mine * runtime.num_processes

    _put(tensor, runtime.operation(kind, attempt, alone, lambda r: int(r.nbytes)))
    return None


def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """From process `src`; if it is away, from the first that is there."""
    if _is_own(group):
        return dist.broadcast(tensor, src, group, async_op)
    payload = _bytes(tensor)

    def attempt(collectives: CheckedCollectives) -> Tensor | None:
        here = collectives.check(payload.numel(), _signature(tensor))
        if here is None:
            return None
        check_alike(here, "broadcast")
        source = src if src in here else next(iter(here))
        return _typed(collectives.from_one(payload, here[source].nbytes, source), tensor)

    result = current().operation(
        Kind.BROADCAST, attempt, lambda: tensor.detach().clone(), lambda r: int(r.nbytes)
    )
    _put(tensor, result)
    return None


def make_alike(module: torch.nn.Module) -> None:
    """Give a model that is prepared in mid-training (the next fold's, say) the weights that the main process
    has, as DistributedDataParallel does with each model. Those of the first models heal."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    if not tensors or current().num_processes == 1:
        return
    prepared = current().prepared
    prepared.adding = True
    try:
        theirs = _of_main(torch.cat([_bytes(tensor) for tensor in tensors]), keep=False)
    finally:
        prepared.adding = False
    for tensor, raw in zip(tensors, theirs.split([t.nbytes for t in tensors]), strict=True):
        _put(tensor, _typed(raw, tensor))


def take_main(tensor: Tensor) -> None:
    """Give `tensor` the values that it has in the main process."""
    _put(tensor, _typed(_of_main(_bytes(tensor)), tensor))


def _of_main(payload: Tensor, *, keep: bool = True) -> Tensor:
    """These bytes as the main process has them, whose script was always there, if there is such a one: so
    random numbers in them are what they were without faults."""
    leadership = current().leadership

    def attempt(collectives: CheckedCollectives) -> Tensor | None:
        here = collectives.check(payload.numel())
        if here is None:
            return None
        if len({header.nbytes for header in here.values()}) > 1:
            raise ValueError("the replica groups prepare models of different sizes")
        source = leadership.main if leadership.main in here else next(iter(here))
        return collectives.from_one(payload, payload.numel(), source)

    result: Tensor = current().operation(
        Kind.BROADCAST, attempt, lambda: payload, lambda r: int(r.nbytes), keep=keep
    )
    return result


def broadcast_seeds(tensor: Tensor, src: int = 0, group: Any = None) -> None:
    """Of generators' states: until there is something to heal. From then on they heal, and all draw
    alike."""
    if _is_own(group) or current().beginning:
        broadcast(tensor, src, group)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Processes that are away leave an empty list: their objects can't be made up."""
    if _is_own(group):
        dist.all_gather_object(object_list, obj, group)
        return
    for index, text in enumerate(_objects(pickle.dumps(obj))):
        object_list[index] = pickle.loads(text) if text else []


def gather_all_tensors(
    runtime: Runtime, original: Any, result: Tensor, group: Any = None
) -> list[Tensor]:
    """torchmetrics' function of that name: `result` of every process, of any length; copies of others' where
    one is away. In one operation, so that all get the same."""
    if _is_own(group):
        rows: list[Tensor] = original(result, group)
        return rows
    mine = pickle.dumps(result.detach().cpu())
    texts = _objects(mine)
    there = [text for text in texts if text]
    rows = []
    for index, text in enumerate(texts):
        row = text or there[index % len(there)]
        rows.append(result if row == mine else pickle.loads(row).to(result.device))
    return rows


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: Any = None, device: Any = None
) -> None:
    """From process `src`; if it is away, from the first that is there."""
    if _is_own(group):
        dist.broadcast_object_list(object_list, src, group, device)
        return
    texts = _objects(pickle.dumps(list(object_list)))
    source = texts[src] or next(text for text in texts if text)
    object_list[:] = pickle.loads(source)


def _objects(mine: bytes) -> list[bytes]:
    """What every process has pickled; b"" where one is away."""
    runtime = current()
    payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    absent = [b""] * runtime.num_processes

    def attempt(collectives: CheckedCollectives) -> list[bytes] | None:
        here = collectives.check(len(mine))
        if here is None:
            return None
        table = collectives.rows(payload, max(header.nbytes for header in here.values())).cpu()
        texts = [*absent]
        for index, header in here.items():
            texts[index] = bytes(table[index, : header.nbytes].numpy().tobytes())
        return texts

    def alone() -> list[bytes]:
        texts = [*absent]
        texts[runtime.process_index] = mine
        return texts

    texts: list[bytes] = runtime.operation(Kind.OBJECTS, attempt, alone, lambda r: sum(map(len, r)))
    return texts


def barrier(group: Any = None, **kwargs: Any) -> None:
    """Wait until all processes that are not away have arrived."""
    if _is_own(group):
        dist.barrier(group, **kwargs)
        return

    def attempt(collectives: CheckedCollectives) -> bool:
        return collectives.check() is not None

    current().operation(Kind.BARRIER, attempt, lambda: True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        get_world_size,
        get_rank,
        init_process_group,
        all_gather,
        all_reduce,
        all_gather_into_tensor,
        broadcast,
        all_gather_object,
        broadcast_object_list,
        barrier,
    )
}

# ------------------------------------------------------------------ tensors as bytes, and back


def _bytes(tensor: Tensor) -> Tensor:
    return _resolved(tensor).contiguous().reshape(-1).view(torch.uint8)


def _resolved(tensor: Tensor) -> Tensor:
    """Its values as they are: `conj()` and `imag` may only note what they do."""
    return tensor.detach().resolve_conj().resolve_neg()


def _typed(data: Tensor, like: Tensor, nbytes: int = 0) -> Tensor:
    """Bytes (made `nbytes` long, if given) as a tensor like `like`.

    The others' tensors may differ in length from that of a process that is only coming back:
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


# ------------------------------------------------------------------ what modules see as torch


class TorchProxy:
    """`module`, with `names` in place of its own while fault tolerance is on."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(_module=module, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name in self._names and active() is not None:
            return self._names[name]
        value = getattr(self._module, name)
        if isinstance(value, type) and name not in self._names:
            # It stays what it is, and Accelerate asks for it with each tensor.
            self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop(name, None)
        setattr(self._module, name, value)

    def __repr__(self) -> str:
        return f"<{self._module.__name__}, as seen by ft_accelerate>"


def torch_proxy(in_distributed: dict[str, Any], **in_parallel: Any) -> TorchProxy:
    """torch with names in `torch.distributed` and in `torch.nn.parallel` replaced."""
    distributed = TorchProxy(dist, **in_distributed)
    if not in_parallel:
        return TorchProxy(torch, distributed=distributed)
    parallel = TorchProxy(torch.nn.parallel, **in_parallel)
    return TorchProxy(torch, distributed=distributed, nn=TorchProxy(torch.nn, parallel=parallel))


# ------------------------------------------------------------------ the script's own use of torch

INSTEAD = {
    "all_reduce": "accelerator.reduce",
    "reduce": "accelerator.reduce",
    "all_gather": "accelerator.gather",
    "all_gather_into_tensor": "accelerator.gather",
    "gather": "accelerator.gather",
    "all_gather_object": "accelerate.utils.gather_object",
    "gather_object": "accelerate.utils.gather_object",
    "broadcast": "accelerate.utils.broadcast",
    "broadcast_object_list": "accelerate.utils.broadcast_object_list",
    "scatter": "accelerate.utils.broadcast",
    "barrier": "accelerator.wait_for_everyone",
    "reduce_scatter": "accelerator.reduce",
    "reduce_scatter_tensor": "accelerator.reduce",
}


WITH_GRADIENTS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
"""The functions of `torch.distributed.nn`, through which gradients pass."""


def refuse_with_gradients(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.nn`'s function `name`, which refuses the world. That of a library, too: its loss
    would be one over this process's samples, without a word."""

    def function(*args: Any, **kwargs: Any) -> Any:
        runtime = active()
        if runtime is not None and runtime.num_processes > 1:
            if not _has_own_group(kwargs.get("group"), args):
                raise RuntimeError(
                    f"torch.distributed.nn.{name} reaches this process only, not the "
                    f"{runtime.num_processes} processes that train together: use accelerator.gather or "
                    "accelerator.reduce where no gradients need to pass, or pass the group that you mean"
                )
        return original(*args, **kwargs)

    return function


def refuse_own_use(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed`'s function `name`, which refuses the script's own use of the world."""

    def function(*args: Any, **kwargs: Any) -> Any:
        runtime = active()
        if runtime is not None and runtime.num_processes > 1:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if not _has_own_group(kwargs.get("group"), args) and caller not in LIBRARIES:
                raise RuntimeError(
                    f"torch.distributed.{name} reaches this process only, not the "
                    f"{runtime.num_processes} processes that train together: use "
                    f"{INSTEAD[name]}, or pass the group that you mean"
                )
        return original(*args, **kwargs)

    return function


SEE_THIS_PROCESS = (*LIBRARIES, "ft_core", "sentence_transformers")
"""Packages that ask torch.distributed itself for its world, which is this process or its replica group."""


def tell_all(name: str, original: Callable[..., int]) -> Callable[..., int]:
    """`torch.distributed`'s get_world_size or get_rank, as a script or a library asks that knows nothing of replica groups
    (timm's samplers, say). It is told of all processes, as without fault tolerance: told of one, each would read all data, or
    write all files, without a word. If it reduces then, that is refused."""

    def function(group: Any = None) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if active() is None or _is_own(group) or caller in SEE_THIS_PROCESS:
            return original(group)
        number: int = FUNCTIONS[name](group)
        return number

    return function


def _has_own_group(named: Any, args: Iterable[Any]) -> bool:
    """Whether a call names a process group, and not the world."""
    groups = [named] if named is not None else [a for a in args if isinstance(a, dist.ProcessGroup)]
    return any(map(_is_own, groups))


def _is_own(group: Any) -> bool:
    """Whether the caller means a process group that it has made, and not the world."""
    return group is not None and group is not dist.group.WORLD
