"""`Manager.allreduce` of one tensor: this member's contribution, the collective, what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ft_core.allreduce import completed, finish, future_for, op_name, options_for, prepare
from ft_core.process_group.work import CompletedWork, finish_with
from ft_core.quantized import check_quantizable, queue_of, reduce_in_turn
from ft_core.world import Participation

if TYPE_CHECKING:
    from ft_core.manager import Manager


class Started:
    """An all-reduce on its way, for a caller that waits for it in a thread of its own.

    No other thread runs Python code for it when it arrives, as a future's callbacks would in the
    backend's: a thread that waits then gets the interpreter at once (0.15 ms a step of two
    replicas, benchmarks/RESULTS.md).

    Attributes:
        future: of the tensor; done, and never failed, when somebody has called `wait`.
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
        """The reduced tensor, when it is there. Never raises. One thread at a time."""
        if not self.future.done():
            error = None
            try:
                self._work.wait()
            except Exception as caught:
                error = caught.with_traceback(None)  # which would tie this frame to it
            if self._end is not None:
                self._end(error)
            self.future.set_result(self._tensor)
        return self._tensor

    def done(self) -> bool:
        """Whether it has arrived, or failed. Any thread."""
        return self.future.done() or self._work.is_completed()


def reduce(
    manager: Manager,
    tensor: Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    divided_by: int,
    quantize: bool,
) -> Future[Tensor]:
    """See `Manager.allreduce`. Any thread; never raises but ValueError."""
    op = op_name(reduce_op)
    if quantize:
        check_quantizable(tensor, op)
    try:
        part = _contribute(manager, tensor, op, divided_by)
        if part is None:
            return completed(tensor)
        if quantize or queue_of(manager).busy:
            return reduce_in_turn(manager, tensor, op, part, quantize=quantize)
        work = manager._pg.allreduce([tensor], options_for(op))
    except Exception as error:  # whatever the backend raises: the step is lost, not the run
        manager.report_error(error)
        return completed(tensor)
    result = finish_with(work, _ending(manager, tensor, op, part))
    manager._pending.append(result)
    return result


def start(
    manager: Manager,
    tensor: Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    divided_by: int,
) -> Started:
    """See `Manager.start_allreduce`. Any thread; never raises but ValueError."""
    op, end = op_name(reduce_op), None
    work: dist.Work = CompletedWork(tensor)
    try:
        part = _contribute(manager, tensor, op, divided_by)
        if part is not None and queue_of(manager).busy:
            work = work_of(reduce_in_turn(manager, tensor, op, part, quantize=False))
        elif part is not None:
            work = manager._pg.start_allreduce([tensor], options_for(op))
            end = _ending(manager, tensor, op, part)
    except Exception as error:  # as above
        manager.report_error(error)
    started = Started(tensor, work, end)
    manager._pending.append(started)
    return started


def work_of(future: Future[Tensor]) -> dist.Work:
    """What torch's reducer wants in the place of a future."""
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)
    return work


def _contribute(manager: Manager, tensor: Tensor, op: str, divided_by: int) -> Participation | None:
    """Make `tensor` this member's contribution; None: the step is lost already."""
    part = manager._part if manager._pinned_at is not None else manager._pin()
    if manager._error is not None or part is None:
        return None
    # Integers first: equal ones give exactly 1.
    scale = manager._weight * (divided_by / (1 if manager._weighted else part.participants))
    prepare(tensor, op, participating=part.rank is not None, scale=scale)
    return part


def _ending(
    manager: Manager, tensor: Tensor, op: str, part: Participation
) -> Callable[[Exception | None], Tensor]:
    """What is done when the collective has ended: the result, or a report."""

    def end(error: Exception | None) -> Tensor:
        try:
            if error is None:
                finish(tensor, op, part.participants)
        except Exception as caught:
            error = caught
        if error is not None:
            # A future wraps errors into its own, with a stack; the group has the plain one.
            manager.report_error(manager._pg.errored() or error)
        return tensor

    return end
