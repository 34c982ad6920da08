"""NCCL: the reconfigurable process group for CUDA tensors.

Written from torch's source and tested on a double of NCCL's semantics on the CPU
(tests/harness/nccl_double.py). What has run on a GPU: docs/design.md, "CUDA", and benchmarks/RESULTS_GPU.md.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from ft_core.errors import ProcessGroupError, UnderCapture
from ft_core.process_group.device_memory import DeviceEvent, let_others_capture
from ft_core.process_group.gloo import GlooCommunicator
from ft_core.process_group.reconfigurable import Communicator, ReconfigurableProcessGroup
from ft_core.process_group.rendezvous import Rendezvous, RendezvousStore
from ft_core.process_group.torch_versions import native_or_not, nccl2_available
from ft_core.process_group.work import start_or_run
from lighthouse.own_address import choose_address
from lighthouse.waits import Overdue

_log = logging.getLogger(__name__)
_CONNECT_MARGIN_S = 30.0
_CONNECTED_CHECK_S = 0.001
_CONNECT_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"  # seconds
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_BLOCKING_WAIT = {"TORCH_NCCL_BLOCKING_WAIT": "0"}
_LEFT_ALONE = _BLOCKING_WAIT | {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    _DUMP: "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""With which a classic backend's own threads see an error, say so, and do nothing about it. By default they
hold the lock that the next collective needs for a minute, then end the process; they ask its store, which
is closed, for errors of other members; and a debugging mode turns the handling of errors on again."""


def outlive_nccl_errors(backend: str | None) -> None:
    """Keep torch's monitor (2.11 to 2.13) from ending this process 8 minutes after an error between groups.
    Called before a replica group makes a group of its own with that backend (None: torch's choice); what the
    user has set stays."""
    if torch.cuda.is_available() and "nccl" in (backend or "nccl"):
        os.environ.setdefault(_DUMP, "0")


class NcclDevice(Protocol):
    """What the NCCL group stands on: one device, its streams and events, and torch's NCCL on it.

    The product has two, one for each of torch's NCCL backends. Tests pass one that keeps NCCL's semantics
    on the CPU.
    """

    def enter(self) -> None:
        """Make it the calling thread's device: a thread begins with device 0. What the thread asks the device
        leaves graphs alone that other threads capture. Any thread; cheap."""
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
        """A context in which the thread's stream is not the model's."""
        ...

    def end_of(self, work: Work) -> DeviceEvent:
        """The end of a collective that was just started, apart from the model's stream."""
        ...


class CudaDevice(NcclDevice):
    """A CUDA device with torch's `nccl2` backend ("nccl" from torch 2.14 on).

    `enable_reconfigure` makes an abort and torch's watchdog revoke the communicator, whatever
    TORCH_NCCL_ASYNC_ERROR_HANDLING says; without it they end the process. A backend is used for one
    quorum: torch's `reconfigure` of an old one aborts the communicator and makes a new one, too.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream | None = None

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        let_others_capture()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_backend(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.enable_reconfigure = True
        with _environment(_BLOCKING_WAIT):  # else it has no watchdog, and `end_of` waits
            return dist.distributed_c10d.ProcessGroupNCCL2(store, rank, size, options)

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
    """A CUDA device with torch's classic NCCL backend (torch 2.11 to 2.13).

    Creating one warns where torch's own threads would end the process after an error between groups.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        backends = str(dist.get_backend_config()) if dist.is_initialized() else ""
        if "nccl" in backends and os.environ.get(_DUMP) not in ("0", "n", "no", "false"):
            _log.warning(
                "torch's monitor of this replica group's own NCCL group ends the process 8 minutes after "
                f"an error in any NCCL group: make it with ft_core.init_process_group, or set {_DUMP}=0 before"
            )

    def new_backend(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # so that NCCL's connecting ends at a timeout
        # The backend reads them now. Groups inside a replica group keep what the user has set: there an
        # error shall end the process.
        level = dist.get_debug_level()
        if level == dist.DebugLevel.DETAIL:  # which turns a desync debugger on
            dist.set_debug_level(dist.DebugLevel.INFO)
        try:
            with _environment(_LEFT_ALONE):
                return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            dist.set_debug_level(level)

    def handle(self, backend: Any) -> bytes:
        return b""

    def connect(self, backend: Any, rendezvous: Rendezvous, timeout_s: float) -> None:
        # NCCL would connect at the first collective, and read the store then. Without blocking, only
        # the end of a collective shows that it is connected.
        backend.eager_connect_single_device(self._device)
        first = torch.zeros(1, device=self._device)
        of_a_collective = backend.options._timeout
        # Of the next one, which connects: for the first time that takes seconds.
        backend.set_timeout(timedelta(seconds=timeout_s))
        # It holds the lock that an abort needs until all members are connected. By default for up to
        # half an hour; torch asks once in a process.
        limit = {_CONNECT_LIMIT: os.environ.get(_CONNECT_LIMIT, str(math.ceil(timeout_s)))}
        with _environment(limit):
            work = backend.allreduce([first], dist.AllreduceOptions())
        backend.set_timeout(of_a_collective)
        connected = self.end_of(work)
        give_up_at, overdue = time.monotonic() + timeout_s, Overdue()
        while not connected.query():
            late, said = overdue.passed(give_up_at, time.monotonic()), backend.get_error().name
            if late or said != "SUCCESS":
                why = f"it says {said}" if said != "SUCCESS" else f"within {timeout_s:g} s"
                raise ProcessGroupError(
                    f"NCCL has not connected its members ({why}); with NCCL_DEBUG=WARN it says more"
                )
            time.sleep(_CONNECTED_CHECK_S)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that have these values for a moment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class ProcessGroupNCCL(ReconfigurableProcessGroup):
    """An NCCL group for CUDA tensors, whose members can change. Methods, errors and threads: see
    `ProcessGroup`.

    Tensors in host memory travel over a Gloo group beside it, which has the same members and is revoked
    with it. So does `barrier`, which blocks the host and not a stream.

    Every quorum gets a communicator of its own. The old one is aborted, in a thread: an abort may
    block while a kernel hangs, and `revoke` does not wait for it.

    `wait()` on a work, and its future, order CUDA streams and do not block the host. NCCL tells them
    nothing of errors: a collective that was cut off leaves garbage in its tensors and ends like any
    other. So ask `settle()` before the results are relied on, as the manager does before each vote.

    Args:
        timeout: seconds or timedelta; bounds connecting, and a collective that is not revoked.
        hostname, interface: choose the address to bind and to advertise (at most one of them); the
            default is the outgoing address.
        device: of the tensors; the default is the current CUDA device.
        native: whether to use torch's `nccl2` backend; the default is to, where torch has it (2.14 and
            later).
        on: the device to stand on in place of a CUDA device, such as the tests' double; `device` and
            `native` mean nothing then.

    Raises `RuntimeError` without a CUDA device, `ValueError` for bad options.
    """

    def __init__(
        self,
        timeout: timedelta | float = 60.0,
        *,
        hostname: str | None = None,
        interface: str | None = None,
        device: torch.device | int | None = None,
        native: bool | None = None,
        on: NcclDevice | None = None,
    ) -> None:
        super().__init__(timeout, hostname=hostname, interface=interface)
        self._on = on or _cuda_device(device, native)

    def getBackendName(self) -> str:
        return "ft-nccl"

    @property
    def under_way(self) -> bool:
        self._on.enter()  # the control thread asks
        return super().under_way

    @property
    def capturing(self) -> bool:
        return self._on.capturing()

    def _issue_here(self, operation: str, *args: Any, watched: bool = True, **kwargs: Any) -> Work:
        """Raises `UnderCapture` while a CUDA graph is captured."""
        if self.capturing:
            raise UnderCapture(operation)
        if operation == "reduce_scatter" and self._on.holds(args[0][0]):
            operation, args = _in_one_tensor(args)
        options = next((each for each in args if getattr(each, "asyncOp", True) is False), None)
        if options is None:
            return super()._issue_here(operation, *args, watched=watched, **kwargs)
        # `torch.distributed` asks for it before it waits: the classic backend would return no work.
        options.asyncOp = True
        try:
            return super()._issue_here(operation, *args, watched=watched, **kwargs)
        finally:
            options.asyncOp = False

    def _new_communicator(self, rank: int, world_size: int) -> Communicator:
        address = choose_address(self._hostname, self._interface)
        host = GlooCommunicator(address, self.timeout_s, rank, world_size, native=False)
        return _NcclCommunicator(self._on, host, self.timeout_s, rank, world_size)


def _cuda_device(device: torch.device | int | None, native: bool | None) -> NcclDevice:
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        raise RuntimeError("NCCL needs a CUDA device and a torch built with it; use Gloo here")
    nccl2 = native_or_not(native, nccl2_available(), "nccl2 backend")
    index = None if device is None else torch.device(device).index
    kind = CudaDevice if nccl2 else ClassicCudaDevice
    return kind(torch.cuda.current_device() if index is None else index)


def _in_one_tensor(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """A reduce-scatter whose inputs, if they are alike, are copied into one tensor here.

    The classic backend would do it, and let go of its copy in the first wait, which is `end_of`'s.
    """
    (output,), (inputs,), *options = args
    if any(each.shape != inputs[0].shape for each in inputs):
        return "reduce_scatter", args
    flat = torch.cat([each.reshape(-1) for each in inputs])
    return "_reduce_scatter_base", (output, flat, *options)


class _NcclCommunicator(Communicator):
    """A communicator for one quorum, with another one for tensors in host memory.

    An abort can't block its caller.
    """

    def __init__(
        self, device: NcclDevice, host: GlooCommunicator, timeout_s: float, rank: int, size: int
    ) -> None:
        self._device, self._host = device, host
        self.timeout_s = timeout_s
        self._store = RendezvousStore()
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None
        self.enter_thread()
        prefixed = dist.PrefixStore("nccl", self._store)  # Gloo's keys travel the same way
        self.backend = device.new_backend(prefixed, rank, size, timeout_s)

    @property
    def reconnectable(self) -> bool:
        return False

    def enter_thread(self) -> None:
        self._device.enter()

    def handle(self) -> bytes:
        return self._device.handle(self.backend)

    def connect(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._host.connect(rendezvous, timeout_s)
        with self._lock:
            if self._aborting is not None:
                raise ProcessGroupError("interrupted while connecting")
        self._store.rendezvous = rendezvous
        try:
            # The group interrupts earlier than the backend gives up.
            self._device.connect(self.backend, rendezvous, timeout_s + _CONNECT_MARGIN_S)
        finally:
            self._store.rendezvous = None

    def backend_for(self, args: tuple[Any, ...]) -> Any:
        tensor = _first_tensor(args)
        on_device = tensor is not None and self._device.holds(tensor)
        return self.backend if on_device else self._host.backend

    def end_of(self, work: Work) -> _CollectiveEnd:
        return _CollectiveEnd(self, self._device, self._device.end_of(work))

    def error(self) -> Exception | None:
        """Why the collectives that have ended may not have reduced anything; None: they have.

        NCCL's kernels end without an error when their communicator is aborted. Both this class and
        torch's watchdog record the error before they abort, so one that is asked after the end of a
        kernel is told.
        """
        backend = self.backend
        if self._aborting is not None or backend is None:
            return ProcessGroupError("the communicator was aborted")
        error = backend.get_error()
        return None if error.name == "SUCCESS" else ProcessGroupError(f"NCCL says {error.name}")

    def interrupt(self) -> None:
        self._host.interrupt()
        with self._lock:
            if self._aborting is not None:
                return
            self._aborting = threading.Thread(
                target=self._abort, name="ft-pg-nccl-abort", daemon=True
            )
            start_or_run(self._aborting)

    def _abort(self) -> None:
        try:
            self.enter_thread()
            self.backend.abort()
        except Exception as error:  # it is discarded anyway
            _log.warning("aborting an NCCL communicator failed: %s", error)

    def quiescent(self) -> bool:
        aborting = self._aborting
        aborted = aborting is None or not aborting.is_alive()
        return aborted and self._host.quiescent()

    def unanswered(self) -> set[str]:
        return self._host.unanswered()

    def operation_orphaned(self, until: float) -> None:
        super().operation_orphaned(until)
        self._host.operation_orphaned(until)

    def close(self, end_works: Callable[[], None]) -> None:
        self.interrupt()
        assert self._aborting is not None
        self._aborting.join(self.timeout_s)
        self._host.close(end_works)
        if not self._aborting.is_alive():
            end_works()  # a work of nccl2 must not outlive its backend
            self.backend = None  # destroyed here: it joins threads of its own


def _first_tensor(args: Iterable[Any]) -> Tensor | None:
    """Of a collective's arguments, which may hold lists of lists."""
    for arg in args:
        found = _first_tensor(arg) if isinstance(arg, list | tuple) else arg
        if isinstance(found, Tensor):
            return found
    return None


class _CollectiveEnd:
    """The end of one collective on its device. See `work.DeviceEnd`."""

    def __init__(
        self, communicator: _NcclCommunicator, device: NcclDevice, event: DeviceEvent
    ) -> None:
        self.communicator, self._device, self._event = communicator, device, event

    def passed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def error(self) -> Exception | None:
        return self.communicator.error()

    def aside(self) -> Any:
        return self._device.aside()
