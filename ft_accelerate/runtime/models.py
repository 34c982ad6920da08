"""A model as `Accelerator.prepare` returns it: averages its gradients, and can be fast-forwarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.autograd import Variable

from ft_accelerate.runtime.script_position import Phase, ScriptPosition
from ft_core.collectives.retry import RetryableReducer
from ft_core.ddp import RetryableDistributedDataParallel, never_compile

UNUSED_HINT = (
    "pass kwargs_handlers="
    "[DistributedDataParallelKwargs(find_unused_parameters=True)] to Accelerator"
)
COPIED_BYTES = 4096
"""Remembered outputs of up to this size are copied for each use."""


class FaultTolerantModel(RetryableDistributedDataParallel):
    """`ft_core`'s model with kept gradients whose forward can be answered from memory.

    While the script's `position` remembers, the first call with inputs of some shapes computes. Later
    ones return that output again, whose backward ends at the output and counts in `position`. Neither this nor a forward that is replayed leaves a trace in running statistics: those
    came with the peers' state.
    """

    def __init__(
        self,
        reducer: RetryableReducer,
        module: nn.Module,
        position: ScriptPosition,
        **kwargs: Any,
    ) -> None:
        super().__init__(reducer, module, **kwargs)
        never_compile(__package__)
        self._memory = Memory(position)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        reduces = super().forward

        def compute(answers: bool) -> Any:
            # The gradients of the script's past are of no use.
            return (self.module if answers else reduces)(*inputs, **kwargs)

        return self._memory.forward(
            self.module, compute, inputs, kwargs, counts=self.require_backward_grad_sync
        )


class Memory:
    """Outputs of a model in the script's past.

    Args:
        position: of the script.
        all_agree: whether all processes that compute a forward together say so.
    """

    def __init__(
        self, position: ScriptPosition, all_agree: Callable[[bool], bool] = lambda mine: mine
    ) -> None:
        self._position, self._all_agree = position, all_agree
        self._remembered: dict[Any, Any] = {}
        self._skip_queued = False
        self._leaf = torch.zeros((), requires_grad=True)
        """A graph of remembered outputs ends here."""

    def forward(
        self,
        module: nn.Module,
        compute: Callable[[bool], Any],
        inputs: Any,
        kwargs: Any,
        *,
        counts: bool,
    ) -> Any:
        """What `compute(answers)` returns, or has returned. `answers`: for the script's past, in which its
        output stands for others. `counts`: a backward is one that synchronizes."""
        if self._position.remembers:
            return self._remembered_forward(module, compute, inputs, kwargs, counts)
        self._remembered.clear()
        if self._position.phase is not Phase.REPLAY:
            return compute(False)
        with _without_trace(module):
            return compute(False)

    def _remembered_forward(
        self, module: nn.Module, compute: Callable[[bool], Any], inputs: Any, kwargs: Any, counts: bool
    ) -> Any:
        key = (module.training, _shapes((inputs, kwargs)))
        if not self._all_agree(key in self._remembered):
            with torch.no_grad(), _without_trace(module):
                self._remembered[key] = compute(True)
        wants_grad = module.training and torch.is_grad_enabled()
        counts = wants_grad and counts

        def answer(tensor: Tensor) -> Tensor:
            if wants_grad and tensor.is_floating_point():
                return _Answer.apply(self._leaf, tensor, self._skipped_gradient if counts else None)
            return _again(tensor)

        return recursively_apply(answer, self._remembered[key])

    def _skipped_gradient(self) -> None:
        if not self._skip_queued:
            self._skip_queued = True
            Variable._execution_engine.queue_callback(self._skipped_backward_over)

    def _skipped_backward_over(self) -> None:
        self._skip_queued = False
        self._position.replay_grad()


class _Answer(torch.autograd.Function):
    """A remembered output with a graph. `counted` is called when a backward reaches it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor, counted: Callable[[], None] | None) -> Tensor:
        ctx.counted = counted
        ctx.set_materialize_grads(False)
        return _again(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if ctx.counted is not None:
            ctx.counted()
        return None, None, None


def _again(tensor: Tensor) -> Tensor:
    """`tensor` for another use. A large one is not copied: what a script writes to it is of no
    importance, since it stands for outputs of the past."""
    if tensor.nbytes <= COPIED_BYTES:
        return tensor.detach().clone()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    at, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
    return fresh.set_(tensor.untyped_storage(), at, shape, strides)  # no view: it may be written to


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were before; a graph made inside may still run backward."""
    buffers = list(module.buffers())
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return tuple((str(k), _shapes(v)) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(_shapes(v) for v in tree)
    return repr(tree) if isinstance(tree, (int, float, str, bool, type(None))) else None
