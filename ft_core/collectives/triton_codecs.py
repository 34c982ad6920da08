"""The codecs as Triton kernels, for tensors on a CUDA device: three launches per bucket.

`quantized.Codec` says what the bytes are, and these are the same: divisions are rounded as IEEE says, no
product is fused with a sum, and conversions are made of integers. Only the bytes of a block with a NaN may
differ (its values decode to NaN in both).

Importing this imports Triton, so it is imported when a CUDA tensor is encoded first. Tested in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES, _WARPS = 2048, 8
"""Of one program. With half as many warps, or twice as many values, a thread needs so many registers that a
processor has 8 of the 64 warps that it could have (fp8), or spills some (int4)."""
_ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2**23: what is added to it is rounded to an integer, halves to the even one."""
_INT8, _INT4, _FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {"int8": 0, "int4": 1, "fp8": 2}


class Coded(Protocol):
    """What the kernels must know of a `quantized.Codec`."""

    name: str
    block: int
    largest: float

    def row_bytes(self, values: int, /) -> int:
        """As `quantized.Codec.row_bytes`."""


def quantize(
    codec: Coded, values: Tensor, residual: Tensor | None, rows: int, row: int, *, with_lost: bool
) -> tuple[Tensor, Tensor | None]:
    """Flat values (plus `residual`), padded with zeros to `rows` times `row` -> (rows, row_bytes) uint8,
    and what the encoding has lost of each value."""
    total = rows * row
    data = torch.empty(rows, codec.row_bytes(row), dtype=torch.uint8, device=values.device)
    lost = torch.empty(total, dtype=torch.float32, device=values.device) if with_lost else None
    _quantize[_grid(total)](
        values,
        residual,
        data,
        lost,
        values.numel(),
        total,
        row // codec.block,
        HAS_RESIDUAL=residual is not None,
        HAS_LOST=with_lost,
        LARGEST=codec.largest,
        **_constants(codec),
    )
    return data, lost


def requantize(codec: Coded, data: Tensor, row: int, lost: Tensor | None) -> Tensor:
    """(members, row_bytes) -> (1, row_bytes): the sum of the rows in their order, encoded. What this loses
    is added to `lost`."""
    result = torch.empty(1, codec.row_bytes(row), dtype=torch.uint8, device=data.device)
    _requantize[_grid(row)](
        data,
        result,
        lost,
        row,
        data.shape[0],
        row // codec.block,
        HAS_LOST=lost is not None,
        LARGEST=codec.largest,
        **_constants(codec),
    )
    return result


def dequantize(codec: Coded, data: Tensor, row: int, into: Tensor) -> None:
    """(rows, row_bytes) -> the first values of all rows together, into a flat tensor of any real dtype."""
    count = into.numel()
    _dequantize[_grid(count)](data, into, count, row // codec.block, **_constants(codec))


def _grid(values: int) -> tuple[int]:
    return (triton.cdiv(values, _VALUES),)


def _constants(codec: Coded) -> dict[str, Any]:
    """Sizes are arguments: a kernel is compiled once for all buckets and quorums."""
    blocks = _VALUES // codec.block
    return {
        "KIND": _KINDS[codec.name],
        "BLOCK": codec.block,
        "BLOCKS": blocks,
        "num_warps": _WARPS,
        "enable_fp_fusion": False,
    }


# ---------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["row_blocks"])
def _quantize(
    values,
    residual,
    data,
    lost,
    count,
    total,
    row_blocks,
    HAS_RESIDUAL: tl.constexpr,
    HAS_LOST: tl.constexpr,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    where = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _wide(tl.load(values + where, mask=where < count, other=0.0))
    if HAS_RESIDUAL:
        x += tl.load(residual + where, mask=where < count, other=0.0)
    scale = _scale(x, KIND, LARGEST)
    code = _code(x, scale, KIND)
    _store(data, block, code, scale, block * BLOCK < total, row_blocks, KIND, BLOCK, BLOCKS)
    if HAS_LOST:
        tl.store(lost + where, x - _value(code, scale, KIND), mask=where < total)


@triton.jit(do_not_specialize=["members", "row_blocks"])
def _requantize(
    data,
    result,
    lost,
    total,
    members,
    row_blocks,
    HAS_LOST: tl.constexpr,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block * BLOCK < total
    x = _load(data, block, inside, row_blocks, KIND, BLOCK)
    left = members - 1  # `range` of an argument fails in the interpreter of Triton 3.6
    while left > 0:
        left -= 1
        data += row_blocks.to(tl.int64) * _block_bytes(KIND, BLOCK)
        x += _load(data, block, inside, row_blocks, KIND, BLOCK)
    scale = _scale(x, KIND, LARGEST)
    code = _code(x, scale, KIND)
    _store(result, block, code, scale, inside, row_blocks, KIND, BLOCK, BLOCKS)
    if HAS_LOST:
        where = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        before = tl.load(lost + where, mask=where < total, other=0.0)
        tl.store(lost + where, before + (x - _value(code, scale, KIND)), mask=where < total)


@triton.jit(do_not_specialize=["row_blocks"])
def _dequantize(
    data, into, count, row_blocks, KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    where = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _load(data, block, block * BLOCK < count, row_blocks, KIND, BLOCK)
    if into.dtype.element_ty == tl.bfloat16:
        bits = (_rounded_bits(x) >> 16).to(tl.int16)
        tl.store(into + where, bits.to(tl.bfloat16, bitcast=True), mask=where < count)
    else:
        tl.store(into + where, x.to(into.dtype.element_ty), mask=where < count)


@triton.jit
def _wide(x):
    """In fp32. bf16 by its bits, here and below: the interpreter has its own idea of conversions."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _rounded_bits(x):
    """Of fp32, rounded to bf16, halves to even. A NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, 0x7FC00000, rounded)


@triton.jit
def _scale(x, KIND: tl.constexpr, LARGEST: tl.constexpr):
    """Of each row of blocks: fp32, for int4 rounded to bf16's bits. A NaN in a block is its scale."""
    nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), axis=1)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(nan, float("nan"), scale)
    if KIND == _INT4:
        scale = _rounded_bits(scale).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _code(x, scale, KIND: tl.constexpr):
    """The integer of each value: signed, or e4m3's bits."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    x = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    if KIND == _FP8:
        return _e4m3(x)
    limit = 127.0 if KIND == _INT8 else 7.0
    x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -128.0), 128.0))  # what `_ROUNDS` can round
    x = (x + _ROUNDS) - _ROUNDS
    return tl.minimum(tl.maximum(x, -limit), limit).to(tl.int32)


@triton.jit
def _e4m3(x):
    """As c10's conversion: halves to even, subnormals by a sum, what is too large is a NaN."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits &= 0x7FFFFFFF
    shift = tl.full(bits.shape, 141 << 23, tl.int32)
    small = (bits.to(tl.float32, bitcast=True) + shift.to(tl.float32, bitcast=True)).to(
        tl.int32, bitcast=True
    ) - shift
    usual = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    code = tl.where(bits < (121 << 23), small, usual)
    return tl.where(bits >= (1087 << 20), 0x7F, code) | sign


@triton.jit
def _value(code, scale, KIND: tl.constexpr):
    if KIND == _FP8:
        # An integer's conversion to a real number takes the time of several sums.
        bits = ((code & 0x7F) << 20) + (120 << 23)
        usual = bits.to(tl.float32, bitcast=True)
        small = (bits + (1 << 23)).to(tl.float32, bitcast=True)  # (1 + m / 8) 2**-6
        small -= 0.015625
        x = tl.where((code & 0x78) == 0, small, usual)
        x = tl.where((code & 0x7F) == 0x7F, float("nan"), x)
        sign = (code & 0x80) << 24  # `-x` makes a plain zero of a negative one in Triton 3.6
        x = (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        x = code.to(tl.float32)
    return x * scale[:, None]


@triton.jit
def _block_bytes(KIND: tl.constexpr, BLOCK: tl.constexpr):
    return BLOCK // 2 + 2 if KIND == _INT4 else BLOCK + 4


@triton.jit
def _places(data, block, row_blocks, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Where the bytes of each block's values and its scale are: a row has all values first."""
    row = data + (block // row_blocks) * row_blocks * _block_bytes(KIND, BLOCK)
    number, value_bytes = block % row_blocks, BLOCK // 2 if KIND == _INT4 else BLOCK
    scales = row + row_blocks.to(tl.int64) * value_bytes
    if KIND == _INT4:
        scales = scales.to(tl.pointer_type(tl.int16))
    else:
        scales = scales.to(tl.pointer_type(tl.int32))
    return row + number * value_bytes, scales + number


@triton.jit
def _store(
    data,
    block,
    code,
    scale,
    inside,
    row_blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    values, scales = _places(data, block, row_blocks, KIND, BLOCK)
    bits = scale.to(tl.int32, bitcast=True)
    if KIND == _INT4:
        low, high = tl.split(tl.reshape(code + 8, (BLOCKS, BLOCK // 2, 2)))
        where = values[:, None] + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(where, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
        tl.store(scales, (bits >> 16).to(tl.int16), mask=inside)
    else:
        where = values[:, None] + tl.arange(0, BLOCK)[None, :]
        tl.store(where, (code & 0xFF).to(tl.uint8), mask=inside[:, None])
        tl.store(scales, bits, mask=inside)


@triton.jit
def _load(data, block, inside, row_blocks, KIND: tl.constexpr, BLOCK: tl.constexpr):
    values, scales = _places(data, block, row_blocks, KIND, BLOCK)
    at = tl.arange(0, BLOCK)[None, :]
    bits = tl.load(scales, mask=inside, other=0).to(tl.int32)
    if KIND == _INT4:
        pair = tl.load(values[:, None] + at // 2, mask=inside[:, None], other=0).to(tl.int32)
        code = ((pair >> ((at % 2) * 4)) & 15) - 8
        bits = bits << 16
    else:
        code = tl.load(values[:, None] + at, mask=inside[:, None], other=0).to(tl.int32)
        if KIND == _INT8:
            code = (code << 24) >> 24
    return _value(code, bits.to(tl.float32, bitcast=True), KIND)
