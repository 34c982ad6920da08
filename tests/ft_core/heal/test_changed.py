"""Parameters that a script changes itself within a step."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ft_core.heal.changed import ChangedInStep


def with_zeros(*names: str) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names})


def first_values(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value[0]) for name, value in state.items()}


@torch.no_grad()
def test_values_are_those_with_which_the_step_began_but_for_what_an_optimizer_has_updated() -> None:
    model = with_zeros("slow", "scaled", "trained")
    changed = ChangedInStep()
    for step in range(3):  # from the second one on, it is known which are kept
        began = first_values(model.state_dict())
        changed.begin({"": model})
        model["slow"].data = model["slow"] + 1
        model["scaled"].add_(1)
        assert first_values(changed.before(model.state_dict())) == began, step
        changed.note()
        assert first_values(changed.before(model.state_dict())) == began
        for name in ("scaled", "trained"):  # by an optimizer
            model[name].sub_(3)
        now = first_values(model.state_dict())
        given = first_values(changed.before(model.state_dict()))
        assert given == {**now, "slow": began["slow"]}
    changed.forget()
    state = model.state_dict()
    assert changed.before(state) == state


@torch.no_grad()
def test_what_is_written_through_data_is_noticed_though_it_has_no_version() -> None:
    """By a script from its first step on, or from a later one; an optimizer's update is none of these."""
    model = with_zeros("clipped", "later")
    changed = ChangedInStep()
    for step in range(1, 10):
        began = first_values(model.state_dict())
        changed.begin({"": model})
        model["clipped"].data.add_(1)
        if step >= 4:
            model["later"].data.add_(1)
        changed.note()
        assert first_values(changed.before(model.state_dict())) == began, step
        for value in model.values():  # by an optimizer
            value.data.sub_(3)
        now = first_values(model.state_dict())
        assert first_values(changed.before(model.state_dict())) == now, step


@torch.no_grad()
def test_the_step_can_be_begun_again() -> None:
    model = with_zeros("a", "b")
    changed = ChangedInStep()
    changed.begin({"": model})
    model["a"].add_(1)
    changed.note()
    changed.begin({"": model}, all_small=True)
    for value in model.values():
        value.add_(5)
    changed.put_back()
    assert first_values(model.state_dict()) == {"a": 1.0, "b": 0.0}


@torch.no_grad()
def test_another_model_takes_the_place_of_one_that_is_dropped() -> None:
    models = {"0.": with_zeros("a")}
    changed = ChangedInStep()
    changed.begin(models)
    dropped = weakref.ref(models["0."])
    models["0."] = with_zeros("b")
    assert dropped() is None
    changed.begin(models)
    models["0."]["b"].add_(1)
    before = changed.before(models["0."].state_dict())
    assert first_values(before) == {"b": 0.0}


@torch.no_grad()
def test_values_are_found_under_whatever_names_and_not_by_these() -> None:
    """Of a parameter with two names; and of one in whose place a callback has put its average, and itself elsewhere."""
    model = with_zeros("a", "b")
    model["tied"] = model["a"]
    changed = ChangedInStep()
    changed.begin({"": model})
    for value in model.values():
        value.add_(1)
    changed.note()
    averages = {name: torch.full((2,), 7.0) for name in model}
    given = changed.before({"state_dict": averages, "current": [model.state_dict()]})
    assert first_values(given["state_dict"]) == {"a": 7.0, "b": 7.0, "tied": 7.0}
    assert first_values(given["current"][0]) == {"a": 0.0, "b": 0.0, "tied": 0.0}
