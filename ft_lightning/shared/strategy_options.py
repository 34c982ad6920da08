"""The strategy's options, and the manager that they make."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

import torch

from ft_core.config import JobOptions
from ft_core.environment import ReplicaEnv
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_lightning.shared.topology import Role, Scope

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
    group_size: int | None = None
    validation: str = "replicated"

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ValueError(f"min_replicas must be at least 1, got {self.min_replicas}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
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
        if self.validation not in ("replicated", "sharded"):
            raise ValueError(
                f'validation must be "replicated" or "sharded", got {self.validation!r}'
            )
        if self.validation == "sharded" and self.commit == "group":
            raise ValueError(
                'validation="sharded" needs commit="quorum": with commit="group" nothing says '
                "which groups are at the same validation"
            )
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


def refuse_lbfgs(optimizers: Any) -> None:
    """Raise ValueError for an optimizer that cannot step fault-tolerantly."""
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise ValueError(
            "LBFGS evaluates the loss several times a step, which a fault-tolerant step "
            "cannot: use an optimizer that evaluates it once"
        )


def job_of(options: Options, scope: Scope, known: ReplicaEnv) -> str | None:
    """The job of this fit; None: what the environment says.

    A fit that nothing says has peers has a job of its own. Several such on one machine share a
    lighthouse, and would else be taken for lives of one replica group.
    """
    named = options.job_id or options.replica_name or known.name
    if scope.num_groups > 1 or named or known.job_id != ReplicaEnv().job_id:
        return options.job_id
    if scope.group_size > 1:  # all its ranks must call it the same
        return f"alone-{scope.store_addr}:{scope.store_port}"
    return f"alone-{uuid.uuid4().hex[:12]}"


def job_options(options: Options, scope: Scope) -> JobOptions:
    """The strategy's options, settled for this process. A supervisor has ranks, and no peers."""
    return JobOptions.resolve(
        options,
        name=scope.name,
        expected_replicas=scope.num_groups,
        async_quorum=False,
        group_rank=scope.group_rank,
        group_world_size=scope.group_size if scope.role is Role.MEMBER else 1,
        ranks_hold="copies",
        store_addr=scope.store_addr,
        store_port=scope.store_port,
    )


def make_manager(job: JobOptions, options: Options, scope: Scope, device: torch.device) -> Manager:
    """The manager of one fit. Opens no connection yet."""
    job_id = job_of(options, scope, ReplicaEnv.read())
    if job_id is not None:
        job = replace(job, job_id=job_id)
    return Manager.from_options(process_group_for(device, job.timeout_s), job)
