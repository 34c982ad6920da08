"""torchft's half of `quorum_round.py`: rounds through its lighthouse, as JSON on stdout.

    python benchmarks/quorum_round_torchft.py REPLICAS ROUNDS

Runs under any Python that has torchft; imports nothing else. The server is a process of its own.
One thread a replica: torchft's client is blocking, written in Rust, and releases the GIL.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta

TIMEOUT = timedelta(seconds=280)


def serve(replicas: int) -> None:
    """Until stdin closes."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=replicas, join_timeout_ms=60_000, quorum_tick_ms=10
    )
    print(server.address(), flush=True)
    sys.stdin.read()
    server.shutdown()


Times = list[tuple[float, float, int]]
"""Of each replica: when it asked, when the answer came, and with how many participants."""


def replica(rank: int, address: str, rounds: int, barrier: threading.Barrier, out: Times) -> None:
    """One replica's life; `barrier` starts and ends each round."""
    from torchft.coordination import LighthouseClient

    client = LighthouseClient(address, TIMEOUT)
    barrier.wait()
    for _ in range(rounds):
        barrier.wait()
        begin = time.perf_counter()
        quorum = client.quorum(
            replica_id=f"replica_{rank}",
            timeout=TIMEOUT,
            address=f"http://10.0.0.{rank % 250}:29512",
            store_address=f"10.0.0.{rank % 250}:29513",
            step=7,
        )
        out[rank] = (begin, time.perf_counter(), len(quorum.participants))
        barrier.wait()


def main() -> None:
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
        return
    replicas, rounds = int(sys.argv[1]), int(sys.argv[2])
    command = [sys.executable, __file__, "--serve", str(replicas)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        barrier = threading.Barrier(replicas + 1)
        times: Times = [(0.0, 0.0, 0)] * replicas
        threading.stack_size(256 * 1024)
        threads = [
            threading.Thread(target=replica, args=(rank, address, rounds, barrier, times))
            for rank in range(replicas)
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        times_s = []
        for _ in range(rounds):
            barrier.wait()  # ask
            barrier.wait()  # all have their answer
            assert {size for _, _, size in times} == {replicas}
            times_s.append(max(end for _, end, _ in times) - min(begin for begin, _, _ in times))
        for thread in threads:
            thread.join()
        server.kill()
    steady = times_s[1:] or times_s
    print(json.dumps({"form_s": times_s[0], "steady_s": statistics.median(steady)}))


if __name__ == "__main__":
    main()
