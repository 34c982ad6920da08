"""python benchmarks/heal.py [--mib 1024] [--repeats 5] [--json FILE]

How fast a state is copied from healthy processes to one that is behind, over loopback, every source
and the target in a process of its own:

    raw TCP          sendall and recv_into preallocated memory, no checksum: the kernel's limit
    torchft HTTP     torchft's HTTPTransport, 1 stream and 8 chunks (where torchft is installed)
    heal, TCP        ours with the same-host path off, 1 and 2 sources, checksums on
    heal, same host  ours as it is by default between processes of one machine

Our sources publish the state anew for each transfer, as a training loop does, without a copy: no transfer
finds the checksums of the one before. Speed is state size over the time from the call to the tree in place:
best and median of the repeats, the first of which pays for page faults and is reported separately. CPU is
the processor time of all processes a GB, repeats only, and is the more reliable figure on a busy machine.
Both medians are also given as multiples of raw TCP's in the same run. Memory is the peak resident size over
that of the imports, as a multiple of the state; each side holds its own state already, so 1.0 is the minimum.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), os.environ.get("HEAL_PACKAGE", str(HERE))]
from common import arguments, report, torchft_version  # noqa: E402

TIMEOUT_S = 300.0
PIECE = 4 << 20
State = dict[str, Any]


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def make_state(mib: float, tensors: int, value: int) -> State:
    import torch

    count = int(mib * 2**20) // 4 // tensors
    return {f"w{i}": torch.full((count,), value + i, dtype=torch.int32) for i in range(tensors)}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# Sources: print their address, serve until their stdin is closed, print the cost.


def source_tcp(state: State) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        say(address=server.getsockname()[1])
        for _ in sys.stdin:
            connection, _address = server.accept()
            with connection:
                for tensor in state.values():
                    data = memoryview(tensor.numpy()).cast("B")
                    for start in range(0, len(data), PIECE):
                        connection.sendall(data[start : start + PIECE])


def source_heal(state: State) -> None:
    from ft_core.heal import HealKey, HealServer

    with HealServer(host="127.0.0.1") as server:
        say(address=server.address)
        for step, _ in enumerate(sys.stdin):
            server.publish(HealKey(step, "bench"), state, copy=False)
            say(published=step)


def source_torchft(state: State, *, chunks: int) -> None:
    from torchft.checkpointing.http_transport import HTTPTransport

    server: Any = HTTPTransport(timedelta(seconds=TIMEOUT_S), chunks)
    server.send_checkpoint([1], 0, state, timedelta(seconds=TIMEOUT_S))
    say(address=server.metadata().replace(socket.gethostname(), "127.0.0.1"))
    for _ in sys.stdin:
        pass
    server.shutdown(wait=False)


# Targets: one transfer for each line on stdin; print how long it took.


def target_tcp(addresses: list[Any], state: State) -> Callable[[], object]:
    def transfer() -> None:
        with socket.create_connection(("127.0.0.1", addresses[0])) as connection:
            for tensor in state.values():
                data = memoryview(tensor.numpy()).cast("B")
                got = 0
                while got < len(data):
                    got += connection.recv_into(data[got : got + PIECE])

    return transfer


def target_heal(addresses: list[Any], state: State, *, same_host: bool) -> Callable[[], object]:
    from ft_core.heal import HealKey, fetch

    steps = itertools.count()

    def transfer() -> None:
        tree, stats = fetch(
            addresses,
            HealKey(next(steps), "bench"),
            into=state,
            deadline=time.monotonic() + TIMEOUT_S,
            same_host=same_host,
        )
        assert tree["w0"] is state["w0"] and int(state["w0"][0]) == 0
        assert (stats.same_host_bytes > 0) == same_host, "the same-host path is refused here"

    return transfer


def target_torchft(addresses: list[Any], state: State, *, chunks: int) -> Callable[[], object]:
    from torchft.checkpointing.http_transport import HTTPTransport

    client: Any = HTTPTransport(timedelta(seconds=TIMEOUT_S), chunks)

    def transfer() -> None:
        tree = client.recv_checkpoint(0, addresses[0], 0, timedelta(seconds=TIMEOUT_S))
        assert int(tree["w0"][0]) == 0

    return transfer


def run_source(kind: str, mib: float, tensors: int) -> None:
    import torch  # noqa: F401

    if kind.startswith("torchft"):
        import torchft  # noqa: F401
    base = peak_mib()
    state = make_state(mib, tensors, 0)
    if kind == "tcp":
        source_tcp(state)
    elif kind.startswith("torchft"):
        source_torchft(state, chunks=8 if kind.endswith("8") else 0)
    else:
        source_heal(state)
    say(peak=(peak_mib() - base) / mib)


def run_target(kind: str, mib: float, tensors: int, addresses: list[Any]) -> None:
    import torch  # noqa: F401

    if kind.startswith("torchft"):
        import torchft  # noqa: F401
    base = peak_mib()
    state = make_state(mib, tensors, 1000)
    if kind == "tcp":
        transfer = target_tcp(addresses, state)
    elif kind.startswith("torchft"):
        transfer = target_torchft(addresses, state, chunks=8 if kind.endswith("8") else 0)
    else:
        transfer = target_heal(addresses, state, same_host=kind.endswith("memory"))
    say(ready=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        transfer()
        say(seconds=time.perf_counter() - start)
    say(peak=(peak_mib() - base) / mib)
    sys.stdout.flush()


class Child:
    """This file in another role, which reads and writes JSON lines."""

    def __init__(self, package: Path, *arguments: str, quiet: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            text=True,
            env={**os.environ, "HEAL_PACKAGE": str(package)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
        )

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # as clock_getcpuclockid does

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child ended: {self._process.args!r}")
        values: dict[str, Any] = json.loads(line)
        return values

    def end(self) -> float:
        """Its peak memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            peak = float(self.read()["peak"])
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass  # torchft's server thread may hold it; the figures are complete
        self.kill()
        return peak

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True)
class Case:
    """How a state is moved: the kinds of its sources and of its target, and whose package they use."""

    source: str
    target: str
    sources: int = 1
    package: Path = HERE


class Transfers:
    """The processes of one case."""

    def __init__(self, case: Case, shape: Sequence[str]) -> None:
        self._case = case
        quiet = case.source.startswith("torchft")  # it logs every request
        words = ["--role", "source", "--kind", case.source, *shape]
        self._sources = [Child(case.package, *words, quiet=quiet) for _ in range(case.sources)]
        addresses = json.dumps([child.read()["address"] for child in self._sources])
        words = ["--role", "target", "--kind", case.target, "--addresses", addresses, *shape]
        self._target = Child(case.package, *words, quiet=quiet)
        self._target.read()
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []

    def one(self) -> None:
        """Copy the state once. Publishing it counts for the processor time."""
        children = [*self._sources, self._target]
        before = sum(child.cpu_s() for child in children)
        for child in self._sources:
            if self._case.source in ("tcp", "heal"):
                child.go()
            if self._case.source == "heal":
                child.read()
        self._target.go()
        self.seconds.append(float(self._target.read()["seconds"]))
        self.cpu_s.append(sum(child.cpu_s() for child in children) - before)

    def end(self) -> tuple[float, float]:
        """Peak memory of a source, and of the target."""
        target = self._target.end()
        return max(child.end() for child in self._sources), target

    def kill(self) -> None:
        for child in (*self._sources, self._target):
            child.kill()


CASES = {
    "raw TCP": Case("tcp", "tcp"),
    "torchft HTTP, 1 stream": Case("torchft", "torchft"),
    "torchft HTTP, 8 chunks": Case("torchft-8", "torchft-8"),
    "heal, TCP, 1 source": Case("heal", "heal"),
    "heal, TCP, 2 sources": Case("heal", "heal", 2),
    "heal, same host, 1 source": Case("heal", "heal-memory"),
}


def measure(cases: dict[str, Case], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of each case. In each round, all take their turn."""
    shape = ["--mib", str(options.mib), "--tensors", str(options.tensors)]
    running: dict[str, Transfers] = {}
    try:
        for name, case in cases.items():
            running[name] = Transfers(case, shape)
        for _ in range(options.repeats + 1):
            for transfers in running.values():
                transfers.one()
        peaks = {name: transfers.end() for name, transfers in running.items()}
    finally:
        for transfers in running.values():
            transfers.kill()
    size_gb = options.mib * 2**20 / 1e9
    raw = running.get("raw TCP")
    figures: dict[str, dict[str, Any]] = {}
    for name, transfers in running.items():
        seconds, cpu_s = transfers.seconds[1:], transfers.cpu_s[1:]
        figures[name] = {
            "best_gb_s": size_gb / min(seconds),
            "median_gb_s": size_gb / statistics.median(seconds),
            "first_gb_s": size_gb / transfers.seconds[0],
            "cpu_s_per_gb": statistics.median(cpu_s) / size_gb,
            "source_peak": peaks[name][0],
            "target_peak": peaks[name][1],
            "times_raw_gb_s": raw and _median_ratio(raw.seconds, transfers.seconds),
            "times_raw_cpu": raw and _median_ratio(transfers.cpu_s, raw.cpu_s),
            "seconds": transfers.seconds,
        }
    return figures


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over[1:], under[1:], strict=True))


def row(name: str, figures: dict[str, Any]) -> list[str]:
    values = list(figures.values())[:-1]
    return [name, *("" if value is None else f"{value:.2f}" for value in values)]


def main() -> None:
    parser = arguments(__doc__.splitlines()[2])
    parser.add_argument("--mib", type=float, default=1024, help="size of the state")
    parser.add_argument("--tensors", type=int, default=64, help="of how many equal tensors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names hold one of these, a|b")
    parser.add_argument("--other", type=Path, help="a checkout whose heal is measured, too")
    parser.add_argument("--role", choices=["source", "target"], help="(internal)")
    parser.add_argument("--kind", help="(internal)")
    parser.add_argument("--addresses", type=json.loads, help="(internal)")
    options = parser.parse_args()
    if options.role == "source":
        run_source(options.kind, options.mib, options.tensors)
        return
    if options.role == "target":
        run_target(options.kind, options.mib, options.tensors, options.addresses)
        return
    cases = dict(CASES)
    if options.other is not None:
        cases["the other's heal, 1 source"] = Case("heal", "heal", package=options.other)
        cases["the other's heal, 2 sources"] = Case("heal", "heal", 2, options.other)
    if torchft_version() is None:
        cases = {name: case for name, case in cases.items() if "torchft" not in name}
    wanted = options.only.split("|")
    cases = {name: case for name, case in cases.items() if any(word in name for word in wanted)}
    figures = measure(cases, options)
    columns = [
        "transport",
        "GB/s best",
        "median",
        "first",
        "CPU s/GB",
        "source RSS",
        "target RSS",
        "x raw GB/s",
        "x raw CPU",
    ]
    title = f"Heal of {options.tensors} tensors, {options.mib:g} MiB in all, over loopback"
    report(title, columns, [row(*item) for item in figures.items()], figures, options.json)


if __name__ == "__main__":
    main()
