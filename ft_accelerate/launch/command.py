"""`ft-accelerate`: Accelerate's own commands, with fault tolerance whether installed or not.

ft-accelerate config     asks Accelerate's questions and ours, or adds ours to a config file
ft-accelerate launch     `accelerate launch`, fault-tolerant unless the config says no
ft-accelerate env        what a bug report needs
ft-accelerate test       trains in replica groups, kills one, compares the weights
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ft_accelerate.launch import launch_hooks

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
    from ft_accelerate.launch.cli_env import main as env

    return env(argv)


def _test(argv: list[str]) -> int:
    from ft_accelerate.launch.cli_test import main as test

    return test(argv)


if __name__ == "__main__":
    sys.exit(main())
