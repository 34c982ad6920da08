"""python benchmarks/bad_links.py [--seconds 12] [--json FILE]

What a link that loses packets, or is very slow, costs a job of two replica groups with default timeouts: steps, the longest of
them, discards, and connections that the lighthouse lost. A step takes 0.1 s and sums 64 bytes. Each group is in a network
namespace of its own (needs root; benchmarks/diloco_network.py); the lighthouse runs beside the first one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report
from diloco_link import start_lighthouse
from diloco_network import Link

PACE_S = 0.1
ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Kind:
    name: str
    kbyte_s: float = 1e5
    loss: float = 0.0


KINDS = [
    Kind("good"),
    Kind("5 % lost", loss=0.05),
    Kind("10 % lost", loss=0.1),
    Kind("20 % lost", loss=0.2),
    Kind("20 kB/s", kbyte_s=20),
]


def replica(side: int, lighthouse: str, seconds: float) -> None:
    """One replica group, which prints what became of its steps."""
    import torch

    from ft_core import Manager, ProcessGroupGloo

    address = Link.addresses[side]
    manager = Manager(
        ProcessGroupGloo(hostname=address),
        min_replica_size=2,
        use_async_quorum=False,
        lighthouse_addr=lighthouse,
        replica_id=str(side),
        expected_replicas=2,
        hostname=address,
        rank=0,
        world_size=1,
    )
    manager.start_quorum()
    manager.should_commit()
    began, longest_s, discards = time.monotonic(), 0.0, 0
    first = manager.current_step()
    while (now := time.monotonic()) < began + seconds:
        manager.start_quorum()
        manager.allreduce(torch.ones(16)).wait()
        discards += not manager.should_commit()
        took_s = time.monotonic() - now
        longest_s = max(longest_s, took_s)
        time.sleep(max(0.0, PACE_S - took_s))
    steps = manager.current_step() - first
    print(json.dumps({"steps": steps, "longest_s": longest_s, "discards": discards}), flush=True)
    sys.stdin.read()  # until both have measured


def measure(kind: Kind, seconds: float) -> dict[str, Any]:
    with Link(kind.kbyte_s * 8e-3, 0.01, kind.loss) as link:
        lighthouse, stop = start_lighthouse(link)
        members = [
            subprocess.Popen(
                link.command(
                    side,
                    "env",
                    f"PYTHONPATH={ROOT}",
                    "OMP_NUM_THREADS=1",
                    sys.executable,
                    __file__,
                    "--replica",
                    str(side),
                    lighthouse,
                    str(seconds),
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for side in (0, 1)
        ]
        try:
            said = [json.loads(member.stdout.readline()) for member in members if member.stdout]
            asked = link.command(
                0, sys.executable, "-m", "lighthouse", "status", "--json", "--address", lighthouse
            )
            status = json.loads(subprocess.check_output(asked, text=True, cwd=ROOT))
        finally:
            for member in members:
                member.kill()
                member.wait()
            stop()
    return {
        "steps": min(one["steps"] for one in said),
        "longest_s": max(one["longest_s"] for one in said),
        "discards": max(one["discards"] for one in said),
        "lost": status["server"]["lost_peers"],
    }


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--seconds", type=float, default=12.0, help="for each kind of link")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces are removed then, too
    found = {}
    for kind in KINDS:
        found[kind.name] = measure(kind, options.seconds)
        print(f"{kind.name}: {found[kind.name]}", flush=True)
    rows = [
        [name, one["steps"], f"{one['longest_s']:.2f}", one["discards"], one["lost"]]
        for name, one in found.items()
    ]
    columns = ["link", "steps", "longest, s", "discarded", "connections lost"]
    report(f"Two groups, {options.seconds:g} s each", columns, rows, found, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    else:
        main()
