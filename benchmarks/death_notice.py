"""How soon the lighthouse learns of a killed process, with and without a watcher.

    python benchmarks/death_notice.py [--gib 0 4] [--repeat 5]

Each victim is a process of its own that joins, touches that much memory and is killed (SIGKILL).
"closed socket": detected by ZeroMQ's monitor. "watcher": detected by `lighthouse.watcher`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import zmq

from lighthouse.client import Connection
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.machine.job import Note
from lighthouse.process_watch import ProcessWatch, Report
from lighthouse.server import LighthouseServer
from lighthouse.wire.messages import JobKey, Join, Message, Quorum, Waiting

JOB = JobKey("bench", "death")
# Missed heartbeats must not be what is measured.
TIMEOUTS = Timeouts.derive(60.0, heartbeat_timeout_s=5.0)


def victim(address: str, gib: float, watched: bool) -> None:
    """Join, allocate the memory, say so, and wait to be killed."""
    memory = mmap.mmap(-1, max(int(gib * 2**30), 4096))
    for page in range(0, len(memory), 4096):
        memory[page] = 1
    context = zmq.Context()
    name = f"victim-{os.getpid()}"
    connection = Connection(address, identity=name.encode(), timeouts=TIMEOUTS, context=context)
    watch = ProcessWatch(connection.address, TIMEOUTS, name.encode())
    if watched:
        assert watch.start([Report(JOB, name)])
        assert watch.wait_ready(10.0)
    join = Join(JOB, name, name, 0, "init", (b"",), expected_replicas=1)
    connection.send(join)
    messages: list[Message] = []
    while not any(isinstance(message, Quorum) for message in messages):
        for message in messages:
            if isinstance(message, Waiting) and message.offer is not None:
                connection.send(replace(join, promised=message.offer))
        connection.sockets[0].poll(1000)
        messages = connection.receive()
    print("ready", flush=True)
    sys.stdin.read()  # also ends if the measuring process is gone


def measure(gib: float, watched: bool) -> tuple[float, str]:
    """(seconds from SIGKILL until the lighthouse knows, the reason it logs)."""
    notes: queue.SimpleQueue[tuple[float, Note]] = queue.SimpleQueue()
    config = LighthouseConfig(timeouts=TIMEOUTS)
    with LighthouseServer(
        config=config, on_note=lambda note: notes.put((time.perf_counter(), note))
    ) as server:
        command = [sys.executable, __file__, "--victim", server.address(), "--gib", str(gib)]
        command += ["--watched"] if watched else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            killed_at = time.perf_counter()
            process.kill()
            while True:
                at, note = notes.get(timeout=20)
                if "revoked" in note.text:
                    return at - killed_at, note.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[0.0, 4.0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--victim", help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.victim:
        victim(options.victim, options.gib[0], options.watched)
        return
    print(f"{'resident':>10} {'noticed by':>15} {'median ms':>10} {'worst ms':>9}")
    for gib in options.gib:
        for watched in (False, True):
            runs = [measure(gib, watched) for _ in range(options.repeat)]
            first = sum("process died" in text for _, text in runs)  # else the socket was first
            times_ms = [seconds * 1000 for seconds, _ in runs]
            print(
                f"{gib:>6.1f} GiB {'watcher' if watched else 'closed socket':>15}"
                f" {statistics.median(times_ms):>10.2f} {max(times_ms):>9.2f}"
                f"{f'   (first in {first} of {len(runs)})' if watched else ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
