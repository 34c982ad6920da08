"""`digest` and `checksum`: what they must see, and what they must not."""

from __future__ import annotations

import collections
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ft_core.heal import digest
from ft_core.heal.digests import checksum
from tests.ft_core.heal.test_tree import trees


def test_form() -> None:
    value = digest({"w": torch.ones(3)})
    assert len(value) == 16
    int(value, 16)


def test_it_does_not_change_between_versions() -> None:
    """A restarted member may run a newer release: both must find equal states equal."""
    tree = {"w": torch.arange(300_000, dtype=torch.int64), "lr": 0.1, "k": [True, None, "x"]}
    assert digest(tree) == "779954525aa7af6b"


@given(trees)
@settings(max_examples=60, deadline=None)
def test_equal_trees_have_equal_digests(tree: Any) -> None:
    assert digest(tree) == digest(tree, threads=1)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])}),
        ({"w": torch.tensor([0.0, 1.0, 0, -1])}, {"w": torch.tensor([0.0, -1.0, 0, 1])}),
        ({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([2.0, 1.0])}),
        ({"w": torch.zeros(4)}, {"w": torch.zeros(2, 2)}),
        ({"w": torch.zeros(4)}, {"w": torch.zeros(4, dtype=torch.int32)}),
        ({"w": torch.zeros(4)}, {"v": torch.zeros(4)}),
        ({"w": torch.zeros(0)}, {"w": torch.zeros(0, 2)}),
        ({"w": torch.ones(1)}, {"w": [torch.ones(1)]}),
        ({"x": 1}, {"x": 1.0}),
        ({"x": 1}, {"x": True}),
        ({"x": 0.0}, {"x": -0.0}),
        ({"x": [1, 2]}, {"x": [2, 1]}),
        ({"x": (1,)}, {"x": [1]}),
        ({"x": b"a"}, {"x": "a"}),
        ({"x": np.arange(3)}, {"x": torch.arange(3)}),
    ],
)
def test_different_states_differ(a: Any, b: Any) -> None:
    assert digest(a) != digest(b)


def test_what_does_not_count() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    one = {"a": base, "b": base, "c": base.t()}
    two = {"c": base.t().contiguous(), "b": base.clone(), "a": torch.nn.Parameter(base.clone())}
    assert digest(one) == digest(two)
    ordered = collections.OrderedDict
    assert digest(ordered(a=1, b=2)) != digest(ordered(b=2, a=1))


BLOCK_BYTES = 1 << 20


def sum_of(flat: torch.Tensor) -> int:
    return checksum([flat.numpy().data])


def _changed(flat: torch.Tensor, *positions: int) -> int:
    other = flat.clone()
    for position in positions:
        other[position] ^= 0x80
    return sum_of(other)


@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 7, 8, 9, 12, 15, 16, 17, 100, BLOCK_BYTES, BLOCK_BYTES + 5]
)
def test_every_byte_counts_at_every_size(size: int) -> None:
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(1))
    flat = data.to(torch.uint8)
    step = max(1, size // 97)
    positions = sorted({*range(0, size, step), *range(max(0, size - 20), size)})
    sums = {sum_of(flat), *(_changed(flat, position) for position in positions)}
    assert len(sums) == len(positions) + 1
    longer = torch.cat([flat, torch.zeros(1, dtype=torch.uint8)])
    assert sum_of(longer) not in sums


def test_pairs_of_sign_bits_are_seen() -> None:
    """As in a sum of weighted words they are not."""
    flat = torch.zeros(64 << 10, dtype=torch.uint8)
    sums = {sum_of(flat)}
    pairs = [(a, b) for a in range(7, 400, 8) for b in range(7, a, 8)]
    sums |= {_changed(flat, *pair) for pair in pairs}
    assert len(sums) == len(pairs) + 1


@given(st.permutations(range(12)))
@settings(max_examples=60, deadline=None)
def test_permutations_of_blocks_are_seen(order: list[int]) -> None:
    base = torch.arange(12, dtype=torch.int64).repeat_interleave(BLOCK_BYTES // 8 // 4)
    blocks = base.reshape(12, -1)
    moved = blocks[list(order)].contiguous().reshape(-1)
    equal = sum_of(moved.view(torch.uint8)) == sum_of(base.view(torch.uint8))
    assert equal == (list(order) == sorted(order))


def test_how_the_bytes_are_cut_does_not_count() -> None:
    data = bytes(range(256)) * 9
    cuts = [0, 1, 8, 70, 1024, 1024, 2000, len(data)]
    parts = [memoryview(data)[a:b] for a, b in pairwise(cuts)]
    assert checksum(parts) == checksum([memoryview(data)])


def test_unaligned_memory_gives_the_same_sum() -> None:
    memory = torch.randint(0, 256, (100_001,), generator=torch.Generator().manual_seed(2))
    flat = memory.to(torch.uint8)
    assert sum_of(flat[1:]) == sum_of(flat[1:].clone())
