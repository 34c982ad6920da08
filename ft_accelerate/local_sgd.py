"""LocalSGD and DiLoCo: replica groups train by themselves and meet every so many steps.

A meeting is an operation over the quorum: voted on, and tried again with whoever is left, so that
no group's work since the last meeting is lost. Newcomers enter right after a meeting, with its
result. Between two meetings groups differ; a group that dies loses its steps since the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.local_sgd import LocalSGD as StockLocalSGD
from torch import Tensor
from torch.distributed import ReduceOp

from ft_accelerate import processes
from ft_accelerate.exchange import Exchange, Kind
from ft_accelerate.runtime import Runtime


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
    LocalSGD whose average is a step of an outer optimizer (arXiv 2311.08105): the pseudo-gradient
    is the parameters after the last meeting minus the mean of the parameters now.

    Args:
        accelerator (`Accelerator`), model (`torch.nn.Module`), local_sgd_steps (`int`), enabled:
            As [`LocalSGD`]'s.
        outer_optimizer (`Callable`, *optional*):
            Makes the outer optimizer of a list of parameters. Default: SGD with Nesterov momentum
            0.9 and learning rate 0.7. Its state heals.

    Raises RuntimeError without fault tolerance.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__(accelerator, model, local_sgd_steps, enabled)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._last = [p.detach().clone() for p in self._trained]
        make = outer_optimizer or _nesterov
        self.outer_optimizer = make(self._last)
        processes.current().gate.register_state_dict_fn("diloco", self._load, self._save)

    def _sync_and_avg_model_params(self) -> None:
        runtime = processes.current()
        if not average(self, lambda: None) or not runtime.live:
            return
        with torch.no_grad():
            for last, now in zip(self._last, self._trained, strict=True):
                last.grad = last - now
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
            for last, now in zip(self._last, self._trained, strict=True):
                now.copy_(last)

    def _save(self) -> dict[str, Any]:
        return {
            "parameters": [p.clone() for p in self._last],
            "outer": self.outer_optimizer.state_dict(),
        }

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        for mine, healed in zip(self._last, state["parameters"], strict=True):
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
    tensors = _averaged(local.model)
    means = _means(runtime, tensors)
    if means is None:
        return False
    with torch.no_grad():
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)
    return True


def _averaged(model: Any) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return trained + [b for b in model.buffers() if b.is_floating_point()]


def _means(runtime: Runtime, tensors: list[Tensor]) -> list[Tensor] | None:
    kinds = sorted({t.dtype for t in tensors}, key=str)

    def attempt(exchange: Exchange, agree: Callable[..., Any]) -> list[Tensor] | None:
        if agree(sum(t.nbytes for t in tensors), [t.numel() for t in tensors]) is None:
            return None
        found: dict[int, Tensor] = {}
        for kind in kinds:
            these = [t for t in tensors if t.dtype == kind]
            flat = torch.cat([t.detach().reshape(-1) for t in these])
            mean = exchange.reduce(flat, ReduceOp.AVG)
            for tensor, part in zip(these, mean.split([t.numel() for t in these]), strict=True):
                found[id(tensor)] = part.view_as(tensor)
        return [found[id(t)] for t in tensors]

    means: list[Tensor] | None = runtime.operation(
        Kind.PARAMETERS, attempt, lambda: None, keep=False
    )
    return means
