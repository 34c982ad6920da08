"""Operations over the quorum, each checked before data moves. One attempt a call.

First every process sends a header of fixed size: what it is about to do, at which event of its
script, with how many bytes. Only if all headers agree do collectives of other sizes start, since
Gloo ends the process when collectives do not match. Payloads are summed: each process adds its own
rows and zeros elsewhere, which is exact for bytes.

Gradients go without a header once a gradient step was committed under the same quorum, as all its
members know. A process whose script is elsewhere then waits at its header, which Gloo keeps apart
from the others' gradients. When its patience ends, so does the attempt; a new quorum follows, in
which all begin with headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ft_core.collectives.agreement import exchange_headers
from ft_core.manager import Manager


class Kind(IntEnum):
    """What an event is."""

    GRADIENTS = 1
    GATHER = 2
    SUM = 3
    MAX = 4
    BROADCAST = 5
    OBJECTS = 6
    BARRIER = 7
    PARAMETERS = 8


NAMES = {
    Kind.GRADIENTS: "a gradient step",
    Kind.GATHER: "gather",
    Kind.SUM: "reduce",
    Kind.MAX: "reduce with max",
    Kind.BROADCAST: "broadcast",
    Kind.OBJECTS: "an exchange of objects",
    Kind.BARRIER: "wait_for_everyone",
    Kind.PARAMETERS: "an average of parameters",
}
JUST_BACK_EVENTS = 1
Said = tuple[int, int, int, int]
"""A header: kind, event, bytes, the shape's hash."""


class Diverged(RuntimeError):
    """This replica group's script is not where the others' scripts are."""


@dataclass(frozen=True, slots=True)
class CheckedCollectives:
    """The collectives of one process in an open attempt of `manager`.

    `process_index`: its number among the `num_processes` of the whole job; `device`: of the tensors
    that are sent.
    """

    manager: Manager
    process_index: int
    num_processes: int
    device: torch.device

    def agree(
        self,
        kind: Kind,
        event: int,
        agreed: int,
        nbytes: int = 0,
        shape: Sequence[int] = (),
        *,
        patience_s: float | None = None,
    ) -> list[Said | None] | None:
        """The header: (kind, event, bytes, shape's hash) of each process; None where one is away.

        Returns None if the attempt has failed, as it does when the others have not come within
        `patience_s`. Raises Diverged if it is this process that has diverged.
        """
        mine = (kind.value, event, nbytes, hash(tuple(shape)) % (1 << 31))
        header = [self.process_index, *mine, agreed]
        said = exchange_headers(
            self.manager.step, header, device=self.device, patience_s=patience_s
        )
        if not said:
            return None
        rows: list[list[int] | None] = [None] * self.num_processes
        for row in said:
            rows[row[0]] = row
        # The processes that have done most together are right; of those the first.
        reference = max(said, key=lambda row: (row[5], -row[0]))[1:5]
        if reference[:2] != list(mine[:2]):
            raise Diverged(
                f"this replica group is at {NAMES[kind]} (event {event} of its script), the others "
                f"are at {NAMES[Kind(reference[0])]} (event {reference[1]}): all must run the same "
                "script with the same options, and register objects that decide about its path "
                "with accelerator.register_for_checkpointing"
            )
        if any(row[1:3] != reference[:2] for row in said):
            self.manager.report_error(RuntimeError("another replica group's script has diverged"))
            return None
        return [None if row is None else _counted(row, reference) for row in rows]

    def rows(self, payload: Tensor, nbytes: int) -> Tensor:
        """`payload` (bytes, up to `nbytes` of them) of every process: shape (num_processes, nbytes)."""
        table = torch.zeros(self.num_processes, nbytes, dtype=torch.uint8, device=self.device)
        mine = payload[:nbytes]
        table[self.process_index, : mine.numel()] = mine.to(self.device)
        self.manager.allreduce(table, reduce_op=ReduceOp.SUM).wait()
        return table

    def from_one(self, payload: Tensor, nbytes: int, source: int) -> Tensor:
        """`payload` of process `source`, `nbytes` bytes of it."""
        wire = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        if self.process_index == source:
            wire.copy_(payload[:nbytes])
        self.manager.allreduce(wire, reduce_op=ReduceOp.SUM).wait()
        return wire

    def reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> Tensor:
        """A reduced copy of `tensor`."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.manager.allreduce(result, reduce_op=op).wait()
        return result


def _counted(row: list[int], reference: list[int]) -> Said | None:
    """What a process says. None for one that has just come back with a tensor that it made (padded,
    say) when it did not count yet: it does not count in this operation either."""
    _, kind, event, nbytes, shape, agreed = row
    if shape != reference[3] and agreed <= JUST_BACK_EVENTS:
        return None
    return kind, event, nbytes, shape


def check_alike(said: Sequence[Said | None], what: str) -> None:
    """Raise ValueError unless all processes bring the same shape."""
    here = {s[2:] for s in said if s is not None}
    if len(here) > 1:
        raise ValueError(
            f"{what} needs a tensor of the same shape and type from every process: use "
            "accelerator.pad_across_processes before it"
        )


def present(said: Sequence[object | None]) -> list[int]:
    """Indices of the processes that contribute."""
    return [index for index, row in enumerate(said) if row is not None]


def fill(rows: list[Tensor], here: Sequence[int]) -> list[Tensor]:
    """`rows`, with copies of others' rows in place of those of processes that are away.

    So shapes stay what the script expects, and means and (scaled) sums stay unbiased.
    """
    if not here:
        return rows
    return [
        row if index in set(here) else rows[here[index % len(here)]]
        for index, row in enumerate(rows)
    ]
