"""Run a script, or a module, with "ft_ddp" known to Lightning, without any import hook.

    python -m ft_lightning train.py --lr 0.1
    python -m ft_lightning -m package.train --lr 0.1

Does what `python` would do with the same arguments after `import ft_lightning`. Processes that the
script's Trainer starts run in this way, too.
"""

from __future__ import annotations

import os
import runpy
import sys

from ft_lightning.shared import launcher, registration

USAGE = "usage: python -m ft_lightning (script.py | -m module) [arguments]"


def main() -> None:
    """Run what the command line names. Raises SystemExit(2) if it names nothing to run."""
    words = sys.argv[1:]
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    if not words or words[0].startswith("-"):
        asked = words[:1] in (["-h"], ["--help"])
        print(f"{__doc__}\n{USAGE}" if asked else USAGE, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    launcher.through_main = True
    sys.argv = ["-m", *words[1:]] if is_module else words
    registration.note_start()
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(words[0]):
        print(f"python -m ft_lightning: there is no file {words[0]!r}", file=sys.stderr)
        raise SystemExit(2)
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
