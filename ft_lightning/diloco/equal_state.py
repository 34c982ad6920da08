"""Of a Trainer's state, what is equal in all members of LocalSGD and DiLoCo, and what is not.

| part | |
|---|---|
| global parameters, persistent buffers, outer optimizer | equal; ft_core's algorithm heals and saves them |
| place in the data, schedulers, learning rates, loss scale | equal: members count alike |
| frozen parameters, other entries of the module's state dict | equal |
| callbacks' states | those of one member: equal if they follow from validations |
| local parameters, moments of the inner optimizer | each member's own: never leave it |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_TENSOR = "ft_lightning.tensor"


# ---------------------------------------------------------------- global parameters


def global_values(module: nn.Module, algorithm: Any) -> dict[str, Tensor]:
    """Copies of the global parameters and buffers, by all names that the module has for them."""
    known = algorithm.state_dict()
    values: dict[str, Tensor] = {**known["parameters"], **known["buffers"]}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        values_name = first.setdefault(id(parameter), name)
        if values_name in values:
            values[name] = values[values_name]
    return values


@torch.no_grad()
def show_global(module: nn.Module, algorithm: Any) -> dict[str, Tensor]:
    """Put the global values into the module; returns what was there, for `put_back`."""
    values = global_values(module, algorithm)
    own = {name: tensor for name, tensor in _tensors(module).items() if name in values}
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    for name, tensor in own.items():
        tensor.copy_(values[name])
    return before


@torch.no_grad()
def put_back(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Undo `show_global`."""
    tensors = _tensors(module)
    for name, value in before.items():
        tensors[name].copy_(value)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---------------------------------------------------------------- what travels


def keep_what_members_share(checkpoint: dict[str, Any], trainer: Any, algorithm: Any) -> None:
    """Take out of a checkpoint what the algorithm brings itself, and what is a member's own."""
    brought = global_values(trainer.lightning_module, algorithm)
    state_dict = checkpoint["state_dict"]
    checkpoint["state_dict"] = {k: v for k, v in state_dict.items() if k not in brought}
    checkpoint["optimizer_states"] = [
        {"state": {}, "param_groups": state["param_groups"]}
        for state in checkpoint["optimizer_states"]
    ]


def keep_own_moments(checkpoint: dict[str, Any], trainer: Any) -> None:
    """A peer's learning rates, but the own inner optimizer's moments."""
    states = zip(checkpoint["optimizer_states"], trainer.optimizers, strict=True)
    for state, optimizer in states:
        state["state"] = optimizer.state_dict()["state"]


def pack(tree: Any) -> Any:
    """Tensors as plain values, so that all of them come from one source.

    A heal takes a tensor's bytes from all sources at once, which hold the same ones only of what
    members share. Callbacks may hold others.
    """

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        data = leaf.detach().cpu().contiguous()
        raw = data.view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return {_TENSOR: [str(data.dtype).removeprefix("torch."), list(data.shape), raw]}

    return tree_map(plain, tree)


def unpack(tree: Any) -> Any:
    """The reverse of `pack`."""
    if isinstance(tree, dict):
        if _TENSOR in tree:
            dtype, shape, raw = tree[_TENSOR]
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            if raw:
                empty.view(-1).view(torch.uint8).copy_(
                    torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                )
            return empty
        return {key: unpack(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(unpack(value) for value in tree)
    return tree
