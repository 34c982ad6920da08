"""LocalSGD and DiLoCo as a strategy of Trainer or Fabric sees them: arguments, inner steps, state.

The algorithms of ft_core hook the inner optimizer's `step`. In Lightning forward and backward run
*inside* that call, and with an overflow of fp16 it does not happen at all, so that members would
count differently. So `InnerSteps` takes the optimizer's place: its hooks run at the end of each
batch that stepped an optimizer.

What is equal in all members, and what is not:

| part | |
|---|---|
| global parameters, persistent buffers, outer optimizer | equal; ft_core's algorithm heals and saves them |
| place in the data, schedulers, learning rates, loss scale | equal: members count alike |
| frozen parameters, other entries of the module's state dict | equal |
| callbacks' states | those of one member: equal if they follow from validations |
| local parameters, moments of the inner optimizer | each member's own: never leave it |
"""

from __future__ import annotations

import inspect
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ft_core.diloco.diloco import DiLoCo, LocalSGD, nesterov
from ft_core.manager import Manager
from ft_lightning.shared.step_collectives import packed_tensor, unpacked_tensor

if TYPE_CHECKING:

    class _Base:
        def __init__(self, **kwargs: Any) -> None: ...

else:
    _Base = object

Codec = Literal["int8", "int4", "fp8"]


class LocalSGDArguments(_Base):
    """Strategy for LocalSGD: replica groups train on their own and average their parameters.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    lose nothing, and what dies with it is its own work since the last average.

    Args:
        sync_every: optimizer steps between two averages.
        weighted: weigh each group's parameters by the optimizer steps that it took.
        keep_windows: if an average fails because of another group, this one's work is kept and
            goes into the next one. False: it is dropped, and the group returns to the last average.
        bucket_bytes: how many bytes travel in one piece.
        **kwargs: options of :class:`FTDDPStrategy`, such as ``min_replicas``.
    """

    strategy_name = "ft_local_sgd"
    _manager: Manager | None

    def __init__(
        self,
        sync_every: int = 10,
        weighted: bool = False,
        keep_windows: bool = True,
        bucket_bytes: int = 32 << 20,
        **kwargs: Any,
    ) -> None:
        said = locals()
        super().__init__(**kwargs)
        _positive("sync_every", sync_every)
        self._algorithm_options = _taken_by(LocalSGD, said)

    def _make_algorithm(self, module: torch.nn.Module, steps: Optimizer) -> Any:
        assert self._manager is not None
        return LocalSGD(self._manager, module, steps, **self._algorithm_options)


class DiLoCoArguments(_Base):
    """Strategy for DiLoCo and Streaming DiLoCo: replica groups train on their own, and an outer
    optimizer steps on how far they have drifted on average.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    lose nothing, and what dies with it is its own work since the last outer step.

    Args:
        sync_every: optimizer steps in a window, in which each fragment has one outer step (H).
        outer_lr: learning rate of the outer optimizer, SGD with Nesterov momentum.
        outer_momentum: its momentum.
        outer_optimizer: makes another outer optimizer from the parameters, instead of the two
            above.
        fragments: in how many parts of about equal size the model is synchronized; or a list of
            parameter names for each.
        fragment_sync_delay: optimizer steps between sending a fragment and applying it, behind
            which communication hides (tau).
        fragment_update_alpha: how much of its own parameters a group keeps when a fragment is
            applied, 0 to 1.
        codec: what travels: "int8", "int4" or "fp8"; None: as it is.
        error_feedback: send what the codec has lost the next time.
        weighted: weigh each group's drift by the optimizer steps that it took.
        backup_device: where the global parameters are kept, such as "cuda"; None: in CPU memory.
        pin_memory: page-locked, if that is CPU memory and there is a CUDA device.
        keep_windows: if an outer step fails because of another group, this one's work is kept and
            goes into the next one. False: it is dropped, and the group returns to the global
            parameters.
        bucket_bytes: how many bytes travel in one piece.
        **kwargs: options of :class:`FTDDPStrategy`, such as ``min_replicas``.
    """

    strategy_name = "ft_diloco"
    _manager: Manager | None

    def __init__(
        self,
        sync_every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        fragments: int | list[list[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        codec: Codec | None = None,
        error_feedback: bool = False,
        weighted: bool = False,
        backup_device: str | None = None,
        pin_memory: bool = True,
        keep_windows: bool = True,
        bucket_bytes: int = 32 << 20,
        **kwargs: Any,
    ) -> None:
        said = locals()
        super().__init__(**kwargs)
        _positive("sync_every", sync_every)
        if backup_device is not None:
            torch.device(backup_device)  # raises RuntimeError if there is no such kind
        default = nesterov(outer_lr, outer_momentum)  # checks both
        self._make_outer = outer_optimizer or default
        self._algorithm_options = _taken_by(DiLoCo, said)

    def _make_algorithm(self, module: torch.nn.Module, steps: Optimizer) -> Any:
        assert self._manager is not None
        outer = self._make_outer([p for p in module.parameters() if p.requires_grad])
        return DiLoCo(self._manager, module, steps, outer, **self._algorithm_options)


def _taken_by(algorithm: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments `said` that `algorithm` takes under the same name."""
    names = inspect.signature(algorithm).parameters
    return {name: said[name] for name in names if name in said and name != "outer_optimizer"}


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


# ---------------------------------------------------------------------- inner steps


class InnerSteps(Optimizer):
    """The inner optimizer that LocalSGD and DiLoCo see: hooks, and nothing to step."""

    # No super().__init__(): this class defines all attributes.
    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._after: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all optimizers, in order."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The states of all optimizers, by parameter."""
        states = [optimizer.state for optimizer in self._optimizers]
        return states[0] if len(states) == 1 else _Together(*states)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Empty: each optimizer has its own."""
        return {}

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Each optimizer's state by its number."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        return {str(number): state for number, state in enumerate(states)}

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self._after)
        self._after[handle.id] = hook
        return handle

    def step(self, closure: Any = None) -> NoReturn:  # type: ignore[override]
        """Raises RuntimeError."""
        raise RuntimeError("the Trainer steps its own optimizers; this one is for hooks only")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def done(self) -> None:
        """An inner step has ended."""
        for hook in list(self._after.values()):
            hook(self, (), {})

    def __repr__(self) -> str:
        return f"InnerSteps({self._optimizers!r})"


class _Together(ChainMap[Any, Any]):
    """The states of several optimizers. A key is read and deleted in the state that has it: the others, as
    defaultdicts, would make an entry for it, which their optimizers could not save."""

    def __getitem__(self, key: Any) -> Any:
        for state in self.maps:
            if key in state:
                return state[key]
        raise KeyError(key)

    def __delitem__(self, key: Any) -> None:
        for state in self.maps:
            state.pop(key, None)


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
    """Put the global values into the module; returns its own values, for `put_back`."""
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
    """Remove from a checkpoint what the algorithm heals itself, and what is a member's own."""
    brought = global_values(trainer.lightning_module, algorithm)
    state_dict = checkpoint["state_dict"]
    checkpoint["state_dict"] = {k: v for k, v in state_dict.items() if k not in brought}
    checkpoint["optimizer_states"] = [
        {"state": {}, "param_groups": state["param_groups"]}
        for state in checkpoint["optimizer_states"]
    ]


def keep_own_moments(checkpoint: dict[str, Any], trainer: Any) -> None:
    """Put the moments of this member's inner optimizer into a peer's checkpoint."""
    states = zip(checkpoint["optimizer_states"], trainer.optimizers, strict=True)
    for state, optimizer in states:
        state["state"] = optimizer.state_dict()["state"]


def pack(tree: Any) -> Any:
    """Tensors as plain values, so that all of them come from one source.

    A heal takes a tensor's bytes from all sources at once. Those are equal only for what members
    share, and callbacks may hold other tensors.
    """

    def plain(leaf: Any) -> Any:
        return {_TENSOR: packed_tensor(leaf)} if isinstance(leaf, Tensor) else leaf

    return tree_map(plain, tree)


def unpack(tree: Any) -> Any:
    """The reverse of `pack`."""
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return unpacked_tensor(tree[_TENSOR])
        return {key: unpack(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(unpack(value) for value in tree)
    return tree
