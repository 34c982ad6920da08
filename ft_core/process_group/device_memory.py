"""Copies between a device's memory and the host's, apart from the model's stream.

The one place that knows how CUDA does it; heals and collectives of Gloo copy through it. Tests add a
device of their own to `finders`, whose streams are queues that may be late.

Streams and events are CUDA's: what is queued in a stream runs in its order, after those events that it was
told to wait for, and at some time that the host does not know until it waits for an event.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves


class DeviceEvent(Protocol):
    """A point in a stream's queue. Any thread."""

    def query(self) -> bool:
        """Whether the device has come past it."""
        ...

    def synchronize(self) -> None:
        """Block the host until the device has."""
        ...


class DeviceStream(Protocol):
    """A queue of work for a device. Any thread; nothing blocks the host."""

    def after(self, event: DeviceEvent) -> None:
        """What is queued from now on begins when the device has come past `event`."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between the device and pinned memory, or within the device."""
        ...

    def read(self, target: Tensor, address: int) -> None:
        """Copy to the device what lies at an address of borrowed memory (`CopyDevice.borrow`)."""
        ...

    def mark(self) -> DeviceEvent:
        """The end of what was queued so far."""
        ...

    def complete(self, future: Future[Any], value: Any) -> None:
        """Complete a future of the device: what uses the tensors in `value` through it runs after
        what was queued."""
        ...


class CopyDevice(Protocol):
    """A device as copies see it. Any thread."""

    def current(self) -> DeviceStream:
        """The calling thread's stream: the model's, in its thread."""
        ...

    def new_stream(self) -> DeviceStream:
        """Another one, which shares the device with the model's."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory (uint8) that the device reads and writes by itself."""
        ...

    def future(self) -> Future[Any]:
        """One that may hold the device's tensors."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        ...

    def synchronize(self) -> None:
        """Block the host until all is done that was queued in any stream."""
        ...

    def lend(self, tensor: Tensor) -> tuple[int, int, bytes] | None:
        """(address, bytes, handle) of the allocation in which a tensor lies: with the handle another process of
        this machine reads it. None: it can't."""
        ...

    def borrow(self, handle: bytes) -> int:
        """The address at which streams of this device `read` the allocation that another process lends. Raises
        OSError if it can't be reached from here."""
        ...

    def give_back(self, address: int) -> None:
        """What was borrowed: no read from it is under way any more, and none will begin."""
        ...


_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def let_others_capture() -> None:
    """Let the calling thread ask for events and pin memory while another one captures a CUDA graph.

    Else CUDA refuses it and the capture fails, in the mode that `torch.cuda.graph` uses by default. What
    this thread captures itself is guarded as before. Any thread; cheap.
    """
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _CudaEvent(torch.cuda.Event):
    def query(self) -> bool:
        let_others_capture()
        return bool(super().query())


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @contextmanager
    def _current(self) -> Iterator[None]:
        # A thread of Gloo or of a heal has device 0. At its end `torch.cuda.stream` goes back to that, which
        # makes a context there; `torch.cuda.device` goes back only where there is one.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield

    def after(self, event: Any) -> None:
        self._stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._current(), torch.no_grad():
            target.copy_(source, non_blocking=True)
        for each in (target, source):
            if each.is_cuda:  # its memory has no other use before the copy's end
                each.record_stream(self._stream)

    def read(self, target: Tensor, address: int) -> None:
        # Not torch's copy: the memory may be another GPU's, on which that would make a context.
        _enter_context(self._stream.device)
        _checked(
            _driver().cuMemcpyAsync(
                ctypes.c_uint64(target.data_ptr()),
                ctypes.c_uint64(address),
                ctypes.c_size_t(target.nbytes),
                ctypes.c_void_p(self._stream.cuda_stream),
            )
        )
        target.record_stream(self._stream)

    def mark(self) -> DeviceEvent:
        event = _CudaEvent(blocking=True)  # a thread that waits for it sleeps
        self._stream.record_event(event)
        return event

    def complete(self, future: Future[Any], value: Any) -> None:
        with self._current():
            future.set_result(value)


class _CudaCopies:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> DeviceStream:
        return _CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> DeviceStream:
        let_others_capture()
        return _CudaStream(torch.cuda.Stream(self._device))

    def pinned(self, nbytes: int) -> Tensor:
        let_others_capture()
        # A new thread's own device is 0: memory that is pinned there makes a context there.
        with torch.cuda.device(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def future(self) -> Future[Any]:
        return Future(devices=[self._device])

    def capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        let_others_capture()
        torch.cuda.synchronize(self._device)

    def lend(self, tensor: Tensor) -> tuple[int, int, bytes] | None:
        start, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        inside = ctypes.c_uint64(tensor.data_ptr())
        try:
            _enter_context(self._device)
            _checked(
                _driver().cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(nbytes), inside)
            )
            _checked(_driver().cuIpcGetMemHandle(ctypes.byref(handle), start))
        except OSError:  # memory of expandable segments or of a pool, or a machine that shares none
            return None
        return start.value, nbytes.value, bytes(handle)

    def borrow(self, handle: bytes) -> int:
        if len(handle) != ctypes.sizeof(_IpcHandle):
            raise OSError("that is no handle of a GPU's memory")
        _enter_context(self._device)
        here, theirs = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        _checked(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(here), theirs, _PEER_ACCESS))
        return here.value

    def give_back(self, address: int) -> None:
        _enter_context(self._device)
        _checked(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)))


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_PEER_ACCESS = ctypes.c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: it may lie on another GPU


def _checked(code: int) -> None:
    if code:
        raise OSError(f"CUDA's driver refused a call (error {code})")


def _enter_context(device: torch.device) -> None:
    """Make the process's context on this device that of the calling thread, for calls of the driver."""
    let_others_capture()
    _checked(_driver().cuCtxSetCurrent(_primary_context(device.index)))


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Never released: it is the one that torch uses, to the process's end."""
    context = ctypes.c_void_p()
    _checked(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


_cuda_copies = functools.cache(_CudaCopies)


def _cuda_of(tensor: Tensor) -> CopyDevice | None:
    return _cuda_copies(tensor.device) if tensor.is_cuda else None


finders: list[Callable[[Tensor], CopyDevice | None]] = [_cuda_of]
"""Each returns the device of a tensor, or None if it does not know it."""


def device_of(tensor: Tensor) -> CopyDevice | None:
    """The device on which a tensor lies; None: the host, or a device that copies do not know."""
    for find in finders:
        found = find(tensor)
        if found is not None:
            return found
    return None


def devices_of(tree: Any) -> set[CopyDevice]:
    """Those of all tensors in a tree."""
    found = (device_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {device for device in found if device is not None}


def synchronize(tree: Any) -> None:
    """Block the host until nothing that is queued uses the memory of any tensor in a tree."""
    for device in devices_of(tree):
        device.synchronize()


def first_device(values: Sequence[Any]) -> CopyDevice | None:
    """That of the first tensor which lies on one, in (nested) lists of tensors and other things."""
    for value in values:
        if isinstance(value, list | tuple):
            found = first_device(value)
        else:
            found = device_of(value) if isinstance(value, Tensor) else None
        if found is not None:
            return found
    return None
