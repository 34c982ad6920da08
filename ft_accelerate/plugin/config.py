"""What a configuration means: the section of the YAML, and which replica groups a machine starts.
Imports neither accelerate nor torch, and reads no environment.

    fault_tolerance_config:
      fault_tolerance_min_replicas: 2
      fault_tolerance_timeout_s: 30

The keys carry their prefix, as in Accelerate's other sections; one without it gets it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_accelerate.plugin.options import COMMITS, field_names, parse

SECTION = "fault_tolerance_config"
PREFIX = "fault_tolerance_"
SWITCH = "use_fault_tolerance"
DEFAULT_LIGHTHOUSE_PORT = 29510


class SectionError(ValueError):
    """The section of a config file is wrong; the message is for its author."""


def argument_name(field: str) -> str:
    """Of a field, in the section and as a flag (after the dashes)."""
    return PREFIX + field


def read_section(section: Any, where: str = SECTION) -> dict[str, Any]:
    """The section with its keys prefixed and its values of their types.

    Raises ValueError, in one sentence, for a key that is none of ours or a value that is wrong.
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} must hold keys and values, got {section!r}")
    known = [SWITCH, *map(argument_name, field_names())]
    found: dict[str, Any] = {}
    for given, value in section.items():
        key = str(given)
        if key != SWITCH and not key.startswith(PREFIX):
            key = PREFIX + key
        if key not in known:
            bare = key.removeprefix(PREFIX)
            near = difflib.get_close_matches(bare, [SWITCH, *field_names()], 1)
            full = near[0] if near[:1] == [SWITCH] else argument_name(near[0]) if near else ""
            hint = f"did you mean {full!r}?" if full else f"it takes {', '.join(known)}"
            raise ValueError(f"{where} has the unknown key {given!r}: {hint}")
        if value is not None:
            found[key] = _value(key, value, f"{given} in {where}")
    return found


def _value(key: str, value: Any, what: str) -> Any:
    if key == SWITCH:
        return parse("heal_allow_objects", value, what)  # a truth value, too
    parsed = parse(key.removeprefix(PREFIX), value, what)
    if key == argument_name("commit") and parsed not in COMMITS:
        raise ValueError(f'{what} must be "quorum" or "group", got {value!r}')
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLayout:
    """The replica groups that one launcher starts.

    Attributes:
        num_replica_groups: of the whole job.
        first: number of the first group here; the others follow.
        groups: how many are started here.
        group_size: processes of each.
    """

    num_replica_groups: int
    first: int
    groups: int
    group_size: int

    @property
    def alone(self) -> bool:
        """Whether all groups of the job are started here."""
        return self.groups == self.num_replica_groups


def layout(
    *,
    num_processes: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    group_size: int = 0,
    num_replica_groups: int | None = None,
    replica_group_id: int | None = None,
) -> MachineLayout:
    """Which groups machine `machine_rank` of `num_machines` starts, each with how many processes.

    `num_processes` is the total over all machines, as everywhere in Accelerate. On one machine every
    process is a replica group, since processes fail alone; of several machines each is one, since
    those are what fails. `group_size` or `num_replica_groups` say otherwise. `replica_group_id` is
    the first group's number here where it does not follow from `machine_rank`. Raises ValueError.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    if num_processes % num_machines:
        raise ValueError(
            f"num_processes ({num_processes}) must be a multiple of num_machines ({num_machines})"
        )
    if not 0 <= machine_rank < num_machines:
        raise ValueError(
            f"machine_rank must be a number from 0 to {num_machines - 1} (num_machines is "
            f"{num_machines}), got {machine_rank}"
        )
    here = num_processes // num_machines
    size = group_size or _default_size(
        here, num_machines, num_replica_groups if replica_group_id is None else None
    )
    if size > here or here % size:
        raise ValueError(
            f"a replica group of {size} processes does not fit a machine that runs {here}: "
            f"{argument_name('group_size')} must divide the processes of each machine"
        )
    groups = here // size
    total = num_replica_groups or groups * num_machines
    first = machine_rank * groups if replica_group_id is None else replica_group_id
    if replica_group_id is None and total != groups * num_machines:
        raise ValueError(
            f"{num_processes} processes on {num_machines} machine(s) are {groups * num_machines} "
            f"replica groups of {size}, but {argument_name('num_replica_groups')} is {total}: "
            f"make them agree, or say with {argument_name('replica_group_id')} which group this "
            "machine starts"
        )
    if first + groups > total:
        raise ValueError(
            f"this machine would start replica groups {first} to {first + groups - 1}, but there "
            f"are to be only {total}: raise {argument_name('num_replica_groups')}"
        )
    return MachineLayout(num_replica_groups=total, first=first, groups=groups, group_size=size)


def _default_size(here: int, num_machines: int, num_replica_groups: int | None) -> int:
    if num_replica_groups:
        total = here * num_machines
        if total % num_replica_groups:
            raise ValueError(
                f"{total} processes cannot be {num_replica_groups} replica groups of equal size: "
                f"num_processes must be a multiple of {argument_name('num_replica_groups')}"
            )
        return total // num_replica_groups
    return default_group_size(here, num_machines)


def default_group_size(here: int, num_machines: int) -> int:
    """Processes of a replica group where nothing says so; `here`: those of each machine."""
    return here if num_machines > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthousePlan:
    """Where the lighthouse is.

    Attributes:
        address: that the replica groups are told; "": of the one that is embedded.
        bind: where the launcher embeds one; "": it does not.
    """

    address: str
    bind: str


def lighthouse_plan(
    place: MachineLayout,
    *,
    lighthouse: str = "",
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
) -> LighthousePlan:
    """Where the lighthouse runs: a named one is used, else the first machine's launcher runs one.

    On several machines it listens at the main process's address and port, which are otherwise
    unused: each replica group has a rendezvous of its own. Raises ValueError.
    """
    if lighthouse:
        return LighthousePlan(address=lighthouse, bind="")
    if num_machines > 1:
        if not main_process_ip:
            raise ValueError(
                f"replica groups on {num_machines} machines need a common lighthouse: set "
                f"main_process_ip to the first machine's address, or "
                f"{argument_name('lighthouse')} to that of a running one"
            )
        port = main_process_port or DEFAULT_LIGHTHOUSE_PORT
        return LighthousePlan(
            address=f"tcp://{main_process_ip}:{port}",
            bind=f"tcp://0.0.0.0:{port}" if machine_rank == 0 else "",
        )
    if not place.alone:
        raise ValueError(
            f"this machine starts {place.groups} of {place.num_replica_groups} replica groups, "
            f"and they need a common lighthouse: start one with `lighthouse` and set "
            f"{argument_name('lighthouse')} to its address"
        )
    return LighthousePlan(address="", bind="tcp://127.0.0.1:0")
