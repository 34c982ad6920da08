"""Functions of up to 70 lines, files of up to 700. What is over is listed, and may only shrink."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.architecture.source import REPO, modules

FUNCTION_LINES = 70
FILE_LINES = 700
LIST = Path(__file__).with_name("sizes.toml")


def _check(kind: str, limit: int, actual: dict[str, int]) -> list[str]:
    listed: dict[str, int] = tomllib.loads(LIST.read_text()).get(kind, {})
    wrong = []
    for name, lines in sorted(actual.items()):
        if lines > listed.get(name, limit):
            wrong.append(f"{name} has {lines} lines; the limit is {listed.get(name, limit)}")
    for name in listed:
        if actual.get(name, 0) <= limit:
            wrong.append(f"{name} keeps the limit by now: take it off {LIST.name}")
    return wrong


def test_functions() -> None:
    actual = {name: lines for module in modules() for name, lines in module.functions()}
    assert not _check("functions", FUNCTION_LINES, actual)


def test_files() -> None:
    actual = {
        module.path.relative_to(REPO).as_posix(): len(module.text.splitlines())
        for module in modules()
    }
    assert not _check("files", FILE_LINES, actual)
