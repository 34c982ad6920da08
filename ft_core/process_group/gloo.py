"""Gloo: the reconfigurable process group for tensors in host memory. Those of a device are copied there.

torch's own Gloo takes tensors of a device in some collectives only, and its futures are ordered with the device's
default stream only. Here they travel through pinned host memory (`Staging`), in order:

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

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from ft_core.errors import ProcessGroupError, UnderCapture
from ft_core.process_group.device_memory import (
    CopyDevice,
    DeviceEvent,
    DeviceStream,
    device_of,
)
from ft_core.process_group.gloo_sockets import (
    DeviceSockets,
    orphaned_operations,
    pair_sequences,
    workers_asleep,
)
from ft_core.process_group.reconfigurable import Communicator, ReconfigurableProcessGroup
from ft_core.process_group.rendezvous import Rendezvous, RendezvousStore
from ft_core.process_group.torch_versions import native_or_not, native_reconfigure_available
from ft_core.process_group.work import (
    PlainWork,
    copy_of,
    fills_its_memory,
    finish_with,
    outputs_of,
    tensors_in,
)
from lighthouse.own_address import choose_address
from lighthouse.waits import in_time

_log = logging.getLogger(__name__)
_CONNECT_MARGIN_S = 30.0
_ON_ITS_MEMORY = ("allreduce", "broadcast", "reduce", "scatter")
"""The collectives that Gloo does in the memory of their tensors, without a look at strides."""


class ProcessGroupGloo(ReconfigurableProcessGroup):
    """A Gloo group, whose members can change. Methods, errors and threads: see `ProcessGroup`.

    Tensors on CUDA travel through host memory (`Staging`): in a collective all
    members have theirs there, or none has. Its works and futures order CUDA streams, once Gloo is done.

    Args:
        timeout: seconds or timedelta; bounds a collective that is not revoked.
        hostname, interface: choose the address to bind and to advertise (give at most one of them);
            the default is the outgoing address.
        native: whether to use torch's own reconfiguration instead of a new Gloo group for every
            quorum; the default is to, where torch has it.

    Raises `ValueError` for bad options.
    """

    host_only = True

    def __init__(
        self,
        timeout: timedelta | float = 60.0,
        *,
        hostname: str | None = None,
        interface: str | None = None,
        native: bool | None = None,
    ) -> None:
        super().__init__(timeout, hostname=hostname, interface=interface)
        self._native = native_or_not(
            native, native_reconfigure_available(), "native reconfiguration"
        )
        self._staging: dict[CopyDevice, Staging] = {}
        self.on_device = False  # until a tensor comes from one

    @property
    def capturing(self) -> bool:
        return any(device.capturing() for device in self._staging)

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        """Raises ValueError for a tensor that is not all of its memory."""
        if operation in _ON_ITS_MEMORY:
            for tensor in args[0]:
                if isinstance(tensor, Tensor) and tensor.is_cpu and not fills_its_memory(tensor):
                    raise ValueError(
                        f"{operation} of a tensor of shape {tuple(tensor.shape)} and stride "
                        f"{tuple(tensor.stride())}: Gloo would take memory between its values for them. Pass "
                        "tensor.contiguous()"
                    )
        return super().issue(operation, *args, **kwargs)

    def _issue_staged(self, device: CopyDevice, operation: str, *args: Any, **kwargs: Any) -> Work:
        """Through host memory. Raises `UnderCapture` while a graph is captured."""
        if device not in self._staging:
            self._staging[device], self.on_device = Staging(device), True
        return self._staging[device].issue(self._issue_here, operation, *args, **kwargs)

    def getBackendName(self) -> str:
        return "ft-gloo"

    def _new_communicator(self, rank: int, world_size: int) -> Communicator:
        host = choose_address(self._hostname, self._interface)
        return GlooCommunicator(host, self.timeout_s, rank, world_size, native=self._native)


class GlooCommunicator(Communicator):
    """One Gloo device and the group on it."""

    def __init__(
        self, host: str, timeout_s: float, rank: int, world_size: int, *, native: bool
    ) -> None:
        self.backend: Any = None
        self._host = host
        self.timeout_s = timeout_s
        self._native = native
        self._store = RendezvousStore()
        self._lock = threading.Lock()  # no interrupt while the device goes away
        self._sockets: DeviceSockets | None = None
        self._sequences: list[int] = []
        self._handle = b""
        self._closed = False
        self._world_size = world_size
        if native:
            self.backend = dist.ProcessGroupGloo(
                self._store, rank, world_size, self._options(timeout_s)
            )
            self._handle = self.backend.get_reconfigure_handle().encode()

    @property
    def reconnectable(self) -> bool:
        return self._native

    def handle(self) -> bytes:
        with self._lock:
            if self._sockets is not None:
                self._sockets.open_door()  # a peer that has the handle may connect
        return self._handle

    def connect(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        # Only while connecting, as the callback closes a reference cycle.
        self._store.rendezvous, self._store.on_publish = rendezvous, self._published
        # Gloo's own timeout must not come first: it would leave a callback behind for a pair that
        # is gone, and a member that dials in afterwards crashes the process.
        patience_s = timeout_s + _CONNECT_MARGIN_S
        try:
            if self._native and all(rendezvous.handles):
                self._reconfigure(rendezvous, patience_s)
            else:
                self._build(rendezvous, patience_s)
            with self._lock:
                if self._sockets is not None:
                    self._sockets.close_door()
        finally:
            self._store.rendezvous = self._store.on_publish = None
            self._sequences = []

    def interrupt(self) -> None:
        with self._lock:
            if self._sockets is not None:
                self._sockets.shut()
                if self._sequences:
                    self._sockets.knock(self._sequences)

    def quiescent(self) -> bool:
        return workers_asleep()

    def unanswered(self) -> set[str]:
        with self._lock:
            return set() if self._sockets is None else self._sockets.unanswered()

    def operation_orphaned(self, until: float) -> None:
        super().operation_orphaned(until)
        orphaned_operations.add(self, until)

    def close(self, end_works: Callable[[], None]) -> None:
        with self._lock:
            self._closed = True
            self._sockets = None
            backend, self.backend = self.backend, None
        del backend  # outside the lock: takes 10 to 30 ms, or as long as an orphaned operation
        orphaned_operations.gone(self)

    def _options(self, timeout_s: float) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)
        ]
        options._timeout = timedelta(seconds=timeout_s)
        if self._native:
            options.enable_reconfigure = True
        return options

    def _published(self, blob: bytes) -> None:
        """Gloo has published its address: now its descriptors can be found. Builder thread."""
        sequences = pair_sequences(blob, self._world_size)
        if self._sockets is None:
            sockets = DeviceSockets.find(blob)
            if sockets is None:
                _log.warning(
                    "this system does not show Gloo's sockets: a revoked collective ends at its "
                    "timeout only"
                )
            with self._lock:
                self._sockets = sockets
        self._sequences = sequences

    def _build(self, rendezvous: Rendezvous, patience_s: float) -> None:
        self._world_size = len(rendezvous.handles)
        self.backend = None
        backend = dist.ProcessGroupGloo(
            self._store, rendezvous.rank, self._world_size, self._options(patience_s)
        )
        backend._set_default_timeout(timedelta(seconds=self.timeout_s))
        with self._lock:
            if not self._closed:
                self.backend = backend

    def _reconfigure(self, rendezvous: Rendezvous, patience_s: float) -> None:
        self._world_size = len(rendezvous.handles)
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid = rendezvous.quorum_id
        options.handles = [(handle or b"").decode() for handle in rendezvous.handles]
        options.timeout = timedelta(seconds=patience_s)
        self.backend.reconfigure(options).wait()
        self._handle = self.backend.get_reconfigure_handle().encode()


# ---------------------------------------------------------------- tensors of a device

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
    results = {id(tensor) for tensor in tensors_in(outputs_of(operation, args))}
    piece.back = [pair for pair in piece.pairs if id(pair[0]) in results]
    yield piece


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
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        if not in_time(self._ended.wait, deadline):
            raise ProcessGroupError(f"{self._operation} has not ended within {timeout}")
        if self._error is not None:
            raise copy_of(self._error)
        assert self._end is not None
        self._device.current().after(self._end)
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()
