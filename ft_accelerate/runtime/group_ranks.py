"""The processes of one replica group: how each is made a member of a quorum.

Each process holds a whole copy of the model, and its collectives reach all processes of all groups
(`ft_core.Manager(ranks_hold="copies")`). The group joins, votes and heals as one. So its processes
must begin with one state; those of another group need not, since they would heal. What they agree on
before there is a quorum goes by `ft_core.shell.intra_group`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ft_accelerate.plugin.options import FaultTolerancePlugin, GroupPlace
from ft_core.config import JobOptions
from ft_core.errors import GroupBroken, GroupLeft
from ft_core.launch.rank_group import BROKEN_EXIT_CODE
from ft_core.launch.sigterm import EXIT_CODE
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_core.shell.intra_group import IntraGroup


class GroupRanks:
    """This process's replica group. The loop's thread only.

    `life`: how often the group was started again; the launcher's store may outlive a group.
    """

    def __init__(self, options: FaultTolerancePlugin, place: GroupPlace, life: int) -> None:
        self.options, self.place = options, place
        self.num_processes, self.process_index = (
            place.num_processes(options),
            place.process_index(options),
        )
        self._job = JobOptions.resolve(
            options,
            name=str(options.replica_group_id),
            expected_replicas=options.num_replica_groups,
            async_quorum=False,
            group_rank=place.rank,
            group_world_size=place.size,
            ranks_hold="copies",
            store_addr=place.store_addr,
            store_port=place.store_port,
            interface=place.interface,
        )
        self._in_group = IntraGroup(self._job, life=life)

    # ------------------------------------------------------------------ the quorum

    def manager(self, device: torch.device, *, suffix: str = "", **changes: Any) -> Manager:
        """Make this process's manager; the group's other processes must make theirs, too.

        `suffix`: of the job's name. `changes`: fields of `JobOptions` that differ. Waits for the
        others.
        """
        # What follows waits for as long as the lighthouse may be away.
        self.from_rank_0(lambda: None)
        job = replace(self._job, job_id=self._job.job_id + suffix, **changes)
        return Manager.from_options(process_group_for(device, job.timeout_s), job)

    # ------------------------------------------------------------------ before the quorum

    def from_rank_0(self, decide: Callable[[], Any]) -> Any:
        """What the group's rank 0 decides; all of its processes must call this at the same place."""
        with ended_with_its_group():
            return self._in_group.from_rank_0(decide)

    def sync_initial_state(
        self,
        name: Callable[[], str],
        give: Callable[[], Any],
        take: Callable[[Any], None],
        into: Callable[[], Any],
    ) -> str:
        """As `IntraGroup.sync_initial_state`."""
        with ended_with_its_group():
            return self._in_group.sync_initial_state(name, give, take, into=into)

    def close(self) -> None:
        """End the connections to the group's other processes; idempotent."""
        self._in_group.close()


@contextmanager
def ended_with_its_group() -> Iterator[None]:
    """If another process of the group is gone, end this one at once, with a line on stderr.

    The launcher starts the group again. Nothing that the script would do on its way out could work:
    its files belong to the main process, and its peers are gone. If the other was told to end by
    SIGTERM, this one ends in the same way (`ft_core.launch.sigterm`).
    """
    try:
        yield
    except GroupBroken as error:
        end_with_group(error)


def end_with_group(error: GroupBroken) -> NoReturn:
    """What `ended_with_its_group` does, for an `except` on the way of each step."""
    if isinstance(error, GroupLeft):
        raise SystemExit(EXIT_CODE) from error
    print(f"ft_accelerate: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(BROKEN_EXIT_CODE)
