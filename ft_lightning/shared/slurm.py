"""Where a SLURM task stands, if so many tasks in a row make a replica group. PURE.

Task p is rank p % size of group p // size; where a job step has a group's number, its tasks are that
group's ranks. They meet at a port of the machine of their first
task, which is known if tasks fill machine after machine (`srun --distribution=block`, SLURM's
default for tasks), equally many on each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_PORT = 15000
_PORTS = 10_000


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """See `ft_lightning.shared.topology.Scope`, whose attributes these are."""

    index: int
    group_rank: int = 0
    local_rank: int = 0
    node: int = 0
    store_addr: str = ""
    store_port: int = 0


def place(env: Mapping[str, str], size: int, group: int | None = None) -> TaskPlace:
    """Of the task with this environment, in groups of `size` tasks. Raises ValueError.

    `group`: the whole job step is the replica group of this number.
    """
    task, tasks = number(env, "SLURM_PROCID"), number(env, "SLURM_NTASKS")
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
        return TaskPlace(index)
    per_node, node = number(env, "SLURM_NTASKS_PER_NODE"), number(env, "SLURM_NODEID")
    if not per_node or node * per_node + number(env, "SLURM_LOCALID") != task:
        raise ValueError(
            f"group_size={size}: the tasks of a replica group must follow each other on their "
            "machines; start them with `srun --ntasks-per-node=T --distribution=block`"
        )
    first = index * size
    home, last = first // per_node, (first + size - 1) // per_node
    base = number(env, "MASTER_PORT") or _FIRST_PORT + number(env, "SLURM_JOB_ID") % _PORTS
    if group is not None:
        index = group
    return TaskPlace(
        index=index,
        group_rank=group_rank,
        local_rank=task - max(first, node * per_node),
        node=node - home,
        store_addr="127.0.0.1" if home == last else _machine(env, home),
        store_port=base + index,
    )


def _machine(env: Mapping[str, str], wanted: int) -> str:
    """Name of the job step's machine of that number."""
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    names = machines(listed)
    if wanted >= len(names):
        raise ValueError(
            f"a replica group's tasks are on several machines, but SLURM_STEP_NODELIST={listed!r} "
            f"does not name machine {wanted}: make group_size a divisor of --ntasks-per-node"
        )
    return names[wanted]


def machines(listed: str) -> list[str]:
    """The names in SLURM's notation: "a[1-3,07],b" is a1, a2, a3, a07, b; leading zeros stay."""
    names: list[str] = []
    for word in re.findall(r"(?:\[[^]]*\]|[^,\[\s])+", listed):
        match = re.fullmatch(r"([^\[]*)\[([^]]*)\](.*)", word)
        if match is None:
            names.append(word)
            continue
        head, ranges, tail = match.groups()
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            if not low.isdecimal() or not (high or low).isdecimal():
                raise ValueError(f"SLURM's list of machines cannot be read: {listed!r}")
            numbers = range(int(low), int(high or low) + 1)
            names += [f"{head}{n:0{len(low)}d}{tail}" for n in numbers]
    return names


def number(env: Mapping[str, str], name: str) -> int:
    """An environment variable's number; 0 if it is not set."""
    text = env.get(name, "") or "0"
    if not text.isdecimal():
        raise ValueError(f"environment variable {name} must be a number, got {text!r}")
    return int(text)
