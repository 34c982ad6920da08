"""A digest of the hyperparameters of optimizers, cheap where few of them change between steps.

Two replica groups have equal digests if all hyperparameters are equal: parameter groups with their
keys, and the loss scale. Equal numbers count as equal whatever their type (1, 1.0, a tensor of it).
"""

from __future__ import annotations

import hashlib
from operator import is_, itemgetter
from typing import Any

import torch

_CONSTANT = {bool, int, float, str, type(None)}


class Hyperparameters:
    """What was last seen of some optimizers' hyperparameters."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._scaler: Any = None
        self._digest = b""

    def digest(self, optimizers: list[Any], scaler: dict[str, Any] | None) -> bytes:
        """Of now. `scaler`: the loss scaler's state."""
        groups = [group for known in optimizers for group in known.param_groups]
        changed = len(groups) != len(self._groups) or not self._digest
        if changed:
            self._groups = [_Group() for _ in groups]
        for known, group in zip(self._groups, groups, strict=True):
            if known.changed(group):
                changed = True
        if changed or scaler != self._scaler:
            self._scaler = scaler
            self._digest = digest([[group.digest for group in self._groups], scaler])
        return self._digest


class _Group:
    """One parameter group."""

    def __init__(self) -> None:
        self._keys: tuple[str, ...] = ()
        self._get: Any = None
        self._values: tuple[Any, ...] = ()
        self._plain: list[Any] = []
        self._mutable: set[int] = set()  # places of values that may change in place
        self.digest = b""

    def changed(self, group: dict[str, Any]) -> bool:
        """Whether its digest is another one than at the last call."""
        try:
            values = self._get(group) if len(group) == len(self._keys) else None
        except KeyError:
            values = None
        if values is None:
            self._keys = tuple(sorted(group))  # "params" and at least a learning rate
            self._get, self._mutable = itemgetter(*self._keys), set()
            self._values, self._plain = (), [None] * len(self._keys)
            values = self._get(group)
        before = self._values or (self,) * len(self._keys)
        if not self._mutable and all(map(is_, values, before)):
            return False
        for index, key in enumerate(self._keys):
            value = values[index]
            if key != "params" and (value is not before[index] or index in self._mutable):
                self._plain[index] = _plain(value)
                if _is_constant(value):
                    self._mutable.discard(index)
                else:
                    self._mutable.add(index)
        old, self._values = self.digest, values
        self.digest = digest([self._keys, self._plain])
        return self.digest != old


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANT or (
        type(value) is tuple and all(type(item) in _CONSTANT for item in value)
    )


def _plain(value: Any) -> Any:
    """Hyperparameters that all processes write alike; other objects say nothing."""
    kind = type(value)
    if kind in (float, int, bool):
        return value + 0.0  # of minus zero, too
    if kind is str or value is None:
        return value
    if kind in (tuple, list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.item()) if value.numel() == 1 else None
    return None


def digest(value: Any) -> bytes:
    """Eight bytes that stand for plain values."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
