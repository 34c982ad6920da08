"""Quantization for slow links: real numbers as bytes, with a scale for each block of values.

Plain torch operations on CPU and CUDA, no kernels of our own. The settings that members compare when
they join name the codec; the choice never depends on what happens to be installed.

| name | a value | scale | block | bits a value | fewer bytes than fp32 |
|---|---|---|---|---|---|
| int8 | integer in [-127, 127] | fp32, largest / 127 | 256 | 8.125 | 3.94 |
| fp8 | e4m3 | fp32, largest / 448 | 256 | 8.125 | 3.94 |
| int4 | integer in [-7, 7], two a byte | bf16, largest / 7 | 64 | 4.25 | 7.53 |

Largest error of a value, relative to the largest of its block: 1/254 (int8), 1/28 (fp8, only near
the largest; small values keep 4 bits of precision), 1/14 (int4, and 1/512 more by the scale's
rounding). A block that holds an infinity or a NaN decodes to values that are not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Encodes rows of values, each row by itself. Stateless: any thread, any device."""

    name: str
    block: int
    """Values that share a scale; rows are a whole number of blocks."""
    _largest: float
    _scale_dtype = torch.float32

    def row_bytes(self, values: int) -> int:
        """Bytes of an encoded row of `values`, which is a multiple of `block`."""
        assert values % self.block == 0
        return self._value_bytes(values) + values // self.block * self._scale_dtype.itemsize

    def padded(self, values: int) -> int:
        """The next multiple of `block`."""
        return -(-values // self.block) * self.block

    def encode(self, rows: Tensor) -> Tensor:
        """(r, n) floating -> (r, row_bytes(n)) uint8."""
        count, values = rows.shape
        blocks = rows.to(torch.float32).reshape(count, values // self.block, self.block)
        scale = (blocks.abs().amax(-1) / self._largest).to(self._scale_dtype)
        divisor = scale.to(torch.float32).unsqueeze(-1)
        scaled = blocks / torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        data = self._pack(scaled.reshape(count, values))
        scales = scale.contiguous().view(torch.uint8).reshape(count, -1)
        return torch.cat([data, scales], dim=1)

    def decode(self, data: Tensor, values: int) -> Tensor:
        """(r, row_bytes(values)) uint8 -> (r, values) fp32. The same bits on every device."""
        cut = self._value_bytes(values)
        count = data.shape[0]
        scale = data[:, cut:].contiguous().view(self._scale_dtype).to(torch.float32)
        blocks = self._unpack(data[:, :cut]).reshape(count, values // self.block, self.block)
        return (blocks * scale.unsqueeze(-1)).reshape(count, values)

    def _value_bytes(self, values: int) -> int:
        return values

    @abstractmethod
    def _pack(self, scaled: Tensor) -> Tensor:
        """(r, n) fp32 within the largest value -> uint8."""

    @abstractmethod
    def _unpack(self, data: Tensor) -> Tensor:
        """The values of `_pack`'s bytes, fp32."""


class Int8(Codec):
    """8-bit integers."""

    name, block, _largest = "int8", 256, 127.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return _integers(scaled, 127).view(torch.uint8)

    def _unpack(self, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.int8).to(torch.float32)


class Int4(Codec):
    """4-bit integers, the first of a pair in the low half of its byte."""

    name, block, _largest = "int4", 64, 7.0
    _scale_dtype = torch.bfloat16

    def _value_bytes(self, values: int) -> int:
        return values // 2

    def _pack(self, scaled: Tensor) -> Tensor:
        nibbles = (_integers(scaled, 7) + 8).view(torch.uint8)
        return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)

    def _unpack(self, data: Tensor) -> Tensor:
        pairs = torch.stack([data & 15, data >> 4], dim=-1)
        return pairs.reshape(data.shape[0], -1).to(torch.float32) - 8.0


class Fp8(Codec):
    """8-bit floats, e4m3."""

    name, block, _largest = "fp8", 256, 448.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)

    def _unpack(self, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def _integers(scaled: Tensor, largest: int) -> Tensor:
    # A NaN decodes to NaN by its block's scale. The conversion to integers needs a number.
    return scaled.round().clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)


_CODECS: dict[str, type[Codec]] = {"int8": Int8, "int4": Int4, "fp8": Fp8}


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises ValueError if there is none, or this torch does not support it."""
    kind = _CODECS.get(name)
    if kind is None:
        raise ValueError(f"codec must be None or one of {', '.join(_CODECS)}, got {name!r}")
    if kind is Fp8 and not hasattr(torch, "float8_e4m3fn"):
        raise ValueError(f"torch {torch.__version__} has no float8_e4m3fn: use codec='int8'")
    return kind()
