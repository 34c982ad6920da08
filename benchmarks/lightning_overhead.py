"""python benchmarks/lightning_overhead.py [--json FILE]

What strategy="ft_ddp" adds to a step of Lightning's Trainer over stock "ddp": 2 replicas, Gloo. The
same two processes fit with both in turn, a block of steps each, so that a drift of the machine's
speed affects both. Figures are medians over all blocks of the time from one batch's end to the
next one's. Limits: at most 0.8 ms for the smallest model, at most 2 % at steps of 50 ms.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import arguments, median_ms, of_two_processes, report
from step_overhead import BATCH, build

from ft_core.launch.rank_group import free_port

CASES = {  # name: (widths of the network, pause in seconds in each step)
    "9 k": ((64, 84, 40), 0.0),
    "301 k": ((256, 512, 330), 0.0),
    "9 k, 50 ms": ((64, 84, 40), 0.05),
}
BARS = {"9 k": "+0.8 ms", "9 k, 50 ms": "2 %"}
MODES = ("ddp", "ft_ddp")
WARM_UP_STEPS = 20
STEPS, PAUSED_STEPS = 150, 30


def make_module(widths: tuple[int, int, int], pause_s: float) -> Any:
    import torch
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(widths)
            self.ends: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if pause_s:
                time.sleep(pause_s)
            return self.net(batch[0]).square().mean()

        def on_train_batch_end(self, *args: Any) -> None:
            self.ends.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Module()


def fit(mode: str, case: str, rank: int, places: dict[str, Any], job: str) -> list[float]:
    """Seconds of each step after the warm-up."""
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    widths, pause_s = CASES[case]
    steps = WARM_UP_STEPS + (PAUSED_STEPS if pause_s else STEPS)
    variables = {
        "ddp": {
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(places["ddp"]),
        },
        "ft_ddp": {
            "REPLICA_GROUP_ID": str(rank),
            "NUM_REPLICA_GROUPS": "2",
            "FT_JOB_ID": job,
            "TORCHFT_LIGHTHOUSE": places["ft_ddp"],
        },
    }
    for names in variables.values():
        for name in names:
            os.environ.pop(name, None)
    os.environ.update(variables[mode])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * BATCH * steps, widths[0]))
    module = make_module(widths, pause_s)
    trainer = Trainer(
        strategy=mode,
        accelerator="cpu",
        devices=2 if mode == "ddp" else 1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, BATCH))
    if dist.is_initialized():
        dist.destroy_process_group()
    assert len(module.ends) == steps, f"{mode}: {len(module.ends)} batches instead of {steps}"
    ends = module.ends[WARM_UP_STEPS - 1 :]
    return [b - a for a, b in itertools.pairwise(ends)]


def worker(rank: int, blocks: int, places: dict[str, Any], barrier: Any, results: Any) -> None:
    import logging
    import warnings

    import torch

    import ft_lightning  # noqa: F401

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    for case in CASES:
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for block in range(blocks):
            for mode in MODES if block % 2 == 0 else MODES[::-1]:
                barrier.wait()
                times[mode] += fit(mode, case, rank, places, f"{case}-{block}")
        found[case] = {mode: median_ms(values) for mode, values in times.items()}
    results.put((rank, found))


def serve(out: Any, stop: Any) -> None:
    """A lighthouse in a process of its own."""
    from lighthouse import LighthouseServer

    with LighthouseServer("tcp://127.0.0.1:0", min_replicas=2) as server:
        out.put(server.address())
        stop.wait()


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--blocks", type=int, default=6, help="fits of each kind and case")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    stop, out = context.Event(), context.Queue()
    server = context.Process(target=serve, args=(out, stop))
    server.start()
    places = {"ddp": free_port(), "ft_ddp": out.get(timeout=60)}
    both = of_two_processes(context, worker, options.blocks, places)
    stop.set()
    server.join(10)
    rows, figures = [], {}
    for case in CASES:
        mean = {mode: statistics.mean(both[r][case][mode] for r in (0, 1)) for mode in MODES}
        extra = mean["ft_ddp"] - mean["ddp"]
        rows.append(
            [
                case,
                f"{mean['ddp']:.2f}",
                f"{mean['ft_ddp']:.2f}",
                f"{extra:+.2f}",
                f"{extra / mean['ddp']:+.1%}",
                BARS.get(case, ""),
            ]
        )
        figures[case] = mean
    columns = ["parameters", "ddp ms", "ft_ddp ms", "extra ms", "extra", "bar"]
    report("Trainer steps, 2 replicas, Gloo", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
