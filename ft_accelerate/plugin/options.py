"""The options of fault tolerance under Accelerate, and the environment that carries them.

`accelerate launch` hands everything to the training processes through environment variables; so do
we. Each way to switch fault tolerance on (the section `fault_tolerance_config` of the YAML, flags, the
environment itself) ends in these variables, and the training process reads them here: this is the one place
of the package that reads the environment.

    ACCELERATE_USE_FAULT_TOLERANCE=true             switch
    ACCELERATE_FAULT_TOLERANCE_<FIELD>              one for each field of `FaultTolerancePlugin`
    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
                                                    of the process *in its replica group*; all of
                                                    them absent: the group is this one process

ft_core's own names (TORCHFT_LIGHTHOUSE, REPLICA_GROUP_ID, NUM_REPLICA_GROUPS, FT_JOB_ID) fill what
neither an argument nor ours has said. Imports neither torch nor accelerate.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_core.environment import (
    ENV_JOB,
    ENV_LIGHTHOUSE,
    ENV_NUM_GROUPS,
    ENV_REPLICA_GROUP,
    ReplicaEnv,
)
from ft_core.launch.supervisor import report_joined

ENV_USE = "ACCELERATE_USE_FAULT_TOLERANCE"
ENV_PREFIX = "ACCELERATE_FAULT_TOLERANCE_"
ENV_SUPERVISOR = ENV_PREFIX + "SUPERVISOR"
ENV_RESTARTS = ENV_PREFIX + "RESTARTS"
ENV_CHILD = ENV_PREFIX + "CHILD"
ENV_CHILDREN = ENV_PREFIX + "CHILDREN"
ENV_TORCHRUN_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
ENV_AUTOLOAD = "FT_ACCELERATE_AUTOLOAD"
"""Set to 0: the package does nothing by being installed."""

COMMITS = ("quorum", "group")


def _option(kind: type, default: Any, help: str, *, also: str = "") -> Any:
    """A field that is None until `__post_init__` has asked the environment.

    `kind`: what the text of the environment is read as. `also`: ft_core's name for the variable.
    """
    return field(
        default=None, metadata={"help": help, "kind": kind, "default": default, "also": also}
    )


@dataclass
class FaultTolerancePlugin:
    """
    This plugin is used to train with replica groups that may fail, leave and join.

    Each field that is not passed is read from the environment variable
    `ACCELERATE_FAULT_TOLERANCE_<FIELD>`, which `accelerate launch` sets from the section
    `fault_tolerance_config` of its config file and from its `--fault_tolerance_<field>` flags.

    Args:
        num_replica_groups (`int`, *optional*, defaults to `1`):
            How many replica groups the job is meant to have. Constant for the whole job.
        replica_group_id (`int`, *optional*, defaults to `0`):
            Which of them this process belongs to, from 0.
        lighthouse (`str`, *optional*, defaults to `""`):
            Address of the lighthouse, `tcp://host:port`. Empty: one is started on this machine.
        min_replicas (`int`, *optional*, defaults to `1`):
            With fewer replica groups no step is committed.
        timeout_s (`float`, *optional*, defaults to `60.0`):
            The one knob from which the other timeouts follow, in seconds.
        quorum_timeout_s (`float`, *optional*):
            How long to wait for a quorum, in seconds. `None`: as long as the lighthouse answers.
        max_restarts (`int`, *optional*, defaults to `10`):
            How often the launcher starts a replica group again.
        commit (`str`, *optional*, defaults to `"quorum"`):
            `"quorum"`: all replica groups commit a step or none does. `"group"`: each decides.
        job_id (`str`, *optional*, defaults to `"default"`):
            Keeps two jobs on one lighthouse apart.
        heal_allow_objects (`bool`, *optional*, defaults to `False`):
            Let states travel that hold arbitrary Python objects (pickle).
        group_size (`int`, *optional*, defaults to `0`):
            Processes of one replica group. 0: as many as the launcher says (`WORLD_SIZE`), and
            for `accelerate launch` one; on several machines, all processes of a machine.
        token (`str`, *optional*, defaults to `""`):
            Shared secret that is asked for when a state is fetched.

    Example:

    ```python
    from accelerate import Accelerator
    from ft_accelerate import FaultToleranceKwargs

    accelerator = Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])
    ```
    """

    num_replica_groups: int = _option(
        int, 1, "How many replica groups the job is meant to have.", also=ENV_NUM_GROUPS
    )
    replica_group_id: int = _option(
        int, 0, "Which replica group this is, from 0.", also=ENV_REPLICA_GROUP
    )
    lighthouse: str = _option(
        str,
        "",
        "Address of the lighthouse, tcp://host:port. Empty: one is started on this machine.",
        also=ENV_LIGHTHOUSE,
    )
    min_replicas: int = _option(int, 1, "With fewer replica groups no step is committed.")
    timeout_s: float = _option(
        float, 60.0, "The one knob from which the other timeouts follow, in seconds."
    )
    quorum_timeout_s: float | None = _option(
        float, None, "How long to wait for a quorum, in seconds. Default: without end."
    )
    max_restarts: int = _option(
        int, 10, "How often a replica group that died is started again by the launcher."
    )
    commit: str = _option(
        str,
        "quorum",
        "'quorum': all replica groups commit a step or none does. 'group': each decides alone.",
    )
    job_id: str = _option(str, "default", "Keeps two jobs on one lighthouse apart.", also=ENV_JOB)
    heal_allow_objects: bool = _option(
        bool, False, "Let states travel that hold arbitrary Python objects (pickle)."
    )
    group_size: int = _option(
        int,
        0,
        "Processes of one replica group. 0: one; on several machines all of a machine.",
    )
    token: str = _option(str, "", "Shared secret that is asked for when a state is fetched.")

    def __post_init__(self) -> None:
        self._fill(os.environ)
        self._check()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> FaultTolerancePlugin:
        """What `env` (default: the process's) says. Raises ValueError."""
        if env is None:
            return cls()
        plugin = cls.__new__(cls)
        for f in dataclasses.fields(cls):
            setattr(plugin, f.name, None)
        plugin._fill(env)
        plugin._check()
        return plugin

    def to_env(self) -> dict[str, str]:
        """The variables from which `from_env` makes this plugin again, the switch included."""
        env = {ENV_USE: "true"}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                env[env_name(f.name)] = (
                    str(value).lower() if isinstance(value, bool) else str(value)
                )
        return env

    def _fill(self, env: Mapping[str, str]) -> None:
        """What was not passed comes from `env`, what is not there from the default."""
        given = given_in(env)
        for f in dataclasses.fields(self):
            passed = getattr(self, f.name)
            if passed is not None:
                setattr(self, f.name, parse(f.name, passed, f.name))
            else:
                setattr(self, f.name, given.get(f.name, f.metadata["default"]))

    def _check(self) -> None:
        groups = self.num_replica_groups
        for name, least in (
            ("num_replica_groups", 1), ("replica_group_id", 0), ("min_replicas", 1),
            ("max_restarts", 0), ("group_size", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.replica_group_id >= groups:
            raise ValueError(
                f"replica_group_id must be a number from 0 to {groups - 1} (num_replica_groups "
                f"is {groups}; it chooses the shard of the data), got {self.replica_group_id}"
            )
        if self.min_replicas > groups:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) must be at most num_replica_groups "
                f"({groups}), or no step is ever committed"
            )
        for name in ("timeout_s", "quorum_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, got {value}")
        if self.commit not in COMMITS:
            raise ValueError(f'commit must be "quorum" or "group", got {self.commit!r}')
        if self.lighthouse and not self.lighthouse.startswith("tcp://"):
            raise ValueError(
                f"lighthouse must be an address such as tcp://10.0.0.1:29510, "
                f"got {self.lighthouse!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What started this process.

    Attributes:
        pid: of the launcher, this process's parent, for `ft_core.launch.supervisor.die_with`; 0: none.
        restarts: how often this replica group has been started again (by torchrun, too).
        child: number of this replica group among the launcher's children on this machine, for
            `ft_core.launch.supervisor.report_joined`.
        children: how many those are; 0: unknown.
    """

    pid: int = 0
    restarts: int = 0
    child: int = 0
    children: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Supervision:
        env = os.environ if env is None else env
        return cls(
            pid=_number_in(env, ENV_SUPERVISOR, 0),
            restarts=_number_in(env, ENV_RESTARTS, _number_in(env, ENV_TORCHRUN_RESTARTS, 0)),
            child=_number_in(env, ENV_CHILD, 0),
            children=_number_in(env, ENV_CHILDREN, 0),
        )

    def to_env(self) -> dict[str, str]:
        return {
            ENV_SUPERVISOR: str(self.pid),
            ENV_RESTARTS: str(self.restarts),
            ENV_CHILD: str(self.child),
            ENV_CHILDREN: str(self.children),
        }

    def tell_joined(self) -> None:
        """Let the launcher, if there is one, know that this process takes part in a quorum."""
        report_joined(os.environ, self.child)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """This process's place in its replica group, as the launcher says.

    Attributes:
        rank, size: in the replica group.
        local_rank: among the group's processes on this machine.
        store_addr, store_port: of the group's rendezvous; "" and 0 where there is none.
        event_log: file for telemetry events; "": none.
        interface: network interface or IP address to advertise; "": any that leads to the others.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store_addr: str = ""
    store_port: int = 0
    event_log: str = ""
    interface: str = ""

    @classmethod
    def from_env(cls, group_size: int = 0, env: Mapping[str, str] | None = None) -> GroupPlace:
        """`group_size`: what the options say; 0: nothing. Raises ValueError."""
        env = os.environ if env is None else env
        core = ReplicaEnv.read(env)
        rank, size = core.group_rank, core.group_world_size
        if group_size not in (0, size):
            raise ValueError(
                f"group_size is {group_size}, but this process was started as one of {size} "
                f"(WORLD_SIZE): start it with `accelerate launch`, or with torchrun "
                f"--nproc_per_node {group_size} for each replica group"
            )
        if not 0 <= rank < size:
            raise ValueError(f"RANK must be a number from 0 to {size - 1}, got {rank}")
        if size > 1 and not (core.master_addr and core.master_port):
            raise ValueError(
                f"a replica group of {size} processes needs MASTER_ADDR and MASTER_PORT, by which "
                "they find each other: `accelerate launch` and torchrun set them"
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=_number_in(env, "LOCAL_RANK", rank),
            store_addr=core.master_addr,
            store_port=core.master_port,
            event_log=core.event_log,
            interface=core.interface,
        )

    def num_processes(self, plugin: FaultTolerancePlugin) -> int:
        """Processes of the whole job: Accelerate's `num_processes`."""
        return plugin.num_replica_groups * self.size

    def process_index(self, plugin: FaultTolerancePlugin) -> int:
        """This process's number among them: Accelerate's `process_index`."""
        return plugin.replica_group_id * self.size + self.rank


def is_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether the switch is on. Raises ValueError if it is neither on nor off, or misspelt."""
    env = os.environ if env is None else env
    check_names(env, "ACCELERATE_USE_FAULT", {ENV_USE})
    return truth(env.get(ENV_USE, ""), f"environment variable {ENV_USE}")


def switched_off(env: Mapping[str, str]) -> bool:
    """Whether the switch is there and says no."""
    return bool(env.get(ENV_USE)) and not is_enabled(env)


def given_in(env: Mapping[str, str]) -> dict[str, Any]:
    """The fields that `env` names. Raises ValueError, also for a name that is nearly ours."""
    known = {ENV_SUPERVISOR, ENV_RESTARTS, ENV_CHILD, ENV_CHILDREN, *map(env_name, field_names())}
    check_names(env, ENV_PREFIX, known)
    found: dict[str, Any] = {}
    for f in dataclasses.fields(FaultTolerancePlugin):
        for name in (env_name(f.name), f.metadata["also"]):
            if env.get(name):
                found[f.name] = parse(f.name, env[name], f"environment variable {name}")
                break
    return found


def switch_on() -> None:
    """Turn the switch of this process and its children on."""
    os.environ[ENV_USE] = "true"


def as_one_process() -> None:
    """Let Accelerate find a group of one process where no launcher has said so."""
    for name, value in (
        ("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)


def uses(name: str) -> bool:
    """Whether Accelerate's switch `ACCELERATE_USE_<name>` is on."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"


def may_autoload(env: Mapping[str, str] | None = None) -> bool:
    """Whether the package may act by being installed. Never raises: `import torch` asks it."""
    env = os.environ if env is None else env
    return env.get(ENV_AUTOLOAD, "1").strip().lower() not in ("0", "false", "no", "off")


def field_names() -> list[str]:
    """The options, in the order of the documentation."""
    return [f.name for f in dataclasses.fields(FaultTolerancePlugin)]


def env_name(name: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + name.upper()


def default_of(name: str) -> Any:
    """What a field is when nothing says so."""
    return FaultTolerancePlugin.__dataclass_fields__[name].metadata["default"]


def help_of(name: str) -> str:
    """One line on a field."""
    return str(FaultTolerancePlugin.__dataclass_fields__[name].metadata["help"])


def kind_of(name: str) -> type:
    """What a field's text is read as: int, float, bool or str."""
    kind: type = FaultTolerancePlugin.__dataclass_fields__[name].metadata["kind"]
    return kind


def parse(name: str, value: Any, what: str) -> Any:
    """`value` (a text, or what YAML made of it) as the field's type.

    `what` names it in the error. Raises ValueError.
    """
    return read(kind_of(name), value, what)


def _number_in(env: Mapping[str, str], name: str, default: int) -> int:
    return number(env.get(name) or default, f"environment variable {name}")


# ---------------------------------------------------------------------- texts as values

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f", "")


def read(kind: type, value: Any, what: str) -> Any:
    """`value` (a text, or what YAML made of it) as a bool, int, float (of seconds) or str."""
    if kind is bool:
        return value if isinstance(value, bool) else truth(str(value), what)
    if kind is int:
        return number(value, what)
    if kind is float:
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{what} must be a number of seconds, got {value!r}") from None
    return str(value)


def number(value: Any, what: str) -> int:
    """A whole number; 1.5 and True are none."""
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must be a whole number, got {value!r}") from None


def truth(text: str, what: str) -> bool:
    """A truth value in one of the words that Accelerate takes, too."""
    text = text.strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{what} must be true or false, got {text!r}")


def check_names(names: Iterable[str], prefix: str, known: Collection[str]) -> None:
    """Every environment variable of `names` that begins so is one of `known`."""
    for name in names:
        if name.startswith(prefix) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ValueError(f"environment variable {name} is unknown: {hint}")
