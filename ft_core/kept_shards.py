"""A sharded model whose gradients are kept until their step is committed: FSDP2, tensor parallelism.

    backward        FSDP reduces a module's gradients over the ranks of this replica group, into `.grad`
    a bucket full   `.grad` is copied there, and the copy is averaged over the replica groups
    backward ends   the vote; a discarded step is tried again: the ranks copy `.grad` once more
    committed       the mean is copied to `.grad`

A further attempt reduces over the groups alone. The ranks of a group need no collective among
themselves for it, so that all of them do the same, whichever of them has lost its peer.

`ft_core.sharded.replicate` averages within FSDP's own hook: it needs no second copy of the gradients,
and can't try again, since FSDP casts and adds up what the hook returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ft_core.collectives.retry import OptionalParameters, RetryableReducer
from ft_core.heal.shardings import local_part
from ft_core.sharded import check_covered, describe_shards, shards_of
from ft_core.step import StartedReduce

BUCKET_BYTES = 25 * 1024 * 1024
"""As torch's DDP has it: one collective for each small tensor would cost more than its transfer."""


@dataclass(eq=False, slots=True)
class _Bucket:
    """Gradients that travel together. `places`: of each parameter, in `memory`."""

    memory: Tensor
    parameters: list[Tensor]
    places: list[Tensor]
    missing: set[Tensor] = field(default_factory=set)
    sent: StartedReduce | None = None

    @classmethod
    def of(cls, parameters: list[Tensor]) -> _Bucket:
        parts = [local_part(parameter) for parameter in parameters]
        sizes = [part.numel() for part in parts]
        memory = torch.zeros(sum(sizes), dtype=parts[0].dtype, device=parts[0].device)
        memory.fill_(0)  # the kernel finds the memory now, not in the first backward
        places = [
            place.view(part.shape) for place, part in zip(memory.split(sizes), parts, strict=True)
        ]
        return cls(memory, parameters, places, set(parameters))

    def fill(self) -> None:
        with torch.no_grad():
            for parameter, place in zip(self.parameters, self.places, strict=True):
                if parameter.grad is None:
                    place.zero_()
                else:
                    place.copy_(local_part(parameter.grad))

    def take(self) -> None:
        """Copy the means to `.grad`. A parameter that no group has used keeps None there: an
        optimizer tells that from zero."""
        with torch.no_grad():
            for parameter, place in zip(self.parameters, self.places, strict=True):
                if parameter.grad is not None:
                    local_part(parameter.grad).copy_(place)
                elif bool(place.any()):
                    parameter.grad = _like(parameter, place.clone())


class RetryableShards:
    """The trained parameters of a model, each rank of a replica group with its part of them.

    Args:
        reducer: reduces, votes and retries. Several models may share it.
        model: to whose modules `fully_shard` was applied, or whose parameters are sharded otherwise
            (tensor parallelism).
        data_parallel: over how many ranks of the group the data is spread. If it is over several,
            `fully_shard` must have been applied to all that is trained: else nothing would average
            its gradients over those ranks.

    Attributes:
        require_backward_grad_sync: False: gradients of backward passes are added up in `.grad`, to be
            averaged with those of a later pass.

    Raises ValueError if a parameter's gradient would not be averaged. The ranks of a group must use
    the same parameters in a step, as FSDP asks of them; groups need not. Thread: the training loop's;
    autograd's threads reduce.
    """

    optional: OptionalParameters | None = None

    def __init__(
        self, reducer: RetryableReducer, model: nn.Module, *, data_parallel: int = 1
    ) -> None:
        self.require_backward_grad_sync = True
        self._reducer = reducer
        if data_parallel > 1:
            check_covered(model, [m for m in model.modules() if isinstance(m, FSDPModule)])
        parameters = [p for p in shards_of(model) if p.requires_grad]
        self._buckets = [_Bucket.of(each) for each in _planned(parameters)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next, self._began = 0, False
        self._late: list[_Bucket] = []
        reducer.register_schema("sharded", describe_shards(model))
        its = weakref.ref(model)

        def compared() -> list[Tensor]:
            known = its()
            return [] if known is None else shards_of(known)

        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]
        reducer.register_compared("sharded", compared)
        reducer.add_model(self)  # without buffers: those are each rank's own, and no attempt changes them
        reducer.copies_gradients(self)

    def close(self) -> None:
        """Leave the parameters alone from now on: gradients stay in this group. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    # ------------------------------------------------------------------ a backward pass

    def _ready(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete. Called in backward, on FSDP's stream."""
        if not self.require_backward_grad_sync or not self._reducer.reduces():
            return
        self._began = True
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing and bucket.sent is not None:
            self._late.append(bucket)  # its module was used twice
        bucket.missing.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        def start() -> None:
            if bucket.sent is not None:
                bucket.sent.wait()
            bucket.fill()
            bucket.sent = self._reducer.reduce_bucket(bucket.memory, 1)

        self._reducer.reduce_in_order(start)

    def unfinished(self) -> bool:
        """Within a backward (reentrant activation checkpointing), whether gradients are still to come.
        At the end of one, those that have not come are of parameters that were not used."""
        inner = torch._C._current_autograd_node() is not None
        return inner and any(bucket.missing for bucket in self._buckets)

    def end_backward(self) -> None:
        """Send what is left: all groups send all buckets, whatever each has used."""
        if self._began:
            for bucket in [*self._buckets[self._next :], *dict.fromkeys(self._late)]:
                self._send(bucket)
            self._next = len(self._buckets)

    def end_step(self, committed: bool) -> None:
        """The step is over: have the means in `.grad`, or leave there what this rank has computed."""
        if not self._began:
            return
        for bucket in self._buckets:
            if committed and bucket.sent is not None:
                bucket.sent.wait()
                bucket.take()
            bucket.sent, bucket.missing = None, set(bucket.parameters)
        self._next, self._began = 0, False
        self._late.clear()

    def forget_forward(self) -> None:
        """Nothing: no forward is remembered."""


def _planned(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters of each bucket, in the order in which backward reaches them, roughly. The same
    in all replica groups: it depends on their shards alone."""
    bucket: list[Tensor] = []
    held = 0
    for parameter in reversed(parameters):
        part = local_part(parameter)
        if bucket:
            last = local_part(bucket[-1])
            alike = (part.dtype, part.device) == (last.dtype, last.device)
            if not alike or held + part.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
        bucket.append(parameter)
        held += part.nbytes
    if bucket:
        yield bucket


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """A gradient of `parameter`, of which this rank has `part`."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
