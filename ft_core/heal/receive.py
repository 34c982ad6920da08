"""Where a heal's bytes go on the target: its own tensors where they fit, new memory elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ft_core.heal.format import MEMORY, Manifest, byte_view
from ft_core.heal.protocol import Chunk, Extent, HealError
from ft_core.process_group.device_memory import CopyDevice, DeviceEvent, DeviceStream, device_of

_STAGING_SLOTS = 3


class Lane:
    """Memory for one chunk after another. One thread; a connection has one of its own.

    Bytes of tensors on a device pass through pinned host memory and a stream of this lane. A slot is
    written again only after its copies have ended.
    """

    def __init__(
        self, host: dict[int, torch.Tensor], device: dict[int, torch.Tensor], slot_bytes: int
    ) -> None:
        self._host, self._device, self._slot_bytes = host, device, slot_bytes
        self._slots: list[torch.Tensor] = []
        self._events: list[list[DeviceEvent]] = [[] for _ in range(_STAGING_SLOTS)]
        self._streams: dict[CopyDevice, DeviceStream] = {}
        self._next = 0
        # (of the device, on it, in the slot)
        self._staged: list[tuple[CopyDevice, torch.Tensor, torch.Tensor]] = []

    def parts(self, extents: Sequence[Extent]) -> list[torch.Tensor]:
        """Host memory (uint8, 1-D) to receive a chunk into, in order."""
        found = []
        self._staged.clear()
        used = 0
        for extent in extents:
            stop = extent.offset + extent.nbytes
            if extent.segment in self._host:
                found.append(self._host[extent.segment][extent.offset : stop])
                continue
            target = self._device[extent.segment][extent.offset : stop]
            device = device_of(target)
            assert device is not None
            slot = self._slot(device)[used : used + extent.nbytes]
            used += extent.nbytes
            self._staged.append((device, target, slot))
            found.append(slot)
        return found

    def _slot(self, device: CopyDevice) -> torch.Tensor:
        if not self._slots:
            self._slots = [device.pinned(self._slot_bytes) for _ in range(_STAGING_SLOTS)]
        for event in self._events[self._next]:
            event.synchronize()
        self._events[self._next].clear()
        return self._slots[self._next]

    def place(self) -> None:
        """Put what was received into `parts` in its place."""
        if not self._staged:
            return
        streams = []
        for device, target, slot in self._staged:
            streams.append(self._stream(device))
            streams[-1].copy(target, slot)
        self._events[self._next] = [stream.mark() for stream in dict.fromkeys(streams)]
        self._next = (self._next + 1) % _STAGING_SLOTS

    def device_place(self, extent: Extent) -> tuple[CopyDevice, DeviceStream, torch.Tensor]:
        """Where bytes go that come from a device: this lane's stream copies them there. Raises OSError if it is
        host memory."""
        if extent.segment not in self._device:
            raise OSError("its place is not on a device")
        target = self._device[extent.segment][extent.offset : extent.offset + extent.nbytes]
        device = device_of(target)
        assert device is not None
        return device, self._stream(device), target

    def _stream(self, device: CopyDevice) -> DeviceStream:
        if device not in self._streams:
            self._streams[device] = device.new_stream()
        return self._streams[device]

    def finish(self) -> None:
        """Wait until everything is in its place."""
        for stream in self._streams.values():
            stream.mark().synchronize()


class Receiver:
    """Memory for all segments of one manifest. The fetching thread, apart from its lanes.

    Args:
        manifest: of the state that is fetched.
        into: the target's own tree, or None. Nothing that is queued for its devices uses what it holds.
        chunk_bytes: the largest chunk.

    Raises HealError if there is not enough memory, or `into` lies on an unsupported device.
    """

    def __init__(self, manifest: Manifest, into: Any, chunk_bytes: int) -> None:
        self._manifest = manifest
        self._into = into
        self._chunk_bytes = chunk_bytes
        self._places = manifest.match(into)
        self._tensors: list[torch.Tensor | None] = list(self._places.direct)
        self._host: dict[int, torch.Tensor] = {}
        self._device: dict[int, torch.Tensor] = {}
        self._lanes: list[Lane] = []
        try:
            self._allocate()
        except (RuntimeError, MemoryError) as error:
            raise HealError(
                f"No memory for a state of {manifest.layout.total_bytes} bytes: {error}."
            ) from error

    def _allocate(self) -> None:
        layout = self._manifest.layout
        self._host[0] = torch.empty(layout.segment_bytes[0], dtype=torch.uint8)
        for index, (segment, _, _) in enumerate(layout.places):
            if segment == 0:
                continue
            tensor = self._tensors[index]
            if tensor is None:
                spec = self._manifest.specs[index]
                tensor = self._tensors[index] = torch.empty(spec.shape, dtype=spec.dtype)
            if tensor.device.type not in ("cpu", "cuda"):
                raise HealError(
                    f"into= holds a tensor on {tensor.device}; only CPU and CUDA can be healed in "
                    "place, pass into=None and load the result."
                )
            segments = self._host if device_of(tensor) is None else self._device
            # Not detach(), which shares the version counter: autograd may have saved this tensor for
            # a backward whose result is discarded anyway, and must not refuse to run it.
            segments[segment] = byte_view(tensor.data)

    def lane(self) -> Lane:
        """Memory for what one connection receives. Any thread."""
        lane = Lane(self._host, self._device, self._chunk_bytes)
        self._lanes.append(lane)
        return lane

    def extents(self, chunk: Chunk) -> list[Extent]:
        """Where the chunk's bytes lie. Any thread."""
        return self._manifest.layout.extents(chunk)

    def finish(self, *, allow_objects: bool) -> Any:
        """The tree, once every chunk is in its place. Raises HealError."""
        layout = self._manifest.layout
        for lane in self._lanes:
            lane.finish()
        pool = self._host[0]
        pool_start = pool.data_ptr()
        for index, (segment, offset, nbytes) in enumerate(layout.places):
            if segment != 0:
                continue
            target = self._tensors[index]
            if target is None:
                spec = self._manifest.specs[index]
                target = self._tensors[index] = torch.empty(spec.shape, dtype=spec.dtype)
            if nbytes and target.is_cpu:  # contiguous, as all in `direct`
                to, source = target.data_ptr(), pool_start + offset
                MEMORY[to : to + nbytes] = MEMORY[source : source + nbytes]
            elif nbytes:
                byte_view(target.data).copy_(pool[offset : offset + nbytes])
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        return self._manifest.build(tensors, self._places, self._into, allow_objects=allow_objects)
