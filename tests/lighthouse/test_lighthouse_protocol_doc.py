"""docs/protocol.md names every message with all its fields, and every rule of quorum.py."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from lighthouse import quorum
from lighthouse.messages import Message

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", get_args(Message))
def test_message_is_documented_with_all_its_fields(kind: type) -> None:
    row = re.search(rf"^\| {kind.__name__} \| [^|]+ \|([^|]*)\|$", PAGE, re.MULTILINE)
    assert row is not None, f"no row for {kind.__name__}"
    shown = [name for name in row[1].strip().split(", ") if name]
    assert shown == [field.name for field in fields(kind)]


def test_every_rule_is_documented() -> None:
    rules = set(re.findall(r"^(R\d+)  ", quorum.__doc__ or "", re.MULTILINE))
    assert rules
    assert set(re.findall(r"^\| (R\d+) \|", PAGE, re.MULTILINE)) == rules
