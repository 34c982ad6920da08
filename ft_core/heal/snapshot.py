"""A published version of a state on its source: bytes, memory, checksums.

Memory comes from an `Arena`, which keeps one mapping between heals: the second snapshot costs a
memcpy and no page faults. A mapping of which ZeroMQ still holds frames (a slow reader) is never
written again: the next snapshot takes another one, and the last reference frees the old. Huge pages
are not used: their first touch was measured at 0.3 to 1.2 s a GiB, against 0.22 s with small ones.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any

import numpy as np
import torch
import zmq

from ft_core.heal.checksum import checksum
from ft_core.heal.format import Manifest, byte_view, pack
from ft_core.heal.protocol import MAX_MANIFEST_BYTES, Chunk, HealError, HealKey, align

_UNIT_BYTES = 2 << 20  # of a buffer's size


class Loan:
    """Bytes of a buffer that are on their way through ZeroMQ."""

    def __init__(self) -> None:
        self._sent = False
        self._tracker: zmq.MessageTracker | None = None

    def sent(self, tracker: zmq.MessageTracker | None) -> None:
        """The send was made; `tracker` tells when it is over. None: it was not made. Server thread,
        once."""
        self._tracker = tracker
        self._sent = True

    @property
    def done(self) -> bool:
        """Whether ZeroMQ no longer reads the bytes. Any thread."""
        return self._sent and (self._tracker is None or self._tracker.done)


class Buffer:
    """One reusable block of host memory; `lent` are the frames that ZeroMQ may still read."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = max(_UNIT_BYTES, -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES)
        self.pinned = pinned
        self.lent: deque[Loan] = deque()
        if pinned:
            self.data = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.data = torch.frombuffer(mapping, dtype=torch.uint8)

    def idle(self) -> bool:
        """Whether ZeroMQ has sent all that was lent."""
        while self.lent and self.lent[0].done:
            self.lent.popleft()
        return not self.lent


class Arena:
    """Keeps at most one idle buffer. The training thread only."""

    def __init__(self) -> None:
        self._spare: Buffer | None = None

    def take(self, nbytes: int, *, pinned: bool = False) -> Buffer:
        """A buffer of at least `nbytes`; the idle one if it fits without wasting half of it."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.pinned == pinned and spare.idle():
            if nbytes <= spare.nbytes <= 2 * max(nbytes, _UNIT_BYTES):
                return spare
        return Buffer(nbytes, pinned=pinned)

    def give(self, buffer: Buffer | None) -> None:
        """Keep a buffer for the next snapshot, in place of the one kept before; None: keep none."""
        self._spare = buffer


class Publication:
    """One version being served. The training thread makes and freezes it, the server thread reads.

    `live` segments are the training loop's own memory. They are read only with `lock` held, which
    `freeze` takes as well, and which is held for at most one chunk's memcpy. All other segments
    never change.
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
        self._sums: dict[Chunk, bytes] = {}
        self._fill(tensors, copy)

    def _fill(self, tensors: list[torch.Tensor], copy: bool) -> None:
        on_device = any(t.device.type != "cpu" for t in tensors)
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
        for tensor, place in zip(tensors, self.layout.places, strict=True):
            if place.nbytes and place.segment not in self.live:
                segment = self._segments[place.segment]
                assert segment is not None
                _copy_bytes(segment[place.offset : place.offset + place.nbytes], tensor)
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

    def untouched(self, segment: int) -> bool | None:
        """Whether a read of the segment's address that has ended by now saw this version.

        None if this version is no longer served. Server thread. The training thread freezes before
        it changes its memory, and a buffer is written again only after `close`: a read that ended
        before either of them has seen no change.
        """
        with self.lock:
            if self.closed:
                return None
            return segment not in self._moved and self._segments[segment] is not None

    def checksum_of(self, chunk: Chunk) -> bytes | None:
        """The chunk's checksum, computed once; None if its bytes are gone. Server thread."""
        known = self._sums.get(chunk)
        if known is not None:
            return known
        with self.lock:
            segment = self._segments[chunk.segment]
            if segment is None:
                return None
            data = segment[chunk.offset : chunk.offset + chunk.nbytes]
            live = chunk.segment in self.live
            if live:
                self._sums[chunk] = checksum(data)
        if not live:  # overwritten only after `close`; callers look at `closed`
            self._sums[chunk] = checksum(data)
        return self._sums[chunk]

    def lend(self, chunk: Chunk) -> tuple[memoryview, Loan] | None:
        """The chunk's bytes for a zero-copy send, and the loan to call `sent` on; None if its bytes
        are gone. Server thread.

        Live memory is copied first, so that ZeroMQ never reads what the training thread may change.
        """
        loan = Loan()
        with self.lock:
            segment = self._segments[chunk.segment]
            if segment is None or self.closed:
                return None
            data = segment[chunk.offset : chunk.offset + chunk.nbytes]
            if chunk.segment not in self.live:
                owner = next(b for b in self._buffers if _inside(b.data, data))
                owner.idle()  # forgets what has been sent
                owner.lent.append(loan)  # with `lock` held: `close` may return the buffer for reuse
                return data.numpy().data, loan
            staged = np.empty(chunk.nbytes, dtype=np.uint8)
            np.copyto(staged, data.numpy())
        return staged.data, loan

    def complete(self) -> bool:
        """Whether every byte is present and independent of the training loop's memory."""
        return not self.closed and not self.live and None not in self._segments


def _inside(buffer: torch.Tensor, data: torch.Tensor) -> bool:
    return 0 <= data.data_ptr() - buffer.data_ptr() < buffer.numel()


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
