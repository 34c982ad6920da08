"""`ft-accelerate`: Accelerate's own commands, with fault tolerance whether installed or not."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from ft_accelerate.launch import launch_hooks
from ft_accelerate.launch.cli_test import main as test
from ft_accelerate.launch.groups import layout, switch
from ft_accelerate.launch.launch_hooks import ask_after
from ft_accelerate.options import (
    SECTION,
    SWITCH,
    argument_name,
    field_names,
    may_autoload,
    ours_in_environment,
    read_section,
)

USAGE = """usage: ft-accelerate <command> [<args>]
ft-accelerate config     asks Accelerate's questions and ours, or adds ours to a config file
ft-accelerate launch     `accelerate launch`, fault-tolerant unless the config says no
ft-accelerate env        what a bug report needs
ft-accelerate test       trains in replica groups, kills one, compares the weights

`ft-accelerate <command> --help` tells more."""
HARDWARE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("num_processes", {"type": int, "help": "The total number of processes, over all machines."}),
    ("num_machines", {"type": int, "help": "The total number of machines."}),
    ("machine_rank", {"type": int, "help": "The rank of this machine."}),
    ("main_process_ip", {"help": "The address of the machine of rank 0."}),
    ("main_process_port", {"type": int, "help": "The port to use on the machine of rank 0."}),
    (
        "mixed_precision",
        {"choices": ["no", "fp16", "bf16", "fp8"], "help": "Whether to use mixed precision."},
    ),
    ("cpu", {"action": "store_true", "help": "Train on the CPU."}),
)
"""Accelerate's own answers that `config` takes as flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "config": _config,
        "launch": _launch,
        "env": _env,
        "test": test,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 1
    if argv[0] not in commands:
        print(f"ft-accelerate: there is no command {argv[0]!r}\n{USAGE}", file=sys.stderr)
        return 2
    launch_hooks.watch()
    try:
        return commands[argv[0]](argv[1:])
    except ValueError as error:
        print(f"ft-accelerate: {error}", file=sys.stderr)
        return 2


# ---------------------------------------------------------------------- launch, env


def _launch(argv: list[str]) -> int:
    """`accelerate launch`, switched on. Ends in SystemExit where replica groups are started."""
    from accelerate.commands import launch as stock

    parser = stock.launch_command_parser()
    parser.prog = "ft-accelerate launch"
    args = parser.parse_args(argv)
    switch(args)
    stock.launch_command(args)
    return 0


def _env(argv: list[str]) -> int:
    """`accelerate env`, and what it does not know about fault tolerance."""
    from accelerate.commands.config import default_config_file
    from accelerate.commands.env import env_command

    parser = argparse.ArgumentParser("ft-accelerate env", description=_env.__doc__)
    parser.add_argument("--config_file", default=None, help="The config file to show.")
    args = parser.parse_args(argv)
    env_command(args)
    import accelerate.commands.launch  # noqa: F401  so that moved seams are noticed

    print("- Fault tolerance:")
    for name, value in facts().items():
        print(f"\t- {name}: {value}")
    if args.config_file is None and not Path(default_config_file).is_file():
        print("\t- no config file: `ft-accelerate config` writes one")
    return 0


def facts() -> dict[str, str]:
    """What there is to say, by name."""
    return {
        "`ft_accelerate` version": _version("pytorch-ft"),
        "`transformers` version": _version("transformers"),
        "`trl` version": _version("trl"),
        "Accelerate's seams": launch_hooks.problem() or "as expected",
        "acts by being installed": _autoload(),
        **ours_in_environment(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _autoload() -> str:
    installed = any(
        e.value == "ft_accelerate.autoload:autoload" for e in entry_points(group="torch.backends")
    )
    if not installed:
        return "no: its entry point is not installed (`ft-accelerate launch` works all the same)"
    return "yes" if may_autoload() else "no: switched off by the environment"


# ---------------------------------------------------------------------- config


def _config(argv: list[str]) -> int:
    """Write the config file; returns the exit code. Raises ValueError for a wrong answer."""
    from accelerate.commands.config import config as stock
    from accelerate.commands.config import config_args

    if argv[:1] == ["default"]:
        argv = [*_write_default(argv[1:]), f"--{SWITCH}"]
    args = _config_parser().parse_args(argv)
    path = args.config_file or config_args.default_config_file
    there = os.path.isfile(path)
    if launch_hooks.problem():
        raise ValueError(launch_hooks.problem())
    names = [*dict(HARDWARE), SWITCH, *map(argument_name, field_names())]
    answers = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if there:
        config = config_args.load_config_from_file(path)
        if not hasattr(config, SECTION):
            raise ValueError(f"{path} is for Amazon SageMaker, where there is no fault tolerance")
    if answers:
        config = _answered(config if there else _new(config_args, answers), answers)
    elif there:
        print(f"Adding to the configuration at {path}.")
        config = ask_after(config)
    else:
        config = stock.get_user_input()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if path.endswith(".json"):
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    print(f"accelerate configuration saved at {path}")
    return 0


def _write_default(argv: list[str]) -> list[str]:
    """`accelerate config default`; returns the flag that names the file."""
    from accelerate.commands.config.default import (
        default_json_config_file,
        write_basic_config,
    )

    parser = argparse.ArgumentParser(
        "ft-accelerate config default",
        description="Asks nothing: writes what Accelerate takes for this machine, with the section.",
    )
    parser.add_argument("--config_file", default=default_json_config_file, dest="save_location")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    args = parser.parse_args(argv)
    write_basic_config(args.mixed_precision, args.save_location)
    return ["--config_file", args.save_location]


def _config_parser() -> argparse.ArgumentParser:
    from accelerate.commands.utils import CustomArgumentParser

    parser: argparse.ArgumentParser = CustomArgumentParser(
        "ft-accelerate config",
        description="Without a flag it asks on the terminal. With one (other than `--config_file`) it "
        "asks nothing: what is not given keeps its default. A config file that exists keeps "
        "all that it says, and gets the section; else a new one is written.",
    )
    parser.add_argument(
        "--config_file", default=None, help="Where the file is; default: Accelerate's own place."
    )
    hardware = parser.add_argument_group("Hardware Selection Arguments")
    for name, how in HARDWARE:
        hardware.add_argument(f"--{name}", default=None, **how)
    launch_hooks.add_flags(parser)
    return parser


def _new(config_args: Any, answers: dict[str, Any]) -> Any:
    """A configuration from Accelerate's defaults."""
    processes = answers.get("num_processes", 1)
    on_cpu = bool(answers.get("cpu"))
    kind = "NO" if processes == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    return config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type=kind,
        mixed_precision="no",
        use_cpu=on_cpu,
        debug=False,
        num_processes=processes,
    )


def _answered(config: Any, answers: dict[str, Any]) -> Any:
    """`config` with the answers in it. Raises ValueError for what does not fit together."""
    section = dict(getattr(config, SECTION) or {})
    section.setdefault(SWITCH, True)
    for name, answer in answers.items():
        if name in dict(HARDWARE):
            setattr(config, "use_cpu" if name == "cpu" else name, answer)
        else:
            section[name] = answer
    setattr(config, SECTION, read_section(section))
    layout(
        num_processes=max(1, config.num_processes),
        num_machines=config.num_machines,
        machine_rank=config.machine_rank,
        group_size=section.get(argument_name("group_size"), 0),
        num_replica_groups=section.get(argument_name("num_replica_groups")),
        replica_group_id=section.get(argument_name("replica_group_id")),
    )
    return config


if __name__ == "__main__":
    sys.exit(main())
