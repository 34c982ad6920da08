"""How long a change of members takes, and how soon a revocation frees all of them.

    python -m benchmarks.reconfigure [--ranks 2 3 4] [--repeats 30] [--json FILE]

Members are processes on this machine, on the loopback interface; use as many cores as ranks.
Configure: from the moment all members may begin until the last one can issue collectives, for
torch's native reconfiguration, for a group rebuilt by our rendezvous, and for a plain job:
`ProcessGroupGloo` on a TCPStore, kept or new. Revoke: from the first `revoke()` until the last
`wait()` has raised, blocked on a member that is missing (40 B) or in full transfer (64 MiB).
"store kept" reuses a store client; "store new" also connects one, as a restart does.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import arguments, report
from ft_core.process_group import (
    ProcessGroupError,
    ProcessGroupGloo,
    native_reconfigure_available,
)

TIMEOUT_S = 30.0
MIB = 1 << 20
LEAD_S = 0.03
TRANSFER_LEAD_S = 0.08  # by then the tensor exists and the transfer is under way


class Member:
    """One rank, in its own process: runs the parent's orders at an agreed moment."""

    def __init__(self, kind: str, rank: int, count: int, orders: Any) -> None:
        self.kind, self.rank, self.count, self.orders = kind, rank, count, orders
        self.quorum_id = 0
        self.plain: Any = None
        self.store: Any = None
        self.group: ProcessGroupGloo | None = None
        if kind in ("native", "rebuild"):
            self.group = ProcessGroupGloo(TIMEOUT_S, hostname="127.0.0.1", native=kind == "native")

    def serve(self) -> None:
        self.orders.send(self.group.address() if self.group else b"")
        self.addresses = self.orders.recv()
        while (order := self.orders.recv()) is not None:
            name, *arguments = order
            self.orders.send(getattr(self, name)(*arguments))
        if self.group is not None:
            self.group.shutdown()

    def configure(self, begin_at: float) -> float:
        assert self.group is not None
        self.quorum_id += 1
        sleep_until(begin_at)
        self.group.configure(self.quorum_id, self.rank, self.addresses, TIMEOUT_S)
        return time.monotonic()

    def build(self, begin_at: float, port: int, keep_store: bool) -> float:
        """As a plain job does it."""
        self.plain = None
        self.quorum_id += 1
        if not keep_store:
            self.store = None
        sleep_until(begin_at)
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        prefixed = dist.PrefixStore(f"quorum/{self.quorum_id}", self.store)
        self.plain = dist.ProcessGroupGloo(prefixed, self.rank, self.count, options)
        return time.monotonic()

    def revoke(self, begin_at: float, elements: int) -> float:
        """When this rank was free, revoked at `begin_at`; `elements` 0: it does not participate."""
        assert self.group is not None
        if elements == 0:
            sleep_until(begin_at)
            self.group.revoke(RuntimeError("benchmark"))
            return begin_at
        tensor = torch.ones(elements)
        freed: list[float] = []
        # Several, so that the revocation arrives during a transfer and not after it.
        works = [self.group.allreduce([tensor]) for _ in range(8 if elements > MIB else 1)]

        def wait() -> None:
            for work in works:
                try:
                    work.wait()
                except ProcessGroupError:
                    pass
            freed.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        sleep_until(begin_at)
        self.group.revoke(RuntimeError("benchmark"))
        waiter.join()
        return freed[0]


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def member(kind: str, rank: int, count: int, orders: Any) -> None:
    torch.set_num_threads(1)
    Member(kind, rank, count, orders).serve()


class Crew:
    """The members of one measurement, as processes."""

    def __init__(self, kind: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(kind, rank, count, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        addresses = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(addresses)

    def order(self, lead_s: float, *words: Any, absent: int = -1) -> float:
        """All start at one moment, `lead_s` from now; seconds from then until the last is done."""
        begin_at = time.monotonic() + lead_s
        name, *rest = words
        for rank, pipe in enumerate(self.pipes):
            pipe.send((name, begin_at, *((0,) if rank == absent else rest)))
        return float(max(pipe.recv() for pipe in self.pipes) - begin_at)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(TIMEOUT_S)
            process.close()


def plain_s(count: int, repeats: int, keep_store: bool) -> list[float]:
    """A fresh Gloo group on a TCPStore, as `init_process_group` makes it."""
    crew = Crew("plain", count)
    try:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return [crew.order(LEAD_S, "build", store.port, keep_store) for _ in range(repeats)]
    finally:
        crew.close()


def milliseconds(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e3:.1f} ({ordered[-1] * 1e3:.0f})"


def measure(kind: str, count: int, repeats: int) -> dict[str, list[float]]:
    crew = Crew(kind, count)
    try:
        crew.order(LEAD_S, "configure")  # the first one also creates the sockets
        figures: dict[str, list[float]] = {"configure_s": [], "blocked_s": [], "transfer_s": []}
        for repeat in range(repeats):
            figures["configure_s"].append(crew.order(LEAD_S, "configure"))
            figures["blocked_s"].append(crew.order(LEAD_S, "revoke", 10, absent=count - 1))
            if repeat < max(1, repeats // 5):
                crew.order(LEAD_S, "configure")
                figures["transfer_s"].append(crew.order(TRANSFER_LEAD_S, "revoke", 16 * MIB))
    finally:
        crew.close()
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    kinds = ["native", "rebuild"] if native_reconfigure_available() else ["rebuild"]
    configures, revokes, figures = [], [], []
    for count in options.ranks:
        row = {kind: measure(kind, count, options.repeats) for kind in kinds}
        kept, new = (plain_s(count, options.repeats, keep) for keep in (True, False))
        entry: dict[str, Any] = {"ranks": count, "plain_kept_s": kept, "plain_new_s": new}
        figures.append({**entry, **row})
        ours = [milliseconds(row[kind]["configure_s"]) for kind in kinds]
        configures.append([count, *ours, milliseconds(kept), milliseconds(new)])
        revokes.append(
            [count]
            + [
                milliseconds(row[kind][what])
                for kind in kinds
                for what in ("blocked_s", "transfer_s")
            ]
        )
    report(
        "configure, ms: median (max)",
        ["ranks", *kinds, "plain, store kept", "plain, store new"],
        configures,
        figures,
        options.json,
    )
    columns = [f"{kind}, {what}" for kind in kinds for what in ("40 B", "64 MiB")]
    report("revoke to all freed, ms: median (max)", ["ranks", *columns], revokes, None, None)


if __name__ == "__main__":
    main()
