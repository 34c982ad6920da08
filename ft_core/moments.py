"""Memory for an optimizer's state that is not there yet: what a restarted process heals into.

A fresh process has no moments. If it got memory for them while its peers' state arrives, the peers
would wait for the kernel to find that memory: measured, 0.4 s a GiB, and up to 3 s on a virtual
machine whose host must find it, too, against 0.2 s for the transfer. So it is made, and touched,
before the process joins.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

log = logging.getLogger("ft_core")

WORTH_BYTES = 64 * 1024 * 1024
"""Less is found in no time."""


class PreallocatedState:
    """What `optimizer.state` will look like after its first step, on the CPU. Training thread."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._spare: dict[Tensor, dict[str, Any]] = {}

    def prepare(self) -> None:
        """Make room, unless the optimizer has a state or is of a kind that cannot be foreseen."""
        if self._optimizer.state or self._spare:
            return
        try:
            shapes = _foresee(self._optimizer)
        except Exception as error:  # an optimizer of its own kind: it will heal into new memory
            log.debug("no memory is prepared for %s: %s", type(self._optimizer).__name__, error)
            return
        large = [t for s in shapes.values() for t in s.values() if _is_meta(t)]
        if sum(tensor.nbytes for tensor in large) >= WORTH_BYTES:
            self._spare = {
                parameter: {key: _made(value) for key, value in values.items()}
                for parameter, values in shapes.items()
            }

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While this lasts, the optimizer's state dict has the prepared tensors."""
        state = self._optimizer.state
        if state or not self._spare:
            yield
            return
        state.update(self._spare)
        try:
            yield
        finally:
            state.clear()

    def drop(self) -> None:
        """Whoever heals into it has it by now, or nobody will."""
        self._spare = {}


def _foresee(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state that a step would make: one is made, of tensors without memory ("meta").

    Of torch's own optimizers only: what else another one's step does is not known (collectives).
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise ValueError("not one of torch.optim")
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups, twins = [], {}
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = {}
    plain = {"foreach": False, "fused": False, "capturable": False}
    for group in optimizer.param_groups:
        mine = group | {key: value for key, value in plain.items() if key in group}
        mine["params"] = []
        for parameter in group["params"]:
            if type(parameter) not in (Tensor, nn.Parameter) or parameter.device.type != "cpu":
                raise ValueError(f"a {type(parameter).__name__} on {parameter.device}")
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            meta.grad = torch.empty_like(meta) if parameter.requires_grad else None
            twins[meta] = parameter
            mine["params"].append(meta)
        twin.param_groups.append(mine)
    type(optimizer).step(twin)
    return {twins[meta]: values for meta, values in twin.state.items()}


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _made(value: Any) -> Any:
    if not _is_meta(value):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return made.zero_()  # not torch.zeros, whose memory is there when it is touched
