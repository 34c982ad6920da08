"""Quantization for slow links: real numbers as bytes, with a scale for each block of values.

Plain torch operations; for CUDA tensors kernels that make the same bytes, where Triton is installed
(`triton_codecs`). The settings that members compare when they join name the codec; the choice never depends
on what happens to be installed.

| name | a value | scale | block | bits a value | fewer bytes than fp32 |
|---|---|---|---|---|---|
| int8 | integer in [-127, 127] | fp32, largest / 127 | 256 | 8.125 | 3.94 |
| fp8 | e4m3 | fp32, largest / 448 | 256 | 8.125 | 3.94 |
| int4 | integer in [-7, 7], two a byte | bf16, largest / 7 | 64 | 4.25 | 7.53 |

Largest error of a value, relative to the largest of its block: 1/254 (int8), 1/28 (fp8, only near
the largest; small values keep 4 bits of precision), 1/14 (int4, and 1/512 more by the scale's
rounding). A block that holds an infinity or a NaN decodes to values that are not finite.

The all-reduce: every member cuts its values into one shard per member and sends each, encoded, to its
owner (all-to-all). The owner decodes them, adds them up in rank order in fp32, encodes the sum and
sends it to all (all-gather). Every member, the owner too, decodes the same bytes: whatever the codec
loses, all end with the same values (S3). A member of n sends 2 (n - 1) / n of the encoded size, as a
ring all-reduce does of the plain one. The reduce-scatter is the first half, without the second encoding.

Error feedback (arXiv 1901.09847, algorithm 2: p = g + e, send Q(p), e = p - Q(p)): what encoding
lost is kept and added the next time; the owner also keeps what its shard of the sum lost.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ft_core.process_group import ProcessGroup
from ft_core.replica.status import Participation


class Codec(ABC):
    """Encodes rows of values, each row by itself. Stateless: any thread, any device."""

    name: str
    block: int
    """Values that share a scale; rows are a whole number of blocks."""
    largest: float
    """The largest value's code."""
    _scale_dtype = torch.float32

    def row_bytes(self, values: int) -> int:
        """Bytes of an encoded row of `values`, which is a multiple of `block`."""
        assert values % self.block == 0
        return self._value_bytes(values) + values // self.block * self._scale_dtype.itemsize

    def padded(self, values: int) -> int:
        """The next multiple of `block`, which is not 0: tensors without values send a block, too."""
        return max(1, -(-values // self.block)) * self.block

    def encode(self, rows: Tensor) -> Tensor:
        """(r, n) floating -> (r, row_bytes(n)) uint8."""
        count, values = rows.shape
        blocks = rows.to(torch.float32).reshape(count, values // self.block, self.block)
        scale = (blocks.abs().amax(-1) / self.largest).to(self._scale_dtype)
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

    name, block, largest = "int8", 256, 127.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return _integers(scaled, 127).view(torch.uint8)

    def _unpack(self, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.int8).to(torch.float32)


class Int4(Codec):
    """4-bit integers, the first of a pair in the low half of its byte."""

    name, block, largest = "int4", 64, 7.0
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

    name, block, largest = "fp8", 256, 448.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)

    def _unpack(self, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def _integers(scaled: Tensor, largest: int) -> Tensor:
    # A NaN decodes to NaN by its block's scale. The conversion to integers needs a number.
    return scaled.round().clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)


_CODECS: dict[str, type[Codec]] = {"int8": Int8, "int4": Int4, "fp8": Fp8}


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises ValueError if there is none."""
    kind = _CODECS.get(name)
    if kind is None:
        raise ValueError(f"codec must be None or one of {', '.join(_CODECS)}, got {name!r}")
    return kind()


# ---------------------------------------------------------------- the all-reduce


DEFAULT_CODEC = Int8()
"""Of `Manager.allreduce(should_quantize=True)`. Fixed, so that members need not agree on it."""


@dataclass(slots=True)
class Reduction:
    """One bucket to reduce.

    Attributes:
        bucket: flat floating tensor. This member's values; afterwards the sum.
        residual: fp32, flat: what earlier encodings lost; None: no error feedback.
        next_residual: what `residual` becomes if the step is committed.
    """

    bucket: Tensor
    residual: Tensor | None = None
    next_residual: Tensor | None = None


def wire_bytes(codec: Codec, values: int, members: int) -> int:
    """Bytes that a member sends for a bucket of `values`."""
    return 2 * (members - 1) * codec.row_bytes(_shard(codec, values, members))


def _shard(codec: Codec, values: int, members: int) -> int:
    return codec.padded(-(-values // members))


def reduce_quantized(
    group: ProcessGroup, codec: Codec, jobs: Sequence[Reduction], part: Participation
) -> None:
    """Sum each bucket over the participants, in place. Blocks; raises what the group raises.

    Non-participants send zeros. All members call it with buckets of the same sizes.
    """
    members, rank = group.size(), group.rank()
    participating = part.rank is not None
    if members == 1:
        for job in jobs:
            _alone(job, participating)
        return
    sent, gathered = [], []
    for job in jobs:
        shard = _shard(codec, job.bucket.numel(), members)
        if not participating:
            job.bucket.zero_()
        residual = job.residual if participating else None
        data, lost = quantize(codec, job.bucket, residual, members, shard)
        received = torch.empty_like(data)
        sent.append((lost, received, data, group.alltoall_base(received, data, [], [])))
    for job, (lost, received, _, work) in zip(jobs, sent, strict=True):
        work.wait()
        shard = _shard(codec, job.bucket.numel(), members)
        own = None if lost is None else lost[rank * shard : (rank + 1) * shard]
        data = requantize(codec, received, shard, own).view(-1)
        encoded = data.new_empty(members * data.numel())
        gathered.append((lost, encoded, data, group._allgather_base(encoded, data)))
    for job, (lost, encoded, _, work) in zip(jobs, gathered, strict=True):
        work.wait()
        count = job.bucket.numel()
        rows = encoded.view(members, -1)
        dequantize(codec, rows, _shard(codec, count, members), job.bucket)
        if job.residual is not None:
            job.next_residual = job.residual if lost is None else lost[:count].clone()


def reduce_scatter_quantized(
    group: ProcessGroup, codec: Codec, output: Tensor, values: Tensor, part: Participation
) -> None:
    """Sum `values` over the participants, and leave this member's share of it, by rank, in `output`.
    Blocks; raises what the group raises.

    Non-participants send zeros, and get their share. Each value is encoded once: its error is at most the sum
    of what each participant's encoding loses. All members call it with tensors of the same sizes.

    Args:
        output: flat floating tensor.
        values: flat floating tensor, `group.size()` times as long. It is not changed.
    """
    members, share = group.size(), output.numel()
    if values.numel() != members * share:
        raise ValueError(
            f"{values.numel()} values can't be divided into {members} shares of {share}: pad them"
        )
    if part.rank is None:
        values = torch.zeros_like(values)
    if members == 1:
        output.copy_(values)
        return
    row = codec.padded(share)
    if row != share:
        rows = values.new_zeros(members, row)
        rows[:, :share] = values.view(members, share)
        values = rows.view(-1)
    data, _ = quantize(codec, values, None, members, row)
    received = torch.empty_like(data)
    group.alltoall_base(received, data, [], []).wait()
    output.copy_(_sum_in_rank_order(codec.decode(received, row))[:share])


def quantize(
    codec: Codec, bucket: Tensor, residual: Tensor | None, rows: int, row: int
) -> tuple[Tensor, Tensor | None]:
    """A flat tensor, padded with zeros to `rows` rows of `row` values, encoded. With a residual it is added
    first, and what the encoding has lost of each value comes second."""
    kernels = _kernels_for(bucket)
    if kernels is not None:
        return kernels.quantize(  # type: ignore[no-any-return]
            codec, bucket, residual, rows, row, with_lost=residual is not None
        )
    values = torch.zeros(rows * row, dtype=torch.float32, device=bucket.device)
    values[: bucket.numel()] = bucket
    if residual is None:
        return codec.encode(values.view(rows, row)), None
    values[: bucket.numel()] += residual
    data = codec.encode(values.view(rows, row))
    return data, values - codec.decode(data, row).view(-1)


def requantize(codec: Codec, data: Tensor, row: int, lost: Tensor | None) -> Tensor:
    """The sum of encoded rows, in their order, encoded: (1, row_bytes). What this loses is added to `lost`."""
    kernels = _kernels_for(data)
    if kernels is not None:
        return kernels.requantize(codec, data, row, lost)  # type: ignore[no-any-return]
    total = _sum_in_rank_order(codec.decode(data, row))
    result = codec.encode(total.unsqueeze(0))
    if lost is not None:
        lost += total - codec.decode(result, row).view(-1)
    return result


def dequantize(codec: Codec, data: Tensor, row: int, into: Tensor) -> None:
    """Encoded rows of `row` values into a flat tensor, which is not longer than they are."""
    kernels = _kernels_for(data)
    if kernels is not None:
        kernels.dequantize(codec, data, row, into)
    else:
        into.copy_(codec.decode(data, row).view(-1)[: into.numel()])


@functools.cache
def _kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    return import_module("ft_core.collectives.triton_codecs")


def _kernels_for(tensor: Tensor) -> ModuleType | None:
    return _kernels() if tensor.is_cuda else None


def _alone(job: Reduction, participating: bool) -> None:
    """A single member sends nothing, and the codec loses nothing."""
    if not participating:
        job.bucket.zero_()
        job.next_residual = job.residual
    elif job.residual is not None:
        job.bucket += job.residual.to(job.bucket.dtype)
        job.next_residual = torch.zeros_like(job.residual)


def _sum_in_rank_order(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
