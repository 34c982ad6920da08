"""The parts of an all-reduce that need no process group: scaling, neutral elements (S4), futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

T = TypeVar("T")

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}
_ON_THE_WIRE = {name: op for op, name in _NAMES.items()} | {"avg": ReduceOp.SUM}


def resolve(op: ReduceOp | ReduceOp.RedOpType) -> tuple[str, Any]:
    """The name of `op` ("sum", "avg", "min", "max" or "product"), and torch's options of an
    all-reduce for it. Raises ValueError for others."""
    for known, name in _NAMES.items():
        if op == known:
            return name, options_for(name)
    raise ValueError(f"reduce_op must be one of SUM, AVG, MIN, MAX, PRODUCT, got {op}")


def fill_neutral(tensor: Tensor, op: str) -> None:
    """Overwrite `tensor` (any shape) with the neutral element of `op`.

    Zero is neutral for a sum only: a member that contributes nothing must send the largest value
    under MIN, the smallest under MAX, and one under PRODUCT.
    """
    if op in ("sum", "avg"):
        tensor.zero_()
    elif op == "product":
        tensor.fill_(1)
    elif tensor.dtype == torch.bool:
        tensor.fill_(op == "min")
    elif tensor.is_floating_point():
        tensor.fill_(float("inf") if op == "min" else float("-inf"))
    else:
        info = torch.iinfo(tensor.dtype)
        tensor.fill_(info.max if op == "min" else info.min)


def prepare(tensor: Tensor, op: str, *, participating: bool, scale: float) -> None:
    """Make `tensor` this member's contribution, in place.

    For a mean every contribution is scaled before the sum, as torch's own DDP does: the same
    rounding (bit for bit the result of DDP with as many processes), less danger of overflow in
    half precision, and nothing left to do when the sum arrives. `scale`: the part of that scaling
    which is still to be done.
    """
    if not participating:
        fill_neutral(tensor, op)
    elif op == "avg" and scale != 1.0 and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.mul_(scale)


def finish(tensor: Tensor, op: str, participants: int) -> None:
    """Complete the result, in place: integer means are divided after the sum."""
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.div_(participants, rounding_mode="trunc")


def options_for(op: str) -> Any:
    """torch's options of an all-reduce for `op`: a mean is a sum of scaled contributions."""
    options = dist.AllreduceOptions()
    options.reduceOp = _ON_THE_WIRE[op]
    return options


def completed(tensor: Tensor) -> Future[Tensor]:
    """A future that is done."""
    future = future_for(tensor)
    future.set_result(tensor)
    return future


def future_for(tensor: Tensor) -> Future[Tensor]:
    """A future that may hold `tensor`: torch must know a device that has streams."""
    return Future() if tensor.is_cpu else Future(devices=[tensor.device])


def with_default(
    future: Future[T], default: T, *, timeout_s: float, on_error: Callable[[Exception], None]
) -> Future[T]:
    """`future`, but `default` in place of an error or of a result later than `timeout_s`, which is
    reported to `on_error` (in any thread)."""
    result: Future[T] = Future()
    first = threading.Lock()

    def finish_with(value: T, error: Exception | None) -> None:
        if first.acquire(blocking=False):
            if error is not None:
                on_error(error)
            result.set_result(value)

    def done(finished: Future[T]) -> None:
        try:
            value, error = finished.value(), None
        except Exception as caught:
            value, error = default, caught
        finish_with(value, error)

    future.add_done_callback(done)
    if not future.done():
        late = TimeoutError(f"a future was not done within {timeout_s:g} s")
        timer = threading.Timer(timeout_s, finish_with, (default, late))
        timer.daemon = True
        timer.start()
        result.add_done_callback(lambda _: timer.cancel())
    return result
