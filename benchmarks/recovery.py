"""python benchmarks/recovery.py [--json FILE] [--only kill3 ...]

What a failure costs the survivors: the longest gap between any survivor's commits, with steps of
50 ms, when one replica of three or six is killed (small, or with 4 GiB resident), stopped, or
loses its network (a network namespace of its own; needs root). After each failure the victim is
restarted and heals, so the time from ready to participating is measured, too.
torchft 0.2.0, if installed, runs `kill3` in the same way (hand-written averaging, because its DDP
wrapper crashes the survivors).
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import itertools

import common
from common import arguments, report, torchft_version

STEP_S = 0.05
NUMEL = 85_000
COMMITS_BETWEEN = 25
NETNS, OUTSIDE, INSIDE = "ftbench", "10.213.7.1", "10.213.7.2"


@dataclass(frozen=True)
class Case:
    name: str
    replicas: int
    fault: str
    gib: int = 0
    peer: str = "ours"


CASES = [
    Case("kill3", 3, "SIGKILL"),
    Case("kill3-4gib", 3, "SIGKILL", gib=4),
    Case("kill6", 6, "SIGKILL"),
    Case("kill6-4gib", 6, "SIGKILL", gib=4),
    Case("stop3", 3, "SIGSTOP"),
    Case("link3", 3, "link down"),
    Case("torchft-kill3", 3, "SIGKILL", peer="torchft"),
]


# ---------------------------------------------------------------- the replicas


def work(kind: str, name: str, lighthouse: str, gib: int, interface: str) -> None:
    """One replica: steps of 50 ms until its stdin closes."""
    import torch

    torch.set_num_threads(1)
    ballast = bytearray(gib << 30)
    for page in range(0, len(ballast), 4096):
        ballast[page] = 1
    weights = torch.zeros(NUMEL)
    say("ready")
    manager, allreduce = (ours if kind == "ours" else torchft)(name, lighthouse, weights, interface)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    while not stop.is_set():
        if step(manager, allreduce, weights, STEP_S):
            say("commit", step=manager.current_step(), participants=manager.num_participants())
    say("end", sum=float(weights.double().sum()), step=manager.current_step())
    manager.shutdown()
    os._exit(0)


def step(manager: Any, allreduce: Any, weights: Any, step_s: float) -> bool:
    """One step, of which forward and backward take `step_s`; whether it was committed."""
    import torch

    manager.start_quorum()
    time.sleep(step_s)  # forward and backward
    gradient = torch.full((NUMEL,), float(manager.current_step()))
    allreduce(gradient)
    committed = manager.should_commit()
    if committed:
        weights -= 1e-3 * gradient
    return bool(committed)


def ours(
    name: str, lighthouse: str, weights: Any, interface: str, **options: Any
) -> tuple[Any, Any]:
    from ft_core import Manager, ProcessGroupGloo

    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60), hostname=interface or None),
        load_state_dict=lambda state: weights.copy_(state["weights"]),
        state_dict=lambda: {"weights": weights},
        use_async_quorum=False,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=interface or None,
        rank=0,
        world_size=1,
        **options,
    )
    return manager, lambda tensor: manager.allreduce(tensor).wait()


def torchft(name: str, lighthouse: str, weights: Any, interface: str) -> tuple[Any, Any]:
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: weights.copy_(state["weights"]),
        state_dict=lambda: {"weights": weights},
        min_replica_size=1,
        use_async_quorum=False,
        lighthouse_addr=lighthouse,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        rank=0,
        world_size=1,
    )
    manager.benchmark_store = store
    return manager, lambda tensor: manager.allreduce(tensor).wait()


def say(kind: str, **values: Any) -> None:
    """One line in one write: groups that a supervisor has started share its standard output."""
    line = json.dumps({"t": time.monotonic(), "kind": kind, **values}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


# ---------------------------------------------------------------- the experiment


@dataclass
class Replica:
    """A running replica and what it has printed."""

    name: str
    process: subprocess.Popen[str]
    commits: list[float] = field(default_factory=list)
    ready_at: float = 0.0


class Cluster:
    """Replicas, the queue of their output, and the faults."""

    def __init__(self, case: Case, lighthouse: str) -> None:
        self.case, self.lighthouse = case, lighthouse
        self.said: queue.Queue[tuple[Replica, dict[str, Any]]] = queue.Queue()
        self.replicas: dict[str, Replica] = {}
        self._starts = 0

    def start(self, index: int) -> Replica:
        victim = index == self.case.replicas - 1
        self._starts += 1
        # torchft's lighthouse remembers a dead name for a while, so each life gets a new one
        name = f"replica_{index}" + (f"_{self._starts}" if self.case.peer == "torchft" else "")
        in_netns = victim and self.case.fault == "link down"
        interface = INSIDE if in_netns else (OUTSIDE if self.case.fault == "link down" else "")
        command = [
            sys.executable,
            __file__,
            "--worker",
            self.case.peer,
            name,
            self.lighthouse,
            str(self.case.gib if victim else 0),
            interface,
        ]
        if in_netns:
            command = ["ip", "netns", "exec", NETNS, *command]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
        )
        replica = Replica(name, process)
        self.replicas[name] = replica
        threading.Thread(target=self._listen, args=(replica,), daemon=True).start()
        return replica

    def _listen(self, replica: Replica) -> None:
        assert replica.process.stdout is not None
        for line in replica.process.stdout:
            if line.startswith("{"):
                self.said.put((replica, json.loads(line)))

    def run_until(self, done: Any, limit_s: float = 90.0) -> None:
        """Process the replicas' output until `done(replica, event)`."""
        give_up = time.monotonic() + limit_s
        while True:
            try:
                replica, event = self.said.get(timeout=max(0.0, give_up - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(
                    f"{self.case.name}: no such event within {limit_s:g} s"
                ) from None
            if event["kind"] == "commit":
                replica.commits.append(event["t"])
            elif event["kind"] == "ready":
                replica.ready_at = event["t"]
            if done(replica, event):
                return

    def full_house(self, limit_s: float = 120.0) -> None:
        """Until the replicas together have made COMMITS_BETWEEN commits."""
        seen: dict[str, int] = {}

        def all_together(replica: Replica, event: dict[str, Any]) -> bool:
            if event["kind"] == "commit" and event["participants"] == self.case.replicas:
                seen[replica.name] = seen.get(replica.name, 0) + 1
            return len(seen) >= self.case.replicas and min(seen.values()) >= COMMITS_BETWEEN

        self.run_until(all_together, limit_s)

    def break_down(self, victim: Replica) -> float:
        """Inflict the fault; returns when."""
        time.sleep(random.random() * STEP_S)  # any phase of the step
        if self.case.fault == "link down":
            subprocess.run(["ip", "link", "set", "ftbench0", "down"], check=True)
            return time.monotonic()
        kill = signal.SIGKILL if self.case.fault == "SIGKILL" else signal.SIGSTOP
        at = time.monotonic()
        os.kill(victim.process.pid, kill)
        return at

    def bury(self, victim: Replica) -> None:
        victim.process.kill()
        victim.process.wait()
        del self.replicas[victim.name]
        if self.case.fault == "link down":
            subprocess.run(["ip", "link", "set", "ftbench0", "up"], check=True)

    def stop(self) -> None:
        for replica in self.replicas.values():
            if replica.process.stdin is not None:
                replica.process.stdin.close()
        for replica in self.replicas.values():
            try:
                replica.process.wait(15)
            except subprocess.TimeoutExpired:
                replica.process.kill()
                replica.process.wait()


def experiment(case: Case, trials: int) -> dict[str, Any]:
    """The figures of one case."""
    stop_server, address = start_lighthouse(case)
    cluster = Cluster(case, address)
    gaps, normal, rejoin = [], [], []
    try:
        for index in range(case.replicas):
            victim = cluster.start(index)
        cluster.full_house()
        for trial in range(trials):
            if trial:
                victim = cluster.start(case.replicas - 1)
                cluster.full_house()
                rejoin.append(victim.commits[0] - victim.ready_at)
            at = cluster.break_down(victim)
            survivors = [r for r in cluster.replicas.values() if r is not victim]
            target = {r.name: len(r.commits) + COMMITS_BETWEEN for r in survivors}
            waited = time.monotonic()
            cluster.run_until(
                lambda r, e, t=target, s=survivors: all(len(x.commits) >= t[x.name] for x in s)
            )
            gaps.append(max(_gaps(r.commits, at - 4 * STEP_S, time.monotonic()) for r in survivors))
            normal.append(
                statistics.median(_gap_list(survivors[0].commits, waited - 2.0, at - STEP_S))
            )
            cluster.bury(victim)
    finally:
        cluster.stop()
        stop_server()
    return {
        "gap_ms": [round(g * 1e3, 1) for g in gaps],
        "gap_median_ms": round(statistics.median(gaps) * 1e3, 1),
        "step_ms": round(statistics.median(normal) * 1e3, 1),
        "rejoin_s": round(statistics.median(rejoin), 3) if rejoin else None,
    }


def _gap_list(commits: list[float], start: float, end: float) -> list[float]:
    return [b - a for a, b in itertools.pairwise(commits) if start <= b and a <= end]


def _gaps(commits: list[float], start: float, end: float) -> float:
    return max(_gap_list(commits, start, end))


def start_lighthouse(case: Case) -> tuple[Any, str]:
    if case.peer == "ours":
        host = OUTSIDE if case.fault == "link down" else "127.0.0.1"
        expected = "--expected-replicas", str(case.replicas)
        process, address = common.start_lighthouse(*expected, host=host)

        def stop() -> None:
            process.terminate()
            process.wait(10)

        return stop, address
    import socket

    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    return server.shutdown, server.address().replace(socket.gethostname(), "127.0.0.1")


def network(up: bool) -> None:
    """A namespace with one link to this one."""
    subprocess.run(["ip", "netns", "del", NETNS], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["ip", "link", "del", "ftbench0"], stderr=subprocess.DEVNULL, check=False)
    if not up:
        return
    for command in (
        f"ip netns add {NETNS}",
        f"ip link add ftbench0 type veth peer name ftbench1 netns {NETNS}",
        f"ip addr add {OUTSIDE}/24 dev ftbench0",
        "ip link set ftbench0 up",
        f"ip -n {NETNS} addr add {INSIDE}/24 dev ftbench1",
        f"ip -n {NETNS} link set ftbench1 up",
        f"ip -n {NETNS} link set lo up",
    ):
        subprocess.run(command.split(), check=True)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[c.name for c in CASES], default=None)
    options = parser.parse_args()
    rows, figures = [], {}
    for case in CASES:
        if options.only is not None and case.name not in options.only:
            continue
        if case.peer == "torchft" and torchft_version() is None:
            print("torchft is not installed: pip install -e '.[bench]' measures it, too")
            continue
        if case.fault == "link down":
            network(up=True)
        try:
            found = experiment(case, options.trials)
        except (subprocess.CalledProcessError, TimeoutError) as error:
            print(f"{case.name}: {error}")
            continue
        finally:
            if case.fault == "link down":
                network(up=False)
        figures[case.name] = found
        beyond = found["gap_median_ms"] - found["step_ms"]
        rows.append(
            [
                case.name,
                case.fault,
                found["step_ms"],
                found["gap_median_ms"],
                f"{beyond:.1f}",
                " ".join(str(g) for g in found["gap_ms"]),
                found["rejoin_s"],
            ]
        )
        print(f"{case.name}: {found}", flush=True)
    columns = [
        "case",
        "fault",
        "step ms",
        "longest gap ms (median)",
        "beyond a step ms",
        "all trials",
        "ready to participating s",
    ]
    report(f"Failure, {options.trials} trials each", columns, rows, figures, options.json)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        work(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
    else:
        main()
