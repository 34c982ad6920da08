"""Ranks as both frameworks' strategies answer them: nominal, so that they stay when groups die."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from ft_core.config import JobOptions
from ft_core.shell.intra_group import IntraGroup
from ft_lightning.shared.strategy_options import Options, job_options
from ft_lightning.shared.topology import ENV_DEVICE, Scope, resolve

_TIMEOUT = timedelta(minutes=30)


class NominalRanks:
    """Part of a strategy. `_scope` is set when the Trainer or the Fabric is made."""

    parallel_devices: Any
    _options: Options
    _ranks_may_share_a_group = True
    """Not where a replica group trains on its own between two meetings: it is one process then."""
    _scope: Scope | None = None
    _in_group: IntraGroup
    _job: JobOptions
    _leader = False

    @property
    def scope(self) -> Scope:
        """Who this process is. Known once the Trainer or the Fabric has been created."""
        assert self._scope is not None, "the strategy is not attached to a Trainer or a Fabric yet"
        return self._scope

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        number = self._scope.device if self._scope else 0
        # All CPUs are one: `devices` need not say how many processes torchrun has started.
        on_cpu = self.parallel_devices[0].type == "cpu"
        device: torch.device = self.parallel_devices[0 if on_cpu else number]
        return device

    @property
    def global_rank(self) -> int:
        """Number of this process among those of all configured replica groups."""
        return self._scope.rank if self._scope else 0

    @property
    def world_size(self) -> int:
        """Number of processes in all configured replica groups."""
        return self._scope.world_size if self._scope else 1

    @property
    def node_rank(self) -> int:
        """Number of this machine among those of the replica group."""
        return self._scope.node if self._scope else 0

    def _find_scope(self, num_nodes: int) -> Scope:
        """Read the environment, once. Raises ValueError."""
        devices: list[Any] = list(self.parallel_devices or ())
        size = self._options.group_size
        if not self._ranks_may_share_a_group:
            size = self._one_process(size)
        scope = resolve(
            os.environ,
            devices=len(devices),
            num_nodes=num_nodes,
            group_size=size,
            num_replica_groups=self._options.num_replica_groups,
            replica_name=self._options.replica_name,
            lighthouse=self._options.lighthouse,
        )
        if scope.device >= len(devices) and devices[0].type != "cpu":
            raise ValueError(
                f"this process is to use device number {scope.device} ({ENV_DEVICE} and LOCAL_RANK "
                f"say so), but there are {len(devices)} device(s): make devices the number of "
                "processes that are started on this machine"
            )
        if scope.group_size > 1 and self._options.commit == "group":
            raise ValueError(
                'commit="group" lets each process decide for itself, and the ranks of a replica '
                'group must decide as one: use commit="quorum", or group_size=1'
            )
        timeout = getattr(self, "_timeout", None) or _TIMEOUT
        self._job = job_options(self._options, scope)
        self._in_group = IntraGroup(
            self._job, life=scope.restarts, timeout_s=timeout.total_seconds()
        )
        self._scope = scope
        return scope

    def _one_process(self, size: int | None) -> int:
        world = os.environ.get("WORLD_SIZE", "1") if os.environ.get("RANK") else "1"
        if size not in (None, 1) or world not in ("", "1"):
            raise ValueError(
                f"{type(self).__name__} trains one process a replica group, not {size or world}: "
                "the ranks of a group would have to average gradients among themselves between two "
                "outer steps; use group_size=1 (under torchrun --nproc-per-node 1), or ft_ddp"
            )
        return 1
