"""A published version of a state on its source: bytes, memory, checksums.

Memory comes from an `Arena`, which keeps one mapping between heals: the second snapshot costs a
memcpy and no page faults. Huge pages are not used: their first touch was measured at 0.3 to 1.2 s
per GiB, against 0.22 s with small ones.

Readers lock and copy nothing: memory that the training thread changes meanwhile, or that holds the next
snapshot by then, is sent, too. What counts is `seal` afterwards, which tells whether every byte was still
of this version when the send was over.

Memory of a device is served where it is, too. A reader copies a chunk at a time to the host, into pinned
memory and on a stream of its own (`Outlet`), so neither the training thread nor the model's stream waits. Small tensors
are copied on the model's stream, as is what `freeze` keeps: what comes later in that stream may change the
state. So the training thread never waits for its device here. Readers do: first of all, until the device has
come to the end of what it had to do when the version was published.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ft_core.heal.format import MEMORY, byte_view, packed
from ft_core.heal.protocol import MAX_MANIFEST_BYTES, Block, Chunk, HealError, HealKey, align
from ft_core.process_group.device_memory import CopyDevice, DeviceEvent, DeviceStream, device_of

_UNIT_BYTES = 2 << 20  # of a buffer's size


class Buffer:
    """One reusable block of host memory. `pinned_for`: a device that reads and writes it."""

    def __init__(self, nbytes: int, pinned_for: CopyDevice | None) -> None:
        self.nbytes = max(_UNIT_BYTES, -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES)
        self.pinned_for = pinned_for
        if pinned_for is not None:
            self.data = pinned_for.pinned(self.nbytes)
        else:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.data = torch.frombuffer(mapping, dtype=torch.uint8)


class Arena:
    """Keeps at most one idle buffer. The training thread only."""

    def __init__(self) -> None:
        self._spare: Buffer | None = None

    def take(self, nbytes: int, pinned_for: CopyDevice | None) -> Buffer:
        """A buffer of at least `nbytes`; the idle one if it fits without wasting half of it."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.pinned_for is pinned_for:
            if nbytes <= spare.nbytes <= 2 * max(nbytes, _UNIT_BYTES):
                return spare
        return Buffer(nbytes, pinned_for)

    def give(self, buffer: Buffer | None) -> None:
        """Keep a buffer for the next snapshot, in place of the one kept before; None: keep none."""
        self._spare = buffer


class Outlet:
    """Where one reader has the bytes that lie on a device: pinned memory for a chunk, and a stream. One
    thread."""

    def __init__(self) -> None:
        self._streams: dict[CopyDevice, DeviceStream] = {}
        self._slot: torch.Tensor | None = None

    def bring(self, parts: list[tuple[CopyDevice | None, torch.Tensor]]) -> list[torch.Tensor]:
        """The parts of a chunk in host memory, until the next call. Blocks for those on devices."""
        found, used = [], 0
        nbytes = sum(data.numel() for _, data in parts)
        for device, data in parts:
            if device is None:
                found.append(data)
                continue
            if self._slot is None or self._slot.numel() < nbytes:
                self._slot = device.pinned(nbytes)
            if device not in self._streams:
                self._streams[device] = device.new_stream()
            place = self._slot[used : used + data.numel()]
            self._streams[device].copy(place, data)
            found.append(place)
            used += data.numel()
        for device in {device for device, _ in parts if device is not None}:
            self._streams[device].mark().synchronize()
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of a chunk as it lay when its reading began. `addresses`: of its segments. `total`: its checksum, if
    it is known."""

    chunk: Chunk
    addresses: dict[int, int]
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
        self.closed = False  # no longer served
        state = packed(tree, allow_objects)
        self.manifest, tensors = state.manifest, state.tensors
        if len(self.manifest) > MAX_MANIFEST_BYTES:
            raise HealError(
                f"The state's structure alone takes {len(self.manifest)} bytes (limit "
                f"{MAX_MANIFEST_BYTES}); keep large data in tensors."
            )
        self.layout, self.layout_digest = state.layout, state.layout_digest
        self.live: set[int] = set()
        self._arena = arena
        self._buffers: list[Buffer] = []
        self._segments: list[torch.Tensor | None] = [None] * len(self.layout.segment_bytes)
        self._on: dict[int, CopyDevice] = {}  # the segments that lie on one
        self._sums: dict[Chunk, int] = {}
        devices = [device_of(tensor) for tensor in tensors]
        self._devices = {device for device in devices if device is not None}
        self._fill(tensors, devices, copy)
        self._ready = self._marks()  # before them nothing of the state is as it was published

    def _marks(self) -> list[DeviceEvent]:
        return [device.current().mark() for device in self._devices]

    def _fill(
        self, tensors: list[torch.Tensor], devices: list[CopyDevice | None], copy: bool
    ) -> None:
        owned = [0]
        for tensor, device, (index, _, _) in zip(tensors, devices, self.layout.places, strict=True):
            if index == 0:
                continue
            # One of `torch.inference_mode` counts no changes, so that nobody would notice them.
            stays = (device is not None or tensor.is_cpu) and not tensor.is_inference()
            if copy or not stays or not tensor.is_contiguous():
                owned.append(index)
                continue
            self._segments[index] = byte_view(tensor)
            self.live.add(index)
            if device is not None:
                self._on[index] = device
        self._take_memory(owned)
        pool = self._segments[0]
        assert pool is not None
        pool_start = pool.data_ptr()
        for tensor, device, (index, offset, nbytes) in zip(
            tensors, devices, self.layout.places, strict=True
        ):
            if not nbytes or index in self.live:
                continue
            if index == 0 and device is None and tensor.is_cpu and tensor.is_contiguous():
                # A twentieth of the time that views of 10,000 tensors take.
                to, source = pool_start + offset, tensor.data_ptr()
                MEMORY[to : to + nbytes] = MEMORY[source : source + nbytes]
            else:
                segment = self._segments[index]
                assert segment is not None
                _copy_bytes(segment[offset : offset + nbytes], tensor, device)

    def _take_memory(self, segments: list[int]) -> None:
        """One buffer for all of these segments."""
        sizes = [self.layout.segment_bytes[segment] for segment in segments]
        pinned_for = next(iter(self._devices), None)
        buffer = self._arena.take(sum(align(size) for size in sizes), pinned_for)
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
                _copy_bytes(new, source, self._on.get(segment))
            self.live.clear()
            self._on.clear()
            self._ready = self._marks()

    def close(self) -> None:
        """Stop serving and return the largest buffer for reuse. Training thread."""
        with self.lock:
            self.closed = True
            self._segments = [None] * len(self._segments)
            self.live.clear()
            self._on.clear()
            buffers, self._buffers = self._buffers, []
        if not self.ready:
            return  # a device still writes to them
        for buffer in sorted(buffers, key=lambda b: b.nbytes)[-1:]:
            self._arena.give(buffer)

    def disown(self) -> None:
        """No byte of it counts from here on. Any thread; never waits. `close` frees its memory."""
        self.closed = True

    @property
    def ready(self) -> bool:
        """Whether its devices are as far as they were to be when it was published. Any thread."""
        return all(event.query() for event in self._ready)

    def lent(self) -> tuple[tuple[int, ...], tuple[Block, ...]]:
        """What another process of this machine can read: the address of each segment in this process (0: it
        can't), and the allocations of devices in which those lie that are on one. Nothing, while a device is not
        as far as it was to be when this was published. Any thread."""
        with self.lock:
            if not self.ready:
                return (), ()
            segments, on = list(self._segments), dict(self._on)
        addresses, blocks, end = list(map(_address, segments)), list[Block](), 0
        for segment, device in sorted(on.items(), key=lambda each: addresses[each[0]]):
            data, address = segments[segment], addresses[segment]
            if data is None or address < end:  # in the last block
                continue
            if (found := device.lend(data)) is None:
                addresses[segment] = 0
            else:
                blocks.append(Block(*found))
                end = blocks[-1].address + blocks[-1].nbytes
        return tuple(addresses), tuple(blocks)

    def untouched(self, chunk: Chunk, addresses: Mapping[int, int] | Sequence[int]) -> bool:
        """Whether a read of the chunk at these addresses of its segments, which has ended by now, saw this
        version. Any thread.

        The training thread freezes before it changes its memory, which gives a segment another address, and
        a buffer is written again only after `close`: a read that ended before either has seen no change.
        """
        with self.lock:
            return not self.closed and all(
                _address(self._segments[extent.segment]) == addresses[extent.segment] != 0
                for extent in self.layout.extents(chunk)
            )

    def read(self, chunk: Chunk, outlet: Outlet) -> Reading | None:
        """Begin to read a chunk; None if its bytes are gone. Any thread; call `seal` at the end.

        Blocks while a device is not as far as it was to be when this was published, and copies.
        """
        extents = self.layout.extents(chunk)
        with self.lock:
            held = [(extent.segment, self._segments[extent.segment]) for extent in extents]
            devices = [self._on.get(extent.segment) for extent in extents]
            total, ready = self._sums.get(chunk), self._ready
        if self.closed:
            return None
        segments = [(index, data) for index, data in held if data is not None]
        if len(segments) < len(extents):
            return None
        for event in ready:
            event.synchronize()
        cut = [
            (device, data[extent.offset : extent.offset + extent.nbytes])
            for extent, device, (_, data) in zip(extents, devices, segments, strict=True)
        ]
        parts = [part.numpy().data for part in outlet.bring(cut)]
        return Reading(chunk, {index: data.data_ptr() for index, data in segments}, parts, total)

    def seal(self, reading: Reading, total: int) -> bool:
        """Whether all that was read, and summed to `total`, was of this version. Any thread."""
        intact = self.untouched(reading.chunk, reading.addresses)
        if intact:
            self._sums[reading.chunk] = total
        return intact

    def complete(self) -> bool:
        """Whether every byte is present and independent of the training loop's memory."""
        return not self.closed and not self.live and None not in self._segments


def _address(segment: torch.Tensor | None) -> int:
    return 0 if segment is None else segment.data_ptr()


def _copy_bytes(target: torch.Tensor, tensor: torch.Tensor, device: CopyDevice | None) -> None:
    """Fill `target` (uint8, contiguous, pinned for `device`) with the bytes of `tensor`, row-major. From a
    device in the calling thread's stream, without waiting."""
    if device is None and tensor.is_cpu and tensor.is_contiguous():
        # One plain memcpy. torch's copy_ with its threads was measured 1.2 times as fast on an idle
        # machine and many times slower on a busy one, where its threads wait for each other.
        np.copyto(target.numpy(), byte_view(tensor).numpy())
        return
    if tensor.is_contiguous():
        source = byte_view(tensor)
    else:
        target, source = target.view(tensor.dtype).view(tensor.shape), tensor
    if device is not None:
        device.current().copy(target, source)
        return
    with torch.no_grad():
        target.copy_(source)
