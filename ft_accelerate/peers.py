"""The processes of one replica group: how each is made a member of a quorum, and what they settle
among themselves before, when there is no quorum yet.

Each process holds a whole copy of the model, and its collectives reach all processes of all groups
(`ft_core.Manager(ranks_hold="copies")`). The group joins, votes and heals with one voice. So its
processes must begin alike, which those of another group need not: they would heal. The first
process decides, by the group's rendezvous store, which stands as long as the group does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from ft_accelerate.options import FaultTolerancePlugin, GroupPlace
from ft_core.config import advertised_host
from ft_core.errors import GroupBroken
from ft_core.group_server import group_store
from ft_core.heal import HealKey, HealServer, fetch
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_core.rank_group import BROKEN_EXIT_CODE

WAIT_S = 24 * 3600.0
"""For another process of the group. One that dies does not keep the others waiting: their launcher
ends them."""


class Peers:
    """One process's view of its replica group. The loop's thread only.

    `life`: how often the group was started again; the launcher's store may outlive a group.
    """

    def __init__(self, options: FaultTolerancePlugin, place: GroupPlace, life: int) -> None:
        self.options, self.place = options, place
        self.slots, self.slot = place.slots(options), place.slot(options)
        self._prefix = f"ft_accelerate/{life}/{options.job_id}"
        self._matters = 0
        self._opened: Any = None

    # ------------------------------------------------------------------ the quorum

    def manager(
        self, device: torch.device, *, suffix: str = "", commit: str = "", **more: Any
    ) -> Manager:
        """A manager for this process; its group's other processes must make theirs, too.

        `suffix`: of the job's name. `commit`: "": as the options say. `more`: as `Manager` takes
        it. Waits for the others.
        """
        self.settle(lambda: b"")  # what follows waits for as long as the lighthouse may be away
        options = self.options
        return Manager(
            process_group_for(device, options.timeout_s),
            min_replica_size=options.min_replicas,
            use_async_quorum=False,
            timeout=timedelta(seconds=options.timeout_s),
            quorum_timeout=options.quorum_timeout,
            rank=self.place.rank,
            world_size=self.place.size,
            ranks_hold="copies",
            store_addr=self.place.store_addr,
            store_port=self.place.store_port,
            lighthouse_addr=options.lighthouse or None,
            replica_id=str(options.replica_group_id),
            job_id=options.job_id + suffix,
            expected_replicas=options.num_replica_groups,
            commit=commit or options.commit,
            heal_allow_objects=options.heal_allow_objects,
            token=options.token,
            **more,
        )

    # ------------------------------------------------------------------ before the quorum

    def settle(self, decide: Callable[[], bytes]) -> bytes:
        """What the first process of the group has decided; all of them must ask alike."""
        if self.place.size == 1:
            return decide()
        key = self._next_key()
        if self.place.rank:
            found: bytes = self._store.get(key)
            return found
        decided = decide()
        self._store.set(key, decided)
        return decided

    def begin_alike(
        self, name: str, give: Callable[[], Any], into: Any, take: Callable[[Any], None]
    ) -> str:
        """Let all processes of the group begin with the first one's state; returns its name.

        `name`: of this process's own state, equal for equal states. `give()` makes the state,
        which is received into the tensors of `into`; `take(state)` puts it in place where it was
        another. Raises HealError.
        """
        if self.place.size == 1:
            return name
        key = self._next_key()
        if self.place.rank:
            return self._receive(key, name, into, take)
        self._store.set(key, name.encode())
        others = range(1, self.place.size)
        differ = [rank for rank in others if self._store.get(f"{key}/{rank}") == b"differs"]
        if differ:
            options = self.options
            host = advertised_host(options.lighthouse, self.place.interface)
            server = HealServer(
                host=host, token=options.token, allow_objects=options.heal_allow_objects
            )
            try:
                server.publish(HealKey(0, name), give(), expected_targets=len(differ))
                self._store.set(f"{key}/address", server.address.encode())
                for rank in differ:
                    self._store.get(f"{key}/{rank}/taken")
            finally:
                server.close()
        return name

    def _receive(self, key: str, name: str, into: Any, take: Callable[[Any], None]) -> str:
        mine = f"{key}/{self.place.rank}"
        first = bytes(self._store.get(key)).decode()
        self._store.set(mine, b"equal" if first == name else b"differs")
        if first != name:
            address = bytes(self._store.get(f"{key}/address")).decode()
            state, _ = fetch(
                [address],
                HealKey(0, first),
                into=into,
                deadline=time.monotonic() + WAIT_S,
                allow_objects=self.options.heal_allow_objects,
                token=self.options.token,
            )
            take(state)
            self._store.set(f"{mine}/taken", b"")
        return first

    @property
    def _store(self) -> Any:
        if self._opened is None:
            place = self.place
            self._opened = group_store(
                place.store_addr, place.store_port, WAIT_S, hosts=place.rank == 0
            )
        return self._opened

    def _next_key(self) -> str:
        self._matters += 1
        return f"{self._prefix}/{self._matters}"


@contextmanager
def ended_with_its_group() -> Iterator[None]:
    """Where another process of the group is gone: end this one, at once and with a line.

    The launcher starts the group again. Nothing that the script would do on its way out could
    work: its files are the main process's, and its peers are gone.
    """
    try:
        yield
    except GroupBroken as error:
        print(f"ft_accelerate: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(BROKEN_EXIT_CODE)
