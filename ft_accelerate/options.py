"""The options of fault tolerance under Accelerate: what they are, and each place where they can be set.

`FaultTolerancePlugin` is the table: name, type, default, help. Each option can be set, the first that
says something counting, by

    FaultToleranceKwargs(min_replicas=2)                    in the script
    accelerate launch --fault_tolerance_min_replicas 2      a flag
    fault_tolerance_config: {fault_tolerance_min_replicas: 2}
                                                            the YAML; `accelerate config` writes it
    ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS=2               the environment
    TORCHFT_LIGHTHOUSE, REPLICA_GROUP_ID, NUM_REPLICA_GROUPS, FT_JOB_ID
                                                            ft_core's own names, of four of them

`accelerate launch` hands everything to the training processes through the environment; so do we. The
training process makes a `FaultTolerancePlugin` from it, and that makes the core's `JobOptions`, which
check what a job can have. This is the one module of the package that reads the environment. `import
torch` imports it in every process: it imports neither torch nor accelerate, and the core's options only
when it makes some.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ft_core.environment import (
    ENV_JOB,
    ENV_LIGHTHOUSE,
    ENV_NUM_GROUPS,
    ENV_REPLICA_GROUP,
    ReplicaEnv,
    Supervision,
)
from ft_core.launch.rank_group import rank_environment

if TYPE_CHECKING:
    from ft_core.config import JobOptions

ENV_USE = "ACCELERATE_USE_FAULT_TOLERANCE"
ENV_PREFIX = "ACCELERATE_FAULT_TOLERANCE_"
ENV_AUTOLOAD = "FT_ACCELERATE_AUTOLOAD"
"""Set to 0: the package does nothing by being installed."""

SECTION = "fault_tolerance_config"
PREFIX = "fault_tolerance_"
SWITCH = "use_fault_tolerance"


def _option(default: Any, help: str, *, kind: type | None = None, also: str = "") -> Any:
    """A field that is None until `__post_init__` has asked the environment.

    `kind`: what a text is read as, if not as the default's type. `also`: ft_core's variable for it.
    """
    kind = kind or type(default)
    return field(
        default=None, metadata={"help": help, "kind": kind, "default": default, "also": also}
    )


@dataclass
class FaultTolerancePlugin:
    """
    This plugin is used to train with replica groups that may fail, leave and join.

    Each field that is not passed is read from the environment variable
    `ACCELERATE_FAULT_TOLERANCE_<FIELD>`, which `accelerate launch` sets from the section
    `fault_tolerance_config` of its config file and from its `--fault_tolerance_<field>` flags. Raises
    ValueError, in one sentence, for values that no job can have.

    Example:

    ```python
    from accelerate import Accelerator
    from ft_accelerate import FaultToleranceKwargs

    accelerator = Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])
    ```

    Args:
    """

    num_replica_groups: int = _option(
        1,
        "How many replica groups the job is meant to have. Constant for the whole job.",
        also=ENV_NUM_GROUPS,
    )
    replica_group_id: int = _option(
        0, "Which of the replica groups this is, from 0.", also=ENV_REPLICA_GROUP
    )
    lighthouse: str = _option(
        "",
        "Address of the lighthouse, tcp://host:port. Empty: one is started on this machine.",
        also=ENV_LIGHTHOUSE,
    )
    min_replicas: int = _option(1, "With fewer replica groups no step is committed.")
    spares: int = _option(
        0,
        "So many of the replica groups are hot spares: the data is divided among the others, and a spare "
        "takes over the share of one that is gone.",
    )
    timeout_s: float = _option(
        60.0, "The one timeout from which the others are derived, in seconds."
    )
    quorum_timeout_s: float | None = _option(
        None,
        "How long to wait for a quorum, in seconds. Default: as long as the lighthouse answers.",
        kind=float,
    )
    max_restarts: int | None = _option(
        None,
        "How often within an hour the launcher starts a replica group that died again. Default: no "
        "limit while the job makes progress.",
        kind=int,
    )
    commit: str = _option(
        "quorum",
        "'quorum': all replica groups commit a step or none does. 'group': each decides alone.",
    )
    job_id: str = _option("default", "Keeps two jobs on one lighthouse apart.", also=ENV_JOB)
    heal_allow_objects: bool = _option(
        False, "Let states hold arbitrary Python objects, which travel by pickle."
    )
    group_size: int = _option(
        0,
        "Processes of one replica group. 0: as the launcher says (WORLD_SIZE); `accelerate launch` "
        "makes it one, or with several machines all processes of a machine.",
    )
    token: str = _option("", "Shared secret that a process must name to fetch a state.")
    warm_start: bool = _option(
        True,
        "Let the launcher fork a replica group that it starts again from a process that has imported "
        "the libraries.",
    )
    keep_state_s: float = _option(
        30.0,
        "How often a process of the launcher's takes a copy of the state, in seconds: when all replica groups "
        "have died they go on from it. 0: never.",
    )
    keep_state_dir: str = _option(
        "",
        "A folder in which it also writes each copy, for a job with an id of its own that is started again when "
        "its launcher has died, too.",
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for name in kwargs:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, 1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise ValueError(f"{cls.__name__} has no field {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._fill(vars(self), os.environ)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> FaultTolerancePlugin:
        """What `env` (default: the process's) says. Raises ValueError."""
        plugin = cls.__new__(cls)
        plugin._fill({}, os.environ if env is None else env)
        return plugin

    def _fill(self, passed: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """What was not passed comes from `env`, what is not there from the default."""
        given = given_in(env)
        for f in dataclasses.fields(FaultTolerancePlugin):
            value = passed.get(f.name)
            if value is None:
                value = given.get(f.name, f.metadata["default"])
            else:
                value = parse(f.name, value, f.name)
            setattr(self, f.name, value)
        self._check()

    def _check(self) -> None:
        """What the launcher and the split of the data need; the rest `JobOptions` checks."""
        groups = self.num_replica_groups
        least_of = {"num_replica_groups": 1, "max_restarts": 0, "group_size": 0, "keep_state_s": 0}
        for name, least in least_of.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.replica_group_id < groups:
            raise ValueError(
                f"replica_group_id must be a number from 0 to {groups - 1} (num_replica_groups "
                f"is {groups}; it chooses the shard of the data), got {self.replica_group_id}"
            )
        if self.min_replicas > groups:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) must be at most num_replica_groups "
                f"({groups}), or no step is ever committed"
            )
        _job_options(vars(self), expected_replicas=groups, async_quorum=False)
        self._refuse_one_process(self.group_size)

    def _refuse_one_process(self, group_size: int) -> None:
        """`group_size`: processes of a replica group; 0: not known. Raises ValueError."""
        if self.spares and (self.num_replica_groups - self.spares) * group_size == 1:
            raise ValueError(
                f"spares={self.spares} of {self.num_replica_groups} replica groups leaves one process that "
                "trains, and Accelerate averages gradients of several only: start one more, or leave out spares"
            )

    def job(self, place: ReplicaEnv) -> JobOptions:
        """The core's options for the process at `place` in its replica group. Raises ValueError."""
        from ft_core.replica.status import RanksHold

        size = place.group_world_size
        self._refuse_one_process(size)
        if self.group_size not in (0, size):
            raise ValueError(
                f"group_size is {self.group_size}, but this process was started as one of {size} "
                f"(WORLD_SIZE): start it with `accelerate launch`, or with torchrun "
                f"--nproc_per_node {self.group_size} for each replica group"
            )
        if size > 1 and not (place.master_addr and place.master_port):
            raise ValueError(
                f"a replica group of {size} processes needs MASTER_ADDR and MASTER_PORT, by which "
                "they find each other: `accelerate launch` and torchrun set them"
            )
        return _job_options(
            vars(self),
            name=str(self.replica_group_id),
            expected_replicas=self.num_replica_groups,
            async_quorum=False,
            objects_option=f"{argument_name('heal_allow_objects')}: true in {SECTION} (or the flag "
            f"--{argument_name('heal_allow_objects')})",
            group_rank=place.group_rank,
            group_world_size=size,
            ranks_hold=RanksHold.COPIES,
            store_addr=place.master_addr,
            store_port=place.master_port,
            interface=place.interface,
            compare_steps=place.compare_steps,
            heartbeat_s=place.heartbeat_s,
        )

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


def _job_options(values: Mapping[str, Any], name: str = "-", **more: Any) -> JobOptions:
    """The core's options, with those of `values` that it knows. Raises ValueError."""
    from ft_core.config import JobOptions

    known = {f.name for f in dataclasses.fields(JobOptions)} & set(field_names())
    return JobOptions(name=name, **{key: values[key] for key in known & set(values)}, **more)


# ---------------------------------------------------------------------- the table


def field_names() -> list[str]:
    """The options, in the order of the documentation."""
    return [f.name for f in dataclasses.fields(FaultTolerancePlugin)]


def env_name(name: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + name.upper()


def argument_name(name: str) -> str:
    """A field's name in the section and as a flag (after the dashes)."""
    return PREFIX + name


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


def _explain() -> str:
    """The plugin's docstring, with the fields in Accelerate's style."""
    text = (FaultTolerancePlugin.__doc__ or "").rstrip()
    for name in field_names():
        default = default_of(name)
        usual = "" if default is None else f", defaults to `{default!r}`"
        text += f"\n        {name} (`{kind_of(name).__name__}`, *optional*{usual}):"
        text += f"\n            {help_of(name)}"
    return text + "\n    "


FaultTolerancePlugin.__doc__ = _explain()

# ---------------------------------------------------------------------- the section of the YAML


class SectionError(ValueError):
    """The section of a config file is wrong; the message is for its author."""


def read_section(section: Any) -> dict[str, Any]:
    """The section with its keys prefixed and its values of their types.

    The keys carry their prefix, as in Accelerate's other sections; one without it gets it. Raises
    ValueError, in one sentence, for an unknown key or a wrong value.
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{SECTION} must hold keys and values, got {section!r}")
    found: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for given, value in section.items():
        name = str(given).removeprefix(PREFIX)
        if name not in (SWITCH, *field_names()):
            near = difflib.get_close_matches(name, [SWITCH, *field_names()], 1)
            known = [SWITCH, *map(argument_name, field_names())]
            full = [SWITCH] if near == [SWITCH] else [argument_name(other) for other in near]
            hint = f"did you mean {full[0]!r}?" if full else f"it takes {', '.join(known)}"
            raise ValueError(f"{SECTION} has the unknown key {given!r}: {hint}")
        if value is None:
            continue
        what = f"{given} in {SECTION}"
        if name == SWITCH:
            found[SWITCH] = read(bool, value, what)
        else:
            found[argument_name(name)] = values[name] = parse(name, value, what)
    groups = values.get("num_replica_groups")
    if groups is None:  # that of the processes; here it is large enough
        groups = values.get("spares", 0) + values.get("min_replicas", 1)
    try:
        _job_options(values, expected_replicas=groups, async_quorum=False)
    except ValueError as error:
        raise ValueError(f"{SECTION}: {error}") from None
    return found


def refuse_top_level_keys(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise SectionError for a key of a config file that is meant for the section, or is its name
    misspelt. `known`: the keys that Accelerate takes."""
    ours = [SWITCH, *map(argument_name, field_names())]
    for key, value in config.items():
        if key in known or key == SECTION:
            continue
        said = f"the config file has unknown keys ({key!r}): "
        if isinstance(value, Mapping):
            near = difflib.get_close_matches(str(key), [SECTION, *known], 1)
            if near == [SECTION]:
                raise SectionError(f"{said}did you mean {SECTION!r}?")
            continue
        near = difflib.get_close_matches(str(key), [SECTION, *ours, *known], 1)
        if near == [SECTION]:
            raise SectionError(f"{said}did you mean {SECTION!r}, which holds keys and values?")
        if near and near[0] in ours:
            raise SectionError(f"{said}did you mean {near[0]!r} in the section {SECTION!r}?")


# ---------------------------------------------------------------------- the environment


def is_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether the switch is on. Raises ValueError if it is neither on nor off, or misspelt."""
    env = os.environ if env is None else env
    check_names(env, "ACCELERATE_USE_FAULT", {ENV_USE})
    return truth(env.get(ENV_USE, ""), f"environment variable {ENV_USE}")


def switched_off(env: Mapping[str, str] | None = None) -> bool:
    """Whether the switch is there and says no."""
    env = os.environ if env is None else env
    return bool(env.get(ENV_USE)) and not is_enabled(env)


def refuse_notebooks(launcher: str = "") -> None:
    """Raise ValueError in a launcher of that name; "": in a process that `debug_launcher` has forked, and
    whose world is torch's already. Those of `notebook_launcher` are like torchrun's."""
    if launcher or truth(os.environ.get("FORK_LAUNCHED", ""), "environment variable FORK_LAUNCHED"):
        raise ValueError(
            f"{launcher or 'debug_launcher'} ends all of its processes when one of them dies, so fault "
            "tolerance has nothing to protect: write the code to a script for `accelerate launch`, "
            "or switch fault tolerance off (ACCELERATE_USE_FAULT_TOLERANCE=false, or leave out "
            "FaultToleranceKwargs)"
        )


def switch_on() -> None:
    """Turn the switch of this process and its children on."""
    os.environ[ENV_USE] = "true"


def given_in(env: Mapping[str, str]) -> dict[str, Any]:
    """The fields that `env` names. Raises ValueError, also for a name that is nearly ours."""
    check_names(env, ENV_PREFIX, set(map(env_name, field_names())))
    found: dict[str, Any] = {}
    for f in dataclasses.fields(FaultTolerancePlugin):
        for name in (env_name(f.name), f.metadata["also"]):
            if env.get(name):
                found[f.name] = parse(f.name, env[name], f"environment variable {name}")
                break
    return found


def ours_in_environment() -> dict[str, str]:
    """The variables of this process that are ours; the token is hidden."""
    ours = {n: v for n, v in sorted(os.environ.items()) if n == ENV_USE or n.startswith(ENV_PREFIX)}
    return ours | dict.fromkeys(ours.keys() & {env_name("token")}, "(set)")


def environment_of_another_job() -> dict[str, str]:
    """This process's environment without anything that concerns its job."""
    ours = {*ours_in_environment(), *Supervision().environment(), ENV_LIGHTHOUSE}
    return {name: value for name, value in os.environ.items() if name not in ours}


def as_one_process() -> None:
    """Let Accelerate find a group of one process where no launcher has said so."""
    for name, value in rank_environment({}, rank=0, size=1, port=29500).items():
        os.environ.setdefault(name, value)


def uses(name: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether Accelerate's switch `ACCELERATE_USE_<name>` is on."""
    env = os.environ if env is None else env
    return env.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1")


def may_autoload() -> bool:
    """Whether the package may act by being installed. Never raises: `import torch` asks it."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    return os.environ.get(ENV_AUTOLOAD, "1").strip().lower() not in ("0", "false", "no", "off")


def check_names(names: Iterable[str], prefix: str, known: Collection[str]) -> None:
    """Every environment variable of `names` that begins so is one of `known`. Raises ValueError."""
    for name in names:
        if name.startswith(prefix) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ValueError(f"environment variable {name} is unknown: {hint}")


# ---------------------------------------------------------------------- what excludes it


@dataclass(frozen=True, slots=True)
class Excluded:
    """A way to train that cannot be combined with fault tolerance.

    Attributes:
        name: as users call it.
        kind: Accelerate's distributed type, and its switch in the environment.
        options: that ask for it: of `accelerate launch`, of a config file and of `Accelerator`.
    """

    name: str
    kind: str
    options: tuple[str, ...]


EXCLUDED = (
    Excluded(
        "DeepSpeed",
        "DEEPSPEED",
        ("use_deepspeed", "deepspeed_config", "deepspeed_plugin", "deepspeed_plugins"),
    ),
    Excluded(
        "Megatron-LM",
        "MEGATRON_LM",
        ("use_megatron_lm", "megatron_lm_config", "megatron_lm_plugin"),
    ),
    Excluded("torch_tp_plugin", "TP", ("torch_tp_plugin",)),
    Excluded("a TPU", "XLA", ("tpu",)),
    Excluded("mpirun", "MPIRUN", ("mpirun_hostfile", "mpirun_config")),
)


UNSHARDED = Excluded(
    "ParallelismConfig", "PARALLELISM_CONFIG", ("use_parallelism_config", "parallelism_config")
)
"""It is taken with FSDP2, whose shards lie within a replica group."""


def _shards(options: Mapping[str, Any], kind: str, in_environment: bool) -> bool:
    """Whether FSDP is asked for. Raises ValueError for its first version."""
    asked = any(options.get(name) for name in ("use_fsdp", "fsdp_config", "fsdp_plugin"))
    if not (asked or kind == "FSDP" or (in_environment and uses("FSDP"))):
        return False
    section = options.get("fsdp_config") or {}
    version = options.get("fsdp_version") or section.get("fsdp_version")
    launches = options.get("fsdp_plugin") is None and not in_environment
    if launches and str(version or 1) != "2":
        raise ValueError(FSDP1)
    return True


FSDP1 = "fault tolerance takes FSDP2, whose shards lie within a replica group: set fsdp_version: 2"


def refuse_excluded(
    options: Mapping[str, Any], *, kind: str = "", in_environment: bool = False
) -> None:
    """Raise ValueError if `options`, a distributed type or the environment ask for what excludes it."""
    for other in (*EXCLUDED, *(() if _shards(options, kind, in_environment) else (UNSHARDED,))):
        if (
            (in_environment and uses(other.kind))
            or kind == other.kind
            or any(options.get(name) for name in other.options)
        ):
            raise ValueError(
                f"fault tolerance cannot be combined with {other.name}, which spreads one model "
                f"over processes or starts them itself: leave out {other.name}, or train without "
                "fault tolerance"
            )


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
            if isinstance(value, bool) or not math.isfinite(float(value)):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{what} must be a number of seconds, got {value!r}") from None
    return str(value)


def number(value: Any, what: str) -> int:
    """A whole number; 1.5 and True are not."""
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
