"""What docs say is so: tables are fresh, links lead somewhere, tests and rules that are named are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from lighthouse.config import Timeouts
from lighthouse.machine import pairs, rules
from lighthouse.wire.messages import Message
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MATRIX = (ROOT / "docs" / "failure_matrix.md").read_text("utf-8")
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text("utf-8")
PACKAGES = "lighthouse|ft_core|ft_lightning|ft_accelerate|tests|docs|examples|benchmarks"


def test_tables_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"run python docs/make_tables.py: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    files = re.findall(rf"`((?:{PACKAGES})/[\w/.]+)`", text)
    missing += [file for file in files if not (ROOT / file).exists()]
    assert not missing


def test_each_socket_that_listens_is_in_the_table_of_limits() -> None:
    text = (ROOT / "docs" / "lighthouse.md").read_text("utf-8")
    table = text.partition("### Sockets that listen")[2]
    listens = r"\b(create_server|create_device|bounded_http_server|Endpoint)\(|\.listen\("
    opens = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES.split("|")[:4]
        for path in (ROOT / package).rglob("*.py")
        if re.search(listens, path.read_text("utf-8"))
    }
    assert opens == set(re.findall(r"^\| [^|]+ \| `([\w/.]+)`", table, re.MULTILINE))


def _anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert not [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in _anchors(page.parent / file if file else page)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """`tests/file.py::test_name`, as the tables of features name them."""
    missing = [
        f"{file}::{name}"
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text("utf-8"))
        if not re.search(rf"^ *(async )?def {name}\(", (ROOT / file).read_text("utf-8"), re.M)
    ]
    assert not missing


@pytest.mark.parametrize("folder", ["lightning", "accelerate"])
def test_a_page_of_tests_names_tests_that_exist(folder: str) -> None:
    """Test files and test functions by their bare names; a section on Accelerate's own has others."""
    page = (ROOT / "docs" / f"{folder}_tests.md").read_text("utf-8")
    ours = page.partition("\n## Accelerate's own")[0]
    ours_at = ROOT / "tests" / f"ft_{folder}"
    files = {path.name: path.read_text("utf-8") for path in ours_at.rglob("*.py")}
    defined = set(re.findall(r"^def (test_\w+)\(", "\n".join(files.values()), re.M))
    named = {
        name
        for code in re.findall(r"`([^`]+)`", ours)
        for name in re.split(r"::|\[", code)
        if name.startswith("test_")
    }
    assert len(named) > 20
    assert named <= defined | set(files)


def test_what_has_run_on_a_gpu_has_its_result() -> None:
    """The last column of the table in docs/design.md: `no`, or a check's row in RESULTS_GPU.md."""
    section = (ROOT / "docs" / "design.md").read_text("utf-8")
    section = section.partition("\n## CUDA\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    said = [row[2].strip() for row in rows if len(row) == 3 and row[2].strip() != "on a GPU"]
    results = ROOT / "benchmarks" / "RESULTS_GPU.md"
    known = results.read_text("utf-8") if results.exists() else ""
    assert len(said) > 10
    assert not [check for check in said if check != "no" and f"| {check} |" not in known]


# ---------------------------------------------------------------- docs/failure_matrix.md


def _rows() -> list[list[str]]:
    lines = [line for line in MATRIX.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_fault_is_whole_and_names_a_test_that_exists() -> None:
    found = [row for row in _rows() if "::" in row[-1]]
    assert len(found) > 20
    for row in found:
        assert all(row), row
        path, _, name = row[-1].partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), row[-1]
    assert len(_rows()) == len(found) + len([row for row in _rows() if row[-1] == "test"])


def test_every_process_test_that_injects_a_fault_is_in_the_matrix() -> None:
    for path in sorted((ROOT / "tests" / "process").glob("test_*_fails.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE):
            assert f"tests/process/{path.name}::{name} |" in MATRIX, f"{path.name}::{name}"


# ---------------------------------------------------------------- docs/protocol.md, docs/timeouts.md


@pytest.mark.parametrize("kind", get_args(Message))
def test_the_protocol_says_when_the_message_is_sent(kind: type) -> None:
    assert re.search(rf"^\| {kind.__name__} \| [^|]+ \|$", PROTOCOL, re.MULTILINE)


@pytest.mark.parametrize(("letter", "module"), [("R", rules), ("D", pairs)])
def test_every_rule_is_documented(letter: str, module: ModuleType) -> None:
    stated = set(re.findall(rf"^({letter}\d+)  ", module.__doc__ or "", re.MULTILINE))
    assert stated
    assert set(re.findall(rf"^\| ({letter}\d+) \|", PROTOCOL, re.MULTILINE)) == stated


@pytest.mark.parametrize(
    "given",
    [
        {"heartbeat_s": 2.0, "heartbeat_timeout_s": 1.0},
        {"heartbeat_timeout_s": 3.0, "revoke_timeout_s": 2.0},
        {"heartbeat_timeout_s": 3.0, "step_timeout_s": 2.0},
        {"resend_s": 3.0, "step_timeout_s": 2.0},
    ],
)
def test_contradictory_timeouts_are_refused_with_both_names(given: dict[str, float]) -> None:
    small, large = given
    with pytest.raises(ValueError, match=f"{small}.*{large}"):
        Timeouts.derive(60.0, **given)


def test_errors_that_a_loop_may_see_are_names_of_ft_core() -> None:
    import ft_core

    page = (ROOT / "docs" / "own_loop.md").read_text("utf-8")
    table = page.partition("## What you see")[2].partition("## Rules")[0]
    errors = set(re.findall(r"`(?:[a-z_.]+\.)?([A-Z][a-zA-Z]+)`", table))
    assert len(errors) >= 7, errors
    assert errors <= set(ft_core.__all__), errors - set(ft_core.__all__)
    assert all(issubclass(getattr(ft_core, name), Exception) for name in errors)
