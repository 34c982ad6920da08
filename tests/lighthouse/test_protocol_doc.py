"""docs/protocol.md says of every message when it is sent, and names every rule of rules.py and
pairs.py."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from lighthouse.machine import pairs, rules
from lighthouse.wire.messages import Message

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", get_args(Message))
def test_page_says_when_the_message_is_sent(kind: type) -> None:
    assert re.search(rf"^\| {kind.__name__} \| [^|]+ \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("letter", "module"), [("R", rules), ("D", pairs)])
def test_every_rule_is_documented(letter: str, module: ModuleType) -> None:
    stated = set(re.findall(rf"^({letter}\d+)  ", module.__doc__ or "", re.MULTILINE))
    assert stated
    assert set(re.findall(rf"^\| ({letter}\d+) \|", PAGE, re.MULTILINE)) == stated
