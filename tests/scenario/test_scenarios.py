"""Every text scenario, with everything the machine says in it. See `language.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenario.language import play
from tests.sim.mutants import load

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert play(text) == text


def test_a_wrong_answer_is_noticed() -> None:
    text = FILES[0].read_text(encoding="utf-8")
    assert play(text.replace("    ", "    not ", 1)) == play(text)
    assert play(text.replace("    ", "    not ", 1)) != text.replace("    ", "    not ", 1)


def test_every_mutant_is_a_change_of_one_rule() -> None:
    """Change or delete, together with a rule of a machine, what `tests/sim/mutants.toml` takes out of it."""
    mutants = load()
    assert len(mutants) > 400
    wrong = []
    for mutant in mutants:
        try:
            compile(mutant.source(), mutant.name, "exec")
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
