"""The strategy's options, and the manager that they make."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_lightning.scope import Scope

_REFUSED = {
    "ddp_comm_state": "gradients travel through the manager",
    "ddp_comm_hook": "gradients travel through the manager",
    "ddp_comm_wrapper": "gradients travel through the manager",
    "model_averaging_period": "post-local SGD needs a fixed world",
    "start_method": "each replica group runs the script itself",
    "process_group_backend": "it follows from the device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `FTDDPMixin`'s arguments, which these are. Raises ValueError."""

    min_replicas: int
    num_replica_groups: int | None
    lighthouse: str | None
    timeout_s: float
    quorum_timeout_s: float | None
    replica_name: str | None
    commit: str
    max_retries: int | None
    max_restarts: int
    heal_allow_objects: bool
    token: str
    job_id: str | None

    @property
    def quorum_timeout(self) -> timedelta | None:
        """`quorum_timeout_s` as the manager takes it."""
        return None if self.quorum_timeout_s is None else timedelta(seconds=self.quorum_timeout_s)

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ValueError(f"min_replicas must be at least 1, got {self.min_replicas}")
        groups = self.num_replica_groups
        if groups is not None and groups < self.min_replicas:
            raise ValueError(
                f"num_replica_groups ({groups}) must be at least min_replicas ({self.min_replicas})"
            )
        for name in ("timeout_s", "quorum_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.commit not in ("quorum", "group"):
            raise ValueError(f'commit must be "quorum" or "group", got {self.commit!r}')
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")


_DEFAULTS = {"start_method": "popen", "init_sync": True}


def refuse_ddp_options(given: dict[str, Any]) -> None:
    """Raise ValueError for options of DDPStrategy that cannot work here.

    Takes those out that say no more than their default: LightningCLI passes all that there are.
    """
    for name, default in _DEFAULTS.items():
        if given.get(name) == default:
            del given[name]
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise ValueError(f"ft_ddp takes no {name}: {reason}")


def make_manager(options: Options, scope: Scope, device: torch.device) -> Manager:
    """The manager of one fit. Opens no connection yet."""
    return Manager(
        process_group_for(device, options.timeout_s),
        min_replica_size=options.min_replicas,
        use_async_quorum=False,
        timeout=timedelta(seconds=options.timeout_s),
        quorum_timeout=options.quorum_timeout,
        rank=0,
        world_size=1,
        lighthouse_addr=options.lighthouse,
        replica_id=scope.name,
        max_retries=options.max_retries,
        job_id=options.job_id,
        expected_replicas=scope.num_groups,
        commit=options.commit,
        heal_allow_objects=options.heal_allow_objects,
        token=options.token,
    )
