"""The wheel, installed into an environment that has never seen this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGES
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.process
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ft_lightning_autoload.py")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCHFT", "FT_"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def checked(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is under version control, so that no build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in SOURCES:
        shutil.copy(ROOT / name, source / name)
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet")
    checked(*build, "--wheel-dir", folder, source, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment's folder of commands. Only the dependencies are this environment's.

    A path in a .pth file is searched, but its own .pth files (an editable install of this checkout)
    are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    install = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install")
    checked(*install, "--no-deps", "--no-index", "--quiet", wheel, cwd=folder)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_it_holds_all_that_the_packages_need(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours <= set(names), sorted(ours - set(names))
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


def test_the_packages_are_those_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = f"import {', '.join(PACKAGES)}; print(ft_core.__file__, ft_core.Manager.__module__)"
    said = checked(environment / "python", "-c", code, cwd=tmp_path)
    assert str(environment.parent) in said and "ft_core.manager" in said


def test_lightning_knows_the_strategies(environment: Path, tmp_path: Path) -> None:
    code = (
        "from lightning.pytorch.strategies import StrategyRegistry as known; "
        "print([name for name in known.available_strategies() if name.startswith('ft_')])"
    )
    said = checked(environment / "python", "-c", code, cwd=tmp_path)
    assert "'ft_ddp'" in said and "'ft_diloco'" in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("lighthouse --help", "--bind"),
        ("lighthouse --version", r"\d+\.\d+"),
        ("python -m lighthouse --help", "--bind"),
        ("torchft_lighthouse --help", "--min_replicas"),
        ("ft-accelerate --help", "config"),
        ("ft-accelerate env", "seams: as expected"),
        ("python -m ft_lightning --help", "usage"),
        ("python -m ft_accelerate.run --help", "usage: python -m ft_accelerate.run"),
    ],
)
def test_commands(environment: Path, tmp_path: Path, command: str, says: str) -> None:
    program, *arguments = command.split()
    said = checked(environment / program, *arguments, cwd=tmp_path)
    assert re.search(says, said), said


def test_a_lighthouse_of_the_wheel_answers(environment: Path, tmp_path: Path) -> None:
    server = subprocess.Popen(
        [environment / "lighthouse", "--bind", "tcp://127.0.0.1:0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"tcp://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the lighthouse ended without naming its address")
        asked = ("status", "--address", found[0])
        checked(environment / "lighthouse", *asked, cwd=tmp_path)
    finally:
        server.kill()
        server.communicate()
