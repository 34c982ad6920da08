"""How long a process group takes to get other members, and how soon a revocation frees everyone.

    python -m benchmarks.reconfigure [--ranks 2 4 8] [--repeats 30] [--json FILE]

Members are threads of this process, each with a Gloo group of its own on the loopback interface.
Configure: from the moment all members may begin until the last one can issue collectives, for
torch's native reconfiguration, for a group rebuilt on our meeting, and for what a plain job does:
`ProcessGroupGloo` on a TCPStore, kept or new. Revoke: from the first `revoke()` until the last
`wait()` has raised, blocked on a member that does not come (40 B) or in full transfer (64 MiB).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
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


def together(action: Callable[[int], Any], count: int) -> float:
    """Run `action(rank)` in threads that begin at once; seconds until the last one is done."""
    begin, end, errors = threading.Barrier(count + 1), threading.Barrier(count + 1), []

    def run(rank: int) -> None:
        begin.wait()
        try:
            action(rank)
        except Exception as error:
            errors.append(error)
        end.wait(2 * TIMEOUT_S)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    end.wait(2 * TIMEOUT_S)
    took_s = time.perf_counter() - began
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return took_s


class Ours:
    """The groups of `count` members, with or without native reconfiguration."""

    def __init__(self, count: int, native: bool) -> None:
        self.groups = [
            ProcessGroupGloo(TIMEOUT_S, hostname="127.0.0.1", native=native) for _ in range(count)
        ]
        self.addresses = [group.address() for group in self.groups]
        self.quorum_id = 0

    def configure(self) -> float:
        self.quorum_id += 1
        return together(
            lambda rank: self.groups[rank].configure(
                self.quorum_id, rank, self.addresses, TIMEOUT_S
            ),
            len(self.groups),
        )

    def revoke(self, elements: int, missing: int) -> float:
        """Seconds from the first revocation to the last free member."""
        count = len(self.groups) - missing
        issued = threading.Barrier(count + 1)
        tensors = [torch.ones(elements) for _ in range(count)]
        freed_at = [0.0] * count

        def blocked(rank: int) -> None:
            work = self.groups[rank].allreduce([tensors[rank]])
            issued.wait()
            try:
                work.wait()
            except ProcessGroupError:
                freed_at[rank] = time.perf_counter()

        threads = [threading.Thread(target=blocked, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        issued.wait()
        time.sleep(0.01)  # let them run into it
        began = time.perf_counter()
        for group in self.groups:
            group.revoke(RuntimeError("benchmark"))
        for thread in threads:
            thread.join()
        return max(freed_at) - began

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()


def plain_s(count: int, repeats: int, new_store: bool) -> list[float]:
    """A fresh Gloo group on a TCPStore, as `init_process_group` makes it."""
    took = []
    stores: list[dist.TCPStore] = []
    for repeat in range(repeats):
        groups: list[Any] = [None] * count
        if new_store or not stores:
            stores = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
            if not new_store:
                stores += [client(stores[0].port) for _ in range(count - 1)]

        def build(
            rank: int, repeat: int = repeat, stores: Sequence[Any] = stores, groups: Any = groups
        ) -> None:
            store = stores[rank] if rank < len(stores) else client(stores[0].port)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=TIMEOUT_S)
            prefixed = dist.PrefixStore(f"quorum/{repeat}", store)
            groups[rank] = dist.ProcessGroupGloo(prefixed, rank, count, options)

        took.append(together(build, count))
        groups.clear()
    return took


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def milliseconds(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e3:.1f} ({ordered[-1] * 1e3:.0f})"


def measure(count: int, repeats: int, native: bool) -> dict[str, list[float]]:
    ours = Ours(count, native)
    try:
        ours.configure()  # the first one also makes the sockets
        figures: dict[str, list[float]] = {"configure_s": [], "blocked_s": [], "transfer_s": []}
        for repeat in range(repeats):
            figures["configure_s"].append(ours.configure())
            figures["blocked_s"].append(ours.revoke(10, missing=1))
            if repeat < max(1, repeats // 5):
                ours.configure()
                figures["transfer_s"].append(ours.revoke(16 * MIB, missing=0))
    finally:
        ours.close()
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    kinds = {"native": True, "rebuild": False}
    if not native_reconfigure_available():
        del kinds["native"]
    configures, revokes, figures = [], [], []
    for count in options.ranks:
        row = {kind: measure(count, options.repeats, native) for kind, native in kinds.items()}
        kept, new = (plain_s(count, options.repeats, new_store) for new_store in (False, True))
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
