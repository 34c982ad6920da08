"""`Manager.allreduce` of one tensor: this member's contribution, the collective, and its result."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.collectives.quantized import DEFAULT_CODEC, Reduction, reduce_quantized
from ft_core.process_group import ProcessGroup, ProcessGroupGloo
from ft_core.process_group.work import EndedWork, fills_its_memory, finish_with, future_for
from ft_core.replica.status import Participation
from ft_core.step import Step, Waitable
from lighthouse.waits import in_time

T = TypeVar("T")
work_of: Callable[[Future[Tensor]], dist.Work] = torch._C._distributed_c10d._create_work_from_future
"""A future as torch's reducer takes it."""
REDUCED_ON = ("cpu", "cuda", "meta")
_REDUCED = frozenset(
    getattr(torch, name)
    for name in ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
)
"""With every operation. Others have some: `check_reducible`."""
_PIECE_VALUES = 4 << 20  # one piece is encoded while another is sent


class AsyncReduce:
    """An all-reduce in flight, whose caller waits for it with `wait`.

    Its end runs in the thread that waits. A future's callbacks would run in a thread of the
    backend, which would compete with the waiting one for the interpreter (0.15 ms a step of two
    replicas, benchmarks/RESULTS.md).
    """

    __slots__ = ("_end", "_future", "_over", "_pending", "_tensor", "_work")

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work,
        end: Callable[[Exception | None], Tensor] | None = None,
        pending: dict[Waitable, None] | None = None,
    ) -> None:
        self._tensor, self._work, self._end = tensor, work, end
        self._pending = pending  # of its step, which waits for it if nothing else has
        if pending is not None:
            pending[self] = None
        self._future: Future[Tensor] | None = None
        self._over = False

    @property
    def future(self) -> Future[Tensor]:
        """Of the tensor. Done, and never failed, once `wait` has returned. Made when it is asked for: that
        costs as much as the rest. The thread that waits."""
        if self._future is None:
            self._future = future_for(self._tensor)
            if self._over:
                self._future.set_result(self._tensor)
        return self._future

    def wait(self) -> Tensor:
        """Wait, and return the reduced tensor. Never raises. One thread at a time."""
        if not self._over:
            error = None
            try:
                self._work.wait()
            except Exception as caught:
                error = caught.with_traceback(None)  # which would keep this frame alive
            if self._end is not None:
                self._end(error)
            self._over = True
            if self._pending is not None:
                self._pending.pop(self, None)
            if self._future is not None:
                self._future.set_result(self._tensor)
        return self._tensor

    def done(self) -> bool:
        """Whether it has ended, well or badly. Any thread."""
        return self._over or self._work.is_completed()


def reduce(
    step: Step,
    tensor: Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    divided_by: int,
    quantize: bool,
) -> Future[Tensor]:
    """See `Manager.allreduce`. Any thread; raises nothing but ValueError and OutsideStep."""
    op, options = resolve(reduce_op)
    check_reducible(tensor, op)
    if quantize:
        _check_quantizable(tensor, op)
    part = step.take_part()
    if part is None:
        return completed(tensor)
    try:
        _contribute(step, part, tensor, op, divided_by)
        if quantize or step.queue.busy:
            return _reduce_in_turn(step, tensor, op, part, quantize=quantize)
        work = step.group.allreduce([tensor], options)
    except Exception as error:  # whatever the backend raises: the step is lost, not the run
        step.fail(error)
        return completed(tensor)
    result = finish_with(work, _ending(step, tensor, op, part))
    step.pending[result] = None
    return result


def start(
    step: Step,
    tensor: Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    divided_by: int,
) -> AsyncReduce:
    """See `Manager.start_allreduce`. Any thread; raises nothing but ValueError and OutsideStep."""
    op, options = resolve(reduce_op)
    check_reducible(tensor, op)
    return _start(step, step.take_part(), tensor, op, options, divided_by=divided_by)


def average(step: Step, tensor: Tensor) -> None:
    """The participants' mean of `tensor`, in place: their sum, divided after it. Waits. Fails the step, and
    raises nothing but OutsideStep. Any thread."""
    part = step.take_part()
    # Gloo divides by the number of members, in a thread that has just had the sum in its cache.
    every = part is not None and part.participants == step.group.size()
    divides = every and isinstance(step.group, ProcessGroupGloo) and not step.queue.busy
    _start(step, part, tensor, "sum", options_for("sum", divided=divides), divided_by=1).wait()
    if part is not None and part.participants > 1 and not divides:
        tensor.div_(part.participants)


def _start(
    step: Step,
    part: Participation | None,
    tensor: Tensor,
    op: str,
    options: Any,
    *,
    divided_by: int,
) -> AsyncReduce:
    """`part` None: the step has failed already."""
    work: dist.Work | None = None
    end: Callable[[Exception | None], Tensor] | None = None
    try:
        if part is not None:
            _contribute(step, part, tensor, op, divided_by)
            if step.queue.busy:
                work = work_of(_reduce_in_turn(step, tensor, op, part, quantize=False))
            else:
                work = step.group.start_allreduce([tensor], options)
                end = _ending(step, tensor, op, part)
    except Exception as error:  # as above
        step.fail(error)
    return AsyncReduce(tensor, work or EndedWork(tensor), end, step.pending)


def find_weight(step: Step) -> None:
    """With weighted means: find the factor of this member's contribution, once the step is bound.

    A collective of its own. A member without samples, or a step without any, fails the step.
    """
    if not step.weighted:
        return
    if step.samples is None:
        step.fail(RuntimeError("weighted=True needs set_samples in every step"))
        return
    total = torch.tensor([float(step.samples)], dtype=torch.float64)
    step.weight = 1.0
    reduce(step, total, ReduceOp.SUM, divided_by=1, quantize=False).wait()
    if step.error is None and total.item() <= 0:
        step.fail(RuntimeError("no participant has any samples in this step"))
    if step.error is None:
        step.weight = step.samples / total.item()


def check_devices(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError for a tensor on a device that has no way to the other members. One
    on `meta` passes: it has no memory yet."""
    for device in {tensor.device for tensor in tensors}:
        if device.type not in REDUCED_ON:
            raise ValueError(
                f"tensors on {device} can't be averaged over replica groups: put the model on the CPU "
                "(Gloo) or on CUDA (NCCL or Gloo)"
            )


def _contribute(step: Step, part: Participation, tensor: Tensor, op: str, divided_by: int) -> None:
    """Make `tensor` this member's contribution."""
    # Integers first: for equal ones the factor is 1.
    scale = step.weight * (divided_by / (1 if step.weighted else part.participants))
    # Detached: a parameter may be reduced as torch reduces it, also where gradients are enabled.
    prepare(tensor.detach(), op, participating=part.rank is not None, scale=scale)


def _ending(
    step: Step, tensor: Tensor, op: str, part: Participation
) -> Callable[[Exception | None], Tensor]:
    """Called when the collective has ended: completes the result, or reports the error."""

    def end(error: Exception | None) -> Tensor:
        try:
            if error is None:
                finish(tensor, op, part.participants)
        except Exception as caught:
            error = caught
        if error is not None:
            # A future wraps errors into its own, with a stack; the group has the plain one.
            step.fail(step.group.errored() or error)
        return tensor

    return end


def _reduce_in_turn(
    step: Step, tensor: Tensor, op: str, part: Participation, *, quantize: bool
) -> Future[Tensor]:
    """`Manager.allreduce` of a prepared tensor, after the collectives that are queued."""

    def work(group: ProcessGroup) -> None:
        if not quantize:
            group.allreduce([tensor], options_for(op)).wait()
            finish(tensor, op, part.participants)
            return
        jobs = [Reduction(piece) for piece in tensor.view(-1).split(_PIECE_VALUES)]
        reduce_quantized(group, DEFAULT_CODEC, jobs, part)

    return step.queue.submit(work, tensor)


def check_reducible(tensor: Tensor, op: str) -> None:
    """Raise ValueError for a tensor that no backend reduces with `op`. A failed collective would cost all members
    their quorum, in each attempt anew."""
    if tensor.is_conj() or tensor.is_neg() or not fills_its_memory(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and stride {tuple(tensor.stride())} can't be reduced in place: its "
            "values are not what lies in memory from its first one on; reduce tensor.clone("
            "memory_format=torch.contiguous_format).resolve_conj().resolve_neg()"
        )
    if tensor.is_meta:
        raise ValueError("a tensor on meta can't be reduced: it has no values")
    dtype = tensor.dtype
    if not (
        dtype in _REDUCED
        or (dtype == torch.bool and op != "avg")
        or (dtype.is_complex and op in ("sum", "avg"))
        or (dtype.is_floating_point and tensor.is_cuda)  # NCCL sums some of eight bits
    ):
        raise ValueError(
            f"reduce_op {op} of {dtype} is not supported by the backends: convert the tensor before, for "
            "example with tensor.float() or tensor.int()"
        )


def _check_quantizable(tensor: Tensor, op: str) -> None:
    """Raises ValueError unless `Manager.allreduce` can quantize this."""
    if op not in ("sum", "avg") or not tensor.is_floating_point():
        raise ValueError(
            f"should_quantize is for sums and means of real floating values, got {op} of "
            f"{tensor.dtype}: call without it"
        )


# ---------------------------------------------------------------- scaling and neutral elements (S4)

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


@functools.cache
def options_for(op: str, *, divided: bool = False) -> Any:
    """torch's options of an all-reduce for `op`: a mean is a sum of scaled contributions. `divided`: the
    backend divides the sum by the number of members. Not to be changed."""
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.AVG if divided else _ON_THE_WIRE[op]
    return options


# ---------------------------------------------------------------- futures


def completed(tensor: Tensor) -> Future[Tensor]:
    """A future that is done."""
    future = future_for(tensor)
    future.set_result(tensor)
    return future


def with_default(
    future: Future[T], default: T, *, timeout_s: float, on_error: Callable[[Exception], None]
) -> Future[T]:
    """`future`, but `default` in place of an error or of a result later than `timeout_s`, which is
    reported to `on_error` (in any thread)."""
    result: Future[T] = Future()
    first, ended = threading.Lock(), threading.Event()

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
        ended.set()

    def watch() -> None:
        if not in_time(ended.wait, deadline):
            finish_with(default, TimeoutError(f"a future was not done within {timeout_s:g} s"))

    deadline = time.monotonic() + timeout_s
    future.add_done_callback(done)
    if not future.done():
        threading.Thread(target=watch, name="ft-timeout", daemon=True).start()
    return result
