"""Accelerate's own commands learn the section, its flags and its questions.

Each name of `SEAMS` is replaced right after its module was executed and before others have copied it.
Nothing here raises while a module is imported: an Accelerate whose names have moved keeps working
without fault tolerance, and is refused in a sentence otherwise.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ft_accelerate import seams
from ft_accelerate.launch.groups import launch, refuse, wanted
from ft_accelerate.launch.questions import ask_after
from ft_accelerate.options import (
    SWITCH,
    SectionError,
    argument_name,
    field_names,
    help_of,
    kind_of,
    parse,
    read_section,
    refuse_excluded,
)
from ft_accelerate.seams import Seam, around
from ft_core.launch.import_hook import when_imported

log = logging.getLogger("ft_accelerate")

KNOWN = "accelerate 1.15"
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
    """A section that is wrong is no error of the program: it ends in a sentence, without a stack."""
    try:
        return original(args)
    except SectionError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None


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


def _reader(name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        import argparse

        try:
            return parse(name, text, "it")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


# ------------------------------------------------------------------ the launch


@around
def _prepare_simple(original: Callable[..., Any], args: Any) -> Any:
    """One process: replica groups instead, if that is wanted."""
    _refuse_first(args)
    command, env = original(args)
    _launch_if_wanted(args, command, env)
    return command, env


@around
def _prepare_torchrun(original: Callable[..., Any], args: Any) -> Any:
    """torchrun: replica groups instead, if that is wanted."""
    _refuse_first(args)
    env = original(args)
    if not hasattr(args, "training_script"):
        return env  # the caller is not `accelerate launch`
    script = [args.training_script, *args.training_script_args]
    _launch_if_wanted(args, [sys.executable, *(["-m"] if args.module else []), *script], env)
    return env


@around
def _prepare_other(original: Callable[..., Any], args: Any, *rest: Any) -> Any:
    """DeepSpeed, TPU: no fault tolerance."""
    _refuse_first(args)
    return original(args, *rest)


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
        for name in ("from_yaml_file", "from_json_file", "to_dict", "__post_init__")
    ),
    Seam("accelerate.commands.config.default", "ClusterConfig", (), _copied),
    Seam("accelerate.commands.config.cluster", "ClusterConfig", (), _copied),
    Seam("accelerate.commands.config.cluster", "get_cluster_input", (), _get_cluster_input),
    Seam("accelerate.commands.launch", "options_to_group"),
    Seam("accelerate.commands.launch", "launch_command_parser", ("subparsers",),
         _launch_command_parser),
    Seam("accelerate.commands.launch", "launch_command", ("args",), _launch_command),
    *(
        Seam(module, name, ("args",), replace)
        # The second has copied them from the first, perhaps too early.
        for module in ("accelerate.utils.launch", "accelerate.commands.launch")
        for name, replace in (
            ("prepare_simple_launcher_cmd_env", _prepare_simple),
            ("prepare_multi_gpu_env", _prepare_torchrun),
            ("prepare_deepspeed_cmd_env", _prepare_other),
            ("prepare_tpu", _prepare_other),
        )
    ),
)  # fmt: skip
"""The names of Accelerate's commands that we lean on, and what takes their place."""
