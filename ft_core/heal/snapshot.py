"""A published version of a state on its source: bytes, memory, checksums.

Memory comes from an `Arena`, which keeps one mapping between heals: the second snapshot costs a
memcpy and no page faults. Huge pages are not used: their first touch was measured at 0.3 to 1.2 s a GiB,
against 0.22 s with small ones.

Readers lock and copy nothing: memory that the training thread changes meanwhile, or that holds the next
snapshot by then, is sent, too. What counts is `seal` afterwards, which tells whether every byte was still
of this version when the send was over.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ft_core.heal.format import Manifest, byte_view, pack
from ft_core.heal.protocol import MAX_MANIFEST_BYTES, Chunk, HealError, HealKey, align

_UNIT_BYTES = 2 << 20  # of a buffer's size


class Buffer:
    """One reusable block of host memory."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = max(_UNIT_BYTES, -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES)
        self.pinned = pinned
        if pinned:
            self.data = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.data = torch.frombuffer(mapping, dtype=torch.uint8)


class Arena:
    """Keeps at most one idle buffer. The training thread only."""

    def __init__(self) -> None:
        self._spare: Buffer | None = None

    def take(self, nbytes: int, *, pinned: bool = False) -> Buffer:
        """A buffer of at least `nbytes`; the idle one if it fits without wasting half of it."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.pinned == pinned:
            if nbytes <= spare.nbytes <= 2 * max(nbytes, _UNIT_BYTES):
                return spare
        return Buffer(nbytes, pinned=pinned)

    def give(self, buffer: Buffer | None) -> None:
        """Keep a buffer for the next snapshot, in place of the one kept before; None: keep none."""
        self._spare = buffer


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of a chunk as it lay when its reading began. `total`: its checksum, if it is known."""

    chunk: Chunk
    segments: tuple[tuple[int, torch.Tensor], ...]
    parts: list[memoryview]
    total: int | None


class Publication:
    """One version being served. The training thread makes and freezes it, other threads read.

    `live` segments are the training loop's own memory, until `freeze`. All other segments never change
    until `close`. Both take `lock`, which a reader holds for microseconds.
    """

    def __init__(
        self, key: HealKey, tree: Any, arena: Arena, *, copy: bool, allow_objects: bool
    ) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.closed = False  # no longer served; set with `lock` held
        self.manifest, tensors = pack(tree, allow_objects)
        if len(self.manifest) > MAX_MANIFEST_BYTES:
            raise HealError(
                f"The state's structure alone takes {len(self.manifest)} bytes (limit "
                f"{MAX_MANIFEST_BYTES}); keep large data in tensors."
            )
        parsed = Manifest(self.manifest)
        self.layout = parsed.layout
        self.layout_digest = parsed.layout_digest
        self.live: set[int] = set()
        self._moved: set[int] = set()  # were live: their former addresses may hold other values
        self._arena = arena
        self._buffers: list[Buffer] = []
        self._segments: list[torch.Tensor | None] = [None] * len(self.layout.segment_bytes)
        self._sums: dict[Chunk, int] = {}
        self._fill(tensors, copy)

    def _fill(self, tensors: list[torch.Tensor], copy: bool) -> None:
        on_device = not all(tensor.is_cpu for tensor in tensors)
        owned = [0]
        for tensor, place in zip(tensors, self.layout.places, strict=True):
            if place.segment == 0:
                continue
            if copy or tensor.device.type != "cpu" or not tensor.is_contiguous():
                owned.append(place.segment)
            else:
                self._segments[place.segment] = byte_view(tensor)
                self.live.add(place.segment)
        self._take_memory(owned, pinned=on_device)
        pool = self._segments[0]
        assert pool is not None
        pool_start = pool.data_ptr()
        for tensor, place in zip(tensors, self.layout.places, strict=True):
            index, offset, nbytes = place
            if not nbytes or index in self.live:
                continue
            if index == 0 and not on_device and tensor.is_contiguous():
                # A twentieth of the time that views of 10,000 tensors take.
                ctypes.memmove(pool_start + offset, tensor.data_ptr(), nbytes)
            else:
                segment = self._segments[index]
                assert segment is not None
                _copy_bytes(segment[offset : offset + nbytes], tensor)
        if on_device:
            for device in {t.device for t in tensors if t.device.type == "cuda"}:
                torch.cuda.synchronize(device)

    def _take_memory(self, segments: list[int], *, pinned: bool = False) -> None:
        """One buffer for all of these segments."""
        sizes = [self.layout.segment_bytes[segment] for segment in segments]
        buffer = self._arena.take(sum(align(size) for size in sizes), pinned=pinned)
        self._buffers.append(buffer)
        offset = 0
        for segment, size in zip(segments, sizes, strict=True):
            self._segments[segment] = buffer.data[offset : offset + size]
            offset += align(size)

    def freeze(self, needed: set[int]) -> None:
        """Copy the live segments in `needed` and drop the other live ones. Training thread."""
        with self.lock:
            old = {segment: self._segments[segment] for segment in self.live}
            keep = sorted(self.live & needed)
            for segment in self.live:
                self._segments[segment] = None
            if keep:
                self._take_memory(keep)
            for segment in keep:
                new, source = self._segments[segment], old[segment]
                assert new is not None
                assert source is not None
                _copy_bytes(new, source)
            self._moved |= self.live
            self.live.clear()

    def close(self) -> None:
        """Stop serving and return the largest buffer for reuse. Training thread."""
        with self.lock:
            self.closed = True
            self._segments = [None] * len(self._segments)
            self.live.clear()
            buffers, self._buffers = self._buffers, []
        for buffer in sorted(buffers, key=lambda b: b.nbytes)[-1:]:
            self._arena.give(buffer)

    def addresses(self) -> tuple[int, ...]:
        """The memory address of each segment in this process, 0 where it has none. Any thread."""
        with self.lock:
            return tuple(0 if s is None else s.data_ptr() for s in self._segments)

    def untouched(self, chunk: Chunk) -> bool | None:
        """Whether a read of the chunk's addresses that has ended by now saw this version.

        None if this version is no longer served. Any thread. The training thread freezes before it
        changes its memory, and a buffer is written again only after `close`: a read that ended before
        either of them has seen no change.
        """
        with self.lock:
            if self.closed:
                return None
            return all(
                extent.segment not in self._moved and self._segments[extent.segment] is not None
                for extent in self.layout.extents(chunk)
            )

    def read(self, chunk: Chunk) -> Reading | None:
        """Begin to read a chunk; None if its bytes are gone. Any thread; call `seal` at the end."""
        extents = self.layout.extents(chunk)
        with self.lock:
            held = [(extent.segment, self._segments[extent.segment]) for extent in extents]
            total = self._sums.get(chunk)
        segments = tuple((index, data) for index, data in held if data is not None)
        if len(segments) < len(extents):
            return None
        parts = [
            data[extent.offset : extent.offset + extent.nbytes].numpy().data
            for extent, (_, data) in zip(extents, segments, strict=True)
        ]
        return Reading(chunk, segments, parts, total)

    def seal(self, reading: Reading, total: int) -> bool:
        """Whether all that was read, and summed to `total`, was of this version. Any thread.

        `freeze` comes before any change of live memory, `close` before any other use of a buffer.
        """
        with self.lock:
            if any(self._segments[index] is not data for index, data in reading.segments):
                return False
            self._sums[reading.chunk] = total
        return True

    def complete(self) -> bool:
        """Whether every byte is present and independent of the training loop's memory."""
        return not self.closed and not self.live and None not in self._segments


def _copy_bytes(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill `target` (uint8, contiguous) with the bytes of `tensor`, row-major."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        # One plain memcpy. torch's copy_ with its threads was measured 1.2 times as fast on an idle
        # machine and many times slower on a busy one, where its threads wait for each other.
        np.copyto(target.numpy(), byte_view(tensor).numpy())
        return
    with torch.no_grad():
        if tensor.is_contiguous():
            target.copy_(byte_view(tensor), non_blocking=True)
        else:
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
