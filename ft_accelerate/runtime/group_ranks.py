"""The processes of one replica group: how each is made a member of a quorum.

Each process holds a whole copy of the model, and its collectives reach all processes of all groups
(`ft_core.Manager(ranks_hold="copies")`). The group joins, votes and heals with one voice. So its
processes must begin alike, which those of another group need not: they would heal. What they settle
before, when there is no quorum yet, goes by `ft_core.shell.intra_group`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from ft_accelerate.plugin.options import FaultTolerancePlugin, GroupPlace
from ft_core.config import HealOptions
from ft_core.errors import GroupBroken, GroupLeft
from ft_core.launch.rank_group import BROKEN_EXIT_CODE
from ft_core.launch.sigterm import EXIT_CODE
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_core.shell.intra_group import IntraGroup


class GroupRanks:
    """One process's view of its replica group. The loop's thread only.

    `life`: how often the group was started again; the launcher's store may outlive a group.
    """

    def __init__(self, options: FaultTolerancePlugin, place: GroupPlace, life: int) -> None:
        self.options, self.place = options, place
        self.num_processes, self.process_index = (
            place.num_processes(options),
            place.process_index(options),
        )
        self._in_group = IntraGroup(
            place.rank,
            place.size,
            store_addr=place.store_addr,
            store_port=place.store_port,
            life=life,
            interface=place.interface,
        )

    # ------------------------------------------------------------------ the quorum

    def manager(
        self, device: torch.device, *, suffix: str = "", commit: str = "", **more: Any
    ) -> Manager:
        """A manager for this process; its group's other processes must make theirs, too.

        `suffix`: of the job's name. `commit`: "": as the options say. `more`: as `Manager` takes
        it. Waits for the others.
        """
        self.settle(lambda: None)  # what follows waits for as long as the lighthouse may be away
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

    def settle(self, decide: Callable[[], Any]) -> Any:
        """What the first process of the group has decided; all of them must ask alike."""
        with ended_with_its_group():
            return self._in_group.settle(decide)

    def begin_alike(
        self,
        name: Callable[[], str],
        give: Callable[[], Any],
        take: Callable[[Any], None],
        into: Callable[[], Any],
    ) -> str:
        """As `IntraGroup.begin_alike`."""
        options = self.options
        with ended_with_its_group():
            return self._in_group.begin_alike(
                name,
                give,
                take,
                into=into,
                options=HealOptions(
                    token=options.token, allow_objects=options.heal_allow_objects
                ),
            )

    def close(self) -> None:
        """End the connections to the others of the group. Twice is once."""
        self._in_group.close()


@contextmanager
def ended_with_its_group() -> Iterator[None]:
    """Where another process of the group is gone: end this one, at once and with a line.

    The launcher starts the group again. Nothing that the script would do on its way out could
    work: its files are the main process's, and its peers are gone. If the other was told to end,
    this one ends as it does (`ft_core.launch.sigterm`).
    """
    try:
        yield
    except GroupLeft as error:
        raise SystemExit(EXIT_CODE) from error
    except GroupBroken as error:
        print(f"ft_accelerate: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(BROKEN_EXIT_CODE)
