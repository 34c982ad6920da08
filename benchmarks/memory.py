"""python benchmarks/memory.py [--json FILE]

Resident memory of each part: a lighthouse process, empty and with replica groups that are members
(simulated ones: real connections and messages); a training process before and after it has a
Manager that has committed steps; the watcher process beside it. What a heal costs is in
benchmarks/heal.py.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report, start_lighthouse

WATCHER_STARTS_S = 2.0


def resident_mib(pid: int) -> float:
    """Proportional (PSS) where the kernel reports it, so that shared libraries count once."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError("no Pss in smaps_rollup")


def lighthouse_with(replicas: int) -> float:
    """MiB of a lighthouse with that many members."""
    import zmq

    from lighthouse.client import Connection
    from lighthouse.config import Timeouts
    from lighthouse.wire.messages import JobKey, Join, Quorum, Waiting

    process, address = start_lighthouse("--expected-replicas", str(max(replicas, 1)))
    context: Any = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8 * replicas + 64)
    links, joins = [], []
    try:
        for index in range(replicas):
            name = f"replica_{index}"
            link = Connection(
                address, identity=name.encode(), timeouts=Timeouts.derive(), context=context
            )
            joins.append(Join(JobKey(), name, f"{name}:1", 0, "same", (bytes(200),)))
            link.send(joins[-1])
            links.append(link)
        waiting = set(range(replicas))
        while waiting:
            for index in list(waiting):
                for message in links[index].receive():
                    if isinstance(message, Quorum):
                        waiting.discard(index)
                    elif isinstance(message, Waiting) and message.offer is not None:
                        links[index].send(replace(joins[index], promised=message.offer))
            time.sleep(0.005)
        return resident_mib(process.pid)
    finally:
        for link in links:
            link.close()
        context.term()
        process.terminate()
        process.wait(10)


def training_process() -> dict[str, float]:
    """MiB of this process with torch and Gloo, and what a Manager adds to it."""
    import torch

    from ft_core import Manager, ProcessGroupGloo

    group = ProcessGroupGloo()
    weights = torch.zeros(85_000)
    before = resident_mib(os.getpid())
    process, address = start_lighthouse("--expected-replicas", "1")
    manager = Manager(
        group,
        lambda state: None,
        lambda: {"weights": weights},
        use_async_quorum=False,
        lighthouse_addr=address,
        replica_id="memory",
        rank=0,
        world_size=1,
    )
    try:
        for _ in range(20):
            manager.start_quorum()
            manager.allreduce(weights).wait()
            manager.should_commit()
        time.sleep(WATCHER_STARTS_S)  # the steps take less than its imports
        after = resident_mib(os.getpid())
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        watcher = sum(
            resident_mib(int(pid))
            for pid in children
            if b"lighthouse.watcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return {"training process": before, "Manager adds": after - before, "watcher": watcher}
    finally:
        manager.shutdown()
        process.terminate()
        process.wait(10)


def main() -> None:
    options = arguments(__doc__.split("\n\n")[1]).parse_args()
    figures = {f"lighthouse, {n} replica groups": lighthouse_with(n) for n in (0, 32, 512)}
    figures |= training_process()
    rows = [[name, f"{mib:.1f}"] for name, mib in figures.items()]
    report("Memory", ["part", "MiB (proportional set size)"], rows, figures, options.json)


if __name__ == "__main__":
    main()
