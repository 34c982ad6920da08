"""The codecs' kernels make the bytes of the plain ones: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ft_core.collectives import quantized
from ft_core.collectives.quantized import Codec, codec_named

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of inf / inf
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("Triton was imported before tests/conftest.py", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("int8", "int4", "fp8")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function of `quantized` with its kernels, and without."""
    kernels = quantized.import_module("ft_core.collectives.triton_codecs")

    def call(function: Any, codec: Codec, *tensors: Any) -> tuple[list[Any], list[Any]]:
        found = []
        for chosen in (kernels, None):
            monkeypatch.setattr(quantized, "_kernels_for", lambda tensor, chosen=chosen: chosen)
            given = [t.clone() if isinstance(t, torch.Tensor) else t for t in tensors]
            result = function(codec, *given)
            found.append([*given, *(result if isinstance(result, tuple) else (result,))])
        return found[0], found[1]

    return call


def equal(first: list[Any], second: list[Any]) -> bool:
    """Bit by bit."""
    for one, other in zip(first, second, strict=True):
        if isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                return False
        elif one != other:
            return False
    return True


def values(count: int, seed: int = 0) -> torch.Tensor:
    """Of all sizes: blocks of usual values, of subnormal ones, of zeros, and of a wild mixture."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator)
    found[500:1100] *= 1e-41
    found[1100:1700] = 0.0
    order = torch.randperm(count - 1700, generator=generator)
    found[1700:] *= torch.logspace(-44, 37, count - 1700)[order]
    found[3], found[4] = 448.0, -0.0
    return found.to(DEVICE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("with_residual", [False, True])
def test_encoding(both: Any, name: str, dtype: torch.dtype, with_residual: bool) -> None:
    codec, count = codec_named(name), 5000
    row = codec.padded(-(-count // 3))
    bucket = values(count).to(dtype)
    if dtype == torch.float16:
        bucket = bucket.nan_to_num(0.0, 0.0, 0.0)
    residual = values(count, 1) * 0.01 if with_residual else None
    assert equal(*both(quantized.quantize, codec, bucket, residual, 3, row))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("members", [2, 5])
def test_sums(both: Any, name: str, members: int) -> None:
    codec = codec_named(name)
    row = codec.padded(4000)
    rows = torch.stack(
        [torch.nn.functional.pad(values(4000, i), (0, row - 4000)) for i in range(members)]
    )
    data, lost = codec.encode(rows), values(row, 9)
    assert equal(*both(quantized.requantize, codec, data, row, None))
    assert equal(*both(quantized.requantize, codec, data, row, lost))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decoding(both: Any, name: str, dtype: torch.dtype) -> None:
    codec, count = codec_named(name), 4999
    row = codec.padded(-(-count // 2))
    rows = torch.nn.functional.pad(values(count), (0, 2 * row - count)).view(2, row)
    into = torch.zeros(count, dtype=dtype, device=DEVICE)
    assert equal(*both(quantized.dequantize, codec, codec.encode(rows), row, into))


@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_decoded(both: Any, name: str) -> None:
    """Not-a-number among them, in fp8."""
    codec = codec_named(name)
    data = torch.arange(256, dtype=torch.uint8).repeat(codec.row_bytes(codec.block) // 256 + 1)
    data = data[: codec.row_bytes(4 * codec.block)].clone().unsqueeze(0)
    if data.shape[1] < codec.row_bytes(4 * codec.block):
        data = data.repeat(1, 5)[:, : codec.row_bytes(4 * codec.block)].contiguous()
    scale = 0.37 * torch.ones(4, dtype=codec._scale_dtype)
    data[0, -scale.nbytes :] = scale.view(torch.uint8)
    into = torch.zeros(4 * codec.block, device=DEVICE)
    mine, plain = both(quantized.dequantize, codec, data.to(DEVICE), 4 * codec.block, into)
    torch.testing.assert_close(mine[2], plain[2], rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(both: Any, name: str, bad: float) -> None:
    codec = codec_named(name)
    bucket = torch.ones(4 * codec.block, device=DEVICE)
    bucket[1] = bad
    mine, plain = both(quantized.quantize, codec, bucket, None, 2, 2 * codec.block)
    decoded = [codec.decode(data, 2 * codec.block) for data in (mine[4], plain[4])]
    torch.testing.assert_close(*decoded, rtol=0.0, atol=0.0, equal_nan=True)
    assert not bool(torch.isfinite(decoded[0][0, 1]))
