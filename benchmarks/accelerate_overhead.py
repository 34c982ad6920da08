"""python benchmarks/accelerate_overhead.py [--json FILE] [--blocks N] [--kills N] [--sizes A;B]

What fault tolerance adds to a raw Accelerate loop, and what a failure costs it.

Overhead: the same script as two processes of plain Accelerate (torch's DDP) and as two replica
groups. Both pairs exist at the same time and run blocks of steps in turn, one pair at a time, so
that a drift of the machine's speed affects both. A step is everything between two batches: loader,
forward, backward, gradients, optimizer.

Recovery: three replica groups with steps of 50 ms; one is killed (SIGKILL) and restarted. Gap:
the longest time between two steps of a survivor. Back: from the moment when the restarted script
asks for its first batch to the first step in which it participates. Stall: a survivor's longest gap meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, median_ms, report

from ft_core.launch.rank_group import free_port

HERE = Path(__file__).resolve()
SIZES = {
    "9 k": (64, 84, 40),
    "301 k": (256, 512, 330),
    "4.35 M": (1024, 2048, 1100),
    "9 k, 50 ms": (64, 84, 40),
}
STEPS = {"9 k": 200, "301 k": 100, "4.35 M": 15, "9 k, 50 ms": 20}
BATCH = 16
WARM_UP_STEPS = 20
STEP_S = 0.05


# ---------------------------------------------------------------- the script that is measured


def script(size: str, pace_s: float) -> None:
    """A raw loop; a line on stdin gives a number of steps, a line on stdout their times."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    accelerator = Accelerator()
    inside, hidden, outside = SIZES[size]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(inside, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outside)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(BATCH * 200, inside)), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def steps() -> Any:
        while True:
            for (batch,) in loader:
                if "ms" in size:
                    time.sleep(STEP_S)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    say("ready")
    run = steps()
    if pace_s:
        from ft_accelerate.runtime import process as processes

        for _ in run:
            live = processes.current().live
            say(json.dumps([time.time(), live]))
            if live:  # stands for the computation, which a fast-forward leaves out
                time.sleep(pace_s)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            next(run)
            times.append(time.perf_counter() - start)
        say(json.dumps(times))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- its processes


class Process:
    """One process of the script."""

    def __init__(self, size: str, env: dict[str, str], *, protected: bool, pace_s: float = 0.0):
        wrapper = ["-m", "ft_accelerate.run"] if protected else []
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self.started_at = time.time()
        self.process = subprocess.Popen(
            [sys.executable, *wrapper, str(HERE), "--script", size, "--pace", str(pace_s)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
                "ACCELERATE_USE_CPU": "1",
                **env,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self.news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.lines.append((time.time(), line.strip()))
                self.news.notify_all()

    def line(self, index: int) -> tuple[float, str]:
        """Line `index` of the output, when it is there."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.lines) > index, 120), "nothing was said"
            return self.lines[index]

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def of_group(index: int, groups: int, lighthouse: str, job: str) -> dict[str, str]:
    prefix = "ACCELERATE_FAULT_TOLERANCE_"
    return {
        "ACCELERATE_USE_FAULT_TOLERANCE": "true",
        prefix + "REPLICA_GROUP_ID": str(index),
        prefix + "NUM_REPLICA_GROUPS": str(groups),
        prefix + "LIGHTHOUSE": lighthouse,
        prefix + "JOB_ID": job,
    }


def of_rank(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }


PORT = 0


# ---------------------------------------------------------------- what is measured


def overhead(size: str, blocks: int, lighthouse: str) -> dict[str, float]:
    """Median ms of a step, plain and protected."""
    global PORT
    PORT = free_port()
    pairs = {
        "plain": [Process(size, of_rank(r), protected=False) for r in range(2)],
        "ours": [
            Process(size, of_group(r, 2, lighthouse, f"overhead {size}"), protected=True)
            for r in range(2)
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in pairs}
    try:
        for pair in pairs.values():
            for process in pair:
                process.line(0)
        for block in range(blocks + 1):
            for name in list(pairs) if block % 2 else list(reversed(pairs)):
                count = STEPS[size] if block else WARM_UP_STEPS
                for process in pairs[name]:
                    process.tell(str(count))
                found = [json.loads(process.line(block + 1)[1]) for process in pairs[name]]
                if block:
                    times[name] += [sum(both) / 2 for both in zip(*found, strict=True)]
    finally:
        for pair in pairs.values():
            for process in pair:
                process.end()
    return {name: median_ms(values) for name, values in times.items()}


def recovery(kills: int, lighthouse: str) -> dict[str, list[float]]:
    """Seconds: survivors' longest gap after each kill; until the killed process is back."""
    job = "recovery"

    def start(index: int) -> Process:
        return Process("301 k", of_group(index, 3, lighthouse, job), protected=True, pace_s=STEP_S)

    groups = [start(i) for i in range(3)]
    gaps, back, stalls = [], [], []
    try:
        for group in groups:
            group.line(30)
        for kill in range(kills):
            victim = kill % 3
            survivors = [g for i, g in enumerate(groups) if i != victim]
            marks = [len(g.lines) for g in survivors]
            groups[victim].end()
            for group, mark in zip(survivors, marks, strict=True):
                group.line(mark + 25)
            gaps.append(max(_gap(g, m) for g, m in zip(survivors, marks, strict=True)))
            groups[victim] = start(victim)
            ready = groups[victim].line(0)[0]
            place = 1
            while not json.loads(groups[victim].line(place)[1])[1]:
                place += 1
            back.append(json.loads(groups[victim].line(place)[1])[0] - ready)
            groups[victim].line(place + 20)
            stalls.append(max(_gap(g, m + 25, 0) for g, m in zip(survivors, marks, strict=True)))
    finally:
        for group in groups:
            group.end()
    return {"gap_s": gaps, "back_s": back, "stall_s": stalls}


def _gap(group: Process, mark: int, count: int = 26) -> float:
    """The longest time between two steps, from the one before line `mark` on; 0: to the last."""
    lines = group.lines[max(mark - 1, 1) : mark + count if count else None]
    moments = [json.loads(text)[0] for _, text in lines]
    return max(b - a for a, b in itertools.pairwise(moments))


def main() -> None:
    parser = arguments((__doc__ or "").split("\n\n")[1])
    parser.add_argument("--blocks", type=int, default=9, help="blocks of steps for each")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--sizes", default=";".join(SIZES), help="which steps, with ; between")
    parser.add_argument("--script", default="", help="(its own processes)")
    parser.add_argument("--pace", type=float, default=0.0, help="(its own processes)")
    options = parser.parse_args()
    if options.script:
        script(options.script, options.pace)
        return
    from lighthouse import LighthouseServer

    rows, figures = [], {}
    with LighthouseServer("tcp://127.0.0.1:0", on_note=lambda note: None) as server:
        for size in filter(None, options.sizes.split(";")):
            found: dict[str, Any] = overhead(size, options.blocks, server.address())
            extra = found["ours"] - found["plain"]
            rows.append(
                [
                    f"step, {size} parameters",
                    f"{found['plain']:.2f} ms",
                    f"{found['ours']:.2f} ms",
                    f"{extra:+.2f} ms",
                    f"{found['ours'] / found['plain']:.3f}",
                ]
            )
            figures[size] = found
        if options.kills:
            times = recovery(options.kills, server.address())
            for name, title in (
                ("gap_s", "SIGKILL one of 3: longest gap between a survivor's steps (of 50 ms)"),
                ("back_s", "killed process: from its first batch to its first step as participant"),
                ("stall_s", "survivors: longest gap while it comes back"),
            ):
                middle, worst = statistics.median(times[name]), max(times[name])
                rows.append([title, "dies", f"{middle:.2f} s", f"worst {worst:.2f} s", ""])
            figures["recovery"] = times
    columns = ["", "plain Accelerate", "with fault tolerance", "extra", "ratio"]
    report("Accelerate, 2 processes, Gloo, CPU", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
