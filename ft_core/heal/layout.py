"""PURE. How tensors are laid out in the bytes that travel, and how these are cut into chunks.

Small tensors share one pool, so that ten thousand scalars of an optimizer are one transfer. Every
large tensor is a segment of its own, so that a chunk never spans two tensors and can be received
straight into its place. Source and target compute the same layout from the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_BYTES = 1 << 20  # tensors below this go into the pool
ALIGN_BYTES = 64
MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 64 << 20


def align(offset: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies: segment index, and bytes from the start of that segment."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of bytes inside one segment: the unit that is requested, checked and counted."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Segment 0 is the pool (maybe empty). `places` has one entry per tensor, in their order."""

    segment_bytes: tuple[int, ...]
    places: tuple[Extent, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segment_bytes)

    def chunks(self, chunk_bytes: int) -> list[Chunk]:
        """All bytes in order, in pieces of at most `chunk_bytes`. Raises ValueError for a bad size."""
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}; it must be between {MIN_CHUNK_BYTES} and "
                f"{MAX_CHUNK_BYTES}."
            )
        return [
            Chunk(segment, offset, min(chunk_bytes, nbytes - offset))
            for segment, nbytes in enumerate(self.segment_bytes)
            for offset in range(0, nbytes, chunk_bytes)
        ]


def lay_out(tensor_bytes: Sequence[int]) -> Layout:
    """The layout of tensors of these sizes in bytes."""
    pool = 0
    segments = [0]
    places: list[Extent] = []
    for nbytes in tensor_bytes:
        if nbytes < SMALL_BYTES:
            places.append(Extent(0, pool, nbytes))
            pool = align(pool + nbytes)
        else:
            places.append(Extent(len(segments), 0, nbytes))
            segments.append(nbytes)
    segments[0] = pool
    return Layout(tuple(segments), tuple(places))
