"""Parameters that a script changes itself within a step."""

from __future__ import annotations

import torch

from ft_core.heal.changed import ChangedInStep


def test_values_are_those_with_which_the_step_began_but_for_what_an_optimizer_has_updated() -> None:
    parameters = {name: torch.zeros(2) for name in ("slow", "scaled", "trained")}
    changed = ChangedInStep(lambda: parameters)
    for step in range(3):  # from the second one on, it is known which are kept
        began = {name: float(value[0]) for name, value in parameters.items()}
        changed.begin()
        parameters["slow"].data = parameters["slow"] + 1
        parameters["scaled"].add_(1)
        state = dict(parameters)
        before = changed.before(state)
        assert {name: float(value[0]) for name, value in before.items()} == began, step
        changed.note()
        assert {name: float(value[0]) for name, value in changed.before(state).items()} == began
        for name in ("scaled", "trained"):  # by an optimizer
            parameters[name].sub_(3)
        state = dict(parameters)
        now = {name: float(value[0]) for name, value in state.items()}
        given = {name: float(value[0]) for name, value in changed.before(state).items()}
        assert given == {**now, "slow": began["slow"]}
    changed.forget()
    assert changed.before(state) == state


def test_the_step_can_be_begun_again() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2)}
    changed = ChangedInStep(lambda: parameters)
    changed.begin()
    parameters["a"].add_(1)
    changed.note()
    changed.begin(all_small=True)
    for value in parameters.values():
        value.add_(5)
    changed.put_back()
    assert [float(value[0]) for value in parameters.values()] == [1.0, 0.0]
