"""python benchmarks/heal_stall.py [--mib 1024] [--trials 5] [--json FILE]

What a heal costs the healthy members: two replicas train with a state of 1 GiB (a residual MLP and
Adam's two moments; real forward, backward, all-reduce in buckets, update), a third one, whose
process has just made its model and taken no step, joins and heals from them. Reported is the
healthy members' longest time between two commits meanwhile, against their usual step with three
members. Synchronous quorum: the joiner computes when it has its state. Asynchronous: it computes,
contributes zeros to the collectives and receives the state meanwhile, before it votes.

Compute "here": three replicas share this machine's cores, and while one waits, the others have more
of them. "elsewhere": a batch of one, and a sleep in place of the rest, like a host with an
accelerator of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report
from recovery import Case, start_lighthouse

STEPS_BEFORE, STEPS_AFTER = 6, 8
SIDE, BATCH = 2048, 64
ELSEWHERE_S = 0.6


def work(name: str, lighthouse: str, mib: int, mode: str, compute: str) -> None:
    """One replica; begins at "go" on stdin, ends when stdin closes."""
    import torch

    from ft_core import DistributedDataParallel, Manager, OptimizerWrapper, ProcessGroupGloo

    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x).relu()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = max(1, (mib << 20) // 12 // SIDE**2)
    model = torch.nn.Sequential(*(Block(SIDE, SIDE, bias=False) for _ in range(blocks)))
    inner = torch.optim.Adam(model.parameters(), lr=1e-5)
    batch = torch.randn(BATCH if compute == "here" else 1, SIDE)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        use_async_quorum=mode == "async",
        init_sync=False,
        lighthouse_addr=lighthouse,
        replica_id=name,
        rank=0,
        world_size=1,
    )

    def tell(event: Any) -> None:
        if event.kind == "commit":
            say("commit", members=manager.replica_world_size())
        elif event.kind in ("heal_done", "serve"):
            say(event.kind, **event.data)

    manager.telemetry.add_sink(tell)
    model_of_all, optimizer = (
        DistributedDataParallel(manager, model),
        OptimizerWrapper(manager, inner),
    )
    say("ready")
    assert sys.stdin.readline() == "go\n"
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    while not stop.is_set():
        optimizer.zero_grad()  # and the quorum
        loss = model_of_all(batch).square().mean()
        if compute == "elsewhere":
            time.sleep(ELSEWHERE_S)
        loss.backward()
        optimizer.step()
    manager.shutdown()


def say(kind: str, **values: Any) -> None:
    print(json.dumps({"t": time.monotonic(), "kind": kind, **values}), flush=True)


class Replica:
    """A running replica and what it has printed."""

    def __init__(self, name: str, lighthouse: str, mib: int, mode: str, compute: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, lighthouse, str(mib), mode, compute],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.events.append(json.loads(line))
                self.news.notify_all()

    def of_kind(self, kind: str, **values: Any) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == kind and values.items() <= e.items()]

    def commits(self, members: int) -> list[float]:
        return [e["t"] for e in self.of_kind("commit", members=members)]

    def wait_for(self, count: int, kind: str, **values: Any) -> None:
        with self.news:
            if not self.news.wait_for(lambda: len(self.of_kind(kind, **values)) >= count, 180):
                raise TimeoutError(f"no {count} times {kind} {values} in 180 s")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def trial(mib: int, mode: str, compute: str) -> dict[str, float]:
    stop_lighthouse, address = start_lighthouse(Case("heal", 2, ""))
    replicas = [Replica(f"replica_{i}", address, mib, mode, compute) for i in range(3)]
    survivors, joiner = replicas[:2], replicas[2]
    try:
        for replica in replicas:
            replica.wait_for(1, "ready")
        for replica in survivors:
            replica.go()
        for replica in survivors:
            replica.wait_for(STEPS_BEFORE, "commit", members=2)
        joiner.go()
        for replica in survivors:
            replica.wait_for(STEPS_AFTER, "commit", members=3)
        joining, usual_two, usual_three = [], [], []
        for replica in survivors:
            two, three = replica.commits(2), replica.commits(3)
            joining.append(three[0] - two[-1])
            usual_two += [b - a for a, b in pairwise(two[1:])]
            usual_three += [b - a for a, b in pairwise(three)]
        usual = statistics.median(usual_three)
        (healed,) = joiner.of_kind("heal_done")
        return {
            "step_two_s": statistics.median(usual_two),
            "step_three_s": usual,
            "joining_step_s": max(joining),
            "stall_percent": 100 * (max(joining) - usual) / usual,
            "snapshot_s": max(r.of_kind("serve")[0]["seconds"] for r in survivors),
            "transfer_s": healed["seconds"],
            "mib": healed["bytes"] / (1 << 20),
        }
    finally:
        for replica in replicas:
            replica.stop()
        stop_lighthouse()


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    rows, figures = [], {}
    for mode, compute in product(("sync", "async"), ("here", "elsewhere")):
        found = [trial(options.mib, mode, compute) for _ in range(options.trials)]
        middle = {key: statistics.median(f[key] for f in found) for key in found[0]}
        figures[f"{mode}, {compute}"] = {"median": middle, "trials": found}
        rows.append(
            [
                mode,
                compute,
                *(f"{middle[k]:.2f}" for k in list(middle)[:3]),
                f"{middle['stall_percent']:.0f} %",
                " ".join(f"{f['stall_percent']:.0f}" for f in found),
                f"{middle['snapshot_s']:.2f}",
                f"{middle['transfer_s']:.2f}",
            ]
        )
        print(mode, compute, middle, flush=True)
    columns = [
        "quorum",
        "compute",
        "step of 2 s",
        "step of 3 s",
        "joining step s",
        "extra stall",
        "all trials %",
        "snapshot s",
        "transfer s",
    ]
    report(
        f"A heal of {options.mib} MiB, seen by the healthy members",
        columns,
        rows,
        figures,
        options.json,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6])
    else:
        main()
