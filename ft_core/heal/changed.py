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

KEPT_BYTES = 256 << 20
"""Of parameters that are copied before it is known which of them are changed."""


class ChangedInStep:
    """The parameters that are changed before a step's gradients are there, as they were when the step began.

    Which these are is seen in each step. Before the first one all are kept, if they are small. The loop's thread.

    Args:
        models: those whose parameters are watched, by the prefix of their names. A model keeps its parameters.
        watches: which of these.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, nn.Module]],
        watches: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        self._models, self._watches = models, watches
        self._known: dict[str, weakref.ref[nn.Module]] = {}
        self._of_known: MutableMapping[str, Tensor] = {}
        self.begun = False
        """Whether a step has begun, with no other state in its place since. Read only."""
        self._names: set[str] | None = None
        self._kept: dict[str, Tensor] = {}
        self._began: dict[str, tuple[int, int]] = {}
        self._noted: dict[str, tuple[int, int]] = {}

    def _parameters(self) -> dict[str, Tensor]:
        models = self._models()
        known = {prefix: weakref.ref(model) for prefix, model in models.items()}
        if known != self._known:  # to list them takes longer than to look at them
            self._known = known
            self._of_known = weakref.WeakValueDictionary(
                (f"{prefix}{name}", parameter)
                for prefix, model in models.items()
                for name, parameter in model.named_parameters()
            )
        return {name: p for name, p in self._of_known.items() if self._watches(p)}

    def begin(self, *, all_small: bool = False) -> None:
        """A step begins. `all_small`: keep all, if they are small: any may be changed now."""
        parameters, names = self._parameters(), self._names
        if names is None or all_small:
            small = sum(p.nbytes for p in parameters.values()) <= KEPT_BYTES
            names = set(parameters) if small else names or set()
        self._kept = {n: parameters[n].detach().clone() for n in names & parameters.keys()}
        self.begun = True
        self._began, self._noted = _versions(parameters), {}

    def note(self) -> None:
        """Gradients are there: what was changed since the step began is known. What is changed from here on is by
        optimizers."""
        now = self._noted = _versions(self._parameters())
        changed = {name for name, began in self._began.items() if now.get(name, began) != began}
        self._names = changed | (self._names or set())
        self._kept = {name: value for name, value in self._kept.items() if name in self._names}

    def forget(self) -> None:
        """Another state takes the place of the one in which the step began."""
        self._kept, self.begun = {}, False

    def before(self, state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """The same, with the values that were there when the step began, but for what an optimizer has updated since.
        `prefix`: of its names here."""
        now = _versions(self._parameters()) if self._noted else {}
        kept = {n: v for n, v in self._kept.items() if now.get(n) == self._noted.get(n)}
        return {n: kept.get(f"{prefix}{n}", value) for n, value in state_dict.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """The step's batches are computed again, or had no effect."""
        parameters = self._parameters()
        for name, value in self._kept.items():
            if name in parameters:
                parameters[name].copy_(value)


def _versions(parameters: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (p._version, p.data_ptr()) for name, p in parameters.items()}
