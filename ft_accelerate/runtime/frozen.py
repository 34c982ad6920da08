"""Registered objects keep their peers' values while their script runs through its past.

What a script gives to `register_for_checkpointing` (early stopping's patience, the best metric) heals.
But on its way to its peers the script goes on using it, with results that are none: models answer
from memory. So its attributes are those of the peers meanwhile, and what is assigned to them is dropped: a
check that has not ended the peers' loops does not end this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

_FROM_HERE = "_ft_frozen"


class FollowsTheScript:
    """Base of registered objects of our own, which change in the script's past, too."""


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
