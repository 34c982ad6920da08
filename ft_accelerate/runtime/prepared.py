"""What the script has prepared: its Accelerators and models, as long as they live.

Registered objects keep their peers' values while the script runs through its past. What a script gives
to `register_for_checkpointing` (early stopping's patience, the best metric) heals. But on its way to its
peers the script goes on using it, with results that are none: models answer from memory. So its
attributes are those of the peers meanwhile, and what is assigned to them is dropped: a check that has
not ended the peers' loops does not end this one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ft_accelerate.runtime.models import FaultTolerantModel


class Prepared:
    """The Accelerators and models of one process. The loop's thread only.

    Attributes:
        models: those that were prepared, held weakly; the ones that are gone stay in it.
    """

    def __init__(self) -> None:
        self._accelerators: list[weakref.ref[Any]] = []
        self.models: list[weakref.ref[FaultTolerantModel]] = []

    def adopt(self, accelerator: Any) -> None:
        """Heal this accelerator's objects, besides those of the others that live."""
        self._accelerators.append(weakref.ref(accelerator))

    def add(self, model: FaultTolerantModel) -> None:
        """The script trains this model, too."""
        self.models.append(weakref.ref(model))

    @property
    def accelerators(self) -> dict[int, Any]:
        """Those that live, by their numbers in the order in which they were made."""
        numbered = ((number, ref()) for number, ref in enumerate(self._accelerators))
        return {number: found for number, found in numbered if found is not None}

    @property
    def optimizers(self) -> list[Any]:
        """torch's optimizers, without Accelerate's wrappers."""
        all_ = self.accelerators.values()
        return [wrapper.optimizer for each in all_ for wrapper in each._optimizers]

    @property
    def loaders(self) -> list[Any]:
        """Accelerate's wrappers of the prepared loaders."""
        return [loader for each in self.accelerators.values() for loader in each._dataloaders]

    def begin_accumulation(self) -> None:
        """The next batch is the first of those over which gradients are accumulated."""
        for accelerator in self.accelerators.values():
            accelerator.step = 0

    @property
    def registered(self) -> list[Any]:
        """What the script has registered for checkpointing."""
        return [thing for each in self.accelerators.values() for thing in each._custom_objects]

    def past(self, state: dict[str, Any], *, told: bool) -> bool | None:
        """What our own registered objects say of theirs in a dumped `state` (`FollowsTheScript`); None: there
        are none."""
        pairs = [
            pair
            for number, accelerator in self.accelerators.items()
            if (its := state["accelerators"].get(str(number))) is not None
            for pair in zip(accelerator._custom_objects, its["custom"], strict=False)
        ]
        said = [o.is_past(s, told=told) for o, s in pairs if isinstance(o, FollowsTheScript)]
        return any(said) if said else None

    @property
    def any_model(self) -> bool:
        """Whether a model lives."""
        return any(ref() is not None for ref in self.models)

    @property
    def training(self) -> bool:
        """Whether the script is about to train: a prepared model is in training mode."""
        for known in self.models:
            model = known()
            if model is not None and model.training:
                return True
        return False

    @property
    def device(self) -> torch.device:
        """That of the newest accelerator."""
        living = self.accelerators
        if not living:
            raise RuntimeError("no Accelerator was created")
        device: torch.device = living[max(living)].device
        return device


# ---------------------------------------------------------------- registered objects


_FROM_HERE = "_ft_frozen"


class FollowsTheScript:
    """Base of registered objects of our own, which change in the script's past, too."""

    def is_past(self, state: Any, *, told: bool) -> bool:
        """Whether this script has begun behind the place at which one like it had this `state`. `told`: the
        script there has told where its epochs begin."""
        raise NotImplementedError


def freeze(objects: Iterable[Any]) -> None:
    """Drop assignments to their attributes until `thaw`; idempotent.

    Objects of types that Python does not let change (slots, extension types) stay as they are.
    """
    for each in objects:
        kind = type(each)
        if _FROM_HERE not in vars(kind) and not isinstance(each, FollowsTheScript):
            with contextlib.suppress(TypeError):
                object.__setattr__(each, "__class__", _frozen(kind))


def thaw(objects: Iterable[Any]) -> None:
    """Let them change again; idempotent."""
    for each in objects:
        kind = type(each)
        if _FROM_HERE in vars(kind):
            object.__setattr__(each, "__class__", kind.__mro__[1])


def _frozen(kind: type) -> type:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        """Dropped."""

    def __delattr__(self: Any, name: str) -> None:
        """Dropped."""

    names = {
        "__setattr__": __setattr__, "__delattr__": __delattr__, "__module__": kind.__module__,
        "__qualname__": kind.__qualname__, _FROM_HERE: True,
    }  # fmt: skip
    return type(kind.__name__, (kind,), names)
