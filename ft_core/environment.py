"""Environment variables that fill options: the one place in which ft_core reads them.

The names are torchft's where it has one. Imports nothing of ours: launchers, and what runs when torch is
imported, need the names alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

ENV_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
ENV_REPLICA_GROUP = "REPLICA_GROUP_ID"
ENV_NUM_GROUPS = "NUM_REPLICA_GROUPS"
ENV_JOB = "FT_JOB_ID"
ENV_INTERFACE = "FT_INTERFACE"
ENV_EVENTS = "FT_EVENT_LOG"


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
    """

    lighthouse: str = ""
    name: str = ""
    num_groups: int = 0
    job_id: str = "default"
    group_rank: int = 0
    group_world_size: int = 1
    local_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    interface: str = ""
    event_log: str = ""

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> ReplicaEnv:
        """From the environment. Raises ValueError on a variable that is not what it should be."""
        env = os.environ if env is None else env
        return cls(
            lighthouse=env.get(ENV_LIGHTHOUSE, ""),
            name=env.get(ENV_REPLICA_GROUP, ""),
            num_groups=_int(env, ENV_NUM_GROUPS, 0),
            job_id=env.get(ENV_JOB, "") or "default",
            group_rank=_int(env, "RANK", 0),
            group_world_size=_int(env, "WORLD_SIZE", 1),
            local_rank=_int(env, "LOCAL_RANK", _int(env, "RANK", 0)),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=_int(env, "MASTER_PORT", 0),
            interface=env.get(ENV_INTERFACE, ""),
            event_log=env.get(ENV_EVENTS, ""),
        )


def _int(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be a number, got {text!r}") from None
