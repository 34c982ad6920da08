"""python benchmarks/heal_stall.py [--mib 1024] [--trials 3] [--json FILE]

What a heal costs those who are healthy: two replicas train with a state of 1 GiB (parameters and
Adam's two moments, real all-reduce and update), a third joins and heals from them; the survivors'
longest step meanwhile against their usual step with two and with three members. Synchronous quorum:
the joiner computes when its state is there. Asynchronous: it joins the collectives at once with
zeros, and loads the state before it votes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report
from recovery import Case, start_lighthouse

STEPS_BEFORE, STEPS_AFTER = 4, 6


def work(name: str, lighthouse: str, mib: int, asynchronous: bool) -> None:
    """One replica: all-reduce and Adam on a third of the state, until stdin closes."""
    import torch

    from ft_core import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    numel = (mib << 20) // 12
    weights = torch.zeros(numel, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=1e-3)
    weights.grad = torch.zeros(numel)
    optimizer.step()  # the moments exist from the start, as in any run that is under way

    def load(state: dict[str, Any]) -> None:
        with torch.no_grad():
            weights.copy_(state["weights"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"weights": weights.detach(), "optimizer": optimizer.state_dict()},
        use_async_quorum=asynchronous,
        init_sync=False,
        lighthouse_addr=lighthouse,
        replica_id=name,
        rank=0,
        world_size=1,
    )
    manager.telemetry.add_sink(
        lambda e: say(e.kind, **e.data) if e.kind in ("heal_done", "serve") else None
    )
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    say("ready")
    while not stop.is_set():
        manager.start_quorum()
        assert weights.grad is not None
        weights.grad.fill_(1e-3 * (1 + manager.current_step()))
        manager.allreduce(weights.grad).wait()
        if manager.should_commit():
            optimizer.step()
            say("commit", step=manager.current_step(), members=manager.replica_world_size())
    manager.shutdown()


def say(kind: str, **values: Any) -> None:
    print(json.dumps({"t": time.monotonic(), "kind": kind, **values}), flush=True)


class Replica:
    """A running replica and what it has said."""

    def __init__(self, name: str, lighthouse: str, mib: int, asynchronous: bool) -> None:
        self.events: list[dict[str, Any]] = []
        self.news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, lighthouse, str(mib),
             "async" if asynchronous else "sync"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.events.append(json.loads(line))
                self.news.notify_all()

    def commits(self, members: int) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == "commit" and e["members"] == members]

    def wait_commits(self, members: int, count: int) -> None:
        with self.news:
            if not self.news.wait_for(lambda: len(self.commits(members)) >= count, 180):
                raise TimeoutError(f"no {count} commits with {members} members in 180 s")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def trial(mib: int, asynchronous: bool) -> dict[str, float]:
    stop_lighthouse, address = start_lighthouse(Case("heal", 2, ""))
    replicas = [Replica(f"replica_{i}", address, mib, asynchronous) for i in range(2)]
    try:
        for replica in replicas:
            replica.wait_commits(2, STEPS_BEFORE)
        replicas.append(Replica("replica_2", address, mib, asynchronous))
        for replica in replicas[:2]:
            replica.wait_commits(3, STEPS_AFTER)
        survivor = replicas[0]
        two = [e["t"] for e in survivor.commits(2)]
        three = [e["t"] for e in survivor.commits(3)]
        usual_two = statistics.median(b - a for a, b in pairwise(two[1:]))
        usual_three = statistics.median(b - a for a, b in pairwise(three))
        joining = three[0] - max(t for t in two if t < three[0])
        served = [e["seconds"] for e in survivor.events if e["kind"] == "serve"]
        healed = [e for e in replicas[2].events if e["kind"] == "heal_done"]
        return {
            "step_two_s": usual_two,
            "step_three_s": usual_three,
            "joining_step_s": joining,
            "stall_percent": 100 * (joining - usual_three) / usual_three,
            "snapshot_s": served[0],
            "transfer_s": healed[0]["seconds"],
        }
    finally:
        for replica in replicas:
            replica.stop()
        stop_lighthouse()


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    rows, figures = [], {}
    for mode in ("sync", "async"):
        found = [trial(options.mib, mode == "async") for _ in range(options.trials)]
        middle = {key: statistics.median(f[key] for f in found) for key in found[0]}
        figures[mode] = {"median": middle, "trials": found}
        rows.append([mode, *(f"{middle[k]:.2f}" for k in list(middle)[:3]),
                     f"{middle['stall_percent']:.0f} %",
                     " ".join(f"{f['stall_percent']:.0f}" for f in found),
                     f"{middle['snapshot_s']:.2f}", f"{middle['transfer_s']:.2f}"])  # fmt: skip
        print(mode, middle, flush=True)
    columns = ["quorum", "step of 2 s", "step of 3 s", "joining step s", "extra stall",
               "all trials %", "snapshot s", "transfer s"]  # fmt: skip
    report(f"A heal of {options.mib} MiB, seen by the healthy", columns, rows, figures, options.json)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "async")
    else:
        main()
