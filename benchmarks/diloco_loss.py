"""python benchmarks/diloco_loss.py [--json FILE] [--plot FILE]

What infrequent communication costs in quality: final validation loss of LocalSGD, DiLoCo and
Streaming DiLoCo against plain, synchronous DDP, two replicas, the same model, samples, inner
optimizer and schedule: a byte-level transformer on the sources of Python's standard library
(benchmarks/diloco_task.py). One algorithm after the other, each on two fresh processes. As in the
DiLoCo paper (arXiv 2311.08105, 24,000 of 88,000 steps) the first part of the training is
synchronous for all: the others start from DDP's state after --warm-start steps. 0: from scratch.
Bytes: what a replica sends after that; for DDP four bytes a parameter and step, which is what
benchmarks/diloco_link.py measures on the link.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report

WIDTH, LAYERS, BATCH = 96, 3, 8
INNER_LR, WARM_UP = 4e-3, 100
EVALUATE_EVERY = 200


@dataclass(frozen=True)
class Plan:
    """`start_file`: DDP's state after `warm_start` steps, from which the others continue."""

    steps: int
    warm_start: int
    start_file: str


@dataclass(frozen=True)
class Algorithm:
    """`outer`: arguments of the outer SGD; `options`: of `DiLoCo`."""

    name: str
    kind: str
    sync_every: int = 1
    outer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMING = {"fragments": 4, "fragment_sync_delay": 5, "codec": "int4"}
ALGORITHMS = [
    Algorithm("DDP", "ddp"),
    Algorithm("DiLoCo", "diloco", 50, OUTER),
    Algorithm("Streaming DiLoCo int4", "diloco", 50, OUTER, STREAMING),
    Algorithm("LocalSGD", "local_sgd", 50),
]


# ---------------------------------------------------------------- one replica


class Replica:
    """Trains one algorithm, and prints one JSON line for each evaluation."""

    def __init__(self, rank: int, address: str, algorithm: Algorithm, plan: Plan) -> None:
        import torch
        from diloco_task import build, text

        self.rank, self.address, self.algorithm, self.plan = rank, address, algorithm, plan
        self.training, self.validation = text()
        self.model = build(WIDTH, LAYERS)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=INNER_LR, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def run(self) -> None:
        import torch

        if self.algorithm.kind == "ddp":
            self.ddp()
            return
        if self.plan.warm_start:
            state = torch.load(self.plan.start_file)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.periodic()

    def ddp(self) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{self.address}", rank=self.rank, world_size=2
        )
        wrapped = torch.nn.parallel.DistributedDataParallel(self.model)
        self.train(wrapped, 0, lambda step: 4 * self.parameters * step)
        dist.destroy_process_group()

    def periodic(self) -> None:
        """LocalSGD or DiLoCo."""
        import torch

        from ft_core import Manager, ProcessGroupGloo
        from ft_core.diloco.diloco import DiLoCo, LocalSGD

        algorithm = self.algorithm
        manager = Manager(
            ProcessGroupGloo(),
            min_replica_size=2,
            use_async_quorum=False,
            lighthouse_addr=self.address,
            replica_id=str(self.rank),
            job_id=algorithm.name,
            expected_replicas=2,
            rank=0,
            world_size=1,
        )
        if algorithm.kind == "local_sgd":
            context: Any = LocalSGD(manager, self.model, self.optimizer, algorithm.sync_every)
        else:
            outer = torch.optim.SGD(self.model.parameters(), **algorithm.outer)
            context = DiLoCo(
                manager,
                self.model,
                self.optimizer,
                outer,
                algorithm.sync_every,
                **algorithm.options,
            )
        with context:
            self.train(self.model, self.plan.warm_start, lambda step: context.stats.bytes_sent)
        manager.shutdown()

    def train(self, model: Any, first: int, bytes_sent: Any) -> None:
        import torch
        from diloco_task import batch, evaluate, learning_rate

        seen, steps = 0.0, self.plan.steps
        for step in range(first, steps):
            if step == self.plan.warm_start and self.algorithm.kind == "ddp" and self.rank == 0:
                state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(state, self.plan.start_file)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, INNER_LR, WARM_UP)
            self.optimizer.zero_grad()
            loss = model(*batch(self.training, step, self.rank, BATCH))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            seen += loss.item()
            done = step + 1
            if done % EVALUATE_EVERY == 0 or done == steps:
                # Half of the windows each; the mean over replicas is reported.
                found = evaluate(self.model, self.validation, self.rank)
                say(step=done, loss=found, train_loss=seen, bytes=bytes_sent(done))
                seen = 0.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# ---------------------------------------------------------------- the experiment


def experiment(algorithm: Algorithm, plan: Plan) -> dict[str, Any]:
    """Both replicas of one algorithm: its curve, [step, validation loss, bytes a replica]."""
    steps = plan.steps
    began = time.monotonic()
    address, stop = rendezvous(algorithm)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--replica",
                str(rank),
                address,
                json.dumps(asdict(algorithm)),
                json.dumps(asdict(plan)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    curve = []
    try:
        while not curve or curve[-1][0] < steps:
            lines = [_line(process) for process in processes]
            loss = sum(line["loss"] for line in lines) / 2
            curve.append([lines[0]["step"], loss, max(line["bytes"] for line in lines)])
            print(f"{algorithm.name}: step {curve[-1][0]}, validation {loss:.4f}", flush=True)
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        stop()
    return {
        "curve": curve,
        "final_loss": curve[-1][1],
        "bytes": curve[-1][2],
        "seconds": round(time.monotonic() - began, 1),
        "algorithm": asdict(algorithm),
    }


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError("a replica has ended: see its message above")
    line: dict[str, Any] = json.loads(text)
    return line


def rendezvous(algorithm: Algorithm) -> tuple[str, Any]:
    """The lighthouse's address, and how to close it."""
    if algorithm.kind == "ddp":
        folder = tempfile.TemporaryDirectory()
        return folder.name + "/store", folder.cleanup
    from lighthouse import LighthouseServer

    server = LighthouseServer("tcp://127.0.0.1:0", min_replicas=2)
    return server.address(), server.shutdown


def plot(found: dict[str, dict[str, Any]], path: Path, warm_start: int) -> None:
    """Loss over steps; and over what a replica has sent since the synchronous start."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_steps, over_bytes) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, one in found.items():
        steps, losses, _ = zip(*one["curve"], strict=True)
        over_steps.plot(steps, losses, label=name)
        own = [(loss, sent) for step, loss, sent in one["curve"] if step > warm_start]
        before = one["bytes"] * warm_start / steps[-1] if name == "DDP" else 0.0
        over_bytes.plot([(sent - before) / 1e6 for _, sent in own], [loss for loss, _ in own])
    over_steps.axvline(warm_start, color="grey", linewidth=0.8, linestyle=":")
    over_steps.set(xlabel="steps", ylabel="validation loss, nats a byte")
    over_bytes.set(xlabel=f"MB sent by a replica after step {warm_start}", xscale="log")
    for axes in (over_steps, over_bytes):
        axes.grid(alpha=0.3)
    over_steps.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(found: dict[str, dict[str, Any]], plan: Plan) -> list[list[object]]:
    ddp = found["DDP"]
    # What DDP has sent in the steps that the others make on their own.
    by_ddp = ddp["bytes"] * (plan.steps - plan.warm_start) / plan.steps
    rows: list[list[object]] = []
    for name, one in found.items():
        sent = by_ddp if one is ddp else one["bytes"]
        worse = 100 * (one["final_loss"] / ddp["final_loss"] - 1)
        rows.append(
            [
                name,
                f"{one['final_loss']:.4f}",
                f"{worse:+.2f} %",
                f"{sent / 1e6:.1f}",
                f"{by_ddp / sent:.0f}",
                one["seconds"],
            ]
        )
    return rows


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--steps", type=int, default=2000, help="inner steps of each replica")
    parser.add_argument("--warm-start", type=int, default=500, help="of them synchronous")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    names = [algorithm.name for algorithm in ALGORITHMS[1:]]
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="besides DDP")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(options.steps, options.warm_start, folder + "/start.pt")
        found = {
            algorithm.name: experiment(algorithm, plan)
            for algorithm in ALGORITHMS
            if algorithm.kind == "ddp" or algorithm.name in options.only
        }
    columns = [
        "algorithm",
        "validation loss",
        "against DDP",
        "MB sent by a replica",
        "times fewer",
        "seconds",
    ]
    title = f"Two replicas, {plan.steps} steps each, {plan.warm_start} of them synchronous"
    report(title, columns, table(found, plan), found, options.json)
    if options.plot is not None:
        plot(found, options.plot, plan.warm_start)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        import torch

        torch.set_num_threads(1)
        chosen = Algorithm(**json.loads(sys.argv[4]))
        Replica(int(sys.argv[2]), sys.argv[3], chosen, Plan(**json.loads(sys.argv[5]))).run()
    else:
        main()
