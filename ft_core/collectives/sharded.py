"""Sharded models whose gradients are averaged over the replica groups: FSDP2 inside a group, a manager between.

There are two ways, for a loop of your own and for integrations:

    fully_shard(model, mesh=mesh)            # torch's, over the ranks of this replica group
    replicate(model, manager)                # each gradient is averaged within FSDP's own hook

FSDP reduces the gradients of each `fully_shard`ed module over the group's ranks. Then it calls a hook,
which averages the shard that this rank holds with the ranks of the same number in the other groups.
That needs no second copy of the gradients, and can't try a discarded step again, since FSDP casts and
adds up what the hook returns. `RetryableShards` keeps them until their step is committed:

    backward        FSDP reduces a module's gradients over the ranks of this replica group, into `.grad`
    a bucket full   `.grad` is copied there, and the copy is averaged over the replica groups
    backward ends   the vote; a discarded step is tried again: the ranks copy `.grad` once more
    committed       the mean is copied to `.grad`

A further attempt reduces over the groups alone. The ranks of a group need no collective among
themselves for it, so that all of them do the same, whichever of them has lost its peer.

Streams. On CUDA FSDP runs the hook on a stream of its own, so the average overlaps with the rest of
backward. The CPU has no streams: FSDP divides, casts and accumulates the gradient when the hook
returns. So there the hook waits, as torch's HSDP does.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ft_core.collectives.allreduce import average, check_devices
from ft_core.collectives.retry import OptionalParameters, RetryableReducer
from ft_core.heal.shardings import local_part
from ft_core.process_group.torch_versions import forget_raised_passes
from ft_core.step import ShardManager, StartedReduce, new_part

_DIVIDED_AFTER = (torch.float32, torch.bfloat16)
"""No sum of a few gradients overflows in these."""
BUCKET_BYTES = 25 * 1024 * 1024
"""As torch's DDP has it: one collective for each small tensor would cost more than its transfer."""


def replicate(
    model: nn.Module, manager: ShardManager, *, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
) -> nn.Module:
    """Average the gradients of a `fully_shard`ed model over the replica groups; returns `model`.

    Call it once, after the last `fully_shard` and before the first step. Each backward that
    synchronizes gradients must be within a step of the manager. Members compare the parameters
    (`Manager.register_compared`). The state that heals is what the manager was given: sharded state
    dicts, as `model.state_dict()` and `optimizer.state_dict()` return them.

    Args:
        model: holds one or several modules to which `fully_shard` was applied, and no other
            parameters that are trained. A group's device mesh may have any dimensions.
        manager: the `Manager` of this rank, with `ranks_hold="shards"`.
        reduce_op: AVG; or SUM, for a loss that is divided by a constant for all groups together. FSDP's
            own divisor (`set_gradient_divide_factor`) concerns the ranks of a group.

    Raises ValueError if there is nothing to replicate, or a parameter's gradient would not or could not be.
    Thread: the training loop's; autograd's threads reduce.
    """
    if reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise ValueError(f"reduce_op must be AVG or SUM, got {reduce_op}")
    if manager.ranks_hold != "shards":
        raise ValueError('replicate() is for Manager(ranks_hold="shards")')
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    check_covered(model, sharded)
    check_devices(model.parameters())

    def hook(gradient: Tensor) -> None:
        _average(manager, gradient, reduce_op)

    for module in sharded:
        module.set_all_reduce_hook(hook)
    key, shards = new_part(manager, "sharded"), Shards(model)
    manager.register_schema(key, describe_shards(model))
    manager.register_compared(key, shards)
    return model


def _average(manager: ShardManager, gradient: Tensor, op: ReduceOp.RedOpType) -> None:
    """Reduce one gradient in place, on the current stream. Fails the step, and raises nothing."""
    step = manager.step
    # Gloo's means are divided sums: with three groups the last bits differ from those of scaled parts.
    divides = op == ReduceOp.AVG and not step.weighted
    if divides and gradient.is_cpu and gradient.dtype in _DIVIDED_AFTER:
        average(step, gradient)
    else:
        manager.start_allreduce(gradient, op).wait()


def check_covered(model: nn.Module, sharded: Iterable[nn.Module]) -> None:
    """Raise ValueError unless the modules `sharded` hold all parameters of `model` that are trained."""
    covered = {p for module in sharded for p in module.parameters() if isinstance(p, DTensor)}
    if not covered:
        raise ValueError("there is no fully_shard()ed module: call fully_shard(model) first")
    left = [n for n, p in model.named_parameters() if p.requires_grad and p not in covered]
    if left:
        raise ValueError(
            f"no fully_shard()ed module holds {left[0]!r} ({len(left)} such parameters): their "
            "gradients would not be averaged; call fully_shard(model) for the root too, or freeze them"
        )


def describe_shards(model: nn.Module) -> str:
    """One line that is equal for this rank of all replica groups: a digest of shapes and placements."""
    lines, parameters = [], dict(model.named_parameters())
    for name, p in parameters.items():
        line = f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        if isinstance(p, DTensor):
            line += f" {tuple(p.to_local().shape)} {p.placements} {tuple(p.device_mesh.shape)}"
        lines.append(line)
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()
    meshes = {p.device_mesh for p in parameters.values() if isinstance(p, DTensor)}
    sizes = ", ".join(sorted("x".join(map(str, mesh.shape)) for mesh in meshes))
    return f"{len(parameters)} tensors sharded over {sizes} ranks ({digest})"


class Shards:
    """The parameters of a model as they are between steps, also while FSDP has gathered them. Created
    between steps.

    To ask, or to save the state within `at_rest`, changes nothing: what FSDP has gathered in forward, it does
    not gather again in backward. If one rank of a group gave that up, which compares or serves its state where
    its sibling does not (the attempt of that one has failed, or no observer asks it), the ranks' next
    collectives would differ, and Gloo ends a process that receives more than it waits for.
    """

    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                begin = torch.compiler.disable(_forget_raised)
                module.register_forward_pre_hook(begin, prepend=True)
        # Kept as long as the model: a weak reference to a parameter would prevent `model.to(...)`.
        self._known = weakref.WeakKeyDictionary({model: dict(model.named_parameters())})

    def __call__(self) -> list[Tensor]:
        """All of them, in the model's order; none, if the model is gone. Any thread but in backward."""
        for model, known in self._known.items():
            for name, parameter in model.named_parameters():
                if name not in known or _placed(parameter) == _placed(known[name]):
                    known[name] = parameter  # another one, if the model was moved to a device
            return [known[name] for name, _ in model.named_parameters()]
        return []

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """See `ShardedModel`. A `state_dict` within it gives nothing up either: FSDP's hook is put aside."""
        changes: list[tuple[Callable[[Any, Any], None], Any, Any, Any]] = []
        for model in self._known:
            shards = dict(zip(model.parameters(), self(), strict=True))
            for module in model.modules():
                hooks, put = module._state_dict_pre_hooks, partial(setattr, module)
                changes += [
                    (put, name, held, shards[held])
                    for name, held in module.named_parameters(recurse=False)
                    if shards[held] is not held
                ]
                changes += [
                    (hooks.__setitem__, key, hook, _free_nothing)
                    for key, hook in hooks.items()
                    if _frees(hook)
                ]
        for change, key, _, value in changes:
            change(key, value)
        try:
            yield
        finally:
            for change, key, before, _ in changes:
                change(key, before)


def _frees(hook: Any) -> bool:
    """Whether this hook is FSDP's, by which a `state_dict` begins with giving up what is gathered."""
    return getattr(hook, "__module__", "").startswith(FSDPModule.__module__)


def _free_nothing(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    """In place of FSDP's hook."""


def _forget_raised(module: nn.Module, _args: object) -> None:
    """A forward of a root begins. What FSDP holds of one that has raised, or of a backward that has, is
    dropped: it would reduce in another order than the other groups, or its root's gradients never again."""
    if torch._C._current_graph_task_id() < 0:  # not within a backward
        forget_raised_passes(module)


def _placed(parameter: Tensor) -> object:
    """How it is spread over ranks: a gathered parameter is on fewer dimensions of the mesh, or on none."""
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


# ---------------------------------------------------------------- kept until the step is committed


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
        self._shards = shards = Shards(model)
        parameters = self.trained()
        self._buckets = [_Bucket.of(each) for each in _planned(parameters)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next, self._began = 0, False
        self._late: list[_Bucket] = []
        key = new_part(reducer, "sharded")
        reducer.register_schema(key, describe_shards(model))
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]
        reducer.register_compared(key, shards)
        # Without buffers: those are each rank's own, and no attempt changes them.
        reducer.add_model(self)
        reducer.copies_gradients(self)

    def trained(self) -> list[Tensor]:
        """The parameters, in the model's order, as they are between steps. Any thread but in backward."""
        return [p for p in self.parameters() if p.requires_grad]

    def parameters(self) -> list[Tensor]:
        """Those, and the frozen ones. As `trained`."""
        return self._shards()

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
