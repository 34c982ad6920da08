"""Digests of what members compare: every bit is covered once in so many steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ft_core.heal.digests import SLICES, ComparedState


def tensors(device: str = "cpu") -> list[Tensor]:
    """Of many types, sizes and layouts."""
    torch.manual_seed(0)
    large = torch.randn(300, 1000)  # more than a block of the checksum, and than a slice
    made = [
        nn.Parameter(large),
        torch.randn(3, 5, 7).to(torch.bfloat16),
        torch.arange(11, dtype=torch.int8),
        torch.tensor(3.5),
        torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        torch.randn(64, 33)[:, :32],  # with gaps
        torch.randn(4, 6, dtype=torch.float64).t(),
        torch.tensor([True, False, True]),
        torch.empty(0),
        torch.randn(7)[3:],  # not aligned to a word
        torch.complex(torch.ones(3), torch.zeros(3)),
    ]
    return [tensor.to(device) for tensor in made]


def comparing(state: list[Tensor], steps: int) -> ComparedState:
    compared = ComparedState(steps)
    compared.register("state", lambda: state)
    return compared


def told(state: list[Tensor], steps: int) -> list[bytes]:
    """What a member says of its state in `steps` steps; empty: nothing."""
    compared = comparing(state, steps)
    digests = (compared.at(step, whole=False) for step in range(steps))
    return [b"" if digest is None else digest.finish() for digest in digests]


def test_members_may_hold_a_tensor_in_unlike_orders_in_memory() -> None:
    """One that heals gets the moments of a model in channels_last in rows, and so never was equal to its peers."""
    state = tensors()
    assert told([tensor.detach().contiguous() for tensor in state], 64) == told(state, 64)


def flip(tensor: Tensor, bit: int) -> None:
    """Change one bit, in the order of elements."""
    values = tensor.detach()
    index, within = divmod(bit, 8 * values.element_size())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), values.shape))
    raw = values[place].clone().reshape(1).view(torch.uint8)
    raw[within // 8] ^= 1 << within % 8
    with torch.no_grad():
        values[place] = raw.view(values.dtype)[0]


def bits_of(tensor: Tensor) -> list[int]:
    last = 8 * tensor.element_size() * tensor.numel() - 1
    if tensor.dtype is torch.bool:
        return [0, last - 7] if last > 0 else []
    return sorted({0, last // 2, last} & set(range(last + 1)))


def check_every_bit(device: str) -> None:
    steps = 64
    right = told(tensors(device), steps)
    assert sum(map(bool, right)) == SLICES
    for number, tensor in enumerate(tensors(device)):
        for bit in bits_of(tensor):
            state = tensors(device)
            flip(state[number], bit)
            wrong = told(state, steps)
            differs = [a != b for a, b in zip(right, wrong, strict=True)]
            assert sum(differs) == 1, (number, bit)
            whole = [comparing(s, steps).at(7, whole=True) for s in (tensors(device), state)]
            a, b = (digest.finish() for digest in whole if digest is not None)
            assert a != b, (number, bit)


def test_each_bit_is_covered_once() -> None:
    check_every_bit("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_bit_is_covered_once_on_a_device() -> None:
    check_every_bit("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_digest_is_queued_without_waiting_for_its_device() -> None:
    state = [torch.zeros(1 << 20, device="cuda")]
    compared = comparing(state, 1)
    first = compared.at(0, whole=True)  # the weights are copied to the device once
    assert first is not None
    before = first.finish()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    digest = compared.at(0, whole=True)
    assert not busy.query(), "the kernels in front of the digest were waited for"
    assert digest is not None and digest.finish() == before


def test_members_say_the_same_of_equal_states() -> None:
    assert told(tensors(), 100) == told(tensors(), 100)


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 1024])
def test_all_is_covered_in_the_steps_asked_for(steps: int) -> None:
    torch.manual_seed(0)
    right, wrong = [torch.randn(5000)], [torch.randn(5000)]
    slices = min(steps, SLICES)
    a, b = told(right, steps), told(wrong, steps)
    assert sum(map(bool, a)) >= slices
    assert sum(x != y for x, y in zip(a, b, strict=True)) >= slices


def test_nothing_is_said_of_a_state_that_is_not_compared() -> None:
    off = comparing(tensors(), 0)
    assert off.at(0, whole=True) is None
    drifting = comparing(tensors(), 1)
    drifting.equal = False
    assert drifting.at(0, whole=True) is None
    assert ComparedState(1).at(0, whole=True) is None


def test_long_steps_are_compared_more_often() -> None:
    compared = ComparedState(1024)
    compared.register("outer", tensors, within=32)
    assert all(compared.at(step, whole=False) is not None for step in range(32))


def test_a_part_that_is_compared_after_heals_only() -> None:
    state, moments = [torch.ones(5)], [torch.zeros(3)]
    one, other = comparing(state, 8), comparing(state, 8)
    for compared in (one, other):
        compared.register_after_heals("moments", lambda: moments)
    before = [one.at(step, whole=False) for step in range(8)]
    whole = one.at(0, whole=True)
    moments = [torch.tensor([0.0, 1.0, 0.0])]  # another tensor: it is asked for each time
    after = [other.at(step, whole=False) for step in range(8)]
    other_whole = other.at(0, whole=True)
    assert whole is not None and other_whole is not None
    assert [d and d.finish() for d in before] == [d and d.finish() for d in after]
    assert whole.finish() != other_whole.finish()
