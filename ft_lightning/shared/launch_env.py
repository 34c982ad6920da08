"""What the environment says about how this process was started.

The one place in which ft_lightning reads the environment, with `ft_core.environment`. Which process of
which replica group follows from it is `topology`'s matter.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ft_core.environment import (
    ENV_JOB,
    ENV_LIGHTHOUSE,
    ENV_NUM_GROUPS,
    ENV_REPLICA_GROUP,
    ENV_TORCHRUN_RESTARTS,
    SHARED_JOB,
    ReplicaEnv,
    Supervision,
    slurm_job_id,
)

ENV_DEVICE = "FT_LIGHTNING_DEVICE"
ENV_ENDS = "FT_LIGHTNING_ENDS"
ENV_NODE = "NODE_RANK"
ENV_THREADS = "OMP_NUM_THREADS"
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""In the order in which Lightning asks for them."""
_OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """One of several tasks of a SLURM job step.

    Attributes:
        number, tasks: of this task; how many there are.
        node, nodes: number of this machine in the step; how many the job has.
        local: number of this task on its machine.
        tasks_per_node: 0: not said.
        job: its number; 0: not said.
        machines: names of the step's machines, in SLURM's notation.
    """

    number: int
    tasks: int
    node: int
    nodes: int
    local: int
    tasks_per_node: int
    job: int
    machines: str

    @classmethod
    def read(cls, env: Mapping[str, str]) -> SlurmTask | None:
        """None: srun has not started this process as one of several. As in Lightning, jobs with the
        names "bash" and "interactive" are shells, in which anything may be started."""
        shell = env.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if shell or "SLURM_PROCID" not in env or _number(env, "SLURM_NTASKS") < 2:
            return None
        return cls(
            number=_number(env, "SLURM_PROCID"),
            tasks=_number(env, "SLURM_NTASKS"),
            node=_number(env, "SLURM_NODEID"),
            nodes=_number(env, "SLURM_NNODES"),
            local=_number(env, "SLURM_LOCALID"),
            tasks_per_node=_number(env, "SLURM_NTASKS_PER_NODE"),
            job=_number(env, "SLURM_JOB_ID"),
            machines=env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""),
        )

    def machine(self, wanted: int) -> str:
        """The name of the step's machine of that number. Raises ValueError if it has none."""
        names = machines(self.machines)
        if wanted >= len(names):
            raise ValueError(
                "a replica group's tasks are on several machines, but SLURM_STEP_NODELIST="
                f"{self.machines!r} does not name machine {wanted}: make group_size a divisor of "
                "--ntasks-per-node"
            )
        return names[wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnv:
    """What the launcher says.

    Attributes:
        replica: what it says to any integration.
        has_rank: whether RANK is set.
        local_rank, local_world_size: of this process, and how many, on this machine; 0: not said.
        node: number of this machine; None: not said.
        device: number of the first device of this process's replica group.
        restarts: how often the replica group was restarted, or its SLURM job requeued.
        supervisor_pid: of our process that started this one; 0: there is none.
        slurm: this process's task; None: it is not one of several.
        slurm_job: id of the SLURM job that has all of the training's machines; "": none has.
    """

    replica: ReplicaEnv
    has_rank: bool
    local_rank: int
    local_world_size: int
    node: int | None
    device: int
    restarts: int
    supervisor_pid: int
    slurm: SlurmTask | None
    slurm_job: str

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None, *, num_nodes: int = 1) -> LaunchEnv:
        """From the environment, for a training on `num_nodes` machines. Raises ValueError on a
        variable that is not what it should be."""
        env = os.environ if env is None else env
        supervision = Supervision.read(env)
        return cls(
            replica=ReplicaEnv.read(env),
            has_rank=bool(env.get("RANK")),
            local_rank=_number(env, "LOCAL_RANK"),
            local_world_size=_number(env, "LOCAL_WORLD_SIZE"),
            node=_number(env, ENV_NODE) if env.get(ENV_NODE) else None,
            device=_number(env, ENV_DEVICE),
            restarts=supervision.restarts + _number(env, "SLURM_RESTART_COUNT"),
            supervisor_pid=supervision.pid,
            slurm=SlurmTask.read(env),
            slurm_job=slurm_job_id(env, num_nodes),
        )

    @property
    def ranked(self) -> bool:
        """Whether this is one of several processes of a replica group. Raises ValueError if only
        their number is known."""
        size = self.replica.group_world_size
        if size > 1 and not self.has_rank and self.slurm is None:
            raise ValueError(
                f"WORLD_SIZE is {size}, but RANK does not say which of the replica group's "
                "processes this is: start them with torchrun, or leave WORLD_SIZE out"
            )
        # WORLD_SIZE alone is equal for all SLURM tasks, and says nothing about a group.
        return size > 1 and self.has_rank


def child_environment(
    group: int,
    num_groups: int,
    *,
    device: int,
    lighthouse: str,
    job_id: str = "",
    ends: str = "",
    processes: int = 1,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a supervised replica group: `env` (default: this process's) with its place.

    `job_id`: where the user has given none. `ends`: see `ends_folder`. `processes`: on this machine, which
    share its processors as those of Lightning's own launchers do. The launcher of the group's ranks adds RANK and the like.
    """
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ENV_TORCHRUN_RESTARTS)
    child = {k: v for k, v in (os.environ if env is None else env).items() if k not in ranks}
    child[ENV_REPLICA_GROUP] = str(group)
    child[ENV_NUM_GROUPS] = str(num_groups)
    child[ENV_LIGHTHOUSE] = lighthouse
    child[ENV_DEVICE] = str(device)
    child.setdefault(ENV_THREADS, str(max(1, len(os.sched_getaffinity(0)) // processes)))
    if ends:
        child[ENV_ENDS] = ends
    if job_id and child.get(ENV_JOB, "") in ("", SHARED_JOB):
        child[ENV_JOB] = job_id
    return child


def interpreter_options() -> dict[str, str]:
    """The options with which this Python was started (`python -u -O -W error train.py`), as the variables that
    give them to another one. Without them the script would run in other ways than its command says.

    Variables and not words of the command: a process that is forked from a template has them, too, since the
    template was started with them. `-E`, `-I` and `-X` options without a variable stay this process's own.
    """
    flags = sys.flags
    given: dict[str, str | int] = {
        "PYTHONUNBUFFERED": int(getattr(sys.__stdout__, "write_through", False)),
        "PYTHONOPTIMIZE": flags.optimize,
        "PYTHONWARNINGS": ",".join(sys.warnoptions),
        "PYTHONDONTWRITEBYTECODE": int(flags.dont_write_bytecode),
        "PYTHONNOUSERSITE": int(flags.no_user_site),
        "PYTHONSAFEPATH": int(flags.safe_path),
        "PYTHONDEVMODE": int(flags.dev_mode),
        "PYTHONFAULTHANDLER": int("faulthandler" in sys._xoptions),
    }
    return {name: str(value) for name, value in given.items() if value}


def ends_folder() -> str:
    """Where the ends of fits may be kept for as long as the supervisor of all groups lives; "": nowhere."""
    return os.environ.get(ENV_ENDS, "")


def renew_rank() -> None:
    """Let Lightning's `rank_zero_only` have the rank that the environment says, as an import of
    Lightning does. For a process that was forked from one in which Lightning had been imported."""
    known = sys.modules.get("lightning_utilities.core.rank_zero")
    said = [os.environ[name] for name in _RANKS if name in os.environ]
    if known is not None and hasattr(known.rank_zero_only, "rank"):
        known.rank_zero_only.rank = int(said[0]) if said else 0


def leave_torchrun() -> None:
    """Where `fabric run` has had torchrun start this process as one of several, the first on each
    machine becomes the supervisor of the replica groups. The others end, since torchrun would end
    all of them when one dies. Does nothing elsewhere. Raises SystemExit."""
    env = os.environ
    several = env.get("WORLD_SIZE", "1") != "1" and "TORCHELASTIC_RUN_ID" in env
    if env.get("LT_CLI_USED") != "1" or not several or ENV_REPLICA_GROUP in env:
        return
    if env.get("LOCAL_RANK") != "0":
        raise SystemExit(0)
    env[ENV_NODE] = env.get("GROUP_RANK", "0")
    for name in list(env):
        if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_"):
            del env[name]


def machines(listed: str) -> list[str]:
    """The names in SLURM's notation: "a[1-3,07],b" is a1, a2, a3, a07, b; leading zeros stay.
    Raises ValueError for another notation."""
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


def _number(env: Mapping[str, str], name: str) -> int:
    """A variable's number; 0 if it is not set."""
    text = env.get(name, "") or "0"
    if not text.isdecimal():
        raise ValueError(f"environment variable {name} must be a number, got {text!r}")
    return int(text)
