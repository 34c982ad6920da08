"""docs/protocol.md says of every message when it is sent, and names every rule of rules.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lighthouse.machine import rules as quorum
from lighthouse.wire.messages import Message

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", get_args(Message))
def test_page_says_when_the_message_is_sent(kind: type) -> None:
    assert re.search(rf"^\| {kind.__name__} \| [^|]+ \|$", PAGE, re.MULTILINE)


def test_every_rule_is_documented() -> None:
    rules = set(re.findall(r"^(R\d+)  ", quorum.__doc__ or "", re.MULTILINE))
    assert rules
    assert set(re.findall(r"^\| (R\d+) \|", PAGE, re.MULTILINE)) == rules
