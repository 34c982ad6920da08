"""`Manager.allreduce` of one tensor: this member's contribution, the collective, and its result."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.collectives.ops import completed, finish, future_for, prepare, resolve
from ft_core.collectives.quantized import check_quantizable, reduce_in_turn
from ft_core.process_group.work import CompletedWork, finish_with
from ft_core.replica.status import Participation
from ft_core.step import Step


class AsyncReduce:
    """An all-reduce in flight, whose caller waits for it with `wait`.

    Its end runs in the thread that waits. A future's callbacks would run in a thread of the
    backend, which would compete with the waiting one for the interpreter (0.15 ms a step of two
    replicas, benchmarks/RESULTS.md).

    Attributes:
        future: of the tensor. Done, and never failed, once `wait` has returned.
    """

    __slots__ = ("_end", "_tensor", "_work", "future")

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work,
        end: Callable[[Exception | None], Tensor] | None = None,
    ) -> None:
        self.future = future_for(tensor)
        self._tensor, self._work, self._end = tensor, work, end

    def wait(self) -> Tensor:
        """Wait, and return the reduced tensor. Never raises. One thread at a time."""
        if not self.future.done():
            error = None
            try:
                self._work.wait()
            except Exception as caught:
                error = caught.with_traceback(None)  # which would keep this frame alive
            if self._end is not None:
                self._end(error)
            self.future.set_result(self._tensor)
        return self._tensor

    def done(self) -> bool:
        """Whether it has ended, well or badly. Any thread."""
        return self.future.done() or self._work.is_completed()


def reduce(
    step: Step,
    tensor: Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    divided_by: int,
    quantize: bool,
) -> Future[Tensor]:
    """See `Manager.allreduce`. Any thread; never raises but ValueError."""
    op, options = resolve(reduce_op)
    if quantize:
        check_quantizable(tensor, op)
    try:
        part = _contribute(step, tensor, op, divided_by)
        if part is None:
            return completed(tensor)
        if quantize or step.queue.busy:
            return reduce_in_turn(step, tensor, op, part, quantize=quantize)
        work = step.group.allreduce([tensor], options)
    except Exception as error:  # whatever the backend raises: the step is lost, not the run
        step.fail(error)
        return completed(tensor)
    result = finish_with(work, _ending(step, tensor, op, part))
    step.pending.append(result)
    return result


def start(
    step: Step,
    tensor: Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    divided_by: int,
) -> AsyncReduce:
    """See `Manager.start_allreduce`. Any thread; never raises but ValueError."""
    op, options = resolve(reduce_op)
    work: dist.Work | None = None
    end: Callable[[Exception | None], Tensor] | None = None
    try:
        part = _contribute(step, tensor, op, divided_by)
        if part is not None and step.queue.busy:
            work = work_of(reduce_in_turn(step, tensor, op, part, quantize=False))
        elif part is not None:
            work = step.group.start_allreduce([tensor], options)
            end = _ending(step, tensor, op, part)
    except Exception as error:  # as above
        step.fail(error)
    started = AsyncReduce(tensor, work or CompletedWork(tensor), end)
    step.pending.append(started)
    return started


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


def work_of(future: Future[Tensor]) -> dist.Work:
    """`future` as torch's reducer takes it."""
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)
    return work


def _contribute(step: Step, tensor: Tensor, op: str, divided_by: int) -> Participation | None:
    """Make `tensor` this member's contribution. None: the step has failed already."""
    part = step.bind()
    if part is None:
        return None
    # Integers first: for equal ones the factor is 1.
    scale = step.weight * (divided_by / (1 if step.weighted else part.participants))
    prepare(tensor, op, participating=part.rank is not None, scale=scale)
    return part


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
