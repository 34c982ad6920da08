"""Who may go on at another lighthouse (`lighthouse/machine/fence.py`): the product's rules inside a model of which all
states are visited, and each rule taken out of them once."""

from __future__ import annotations

import inspect

import pytest

from lighthouse.machine import fence
from tests.lighthouse.machine.fencing_model import MUTANTS, SCENARIOS, Model, explore

WHOLE = {
    "three members, two lighthouses": 9_379,
    "three members, lists announced in vain": 11_858,
    "three members, one dies": 26_371,
    "two members, started cold": 41_603,
}
"""Scenarios of which all states are visited, and how many they are."""

THERE = "    if present >= members - _harmless(members, ballot, dead):\n        return True\n"
NONE = "    if not present:\n        return False\n"
TAKEN_OUT = {
    "t": (
        "    if more:\n        return 2 *",
        "    if more:\n        return True\n        return 2 *",
    ),
    "more_than_half": ("2 * len(present) > len(members)", "2 * len(present) >= len(members)"),
    "basekept": ("else _bases(reports, record, top)", "else (record.members,)"),
    "doubt": ('"commit" if committed else "discard"', '"discard"'),
    "record": ("    present =", "    members -= set(dead)\n    present ="),
    "alldead": (NONE + THERE, THERE + NONE),
    "word": (
        "return 2 * len(present) >",
        "present |= {m for m in members if dead.get(m) == ballot}\n        return 2 * len(present) >",
    ),
    "each": ("tuple(frozenset((name,)) for name in sorted(reports))", "(frozenset(reports),)"),
    "roll": (
        "return Takeover(each, _newest(reports)) if complete else None",
        "return Takeover((frozenset(reports),), _newest(reports)) if len(reports) > 1 else None",
    ),
}
"""Rules of the module, each as the text that holds it and what stands there without it."""


@pytest.mark.parametrize("name", WHOLE)
def test_no_state_of_the_model_breaks_a_promise(name: str) -> None:
    result = explore(Model(**SCENARIOS[name]))
    assert not result["found"]
    assert result["full"]
    assert result["states"] == WHOLE[name]


@pytest.mark.parametrize("rule", TAKEN_OUT)
def test_without_a_rule_a_promise_is_broken(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is taken out of the module."""
    old, new = TAKEN_OUT[rule]
    source = inspect.getsource(fence)
    assert source.count(old) == 1
    without: dict[str, object] = dict(vars(fence))
    # As the module is made.
    exec(compile(source.replace(old, new), fence.__file__, "exec"), without)
    for each in ("enough", "takeover", "Promise", "Record"):
        monkeypatch.setattr(fence, each, without[each])
    result = explore(Model(**MUTANTS[rule][1]))
    assert result["found"], MUTANTS[rule][0]
