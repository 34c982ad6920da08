"""docs/failure_matrix.md has no empty cell, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "failure_matrix.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_is_whole_and_names_a_test_that_exists() -> None:
    found = [row for row in rows() if "::" in row[-1]]
    assert len(found) > 20
    for row in found:
        assert all(row), row
        path, _, name = row[-1].partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), row[-1]


def test_every_row_but_the_heads_names_a_test() -> None:
    heads = [row for row in rows() if row[-1] == "test"]
    assert len(rows()) == len(heads) + len([row for row in rows() if "::" in row[-1]])


def test_every_process_test_that_injects_a_fault_is_in_the_matrix() -> None:
    for path in sorted((ROOT / "tests" / "process").glob("test_*_fails.py")):
        for name in re.findall(
            r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert f"tests/process/{path.name}::{name} |" in PAGE, f"{path.name}::{name}"
