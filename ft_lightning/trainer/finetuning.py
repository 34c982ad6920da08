"""Parameters that are frozen when a fit begins, and trained later in it (Lightning's `BaseFinetuning`).

torch's DDP averages the gradients of the parameters that are trainable when it wraps the model. Under
stock `ddp` one that is unfrozen later is trained by each process for itself, without a word. Here a
model with such a callback is wrapped with all parameters trainable; a backward leaves out those that
are frozen, as `find_unused_parameters` allows.

A group that heals takes over which parameters are trainable, which batch normalizations keep statistics,
and the groups of the optimizer's parameters, which the callback makes again as for a resumed fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ft_core.optimizer import Strangers, refuse_once_frozen

UNFREEZE = "Unfreeze them in a BaseFinetuning callback, or before another fit"
REGISTER = (
    "Make their module an attribute of the LightningModule (nn.ModuleList, where they are several)"
)


def finetunes(trainer: Any) -> list[Any]:
    """Callbacks that freeze parameters, and unfreeze them during the fit."""
    return [
        c for c in trainer.callbacks if any(k.__name__ == "BaseFinetuning" for k in type(c).mro())
    ]


@contextmanager
def all_trainable(module: nn.Module) -> Iterator[None]:
    """Within it, parameters that are frozen are trainable, as far as they can be."""
    frozen = [p for p in module.parameters() if not p.requires_grad]
    frozen = [p for p in frozen if p.is_floating_point() or p.is_complex()]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


def trained(trainer: Any) -> dict[str, list[str]]:
    """What the callbacks have changed in the model by now, for a group that heals; {}: there is none."""
    if not finetunes(trainer):
        return {}
    module = trainer.lightning_module
    return {
        "parameters": [name for name, p in module.named_parameters() if p.requires_grad],
        "statistics": [name for name, each in _normalizations(module) if each.track_running_stats],
    }


def adopt(trainer: Any, known: dict[str, list[str]]) -> None:
    """Make the model as a peer's is, of which `known` tells, and the optimizer's parameter groups. Call it
    between the callbacks' states and the optimizers'."""
    if not known:
        return
    module = trainer.lightning_module
    parameters, statistics = set(known["parameters"]), set(known["statistics"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name in parameters
    for name, each in _normalizations(module):
        each.track_running_stats = name in statistics
    for callback in finetunes(trainer):
        callback.on_fit_start(trainer, module)


def refuse_unaveraged(module: Any, averaged: set[int], optimizers: Iterable[Any]) -> None:
    """Raise ValueError for parameters that are trainable, and not among those that are `averaged` (ids): of
    `module`, and of an `optimizers` that holds others."""
    names = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in averaged]
    refuse_once_frozen(names, "when the fit began", UNFREEZE)
    strangers = Strangers(module.parameters, REGISTER)
    for optimizer in optimizers:
        strangers.refuse_these([p for p in strangers.of(optimizer) if p.requires_grad])


def _normalizations(module: nn.Module) -> Iterator[tuple[str, Any]]:
    kind = torch.nn.modules.batchnorm._BatchNorm
    return ((name, each) for name, each in module.named_modules() if isinstance(each, kind))
