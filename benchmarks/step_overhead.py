"""python benchmarks/step_overhead.py [--json FILE]

What fault tolerance adds to a training step: plain DDP, ours and torchft 0.2.0 (if installed:
pip install -e '.[bench]'), 2 replicas, three model sizes. The same two processes run all of them
in turn, a block of steps each, so that a drift of the machine's speed hits all alike. Forward,
backward and SGD are the same; figures are medians over all blocks.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, median_ms, report, torchft_version

SIZES = {"9 k": (64, 84, 40), "301 k": (256, 512, 330), "4.35 M": (1024, 2048, 1100)}
BATCH = 16
WARM_UP_STEPS = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def build(widths: tuple[int, int, int]) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    inside, hidden, outside = widths
    return nn.Sequential(nn.Linear(inside, hidden), nn.ReLU(), nn.Linear(hidden, outside))


class Plain:
    """torch's own DDP."""

    def __init__(self, rank: int, widths: tuple[int, int, int], ports: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{ports['ddp']}", rank=rank, world_size=2
            )
        self.model = torch.nn.parallel.DistributedDataParallel(build(widths))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def close(self) -> None:
        pass


class Ours:
    """ft_core: Manager, DistributedDataParallel, Optimizer, commit over the quorum."""

    def __init__(self, rank: int, widths: tuple[int, int, int], ports: dict[str, Any]) -> None:
        import torch

        from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

        self.manager = Manager(
            ProcessGroupGloo(timeout=timedelta(seconds=30)),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=2,
            use_async_quorum=False,
            lighthouse_addr=ports["ours"],
            replica_id=f"bench_{rank}",
            job_id=f"bench-{widths}",
            expected_replicas=2,
            rank=0,
            world_size=1,
        )
        model = build(widths)
        self.model = DistributedDataParallel(self.manager, model)
        self.optimizer = Optimizer(self.manager, torch.optim.SGD(model.parameters(), lr=1e-3))
        self.vote_s: list[float] = []
        should_commit = self.manager.should_commit

        def timed(*args: Any) -> bool:
            start = time.perf_counter()
            answer = should_commit(*args)
            self.vote_s.append(time.perf_counter() - start)
            return answer

        self.manager.should_commit = timed  # type: ignore[method-assign]

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def close(self) -> None:
        self.manager.shutdown()


class Torchft:
    """The peer, as its README uses it."""

    def __init__(self, rank: int, widths: tuple[int, int, int], ports: dict[str, Any]) -> None:
        import torch
        from torch.distributed import TCPStore
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=2,
            lighthouse_addr=ports["torchft"],
            replica_id=f"bench_{rank}",
            store_addr="127.0.0.1",
            store_port=self.store.port,
            hostname="127.0.0.1",
            rank=0,
            world_size=1,
        )
        model = build(widths)
        self.model = DistributedDataParallel(self.manager, model)
        self.optimizer = Optimizer(self.manager, torch.optim.SGD(model.parameters(), lr=1e-3))

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def close(self) -> None:
        self.manager.shutdown()


def worker(
    rank: int, modes: list[str], blocks: int, ports: dict[str, Any], barrier: Any, results: Any
) -> None:
    import logging

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    kinds = {"plain": Plain, "ours": Ours, "torchft": Torchft}
    found: dict[str, Any] = {}
    for size, widths in SIZES.items():
        steps = 100 if size != "4.35 M" else 15
        torch.manual_seed(rank)
        batch = torch.randn(BATCH, widths[0])
        runners = {mode: kinds[mode](rank, widths, ports) for mode in modes}
        times: dict[str, list[float]] = {mode: [] for mode in modes}
        for runner in runners.values():
            for _ in range(WARM_UP_STEPS):
                runner.step(batch)
        for block in range(blocks):
            for mode in modes[block % len(modes):] + modes[: block % len(modes)]:
                barrier.wait()
                for _ in range(steps):
                    start = time.perf_counter()
                    runners[mode].step(batch)
                    times[mode].append(time.perf_counter() - start)
        votes = runners["ours"].vote_s if "ours" in runners else []
        found[size] = {mode: median_ms(values) for mode, values in times.items()}
        found[size]["vote"] = median_ms(votes[WARM_UP_STEPS:]) if votes else float("nan")
        barrier.wait()
        for runner in runners.values():
            runner.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    results.put((rank, found))
    results.close()
    results.join_thread()
    barrier.wait()
    os._exit(0)  # torchft's threads would hold the process


def serve(kind: str, out: Any, stop: Any) -> None:
    """A lighthouse in a process of its own."""
    if kind == "ours":
        from lighthouse import LighthouseServer

        ours = LighthouseServer("tcp://127.0.0.1:0", min_replicas=2)
        out.put(ours.address())
        stop.wait()
        ours.shutdown()
    else:
        from torchft.coordination import LighthouseServer as Peer

        peer = Peer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
        out.put(peer.address().replace(socket.gethostname(), "127.0.0.1"))
        stop.wait()
        os._exit(0)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--blocks", type=int, default=9, help="blocks of steps for each")
    options = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")  # torchft's; several lines a step otherwise
    modes = ["plain", "ours"] + (["torchft"] if torchft_version() else [])
    context = mp.get_context("spawn")
    stop, ports, servers = context.Event(), {"ddp": free_port()}, []
    for kind in modes[1:]:
        out = context.Queue()
        servers.append(context.Process(target=serve, args=(kind, out, stop)))
        servers[-1].start()
        ports[kind] = out.get(timeout=60)
    results, barrier = context.Queue(), context.Barrier(2)
    workers = [
        context.Process(target=worker, args=(r, modes, options.blocks, ports, barrier, results))
        for r in range(2)
    ]
    for process in workers:
        process.start()
    both = dict(results.get(timeout=900) for _ in workers)
    for process in workers:
        process.join(30)
    stop.set()
    for process in servers:
        process.join(10)
    rows, figures = [], {}
    for size in SIZES:
        mean = {k: statistics.mean(both[r][size][k] for r in (0, 1)) for k in both[0][size]}
        extra = mean["ours"] - mean["plain"]
        row = [size, f"{mean['plain']:.2f}", f"{mean['ours']:.2f}", f"{extra:+.2f}",
               f"{mean['ours'] / mean['plain']:.3f}", f"{mean['vote']:.2f}"]  # fmt: skip
        if "torchft" in mean:
            peer_extra = mean["torchft"] - mean["plain"]
            row += [f"{mean['torchft']:.2f}", f"{peer_extra:+.2f}", f"{extra / peer_extra:.2f}"]
        rows.append(row)
        figures[size] = mean
    columns = ["parameters", "plain DDP ms", "ours ms", "extra ms", "ratio", "vote to answer ms"]
    if "torchft" in modes:
        columns += ["torchft ms", "extra ms", "our extra / torchft's"]
    report("Step overhead, 2 replicas, Gloo", columns, rows, figures, options.json)
    if "torchft" not in modes:
        print("torchft is not installed: pip install -e '.[bench]' measures it in the same run")


if __name__ == "__main__":
    main()
