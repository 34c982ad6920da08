"""What several heal tests need: states, comparisons, a source process, a faulty TCP link."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ft_core.heal import HealKey
from ft_core.heal.transport import HealAddress
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

KEY = HealKey(7, "abc")
REPO = Path(__file__).resolve().parents[3]


def soon(seconds: float = PATIENCE_S) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def state(megabytes: int, seed: int = 0) -> dict[str, Any]:
    """A tree of 4 MiB tensors and some small things, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tree: dict[str, Any] = {
        f"w{i}": torch.randint(0, 2**62, (1 << 19,), generator=generator)
        for i in range(megabytes // 4)
    }
    return tree | {"small": torch.randn(10, generator=generator), "epoch": 3}


def same(a: Any, b: Any) -> bool:
    """Bitwise and by type, NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, row-major."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


class SourceProcess:
    """A real process that serves `state(megabytes)` as KEY until it is told to end."""

    def __init__(self, megabytes: int, *, seed: int = 0, live: int = 0) -> None:
        words = [str(megabytes), str(seed), str(live)]
        self._process = workers.start(
            "torch",
            ["-m", "tests.ft_core.heal.source_process", *words],
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().decode().strip()
        assert self.address.startswith("tcp://")

    def ask(self, command: str) -> str:
        """Send a line, return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        return self._process.stdout.readline().decode().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and collect it."""
        self._process.end()


class FaultyLink:
    """A TCP proxy before a source. `edit(offset, data)` sees the bytes of each connection from source to
    target and returns what is passed on; it may block, to be slow."""

    def __init__(self, address: str, edit: Callable[[int, bytearray], bytearray]) -> None:
        source = HealAddress.parse(address)
        self._edit = edit
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        control, bulk = (listener.getsockname()[1] for listener in self._listeners)
        self.address = str(HealAddress(f"tcp://127.0.0.1:{control}", bulk, source.word))
        self._sockets: list[socket.socket] = []
        ports = (int(source.where.rpartition(":")[2]), source.bulk_port)
        self._threads = [
            threading.Thread(target=self._accept, args=(listener, port), daemon=True)
            for listener, port in zip(self._listeners, ports, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            self._sockets += [near, far]
            for source, target, edit in ((near, far, None), (far, near, self._edit)):
                pump = threading.Thread(target=_pump, args=(source, target, edit), daemon=True)
                self._threads.append(pump)
                pump.start()

    def close(self) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads[:2]:
            thread.join()
        for open_socket in self._sockets:
            try:
                open_socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # its other end closed it
        for thread in self._threads:
            thread.join()
        for open_socket in self._sockets:
            open_socket.close()

    def __enter__(self) -> FaultyLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pump(
    source: socket.socket, target: socket.socket, edit: Callable[[int, bytearray], bytearray] | None
) -> None:
    offset = 0
    try:
        while data := source.recv(1 << 18):
            passed = bytearray(data)
            target.sendall(passed if edit is None else edit(offset, passed))
            offset += len(data)
    except OSError:
        pass  # closed by the test
    finally:
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
