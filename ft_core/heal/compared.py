"""The part of the state that members compare, and its digests: one slice of it at a time.

Members at an equal version hold equal parameters. A bit that flips in one member's memory, a loop that
has changed them, or a heal that has not restored them all breaks this silently, and forever. So a vote
carries a digest of a slice of the parameters, which the lighthouse compares
(`lighthouse.machine.ballot`). Each slice has its turn; together they cover every byte.

Compared is what is registered: parameters, as they are after the last update, since the next one waits
for the vote. Not compared are buffers, which a forward may change at any time. The state of the
optimizer is seen in the parameters with the next update, so it need be compared after heals only.

Digests read memory at its full speed, and their cost is spread over many steps. On CUDA kernels are
queued on the current stream, in front of the point at which the vote waits for it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from ft_core.heal.checksum import checksum, weights
from ft_core.heal.format import byte_view
from ft_core.heal.shardings import local_part

SLICES = 32
"""At most; a step in `steps // SLICES` has one. Fewer, larger slices cost less than many small ones."""
DIGEST_BYTES = 8
SMALL_BYTES = 2_048
"""Up to this size bytes are hashed as they are, which is faster than a checksum of them."""
_WORD = 8
_PIECE_BYTES = 16 << 20
"""What is read at once on a device: memory for its product with the weights is needed."""

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
        self._mixer = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._on_device: list[Tensor] = []
        with torch.inference_mode():
            for span in spans:
                data = _bytes(tensors[span.tensor])[span.start : span.stop]
                if data.device.type != "cpu":
                    self._on_device += _device_sums(data)
                elif data.numel() <= SMALL_BYTES:
                    self._mixer.update(data.numpy().data)
                else:
                    self._mixer.update(checksum(data))

    def finish(self) -> bytes:
        """The digest; waits for the devices' kernels."""
        for total in self._on_device:
            self._mixer.update(int(total).to_bytes(_WORD, "little", signed=True))
        return self._mixer.digest()


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order in which they are in memory, not copied if it is dense."""
    tensor = local_part(tensor).detach()
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return byte_view(tensor.contiguous())


def _device_sums(data: Tensor) -> list[Tensor]:
    """Weighted sums of the words of `data` modulo 2**64, on its device; see `ft_core.heal.checksum`."""
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
    return weights().to(device)
