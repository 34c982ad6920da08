"""A small row of numbers from every member: what members tell each other before data moves."""

from __future__ import annotations

import torch
from torch import Tensor

from ft_core.process_group.work import BackendWork, StreamWork, finish_with
from ft_core.step import Step


def gather_rows(step: Step, row: Tensor, patience_s: float | None = None) -> Tensor | None:
    """`row` (shape (1, n)) of every member, in the order of their ranks: shape (members, n).

    Rows of members that contribute nothing to the step are zeros. Blocks; binds the step to its
    quorum if no collective has. None: the step has failed, and `step.error` says why. It also fails
    when the others have not come within `patience_s` seconds (not on CUDA).

    An all-gather on purpose: Gloo keeps it apart from all-reduces. Members that call different ones
    of these two wait for each other; two all-reduces of different sizes would end the process.

    Thread: the loop's or autograd's. Not while a quantized reduction is in flight.
    """
    part = step.bind()
    if part is None:
        return None
    mine = row if part.rank is not None else torch.zeros_like(row)
    rows = row.new_empty(step.group.size(), row.shape[1])
    try:
        work = step.group._allgather_base(rows, mine)
    except Exception as error:  # whatever the backend raises: the step is lost, not the run
        step.fail(error)
        return None

    def end(error: Exception | None) -> Tensor:
        if error is not None:
            step.fail(step.group.errored() or error)
        return rows

    result = finish_with(work, end)
    step.pending.append(result)  # so that a stall is noticed
    if patience_s is not None and isinstance(work, BackendWork) and not isinstance(work, StreamWork):
        if not work.ended_within(patience_s):
            late = f"the other members have not come to an exchange within {patience_s:g} s"
            step.fail(TimeoutError(late))
    result.wait()
    return rows if step.error is None else None
