"""Run a training script fault-tolerantly: `python -m ft_accelerate.run [-m] train.py ...`.

One process of one replica group. The same as running the script itself in an environment that
says ACCELERATE_USE_FAULT_TOLERANCE=true, without leaning on anything that happens by the package
being installed. The launchers start their processes this way.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Sequence

from ft_accelerate.options import switch_on
from ft_core.launch.board import reported

USAGE = "usage: python -m ft_accelerate.run [-m] SCRIPT_OR_MODULE [ARGUMENTS ...]"


def main(argv: Sequence[str]) -> None:
    """Install, then become the script. Raises SystemExit for a wrong call."""
    as_module = bool(argv) and argv[0] == "-m"
    rest = list(argv[1:] if as_module else argv)
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if rest[:1] == ["-c"]:
        raise SystemExit("ft_accelerate.run: code for -c must be written to a script first")
    if not rest or rest[0].startswith("-"):
        raise SystemExit(USAGE)
    if not as_module and not os.path.exists(rest[0]):
        raise SystemExit(f"ft_accelerate.run: there is no script {rest[0]!r}")
    switch_on()
    with reported():
        _become(rest, as_module=as_module)


def _become(rest: Sequence[str], *, as_module: bool) -> None:
    gc.disable()  # what imports make stays: to look through it again and again is a sixth of their time
    # First, and alone: the package's entry point acts at the end of this import, if it is there.
    import accelerate  # noqa: F401

    from ft_accelerate.install import install

    try:
        install()
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"ft_accelerate: {error}") from None
    gc.freeze()
    gc.enable()
    sys.argv[:] = rest
    if as_module:
        # `python -m` has put the working folder first, where this module is to be found, too.
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
