"""NCCL: the reconfigurable process group for CUDA tensors.

Written from torch's documented behaviour and the headers of 2.13 to 2.15; it has not been run on a
GPU in this project. Treat it as untested until it has.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ft_core.process_group.reconfigurable import Communicator, ReconfigurableProcessGroup
from ft_core.process_group.rendezvous import Rendezvous, RendezvousStore

_log = logging.getLogger(__name__)
_CONNECT_MARGIN_S = 30.0


class ProcessGroupNCCL(ReconfigurableProcessGroup):
    """An NCCL group for CUDA tensors, whose members can change. Methods, errors and threads: see
    `ProcessGroup`.

    It has NOT RUN ON A GPU in this project yet. Tests cover only that its constructor refuses a machine
    without one, and what it shares with Gloo: rendezvous, revocation, works.

    With torch 2.14 and later and `native` (the default there), the `nccl2` backend reconfigures
    itself. Otherwise every quorum gets a new communicator, and the old one is aborted.
    `ncclCommAbort` may block when a kernel hangs, so it runs in a thread of its own and `revoke`
    does not wait for it.

    `wait()` on a work blocks the current CUDA stream, not the host. A revoked collective leaves
    garbage in its tensors, so ask `errored()` after synchronizing and before using them. Set
    TORCH_NCCL_ASYNC_ERROR_HANDLING=0 in the environment of the process, or torch's watchdog ends
    the process on an error.

    Args:
        timeout: seconds or timedelta; bounds connecting, and a collective that is not revoked.
        hostname, interface: choose the address to bind and to advertise (at most one of them); the
            default is the outgoing address.
        device: of the tensors; the default is the current CUDA device.
        native: whether to use `nccl2`; the default is to, where torch has it.

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
    ) -> None:
        super().__init__(timeout, hostname=hostname, interface=interface)
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise RuntimeError("NCCL needs a CUDA device and a torch built with it; use Gloo here")
        if native and not hasattr(dist.distributed_c10d, "ProcessGroupNCCL2"):
            raise ValueError("this torch has no nccl2 backend (2.14 and later); drop native")
        available = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
        self._native = available if native is None else native
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self._device = torch.device("cuda", index)

    def getBackendName(self) -> str:
        return "ft-nccl"

    def _new_communicator(self, rank: int, world_size: int) -> Communicator:
        if self._native:
            return _Nccl2Communicator(self.timeout_s, rank, world_size)
        return _NcclCommunicator(self.timeout_s, self._device)


class _NcclBase(Communicator):
    """What both backends share: a store, and an abort that can't block its caller."""

    backend_futures = True  # NCCL's futures carry CUDA events; its works end by stream order

    def __init__(self, timeout_s: float) -> None:
        self.backend: Any = None
        self._timeout_s = timeout_s
        self._store = RendezvousStore()
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None

    def interrupt(self) -> None:
        with self._lock:
            backend = self.backend
            if backend is None or self._aborting is not None:
                return
            self._aborting = threading.Thread(
                target=self._abort, args=(backend,), name="ft-pg-nccl-abort", daemon=True
            )
            self._aborting.start()

    @staticmethod
    def _abort(backend: Any) -> None:
        try:
            backend.abort()
        except Exception as error:  # it is discarded anyway
            _log.warning("aborting an NCCL communicator failed: %s", error)

    def quiescent(self) -> bool:
        aborting = self._aborting
        return aborting is None or not aborting.is_alive()

    def close(self) -> None:
        self.interrupt()
        if self._aborting is not None:
            self._aborting.join(self._timeout_s)
        self.backend = None


class _NcclCommunicator(_NcclBase):
    """A communicator of torch's classic NCCL backend, for one quorum."""

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        super().__init__(timeout_s)
        self._device = device

    @property
    def reconnectable(self) -> bool:
        return False

    def handle(self) -> bytes:
        return b""

    def connect(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._store.rendezvous = rendezvous
        try:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            options.config.blocking = 0  # so that an abort can end a blocked initialization
            backend = dist.ProcessGroupNCCL(
                self._store, rendezvous.rank, len(rendezvous.handles), options
            )
            self.backend = backend
            # NCCL would connect at the first collective, and read the store then.
            backend.eager_connect_single_device(self._device)
        finally:
            self._store.rendezvous = None


class _Nccl2Communicator(_NcclBase):
    """An `nccl2` backend, which takes other members while it lives (torch 2.14 and later)."""

    def __init__(self, timeout_s: float, rank: int, world_size: int) -> None:
        super().__init__(timeout_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.enable_reconfigure = True
        backend_class = dist.distributed_c10d.ProcessGroupNCCL2
        self.backend = backend_class(self._store, rank, world_size, options, None)

    @property
    def reconnectable(self) -> bool:
        return self._aborting is None  # an aborted backend is not used again

    def handle(self) -> bytes:
        return str(self.backend.get_reconfigure_handle()).encode()

    def connect(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._store.rendezvous = rendezvous
        try:
            options = dist.distributed_c10d.ReconfigureOptions()
            options.uuid = rendezvous.quorum_id
            options.handles = [(handle or b"").decode() for handle in rendezvous.handles]
            options.timeout = timedelta(seconds=timeout_s + _CONNECT_MARGIN_S)
            self.backend.reconfigure(options).wait()
        finally:
            self._store.rendezvous = None
