"""What all members of LocalSGD and DiLoCo have in common: global parameters, buffers, outer optimizer.

Between two outer steps each member's model drifts by itself; the *global* parameters are those of
the last committed outer steps. They are what (step, lineage) stands for: what a healing peer gets,
what a checkpoint holds, and what a member returns to when a window is discarded. The drifted local
parameters and the inner optimizer's state belong to one member and never travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ft_core.diloco.fragments import Fragment, local_values, persistent_buffers

if TYPE_CHECKING:
    from ft_core.manager import Manager


class OuterOptimizer(Protocol):
    """What is needed of the outer optimizer: one of torch's, or `SeveralOptimizers`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters with their options, as torch's optimizers have them."""

    def step(self) -> Any:
        """Update the parameters from their gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Its options and moments, by the position of each parameter."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over what `state_dict` returned. Raises ValueError where the groups differ in
        size."""


class SeveralOptimizers:
    """Several optimizers, each with a part of the parameters, as one. Thread: the training loop's."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers, in order."""
        return [group for each in self._optimizers for group in each.param_groups]

    def step(self) -> None:
        """Step those that have a parameter with a gradient."""
        for each in self._optimizers:
            if any(p.grad is not None for group in each.param_groups for p in group["params"]):
                each.step()

    def state_dict(self) -> dict[str, Any]:
        """Each one's state, in order."""
        return {"optimizers": [each.state_dict() for each in self._optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load what `state_dict` returned. Raises ValueError for another number of optimizers."""
        for each, its in zip(self._optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(its)


class GlobalState:
    """Copies of a model's parameters and buffers, on `backup_device` (CPU by default).

    `pin_memory`: page-locked host memory, where there is a CUDA device to copy from. Starts with
    the model's present values. Thread: the training loop's; `state_dict` any.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        outer_optimizer: OuterOptimizer | None,
        *,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
    ) -> None:
        self._fragments = fragments
        self._outer = outer_optimizer
        self._model = model
        device = torch.device("cpu") if backup_device is None else torch.device(backup_device)
        pin = pin_memory and device.type == "cpu" and torch.cuda.is_available()

        def copy(tensor: Tensor) -> Tensor:
            source = local_values(tensor)
            # Contiguous always: it is laid out like that on its way.
            made = torch.empty(source.shape, dtype=source.dtype, device=device, pin_memory=pin)
            made.copy_(source)
            return made

        self._parameters = {
            name: copy(p) for f in fragments for name, p in zip(f.names, f.parameters, strict=True)
        }
        self._buffer_copies = {name: copy(b) for name, b in persistent_buffers(model).items()}

    def of(self, fragment: Fragment) -> list[Tensor]:
        """The global parameters of a fragment, in order: local parts, not to be changed."""
        return [self._parameters[name] for name in fragment.names]

    @torch.no_grad()
    def snapshot(self) -> None:
        """The model's present values are the global ones."""
        for fragment in self._fragments:
            self.take(fragment)
        self.take_buffers()

    @torch.no_grad()
    def take(self, fragment: Fragment) -> None:
        """The model's present values of a fragment are the global ones."""
        for name, p in zip(fragment.names, fragment.parameters, strict=True):
            self._parameters[name].copy_(local_values(p))

    @torch.no_grad()
    def restore(self, fragment: Fragment) -> None:
        """Put the global values of a fragment into the model."""
        for name, p in zip(fragment.names, fragment.parameters, strict=True):
            _put(local_values(p), self._parameters[name])

    @torch.no_grad()
    def restore_all(self) -> None:
        """Put all global values, buffers too, into the model."""
        for fragment in self._fragments:
            self.restore(fragment)
        self.restore_buffers()

    @torch.no_grad()
    def deltas(self, fragment: Fragment) -> list[Tensor]:
        """Global minus local: the pseudo-gradients of a fragment, on the model's devices."""
        found = []
        for name, p in zip(fragment.names, fragment.parameters, strict=True):
            local = local_values(p)
            found.append(self._parameters[name].to(local.device, non_blocking=True) - local)
        return found

    @torch.no_grad()
    def rebase(self, fragment: Fragment, deltas: Sequence[Tensor]) -> None:
        """Let the model be where `deltas` lead from the global values: global minus delta."""
        for name, p, delta in zip(fragment.names, fragment.parameters, deltas, strict=True):
            local = local_values(p)
            local.copy_(self._parameters[name].to(local.device) - delta)

    # ------------------------------------------------------------------ buffers

    @torch.no_grad()
    def take_buffers(self) -> None:
        """The model's present buffers are the global ones."""
        for name, buffer in persistent_buffers(self._model).items():
            self._buffer_copies[name].copy_(buffer)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the global buffers into the model."""
        for name, buffer in persistent_buffers(self._model).items():
            if name in self._buffer_copies:  # else it is new, and the next outer step is refused
                _put(buffer, self._buffer_copies[name])

    # ------------------------------------------------------------------ heal and checkpoint

    def state_dict(self, *, copy: bool = False) -> dict[str, Any]:
        """{"parameters", "buffers", "outer_optimizer"}; the tensors themselves unless `copy`."""
        parameters, buffers = dict(self._parameters), dict(self._buffer_copies)
        if copy:
            parameters = {name: t.clone() for name, t in parameters.items()}
            buffers = {name: t.clone() for name, t in buffers.items()}
        outer = None if self._outer is None else self._outer.state_dict()
        return {"parameters": parameters, "buffers": buffers, "outer_optimizer": outer}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if it is another model's. Does not touch the model itself."""
        self._copy_in(self._parameters, state["parameters"], "parameter")
        self._copy_in(self._buffer_copies, state["buffers"], "buffer")
        if self._outer is not None:
            self._outer.load_state_dict(state["outer_optimizer"])

    def overtake(self, state: dict[str, Any], kept: Sequence[Fragment]) -> None:
        """Load a newer global state under a drifting model.

        Fragments in `kept` keep their drift (global minus local) on the new global values; all
        others, and the buffers, are at the new global values after this.
        """
        drifts = {fragment.index: self.deltas(fragment) for fragment in kept}
        self.load_state_dict(state)
        self.restore_buffers()
        for fragment in self._fragments:
            if fragment.index in drifts:
                self.rebase(fragment, drifts[fragment.index])
            else:
                self.restore(fragment)

    @staticmethod
    def _copy_in(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], kind: str) -> None:
        different = set(mine).symmetric_difference(theirs)
        different |= {n for n in mine if n in theirs and mine[n].shape != theirs[n].shape}
        if different:
            raise ValueError(
                f"the state is another model's: {kind} {min(different)!r} differs; build the same "
                "model, with the same parameters frozen"
            )
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])


def _put(present: Tensor, value: Tensor) -> None:
    # Of another shape it is refused, and an error is not to hide that.
    if present.shape == value.shape:
        present.copy_(value)


def refuse_drifting(manager: Manager, key: str, model: nn.Module, inner: Optimizer) -> None:
    """What the manager serves must be equal in all members; the model and its optimizer drift.

    Raises ValueError if a part of the manager's state other than `key` holds tensors of these.
    """
    own = drifting(model, inner)
    for other, save in manager.state.parts():
        if other != key and not own.isdisjoint(_storages(save())):
            raise ValueError(
                f"the manager's state {other!r} holds tensors of the model or its optimizer, "
                "which differ among members between outer steps: leave them out, the global "
                "parameters are served without them"
            )


def drifting(model: nn.Module, inner: Optimizer) -> set[int]:
    """The memory (as data pointers) of what differs among members between two outer steps: the model
    and the state of its optimizer."""
    # An optimizer made of several has its state in its state dict only.
    own = {_storage(p) for p in model.parameters()} | _storages(
        [dict(inner.state), inner.state_dict()]
    )
    own.discard(0)
    return own


def without(state: Any, memory: Set[int]) -> Any:
    """`state` without the entries that hold a tensor in `memory`, if it is a dict."""
    if not isinstance(state, dict):
        return state
    return {key: each for key, each in state.items() if memory.isdisjoint(_storages(each))}


def _storages(tree: Any) -> set[int]:
    return {_storage(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _storage(tensor: Tensor) -> int:
    return local_values(tensor).untyped_storage().data_ptr()


def drop_bad_state(optimizer: Optimizer) -> None:
    """Forget the inner optimizer's state of parameters for which it is not finite.

    Else they would stay in its moments in every window to come. What is finite is kept: running
    estimates, taken near the parameters that the model returns to.
    """
    for parameter, state in list(optimizer.state.items()):
        tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor)]
        if not all(bool(torch.isfinite(local_values(t)).all()) for t in tensors):
            del optimizer.state[parameter]
