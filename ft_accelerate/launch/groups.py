"""What `accelerate launch` becomes: it starts and supervises this machine's replica groups.

Accelerate's own launcher has read its YAML and flags and prepared a command and an environment. It
would then start one process, or torchrun. This one starts each replica group (one process, or several)
under `ft_core.launch.supervisor`, which restarts those that die, and runs the lighthouse unless another
one is named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_accelerate.options import (
    ENV_PREFIX,
    FaultTolerancePlugin,
    argument_name,
    env_name,
    field_names,
    given_in,
    is_enabled,
    refuse_excluded,
    switched_off,
    uses,
)
from ft_core.environment import SHARED_JOB, ReplicaEnv, new_job_id, slurm_job_id
from ft_core.launch import rank_group
from ft_core.launch.supervisor import say, supervise, tell_lighthouse
from ft_core.launch.warm.starter import warm_starts
from lighthouse.files import hold_standard_streams

SPEAKER = "ft_accelerate"
DEFAULT_LIGHTHOUSE_PORT = 29510
JOIN_TIMEOUT_S = 60.0
"""How long the first quorum waits for groups that all start now, whatever `timeout_s` is."""
LINGER_S = 3.0
"""How long the lighthouse of several machines must be unused before it ends."""
NEWS_S = 5.0
"""After this long without an answer from the lighthouse, a line says that it is waited for."""


# ---------------------------------------------------------------------- which groups, from numbers


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
        address: that the replica groups are told; "": of the launcher's own.
        bind: where the launcher runs one; "": it does not.
        remedy: what to do if none answers at `address`; "": the launcher runs it.
    """

    address: str
    bind: str
    remedy: str = ""


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
        remedy = f"start one there with `lighthouse`, or correct {argument_name('lighthouse')}"
        return LighthousePlan(address=lighthouse, bind="", remedy=remedy)
    if num_machines > 1:
        if not main_process_ip:
            raise ValueError(
                f"replica groups on {num_machines} machines need a common lighthouse: set "
                f"main_process_ip to the first machine's address, or "
                f"{argument_name('lighthouse')} to that of a running one"
            )
        # Not for each process that imports torch, and this module with it.
        from lighthouse.own_address import bracketed, uses_ipv6

        port = main_process_port or DEFAULT_LIGHTHOUSE_PORT
        address = f"tcp://{bracketed(main_process_ip)}:{port}"
        everywhere = "[::]" if uses_ipv6(address) else "0.0.0.0"
        return LighthousePlan(
            address=address,
            bind=f"tcp://{everywhere}:{port}" if machine_rank == 0 else "",
            remedy="the launcher of machine_rank 0 runs it: start that, too, or correct "
            "main_process_ip and main_process_port",
        )
    if not place.alone:
        raise ValueError(
            f"this machine starts {place.groups} of {place.num_replica_groups} replica groups, "
            "and they need a common lighthouse: start one with `lighthouse --bind "
            f"tcp://0.0.0.0:29510` and set {argument_name('lighthouse')} to its address"
        )
    return LighthousePlan(address="", bind="tcp://127.0.0.1:0")


# ---------------------------------------------------------------------- which groups, from arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that is decided before anything starts."""

    plugin: FaultTolerancePlugin
    place: MachineLayout
    lighthouse: LighthousePlan


def wanted(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> bool:
    """Whether `args` (with the YAML's values in them) or the environment ask for fault tolerance.

    ACCELERATE_USE_FAULT_TOLERANCE=false switches a section off for one run; a flag beats that.
    """
    ours = ["use_fault_tolerance", *map(argument_name, field_names())]
    by_flag: set[str] = getattr(args, "nondefault", set())
    if any(name in by_flag and getattr(args, name, None) is not None for name in ours):
        return True
    if switched_off(env):
        return False
    if is_enabled(env):
        return True
    switch = getattr(args, "use_fault_tolerance", None)
    if switch is not None:
        return bool(switch)
    return any(getattr(args, name, None) is not None for name in ours)


def switch(args: argparse.Namespace) -> None:
    """`ft-accelerate launch`: fault tolerance unless the config file or the environment says no."""
    if getattr(args, "use_fault_tolerance", None) is None:
        args.use_fault_tolerance = True


def plan(args: argparse.Namespace, env: Mapping[str, str]) -> Launch:
    """What `args` and `env` ask for. Raises ValueError, in one sentence, for what cannot be."""
    refuse(args)
    given = given_in(env)
    for name in field_names():
        value = getattr(args, argument_name(name), None)
        if value is not None:
            given[name] = value
    machines = int(getattr(args, "num_machines", None) or 1)
    rank = int(getattr(args, "machine_rank", None) or 0)
    place = layout(
        num_processes=_num_processes(args),
        num_machines=machines,
        machine_rank=rank,
        group_size=given.pop("group_size", 0) or _shard_size(args),
        num_replica_groups=given.pop("num_replica_groups", None),
        replica_group_id=given.pop("replica_group_id", None),
    )
    where = lighthouse_plan(
        place,
        lighthouse=given.pop("lighthouse", ""),
        num_machines=machines,
        machine_rank=rank,
        main_process_ip=getattr(args, "main_process_ip", None),
        main_process_port=getattr(args, "main_process_port", None),
    )
    if "max_restarts" not in given and "max_restarts" in getattr(args, "nondefault", ()):
        given["max_restarts"] = args.max_restarts  # torchrun's flag means the same
    if given.get("job_id", SHARED_JOB) == SHARED_JOB:
        shared = new_job_id() if place.alone else slurm_job_id(env, machines)
        given["job_id"] = shared or SHARED_JOB
    plugin = FaultTolerancePlugin(
        num_replica_groups=place.num_replica_groups,
        replica_group_id=place.first,
        group_size=place.group_size,
        lighthouse=where.address,
        **given,
    )
    return Launch(plugin=plugin, place=place, lighthouse=where)


def _shard_size(args: argparse.Namespace) -> int:
    """Processes that share one copy of the model, by the ParallelismConfig; 0: it says nothing."""
    if not (getattr(args, "use_fsdp", False) and getattr(args, "use_parallelism_config", False)):
        return 0
    return int(getattr(args, "parallelism_config_dp_shard_size", None) or 1)


def refuse(args: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be trained fault-tolerantly."""
    refuse_excluded(vars(args))
    if getattr(args, "no_python", None):
        raise ValueError("fault tolerance trains Python scripts: leave out --no_python")


def hints(args: argparse.Namespace) -> list[str]:
    """Sentences on what looks like a wish for fault tolerance, where it is not switched on; and on flags of torchrun
    that then say nothing, where it is."""
    if wanted(args):
        given = getattr(args, "nondefault", ())
        flags = " and ".join(f"--{name}" for name in ("tee", "log_dir") if name in given)
        why = "torchrun is not started. All processes write to the launcher's output"
        return [f"{flags}: no effect, since {why}"] if flags else []
    if switched_off():
        return []
    ours = {f"--{name}" for name in ("use_fault_tolerance", *map(argument_name, field_names()))}
    behind = [text for text in getattr(args, "training_script_args", ()) if text in ours]
    found = [
        f"{flag} is behind the script's name, so the script gets it; fault tolerance is off, and "
        "is switched on by flags before the script's name"
        for flag in behind
    ]
    names = [env_name(name) for name in given_in(os.environ)]
    set_ = [name for name in names if name in os.environ]
    if set_:
        found.append(
            f"{set_[0]} is set, but fault tolerance is off: ACCELERATE_USE_FAULT_TOLERANCE=true "
            "switches it on, and false ends this line"
        )
    return found


def launch(args: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run this machine's replica groups to their end; returns the exit code. Main thread only.

    `command`: the script's, without a launcher. `env`: as Accelerate's launcher prepared it.
    Raises ValueError before anything starts.
    """
    hold_standard_streams()
    made = plan(args, env)
    on_cpu = uses("CPU", env) or bool(getattr(args, "use_cpu", False))
    devices = [] if on_cpu else visible_devices(env)
    check_devices(devices, made.place.groups * made.place.group_size, env)
    if not args.module and not os.path.exists(args.training_script):
        raise ValueError(f"there is no script {args.training_script!r}")
    if not made.lighthouse.bind:
        _await_lighthouse(made)
    server = _serve(made)
    address = made.plugin.lighthouse or server.address()
    describe(made, address)
    try:
        with _held(address) if server is None else contextlib.nullcontext():
            return _supervise(made, command, env, address=address, devices=devices)
    finally:
        if server is not None:
            if not made.place.alone:
                say(
                    SPEAKER,
                    "the lighthouse of this machine stays until the other machines are done",
                )
            server.shutdown()


def _supervise(
    made: Launch,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    address: str,
    devices: Sequence[str],
) -> int:
    return supervise(
        rank_group.group_command(protected(command), made.place.group_size),
        environment(made, env, address=address, devices=devices),
        count=made.place.groups,
        first=made.place.first,
        elsewhere=not made.place.alone,
        min_alive=made.plugin.min_replicas if made.place.alone else 1,
        max_restarts=made.plugin.max_restarts,
        speaker=SPEAKER,
        on_given_up=tell_lighthouse(address, made.plugin.job_id),
        warm=warm_starts(made.plugin.warm_start, places=[ENV_PREFIX]),
        keep_state_s=made.plugin.keep_state_s,
        keep_state_dir=made.plugin.keep_state_dir,
    )


@contextlib.contextmanager
def _held(address: str) -> Iterator[None]:
    """The lighthouse of another machine's launcher stays while this one is connected: also when a
    replica group dies at its end here, and none is connected until it is back."""
    from lighthouse.client import LighthouseClient
    from lighthouse.errors import LighthouseError

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(LighthouseError, ValueError, OSError):
            stack.enter_context(LighthouseClient(address))
        yield


def protected(command: Sequence[str]) -> list[str]:
    """The script's command, run by `ft_accelerate.run`."""
    assert command[0] == sys.executable, command
    return [sys.executable, "-m", "ft_accelerate.run", *command[1:]]


def environment(
    made: Launch, env: Mapping[str, str], *, address: str, devices: Sequence[str]
) -> Callable[[int], dict[str, str]]:
    """The environment of each replica group, by its number here."""
    size = made.place.group_size

    def of_group(index: int) -> dict[str, str]:
        plugin = dataclasses.replace(
            made.plugin, lighthouse=address, replica_group_id=made.place.first + index
        )
        told = {**env, **plugin.to_env()}
        if len(devices) >= made.place.groups * size:
            told["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * size : (index + 1) * size])
        if size > 1:
            return told  # `rank_group` gives each rank its place
        return rank_group.rank_environment(told, rank=0, size=1, port=rank_group.free_port())

    return of_group


def check_devices(devices: Sequence[str], processes: int, env: Mapping[str, str]) -> None:
    """Raises ValueError if these processes would have to share GPUs, which NCCL does not connect to each
    other, and that is not asked for."""
    if 0 < len(devices) < processes and env.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "0":
        have = "1 GPU" if len(devices) == 1 else f"{len(devices)} GPUs"
        raise ValueError(
            f"{processes} processes are to train on a machine with {have}, and each needs one of its own: "
            f"make num_processes {len(devices)}, or train on the CPU (--cpu)"
        )


def visible_devices(env: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that are divided among the processes started here; [] without any.

    Of those that are listed, CUDA leaves out all from the first that cannot be a GPU, such as -1.
    """
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        return list(itertools.takewhile(_names_a_gpu, names))
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _names_a_gpu(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def describe(made: Launch, address: str) -> None:
    """Print what is about to start, in one line."""
    place = made.place
    first, last = place.first, place.first + place.groups - 1
    which = f"replica group {first}" if first == last else f"replica groups {first} to {last}"
    each = "1 process" if place.group_size == 1 else f"{place.group_size} processes"
    say(
        SPEAKER,
        f"starting {which} of {place.num_replica_groups}, {each} each, "
        f"lighthouse {address}, job {made.plugin.job_id}",
    )


def _num_processes(args: argparse.Namespace) -> int:
    given = getattr(args, "num_processes", None)
    return max(1, int(given or 1))  # 0: Accelerate counted the GPUs, and found none


def _await_lighthouse(made: Launch) -> None:
    """Raise ValueError if no lighthouse answers at the address of one that runs elsewhere."""
    from lighthouse.client import LighthouseClient
    from lighthouse.errors import LighthouseError, LighthouseUnavailable

    address, limit_s = made.lighthouse.address, made.plugin.timeout_s
    soon_s = min(NEWS_S, limit_s)
    try:
        with LighthouseClient(address) as client:
            try:
                client.wait_until_up(soon_s)
            except LighthouseUnavailable:
                if soon_s < limit_s:
                    say(SPEAKER, f"waiting for the lighthouse at {address}, up to {limit_s:g} s")
                client.wait_until_up(limit_s - soon_s)
    except LighthouseUnavailable:
        raise ValueError(
            f"no lighthouse answers at {address} within {limit_s:g} s: {made.lighthouse.remedy}"
        ) from None
    except LighthouseError as error:
        raise ValueError(str(error)) from None


def _left_here(made: Launch) -> bool:
    """Whether the lighthouse of an earlier launcher of this machine still serves the job's other
    machines: that launcher was killed, and none of this machine's replica groups is there."""
    from lighthouse.client import LighthouseClient
    from lighthouse.errors import LighthouseError

    place = made.place
    ours = {str(number) for number in range(place.first, place.first + place.groups)}
    try:
        with LighthouseClient(made.lighthouse.address) as client:
            jobs = client.status(NEWS_S)["jobs"]
    except (LighthouseError, ValueError, OSError):
        return False
    jobs = [job for job in jobs if job["job_id"] == made.plugin.job_id]
    there = {m["name"] for job in jobs for m in job["members"] if not m["gone"]}
    there.update(name for job in jobs for name in job["waiting"])
    return bool(there) and not there & ours


def _serve(made: Launch) -> Any:
    """The launcher's own lighthouse, or None: another one serves. Raises ValueError if its port is taken.

    That of several machines stays while other machines are at their last step.
    """
    if not made.lighthouse.bind:
        return None
    from lighthouse.config import LighthouseConfig, Timeouts
    from lighthouse.standby import LaunchedLighthouse

    config = LighthouseConfig(
        min_replicas=made.plugin.min_replicas,
        expected_replicas=made.plugin.num_replica_groups,
        timeouts=Timeouts.derive(
            made.plugin.timeout_s,
            join_timeout_s=max(made.plugin.timeout_s, JOIN_TIMEOUT_S),
            heartbeat_timeout_s=ReplicaEnv.read().heartbeat_timeout_s,
        ),
    )
    try:
        return LaunchedLighthouse(
            made.lighthouse.bind, config=config, linger_s=0.0 if made.place.alone else LINGER_S
        )
    except OSError as error:
        if not made.place.alone and _left_here(made):
            say(SPEAKER, "the lighthouse of the launcher before this one still runs, and is used")
            return None
        raise ValueError(
            f"the lighthouse cannot listen at {made.lighthouse.bind} ({error}): set another "
            "main_process_port, the same on all machines"
        ) from error
