"""A model as `Accelerator.prepare` returns it: averages its gradients, and can be fast-forwarded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.autograd import Variable

from ft_accelerate.runtime.script_position import Phase, ScriptPosition
from ft_core.collectives.retry import RetryableReducer
from ft_core.ddp import RetryableDistributedDataParallel, never_compile


class FaultTolerantModel(RetryableDistributedDataParallel):
    """`ft_core`'s model with kept gradients whose forward can be answered from memory.

    While the script's `position` fast-forwards, the first call with inputs of some shapes computes.
    Later ones return copies of that output, whose backward ends at the output and counts in
    `position`. Neither this nor a forward that is replayed leaves a trace in running statistics: those
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
        self._position = position
        self._remembered: dict[Any, Any] = {}
        self._skip_queued = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._position.phase is Phase.FAST_FORWARD:
            return self._remembered_forward(inputs, kwargs)
        self._remembered.clear()
        if self._position.phase is not Phase.REPLAY:
            return super().forward(*inputs, **kwargs)
        with _without_trace(self.module):
            return super().forward(*inputs, **kwargs)

    def _remembered_forward(self, inputs: Any, kwargs: Any) -> Any:
        key = (self.training, _shapes((inputs, kwargs)))
        if key not in self._remembered:
            with torch.no_grad(), _without_trace(self.module):
                self._remembered[key] = self.module(*inputs, **kwargs)
        wants_grad = self.training and torch.is_grad_enabled()
        counts = wants_grad and self.require_backward_grad_sync

        def copy(tensor: Tensor) -> Tensor:
            fresh = tensor.detach().clone()
            if wants_grad and fresh.is_floating_point():
                fresh.requires_grad_()
                if counts:
                    fresh.register_hook(self._skipped_gradient)
                return fresh.clone()  # no leaf: scripts scale their losses in place
            return fresh

        return recursively_apply(copy, self._remembered[key])

    def _skipped_gradient(self, gradient: Tensor) -> None:
        if not self._skip_queued:
            self._skip_queued = True
            Variable._execution_engine.queue_callback(self._skipped_backward_over)

    def _skipped_backward_over(self) -> None:
        self._skip_queued = False
        self._position.replay_grad()


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
