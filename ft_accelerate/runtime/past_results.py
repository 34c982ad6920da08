"""What operations have returned since the training began, by their place in the script.

A process that comes back runs through its past (`script_position`). What the script keeps in variables there (the best
metric so far, patience) comes from operations, whose results are the same in all processes. So they are answered with
what its peers got: the script decides as theirs did. Large results are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ft_accelerate.runtime.script_position import ANOTHER_PATH, ScriptPosition
from ft_core.heal.format import Node, pack_node, unpack_node

LARGEST = 64 * 1024
"""Bytes of an operation's result that is kept."""
MAX_BYTES = 8 * 1024 * 1024
"""Of all of them, and so of what a process that comes back receives besides."""
EACH = 256
"""Bytes of memory of a result, besides its own."""

_TENSOR, _LIST = "tensor", "list"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_Place = tuple[int, int, int]
_Gap = list[tuple[str, bytes]]


class PastResults:
    """The loop's thread only."""

    def __init__(self, position: ScriptPosition) -> None:
        self._position = position
        self._gaps: dict[_Place, _Gap | None] = {}
        """The operations between two batches, in order. None: one of them is not kept, so none is: predictions that are the
        script's own have other shapes than labels of its peers."""
        self._passes: set[int] = set()
        """Those that hold some of what a peer has told."""
        self._nbytes = 0
        self._answered: tuple[_Place, int] | None = None

    def add(self, what: str, result: Any, nbytes: int) -> None:
        """An operation is done. `result` None: whoever comes back has it in the state that it takes."""
        if self._nbytes > MAX_BYTES:
            return
        place = self._place
        gap = self._gaps.setdefault(place, [])
        if gap is None:
            return
        self._nbytes += nbytes + EACH
        if nbytes > LARGEST or self._nbytes > MAX_BYTES:
            self._gaps[place] = None
            return
        gap.append((what, pack_node(_node(result))))

    def answer(self, what: str, alone: Callable[[], Any]) -> Any:
        """What the operation returned to which the script comes in its past; `alone()` where that is not known."""
        place, number = self._place, 0
        if self._answered is not None and self._answered[0] == place:
            number = self._answered[1]
        gap = self._gaps.get(place) or []
        if number >= len(gap) or gap[number][0] != what:
            return alone()  # one that the peers have left out here, by a registered value
        self._answered = place, number + 1
        found = _value(unpack_node(gap[number][1]))
        return alone() if found is None else found

    def within(self, seq: int) -> bool:
        """Whether operations between the batches of this pass are known."""
        return seq in self._passes

    def dump(self) -> bytes:
        """For a process that comes back."""
        return pack_node([[*place, gap] for place, gap in self._gaps.items()])

    def take(self, packed: bytes) -> None:
        """Have what a peer has."""
        self._gaps = {(n, seq, done): gap for n, seq, done, gap in unpack_node(packed)}
        self._passes = {seq for (_, seq, _), gap in self._gaps.items() if gap}
        self._nbytes = sum(len(kept) + EACH for gap in self._gaps.values() for _, kept in gap or ())

    @property
    def _place(self) -> _Place:
        """Between which batches the script is."""
        position = self._position
        inner = position.active[-1] if position.active else None
        return (position.iterations, *((-1, 0) if inner is None else (inner.seq, inner.yielded)))


def refuse_unlike(what: str, own: Any, theirs: Any) -> Any:
    """`theirs`, which answers an operation of the window in which the script is. Raises RuntimeError if that was another
    operation of this kind. (Sizes may differ: a script that has entered an epoch has collected less than its peers.)
    """
    mine, others = _like(own), _like(theirs)
    if mine != others and mine and others:
        here = f"it comes to {what} of {mine}, they came to one of {others}"
        raise RuntimeError(ANOTHER_PATH.format(here))
    return theirs


def _like(result: Any) -> str:
    """The kind of tensor that a result is, or its first row; "": none."""
    value = result[0] if isinstance(result, list) and result else result
    return f"{value.dim()} dimensions of {value.dtype}" if isinstance(value, Tensor) else ""


def _node(result: Any) -> Node:
    if isinstance(result, Tensor):
        data = result.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [_TENSOR, str(result.dtype), list(result.shape), result.device.type, data]
    return [_LIST, *map(_node, result)] if isinstance(result, list) else result


def _value(node: Node) -> Any:
    if not isinstance(node, list):
        return node
    kind, *parts = node
    if kind == _LIST:
        return list(map(_value, parts))
    dtype, shape, device, data = parts
    values = torch.empty(shape, dtype=_DTYPES[dtype])
    if data:
        values = torch.frombuffer(bytearray(data), dtype=values.dtype).view(shape)
    return values.to(device)
