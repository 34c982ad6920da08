"""Collectives of Gloo with tensors of a device: they travel through pinned host memory.

torch's own Gloo takes them in some collectives only, and its futures are ordered with the device's default stream only.
Here, in order:

1. A stream of the group's own waits for what the caller's stream has queued, and copies the tensors to the host.
   Flat tensors of an all-reduce go in pieces: one is summed while the next one is copied.
2. The caller's thread waits until a piece is there, and starts its collective: all members start theirs in one
   order, those of the host's tensors too.
3. When a piece is summed, another stream copies it back.
4. `wait()` blocks the host until Gloo is done, and makes the caller's stream wait for the last copy. A future orders
   the streams of those that wait for it in the same way.

A collective that fails leaves its tensors undefined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from ft_core.errors import ProcessGroupError, UnderCapture
from ft_core.process_group.device_memory import CopyDevice, DeviceEvent, DeviceStream, device_of
from ft_core.process_group.work import PlainWork, copy_of, finish_with, outputs_of

PIECE_BYTES = 4 << 20
"""Of an all-reduce: the same on all members."""


@dataclass(slots=True)
class _Piece:
    """A part of a collective. `pairs`: of tensors on the device and in host memory; `back`: of those that
    are results."""

    device: CopyDevice
    args: tuple[Any, ...] = ()
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def on_host(self, value: Any) -> Any:
        """`value`, an argument, with host memory in place of each tensor of the device."""
        if isinstance(value, list | tuple):
            return [self.on_host(each) for each in value]
        if not isinstance(value, Tensor) or device_of(value) is None:
            return value
        memory = self.device.pinned(value.numel() * value.itemsize)
        made = memory.view(value.dtype).view(value.shape)
        self.pairs.append((value, made))
        return made


def _pieces(device: CopyDevice, operation: str, args: tuple[Any, ...]) -> Iterator[_Piece]:
    if operation == "allreduce" and len(args[0]) == 1 and args[0][0].is_contiguous():
        flat = args[0][0].detach().view(-1)
        for part in flat.split(max(1, PIECE_BYTES // flat.itemsize)):
            piece = _Piece(device)
            piece.args = ([piece.on_host(part)], *args[1:])
            piece.back = piece.pairs
            yield piece
        return
    piece = _Piece(device)
    piece.args = tuple(piece.on_host(value) for value in args)
    results = {id(tensor) for tensor in _tensors(outputs_of(operation, args))}
    piece.back = [pair for pair in piece.pairs if id(pair[0]) in results]
    yield piece


def _tensors(value: Any) -> Iterator[Tensor]:
    """In (nested) lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)


class Staging:
    """The copies of one group with one device."""

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self._down, self._up = device.new_stream(), device.new_stream()

    def issue(self, start: Callable[..., Work], operation: str, *args: Any, **kwargs: Any) -> Work:
        """As `ProcessGroup.issue`, and blocks until the device has computed and copied the tensors. `start`
        starts a collective of the host's tensors. Raises `UnderCapture` while a graph is captured."""
        if self._device.capturing():
            raise UnderCapture(operation)
        pieces = list(_pieces(self._device, operation, args))
        self._down.after(self._device.current().mark())
        there = []
        for piece in pieces:
            for on_device, on_host in piece.pairs:
                self._down.copy(on_host, on_device.detach())
            there.append(self._down.mark())
        work = StagedWork(
            self._device, self._up, operation, outputs_of(operation, args), len(pieces)
        )
        for piece, event in zip(pieces, there, strict=True):
            event.synchronize()
            work.follow(piece, start(operation, *piece.args, **kwargs))
        return work


class StagedWork(PlainWork):
    """A collective whose tensors are copied back when it has ended. Any thread."""

    def __init__(
        self, device: CopyDevice, up: DeviceStream, operation: str, outputs: Any, pieces: int
    ) -> None:
        super().__init__()
        self._device, self._up, self._value = device, up, outputs
        self._operation = operation
        self._lock = threading.Lock()  # guards `_left` and `_error`
        self._left = pieces

        self._end: DeviceEvent | None = None
        self._ended = threading.Event()
        self._gate = device.future()
        self._future = self._gate.then(self._unpack)

    def follow(self, piece: _Piece, work: Work) -> None:
        """One of the pieces was started."""

        def end(error: Exception | None) -> Tensor:
            if error is not None:
                error = work.exception() or error  # a future wraps errors into its own
            self._piece_ended(piece, error)
            return piece.pairs[0][1]

        finish_with(work, end)

    def _piece_ended(self, piece: _Piece, error: Exception | None) -> None:
        try:
            if error is None:
                for on_device, on_host in piece.back:
                    self._up.copy(on_device.detach(), on_host)
        except Exception as caught:  # in a thread of the backend: the work tells
            error = caught
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        self._end = self._up.mark()
        self._ended.set()
        self._up.complete(self._gate, self._value)

    def _unpack(self, gate: Future[Any]) -> Any:
        if self._error is not None:
            raise copy_of(self._error)
        return self._value

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See the module's docstring. Raises the error of the collective, a `ProcessGroupError`. `timeout`
        bounds this wait only; zero: no timeout."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._ended.wait(seconds):
            raise ProcessGroupError(f"{self._operation} has not ended after {seconds} s")
        if self._error is not None:
            raise copy_of(self._error)
        assert self._end is not None
        self._device.current().after(self._end)
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()
