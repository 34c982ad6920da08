"""How long a process that is behind may hold up its peers, by times that are given."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ft_accelerate.runtime.models import COPIED_BYTES, FaultTolerantModel, freeze, thaw
from ft_accelerate.runtime.script_position import (
    BATCHES_A_S,
    COMPUTED_GRADS,
    GROWS,
    STAY_S,
    TELL_S,
    CatchUp,
    Phase,
    ScriptPosition,
    Target,
)
from ft_core.collectives.retry import RetryableReducer, RetryHooks

PEERS = Target(
    window=(3, 5), ops=(), grads=0, active=(), iterations=4, lengths={}, events=7, at="fetch"
)  # fmt: skip


def behind(batches: int) -> ScriptPosition:
    position = ScriptPosition()
    position.relocate(dataclasses.replace(PEERS, batches=batches))
    return position


def one_window(grads: int) -> ScriptPosition:
    """Of a script whose loader is not prepared."""
    position = ScriptPosition()
    position.relocate(dataclasses.replace(PEERS, window=None, grads=grads))
    return position


def test_one_that_is_soon_there_stays_and_one_that_is_slow_leaves() -> None:
    near = int(STAY_S * BATCHES_A_S * 0.9)
    position = behind(near)
    catch_up = CatchUp(position, measures=True)
    catch_up.joined(100.0)
    assert not catch_up.overstays(100.0)
    position.batches = near * 2 // 3
    assert not catch_up.overstays(100.0 + STAY_S / 2)
    assert catch_up.overstays(100.0 + STAY_S)  # at the speed that it has, it would be too long
    catch_up.left()
    assert not catch_up.overstays(200.0)  # it is not in the quorum


def test_one_that_is_far_leaves_at_once_and_may_stay_longer_the_next_time() -> None:
    position = behind(int(STAY_S * BATCHES_A_S * 1.1))
    catch_up = CatchUp(position, measures=False)
    catch_up.joined(0.0)
    assert catch_up.overstays(0.0)
    catch_up.left()
    catch_up.joined(10.0)
    assert not catch_up.overstays(10.0)
    assert not catch_up.overstays(1000.0)  # ranks of a group decide alike
    assert GROWS > 2
    catch_up.live()
    catch_up.joined(20.0)
    assert catch_up.overstays(20.0)


def test_a_long_catching_up_is_foretold_once() -> None:
    position = behind(10_000)
    catch_up = CatchUp(position, measures=True)
    catch_up.joined(0.0)
    catch_up.left()
    position.batches = 100
    assert catch_up.news(STAY_S / 2) == ""
    at = TELL_S
    assert "9,900 batches behind: at 50 a second it is back in 198 s" in catch_up.news(at)
    assert catch_up.news(at + 1) == ""


def test_a_past_that_is_one_window_is_answered_from_memory_but_for_its_end() -> None:
    position = one_window(100)
    catch_up = CatchUp(position, measures=True)
    catch_up.joined(0.0)
    assert "runs through 100 gradient steps of its past" in catch_up.news(0.0)
    while position.remembers:
        position.replay_grad()
    assert position.distance == COMPUTED_GRADS
    assert position.phase is Phase.REPLAY


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COPIED_BYTES))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        large = self.weight * x
        return {"loss": large.sum(), "large": large, "index": large.argmax()}


def test_remembered_outputs_have_a_graph_and_are_not_copied_if_they_are_large() -> None:
    position = one_window(50)
    hooks = RetryHooks(
        begin=lambda: False, vote=lambda: True, again=lambda: False, committed=lambda: None,
        refused=lambda: None, unused_hint="",
    )  # fmt: skip
    model = FaultTolerantModel(RetryableReducer(hooks), Twice(), position)
    x = torch.tensor(2.0)
    first, second = model(x), model(x)
    assert first["large"].data_ptr() == second["large"].data_ptr()
    assert first["loss"].data_ptr() != second["loss"].data_ptr()
    assert first["loss"].item() == 2.0 * COPIED_BYTES
    second["loss"] /= 2  # as scripts do that accumulate
    second["large"].mul_(0.5)
    (second["loss"] + second["large"].sum()).backward()
    assert position.grads == 1
    assert model.module.weight.grad is None
    assert first["loss"].item() == 2.0 * COPIED_BYTES
    with torch.no_grad():
        assert not model(x)["loss"].requires_grad


class Patience:
    def __init__(self) -> None:
        self.worse = 1

    def __call__(self) -> bool:
        self.worse += 1
        return self.worse >= 2


def test_a_frozen_object_keeps_its_attributes_and_its_type_until_it_is_thawed() -> None:
    class Slots:
        __slots__ = ("value",)

    patience, slots = Patience(), Slots()
    for _ in range(2):
        freeze([patience, slots])
    assert not patience()
    assert isinstance(patience, Patience)
    assert type(patience).__name__ == "Patience"
    slots.value = 3
    for _ in range(2):
        thaw([patience, slots])
    assert type(patience) is Patience
    assert patience()
    assert slots.value == 3
