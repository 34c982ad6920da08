"""Digests: of raw bytes on the wire, of a whole state, and of the part of it that members compare.

On the host they are XXH3 (64 bits), which takes as long as reading the memory: two states that differ by an
accident (bad memory, torn reads, wrong offsets, diverged replicas) have equal sums with a probability of 2**-64.
It is no protection from an attacker.

On a device they are sums of 64-bit words, each times a fixed odd weight, modulo 2**64. A change inside one
word is always seen. Several changed words are missed with a probability of 2**-(63 - t), where t is the number
of low bits that are zero in all differences: an even number of flipped top bits is not seen.

What members compare (`ComparedState`). Members at an equal version hold equal parameters. A bit that flips
in one member's memory, a loop that has changed them, or a heal that has not restored them all breaks this
silently, and forever. So a vote carries a digest of a slice of the parameters, which the lighthouse compares
(`lighthouse.machine.ballot`). Each slice has its turn; together they cover every byte.

Compared is what is registered: parameters, as they are after the last update, since the next one waits
for the vote. Not compared are buffers, which a forward may change at any time. The state of the
optimizer is seen in the parameters with the next update, so it need be compared after heals only.

Their cost is spread over many steps. On CUDA kernels are queued on the current stream, in front of the point
at which the vote waits for it.
"""

from __future__ import annotations

import gc
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ft_core.heal.format import (
    Node,
    TreeEncoder,
    byte_view,
    pack_node,
    plain_tensor,
)
from ft_core.heal.objects import NUMPY_KINDS
from ft_core.heal.shardings import dtensor_type, local_part

_WORD = 8
_WEIGHTS = 1 << 17
_PIECE_BYTES = 16 << 20
"""What one thread reads at once, or a device, which needs memory for its product with the weights."""


def checksum(parts: Iterable[memoryview]) -> int:
    """The XXH3 (64 bits) of these bytes. Any thread; the GIL is free meanwhile."""
    mixer = xxhash.xxh3_64()
    for part in parts:
        mixer.update(part)
    return mixer.intdigest()


def digest(tree: Any, *, allow_objects: bool = False, threads: int = 2) -> str:
    """A fingerprint of a whole state, as 16 hex digits.

    Equal for bitwise equal states; different states collide with a probability of 2**-64.
    It covers every bit (-0.0 is not 0.0), the order inside tensors, shapes, dtypes, keys and Python
    values. It ignores devices, strides, shared memory, and the insertion order of dicts (but not of
    an OrderedDict). Up to `threads` threads run while this call lasts. Any thread, while the state
    does not change. Raises UnsupportedObjectError like `pack`.
    """
    sums: list[tuple[list[Any], torch.Tensor]] = []
    dtensor = dtensor_type()

    def leaf(value: Any, path: Callable[[], str]) -> Node | None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            tensor = plain_tensor(value, path)
        elif dtensor is not None and isinstance(value, dtensor):
            tensor = plain_tensor(local_part(value), path)
        elif type(value) is np.ndarray and value.dtype.kind in NUMPY_KINDS:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
            node = ["N", value.dtype.str, list(value.shape)]
            sums.append((node, tensor))
            return node
        elif type(value) is bytes:
            return ["B", hashlib.blake2b(value, digest_size=16).digest()]
        else:
            return None
        node = ["T", str(tensor.dtype), list(tensor.shape)]
        sums.append((node, tensor))
        return node

    root = TreeEncoder(leaf, allow_objects=allow_objects, canonical=True).encode(tree)
    pieces: list[tuple[list[Any], torch.Tensor]] = []
    for node, tensor in sums:
        flat = byte_view(tensor.contiguous())
        pieces.extend((node, piece) for piece in flat.split(_PIECE_BYTES))
    if threads > 1 and sum(piece.numel() for _, piece in pieces) >= 2 * _PIECE_BYTES:
        with ThreadPoolExecutor(threads, thread_name_prefix="ft-digest") as pool:
            results = list(pool.map(_piece_sum, [piece for _, piece in pieces]))
    else:
        results = [_piece_sum(piece) for _, piece in pieces]
    for (node, _), result in zip(pieces, results, strict=True):
        node.append(result)
    return hashlib.blake2b(pack_node(root), digest_size=8).hexdigest()


def _piece_sum(piece: torch.Tensor) -> bytes:
    return checksum([piece.cpu().numpy().data]).to_bytes(_WORD, "little")


# ---------------------------------------------------------------- what members compare

SLICES = 32
"""At most; a step in `steps // SLICES` has one. Fewer, larger slices cost less than many small ones."""

Tensors = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` of a tensor, by its number."""

    tensor: int
    start: int
    stop: int


class ComparedState:
    """What members compare. Thread: the training loop's.

    `steps`: committed steps within which every byte is compared once; 0: nothing is compared.

    Attributes:
        equal: False while this member's parameters may differ from its peers', as they do between the
            averages of LocalSGD. Then it says nothing about them.
    """

    def __init__(self, steps: int) -> None:
        self.equal = True
        self._slices = min(steps, SLICES)
        self._stride = steps // self._slices if steps else 0
        self._parts: dict[str, Tensors] = {}
        self._after_heals: dict[str, Tensors] = {}
        self._tensors: list[Tensor] = []
        self._spans: list[list[Span]] | None = None

    def register(self, key: str, tensors: Tensors, within: int | None = None) -> None:
        """Add (or replace) a part. `tensors` is called once; equal in number, order and sizes in all
        members. Tensors are held until `clear`. `within`: compare all parts at least once in so many
        steps, where steps are long."""
        if within is not None and self._stride:
            self._stride = min(self._stride, max(1, within // self._slices))
        self._parts[key] = tensors
        self._spans = None

    def register_after_heals(self, key: str, tensors: Tensors) -> None:
        """Add (or replace) a part that is compared with all others after a heal, and at no other time.
        `tensors` is called each time: an optimizer makes its state late, and may replace it."""
        self._after_heals[key] = tensors

    def clear(self) -> None:
        """Hold nothing any more."""
        self._parts.clear()
        self._after_heals.clear()
        self._tensors, self._spans = [], None

    def at(self, step: int, *, whole: bool) -> Digest | None:
        """Begin the digest that a vote on `step` carries; None: it carries none. `whole`: of all
        slices, as after a heal."""
        if not self._stride or not self._parts or not self.equal:
            return None
        if not whole and step % self._stride:
            return None
        if self._spans is None:
            self._spans = self._plan()
        if whole:
            return self._whole(self._spans)
        return Digest(self._tensors, self._spans[step // self._stride % self._slices])

    def _whole(self, slices: list[list[Span]]) -> Digest:
        parts = (self._after_heals[key]() for key in sorted(self._after_heals))
        more = [tensor for tensors in parts for tensor in tensors]
        first = len(self._tensors)
        spans = [span for spans in slices for span in spans]
        spans += [Span(first + n, 0, local_part(tensor).nbytes) for n, tensor in enumerate(more)]
        return Digest([*self._tensors, *more], spans)

    def _plan(self) -> list[list[Span]]:
        """The spans of each slice. The same in all members: it depends on the tensors' sizes alone."""
        if len(self._parts) > 1:  # a model that was dropped gives no tensors, once it is gone
            self._tensors = []
            gc.collect()
        parts = (self._parts[key]() for key in sorted(self._parts))
        self._tensors = [tensor for tensors in parts for tensor in tensors]
        sizes = [local_part(tensor).nbytes for tensor in self._tensors]
        ends = list(accumulate(sizes))
        total = ends[-1] if ends else 0
        size = -(-total // self._slices)
        slices = []
        for number in range(self._slices):
            start, stop = min(number * size, total), min((number + 1) * size, total)
            spans = []
            while start < stop:
                index = bisect_right(ends, start)
                begin = ends[index] - sizes[index]
                end = min(stop, ends[index])
                spans.append(Span(index, start - begin, end - begin))
                start = end
            slices.append(spans)
        return slices


class Digest:
    """A digest that is being computed. Thread: the training loop's."""

    def __init__(self, tensors: list[Tensor], spans: list[Span]) -> None:
        self._mixer = xxhash.xxh3_64()
        self._on_device: list[Tensor] = []
        with torch.inference_mode():
            for span in spans:
                data = _bytes(tensors[span.tensor])[span.start : span.stop]
                if data.device.type != "cpu":
                    self._on_device += _device_sums(data)
                else:
                    self._mixer.update(data.numpy().data)

    def finish(self) -> bytes:
        """The digest; waits for the devices' kernels."""
        for total in self._on_device:
            self._mixer.update(int(total).to_bytes(_WORD, "little", signed=True))
        return self._mixer.digest()


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, in which it heals: members may hold it in different ones in memory."""
    return byte_view(local_part(tensor).detach().contiguous())


def _device_sums(data: Tensor) -> list[Tensor]:
    """Weighted sums of the words of `data` modulo 2**64, on its device; see the module's docstring."""
    device = data.device
    known, sums = _weights_on(device), []
    for piece in data.split(_PIECE_BYTES):
        if piece.storage_offset() % _WORD:
            piece = piece.clone()  # words must be aligned
        words = piece.numel() // _WORD
        rows, rest = divmod(words, known.numel())
        typed = piece[: words * _WORD].view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=device)
        if rows:
            table = typed[: rows * known.numel()].view(rows, -1)
            total = ((table * known).sum(dim=1) * known[:rows]).sum()
        if rest:
            total = total + (typed[-rest:] * known[:rest]).sum()
        tail = piece[words * _WORD :]
        if tail.numel():
            total = total + (tail.to(torch.int64) * known[: tail.numel()]).sum() * known[_WORD]
        sums.append(total)
    return sums


@cache
def _weights_on(device: torch.device) -> Tensor:
    """Odd 64-bit weights by splitmix64: the same on every machine and in every release."""
    with np.errstate(over="ignore"):
        z = np.arange(1, _WEIGHTS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
