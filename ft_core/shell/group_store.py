"""A replica group's store: where its ranks find each other (MASTER_ADDR, MASTER_PORT).

torchrun keeps its store when it starts a group again, with what the last life has left in it. torch's own process
groups take the addresses that they find there for those of their peers, and fail, or wait until their timeout
(pytorch/pytorch#135712). So each life has keys of its own here (`RollCall`).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from ft_core.environment import ReplicaEnv
from lighthouse.own_address import resolve
from lighthouse.waits import Overdue, in_time

HOSTED = timedelta(seconds=20)
"""For a store that is there, and which answers however busy it is."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group` over the ranks of this replica group, in a loop of your own.

    The ranks are those that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name, as torchrun sets them, also when it
    has started them again; without these variables it is this process alone. `options`: torch's, but for `init_method`, `store`,
    `rank` and `world_size`. Raises ValueError for an address that is missing, and what torch raises. Main thread.
    """
    import torch.distributed as dist

    from ft_core.process_group.nccl import outlive_nccl_errors

    env = ReplicaEnv.read()
    rank, size = env.group_rank, env.group_world_size
    timeout = options.get("timeout") or _DEFAULT_TIMEOUT
    store = store_of_life(env.master_addr, env.master_port, timeout, rank=rank, size=size)
    outlive_nccl_errors(backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


def store_of_life(
    store_addr: str, store_port: int, timeout: timedelta, *, rank: int, size: int
) -> Any:
    """For torch's default process group of this life of the replica group. Waits for its other ranks. A group of one
    rank needs no address. Raises as `group_store` and `RollCall.key`."""
    import torch.distributed as dist

    if size == 1:
        return dist.HashStore()
    limit_s = timeout.total_seconds()
    store = group_store(store_addr, store_port, limit_s, hosts=rank == 0)
    return dist.PrefixStore(
        RollCall("ft_core/default group", rank, size).key(store, limit_s), store
    )


def _of_this_machine(store_addr: str, store_port: int) -> int | None:
    """A listening socket for a store that only processes of this machine are to reach; None: for others,
    too, or the port is taken. Without it torch listens on all interfaces, and keeps each connection."""
    try:
        if not ipaddress.ip_address(store_addr).is_loopback:
            return None
        family = socket.AF_INET6 if ":" in store_addr else socket.AF_INET
        return socket.create_server((store_addr, store_port), family=family, backlog=4096).detach()
    except (ValueError, OSError):  # a name; or this process has the store already
        return None


class RollCall:
    """Gives all ranks of this life of a replica group one key of its store, which no other life has.

    The store may still have what an earlier life has left, and no count tells the lives apart: torchrun counts
    restarts on each machine for itself. So each side draws a number, and has seen the other answer it. All ranks
    make their calls `here` in one order.
    """

    def __init__(self, here: str, rank: int, size: int) -> None:
        self._here, self._rank, self._size = here, rank, size
        self._number = secrets.token_hex(8)

    def key(self, store: Any, limit_s: float) -> str:
        """Waits for the other ranks; a call that has failed can be made again. Raises DistStoreError after `limit_s`
        and what the store raises."""
        import torch.distributed as dist

        deadline, overdue, pause_s = time.monotonic() + limit_s, Overdue(), 0.001
        if self._rank:
            store.set(f"{self._here}/rank {self._rank}", self._number)
        while not (key := self._answer(store) if self._rank else self._call(store)):
            if overdue.passed(deadline, time.monotonic()):
                raise dist.DistStoreError(
                    f"another rank of this replica group has not answered within {limit_s:g} s"
                )
            time.sleep(pause_s)  # a wait in the store would hear no signal
            pause_s = min(2 * pause_s, 0.05)
        return key

    def _call(self, store: Any) -> str:
        """Rank 0 looks once. Returns the key once all ranks have answered."""
        key = f"{self._here}/{self._number}"
        for rank in range(1, self._size):
            came, answered = f"{self._here}/rank {rank}", _answer_of(rank, key)
            if store.check([came]):
                # In this order: a rank that has answered may be at its next call.
                number = store.get(came).decode()
                if not store.check([answered]):
                    store.set(f"{self._here}/{number}", self._number)
        answers = [_answer_of(rank, key) for rank in range(1, self._size)]
        return key if store.check(answers) else ""

    def _answer(self, store: Any) -> str:
        """Another rank looks once. Returns the key once rank 0 has called it."""
        if not store.check([f"{self._here}/{self._number}"]):
            return ""
        key = f"{self._here}/{store.get(f'{self._here}/{self._number}').decode()}"
        store.set(_answer_of(self._rank, key), "")
        return key


def _answer_of(rank: int, key: str) -> str:
    """Beside `key`, not below it: that is for those who have made the call."""
    return f"{key} heard by rank {rank}"


def group_store(store_addr: str, store_port: int, timeout_s: float, *, hosts: bool) -> Any:
    """The replica group's store. `hosts`: this rank (number 0) runs it, unless the launcher does.

    Waits up to `timeout_s` for another process' store, as each `get` does for its key. Raises ValueError
    for a missing address, RuntimeError if the port is another program's and that had 20 s to answer, or as
    the store does.
    """
    if not store_addr or not store_port:
        raise ValueError(
            "a replica group of several ranks needs its rendezvous store: set MASTER_ADDR and "
            "MASTER_PORT (torchrun does) or pass store_addr and store_port"
        )
    import torch.distributed as dist

    where, timeout = (store_addr, store_port), timedelta(seconds=timeout_s)
    if hosts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        limit = max(timeout, HOSTED)
        try:
            # Tenants: torch's default group of this process may have the same store.
            store = _reach_store(
                *where,
                limit,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=_of_this_machine(*where),
            )
            store.set_timeout(timeout)
            return store
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            # Another process listens there: the store's, or a stranger.
            try:
                _reach_store(*where, min(timeout, HOSTED))
            except dist.DistError:
                if timeout < HOSTED:  # a store may not have had the time to answer
                    raise
                raise RuntimeError(
                    f"rank 0 can't run its replica group's store at {store_addr}:{store_port}, and what "
                    f"listens there is no store: start the group again with another MASTER_PORT ({error})"
                ) from error
    return _reach_store(*where, timeout)


def _reach_store(store_addr: str, store_port: int, limit: timedelta, **options: Any) -> Any:
    """A store, within `limit`, which is also that of its calls. In a thread: torch tries for up to twice as
    long, waits without end for what accepts a connection and says nothing, and hears no signal."""
    import torch.distributed as dist

    made, over = Future[Any](), threading.Event()

    def make() -> None:
        try:
            made.set_result(dist.TCPStore(store_addr, store_port, None, timeout=limit, **options))
        except Exception as error:
            made.set_exception(error)
        over.set()

    threading.Thread(target=make, name="ft_core store", daemon=True).start()
    if in_time(over.wait, time.monotonic() + limit.total_seconds()):
        return made.result()
    why = "it is MASTER_ADDR and MASTER_PORT"
    try:
        resolve(store_addr, store_port)
    except ValueError as error:
        why = str(error)
    raise dist.DistNetworkError(f"no store answers at {store_addr}:{store_port}; {why}")
