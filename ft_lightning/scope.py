"""Who this process is among the replica groups, and what it is here for. PURE.

The ways to start, told apart by the environment; the first that fits:

| environment | devices | this process is |
|---|---|---|
| REPLICA_GROUP_ID | any | one replica group of NUM_REPLICA_GROUPS (started by a person or by us) |
| several SLURM tasks | any | one replica group: number SLURM_PROCID of SLURM_NTASKS |
| NODE_RANK, num_nodes=K | 1 | one replica group: number NODE_RANK of K |
| NODE_RANK, num_nodes=K | N | the supervisor of this machine's N groups of N x K |
| | 1 | the only replica group |
| | N | the supervisor of N replica groups on this machine |

The shard of the training data is chosen by the group's number and the *configured* number of
groups. Neither changes when groups die or return, so that positions in the data mean the same to
everybody at all times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ft_core.config import ENV_NUM_GROUPS, ENV_REPLICA_GROUP, ReplicaEnv

ENV_DEVICE = "FT_LIGHTNING_DEVICE"
ENV_NODE = "NODE_RANK"
ENV_RESTARTS = "FT_LIGHTNING_RESTARTS"
ENV_SUPERVISOR = "FT_LIGHTNING_SUPERVISOR"


class Role(Enum):
    """What a process does when `Trainer.fit` is called."""

    MEMBER = "member"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One process's place.

    Attributes:
        role: trains, or looks after processes that train.
        name: what the replica group is called; stable over restarts.
        index: number of the replica group, which is also its nominal global rank; of a
            supervisor: number of its first group.
        num_groups: configured number of replica groups, which is the nominal world size.
        supervised: of a supervisor: how many groups it looks after.
        device: which of the Trainer's devices is this process's.
        restarts: how often the supervisor has started this replica group again.
        supervisor_pid: of the process that started this one; 0: none of ours.
        event_log: file for telemetry events; "": none.
    """

    role: Role
    name: str
    index: int
    num_groups: int
    supervised: int = 0
    device: int = 0
    restarts: int = 0
    supervisor_pid: int = 0
    event_log: str = ""


def resolve(
    env: Mapping[str, str],
    *,
    devices: int,
    num_nodes: int = 1,
    num_replica_groups: int | None = None,
    replica_name: str | None = None,
    lighthouse: str | None = None,
) -> Scope:
    """The scope of a process. Arguments beat the environment. Raises ValueError."""
    known = ReplicaEnv.read(env)
    if known.group_world_size > 1:
        raise ValueError(
            f"ft_ddp trains one process a replica group, but WORLD_SIZE is "
            f"{known.group_world_size}: start one process a group, each with its own "
            f"{ENV_REPLICA_GROUP} (torchrun --nproc-per-node 1 for each of them works), or leave "
            "torchrun out and use devices=N"
        )
    label = replica_name or known.name
    if not label and _is_slurm_task(env):
        return _slurm_task(env, known, devices, lighthouse)
    if not label and num_nodes > 1:
        return _on_node(env, known, devices, num_nodes, lighthouse)
    if not label and devices > 1:
        return _supervisor(known, devices, num_replica_groups)
    groups = num_replica_groups or known.num_groups or max(devices, 1) * num_nodes
    if not label and groups > 1:
        raise ValueError(
            f"there are to be {groups} replica groups, but {ENV_REPLICA_GROUP} does not say which "
            f"one this process is: set it to a number from 0 to {groups - 1}, or use "
            f"devices={groups} to start all of them here"
        )
    return Scope(
        role=Role.MEMBER,
        name=label or "0",
        index=_index(known.name or replica_name or "0", groups),
        num_groups=groups,
        device=_number(env, ENV_DEVICE),
        restarts=_number(env, ENV_RESTARTS),
        supervisor_pid=_number(env, ENV_SUPERVISOR),
        event_log=known.event_log,
    )


def child_environment(
    env: Mapping[str, str],
    scope: Scope,
    *,
    number: int,
    lighthouse: str,
    supervisor_pid: int,
    restarts: int,
) -> dict[str, str]:
    """The environment of a supervised replica group: `env` with its place in it.

    `scope`: the supervisor's; `number`: of the group on this machine, from 0.
    """
    child = {k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    child[ENV_REPLICA_GROUP] = str(scope.index + number)
    child[ENV_NUM_GROUPS] = str(scope.num_groups)
    child["TORCHFT_LIGHTHOUSE"] = lighthouse
    child[ENV_DEVICE] = str(number)
    child[ENV_RESTARTS] = str(restarts)
    child[ENV_SUPERVISOR] = str(supervisor_pid)
    return child


def _supervisor(known: ReplicaEnv, devices: int, num_replica_groups: int | None) -> Scope:
    wanted = num_replica_groups or known.num_groups or devices
    if wanted != devices:
        raise ValueError(
            f"devices={devices} starts {devices} replica groups on this machine, but the number "
            f"of groups is said to be {wanted}: make them equal, or start the processes yourself "
            f"with {ENV_REPLICA_GROUP} set"
        )
    return Scope(
        role=Role.SUPERVISOR, name="supervisor", index=0, num_groups=devices, supervised=devices
    )


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several. As Lightning sees it: jobs that are
    called "bash" or "interactive" are shells in which people start what they like."""
    shell = env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return not shell and "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS") > 1


def _slurm_task(
    env: Mapping[str, str], known: ReplicaEnv, devices: int, lighthouse: str | None
) -> Scope:
    if _number(env, "SLURM_NNODES") > 1:
        _need_lighthouse(known, lighthouse, f"{_number(env, 'SLURM_NNODES')} SLURM nodes")
    index = _number(env, "SLURM_PROCID")
    return Scope(
        role=Role.MEMBER,
        name=str(index),
        index=index,
        num_groups=_number(env, "SLURM_NTASKS"),
        device=_number(env, "SLURM_LOCALID") % max(devices, 1),
        restarts=_number(env, "SLURM_RESTART_COUNT"),
        event_log=known.event_log,
    )


def _on_node(
    env: Mapping[str, str], known: ReplicaEnv, devices: int, num_nodes: int, lighthouse: str | None
) -> Scope:
    if not env.get(ENV_NODE):
        raise ValueError(
            f"num_nodes={num_nodes}, but {ENV_NODE} does not say which of the machines this is: "
            f"start the script once on each, with {ENV_NODE} from 0 to {num_nodes - 1} and "
            "TORCHFT_LIGHTHOUSE set"
        )
    node, count = _number(env, ENV_NODE), max(devices, 1)
    if node >= num_nodes:
        raise ValueError(f"{ENV_NODE} is {node}, but there are num_nodes={num_nodes} machines")
    _need_lighthouse(known, lighthouse, f"num_nodes={num_nodes}")
    alone = count == 1
    return Scope(
        role=Role.MEMBER if alone else Role.SUPERVISOR,
        name=str(node) if alone else "supervisor",
        index=node * count,
        num_groups=num_nodes * count,
        supervised=0 if alone else count,
        event_log=known.event_log,
    )


def _need_lighthouse(known: ReplicaEnv, lighthouse: str | None, what: str) -> None:
    if not (lighthouse or known.lighthouse):
        raise ValueError(
            f"{what}: replica groups on several machines need a lighthouse that all can reach; "
            "start one (`lighthouse --bind tcp://0.0.0.0:29510`) and set TORCHFT_LIGHTHOUSE to its "
            'address, "tcp://host:29510"'
        )


def _index(text: str, groups: int) -> int:
    if not text.isdecimal() or int(text) >= groups:
        raise ValueError(
            f"{ENV_REPLICA_GROUP} must be a number from 0 to {groups - 1} (there are {groups} "
            f"replica groups; it chooses the shard of the data), got {text!r}"
        )
    return int(text)


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "") or "0"
    if not text.isdecimal():
        raise ValueError(f"environment variable {name} must be a number, got {text!r}")
    return int(text)
