"""python benchmarks/step_overhead.py [--json FILE]

What fault tolerance adds to a training step: plain DDP, ours and torchft 0.2.0 (if installed:
pip install -e '.[bench]'), 2 replicas, three model sizes. Forward, backward and SGD are the same.

The same two processes run plain DDP and ours in turn, then plain DDP and torchft, a short block of
steps each, many times over. A block's figure is the median of its steps. Differences and ratios are
taken between neighbouring blocks, a fraction of a second apart, and the median of those is
reported: the machine's speed drifts from minute to minute by more than the effect. In
brackets: the 95 % interval of that median (order statistics, Conover, Practical Nonparametric
Statistics, 3.2).
Processes differ, too (by the placement of their memory), by a percent or two, so several pairs are
measured.
"""

from __future__ import annotations

import math
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
from common import arguments, median_ms, of_two_processes, report, torchft_version

from ft_core.launch.rank_group import free_port

SIZES = {"9 k": (64, 84, 40), "301 k": (256, 512, 330), "4.35 M": (1024, 2048, 1100)}
BATCH = 16
BLOCK_STEPS = {"9 k": 50, "301 k": 30, "4.35 M": 8}
WARM_UP_STEPS = 20


def build(widths: tuple[int, int, int]) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    inside, hidden, outside = widths
    return nn.Sequential(nn.Linear(inside, hidden), nn.ReLU(), nn.Linear(hidden, outside))


class Training:
    """One of those below: a model, its optimizer, and for all but torch's own DDP a manager."""

    manager: Any = None
    model: Any
    optimizer: Any

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def close(self) -> None:
        if self.manager is not None:
            self.manager.shutdown()


class Plain(Training):
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


class Ours(Training):
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
            job_id=f"bench-{ports['pair']}-{widths}",
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


class Torchft(Training):
    """torchft, as its README uses it."""

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
            replica_id=f"bench_{ports['pair']}_{rank}",
            store_addr="127.0.0.1",
            store_port=self.store.port,
            hostname="127.0.0.1",
            rank=0,
            world_size=1,
        )
        model = build(widths)
        self.model = DistributedDataParallel(self.manager, model)
        self.optimizer = Optimizer(self.manager, torch.optim.SGD(model.parameters(), lr=1e-3))


def worker(
    rank: int, modes: list[str], blocks: int, ports: dict[str, Any], barrier: Any, results: Any
) -> None:
    import logging

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    kinds = {"ours": Ours, "torchft": Torchft}
    found: dict[str, Any] = {}
    # One after the other, since torchft's threads stay: so none disturbs another's figures.
    for mode in modes:
        for size, widths in SIZES.items():
            torch.manual_seed(rank)
            batch = torch.randn(BATCH, widths[0])
            runners = [Plain(rank, widths, ports), kinds[mode](rank, widths, ports)]
            for runner in runners:
                for _ in range(WARM_UP_STEPS):
                    runner.step(batch)
            blocks_ms: list[list[float]] = [[], []]
            for block in range(blocks):
                for which in (0, 1) if block % 2 else (1, 0):
                    barrier.wait()
                    steps_s = []
                    for _ in range(BLOCK_STEPS[size]):
                        start = time.perf_counter()
                        runners[which].step(batch)
                        steps_s.append(time.perf_counter() - start)
                    blocks_ms[which].append(median_ms(steps_s))
            found.setdefault(size, {})[f"plain beside {mode}"] = blocks_ms[0]
            found[size][mode] = blocks_ms[1]
            if mode == "ours":
                found[size]["vote"] = [median_ms(runners[1].vote_s[WARM_UP_STEPS:])]
            barrier.wait()
            for runner in runners:
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
    parser.add_argument("--blocks", type=int, default=30, help="blocks of steps for each in a pair")
    parser.add_argument(
        "--pairs", type=int, default=5, help="pairs of processes, one after another"
    )
    options = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")  # torchft's; several lines a step otherwise
    modes = ["ours"] + (["torchft"] if torchft_version() else [])
    context = mp.get_context("spawn")
    stop, ports, servers = context.Event(), {}, []
    for kind in modes:
        out = context.Queue()
        servers.append(context.Process(target=serve, args=(kind, out, stop)))
        servers[-1].start()
        ports[kind] = out.get(timeout=60)
    blocks_ms: dict[str, dict[str, list[float]]] = {size: {} for size in SIZES}
    for pair in range(options.pairs):
        places = {**ports, "ddp": free_port(), "pair": pair}
        both = of_two_processes(context, worker, modes, options.blocks, places)
        for size in SIZES:
            for name, values in both[0][size].items():
                means = map(statistics.mean, zip(values, both[1][size][name], strict=True))
                blocks_ms[size].setdefault(name, []).extend(means)
    stop.set()
    for process in servers:
        process.join(10)
    rows, figures = [], {}
    for size in SIZES:
        row, figures[size] = compare(size, blocks_ms[size])
        rows.append(row)
    columns = ["parameters", "plain DDP ms", "ours ms", "extra ms", "ratio", "vote to answer ms"]
    if "torchft" in modes:
        columns += ["torchft ms", "extra ms", "our extra / torchft's"]
    report("Step overhead, 2 replicas, Gloo", columns, rows, figures, options.json)
    if "torchft" not in modes:
        print("torchft is not installed: pip install -e '.[bench]' measures it in the same run")


def compare(size: str, blocks_ms: dict[str, list[float]]) -> tuple[list[str], dict[str, float]]:
    """A row of the table and its figures, from each round's blocks."""
    plain, ours = blocks_ms["plain beside ours"], blocks_ms["ours"]
    extra = middle([o - p for o, p in zip(ours, plain, strict=True)])
    ratio = middle([o / p for o, p in zip(ours, plain, strict=True)])
    vote = statistics.median(blocks_ms["vote"])
    row = [
        size,
        f"{statistics.median(plain):.2f}",
        f"{statistics.median(ours):.2f}",
        "{:+.2f} ({:+.2f} to {:+.2f})".format(*extra),
        "{:.3f} ({:.3f} to {:.3f})".format(*ratio),
        f"{vote:.2f}",
    ]
    figures = {
        "plain": statistics.median(plain),
        "ours": statistics.median(ours),
        "extra": extra[0],
        "ratio": ratio[0],
        "vote": vote,
    }
    if "torchft" in blocks_ms:
        plain, peer = blocks_ms["plain beside torchft"], blocks_ms["torchft"]
        peer_extra = middle([t - p for t, p in zip(peer, plain, strict=True)])[0]
        row += [
            f"{statistics.median(peer):.2f}",
            f"{peer_extra:+.2f}",
            f"{extra[0] / peer_extra:.2f}",
        ]
        figures |= {"torchft": statistics.median(peer), "torchft extra": peer_extra}
    return row, figures


def middle(values: list[float]) -> tuple[float, float, float]:
    """Median, and the ends of its 95 % interval."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


if __name__ == "__main__":
    main()
