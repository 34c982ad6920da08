"""LocalSGD and DiLoCo: replica groups train by themselves and meet every so many steps.

A meeting is an operation over the quorum: voted on, and tried again with whoever is left, so that
no group's work since the last meeting is lost. Newcomers enter right after a meeting, with its
result. Between two meetings groups differ; a group that dies loses its steps since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from accelerate.local_sgd import LocalSGD as StockLocalSGD
from torch import Tensor
from torch.distributed import ReduceOp

from ft_accelerate import processes
from ft_accelerate.exchange import Exchange, Kind
from ft_accelerate.runtime import Runtime
from ft_core.codecs import Codec, codec_named
from ft_core.diloco_schedule import Schedule
from ft_core.fragments import Fragment, FragmentSpec, split


class LocalSGD(StockLocalSGD):
    """
    [`~accelerate.local_sgd.LocalSGD`] over replica groups that may fail, leave and join.

    Args:
        accelerator (`Accelerator`):
            The accelerator that has prepared the model.
        model (`torch.nn.Module`):
            The prepared model whose parameters (and running statistics) are averaged.
        local_sgd_steps (`int`):
            How many calls of `step` lie between two averages.
        enabled (`bool`, *optional*, defaults to `True`):
            `False`: gradients are averaged in each step, as without this class.

    Example:

    ```python
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    ```
    """

    def __init__(
        self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps must be at least 1, got {local_sgd_steps}")
        super().__init__(accelerator, model, local_sgd_steps, enabled)

    def __enter__(self) -> Any:
        return enter(self, super().__enter__)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        leave(self, super().__exit__, kind, value, traceback)

    def _sync_and_avg_model_params(self) -> None:
        average(self, super()._sync_and_avg_model_params)


class DiLoCo(LocalSGD):
    """
    LocalSGD whose average is a step of an outer optimizer (arXiv 2311.08105): the mean over the
    quorum of the pseudo-gradients, which are the parameters after the last meeting minus those now.

    Args:
        accelerator (`Accelerator`), model (`torch.nn.Module`), local_sgd_steps (`int`), enabled:
            As [`LocalSGD`]'s.
        outer_optimizer (`Callable`, *optional*):
            Makes the outer optimizer of a list of parameters. Default: SGD with Nesterov momentum
            0.9 and learning rate 0.7. Its state heals.
        fragments (`int` or `list`, *optional*):
            Parts of the model with a meeting of their own, spread over the `local_sgd_steps`
            (arXiv 2501.18512): a number, or a list with a module, or parameter names, for each.
        fragment_update_alpha (`float`, *optional*, defaults to 0):
            How much of the local parameters stays at a meeting.
        codec (`str`, *optional*):
            `"int8"`, `"int4"` or `"fp8"`: what pseudo-gradients travel as.

    `ft_core.DiLoCo` has the same options, and `fragment_sync_delay`, `error_feedback` and
    `weighted`, which need a loop that drives the manager itself.

    Raises RuntimeError without fault tolerance, ValueError for options that contradict each other.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        fragments: FragmentSpec = None,
        fragment_update_alpha: float = 0.0,
        codec: str | None = None,
    ) -> None:
        super().__init__(accelerator, model, local_sgd_steps, enabled)
        if not 0.0 <= fragment_update_alpha <= 1.0:
            raise ValueError(
                f"fragment_update_alpha must be from 0 to 1, got {fragment_update_alpha}"
            )
        self._fragments = split(accelerator.unwrap_model(model), fragments)
        schedule = Schedule(local_sgd_steps, len(self._fragments))
        ends = accumulate(schedule.slot_steps(f.index) for f in self._fragments)
        self._due = dict(zip(ends, self._fragments, strict=True))
        self._alpha = fragment_update_alpha
        self._codec = None if codec is None else codec_named(codec)
        self._last = {p: p.detach().clone() for f in self._fragments for p in f.parameters}
        self.outer_optimizer = (outer_optimizer or _nesterov)(list(self._last.values()))
        processes.current().gate.register_state_dict_fn("diloco", self._load, self._save)

    def step(self) -> None:
        self.num_steps += 1
        if self.enabled:
            due = self._due.get((self.num_steps - 1) % self.local_sgd_steps + 1)
            if due is not None:
                self._meet(due)

    def _sync_and_avg_model_params(self) -> None:
        for fragment in self._fragments:
            self._meet(fragment)

    @torch.no_grad()
    def _meet(self, fragment: Fragment) -> None:
        """One outer step of a fragment; statistics are averaged with the last one of a window."""
        runtime, mine = processes.current(), fragment.parameters
        drift = [self._last[p] - p for p in mine]
        rest = _statistics(self.model) if fragment is self._fragments[-1] else []
        means = _means(runtime, drift, rest, self._codec)
        if means is None or not runtime.live:
            return
        for p, mean in zip(mine, means, strict=False):
            self._last[p].grad = mean
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for p in mine:
            p.copy_(torch.lerp(self._last[p], p, self._alpha))
        for tensor, mean in zip(rest, means[len(mine) :], strict=True):
            tensor.copy_(mean)

    def _save(self) -> dict[str, Any]:
        return {
            "parameters": [p.clone() for p in self._last.values()],
            "outer": self.outer_optimizer.state_dict(),
        }

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        for mine, healed in zip(self._last.values(), state["parameters"], strict=True):
            mine.copy_(healed)
        self.outer_optimizer.load_state_dict(state["outer"])


def _nesterov(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# ---------------------------------------------------------------------- also for the stock class


def enter(local: Any, stock: Callable[[], Any]) -> Any:
    """Steps change what a peer may be reading from here on: serve copies."""
    runtime = processes.active()
    if runtime is not None and local.enabled:
        runtime.serve_copies = True
    return stock()


def leave(local: Any, stock: Callable[..., Any], kind: Any, value: Any, traceback: Any) -> None:
    """Average once more, unless the script has failed: the others are not at this place then."""
    runtime = processes.active()
    if runtime is None or not local.enabled:
        stock(kind, value, traceback)
        return
    if kind is None:
        local._sync_and_avg_model_params()
    local.model_sync_obj.__exit__(kind, value, traceback)
    runtime.serve_copies = False


def average(local: Any, stock: Callable[[], Any]) -> bool:
    """Parameters and running statistics become the mean over the quorum, in place; False where
    this process only passes by."""
    runtime = processes.active()
    if runtime is None:
        stock()
        return True
    tensors = [p for p in local.model.parameters() if p.requires_grad] + _statistics(local.model)
    means = _means(runtime, tensors)
    if means is None:
        return False
    with torch.no_grad():
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)
    return True


def _statistics(model: Any) -> list[Tensor]:
    return [b for b in model.buffers() if b.is_floating_point()]


def _means(
    runtime: Runtime,
    tensors: list[Tensor],
    exact: Sequence[Tensor] = (),
    codec: Codec | None = None,
) -> list[Tensor] | None:
    """Means of `tensors`, which travel as `codec` says, and of `exact`, which travel as they are."""
    every = [*tensors, *exact]
    parts = [p for p in (tensors, exact) if p]

    def attempt(exchange: Exchange, agree: Callable[..., Any]) -> list[Tensor] | None:
        if agree(sum(t.nbytes for t in every), [t.numel() for t in every]) is None:
            return None
        found: dict[int, Tensor] = {}
        for part in parts:
            for kind in sorted({t.dtype for t in part}, key=str):
                these = [t for t in part if t.dtype == kind]
                flat = torch.cat([t.detach().reshape(-1) for t in these])
                if codec is None or part is not tensors:
                    mean = exchange.reduce(flat, ReduceOp.AVG)
                else:
                    mean = exchange.coded_mean(flat, codec)
                values = mean.split([t.numel() for t in these])
                for tensor, value in zip(these, values, strict=True):
                    found[id(tensor)] = value.view_as(tensor)
        return [found[id(t)] for t in every]

    means: list[Tensor] | None = runtime.operation(
        Kind.PARAMETERS, attempt, lambda: None, keep=False
    )
    return means
