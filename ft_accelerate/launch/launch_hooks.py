"""Accelerate's own commands learn the section, its flags and its questions.

Accelerate has no seam for third parties here, so some of its names are replaced, each right after
its module was executed and before others have copied it:

| module | name | becomes |
|---|---|---|
| `accelerate.commands.config.config_args` | `ClusterConfig` | a subclass with `fault_tolerance_config` |
| `accelerate.commands.config.cluster` | `get_cluster_input` | asks our questions, too |
| `accelerate.commands.launch` | `launch_command_parser` | has our flags, too |
| `accelerate.commands.launch` | `launch_command` | ends in a sentence where the section is wrong |
| `accelerate.utils.launch` | `prepare_simple_launcher_cmd_env`, `prepare_multi_gpu_env` | start replica groups instead, if that is wanted |
| `accelerate.utils.launch` | `prepare_deepspeed_cmd_env`, `prepare_tpu` | refuse fault tolerance |

Nothing here raises while a module is imported: an Accelerate whose names have moved keeps working
without fault tolerance, and is refused in a sentence otherwise.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ft_accelerate.plugin.config import SECTION, SWITCH, SectionError, argument_name, read_section
from ft_accelerate.plugin.options import field_names, help_of, kind_of, parse
from ft_core.launch.import_hook import when_imported

log = logging.getLogger("ft_accelerate")

MARK = "__ft_accelerate__"
GROUP_TITLE = "Fault Tolerance Arguments"
UNSUPPORTED = ("DEEPSPEED", "MEGATRON_LM", "FSDP", "XLA")

_problems: list[str] = []


def watch() -> None:
    """Replace the names above, now or when their modules are imported; idempotent."""
    for module_name, callback in _waiters().items():
        when_imported(module_name, callback)


@functools.cache
def _waiters() -> dict[str, Callable[[ModuleType], None]]:
    return {
        name: functools.partial(_guarded, hook)
        for name, hook in (
            ("accelerate.commands.config.config_args", _on_config_args),
            ("accelerate.commands.config.cluster", _on_cluster),
            ("accelerate.commands.config.default", _on_default),
            ("accelerate.utils.launch", _on_prepare),
            ("accelerate.commands.launch", _on_launch),
        )
    }


def problem() -> str:
    """Why this Accelerate cannot launch fault-tolerantly; "": it can, as far as is known yet."""
    return _problems[0] if _problems else ""


def _guarded(hook: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:
        _problems.append(
            f"this version of Accelerate cannot be made fault-tolerant ({module.__name__}: "
            f"{error}): install one that ft_accelerate was tested with (accelerate>=1.15,<1.16)"
        )
        log.debug("%s", _problems[-1], exc_info=True)


def _replace(module: ModuleType, name: str, make: Callable[[Any], Any], first: str) -> None:
    """`make(old)` takes the place of the function `name`, whose first parameter is `first`."""
    old = getattr(module, name, None)
    if old is None:
        raise LookupError(f"there is no {name}")
    if getattr(old, MARK, False):
        return
    parameters = list(inspect.signature(old).parameters)
    if parameters[:1] != ([first] if first else []):
        raise LookupError(f"{name} takes ({', '.join(parameters)})")
    new = make(old)
    setattr(new, MARK, True)
    setattr(module, name, new)


# ------------------------------------------------------------------ the section


def _on_config_args(module: ModuleType) -> None:
    stock = getattr(module, "ClusterConfig", None)
    if getattr(stock, MARK, False):
        return
    for name in ("from_yaml_file", "from_json_file", "to_dict", "__post_init__"):
        if not hasattr(stock, name):
            raise LookupError(f"ClusterConfig has no {name}")
    setattr(module, "ClusterConfig", _extended(stock))  # noqa: B010


def _on_default(module: ModuleType) -> None:
    """It copied the name, if it was there first."""
    if hasattr(module, "ClusterConfig"):
        home: Any = sys.modules["accelerate.commands.config.config_args"]
        setattr(module, "ClusterConfig", home.ClusterConfig)  # noqa: B010


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
                    _check_config(self)
            except ValueError as error:
                raise SectionError(str(error)) from None

    ClusterConfig.__module__ = stock.__module__
    ClusterConfig.__qualname__ = stock.__qualname__
    setattr(ClusterConfig, MARK, True)
    return ClusterConfig


def _check_config(config: Any) -> None:
    """Raise ValueError for a configuration that holds what fault tolerance can't go with."""
    if problem():
        raise ValueError(problem())
    kind = getattr(config.distributed_type, "value", config.distributed_type)
    other = next(
        (
            name
            for name, attribute in (
                ("DEEPSPEED", "deepspeed_config"),
                ("MEGATRON_LM", "megatron_lm_config"),
                ("FSDP", "fsdp_config"),
                ("ParallelismConfig", "parallelism_config"),
                ("mpirun", "mpirun_config"),
            )
            if getattr(config, attribute, None)
        ),
        kind if kind in UNSUPPORTED else "",
    )
    if other:
        raise ValueError(
            f"{SECTION} cannot be combined with {other}, which spreads one model over processes or "
            "starts them itself: take one of the two out of the config file"
        )


# ------------------------------------------------------------------ the questions


def _on_cluster(module: ModuleType) -> None:
    _on_default(module)

    def make(stock: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(stock)
        def get_cluster_input() -> Any:
            from ft_accelerate.plugin.questions import ask_after

            return ask_after(stock())

        return get_cluster_input

    _replace(module, "get_cluster_input", make, first="")


# ------------------------------------------------------------------ the flags


def _on_launch(module: ModuleType) -> None:
    _on_prepare(module, missing_is_fine=True)  # it copied them, if it was there first
    module.options_to_group[SWITCH] = GROUP_TITLE

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def launch_command_parser(subparsers: Any = None) -> Any:
            parser = stock(subparsers=subparsers)
            add_flags(parser)
            return parser

        return launch_command_parser

    _replace(module, "launch_command_parser", make, first="subparsers")
    _replace(module, "launch_command", _with_a_sentence, first="args")


def _with_a_sentence(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A section that is wrong is no error of the program: no stack."""

    @functools.wraps(stock)
    def launch_command(args: Any) -> Any:
        try:
            return stock(args)
        except SectionError as error:
            raise SystemExit(f"ft_accelerate: {error}") from None

    return launch_command


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


def _on_prepare(module: ModuleType, *, missing_is_fine: bool = False) -> None:
    for name, make in (
        ("prepare_simple_launcher_cmd_env", _instead_of_simple),
        ("prepare_multi_gpu_env", _instead_of_torchrun),
        ("prepare_deepspeed_cmd_env", _not_with),
        ("prepare_tpu", _not_with),
    ):
        if not (missing_is_fine and not hasattr(module, name)):
            _replace(module, name, make, first="args")


def _instead_of_simple(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def prepare_simple_launcher_cmd_env(args: Any) -> Any:
        _refuse_first(args)
        command, env = stock(args)
        _launch_if_wanted(args, command, env)
        return command, env

    return prepare_simple_launcher_cmd_env


def _instead_of_torchrun(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def prepare_multi_gpu_env(args: Any) -> Any:
        _refuse_first(args)
        env = stock(args)
        if not hasattr(args, "training_script"):
            return env  # it is not `accelerate launch` that calls
        script = [args.training_script, *args.training_script_args]
        _launch_if_wanted(args, [sys.executable, *(["-m"] if args.module else []), *script], env)
        return env

    return prepare_multi_gpu_env


def _not_with(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def prepare(args: Any, *rest: Any) -> Any:
        _refuse_first(args)
        return stock(args, *rest)

    return prepare


def _refuse_first(args: Any) -> None:
    """End this process with a sentence if fault tolerance is wanted but not possible."""
    from ft_accelerate.launch.groups import refuse, wanted

    try:
        if wanted(args, os.environ):
            if problem():
                raise ValueError(problem())
            refuse(args)
    except ValueError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None


def _launch_if_wanted(args: Any, command: list[str], env: dict[str, str]) -> None:
    """Run the replica groups and end this process as they did, or return."""
    from ft_accelerate.launch.groups import launch, wanted

    try:
        if not wanted(args, env):
            return
        code = launch(args, command, env)
    except ValueError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None
    raise SystemExit(code)
