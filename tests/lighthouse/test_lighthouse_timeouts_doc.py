"""docs/timeouts.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lighthouse.config import Timeouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "timeouts.md"


def table() -> tuple[list[float], dict[str, list[str]]]:
    """(the values of the knob, name -> cells) of the page's derivation table."""
    text = PAGE.read_text(encoding="utf-8")
    head = re.search(r"<!-- derived: timeout ([\d. ]+) -->\n(.*?)\n\n", text, re.DOTALL)
    assert head is not None, "the derivation table is gone"
    rows = [line.strip("| ").split(" | ") for line in head[2].splitlines()[2:]]
    return [float(value) for value in head[1].split()], {row[0]: row[2:] for row in rows}


def test_the_derivation_table_has_the_values_of_the_code() -> None:
    knobs, rows = table()
    derived = {f.name for f in fields(Timeouts)} - {"timeout_s"}
    assert set(rows) == derived
    for column, knob in enumerate(knobs):
        timeouts = Timeouts.derive(knob)
        shown = {name: cells[column] for name, cells in rows.items()}
        assert shown == {name: f"{getattr(timeouts, name):.4g}" for name in derived}


@pytest.mark.parametrize(
    "given",
    [
        {"heartbeat_s": 2.0, "heartbeat_timeout_s": 1.0},
        {"heartbeat_timeout_s": 3.0, "revoke_timeout_s": 2.0},
        {"heartbeat_timeout_s": 3.0, "step_timeout_s": 2.0},
        {"resend_s": 3.0, "step_timeout_s": 2.0},
    ],
)
def test_each_refusal_of_the_page_happens(given: dict[str, float]) -> None:
    small, large = given
    assert f"| {small} < {large} |" in PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=f"{small}.*{large}"):
        Timeouts.derive(60.0, **given)
