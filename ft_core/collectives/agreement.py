"""Agreements: steps without an update, repeated until they are committed.

Between updates members exchange what they must all know: a metric, a gathered batch, their arrival
at a barrier. Such an exchange is a step of the manager's that changes no state, so fewer than
`min_replica_size` participants may commit it (`should_commit(no_update=True)`). If a member dies
in it, the step is discarded and those that are left exchange again: all have the result of the same
attempt, or none has one.

Collectives that do not match end a process under Gloo. Where members may be at different places,
an attempt begins with `exchange_headers`, and only if all headers fit does it start collectives
whose sizes depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ft_core.process_group.work import BackendWork, finish_with
from ft_core.step import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agreed(Generic[T]):
    """What a committed attempt returned."""

    result: T


def agree(
    attempt: Callable[[], T],
    *,
    begin: Callable[[], object],
    vote: Callable[[], bool],
    is_behind: Callable[[], bool],
) -> Agreed[T] | None:
    """Repeat a step without update until it is committed. The one loop, for every integration.

    Args:
        attempt: the collectives of one attempt. Called again after each discard, so it must not
            change what it sends. What it returns after an error of communication is dropped with
            the attempt; it need not look for such errors.
        begin: opens the step, as `Manager.start_quorum` does, unless one is open. May load a
            peer's state.
        vote: ends it, as `Manager.should_commit(no_update=True)` does. May load a peer's state.
        is_behind: whether this member has lost its place among the others, as it has when it was
            evicted and has loaded their state. Asked before and after each `begin`, and after each
            vote: the agreement is not this member's, and the loop stops.

    Returns the result, or None if this member is behind. A step that `begin` has opened may be open
    still; the caller uses it, or leaves the quorum (`Manager.rejoin`). What a callable raises
    is fatal here: the loop ends, with the step open, and the caller must leave the quorum, since the
    others wait in their collectives.

    Thread: the training loop's.
    """
    while not is_behind():
        begin()
        if is_behind():
            break
        result = attempt()
        committed = vote()
        if committed and not is_behind():
            return Agreed(result)
    return None


def exchange_headers(
    step: Step,
    header: Sequence[int],
    *,
    patience_s: float | None = None,
) -> list[list[int]] | None:
    """`header` of every member that contributes to the step, in the order of their ranks.

    A header says what its member is about to do, in as many 64-bit integers on all members. Blocks;
    binds the step to its quorum if no collective has. None: the step has failed, and `step.error`
    says why. It also fails when the others have not come within `patience_s` seconds.

    Headers lie in host memory, also where the model is on a GPU: what the host reads at once must come
    with its error, which a device reports only later.

    An all-gather on purpose: Gloo keeps it apart from all-reduces. Members that call one of
    each wait for each other; two all-reduces of different sizes would end the process.

    Thread: the loop's or autograd's. Not while a quantized reduction is in flight.
    """
    part = step.bind()
    if part is None:
        return None
    mine = [1, *header] if part.rank is not None else [0] * (1 + len(header))
    row = torch.tensor([mine], dtype=torch.int64)
    table = row.new_empty(step.group.size(), row.shape[1])
    try:
        work = step.group._allgather_base(table, row)
    except Exception as error:  # whatever the backend raises: the step is lost, not the run
        step.fail(error)
        return None

    def end(error: Exception | None) -> Tensor:
        if error is not None:
            step.fail(step.group.errored() or error)
        return table

    result = finish_with(work, end)
    step.pending[result] = None  # so that a stall is noticed
    if patience_s is not None and isinstance(work, BackendWork):
        if not work.ended_within(patience_s):
            late = f"the other members have not come to an exchange within {patience_s:g} s"
            step.fail(TimeoutError(late))
    result.wait()
    if step.error is not None:
        return None
    return [said[1:] for said in table.tolist() if said[0] == 1]
