"""Events carry what the head of `ft_core.telemetry` says of their kinds: sinks read no other fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ft_core.telemetry
from ft_core.telemetry import COMMIT, DISCARD, DiscardsTold, Telemetry, event_log

PACKAGES = ("ft_core", "ft_lightning", "ft_accelerate")
ROOT = Path(ft_core.telemetry.__file__).parents[1]
KIND = re.compile(r'^([A-Z_]+) = \(?\s*"[a-z_]+"  # (.*)$', re.MULTILINE)


def documented() -> dict[str, set[str]]:
    """Fields of each kind, by its name."""
    text = Path(ft_core.telemetry.__file__).read_text()
    found = {}
    for name, comment in KIND.findall(text):
        fields = re.sub(r" \(.*?\)", "", comment).split(", ")
        found[name] = set() if comment.startswith("nothing") else set(fields)
    return found


def test_events_carry_the_fields_that_are_documented() -> None:
    kinds, seen = documented(), set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                is_emit = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if is_emit and node.func.attr == "emit" and isinstance(node.args[0], ast.Name):
                    kind = node.args[0].id
                    assert {k.arg for k in node.keywords} == kinds[kind], (file, node.lineno)
                    seen.add(kind)
    assert seen == set(kinds)


def test_a_step_that_is_discarded_again_and_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry()
    telemetry.add_sink(DiscardsTold("a"))
    for kind in [DISCARD] * 2 + [COMMIT] + [DISCARD] * 5:
        telemetry.emit(kind, step=7, reason="no disk")
    assert [r.getMessage() for r in caplog.records] == [
        "replica group a: step 7 was discarded 3 times in a row: no disk"
    ]


@pytest.mark.parametrize("place", ["", "missing/events"])
def test_an_event_log_that_cannot_be_written_is_one_sentence(tmp_path: Path, place: str) -> None:
    """A folder, as other tools want one; a file in a folder that is not there."""
    path = str(tmp_path / place)
    with pytest.raises(ValueError, match=f"^FT_EVENT_LOG={path} can't be written .*a file"):
        event_log(path, "0")
