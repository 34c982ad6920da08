"""Where a heal's bytes go on the target: its own tensors where they fit, new memory elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from ft_core.heal.checksum import checksum
from ft_core.heal.format import Manifest, byte_view
from ft_core.heal.protocol import Chunk, HealError

_STAGING_SLOTS = 3


class _DeviceSegment:
    """A tensor on a device. Its chunks pass through pinned host memory and a stream of their own.

    A slot is written again only after its copy has ended. This follows the documented semantics of
    streams and events; it has not run on a GPU yet.
    """

    def __init__(self, tensor: torch.Tensor, slots: list[torch.Tensor], stream: Any) -> None:
        self._bytes = byte_view(tensor)
        self._slots = slots
        self._events: list[Any] = [None] * len(slots)
        self._stream = stream
        self._next = 0

    def slot(self, nbytes: int) -> torch.Tensor:
        """The next free staging memory."""
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        return self._slots[self._next][:nbytes]

    def commit(self, chunk: Chunk) -> None:
        """Start the copy of what was received into the current slot."""
        with torch.cuda.stream(self._stream):
            target = self._bytes[chunk.offset : chunk.offset + chunk.nbytes]
            target.copy_(self._slots[self._next][: chunk.nbytes], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._slots)


class Receiver:
    """Memory for all segments of one manifest. One thread.

    Args:
        manifest: of the state that is fetched.
        into: the target's own tree, or None.
        chunk_bytes: the largest chunk.

    Raises HealError if there is not enough memory, or `into` lies on an unsupported device.
    """

    def __init__(self, manifest: Manifest, into: Any, chunk_bytes: int) -> None:
        self._manifest = manifest
        self._into = into
        self._chunk_bytes = chunk_bytes
        self._places = manifest.match(into)
        self._tensors: list[torch.Tensor | None] = list(self._places.direct)
        self._streams: dict[torch.device, Any] = {}
        self._host: dict[int, torch.Tensor] = {}
        self._device: dict[int, _DeviceSegment] = {}
        try:
            self._allocate()
        except (RuntimeError, MemoryError) as error:
            raise HealError(
                f"No memory for a state of {manifest.layout.total_bytes} bytes: {error}."
            ) from error

    def _allocate(self) -> None:
        layout = self._manifest.layout
        self._host[0] = torch.empty(layout.segment_bytes[0], dtype=torch.uint8)
        for index, (spec, place) in enumerate(
            zip(self._manifest.specs, layout.places, strict=True)
        ):
            if place.segment == 0:
                continue
            tensor = self._tensors[index]
            if tensor is None:
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                self._tensors[index] = tensor
            if tensor.device.type == "cpu":
                self._host[place.segment] = byte_view(tensor)
            else:
                self._device[place.segment] = self._staged(tensor)

    def _staged(self, tensor: torch.Tensor) -> _DeviceSegment:
        if tensor.device.type != "cuda":
            raise HealError(
                f"into= holds a tensor on {tensor.device}; only CPU and CUDA can be healed in "
                "place, pass into=None and load the result."
            )
        if tensor.device not in self._streams:
            # The heal thread's own device is 0: memory that is pinned there makes a context there.
            with torch.cuda.device(tensor.device):
                slots = [
                    torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True)
                    for _ in range(_STAGING_SLOTS)
                ]
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
            self._streams[tensor.device] = (stream, slots)
        stream, slots = self._streams[tensor.device]
        return _DeviceSegment(tensor, slots, stream)

    def slot(self, chunk: Chunk) -> torch.Tensor:
        """Host memory (uint8, 1-D, `chunk.nbytes` long) to receive this chunk into."""
        if chunk.segment in self._device:
            return self._device[chunk.segment].slot(chunk.nbytes)
        return self._host[chunk.segment][chunk.offset : chunk.offset + chunk.nbytes]

    def accept(self, chunk: Chunk, slot: torch.Tensor, expected: bytes) -> bool:
        """Check what was received into `slot` and, if it is right, put it in its place."""
        if checksum(slot) != expected:
            return False
        self.place(chunk)
        return True

    def place(self, chunk: Chunk) -> None:
        """Put what was received into the chunk's slot in its place."""
        if chunk.segment in self._device:
            self._device[chunk.segment].commit(chunk)

    def finish(self, *, allow_objects: bool) -> Any:
        """The tree, once every chunk is in its place. Raises HealError."""
        layout = self._manifest.layout
        for stream, _ in self._streams.values():
            stream.synchronize()
        pool = self._host[0]
        for index, (spec, place) in enumerate(
            zip(self._manifest.specs, layout.places, strict=True)
        ):
            if place.segment != 0:
                continue
            raw = pool[place.offset : place.offset + place.nbytes]
            target = self._tensors[index]
            if target is None:
                target = torch.empty(spec.shape, dtype=spec.dtype)
                self._tensors[index] = target
            if place.nbytes:
                byte_view(target).copy_(raw)
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        return self._manifest.build(tensors, self._places, self._into, allow_objects=allow_objects)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """The writable memory of a uint8 host tensor."""
    return tensor.numpy().data
