"""A small row of numbers from every member: what members tell each other before data moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ft_core.process_group.work import BackendWork, StreamWork, finish_with

if TYPE_CHECKING:
    from ft_core.manager import Manager


def gather_rows(manager: Manager, row: Tensor, patience_s: float | None = None) -> Tensor | None:
    """`row` (shape (1, n)) of every member, in the order of their ranks: shape (members, n).

    Rows of members that contribute nothing to the step are zeros. Waits; begins the step's
    collectives if none has begun. None: the step has failed, and `manager.errored` says why, as it
    does when the others have not come within `patience_s` (not on CUDA).

    An all-gather on purpose: Gloo keeps it apart from all-reduces. Members that come to different
    ones of these two wait for each other; two all-reduces of different sizes would end the process.

    Thread: the loop's or autograd's. Not while a quantized reduction is on its way.
    """
    if not manager.bind():
        return None
    participates = manager.participating_rank() is not None
    mine = row if participates else torch.zeros_like(row)
    everybody = row.new_empty(manager.step.group.size(), row.shape[1])
    try:
        work = manager.step.group._allgather_base(everybody, mine)
    except Exception as error:  # whatever the backend raises: the step is lost, not the run
        manager.report_error(error)
        return None

    def end(error: Exception | None) -> Tensor:
        if error is not None:
            manager.report_error(manager.step.group.errored() or error)
        return everybody

    result = finish_with(work, end)
    manager.step.pending.append(result)  # so that one which takes too long is told of
    if patience_s is not None and isinstance(work, BackendWork) and not isinstance(work, StreamWork):
        if not work.ended_within(patience_s):
            late = f"the other members have not come to an exchange within {patience_s:g} s"
            manager.report_error(TimeoutError(late))
    result.wait()
    return everybody if manager.errored() is None else None
