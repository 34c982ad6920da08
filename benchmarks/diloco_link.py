"""python benchmarks/diloco_link.py [--json FILE] [--mbit 100] [--delay-ms 20]

What training costs on a slow link: bytes a replica sends an inner step and wall time a step, for
plain DDP, LocalSGD, DiLoCo and Streaming DiLoCo with int4, two replicas, each in a network
namespace of its own, with a link of limited bandwidth and delay between them (needs root;
benchmarks/diloco_network.py). The lighthouse runs beside replica 0, so that replica 1's votes
cross the link, too. Bytes are counted on the link and include TCP, votes and heartbeats.
"alone" is the same training without any communication: the floor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from common import arguments, report
from diloco_network import Link

WIDTH, LAYERS, BATCH = 128, 4, 8
SYNC_EVERY = 50
PORT = 29777


@dataclass(frozen=True)
class Mode:
    name: str
    kind: str
    steps: int
    options: dict[str, Any]


MODES = [
    Mode("alone", "alone", 30, {}),
    Mode("DDP", "ddp", 20, {}),
    Mode("LocalSGD", "local_sgd", 2 * SYNC_EVERY, {}),
    Mode("DiLoCo", "diloco", 2 * SYNC_EVERY, {}),
    Mode("DiLoCo int4", "diloco", 2 * SYNC_EVERY, {"codec": "int4"}),
    Mode(
        "Streaming DiLoCo int4",
        "diloco",
        3 * SYNC_EVERY,
        {"codec": "int4", "fragments": 4, "fragment_sync_delay": 5},
    ),
]


# ---------------------------------------------------------------- one replica


class Replica:
    """Runs the modes given on stdin, one JSON line each; answers with JSON lines."""

    def __init__(self, rank: int, lighthouse: str) -> None:
        from diloco_task import text

        self.rank, self.lighthouse = rank, lighthouse
        self.data = text()[0]

    def serve(self) -> None:
        for line in sys.stdin:
            mode = Mode(**json.loads(line))
            loop = {"alone": self.alone, "ddp": self.ddp}.get(mode.kind, self.periodic)
            loop(mode)

    def steps(self, mode: Mode, model: Any, optimizer: Any) -> dict[str, float]:
        """The inner loop, the same for all modes. Waits for the parent's "go".

        Seconds a step, and of these in `optimizer.step()`, where outer steps happen.
        """
        from diloco_task import batch

        stepping_s = 0.0

        def step(number: int) -> None:
            nonlocal stepping_s
            optimizer.zero_grad()
            model(*batch(self.data, number, self.rank, BATCH)).backward()
            began = time.perf_counter()
            optimizer.step()
            stepping_s += time.perf_counter() - began

        if mode.kind in ("alone", "ddp"):
            for number in range(3):
                step(number)
        say(ready=mode.name)
        sys.stdin.readline()
        began, stepping_s = time.perf_counter(), 0.0
        for number in range(mode.steps):
            step(number)
        took_s = time.perf_counter() - began
        return {"step_s": took_s / mode.steps, "stepping_s": stepping_s / mode.steps}

    def build(self) -> tuple[Any, Any]:
        import torch
        from diloco_task import build

        model = build(WIDTH, LAYERS)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def alone(self, mode: Mode) -> None:
        model, optimizer = self.build()
        say(**self.steps(mode, model, optimizer))

    def ddp(self, mode: Mode) -> None:
        import torch
        import torch.distributed as dist

        model, optimizer = self.build()
        store = f"tcp://{Link.addresses[0]}:{PORT}"
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=2)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        say(**self.steps(mode, wrapped, optimizer))
        dist.destroy_process_group()

    def periodic(self, mode: Mode) -> None:
        """LocalSGD or DiLoCo."""
        import torch

        from ft_core import Manager, ProcessGroupGloo
        from ft_core.diloco.diloco import DiLoCo, LocalSGD

        model, optimizer = self.build()
        address = Link.addresses[self.rank]
        manager = Manager(
            ProcessGroupGloo(hostname=address),
            min_replica_size=2,
            use_async_quorum=False,
            lighthouse_addr=self.lighthouse,
            replica_id=str(self.rank),
            job_id=mode.name,
            expected_replicas=2,
            hostname=address,
            rank=0,
            world_size=1,
        )
        if mode.kind == "local_sgd":
            context: Any = LocalSGD(manager, model, optimizer, SYNC_EVERY)
        else:
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            context = DiLoCo(manager, model, optimizer, outer, SYNC_EVERY, **mode.options)
        with context:
            took = self.steps(mode, model, optimizer)
            say(
                **took,
                outer_steps=manager.current_step(),
                communication_s=context.stats.communication_s,
                hidden_s=context.stats.hidden_s,
            )
        manager.shutdown()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# ---------------------------------------------------------------- the experiment


class Pair:
    """Both replicas, each on its side of the link."""

    def __init__(self, link: Link, lighthouse: str) -> None:
        self.processes = [self._start(link, side, lighthouse) for side in (0, 1)]

    @staticmethod
    def _start(link: Link, side: int, lighthouse: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": link.interfaces[side],
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        command = [sys.executable, __file__, "--replica", str(side), lighthouse]
        return subprocess.Popen(
            link.command(side, *command),
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, line: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a replica has ended: see its message above")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(link: Link, pair: Pair, mode: Mode) -> dict[str, Any]:
    pair.tell(json.dumps(mode.__dict__))
    pair.hear()
    before = list(link.bytes_sent)
    pair.tell("go")
    answers = pair.hear()
    sent = max(now - then for now, then in zip(link.bytes_sent, before, strict=True))
    found = {
        "bytes_a_step": sent / mode.steps,
        "step_ms": max(a["step_s"] for a in answers) * 1e3,
        "stepping_ms": max(a["stepping_s"] for a in answers) * 1e3,
        "steps": mode.steps,
    }
    for key in ("communication_s", "hidden_s", "outer_steps"):
        if key in answers[0]:
            found[key] = sum(a[key] for a in answers) / 2
    return found


def start_lighthouse(link: Link) -> tuple[str, Callable[[], None]]:
    two = "--min-replicas", "2", "--expected-replicas", "2"
    process, address = common.start_lighthouse(*two, host=link.addresses[0], under=link.command(0))

    def stop() -> None:
        process.terminate()
        process.wait(10)

    return address, stop


def row(name: str, found: dict[str, Any], all_found: dict[str, dict[str, Any]]) -> list[str]:
    alone, ddp = all_found.get("alone"), all_found.get("DDP")
    fewer = f"{ddp['bytes_a_step'] / found['bytes_a_step']:.0f}" if ddp and name != "alone" else ""
    line = [name, f"{found['bytes_a_step']:,.0f}", fewer, f"{found['step_ms']:.1f}"]
    line.append(f"{found['step_ms'] / alone['step_ms']:.2f}" if alone else "")
    line.append(f"{ddp['step_ms'] / found['step_ms']:.2f}" if ddp else "")
    if found.get("communication_s"):
        line.append(f"{found['stepping_ms'] - alone['stepping_ms']:.1f}" if alone else "")
        line.append(f"{found['communication_s'] * 1e3 / found['outer_steps']:.0f}")
        line.append(f"{100 * found['hidden_s'] / found['communication_s']:.1f} %")
    else:
        line += ["", "", ""]
    return line


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--mbit", type=float, default=100.0, help="bandwidth, each direction")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--only", nargs="*", choices=[m.name for m in MODES], default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are removed then, too
    found: dict[str, dict[str, Any]] = {}
    with Link(options.mbit, options.delay_ms / 1e3) as link:
        lighthouse, stop = start_lighthouse(link)
        pair = Pair(link, lighthouse)
        try:
            for mode in MODES:
                if options.only is None or mode.name in options.only:
                    found[mode.name] = measure(link, pair, mode)
                    print(f"{mode.name}: {found[mode.name]}", flush=True)
        finally:
            pair.close()
            stop()
    columns = [
        "algorithm",
        "bytes a step",
        "times fewer than DDP",
        "ms a step",
        "times alone",
        "times faster than DDP",
        "of it outer steps, ms",
        "ms an outer step's communication",
        "hidden",
    ]
    rows = [row(name, one, found) for name, one in found.items()]
    title = f"Two replicas, {options.mbit:g} Mbit/s, {options.delay_ms:g} ms, H={SYNC_EVERY}"
    report(title, columns, rows, found, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        import torch

        torch.set_num_threads(1)
        Replica(int(sys.argv[2]), sys.argv[3]).serve()
    else:
        main()
