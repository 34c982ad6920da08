"""NCCL's semantics on the CPU: a device to give to `ProcessGroupNCCL`, and the wires between devices.

What is the same as on a GPU with torch's `nccl2` backend:

- A collective ends for the host when it is queued. Its `wait` and its future never tell of an error
  that comes later; `get_error` of the backend does. An aborted kernel ends like any other one, and
  leaves garbage (`POISON`) in its tensors.
- A backend has one stream, an ordered queue. `Wires.delay_s` slows each kernel down.
- The watchdog records an error before it revokes the communicator, and ends kernels thereby.
- Only tensors of the device are taken (`DoubleDevice.tensor` makes them).
- A work keeps no backend alive, and asks it: one that outlives it is a fault. So is a backend that is
  destroyed by a thread that can't wait for the backend's own. With `asyncOp` False there is no work.
- A thread has a device, 0 at first. A backend that is used in a thread with another device is a fault
  (`Wires.faults`).

What is not: a stream that waits for a kernel. On the CPU the thread is its own stream, so a `wait`
blocks it until the kernel has ended, however it ended.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.process_group.rendezvous import Rendezvous
from tests.harness.waiting import PATIENCE_S

POISON = -12345.0
_thread = threading.local()


class Error(enum.Enum):
    """torch's `ErrorType`."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2


class Wires:
    """The connections between the devices of a test."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.meetings: dict[tuple[bytes, int], dict[int, _Kernel]] = {}
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.faults: list[str] = []
        self.backends: list[_Backend] = []
        self.on_kernel: Callable[[], object] = lambda: None  # called when one is queued

    def cut(self, *, revoke: bool = True) -> None:
        """All connections fail: each watchdog records it, and revokes its communicator.

        `revoke` False: it has not come to that yet, and the kernels hang.
        """
        for backend in list(self.backends):
            backend.fail(Error.COMM_ERROR, revoke=revoke)


class _Kernel:
    """A collective in a stream. A `DeviceEvent`, too."""

    def __init__(
        self, run: Callable[[list[_Kernel]], None], tensors: list[Tensor], out: Any
    ) -> None:
        self.check_thread: Callable[[str], None]
        self.run, self.tensors, self.out = run, tensors, out
        self.garbage: list[Tensor] = []
        self.ended = threading.Event()

    def query(self) -> bool:
        if threading.current_thread().name.startswith("ft-"):
            self.check_thread("a query")
        return self.ended.is_set()

    def synchronize(self) -> None:
        assert self.ended.wait(PATIENCE_S), "a kernel hangs"


class _Work(dist.Work):
    """torch's view of a kernel."""

    def __init__(self, kernel: _Kernel, alive: _Alive) -> None:
        super().__init__()
        self.kernel, self._alive = kernel, alive
        alive.works += 1

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._alive.asked()
        self.kernel.synchronize()
        return True

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self.kernel.out)
        return future

    def is_completed(self) -> bool:
        self._alive.asked()
        return self.kernel.ended.is_set()

    def result(self) -> Any:
        return self.kernel.out

    def block_current_stream(self) -> None:
        self.wait()

    def __del__(self) -> None:
        self._alive.works -= 1
        self._alive.asked()


class _Alive:
    """Whether a backend is: its works keep none alive, ask it, and tell it of their own end."""

    def __init__(self, faults: list[str]) -> None:
        self.faults, self.works, self.backend = faults, 0, True

    def asked(self) -> None:
        if not self.backend:
            self.faults.append("a work asked its backend, which was destroyed")

    def destroyed(self) -> None:
        self.backend = False
        thread = threading.current_thread().name
        if not thread.startswith("ft-pg"):
            self.faults.append(f"a backend was destroyed in {thread}, and joined its threads there")


class _Handle:
    """The backend as Python holds it: the last reference destroys it."""

    def __init__(self, backend: _Backend, alive: _Alive) -> None:
        self._backend, self._alive = backend, alive

    def __getattr__(self, name: str) -> Any:
        if name not in _OPERATIONS:
            return getattr(self._backend, name)

        def issue(*args: Any) -> _Work | None:
            kernel = getattr(self._backend, name)(*args)
            # As the classic backend.
            return _Work(kernel, self._alive) if args[-1].asyncOp else None

        return issue

    def __del__(self) -> None:
        self._alive.destroyed()


_OPERATIONS = ("allreduce", "_allgather_base", "_reduce_scatter_base", "broadcast")


class _Backend:
    """torch's backend for one quorum."""

    def __init__(
        self, device: DoubleDevice, store: dist.Store, rank: int, size: int, timeout_s: float
    ) -> None:
        self.device, self.wires = device, device.wires
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.aborted = threading.Event()
        self._store, self._clique, self._issued = store, b"", 0
        self._error = Error.SUCCESS
        self._stream: queue.SimpleQueue[tuple[int, _Kernel] | None] = queue.SimpleQueue()

    # --- membership

    def connect(self, quorum_id: int, timeout_s: float) -> None:
        self.check_thread("reconfigure")
        if self.rank == 0:
            self._store.set("unique_id", f"{quorum_id}:{id(self)}")
        self._store.wait(["unique_id"], timedelta(seconds=timeout_s))
        self._clique = bytes(self._store.get("unique_id"))
        self.wires.backends.append(self)
        threading.Thread(target=self._run, name="double-stream", daemon=True).start()

    def get_error(self) -> Error:
        return self._error

    def abort(self) -> None:
        self.check_thread("abort")
        self._revoke()
        self._error = Error.COMM_ERROR  # as in torch: after the revocation

    def fail(self, error: Error, *, revoke: bool = True) -> None:
        """The watchdog has seen an error."""
        self._error = error
        if revoke:
            self._revoke()

    def _revoke(self) -> None:
        with self.wires.lock:
            self.aborted.set()
            self.wires.lock.notify_all()
        self._stream.put(None)

    def check_thread(self, what: str) -> None:
        if getattr(_thread, "device", 0) != self.device.index:
            self.wires.faults.append(
                f"{what} in {threading.current_thread().name}, whose device is another one"
            )

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Kernel:
        reduce = next(function for op, function in _REDUCE if opts.reduceOp == op)

        def run(kernels: list[_Kernel]) -> None:
            total = kernels[0].tensors[0].clone()
            for kernel in kernels[1:]:
                total = reduce(total, kernel.tensors[0])
            for kernel in kernels:
                kernel.tensors[0].copy_(total)

        return self._issue(_Kernel(run, tensors, tensors), garbage=tensors)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> _Kernel:
        def run(kernels: list[_Kernel]) -> None:
            every = torch.cat([kernel.tensors[0].reshape(-1) for kernel in kernels])
            for kernel in kernels:
                kernel.out[0].copy_(every.view_as(kernel.out[0]))

        return self._issue(_Kernel(run, [input], [output]), garbage=[output])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> _Kernel:
        def run(kernels: list[_Kernel]) -> None:
            total = torch.stack([kernel.tensors[0] for kernel in kernels]).sum(0)
            for kernel, part in zip(kernels, total.chunk(len(kernels)), strict=True):
                kernel.out[0].copy_(part.view_as(kernel.out[0]))

        return self._issue(_Kernel(run, [input], [output]), garbage=[output])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Kernel:
        def run(kernels: list[_Kernel]) -> None:
            for kernel in kernels:
                kernel.tensors[0].copy_(kernels[opts.rootRank].tensors[0])

        return self._issue(_Kernel(run, tensors, tensors), garbage=tensors)

    def _issue(self, kernel: _Kernel, *, garbage: list[Tensor]) -> _Kernel:
        for tensor in [*kernel.tensors, *garbage]:
            if not self.device.holds(tensor):
                raise RuntimeError("No backend type associated with device type cpu")
        if self._error is not Error.SUCCESS:  # torch asks when an operation is issued
            raise RuntimeError(f"NCCL communicator was revoked: {self._error.name}")
        self._issued += 1
        kernel.garbage, kernel.check_thread = garbage, self.check_thread
        self._stream.put((self._issued, kernel))
        self.wires.on_kernel()
        return kernel

    def _run(self) -> None:
        """The stream."""
        while not self.aborted.is_set() or not self._stream.empty():
            item = self._stream.get()
            if item is not None:  # else: look whether it was aborted
                number, kernel = item
                self.aborted.wait(self.wires.delay_s())
                self._meet((self._clique, number), kernel)
                kernel.ended.set()

    def _meet(self, key: tuple[bytes, int], kernel: _Kernel) -> None:
        """Wait for the same kernel of the others; the last one to come reduces."""
        wires = self.wires
        with wires.lock:
            came = wires.meetings.setdefault(key, {})
            came[self.rank] = kernel
            if len(came) == self.size and not self.aborted.is_set():
                with torch.profiler.record_function("ncclDouble"):
                    kernel.run([came[rank] for rank in range(self.size)])
                for other in came.values():
                    other.garbage = []
                wires.meetings.pop(key)
                wires.lock.notify_all()
            in_time = wires.lock.wait_for(
                lambda: not kernel.garbage or self.aborted.is_set(), self.timeout_s
            )
            if kernel.garbage:
                came.pop(self.rank, None)
            for tensor in kernel.garbage:
                tensor.fill_(POISON if tensor.is_floating_point() else 77)
        if not in_time:
            self.fail(Error.TIMEOUT)


_REDUCE: list[tuple[ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]]] = [
    (ReduceOp.SUM, torch.add),
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.PRODUCT, torch.mul),
]


@dataclass
class DoubleDevice:
    """See the module's docstring. An `NcclDevice`."""

    wires: Wires
    index: int
    captures: bool = False
    takes_floats: bool = False
    """Whether all floating tensors of at most 32 bits are on it: what frameworks allocate, too."""
    _storages: dict[int, Tensor] = field(default_factory=dict)

    def tensor(self, *values: Any, **options: Any) -> Tensor:
        """`torch.tensor(...)` on this device."""
        return self.place(torch.tensor(*values, **options))

    def place(self, tensor: Tensor) -> Tensor:
        """Put `tensor` on this device, with all that shares its memory."""
        self._storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def enter(self) -> None:
        _thread.device = self.index

    def holds(self, tensor: Tensor) -> bool:
        if self.takes_floats and tensor.is_floating_point() and tensor.itemsize <= 4:
            return True
        return tensor.untyped_storage().data_ptr() in self._storages

    def capturing(self) -> bool:
        return self.captures

    def new_backend(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        return _Handle(_Backend(self, store, rank, size, timeout_s), _Alive(self.wires.faults))

    def handle(self, backend: Any) -> bytes:
        return b"double:%d" % id(backend)

    def connect(self, backend: Any, rendezvous: Rendezvous, timeout_s: float) -> None:
        assert len(set(rendezvous.handles)) == backend.size
        backend.connect(rendezvous.quorum_id, timeout_s)

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def end_of(self, work: Any) -> Any:
        return work.kernel


@contextmanager
def capture(device: DoubleDevice) -> Iterator[None]:
    """As `torch.cuda.graph`."""
    device.captures = True
    try:
        yield
    finally:
        device.captures = False
