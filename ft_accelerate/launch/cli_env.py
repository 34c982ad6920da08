"""`ft-accelerate env`: `accelerate env`, and what it does not know about fault tolerance."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from ft_accelerate.launch.launch_hooks import problem
from ft_accelerate.plugin.options import ENV_PREFIX, ENV_USE, env_name, may_autoload

_SECRET = env_name("token")


def main(argv: list[str]) -> int:
    """Print it; returns the exit code."""
    from accelerate.commands.config import default_config_file
    from accelerate.commands.env import env_command

    parser = argparse.ArgumentParser("ft-accelerate env", description=__doc__)
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
    found = {
        "`ft_accelerate` version": _version("pytorch-ft"),
        "`transformers` version": _version("transformers"),
        "`trl` version": _version("trl"),
        "Accelerate's seams": problem() or "as expected",
        "acts by being installed": _autoload(),
    }
    for name in sorted(os.environ):
        if name == ENV_USE or name.startswith(ENV_PREFIX):
            found[name] = "(set)" if name == _SECRET else os.environ[name]
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
