"""Parameters that callbacks unfreeze or prune in a fit (Lightning's `BaseFinetuning`, `ModelPruning`).

torch's DDP averages the gradients of the parameters that are trainable when it wraps the model. Under
stock `ddp` one that is unfrozen later is trained by each process for itself, without a word. Here a
model with such a callback is wrapped with all parameters trainable; a backward leaves out those that
are frozen, as `find_unused_parameters` allows.

A group that heals takes over which parameters are trainable, which batch normalizations keep statistics,
and the groups of the optimizer's parameters, which the callback makes again as for a resumed fit.

Of a parameter that is pruned torch holds `weight_orig` and `weight_mask` in place of `weight`. The checkpoint
of `ModelPruning` holds the product only: neither the masks, nor the values under them. A group that heals gets
both, and prunes its model likewise before it loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

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


def _pruned(state: dict[str, Any]) -> list[str]:
    """The names that parameters had before they were pruned; `state` has those of the module's tensors."""
    names = [key.removesuffix("_mask") for key in state if key.endswith("_mask")]
    return [name for name in names if f"{name}_orig" in state and name not in state]


def as_pruned(saved: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The state dict `saved` of a checkpoint, with what `module` holds for pruned parameters."""
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
    live = {name: tensor.detach() for name, tensor in named}
    names = _pruned(live)
    if not names:
        return saved
    held = {f"{name}{part}": live[f"{name}{part}"] for name in names for part in ("_orig", "_mask")}
    return {key: value for key, value in saved.items() if key not in names} | held


def adopt_pruned(module: nn.Module, state: dict[str, Any]) -> None:
    """Prune what is pruned in `state` and not yet in `module`; call it before `state` is loaded."""
    for name in _pruned(state):
        path, _, parameter = name.rpartition(".")
        owner = module.get_submodule(path)
        own = dict(owner.named_parameters(recurse=False)).get(parameter)
        if own is not None:
            prune.custom_from_mask(owner, parameter, state[f"{name}_mask"].to(own.device))


def reset_by_pruning(trainer: Any) -> list[bool]:
    """Of each parameter that `ModelPruning` may reset to its first value (`use_lottery_ticket_hypothesis`,
    its default): whether it has done so. From then on the first value is the parameter itself, in Lightning
    2.6: another reset changes nothing."""
    return [
        isinstance(live, torch.Tensor) and live.data_ptr() == first.data_ptr()
        for live, first in _first_values(trainer)
    ]


def adopt_reset(trainer: Any, known: list[bool]) -> None:
    """Let the next pruning reset what it resets in a peer, of which `known` tells; the model is pruned already."""
    for (live, first), is_reset in zip(_first_values(trainer), known, strict=True):
        if is_reset:
            first.data = live.data


def _first_values(trainer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    for callback in trainer.callbacks:
        layers: Any = getattr(callback, "_original_layers", None)
        pruned: Any = getattr(callback, "_parameters_to_prune", None)
        for layer in (layers or {}).values():
            for place, name in layer["names"]:
                module = pruned[place][0]
                yield getattr(module, f"{name}_orig", None), getattr(layer["data"], name)


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
