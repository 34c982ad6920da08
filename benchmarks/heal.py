"""python benchmarks/heal.py [--mib 1024] [--repeats 5] [--json FILE]

How fast a state is copied from healthy processes to one that is behind, over loopback, every source
and the target in a process of its own:

    raw TCP          sendall and recv_into preallocated memory, no checksum: the kernel's limit
    torchft HTTP     torchft's HTTPTransport, 1 stream and 8 chunks (where torchft is installed)
    heal, ZeroMQ     ours with the same-host path off, 1 and 2 sources, checksums on
    heal, same host  ours as it is by default between processes of one machine

Speed is state size over the time from the call to the tree in place: best and median of the
repeats, the first of which pays for page faults and is reported separately. CPU is the processor
time of all processes a GB, repeats only, and is the more reliable figure on a busy machine. Memory
is the peak resident size over that of the imports, as a multiple of the state; each side holds its
own state already, so 1.0 is the minimum. `publish` is how long the source's training thread is
blocked, the first time and when memory is reused.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from common import arguments, report, torchft_version  # noqa: E402

TENSORS = 64
TIMEOUT_S = 300.0
PIECE = 4 << 20
State = dict[str, Any]


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def make_state(mib: int, value: int) -> State:
    import torch

    count = (mib << 20) // 4 // TENSORS
    return {f"w{i}": torch.full((count,), value + i, dtype=torch.int32) for i in range(TENSORS)}


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


def source_heal(state: State, *, copy: bool) -> None:
    from ft_core.heal import HealKey, HealServer

    with HealServer(host="127.0.0.1") as server:
        took = []
        for step in range(3):
            start = time.perf_counter()
            server.publish(HealKey(step, "bench"), state, copy=copy)
            took.append(time.perf_counter() - start)
        say(address=server.address, publish_s=took)
        for _ in sys.stdin:
            pass


def source_torchft(state: State, *, chunks: int) -> None:
    from torchft.checkpointing.http_transport import HTTPTransport

    server: Any = HTTPTransport(timedelta(seconds=TIMEOUT_S), chunks)
    took = []
    for step in range(3):
        start = time.perf_counter()
        server.send_checkpoint([1], step, state, timedelta(seconds=TIMEOUT_S))
        took.append(time.perf_counter() - start)
        if step < 2:
            server.disallow_checkpoint()
    address = server.metadata().replace(socket.gethostname(), "127.0.0.1")
    say(address=address, publish_s=took)
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

    def transfer() -> None:
        tree, stats = fetch(
            addresses, HealKey(2, "bench"), into=state, deadline=time.monotonic() + TIMEOUT_S,
            same_host=same_host,
        )  # fmt: skip
        assert tree["w1"] is state["w1"]
        assert (stats.same_host_bytes > 0) == same_host, "the same-host path is refused here"

    return transfer


def target_torchft(addresses: list[Any], state: State, *, chunks: int) -> Callable[[], object]:
    from torchft.checkpointing.http_transport import HTTPTransport

    client: Any = HTTPTransport(timedelta(seconds=TIMEOUT_S), chunks)

    def transfer() -> None:
        tree = client.recv_checkpoint(0, addresses[0], 2, timedelta(seconds=TIMEOUT_S))
        assert int(tree["w1"][0]) == 1

    return transfer


def run_source(kind: str, mib: int) -> None:
    import torch  # noqa: F401

    if kind.startswith("torchft"):
        import torchft  # noqa: F401
    base = peak_mib()
    state = make_state(mib, 0)
    if kind == "tcp":
        source_tcp(state)
    elif kind.startswith("torchft"):
        source_torchft(state, chunks=8 if kind.endswith("8") else 0)
    else:
        source_heal(state, copy=kind != "heal-live")
    say(peak=(peak_mib() - base) / mib)


def run_target(kind: str, mib: int, addresses: list[Any]) -> None:
    import torch  # noqa: F401

    if kind.startswith("torchft"):
        import torchft  # noqa: F401
    base = peak_mib()
    state = make_state(mib, 1000)
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

    def __init__(self, *arguments: str, quiet: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
        )  # fmt: skip

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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


def measure(source: str, target: str, count: int, mib: int, repeats: int) -> dict[str, Any]:
    children: list[Child] = []
    quiet = source.startswith("torchft")  # it logs every request
    try:
        children += [
            Child("--role", "source", "--kind", source, "--mib", str(mib), quiet=quiet)
            for _ in range(count)
        ]
        ready = [child.read() for child in children]
        addresses = json.dumps([answer["address"] for answer in ready])
        client = Child("--role", "target", "--kind", target, "--mib", str(mib),
                       "--addresses", addresses, quiet=quiet)  # fmt: skip
        children.append(client)
        client.read()
        seconds = []
        cpu_s = 0.0
        for number in range(repeats + 1):
            if number == 1:
                cpu_s = -sum(child.cpu_s() for child in children)
            if source == "tcp":
                children[0].go()
            client.go()
            seconds.append(float(client.read()["seconds"]))
        cpu_s += sum(child.cpu_s() for child in children)
        target_peak = children.pop().end()
        source_peak = max(children.pop().end() for _ in range(count))
    finally:
        for child in children:
            child.kill()
    size_gb = (mib << 20) / 1e9
    publish = ready[0].get("publish_s", [])
    return {
        "first_gb_s": size_gb / seconds[0],
        "best_gb_s": size_gb / min(seconds[1:]),
        "median_gb_s": size_gb / statistics.median(seconds[1:]),
        "cpu_s_per_gb": cpu_s / repeats / size_gb,
        "source_peak": source_peak,
        "target_peak": target_peak,
        "publish_first_s": publish[0] if publish else None,
        "publish_again_s": min(publish[1:]) if publish else None,
    }


CASES = {
    "raw TCP": ("tcp", "tcp", 1),
    "torchft HTTP, 1 stream": ("torchft", "torchft", 1),
    "torchft HTTP, 8 chunks": ("torchft-8", "torchft-8", 1),
    "heal, ZeroMQ, 1 source": ("heal", "heal", 1),
    "heal, ZeroMQ, 2 sources": ("heal", "heal", 2),
    "heal, ZeroMQ, 1 live source": ("heal-live", "heal", 1),
    "heal, same host, 1 source": ("heal", "heal-memory", 1),
    "heal, same host, 2 sources": ("heal", "heal-memory", 2),
    "heal, same host, 1 live source": ("heal-live", "heal-memory", 1),
}


def row(name: str, figures: dict[str, Any] | None) -> list[str]:
    if figures is None:
        return [name, "not installed", "", "", "", "", "", ""]
    keys = ("best_gb_s", "median_gb_s", "first_gb_s", "cpu_s_per_gb")
    speeds = [f"{figures[key]:.2f}" for key in keys]
    memory = [f"{figures[key]:.2f}" for key in ("source_peak", "target_peak")]
    first, again = figures["publish_first_s"], figures["publish_again_s"]
    publish = "" if first is None else f"{first * 1e3:.0f} / {again * 1e3:.1f}"
    return [name, *speeds, *memory, publish]


def main() -> None:
    parser = arguments(__doc__.splitlines()[2])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--role", choices=["source", "target"], help="(internal)")
    parser.add_argument("--kind", help="(internal)")
    parser.add_argument("--addresses", type=json.loads, help="(internal)")
    options = parser.parse_args()
    if options.role == "source":
        run_source(options.kind, options.mib)
        return
    if options.role == "target":
        run_target(options.kind, options.mib, options.addresses)
        return
    figures: dict[str, Any] = {}
    for name, (source, target, count) in CASES.items():
        if options.only not in name:
            continue
        installed = not source.startswith("torchft") or torchft_version() is not None
        figures[name] = (
            measure(source, target, count, options.mib, options.repeats) if installed else None
        )
    columns = ["transport", "GB/s best", "median", "first", "CPU s/GB", "source RSS", "target RSS",
               "publish ms, first / again"]  # fmt: skip
    title = f"Heal of a state of {options.mib} MiB over loopback"
    report(title, columns, [row(*item) for item in figures.items()], figures, options.json)


if __name__ == "__main__":
    main()
