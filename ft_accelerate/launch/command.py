"""`ft-accelerate`: Accelerate's own commands, with fault tolerance whether installed or not.

ft-accelerate config     asks Accelerate's questions and ours, or adds ours to a config file
ft-accelerate launch     `accelerate launch`, fault-tolerant unless the config says no
ft-accelerate env        what a bug report needs
ft-accelerate test       trains in replica groups, kills one, compares the weights
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from ft_accelerate.launch import launch_hooks
from ft_accelerate.plugin.options import ENV_PREFIX, ENV_USE, env_name, may_autoload

USAGE = f"""usage: ft-accelerate <command> [<args>]
{(__doc__ or "").split(chr(10), 2)[2]}
`ft-accelerate <command> --help` tells more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "config": _config,
        "launch": _launch,
        "env": _env,
        "test": _test,
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


def _config(argv: list[str]) -> int:
    from ft_accelerate.launch.cli_config import main as config

    return config(argv)


def _launch(argv: list[str]) -> int:
    """`accelerate launch`, switched on. Ends in SystemExit where replica groups are started."""
    from accelerate.commands import launch as stock

    from ft_accelerate.launch.groups import switch

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


def _test(argv: list[str]) -> int:
    from ft_accelerate.launch.cli_test import main as test

    return test(argv)


def facts() -> dict[str, str]:
    """What there is to say, by name."""
    found = {
        "`ft_accelerate` version": _version("pytorch-ft"),
        "`transformers` version": _version("transformers"),
        "`trl` version": _version("trl"),
        "Accelerate's seams": launch_hooks.problem() or "as expected",
        "acts by being installed": _autoload(),
    }
    for name in sorted(os.environ):
        if name == ENV_USE or name.startswith(ENV_PREFIX):
            found[name] = "(set)" if name == env_name("token") else os.environ[name]
    return found


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
    if not may_autoload() or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "no: switched off by the environment"
    return "yes"


if __name__ == "__main__":
    sys.exit(main())
