"""Accelerate's own commands learn the section, its flags and its questions (in their look, with their keys).

Each name of `SEAMS` is replaced right after its module was executed and before others have copied it.
Nothing here raises while a module is imported: an Accelerate whose names have moved keeps working
without fault tolerance, and is refused in a sentence otherwise.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from ft_accelerate import seams
from ft_accelerate.launch.groups import default_group_size, hints, launch, refuse, wanted
from ft_accelerate.options import (
    SWITCH,
    SectionError,
    argument_name,
    default_of,
    field_names,
    help_of,
    kind_of,
    parse,
    read_section,
    refuse_excluded,
    refuse_top_level_keys,
)
from ft_accelerate.seams import Seam, around
from ft_core.launch.import_hook import when_imported
from ft_core.launch.supervisor import say

log = logging.getLogger("ft_accelerate")

KNOWN = "accelerate 1.11 to 1.15"
GROUP_TITLE = "Fault Tolerance Arguments"
CONFIG_ARGS = "accelerate.commands.config.config_args"

_problems: list[str] = []


def watch() -> None:
    """Replace the names, now or when their modules are imported; idempotent."""
    for name in dict.fromkeys(seam.module for seam in SEAMS):
        when_imported(name, replace_in)


def replace_in(module: ModuleType) -> None:
    """Replace the names of a module that was imported. Never raises: see `problem`."""
    mine = [seam for seam in SEAMS if seam.module == module.__name__]
    try:
        seams.put(mine, KNOWN)
    except Exception as error:
        _problems.append(str(error))
        log.debug("%s", error, exc_info=True)


def problem() -> str:
    """Why this Accelerate cannot launch fault-tolerantly; "": it can, as far as is known yet."""
    return _problems[0] if _problems else ""


# ------------------------------------------------------------------ the section


def _extended(stock: Any) -> Any:
    @dataclass
    class ClusterConfig(stock):  # type: ignore[misc]
        """Accelerate's own, with a section for fault tolerance."""

        fault_tolerance_config: dict[str, Any] | None = None

        @staticmethod
        def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
            """Accelerate's own, for which a key of ours at the wrong place has one sentence."""
            known = (f.name for f in fields(stock))
            refuse_top_level_keys(config_dict, [*known, "fp16", "dynamo_backend"])
            processed: dict[str, Any] = stock.process_config(config_dict)
            return processed

        def __post_init__(self) -> None:
            super().__post_init__()
            try:
                section = self.fault_tolerance_config = read_section(self.fault_tolerance_config)
                if section.get(SWITCH, bool(section)):
                    if problem():
                        raise ValueError(problem())
                    kind = str(getattr(self.distributed_type, "value", self.distributed_type))
                    refuse_excluded(vars(self), kind=kind)
            except ValueError as error:
                raise SectionError(str(error)) from None

    ClusterConfig.__module__ = stock.__module__
    ClusterConfig.__qualname__ = stock.__qualname__
    return ClusterConfig


def _copied(_: Any) -> Any:
    """A module copied `ClusterConfig`, and may have done so too early."""
    home: Any = sys.modules[CONFIG_ARGS]
    return home.ClusterConfig


# ------------------------------------------------------------------ questions and flags


@around
def _get_cluster_input(original: Callable[[], Any]) -> Any:
    return ask_after(original())


@around
def _launch_command_parser(original: Callable[..., Any], subparsers: Any = None) -> Any:
    launch: Any = sys.modules["accelerate.commands.launch"]
    launch.options_to_group[SWITCH] = GROUP_TITLE
    parser = original(subparsers=subparsers)
    add_flags(parser)
    return parser


@around
def _launch_command(original: Callable[..., Any], args: Any) -> Any:
    """A user's mistake is not an error of the program: it ends in a sentence, without a stack."""
    _refuse_first(args)
    try:
        return original(args)
    except SectionError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None


@around
def _validated(original: Callable[..., Any], args: Any) -> Any:
    """The config file's values are in the arguments now, and nothing has been started."""
    result = original(args)
    args, *_ = result
    _refuse_first(args)
    try:
        for line in hints(args):
            say("ft_accelerate", line)
    except ValueError as error:  # a variable is misspelt
        raise SystemExit(f"ft_accelerate: {error}") from None
    return result


def add_flags(parser: Any) -> None:
    """Our flags, in a group of their own; Accelerate's parser takes dashes for underscores."""
    group = parser.add_argument_group(
        GROUP_TITLE, "Arguments related to training with replica groups that may fail."
    )
    group.add_argument(
        f"--{SWITCH}",
        default=None,
        action="store_true",
        help="Whether to train with replica groups that may fail, leave and join.",
    )
    for name in field_names():
        flag, text = f"--{argument_name(name)}", help_of(name)
        if kind_of(name) is bool:
            group.add_argument(flag, default=None, action="store_true", help=text)
        else:
            group.add_argument(flag, default=None, type=_reader(name), help=text)
    parser.parse_known_args = _naming_the_near_flag(parser)


def _naming_the_near_flag(parser: Any) -> Callable[..., Any]:
    """`parser.parse_known_args`, which ends the process for a flag that is nearly one of ours."""
    original = parser.parse_known_args
    ours = {f"--{name}" for name in (SWITCH, *map(argument_name, field_names()))}

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        found, unknown = original(args, namespace)
        for text in unknown:
            flag = str(text).partition("=")[0].replace("-", "_").replace("__", "--", 1)
            near = difflib.get_close_matches(flag, parser._option_string_actions, 1)
            if near and near[0] in ours:
                raise SystemExit(f"ft_accelerate: there is no flag {flag}: did you mean {near[0]}?")
        return found, unknown

    return parse_known_args


def _reader(name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(name, text, "it")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


# ------------------------------------------------------------------ the launch


@around
def _prepare_simple(original: Callable[..., Any], args: Any) -> Any:
    """One process: replica groups instead, if that is wanted."""
    command, env = original(args)
    _launch_if_wanted(args, command, env)
    return command, env


@around
def _prepare_torchrun(original: Callable[..., Any], args: Any) -> Any:
    """torchrun: replica groups instead, if that is wanted."""
    if not (hasattr(args, "training_script") and wanted(args)):
        return original(args)  # the caller may be another than `accelerate launch`
    # Accelerate looks whether torchrun could use the port. We use it for the lighthouse, which may be there.
    env = original(argparse.Namespace(**{**vars(args), "main_process_port": 0}))
    script = [args.training_script, *args.training_script_args]
    _launch_if_wanted(args, [sys.executable, *(["-m"] if args.module else []), *script], env)
    return env


def _refuse_first(args: Any) -> None:
    """End this process with a sentence if fault tolerance is wanted but not possible."""
    try:
        if wanted(args):
            if problem():
                raise ValueError(problem())
            refuse(args)
    except ValueError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None


def _launch_if_wanted(args: Any, command: list[str], env: dict[str, str]) -> None:
    """Run the replica groups and end this process as they did, or return."""
    try:
        if not wanted(args, env):
            return
        code = launch(args, command, env)
    except ValueError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None
    raise SystemExit(code)


SEAMS = (
    Seam(CONFIG_ARGS, "ClusterConfig", (), _extended),
    *(
        Seam(CONFIG_ARGS, f"ClusterConfig.{name}")
        for name in ("process_config", "to_dict", "__post_init__")
    ),
    Seam("accelerate.commands.config.default", "ClusterConfig", (), _copied),
    Seam("accelerate.commands.config.cluster", "ClusterConfig", (), _copied),
    Seam("accelerate.commands.config.cluster", "get_cluster_input", (), _get_cluster_input),
    Seam("accelerate.commands.launch", "options_to_group"),
    Seam(
        "accelerate.commands.launch",
        "launch_command_parser",
        ("subparsers",),
        _launch_command_parser,
    ),
    Seam("accelerate.commands.launch", "launch_command", ("args",), _launch_command),
    Seam("accelerate.commands.launch", "_validate_launch_command", ("args",), _validated),
    *(
        Seam(module, name, ("args",), replace)
        # The second has copied them from the first, perhaps too early.
        for module in ("accelerate.utils.launch", "accelerate.commands.launch")
        for name, replace in (
            ("prepare_simple_launcher_cmd_env", _prepare_simple),
            ("prepare_multi_gpu_env", _prepare_torchrun),
        )
    ),
)
"""The names of Accelerate's commands that we lean on, and what takes their place."""


# ---------------------------------------------------------------- the questions of `accelerate config`

KINDS = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Accelerate's distributed types for which there is fault tolerance."""


def ask_after(config: Any) -> Any:
    """`config`, an answered `ClusterConfig`, with the section that the user wants, if any."""
    kind = getattr(config.distributed_type, "value", config.distributed_type)
    others = (config.deepspeed_config, config.megatron_lm_config, config.mpirun_config)
    if kind in KINDS and not any(others):
        config.fault_tolerance_config = ask(
            num_processes=config.num_processes, num_machines=config.num_machines
        )
    return config


def ask(*, num_processes: int, num_machines: int) -> dict[str, Any]:
    """Ask on the terminal; returns the section, empty if fault tolerance is not wanted."""
    if not _yes(
        "Do you want to train fault-tolerantly, in replica groups that may fail and come "
        "back while the others train on? [yes/NO]: ",
        False,
    ):
        return {}
    section: dict[str, Any] = {SWITCH: True}
    here = max(1, num_processes // num_machines)
    usual = default_group_size(here, num_machines)
    each = "one" if usual == 1 else "all of a machine"
    size = _field(
        f"How many processes should one replica group have ({each}: what fails together, or "
        f"what is restarted together)? [{usual}]: ",
        lambda text: _divides(parse("group_size", text, "it"), here),
        usual,
        f"Please enter a number that divides the {here} process(es) of a machine.",
    )
    section[argument_name("group_size")] = size
    groups = max(1, num_processes // size)
    section[argument_name("min_replicas")] = _field(
        f"What is the smallest number of replica groups to train with (there are {groups})? [1]: ",
        lambda text: _between(parse("min_replicas", text, "it"), 1, groups),
        1,
        f"Please enter a number from 1 to {groups}.",
    )
    if _yes(
        "Do you want to use a lighthouse that runs already (if not, the launcher of the first "
        "machine runs one)? [yes/NO]: ",
        False,
    ):
        section[argument_name("lighthouse")] = _field(
            "What is the address of the lighthouse (tcp://host:port)? ",
            _address,
            None,
            "Please enter an address such as tcp://10.0.0.1:29510.",
        )
    timeout_s = default_of("timeout_s")
    section[argument_name("timeout_s")] = _field(
        f"After how many seconds should a replica group that hangs be evicted? [{timeout_s:g}]: ",
        _answer_to("timeout_s"),
        timeout_s,
        "Please enter a number of seconds above 0.",
    )
    restarts = _field(
        "How often within an hour may a replica group that died be restarted? [no limit]: ",
        lambda text: _between(_answer_to("max_restarts")(text), 0, float("inf")) if text else None,
        None,
        "Please enter a whole number from 0 on, or nothing.",
    )
    if restarts is not None:
        section[argument_name("max_restarts")] = restarts
    section[argument_name("commit")] = _commit()
    _ask_more(section, most_spares=groups - section[argument_name("min_replicas")])
    return read_section(section)


def _commit() -> str:
    from accelerate.commands.config.config_utils import _ask_options

    chosen: str = _ask_options(
        "How should a step be committed?",
        ["by all replica groups together (quorum)", "by each replica group alone (group)"],
        lambda i: ("quorum", "group")[int(i)],
    )
    return chosen


def _ask_more(section: dict[str, Any], *, most_spares: int) -> None:
    if not _yes(
        "Do you want to set the job's name, its token and other options? [yes/NO]: ", False
    ):
        return
    spares = 0
    if most_spares:
        spares = _field(
            "How many of the replica groups should be hot spares, which take over from one that dies? [0]: ",
            lambda text: _between(parse("spares", text, "it"), 0, most_spares),
            0,
            f"Please enter a number from 0 to {most_spares}.",
        )
    if spares:
        section[argument_name("spares")] = spares
    for name, question, default in (
        ("job_id", "What is the job's name on the lighthouse? [default]: ", "default"),
        ("token", "Which shared secret must a process name to fetch a state? [none]: ", ""),
    ):
        answer = _field(question, str, default, "")
        if answer != default:
            section[argument_name(name)] = answer
    quorum_s = _field(
        "How many seconds may a replica group wait for a quorum (0: without limit)? [0]: ",
        lambda text: _between(parse("quorum_timeout_s", text, "it"), 0, float("inf")),
        0.0,
        "Please enter a number of seconds.",
    )
    if quorum_s:
        section[argument_name("quorum_timeout_s")] = quorum_s
    if _yes(
        "May states hold arbitrary Python objects (pickle: only on a network that you trust)? "
        "[yes/NO]: ",
        False,
    ):
        section[argument_name("heal_allow_objects")] = True


def _field(question: str, read: Callable[[str], Any], default: Any, error: str) -> Any:
    from accelerate.commands.config.config_utils import _ask_field

    return _ask_field(question, read, default=default, error_message=error)


def _yes(question: str, default: bool) -> bool:
    from accelerate.commands.config.config_utils import _convert_yes_no_to_bool

    return bool(_field(question, _convert_yes_no_to_bool, default, "Please enter yes or no."))


def _answer_to(name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return read_section({name: text})[argument_name(name)]

    return read


def _between(value: Any, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise ValueError
    return value


def _divides(value: int, whole: int) -> int:
    if value < 1 or whole % value:
        raise ValueError
    return value


def _address(text: str) -> str:
    if not text.startswith("tcp://"):
        raise ValueError
    return text
