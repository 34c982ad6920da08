"""python benchmarks/hsdp.py [--mib N] [--steps N] [--json FILE]

Two replica groups of two processes with FSDP2 inside, on this machine:

1. a step under `ft_core.replicate`, against torch's own 2-D HSDP over the same four processes. Blocks of
   steps of both kinds alternate in the same processes, so that both see the same machine. Processor time is what
   can be compared on a busy one.
2. a heal: the second group starts with a fresh AdamW when the first has trained. Peak memory of a target's
   rank beyond its shards (weights and moments).
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report

LIMIT = timedelta(seconds=300)
BLOCK = 10


def status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status")


def build(mesh: Any, width: int) -> Any:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = (nn.Linear(width, width, bias=False) for _ in range(8))
    model = nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def managed(
    model: Any, inner: Any, rank: int, lighthouse: str, port: int, job: str, alone: bool
) -> Any:
    from ft_core import Manager, ProcessGroupGloo, replicate

    manager = Manager(
        ProcessGroupGloo(timeout=LIMIT),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda s: (
            model.load_state_dict(s["model"]),
            inner.load_state_dict(s["optimizer"]),
        ),
        lighthouse_addr=lighthouse,
        replica_id=str(rank // 2),
        job_id=job,
        timeout=LIMIT,
        expected_replicas=1 if alone else 2,
        rank=rank % 2,
        world_size=2,
        store_addr="127.0.0.1",
        store_port=port,
        use_async_quorum=False,
        watch_process=False,
    )
    replicate(model, manager)
    return manager


def participants(manager: Any) -> int:
    """Of the last step: the same for all ranks."""
    outcome = manager.last_outcome()
    return 0 if outcome is None else outcome.participants


def worker(
    rank: int, ports: list[int], lighthouse: str, mib: int, steps: int, barrier: Any, results: Any
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", ports[0], None, False, LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=LIMIT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    port = ports[1 + rank // 2]
    seconds = measure_steps(rank, mesh, lighthouse, port, steps)
    beyond = measure_heal(rank, mesh, lighthouse, port, mib, barrier)
    results.put((rank, seconds, beyond))
    barrier.wait()


def measure_steps(
    rank: int, mesh: Any, lighthouse: str, port: int, steps: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Seconds of each step, and of the process's processor time in it: torch's own, and ours."""
    import torch

    from ft_core import Optimizer

    theirs, mine = build(mesh, 512), build(mesh["shard"], 512)
    plain = torch.optim.AdamW(theirs.parameters())
    inner = torch.optim.AdamW(mine.parameters())
    manager = managed(mine, inner, rank, lighthouse, port, "steps", alone=False)
    data = torch.randn(48, 512)
    kinds = ((theirs, plain), (mine, Optimizer(manager, inner)))
    seconds: tuple[list[tuple[float, float]], ...] = ([], [])
    for step in range(0, 2 * steps, BLOCK):
        kind = step // BLOCK % 2
        model, optimizer = kinds[kind]
        for number in range(BLOCK):
            began, used = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            if number and step >= 2 * BLOCK:  # the first of a block finds cold caches
                spent = time.perf_counter() - began, time.process_time() - used
                seconds[kind].append(spent)
    manager.shutdown()
    return seconds[0], seconds[1]


def measure_heal(
    rank: int, mesh: Any, lighthouse: str, port: int, mib: int, barrier: Any
) -> tuple[float, float, float]:
    """MiB of a target's shards (weights and moments), of its peak beyond them, and seconds."""
    import torch

    from ft_core import Optimizer

    width = int((2 * mib * 1024 * 1024 / 4 / 8) ** 0.5)
    model = build(mesh["shard"], width)
    inner = torch.optim.AdamW(model.parameters())
    shards = 3 * sum(p.to_local().nbytes for p in model.parameters()) / 2**20
    if rank < 2:
        manager = managed(model, inner, rank, lighthouse, port, "heal", alone=True)
        optimizer, healed = Optimizer(manager, inner), False
        while not healed or participants(manager) < 2:
            optimizer.zero_grad()
            model(torch.ones(1, width)).mean().backward()
            optimizer.step()
            if not healed and manager.current_step() >= 3:
                barrier.wait()
                healed = True
        manager.shutdown()
        return 0.0, 0.0, 0.0
    barrier.wait()
    weights = shards / 3
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what comes now
    before, began = status_mib("VmRSS"), time.perf_counter()
    manager = managed(model, inner, rank, lighthouse, port, "heal", alone=True)
    optimizer = Optimizer(manager, inner)
    optimizer.zero_grad()
    seconds, peak = time.perf_counter() - began, status_mib("VmHWM")
    assert manager.current_step() >= 3, "nothing was healed"
    while True:
        model(torch.ones(1, width)).mean().backward()
        optimizer.step()
        if participants(manager) == 2:  # both groups leave after this step
            break
        optimizer.zero_grad()
    manager.shutdown()
    return shards, peak - before - (shards - weights), seconds


def main() -> None:
    parser = arguments("HSDP over replica groups: a step, and a heal's memory")
    parser.add_argument("--mib", type=int, default=64, help="weights of a rank in the heal")
    parser.add_argument("--steps", type=int, default=200, help="of each kind")
    options = parser.parse_args()
    import torch.distributed as dist

    from lighthouse import LighthouseServer

    stores = [
        dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False) for _ in range(3)
    ]
    context = mp.get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(4)
    with LighthouseServer("tcp://127.0.0.1:0") as lighthouse:
        given = ([store.port for store in stores], lighthouse.address(), options.mib, options.steps)
        ranks = [
            context.Process(target=worker, args=(rank, *given, barrier, results))
            for rank in range(4)
        ]
        for process in ranks:
            process.start()
        found = sorted(results.get(timeout=1500) for _ in ranks)
        for process in ranks:
            process.join(60)
    (theirs, mine), heals = found[0][1], [beyond for rank, _, beyond in found if rank >= 2]
    medians, processor = (
        [statistics.median(step[which] for step in each) * 1e3 for each in (theirs, mine)]
        for which in (0, 1)
    )
    shards, beyond, seconds = (max(each) for each in zip(*heals, strict=True))
    figures = {
        "torch_hsdp_ms": medians[0],
        "replicate_ms": medians[1],
        "ratio": medians[1] / medians[0],
        "torch_hsdp_processor_ms": processor[0],
        "replicate_processor_ms": processor[1],
        "shards_mib": shards,
        "peak_beyond_shards_mib": beyond,
        "heal_s": seconds,
    }
    rows = [(name, f"{value:.3f}") for name, value in figures.items()]
    report("HSDP: two replica groups of two", ["what", "value"], rows, figures, options.json)


if __name__ == "__main__":
    main()
