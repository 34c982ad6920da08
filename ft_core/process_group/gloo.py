"""Gloo: the reconfigurable process group for tensors in host memory. Those of a device are copied there."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Work

from ft_core.process_group.device_memory import CopyDevice, first_device
from ft_core.process_group.gloo_sockets import (
    DeviceSockets,
    orphaned_operations,
    pair_sequences,
    workers_asleep,
)
from ft_core.process_group.reconfigurable import Communicator, ReconfigurableProcessGroup
from ft_core.process_group.rendezvous import Rendezvous, RendezvousStore
from ft_core.process_group.staged import Staging
from ft_core.process_group.torch_versions import native_or_not, native_reconfigure_available
from lighthouse.own_address import choose_address

_log = logging.getLogger(__name__)
_CONNECT_MARGIN_S = 30.0


class ProcessGroupGloo(ReconfigurableProcessGroup):
    """A Gloo group, whose members can change. Methods, errors and threads: see `ProcessGroup`.

    Tensors on CUDA travel through host memory (`staged`): in a collective all
    members have theirs there, or none has. Its works and futures order CUDA streams, once Gloo is done.

    Args:
        timeout: seconds or timedelta; bounds a collective that is not revoked.
        hostname, interface: choose the address to bind and to advertise (give at most one of them);
            the default is the outgoing address.
        native: whether to use torch's own reconfiguration instead of a new Gloo group for every
            quorum; the default is to, where torch has it.

    Raises `ValueError` for bad options.
    """

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

    def _issue_elsewhere(
        self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Work | None:
        """Through host memory, for tensors on CUDA. Raises `UnderCapture` while a graph is captured."""
        device = first_device(args)
        if device is None:
            return None
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
        self._timeout_s = timeout_s
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
                self._sockets.open_door()  # whoever has the handle may connect
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
        orphaned_operations.add(until)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._sockets = None
            backend, self.backend = self.backend, None
        del backend  # outside the lock: takes 10 to 30 ms, or as long as an orphaned operation

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
        backend._set_default_timeout(timedelta(seconds=self._timeout_s))
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
