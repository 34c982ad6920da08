"""A place for the checks of benchmarks/gpu_check.py on the CPU: members are threads, NCCL is its double."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo  # torch imports it in the middle of things: two threads at once fail
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from benchmarks.gpu.place import Crew, Member, Shape
from ft_core.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from tests.harness.nccl_double import DoubleDevice, Wires, capture


class Stand:
    """See the module's docstring."""

    elements, rounds = 64, 10
    shape = Shape(layers=1, width=16, heads=2, vocabulary=32, batch=2, length=8)
    heal_bytes = 1 << 20
    step_s, side, stock = 0.002, 8, False
    compiler = "aot_eager"
    activity = ProfilerActivity.CPU
    categories = frozenset({"cpu_op", "user_annotation"})
    command: Sequence[str] = (sys.executable, "-c", "")
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.wires = Wires()
        self.devices: dict[int, DoubleDevice] = {}

    def enter(self) -> None:
        pass

    def group(self, index: int, timeout_s: float) -> ProcessGroup:
        self.devices[index] = DoubleDevice(self.wires, index + 1, takes_floats=True)
        return ProcessGroupNCCL(timeout_s, hostname="127.0.0.1", on=self.devices[index])

    def gloo(self, timeout_s: float) -> ProcessGroup:
        return ProcessGroupGloo(timeout_s, hostname="127.0.0.1")

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return torch.full((elements,), value)

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self) -> AbstractContextManager[Any]:
        return capture(self.devices[0])

    def synchronize(self) -> None:
        pass

    def cut(self) -> None:
        self.wires.cut()

    def contexts(self) -> int:
        return 1 + len(self.wires.faults)

    @contextmanager
    def crew(self, size: int, timeout_s: float) -> Iterator[Crew]:
        threads = Threads(self, size, timeout_s)
        try:
            yield threads
        finally:
            threads.pool.shutdown()
            for member in threads.members:
                member.close()
            if dist.is_initialized():
                dist.destroy_process_group()


class Threads:
    """A crew of threads."""

    def __init__(self, stand: Stand, size: int, timeout_s: float) -> None:
        self.size, self.stand = size, stand
        self.codes: list[int | None] = [0] * size  # threads have none
        self.pool = ThreadPoolExecutor(size)
        self.members = [Member(stand, index, timeout_s) for index in range(size)]

    def call(self, index: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.pool.submit(function, self.members[index], *args)

    def kill(self, index: int) -> None:
        self.stand.wires.cut()
