"""A loop that catches what forward or backward raises, and goes on: FSDP reduces what it would have, in the order
of the other groups, and nothing of the pass that has raised."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ft_core.collectives.sharded import Shards

WIDTHS = [8, 6, 5, 3]
DATA = torch.randn(8, 4, WIDTHS[0], generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Three layers of unlike sizes; the root holds the last one. `raises_in`: "forward" or "backward" of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.raises_in = ""
        self.layers[1].register_forward_pre_hook(lambda *_: self.may_raise("forward"))
        self.layers[1].register_full_backward_hook(lambda *_: self.may_raise("backward"))

    def may_raise(self, place: str) -> None:
        if place == self.raises_in:
            self.raises_in = ""
            raise RuntimeError("out of memory")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Sharded:
    """`reduced`: the sizes of what FSDP has reduced, in its order."""

    def __init__(self) -> None:
        self.model, self.reduced = Model(), list[int]()
        for layer in self.model.layers[:-1]:
            fully_shard(layer)
        fully_shard(self.model)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda gradient: self.reduced.append(gradient.numel()))
        self.shards = Shards(self.model)

    def run(self, *batches: int) -> None:
        """A window of these batches."""
        for number in batches:
            self.model.set_requires_gradient_sync(number == batches[-1])  # type: ignore[operator]
            self.model(DATA[number]).backward()

    def gradients(self) -> list[Tensor]:
        found = []
        for shard in self.shards():
            assert isinstance(shard.grad, DTensor)
            found.append(shard.grad.to_local().clone())
        return found

    def forget(self) -> None:
        self.model.zero_grad()
        for shard in self.shards():
            shard.grad = None
        self.reduced.clear()


@pytest.fixture(scope="module")
def made() -> tuple[Sharded, Sharded]:
    """Two that are equal. For the module: torch keeps the group of a mesh, and its socket."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, other = Sharded(), Sharded()
    for each in (plain, other):
        each.run(0)
    dist.destroy_process_group()
    return plain, other


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("window", [(0,), (0, 1)])
def test_what_a_pass_that_has_raised_leaves_is_dropped(
    made: tuple[Sharded, Sharded], place: str, window: tuple[int, ...]
) -> None:
    plain, other = made
    other.model.set_requires_gradient_sync(len(window) == 1)  # type: ignore[operator]
    for number in window[:-1]:
        other.model(DATA[number]).backward()
    other.model.raises_in = place
    with pytest.raises(RuntimeError, match="out of memory"):
        other.model(DATA[window[-1]]).backward()
    for each in made:
        each.forget()
        each.run(*window)
    assert len(plain.reduced) == len(WIDTHS) - 1
    assert other.reduced == plain.reduced
    for mine, expected in zip(other.gradients(), plain.gradients(), strict=True):
        assert torch.equal(mine, expected)


def test_gradients_that_are_reduced_stay(made: tuple[Sharded, Sharded]) -> None:
    plain, other = made
    for each in made:
        each.forget()
        each.run(0)
    other.model.raises_in = "forward"
    with pytest.raises(RuntimeError, match="out of memory"):
        other.model(DATA[1])
    for each in made:
        each.run(1)
    for mine, expected in zip(other.gradients(), plain.gradients(), strict=True):
        assert torch.equal(mine, expected)


def test_a_root_that_runs_forward_twice_keeps_both(made: tuple[Sharded, Sharded]) -> None:
    plain, other = made
    for each in made:
        each.forget()
    plain.run(0, 1)
    other.model.set_requires_gradient_sync(True)  # type: ignore[operator]
    (other.model(DATA[0]) + other.model(DATA[1])).backward()
    for mine, expected in zip(other.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(mine, expected)
