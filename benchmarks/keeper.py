"""python benchmarks/keeper.py [--mib 205 --step 0.5 --keep 5 --json FILE]

What the keeper of states costs the training, and what it saves. Three replica groups under a supervisor
train with a state of so many MiB, all of which is updated in each step. The keeper fetches it at
intervals. Reported are the steps during which it reads, against the others; then all three groups are
killed by SIGKILL at once: how long until they train together again, and how many steps are lost.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import itertools

from common import arguments, report
from recovery import NUMEL, Case, ours, start_lighthouse

GROUPS = 3
TENSORS = 8
FETCHES = 6
LIMIT_S = 240.0


def say(kind: str, **values: Any) -> None:
    """One line in one write: the groups share their standard output."""
    line = json.dumps({"t": time.monotonic(), "kind": kind, **values}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


def work(group: str, lighthouse: str, mib: float, step_s: float) -> None:
    """One replica group, until it is killed."""
    import torch

    torch.set_num_threads(1)
    count = int(mib * (1 << 20)) // 4 // TENSORS
    state = {str(i): torch.zeros(count) for i in range(TENSORS)}
    weights, about = torch.zeros(NUMEL), {"group": int(group), "pid": os.getpid()}
    say("start", **about)
    manager, allreduce = ours(f"group_{group}", lighthouse, weights, "")

    def load(healed: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            tensor.copy_(healed[name])

    manager.register_state_dict_fn("large", load, lambda: state)
    while True:
        manager.start_quorum()
        shows = manager.state.shows
        time.sleep(step_s)  # forward and backward
        gradient = torch.full((NUMEL,), float(manager.current_step()))
        allreduce(gradient)
        if manager.should_commit():
            weights -= 1e-3 * gradient
            for tensor in state.values():
                tensor += 1.0
            step, all_ = manager.current_step(), manager.num_participants()
            say("commit", **about, step=step, participants=all_, shows=shows)


def supervised(lighthouse: str, mib: str, step_s: str, keep_s: str) -> int:
    """All groups, and the keeper."""
    from ft_core.launch.supervisor import supervise
    from ft_core.launch.warm.starter import warm_starts

    def environment(index: int) -> dict[str, str]:
        return {**os.environ, "KEEPER_GROUP": str(index), "NUM_REPLICA_GROUPS": str(GROUPS)}

    return supervise(
        [sys.executable, __file__, "--worker", lighthouse, mib, step_s],
        environment,
        count=GROUPS,
        min_alive=1,
        max_restarts=None,
        warm=warm_starts(True, places=["KEEPER_"]),
        keep_state_s=float(keep_s),
    )


class Job:
    """The supervisor, and what its groups have said."""

    def __init__(self, lighthouse: str, mib: float, step_s: float, keep_s: float) -> None:
        self.events: list[dict[str, Any]] = []
        self.news = threading.Condition()
        command = [sys.executable, __file__, "--supervise", lighthouse]
        self.process = subprocess.Popen(
            [*command, *map(str, (mib, step_s, keep_s))], stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.events.append(json.loads(line))
                self.news.notify_all()

    def commits(self, after: float = 0.0) -> dict[int, dict[str, Any]]:
        """Steps in which all groups took part, by number: when the last of them said so; whether one
        served its state to the keeper."""
        found: dict[int, dict[str, Any]] = {}
        for event in self.events:
            if event["kind"] == "commit" and event["participants"] == GROUPS and event["t"] > after:
                known = found.setdefault(event["step"], {"t": 0.0, "shows": False})
                known["t"] = max(known["t"], event["t"])
                known["shows"] |= event["shows"]
        return found

    def wait_for(self, ready: Any) -> None:
        with self.news:
            if not self.news.wait_for(ready, LIMIT_S):
                raise TimeoutError(f"not within {LIMIT_S:g} s")

    def kill_all(self) -> float:
        pids = {e["group"]: e["pid"] for e in self.events if e["kind"] == "start"}
        at = time.monotonic()
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        return at


def measure(mib: float, step_s: float, keep_s: float) -> dict[str, float]:
    stop_lighthouse, address = start_lighthouse(Case("keeper", GROUPS, ""))
    job = Job(address, mib, step_s, keep_s)
    try:
        began: list[int] = []

        def fetched() -> bool:
            rows = sorted(job.commits().items())
            began[:] = [
                step
                for (_, a), (step, b) in itertools.pairwise(rows)
                if b["shows"] and not a["shows"]
            ]
            return len(began) > FETCHES

        job.wait_for(fetched)
        time.sleep(0.8 * keep_s)
        rows = sorted(job.commits().items())
        times = {
            step: row["t"] - before["t"] for (_, before), (step, row) in itertools.pairwise(rows)
        }
        usual = [s for step, s in times.items() if step > 10 and not job.commits()[step]["shows"]]
        # The first fetch finds no memory that is kept for it.
        fetching = [times[step] for step in began[1:]]
        died_at, killed_at = max(job.commits()), job.kill_all()
        job.wait_for(lambda: len(job.commits(killed_at + 0.1)) > 1)
        back = job.commits(killed_at + 0.1)
        first = min(back)
        return {
            "step_ms": 1e3 * statistics.median(usual),
            "fetch_step_ms": 1e3 * statistics.median(fetching),
            "fetch_step_worst_ms": 1e3 * max(fetching),
            "back_s": min(row["t"] for row in back.values()) - killed_at,
            "lost_steps": died_at - (first - 1),
            "lost_s": (died_at - (first - 1)) * statistics.median(usual),
        }
    finally:
        job.process.terminate()  # it ends the groups
        job.process.wait()
        stop_lighthouse()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--mib", type=float, default=205e6 / (1 << 20))
    parser.add_argument("--step", type=float, default=0.5, help="seconds of forward and backward")
    parser.add_argument("--keep", type=float, default=5.0, help="keep_state_s")
    options = parser.parse_args()
    figures = measure(options.mib, options.step, options.keep)
    rows = [(name, f"{value:.2f}") for name, value in figures.items()]
    title = f"Keeper: a state of {options.mib:.0f} MiB every {options.keep:g} s"
    report(title, ("what", "measured"), rows, figures, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        lighthouse, mib, step = sys.argv[2:]
        work(os.environ["KEEPER_GROUP"], lighthouse, float(mib), float(step))
    elif sys.argv[1:2] == ["--supervise"]:
        sys.exit(supervised(*sys.argv[2:]))
    else:
        main()
