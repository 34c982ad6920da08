"""A device for copies on the CPU: a `CopyDevice` whose streams are queues that may be late.

Its memory is that of the tensors which `place` is given. It holds what `ft_core.process_group.device_memory` says:

- Nothing that is queued is done before its turn comes in its stream, each copy `delay_s()` late.
- Pinned memory that a copy is to fill is garbage (`POISON`) from the moment in which it is queued: a read that
  comes too early shows. A copy reads its source when its turn comes: memory that is written again too early shows, too.
- A copy between the device and memory that is not pinned is a fault (`faults`), as is memory that is given back
  while it is read.
- What it lends is read at addresses that are no process's, as in another process: `LENT` bytes from their own.

`model` is the stream in which a test queues what a model would do (`run`). It is the current one of each thread.
Where a real model computes, its threads are their own streams (`at_once`), and `model` waits as they would.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ft_core.heal.format import MEMORY
from ft_core.process_group import device_memory
from tests.harness.waiting import PATIENCE_S

POISON = 0x5A
LENT = 1 << 60


class CopyEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(PATIENCE_S), "a stream hangs"


class QueueStream:
    """A stream: a thread that does what is queued."""

    def __init__(self, device: CopyDouble, at_once: bool = False) -> None:
        self._device, self._at_once = device, at_once
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="double-copies", daemon=True)
        self._thread.start()

    def run(self, kernel: Callable[[], object]) -> None:
        """Queue what a kernel does."""
        self._queue.put(kernel)
        if self._at_once:
            done = threading.Event()
            self._queue.put(done.set)
            assert done.wait(PATIENCE_S), "a stream hangs"

    def after(self, event: Any) -> None:
        self.run(event.synchronize)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._device.check(target, source)
        if not self._device.holds(target):
            target.view(-1).view(torch.uint8).fill_(POISON)

        self._device.count(queued=1)

        def kernel() -> None:
            time.sleep(self._device.delay_s())
            with torch.no_grad():
                target.data.copy_(source)
            self._device.count(done=1)

        self.run(kernel)

    def read(self, target: Tensor, address: int) -> None:
        self._device.check(target, target)
        self._device.count(queued=1)

        def kernel() -> None:
            time.sleep(self._device.delay_s())
            if address < LENT or not self._device.borrowed:
                self._device.faults.append("a read from memory that is not borrowed")
            start = target.data_ptr()
            MEMORY[start : start + target.nbytes] = MEMORY[
                address - LENT : address - LENT + target.nbytes
            ]
            self._device.count(done=1, read=1)

        self.run(kernel)

    def mark(self) -> CopyEvent:
        event = CopyEvent()
        self.run(event.passed.set)
        return event

    def complete(self, future: Future[Any], value: Any) -> None:
        self.run(lambda: future.set_result(value))

    def drain(self) -> None:
        """Wait until all is done that was queued."""
        self.mark().synchronize()

    def end(self) -> None:
        """When all is done that was queued."""
        self._queue.put(None)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (kernel := self._queue.get()) is not None:
            kernel()


class CopyDouble:
    """See the module's docstring. A context manager: within it `ft_core` finds the device."""

    def __init__(
        self, delay_s: Callable[[], float] = lambda: 0.0, *, at_once: bool = False
    ) -> None:
        self.delay_s = delay_s
        self.faults: list[str] = []
        self.queued = self.done = self.read = 0  # copies, and those from borrowed memory
        self.lends = self.can_borrow = True
        self.borrowed: list[int] = []
        self._counting = threading.Lock()
        self.captures = False
        self._placed: dict[
            int, Tensor
        ] = {}  # by address of the storage, which thereby stays theirs
        self._pinned: dict[int, Tensor] = {}
        self.model = QueueStream(self, at_once)
        self._streams = [self.model]

    def place(self, tensor: Tensor) -> Tensor:
        """Put `tensor` on this device, with all that shares its memory."""
        self._placed[_address(tensor)] = tensor
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        part = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which has no memory itself
        return _address(part) in self._placed

    def check(self, target: Tensor, source: Tensor) -> None:
        for each in (target, source):
            if not self.holds(each) and _address(each) not in self._pinned:
                self.faults.append("a copy between the device and memory that is not pinned")

    def count(self, *, queued: int = 0, done: int = 0, read: int = 0) -> None:
        """So many copies more. Any thread."""
        with self._counting:
            self.queued, self.done = self.queued + queued, self.done + done
            self.read += read

    def current(self) -> QueueStream:
        return self.model

    def new_stream(self) -> QueueStream:
        self._streams.append(QueueStream(self))
        return self._streams[-1]

    def pinned(self, nbytes: int) -> Tensor:
        made = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._pinned[_address(made)] = made
        return made

    def future(self) -> Future[Any]:
        return Future()

    def capturing(self) -> bool:
        return self.captures

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.drain()

    def lend(self, tensor: Tensor) -> tuple[int, int, bytes] | None:
        if not self.lends:
            return None
        address = _address(tensor)
        return address, tensor.untyped_storage().nbytes(), address.to_bytes(8, "big")

    def borrow(self, handle: bytes) -> int:
        if not self.can_borrow:
            raise OSError("the double borrows nothing")
        self.borrowed.append(LENT + int.from_bytes(handle, "big"))
        return self.borrowed[-1]

    def give_back(self, address: int) -> None:
        self.borrowed.remove(address)

    def find(self, tensor: Tensor) -> CopyDouble | None:
        return self if self.holds(tensor) else None

    def __enter__(self) -> CopyDouble:
        device_memory.finders.append(self.find)
        return self

    def __exit__(self, *exc: object) -> None:
        device_memory.finders.remove(self.find)
        for stream in self._streams:
            stream.end()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
