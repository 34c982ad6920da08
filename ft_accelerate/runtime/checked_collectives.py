"""Operations over the quorum, each checked before data moves. One attempt per call.

First every process sends a header of fixed size: what it is about to do, at which event of its
script, with how many bytes. Collectives of other sizes start only if all headers agree, since Gloo
ends the process when collectives do not match. Payloads are summed: each process adds its own rows
and zeros elsewhere, which is exact for bytes.

Gradients go without a header once a gradient step was committed under the same quorum, as all its
members know. A process whose script is elsewhere then waits at its header, which Gloo keeps apart
from the others' gradients. When its patience ends, its attempt fails. A new quorum follows, in which
all processes begin with headers.

Gradients of unlike batches match, too: a script that leaves out a batch in one process alone is one
ahead from there on. So the header of gradients, and of parameters that are averaged, has the batch. One
gradient event in `TOGETHER_EVENTS` has a header again. All are at the same event, so none waits there for one
that is not. For the same reason it has the number of the try, in a search for a batch size.

A script may catch what its backward raises, and go on: a search for a batch size does, in all processes. One that
is late for that backward meets them where they have gone on to, with no event between. Its header says that its
backward is under way, theirs that one has raised. That is no divergence yet: the attempt fails, and it raises as
they have, or it comes with all its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ft_accelerate.runtime.script_position import UNKNOWN, ScriptPosition
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

    @property
    def what(self) -> str:
        """In words."""
        return NAMES[self]


TRAINING = frozenset({Kind.GRADIENTS, Kind.PARAMETERS})
"""Those that change the model. Others are operations of the script's."""

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
PATIENCE = 0.25
"""Of the timeout: how long a header waits for processes that may be at a gradient step without one."""
TOGETHER_EVENTS = 64
"""Of so many gradient steps in a row one has a header."""


class Header(NamedTuple):
    """What a process is about to do.

    Attributes:
        kind, event: what it is, and the event's number in the script.
        agreed: events that this process has done together with others since it came (back).
        whole: 1: its script has been there for all events; see `leadership.main_of`.
        raised: backward passes that have raised since the last event.
        computes: 1: a backward pass is under way, and may raise.
        tries: sizes that the search for a batch size has tried, with this one; 0: the script has begun none.
        batch: its number in its pass over the data, of what is computed from it; `UNKNOWN` for other operations.
        passes, under_way: see `ScriptPosition.align`.
        nbytes, shape: of the payload, of its tensor (a hash).
    """

    kind: int
    event: int
    agreed: int
    whole: int = 1
    raised: int = 0
    computes: int = 0
    tries: int = 0
    batch: int = UNKNOWN
    passes: int = 0
    under_way: int = UNKNOWN
    nbytes: int = 0
    shape: int = 0

    @classmethod
    def of(cls, position: ScriptPosition, kind: Kind, *, computes: bool) -> Header:
        """What this process is about to do at its script's `position`."""
        whole = int(position.missed == 0)
        tries = position.searches[-1].tries if position.searches else 0
        batch = position.batch if kind is Kind.GRADIENTS else UNKNOWN
        done = position.events, position.agreed, whole, position.raised
        passes = position.iterations, position.under_way
        return cls(kind, *done, int(computes), tries, batch, *passes)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """At which all must be."""
        return self.kind, self.event, self.tries, self.batch

    @property
    def brings(self) -> tuple[int, int]:
        """What must be alike in tensors of the same size."""
        return self.nbytes, self.shape

    def is_at(self, other: Header) -> bool:
        """Whether this is `other`'s place, as far as it is known."""
        batches = {self.batch, other.batch} - {UNKNOWN}
        return self.place[:-1] == other.place[:-1] and len(batches) < 2

    def may_follow(self, other: Header) -> bool:
        """Whether this process comes to `other`'s place if its backward pass raises, as one of `other`'s has, or in a
        search for a batch size its forward."""
        raised = self.tries < other.tries or self.raised < other.raised
        return bool(self.computes) and self.event == other.event and raised

    def in_words(self) -> str:
        batch = "" if self.batch == UNKNOWN else f"batch {self.batch + 1:,} of a pass, "
        size = f"try {self.tries} of a batch size, " if self.tries else ""
        return f"{Kind(self.kind).what} ({size}{batch}event {self.event} of its script)"


def align(position: ScriptPosition, headers: Collection[Header]) -> None:
    """Count passes over loaders as the process at this event that has made the fewest."""
    if position.live and all(header.event == position.events for header in headers):
        passes = min(header.passes for header in headers)
        position.align(passes, min(header.under_way for header in headers))


class Diverged(RuntimeError):
    """This replica group's script is not where the others' scripts are."""


@dataclass(frozen=True, slots=True)
class CheckedCollectives:
    """The collectives of one process in one attempt at an event of its script.

    Attributes:
        manager: a step of which is open.
        process_index, num_processes: of this process among those of the whole job.
        device: of the tensors that are sent.
        header: what the script is about to do.
        patience_s: how long to wait for the others' headers; None: as long as for any collective.
        on_headers: called with all headers, by process and in the order of ranks.
        in_group: gathers from the processes of this replica group. Given where the manager's collectives
            reach those of this number in all groups only (`ranks_hold="shards"`). Each method then
            reaches the others in a second collective, of torch's default process group; so once headers
            are there, all processes of a group call the same, whatever has failed meanwhile.
    """

    manager: Manager
    process_index: int
    num_processes: int
    device: torch.device
    header: Header
    patience_s: float | None = None
    on_headers: Callable[[dict[int, Header]], None] | None = None
    in_group: Callable[[Any], list[Any]] | None = None

    def check(
        self, nbytes: int = 0, shape: Sequence[int] = (), batch: int | None = None
    ) -> dict[int, Header] | None:
        """Exchange headers; the first collective of an attempt. `batch`: see `Header`; None: as `header` has it.

        Returns the headers of the processes that contribute, by their index and in its order; None if
        the attempt has failed. Raises Diverged if it is this process that has diverged.
        """
        shape_hash = hash(tuple(shape)) % (1 << 31)
        at_batch = self.header.batch if batch is None else batch
        mine = self.header._replace(batch=at_batch, nbytes=nbytes, shape=shape_hash)
        known = exchange_headers(
            self.manager.step, [self.process_index, *mine], patience_s=self.patience_s
        )
        if self.in_group is not None:
            known = _merged(self.in_group(known))
        if not known:
            return None
        found = {index: Header(*header) for index, *header in known}
        if self.on_headers is not None:
            self.on_headers(found)
        # The processes that have done most together are right; of those the most, or the first.
        at = Counter(header.place for header in found.values())
        right = found[max(found, key=lambda i: (found[i].agreed, at[found[i].place], -i))]
        here = [mine, *found.values()]  # the others don't hear of one that only heals
        if not all(header.is_at(right) for header in here):
            self.manager.report_error(RuntimeError(self._apart(mine, right, here)))
            return None
        # A process that has just come back may bring a tensor that it made (padded, say) when it
        # did not count yet. It does not count in this operation either.
        return {
            index: header
            for index, header in sorted(found.items())
            if header.shape == right.shape or header.agreed > JUST_BACK_EVENTS
        }

    def _apart(self, mine: Header, right: Header, found: Collection[Header]) -> str:
        """Why the attempt fails, in which processes are at unlike places. Raises Diverged."""
        if any(late.may_follow(other) for late in found for other in found):
            return "a replica group's backward pass has raised, and another's may raise as well"
        if mine.is_at(right):
            return "another replica group's script has diverged"
        raise Diverged(
            f"this replica group is at {mine.in_words()}, the others are at {right.in_words()}: all "
            "must run the same script with the same options, leave out the same batches, and "
            "register objects that decide about its path with "
            "accelerator.register_for_checkpointing"
        )

    def rows(self, payload: Tensor, nbytes: int) -> Tensor:
        """`payload` (bytes, up to `nbytes` of them) of every process: shape (num_processes, nbytes)."""
        table = torch.zeros(self.num_processes, nbytes, dtype=torch.uint8, device=self.device)
        mine = payload[:nbytes]
        table[self.process_index, : mine.numel()] = mine.to(self.device)
        return self._reduced(table, ReduceOp.SUM)

    def from_one(self, payload: Tensor, nbytes: int, source: int) -> Tensor:
        """`payload` of process `source`, `nbytes` bytes of it."""
        wire = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        if self.process_index == source:
            wire.copy_(payload[:nbytes])
        return self._reduced(wire, ReduceOp.SUM)

    def reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> Tensor:
        """A reduced copy of `tensor`."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._reduced(result, op)

    def _reduced(self, tensor: Tensor, op: ReduceOp.RedOpType) -> Tensor:
        self.manager.allreduce(tensor, reduce_op=op).wait()
        if self.in_group is not None:
            dist.all_reduce(tensor, op)
        return tensor


def _merged(known: list[list[list[int]] | None]) -> list[list[int]] | None:
    """Headers of all processes, in the order of ranks, from what each process of a group has received: those
    of its number. None: one of them has received none, and all know."""
    if len({len(each or ()) for each in known}) > 1:
        return None
    groups = zip(*(each or () for each in known), strict=True)
    return [header for group in groups for header in group]


class GradientHeaders:
    """Which gradient steps begin with a header. One process's; the thread of `Runtime._open_gradients`.

    `kept_apart`: headers are, from gradients of other steps.
    """

    def __init__(self, *, kept_apart: bool) -> None:
        self._kept_apart = kept_apart
        self._quorum: int | None = None  # in which all have had one

    def due(self, quorum: int, event: int) -> bool:
        """Whether all members have one at this event."""
        return quorum != self._quorum or event % TOGETHER_EVENTS == 0

    def patience_s(self, kind: Kind, quorum: int, timeout_s: float) -> float | None:
        """How long a header waits for members; see `CheckedCollectives`. Those at gradients without one don't
        come to an operation's."""
        waits = kind is Kind.GRADIENTS or quorum != self._quorum
        return None if waits else PATIENCE * timeout_s

    def committed(self, quorum: int, *, models: int) -> None:
        """A gradient step is. With several models the others may be at another one."""
        self._quorum = quorum if self._kept_apart and models == 1 else None


Attempt = Callable[[CheckedCollectives], Any]
"""Does an operation once. What it returns counts if the attempt is committed."""


def check_alike(headers: Mapping[int, Header], what: str) -> None:
    """Raise ValueError unless all processes bring the same shape."""
    if len({header.brings for header in headers.values()}) > 1:
        raise ValueError(
            f"{what} needs a tensor of the same shape and type from every process: use "
            "accelerator.pad_across_processes before it, and let no process decide alone (by its own "
            "clock, say) which calls it makes"
        )
