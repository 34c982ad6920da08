"""Codecs: sizes, error bounds, corner values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.collectives.quantized import codec_named

NAMES = ("int8", "int4", "fp8")
BOUND = {"int8": 1 / 254, "fp8": 1 / 28, "int4": 1 / 14 + 1 / 256}
FEWER = {"int8": 3.9, "fp8": 3.9, "int4": 7.5}


@pytest.mark.parametrize("name", NAMES)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e20]),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_the_error_is_bounded_by_the_block(
    name: str, rows: int, blocks: int, size: float, seed: int
) -> None:
    codec = codec_named(name)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, blocks * codec.block, generator=generator) * size
    data = codec.encode(values)
    assert data.dtype == torch.uint8
    assert data.shape == (rows, codec.row_bytes(values.shape[1]))
    back = codec.decode(data, values.shape[1])
    blocked = values.view(rows, blocks, codec.block)
    largest = blocked.abs().amax(-1, keepdim=True)
    error = (back.view_as(blocked) - blocked).abs()
    assert bool((error <= largest * BOUND[name] * 1.001).all())


@pytest.mark.parametrize("name", NAMES)
def test_fewer_bytes(name: str) -> None:
    codec = codec_named(name)
    values = 64 * codec.block
    assert 4 * values / codec.row_bytes(values) > FEWER[name]


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_zeros_and_extremes_stay_finite(name: str) -> None:
    codec = codec_named(name)
    for value in (0.0, 1e-45, 1e-38, 3e38):
        row = torch.zeros(1, codec.block)
        row[0, 3] = value
        back = codec.decode(codec.encode(row), codec.block)
        assert bool(torch.isfinite(back).all()), value
        assert bool((back[0, :3] == 0).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    codec = codec_named(name)
    row = torch.ones(1, 2 * codec.block)
    row[0, 1] = bad
    back = codec.decode(codec.encode(row), 2 * codec.block)
    assert not bool(torch.isfinite(back[0, 1]))
    torch.testing.assert_close(back[0, codec.block :], torch.ones(codec.block), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_what_was_decoded_changes_nothing_more_than_rounding(name: str) -> None:
    """Values on the codec's grid pass as they are: an owner's second encoding costs little."""
    codec = codec_named(name)
    row = torch.arange(codec.block, dtype=torch.float32).remainder(15).sub(7).unsqueeze(0)
    back = codec.decode(codec.encode(row), codec.block)
    again = codec.decode(codec.encode(back), codec.block)
    torch.testing.assert_close(again, back, rtol=1e-2, atol=1e-6)


def test_unknown_codec() -> None:
    with pytest.raises(ValueError, match="codec must be None or one of int8, int4, fp8"):
        codec_named("zip")
