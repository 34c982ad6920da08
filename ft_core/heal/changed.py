"""Parameters that a script changes itself within a step: a momentum encoder, prototypes that it normalizes.

A peer that heals in the middle of a step takes the state with which the step began, and computes the step's batches, too.
With the parameters as they are by then it would change them a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ft_core.heal.shardings import local_part

KEPT_BYTES = 256 << 20
"""Of parameters that are copied before it is known which of them are changed."""


class ChangedInStep:
    """The parameters that are changed before a step's gradients are there, as they were when the step began.

    Which these are is seen in each step, by the versions of their tensors. What is written through `parameter.data` has
    none, so in the 1st, 2nd, 4th, 8th ... step all are kept, if they are small, and compared. The loop's thread.

    Args:
        frozen_only: watch parameters that need no gradient, and no others.
    """

    def __init__(self, *, frozen_only: bool = False) -> None:
        self._frozen_only = frozen_only
        self._known: dict[str, weakref.ref[nn.Module]] = {}
        self._of_known: MutableMapping[str, Tensor] = {}
        self.begun = False
        """Whether a step has begun, with no other state in its place since. Read only."""
        self._names: set[str] | None = None
        self._kept: dict[str, Tensor] = {}
        self._began: dict[str, tuple[int, int]] = {}
        self._noted: dict[str, tuple[int, int]] = {}
        # Of the kept ones, as they were then: an optimizer may write to `data`, too.
        self._updatable: dict[str, Tensor] = {}
        self._steps = 0

    def begin(self, models: Mapping[str, nn.Module], *, all_small: bool = False) -> None:
        """A step begins.

        Args:
            models: those whose parameters are watched, by the prefix of their names. A model keeps its parameters.
            all_small: keep all, if they are small: any may be changed now.
        """
        known = {prefix: weakref.ref(model) for prefix, model in models.items()}
        if known != self._known:  # to list them takes longer than to look at them
            self._known = known
            self._of_known = weakref.WeakValueDictionary(
                (f"{prefix}{name}", parameter)
                for prefix, model in models.items()
                for name, parameter in model.named_parameters()
            )
        parameters, names = self._parameters(), self._names
        self._steps += 1
        if names is None or all_small or self._steps.bit_count() == 1:
            small = sum(p.nbytes for p in parameters.values()) <= KEPT_BYTES
            names = set(parameters) if small else names or set()
        self._kept = {n: parameters[n].detach().clone() for n in names & parameters.keys()}
        self.begun = True
        self._began, self._noted, self._updatable = _versions(parameters), {}, {}

    def _parameters(self) -> dict[str, Tensor]:
        of_known = self._of_known.items()
        return {name: p for name, p in of_known if not (self._frozen_only and p.requires_grad)}

    def note(self) -> None:
        """Gradients are there: what was changed since the step began is known. What is changed from here on is by
        optimizers."""
        parameters = self._parameters()
        now = self._noted = _versions(parameters)
        changed = {name for name, began in self._began.items() if now.get(name, began) != began}
        known = changed | (self._names or set())
        for name in self._kept.keys() & parameters.keys() - known:
            if not _equal(self._kept[name], parameters[name]):
                known.add(name)
        self._names = known
        self._kept = {name: value for name, value in self._kept.items() if name in known}
        self._updatable = {
            name: parameters[name].detach().clone()
            for name in self._kept.keys() & parameters.keys()
            if parameters[name].requires_grad
        }

    def forget(self) -> None:
        """Another state takes the place of the one in which the step began."""
        self._kept, self.begun = {}, False

    def before(self, tree: Any) -> Any:
        """The same, with the values that were there when the step began, but for what an optimizer has updated since:
        wherever in `tree` the parameters are, and under whatever names."""
        parameters = self._parameters()
        now = _versions(parameters) if self._noted else {}
        kept = {
            place_of(parameters[n]): v
            for n, v in self._kept.items()
            if n in parameters
            and now.get(n) == self._noted.get(n)
            and (n not in self._updatable or _equal(self._updatable[n], parameters[n]))
        }
        return with_others(tree, lambda tensor: kept.get(place_of(tensor), tensor))

    @torch.no_grad()
    def put_back(self) -> None:
        """The step's batches are computed again, or had no effect."""
        parameters = self._parameters()
        for name, value in self._kept.items():
            if name in parameters:
                parameters[name].copy_(value)


def with_others(tree: Any, other: Callable[[Tensor], Tensor]) -> Any:
    """The same tree, with `other(tensor)` in the place of each tensor."""
    return tree_map(lambda leaf: other(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """Equal for tensors that are one in memory, as a parameter and what a state dict holds of it."""
    local = local_part(tensor)
    if local.layout is not torch.strided or not local.data_ptr():  # or it has no elements
        return (id(tensor),)
    return (local.data_ptr(), *local.shape, *local.stride())


def _versions(parameters: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (p._version, p.data_ptr()) for name, p in parameters.items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Of sharded ones this rank's shards: to compare the whole would be a collective."""
    one, other = (getattr(each, "to_local", lambda each=each: each)() for each in (one, other))
    return torch.equal(one, other)
