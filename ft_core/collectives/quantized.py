"""All-reduce of quantized tensors. All members end with the same bits.

Every member cuts its values into one shard a member and sends each, encoded, to its owner
(all-to-all). The owner decodes them, adds them up in rank order in fp32, encodes the sum and sends
it to all (all-gather). Every member, the owner too, decodes the same bytes: whatever the codec
loses, all end with the same values (S3). A member of n sends 2 (n - 1) / n of the encoded size, as a
ring all-reduce does of the plain one.

Error feedback (arXiv 1901.09847, algorithm 2: p = g + e, send Q(p), e = p - Q(p)): what encoding
lost is kept and added the next time; the owner also keeps what its shard of the sum lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from ft_core.collectives.codecs import Codec, Int8
from ft_core.collectives.ops import finish, options_for
from ft_core.process_group import ProcessGroup
from ft_core.replica.status import Participation
from ft_core.step import Step

DEFAULT_CODEC = Int8()
"""Of `Manager.allreduce(should_quantize=True)`. Fixed, so that members need not agree on it."""
_PIECE_VALUES = 4 << 20  # one piece is encoded while another is sent


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
    sent = []
    for job in jobs:
        shard = _shard(codec, job.bucket.numel(), members)
        rows = torch.zeros(members * shard, dtype=torch.float32, device=job.bucket.device)
        if participating:
            rows[: job.bucket.numel()] = job.bucket
            if job.residual is not None:
                rows[: job.bucket.numel()] += job.residual
        data = codec.encode(rows.view(members, shard))
        if job.residual is not None:
            lost = rows - codec.decode(data, shard).view(-1) if participating else rows
            job.next_residual = lost
        received = torch.empty_like(data)
        sent.append((received, data, group.alltoall_base(received, data, [], [])))
    gathered = []
    for job, (received, _, work) in zip(jobs, sent, strict=True):
        work.wait()
        shard = _shard(codec, job.bucket.numel(), members)
        total = _sum_in_rank_order(codec.decode(received, shard))
        data = codec.encode(total.unsqueeze(0))
        if job.next_residual is not None and participating:
            own = job.next_residual[rank * shard : (rank + 1) * shard]
            own += total - codec.decode(data, shard).view(-1)
        encoded = data.new_empty(members * data.shape[1])
        gathered.append((encoded, data, group._allgather_base(encoded, data.view(-1))))
    for job, (encoded, _, work) in zip(jobs, gathered, strict=True):
        work.wait()
        count = job.bucket.numel()
        values = codec.decode(encoded.view(members, -1), _shard(codec, count, members))
        job.bucket.copy_(values.view(-1)[:count])
        if job.next_residual is not None:
            job.next_residual = job.next_residual[:count].clone() if participating else job.residual


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


def check_quantizable(tensor: Tensor, op: str) -> None:
    """Raises ValueError unless `Manager.allreduce` can quantize this."""
    if op not in ("sum", "avg") or not tensor.is_floating_point():
        raise ValueError(
            f"should_quantize is for sums and means of real floating values, got {op} of "
            f"{tensor.dtype}: call without it"
        )


def reduce_in_turn(
    step: Step, tensor: Tensor, op: str, part: Participation, *, quantize: bool
) -> Future[Tensor]:
    """`Manager.allreduce` of a prepared tensor, after the collectives that are queued."""

    def work(group: ProcessGroup) -> None:
        if not quantize:
            group.allreduce([tensor], options_for(op)).wait()
            finish(tensor, op, part.participants)
            return
        jobs = [Reduction(piece) for piece in tensor.view(-1).split(_PIECE_VALUES)]
        reduce_quantized(group, DEFAULT_CODEC, jobs, part)

    return step.queue.submit(work, tensor)
