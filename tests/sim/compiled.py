"""Compile the machines and the simulator with mypyc, for long searches: `python -m tests.sim.compiled FOLDER`.

The folder gets a copy, and `python -m tests.sim` in it runs twice as many seeds a second. The copy differs in
two lines: mypyc compiles no class that is derived from a builtin exception, and keeps no annotations of
methods, from which the replica's machine knows which event each of them takes. The run ends with a comparison:
the first seeds have the same steps, votes and faults in both.

Needs what mypy brings, setuptools and a C compiler. Takes two minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ft_core.replica import events
from ft_core.replica.machine import Replica

ROOT = Path(__file__).parents[2]
COPIED = ("lighthouse", "ft_core", "tests")
COMPILED = ("lighthouse/machine", "lighthouse/wire/messages.py", "ft_core/replica", "tests/sim")
INTERPRETED = ("__init__", "__main__", "compiled", "mutants", "profile")
COMPARED = "0:300"

SETUP = """
from mypyc.build import mypycify
from setuptools import setup

options = ["--ignore-missing-imports", "--follow-imports=silent", "--disable-error-code=misc"]
setup(name="compiled", packages=[], ext_modules=mypycify(options + {files!r}, opt_level="2", debug_level="0"))
"""


def copy(folder: Path) -> None:
    for package in COPIED:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (folder / "ft_core" / "__init__.py").write_text("")  # it imports torch, which mypy would read
    handlers = ", ".join(
        f"{event.__module__.rpartition('.')[2]}.{event.__name__}: {method!r}"
        for event, method in events.handlers(Replica).items()
    )
    _replace(folder / "ft_core/replica/machine.py", "events.handlers(Replica)", f"{{{handlers}}}")
    interpreted = "@mypy_extensions.mypyc_attr(native_class=False)\nclass Violation("
    checker = folder / "tests/sim/checker.py"
    _replace(checker, "\nclass Violation(", f"\n{interpreted}")
    _replace(checker, "import hashlib\n", "import hashlib\nimport mypy_extensions\n")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    file.write_text(text.replace(old, new))


def build(folder: Path) -> None:
    found = (
        path for name in COMPILED for path in sorted([*(folder / name).glob("*.py"), folder / name])
    )
    files = [
        str(path.relative_to(folder))
        for path in found
        if path.is_file() and path.stem not in INTERPRETED and not path.stem.startswith("test_")
    ]
    (folder / "setup.py").write_text(SETUP.format(files=files))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, check=True
    )


def outcome(folder: Path) -> str:
    """What the simulator says of the seeds that are compared, but for how long it took."""
    command = [sys.executable, "-m", "tests.sim", "--keep-going", "--seeds", COMPARED]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    said = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    ).stdout
    print(f"{folder}: {said}", end="")
    return (
        " ".join(part for part in said.split(",") if "a second" not in part)
        + said.rpartition(";")[2]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="is made; must not exist")
    folder = parser.parse_args().folder.absolute()
    copy(folder)
    build(folder)
    if outcome(ROOT) != outcome(folder):
        print("the compiled simulator does something else", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
