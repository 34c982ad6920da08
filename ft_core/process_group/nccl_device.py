"""What the NCCL group stands on: one device, its streams and events, and torch's NCCL on it.

`NcclDevice` is the seam between the group and the hardware. The product has two devices, one for each
of torch's NCCL backends. Tests pass one that keeps NCCL's semantics on the CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from ft_core.errors import ProcessGroupError
from ft_core.process_group.device_memory import DeviceEvent
from ft_core.process_group.rendezvous import Rendezvous

_CONNECTED_CHECK_S = 0.001


class NcclDevice(Protocol):
    """One device with NCCL. See the module's docstring."""

    def enter(self) -> None:
        """Make it the calling thread's device: a thread begins with device 0. Any thread; cheap."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on a device, so that NCCL can take it."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        ...

    def new_backend(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        """A backend for one quorum, not connected yet. `timeout_s` bounds a collective."""
        ...

    def handle(self, backend: Any) -> bytes:
        """What the other members must know of it before it connects; b"" if nothing."""
        ...

    def connect(self, backend: Any, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Connect it to the members of the rendezvous, its store's own. Blocks; may raise anything."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """A context in which the thread's stream is another one than the model's."""
        ...

    def end_of(self, work: Work) -> DeviceEvent:
        """The end of a collective that was just started, apart from the model's stream."""
        ...


class CudaDevice:
    """A CUDA device with torch's `nccl2` backend, which is "nccl" from torch 2.14 on.

    `enable_reconfigure` makes an abort and torch's watchdog revoke the communicator, whatever
    TORCH_NCCL_ASYNC_ERROR_HANDLING says; without it they end the process. A backend is used for one
    quorum: torch's `reconfigure` of an old one aborts the communicator and makes a new one, too.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_backend(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.enable_reconfigure = True
        return dist.distributed_c10d.ProcessGroupNCCL2(store, rank, size, options, None)

    def handle(self, backend: Any) -> bytes:
        return str(backend.get_reconfigure_handle()).encode()

    def connect(self, backend: Any, rendezvous: Rendezvous, timeout_s: float) -> None:
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid = rendezvous.quorum_id
        options.handles = [(handle or b"").decode() for handle in rendezvous.handles]
        options.timeout = timedelta(seconds=timeout_s)
        # It takes the calling thread's device. A device that the constructor is given would connect at
        # once.
        backend.reconfigure(options).wait()

    def aside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)

    def end_of(self, work: Work) -> DeviceEvent:
        with self.aside():
            work.wait()  # orders the stream aside after it, and returns at once
            return torch.cuda.current_stream().record_event()


class ClassicCudaDevice(CudaDevice):
    """A CUDA device with torch's classic NCCL backend (torch 2.11 to 2.13)."""

    def new_backend(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # so that an abort can end a blocked initialization
        # The backend reads it now. Another mode ends the process on an error, which is right for
        # groups inside of a replica group: those keep what the user has set.
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return dist.ProcessGroupNCCL(store, rank, size, options)

    def handle(self, backend: Any) -> bytes:
        return b""

    def connect(self, backend: Any, rendezvous: Rendezvous, timeout_s: float) -> None:
        # NCCL would connect at the first collective, and read the store then. Without blocking, only
        # the end of a collective shows that it is connected.
        backend.eager_connect_single_device(self._device)
        first = torch.zeros(1, device=self._device)
        connected = self.end_of(backend.allreduce([first], dist.AllreduceOptions()))
        give_up_at = time.monotonic() + timeout_s
        while not connected.query():
            if backend.get_error().name != "SUCCESS" or time.monotonic() > give_up_at:
                raise ProcessGroupError("NCCL has not connected its members")
            time.sleep(_CONNECTED_CHECK_S)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """An environment variable that has `value` for a moment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
