"""Which process this is among the replica groups, and what it does. PURE.

What the launcher says (`launch_env`) tells the ways to start apart; the first row that fits counts:

| environment | devices, group_size | this process is |
|---|---|---|
| RANK, WORLD_SIZE > 1 | any | a rank of one replica group of WORLD_SIZE (torchrun, or our own) |
| REPLICA_GROUP_ID, several SLURM tasks | any, M > 1 | a rank of that group, whose M tasks they are |
| REPLICA_GROUP_ID | any | one replica group of NUM_REPLICA_GROUPS (started by a person or by us) |
| several SLURM tasks | any, M (default 1) | a rank of replica group number SLURM_PROCID // M |
| NODE_RANK, num_nodes=K | N, M (default N) | the supervisor of this machine's N / M groups |
| | 1 | the only replica group |
| | N, M (default 1) | the supervisor of N / M replica groups on this machine |

The shard of the training data is chosen by the rank among all ranks of all *configured* groups.
It does not change when groups die or return, so that a position in the data means the same to all
processes at all times.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ft_core.environment import ENV_REPLICA_GROUP, ReplicaEnv
from ft_lightning.shared.launch_env import ENV_NODE, LaunchEnv, SlurmTask


class Role(Enum):
    """What a process does when `Trainer.fit` is called."""

    MEMBER = "member"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One process's place.

    Attributes:
        role: trains, or looks after processes that train.
        name: of the replica group; stable over restarts.
        index: number of the replica group; of a supervisor: number of its first group.
        num_groups: configured number of replica groups.
        supervised: of a supervisor: how many groups it looks after.
        group_rank, group_size: of this process in its replica group.
        local_rank: among the processes of its replica group on this machine.
        node: number of this machine among those of the replica group.
        device: which of the Trainer's devices is this process's.
        restarts: how often the replica group was restarted, or its SLURM job requeued.
        supervisor_pid: of our process that started this one; 0: there is none.
        store_addr, store_port: of the replica group's rendezvous store; "" and 0 with one rank.
        event_log: file for telemetry events; "": none.
        job_id: of the job whose groups all have it from the same source as their numbers; "": that
            source has none.
    """

    role: Role
    name: str
    index: int
    num_groups: int
    supervised: int = 0
    group_rank: int = 0
    group_size: int = 1
    local_rank: int = 0
    node: int = 0
    device: int = 0
    restarts: int = 0
    supervisor_pid: int = 0
    store_addr: str = ""
    store_port: int = 0
    event_log: str = ""
    job_id: str = ""

    @property
    def rank(self) -> int:
        """Number among the ranks of all configured groups."""
        return self.index * self.group_size + self.group_rank

    @property
    def world_size(self) -> int:
        """How many ranks all configured groups have."""
        return self.num_groups * self.group_size

    @property
    def number(self) -> int:
        """Number of the replica group among those of its supervisor."""
        return (self.device - self.local_rank) // self.group_size


def resolve(
    launched: LaunchEnv,
    *,
    devices: int,
    num_nodes: int = 1,
    group_size: int | None = None,
    num_replica_groups: int | None = None,
    replica_name: str | None = None,
    lighthouse: str | None = None,
) -> Scope:
    """The scope of a process. Arguments beat the environment. Raises ValueError."""
    known, slurm, ranked = launched.replica, launched.slurm, launched.ranked
    named = replica_name or known.name
    if not ranked and slurm is not None and (not named or (group_size or 1) > 1):
        groups = num_replica_groups or known.num_groups
        size = group_size or 1
        return _slurm_task(launched, slurm, devices, size, lighthouse, named, groups)
    if not (ranked or named):
        if num_nodes > 1:
            return _on_node(launched, devices, num_nodes, group_size, lighthouse)
        if devices > 1 or (group_size or 1) > 1:
            return _supervisor(known, devices, group_size or 1, num_replica_groups)
    alone = 1 if ranked else max(devices, 1) * num_nodes
    groups = num_replica_groups or known.num_groups or alone
    return _member(launched, groups, replica_name, group_size)


def _member(
    launched: LaunchEnv, groups: int, replica_name: str | None, group_size: int | None
) -> Scope:
    known, ranked = launched.replica, launched.ranked
    size = known.group_world_size if ranked else 1
    if group_size not in (None, size):
        raise ValueError(
            f"group_size={group_size}, but this replica group has {size} process(es) by its "
            "WORLD_SIZE: start all processes of a group with RANK, LOCAL_RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT (`torchrun --nproc-per-node` does), as many as group_size"
        )
    label = replica_name or known.name
    if not label and groups > 1:
        start = (
            f"start one torchrun for each, with {ENV_REPLICA_GROUP} from 0 to {groups - 1}"
            if ranked
            else f"set it to a number from 0 to {groups - 1}, or use devices={groups} to start "
            "all of them here"
        )
        raise ValueError(
            f"there are to be {groups} replica groups, but {ENV_REPLICA_GROUP} does not say which "
            f"one this process is in: {start}"
        )
    local_rank = launched.local_rank if ranked else 0
    return Scope(
        role=Role.MEMBER,
        name=label or "0",
        index=_index(known.name or replica_name or "0", groups),
        num_groups=groups,
        group_rank=known.group_rank if ranked else 0,
        group_size=size,
        local_rank=local_rank,
        node=known.group_rank // (launched.local_world_size or size) if ranked else 0,
        device=launched.device + local_rank,
        restarts=launched.restarts,
        supervisor_pid=launched.supervisor_pid,
        store_addr=known.master_addr if ranked else "",
        store_port=known.master_port if ranked else 0,
        event_log=known.event_log,
    )


def _supervisor(
    known: ReplicaEnv, devices: int, group_size: int, num_replica_groups: int | None
) -> Scope:
    here = _groups_of(devices, group_size)
    wanted = num_replica_groups or known.num_groups or here
    if wanted != here:
        raise ValueError(
            f"devices={devices} starts {here} replica groups of {group_size} on this machine, but "
            f"the number of groups is said to be {wanted}: make them equal, or start the processes "
            f"yourself with {ENV_REPLICA_GROUP} set"
        )
    return Scope(
        role=Role.SUPERVISOR,
        name="supervisor",
        index=0,
        num_groups=here,
        supervised=here,
        group_size=group_size,
    )


def _groups_of(devices: int, group_size: int) -> int:
    if devices % group_size:
        raise ValueError(
            f"devices={devices} cannot be divided into replica groups of group_size={group_size}: "
            "make devices a multiple of group_size"
        )
    return devices // group_size


def _slurm_task(
    launched: LaunchEnv,
    slurm: SlurmTask,
    devices: int,
    group_size: int,
    lighthouse: str | None,
    named: str | None,
    groups: int,
) -> Scope:
    """`named`: the whole job step is the group of that name, of `groups`."""
    known = launched.replica
    if slurm.nodes > 1:
        _need_lighthouse(known, lighthouse, f"{slurm.nodes} SLURM nodes")
    number = None
    if named:
        groups = groups or 1
        number = _index(known.name or named, groups)
    else:
        groups = slurm.tasks // group_size
    place = _task_place(slurm, group_size, known.master_port, number)
    return Scope(
        role=Role.MEMBER,
        name=named or str(place["index"]),
        num_groups=groups,
        group_size=group_size,
        device=slurm.local % max(devices, 1),
        restarts=launched.restarts,
        event_log=known.event_log,
        job_id="" if named or not slurm.job else str(slurm.job),
        **place,
    )


def _on_node(
    launched: LaunchEnv,
    devices: int,
    num_nodes: int,
    group_size: int | None,
    lighthouse: str | None,
) -> Scope:
    node, count = launched.node, max(devices, 1)
    if node is None:
        raise ValueError(
            f"num_nodes={num_nodes}, but {ENV_NODE} does not say which of the machines this is: "
            f"start the script once on each, with {ENV_NODE} from 0 to {num_nodes - 1} and "
            "TORCHFT_LIGHTHOUSE set"
        )
    if node >= num_nodes:
        raise ValueError(f"{ENV_NODE} is {node}, but there are num_nodes={num_nodes} machines")
    _need_lighthouse(launched.replica, lighthouse, f"num_nodes={num_nodes}")
    size = group_size or count
    here = _groups_of(count, size)
    return Scope(
        role=Role.SUPERVISOR,
        name="supervisor",
        index=node * here,
        num_groups=num_nodes * here,
        supervised=here,
        group_size=size,
        event_log=launched.replica.event_log,
        job_id=launched.slurm_job,
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


# ---------------------------------------------------------------------- SLURM
#
# With groups of `size` tasks in a row, task p is rank p % size of group p // size. Where a job step
# has a group's number, its tasks are that group's ranks. The ranks meet at a port of the machine of
# their first task. That machine is known if tasks fill machine after machine, the same number on each
# (`srun --distribution=block`, SLURM's default for tasks).

_FIRST_PORT = 15000
_PORTS = 10_000


def _task_place(slurm: SlurmTask, size: int, port: int, group: int | None = None) -> dict[str, Any]:
    """Attributes of the `Scope` of this task, in groups of `size` tasks. Raises ValueError.

    `port`: as the user has set it, or 0. `group`: the whole job step is the replica group of this
    number.
    """
    task, tasks = slurm.number, slurm.tasks
    if group is not None and tasks != size:
        raise ValueError(
            f"group_size={size}, but the job step of replica group {group} has {tasks} SLURM tasks: "
            f"start it with `srun --ntasks={size}`, or leave out REPLICA_GROUP_ID if the step "
            "holds all groups"
        )
    if tasks % size:
        raise ValueError(
            f"{tasks} SLURM tasks cannot be divided into replica groups of group_size={size}: "
            "make the number of tasks a multiple of group_size"
        )
    index, group_rank = divmod(task, size)
    if size == 1:
        return {"index": index}
    per_node, node = slurm.tasks_per_node, slurm.node
    if not per_node or node * per_node + slurm.local != task:
        raise ValueError(
            f"group_size={size}: the tasks of a replica group must follow each other on their "
            "machines; start them with `srun --ntasks-per-node=T --distribution=block`"
        )
    first = index * size
    home, last = first // per_node, (first + size - 1) // per_node
    if group is not None:
        index = group
    return {
        "index": index,
        "group_rank": group_rank,
        "local_rank": task - max(first, node * per_node),
        "node": node - home,
        "store_addr": "127.0.0.1" if home == last else slurm.machine(home),
        "store_port": (port or _FIRST_PORT + slurm.job % _PORTS) + index,
    }
