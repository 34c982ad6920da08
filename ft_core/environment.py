"""Environment variables that fill options: the one place in which ft_core reads them.

The names are torchft's where it has one. Imports nothing of ours: launchers, and what runs when torch is
imported, need the names alone.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

ENV_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
ENV_REPLICA_GROUP = "REPLICA_GROUP_ID"
ENV_NUM_GROUPS = "NUM_REPLICA_GROUPS"
ENV_JOB = "FT_JOB_ID"
ENV_INTERFACE = "FT_INTERFACE"
ENV_EVENTS = "FT_EVENT_LOG"
ENV_COMPARE = "FT_COMPARE_STEPS"
ENV_HEARTBEAT = "FT_HEARTBEAT_S"
ENV_WARM = "FT_WARM_START"
ENV_ABORT_DUMPS = "FT_ABORT_DUMPS"

ENV_SUPERVISOR = "FT_SUPERVISOR"
ENV_RESTARTS = "FT_RESTARTS"
ENV_CHILD = "FT_CHILD"
ENV_CHILDREN = "FT_CHILDREN"
ENV_TORCHRUN_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

ENV_TORCHFT_SECONDS = {
    "timeout": "TORCHFT_TIMEOUT_SEC",
    "quorum_timeout": "TORCHFT_QUORUM_TIMEOUT_SEC",
    "connect_timeout": "TORCHFT_CONNECT_TIMEOUT_SEC",
}
ENV_TORCHFT_PORT = "TORCHFT_MANAGER_PORT"

SHARED_JOB = "default"
"""The job id of all replica groups of a lighthouse that were given none."""
COMPARE_STEPS = 1_024
"""Less than a thousandth of a step (benchmarks/compare_states.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnv:
    """What the launcher says about this process.

    Attributes:
        lighthouse: address of the lighthouse, or "" (start a local one).
        name: what the replica group is called; stable over restarts.
        num_groups: how many replica groups the job is meant to have; 0: not said.
        job_id: keeps two jobs on one lighthouse apart.
        group_rank, group_world_size: of this process in its replica group.
        local_rank: among the group's processes on this machine.
        master_addr, master_port: of the group's own rendezvous store ("" and 0: none).
        interface: network interface or IP address to advertise; "": the one that routes to the
            lighthouse.
        event_log: file for telemetry events (JSON lines); "": none.
        compare_steps: members compare their parameters once in so many steps; 0: never.
        heartbeat_s: how often a connection to the lighthouse proves that its host is alive; three times that
            in silence, and it counts as lost. None: derived from the timeout.
    """

    lighthouse: str = ""
    name: str = ""
    num_groups: int = 0
    job_id: str = SHARED_JOB
    group_rank: int = 0
    group_world_size: int = 1
    local_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    interface: str = ""
    event_log: str = ""
    compare_steps: int = COMPARE_STEPS
    heartbeat_s: float | None = None

    @property
    def heartbeat_timeout_s(self) -> float | None:
        """How long such a connection may be silent, for `Timeouts.derive`."""
        return None if self.heartbeat_s is None else 3 * self.heartbeat_s

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> ReplicaEnv:
        """From the environment. Raises ValueError on a variable that is not what it should be."""
        env = os.environ if env is None else env
        return cls(
            lighthouse=env.get(ENV_LIGHTHOUSE, ""),
            name=env.get(ENV_REPLICA_GROUP, ""),
            num_groups=_int(env, ENV_NUM_GROUPS, 0),
            job_id=env.get(ENV_JOB, "") or SHARED_JOB,
            group_rank=_int(env, "RANK", 0),
            group_world_size=_int(env, "WORLD_SIZE", 1),
            local_rank=_int(env, "LOCAL_RANK", _int(env, "RANK", 0)),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=_int(env, "MASTER_PORT", 0),
            interface=env.get(ENV_INTERFACE, ""),
            event_log=env.get(ENV_EVENTS, ""),
            compare_steps=_int(env, ENV_COMPARE, COMPARE_STEPS),
            heartbeat_s=_seconds(env, ENV_HEARTBEAT),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What has started this process, as `ft_core.launch.supervisor` tells it.

    Attributes:
        pid: of our process that is this one's parent, for `die_with`; 0: none.
        restarts: how often this replica group has been started again (by torchrun, too).
        child: number of this replica group among the supervisor's children on this machine.
        children: how many those are; 0: unknown.
    """

    pid: int = 0
    restarts: int = 0
    child: int = 0
    children: int = 0

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Supervision:
        """From the environment. Raises ValueError on a variable that is not what it should be."""
        env = os.environ if env is None else env
        return cls(
            pid=_int(env, ENV_SUPERVISOR, 0),
            restarts=_int(env, ENV_RESTARTS, _int(env, ENV_TORCHRUN_RESTARTS, 0)),
            child=_int(env, ENV_CHILD, 0),
            children=_int(env, ENV_CHILDREN, 0),
        )

    def environment(self) -> dict[str, str]:
        """The variables from which `read` makes it again."""
        return {
            ENV_SUPERVISOR: str(self.pid),
            ENV_RESTARTS: str(self.restarts),
            ENV_CHILD: str(self.child),
            ENV_CHILDREN: str(self.children),
        }


def torchft_settings() -> dict[str, int]:
    """What torchft's variables say: seconds for arguments of its Manager that are durations, and "port".

    Raises ValueError for one that is not a number.
    """
    names = {**ENV_TORCHFT_SECONDS, "port": ENV_TORCHFT_PORT}
    return {key: _int(os.environ, name, 0) for key, name in names.items() if os.environ.get(name)}


def warm_starts_allowed() -> bool:
    """Whether a supervisor may fork a process that it starts again from a template; "0" forbids it."""
    said = os.environ.get(ENV_WARM, "").strip().lower()
    return said not in ("0", "false", "no", "off")


def abort_dumps() -> str:
    """The folder for what a process group leaves of collectives that it aborts; "": none."""
    return os.environ.get(ENV_ABORT_DUMPS, "")


def new_job_id() -> str:
    """A job id that no other job has, for a launcher that starts all replica groups of its job."""
    return f"run-{uuid.uuid4().hex[:12]}"


def slurm_job_id(env: Mapping[str, str], machines: int) -> str:
    """The id of the SLURM job that this process is in, if that job has all of the training's
    `machines`; "": it has other machines, or there is none.

    A SLURM job of one machine may hold one replica group of several: its id says nothing.
    """
    whole = machines > 1 and env.get("SLURM_NNODES") == str(machines)
    return env.get("SLURM_JOB_ID", "") if whole else ""


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name, "")
    with contextlib.suppress(ValueError):
        if not text or float(text) > 0:
            return float(text) if text else None
    raise ValueError(
        f"environment variable {name} must be a positive number of seconds, got {text!r}"
    )


def _int(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be a number, got {text!r}") from None
