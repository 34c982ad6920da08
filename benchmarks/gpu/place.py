"""Where the checks run (a GPU, or a stand-in for it), and the members that take part in them."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity

from ft_core.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

CONNECT_S = 60.0
STACKS = signal.SIGUSR1
"""At which a process prints where its threads are."""
ENDS_WITHIN_S = 20.0
_DIES_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the language model that is trained, and of its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


class Place(Protocol):
    """Where the checks run: the GPU, or a stand-in for it."""

    device: torch.device
    elements: int
    """Of a tensor that is reduced."""
    rounds: int
    """How often a check repeats what it does, where it is quick; others less often."""
    shape: Shape
    heal_bytes: int
    step_s: float
    """How long a step of the heal's source computes."""
    side: int
    """Of the square matrices that it multiplies meanwhile."""
    stock: bool
    """Whether the members are processes that can train with torch's DDP, for comparison."""
    compiler: str
    """The backend of torch.compile."""
    activity: ProfilerActivity
    categories: frozenset[str]
    """Of the profiler's events that occupy the device."""
    command: Sequence[str]
    """Runs gpu_check in a process of its own, given its arguments."""

    def enter(self) -> None:
        """Called first in each process: makes the device that of the calling thread."""
        ...

    def group(self, index: int, timeout_s: float) -> ProcessGroup: ...

    def gloo(self, timeout_s: float) -> ProcessGroup: ...

    def full(self, index: int, elements: int, value: float) -> torch.Tensor: ...

    def aside(self) -> AbstractContextManager[Any]:
        """A stream of its own, which is kept busy for some time first."""
        ...

    def capture(self) -> AbstractContextManager[Any]: ...

    def synchronize(self) -> None: ...

    def cut(self) -> None:
        """Break all connections of this process."""
        ...

    def contexts(self) -> int:
        """How many devices this process has a context on."""
        ...

    def crew(self, size: int, timeout_s: float) -> AbstractContextManager[Crew]: ...


class Member:
    """One member of a quorum, in a process or a thread of its own. `kept`: between two calls."""

    def __init__(self, place: Place, index: int, timeout_s: float) -> None:
        self.place, self.index = place, index
        self.group = place.group(index, timeout_s)
        self.members, self.rank = 1, 0
        self.kept: dict[str, Any] = {}

    def address(self) -> bytes:
        return self.group.address()

    def configure(self, quorum_id: int, rank: int, addresses: Sequence[bytes]) -> None:
        self.members, self.rank = len(addresses), rank
        self.group.configure(quorum_id, rank, addresses, CONNECT_S)

    def contexts(self) -> int:
        return self.place.contexts()

    def close(self) -> None:
        if not self.kept.get("left open"):
            self.group.shutdown()


class Crew(Protocol):
    """Some members."""

    size: int
    codes: list[int | None]
    """After their end: the exit status of each one's process."""

    def call(self, index: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """`function(member, *args)`, in that member's process or thread."""
        ...

    def kill(self, index: int) -> None:
        """End it in the middle of what it does."""
        ...


def meet(crew: Crew, quorum_id: int, indices: Sequence[int] | None = None) -> None:
    """These members (all, if None are given) configure one quorum."""
    who = range(crew.size) if indices is None else indices
    addresses = [crew.call(index, Member.address).result() for index in who]
    calls = [
        crew.call(index, Member.configure, quorum_id, rank, addresses)
        for rank, index in enumerate(who)
    ]
    for call in calls:
        call.result()


class Gpu:
    """The machine's last CUDA device: a thread that forgets it makes a context on the first one."""

    elements, rounds = 4 << 20, 100
    shape = Shape(layers=12, width=768, heads=12, vocabulary=50304, batch=32, length=1024)
    heal_bytes = 8 << 30
    step_s, side, stock = 2.0, 8192, True
    compiler = "inductor"
    activity = ProfilerActivity.CUDA
    categories = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.device = torch.device("cuda", max(0, torch.cuda.device_count() - 1))

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def group(self, index: int, timeout_s: float) -> ProcessGroup:
        return ProcessGroupNCCL(timeout_s, hostname="127.0.0.1", device=self.device)

    def gloo(self, timeout_s: float) -> ProcessGroup:
        return ProcessGroupGloo(timeout_s, hostname="127.0.0.1")

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return torch.full((elements,), value, device=self.device)

    def aside(self) -> AbstractContextManager[Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
        return torch.cuda.stream(stream)

    def capture(self) -> AbstractContextManager[Any]:
        return torch.cuda.graph(torch.cuda.CUDAGraph())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def cut(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            try:
                copy = os.dup(int(name))
            except OSError:  # the listing's own descriptor
                continue
            try:
                one = socket.socket(fileno=copy)
            except OSError:  # no socket
                os.close(copy)
                continue
            with one:
                try:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        one.getpeername()  # listeners go on
                        one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def contexts(self) -> int:
        driver = ctypes.CDLL("libcuda.so.1")
        count, active = ctypes.c_int(), 0
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            raise RuntimeError("the CUDA driver does not answer")
        for device in range(count.value):
            flags, is_active = ctypes.c_uint(), ctypes.c_int()
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
            active += is_active.value
        return active

    def crew(self, size: int, timeout_s: float) -> AbstractContextManager[Crew]:
        return Processes(self, size, timeout_s)


class Processes:
    """A crew of processes."""

    def __init__(self, place: Place, size: int, timeout_s: float) -> None:
        self.size = size
        self.codes: list[int | None] = []
        context = multiprocessing.get_context("spawn")
        self._pool = ThreadPoolExecutor(size)
        self._ends, self._all = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(place, index, timeout_s, theirs))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._all.append(process)

    def call(self, index: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        def run() -> Any:
            try:
                self._ends[index].send((function, args))
                good, value = self._ends[index].recv()
            except (EOFError, OSError) as error:
                self._all[index].join(_DIES_WITHIN_S)
                how = self._all[index].exitcode
                raise RuntimeError(f"member {index} is gone, exit status {how}") from error
            if not good:
                raise RuntimeError(value)
            return value

        return self._pool.submit(run)

    def kill(self, index: int) -> None:
        self._all[index].kill()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        # Members that are called no more see the end of their pipe; the others hang.
        for end in self._ends:
            end.close()
        give_up_at = time.monotonic() + ENDS_WITHIN_S
        for process in self._all:
            process.join(max(0.0, give_up_at - time.monotonic()))
            process.kill()
            process.join(_DIES_WITHIN_S)  # one that hangs in the driver does not
            self.codes.append(process.exitcode)
        self._pool.shutdown(wait=False)


def serve(place: Place, index: int, timeout_s: float, end: Any) -> None:
    """A member in its process. NCCL is told that it is on a machine of its own."""
    faulthandler.register(STACKS)
    os.environ["NCCL_HOSTID"] = f"ft-gpu-check-{index}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    place.enter()
    member = Member(place, index, timeout_s)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            break
        try:
            end.send((True, function(member, *args)))
        except Exception as error:
            end.send((False, f"{type(error).__name__}: {error}"))
    member.close()
