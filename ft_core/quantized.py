"""All-reduce of quantized tensors, with the same bits at every member; and its place in a step.

Every member cuts its values into one shard a member and sends each, encoded, to its owner
(all-to-all). The owner decodes them, adds them up in rank order in fp32, encodes the sum and sends
it to all (all-gather). Everybody, the owner too, decodes the same bytes: whatever the codec loses,
all members end with the same values (S3). Bytes sent by a member of n: 2 (n - 1) / n of the encoded
size, as a ring all-reduce sends of the plain one.

Error feedback (arXiv 1901.09847, algorithm 2: p = g + e, send Q(p), e = p - Q(p)): what encoding
lost is kept and added the next time; the owner also keeps what its shard of the sum lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future

from ft_core.allreduce import finish, options_for
from ft_core.codecs import Codec, Int8
from ft_core.process_group import ProcessGroup

if TYPE_CHECKING:
    from ft_core.manager import Manager
    from ft_core.world import Participation


DEFAULT_CODEC = Int8()
"""Of `Manager.allreduce(should_quantize=True)`: a fixed one, so that members need not agree on it."""
_PIECE_VALUES = 4 << 20  # one piece is encoded while another travels


@dataclass(slots=True)
class Reduction:
    """One bucket on its way.

    Attributes:
        bucket: flat floating tensor: this member's values, then the sum.
        residual: fp32, flat: what earlier encodings lost; None: no error feedback.
        next_residual: what `residual` becomes if the step is committed.
    """

    bucket: Tensor
    residual: Tensor | None = None
    next_residual: Tensor | None = None


def wire_bytes(codec: Codec, values: int, members: int) -> int:
    """Bytes that a member sends for a bucket of so many values."""
    return 2 * (members - 1) * codec.row_bytes(_shard(codec, values, members))


def _shard(codec: Codec, values: int, members: int) -> int:
    return codec.padded(-(-values // members))


def reduce_quantized(
    group: ProcessGroup, codec: Codec, jobs: Sequence[Reduction], part: Participation
) -> None:
    """Sum each bucket over the participants, in place. Blocks; raises what the group raises.

    Non-participants send zeros. All members call it with buckets of the same sizes.
    """
    members, rank = group.size(), group.rank()  # ranks, where each of a group holds a copy
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
        everybody = data.new_empty(members * data.shape[1])
        gathered.append((everybody, data, group._allgather_base(everybody, data.view(-1))))
    for job, (everybody, _, work) in zip(jobs, gathered, strict=True):
        work.wait()
        count = job.bucket.numel()
        values = codec.decode(everybody.view(members, -1), _shard(codec, count, members))
        job.bucket.copy_(values.view(-1)[:count])
        if job.next_residual is not None:
            job.next_residual = (
                job.next_residual[:count].clone() if participating else job.residual
            )


def _alone(job: Reduction, participating: bool) -> None:
    """Nothing travels, nothing is lost."""
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


class CollectiveQueue:
    """Collectives of one manager that take several rounds, one after the other, off the loop.

    All members must start their collectives in one order. A reduction in rounds starts its later
    ones from a thread, so what is called after it must wait for its turn here: `busy` says so. The
    thread lives as long as there is something to do.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False

    @property
    def busy(self) -> bool:
        """Whether a collective that was queued has not started all of its rounds."""
        return self._running

    def submit(self, work: Callable[[ProcessGroup], None], result: Any = None) -> Future[Any]:
        """Run `work` when its turn comes; the future of `result`, which never fails.

        An error of `work` is reported to the manager. The step waits for it before its vote.
        """
        manager, future = self._manager, Future[Any]()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        ready = torch.cuda.current_stream().record_event() if device is not None else None

        def job() -> None:
            try:
                if manager.errored() is None:
                    if device is None:
                        work(manager._pg)
                    else:
                        assert ready is not None
                        _on_side_stream(work, manager._pg, device, ready)
            except Exception as error:  # whatever a backend raises: the step is lost, not the run
                manager.report_error(manager._pg.errored() or error)
            finally:
                future.set_result(result)

        manager._pending.append(future)
        with self._lock:
            self._jobs.append(job)
            if self._running:
                return future
            self._running = True
        threading.Thread(target=self._run, name="ft-collectives", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job = self._jobs.popleft()
            job()


def _on_side_stream(
    work: Callable[[ProcessGroup], None], group: ProcessGroup, device: int, ready: Any
) -> None:
    """CUDA: what the loop queued before comes first, and the host knows when it is over."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        work(group)
    stream.synchronize()


def queue_of(manager: Manager) -> CollectiveQueue:
    """The manager's queue, made at its first use."""
    if manager._queue is None:
        manager._queue = CollectiveQueue(manager)
    return manager._queue


def check_quantizable(tensor: Tensor, op: str) -> None:
    """Raises ValueError unless `Manager.allreduce` can quantize this."""
    if op not in ("sum", "avg") or not tensor.is_floating_point():
        raise ValueError(
            f"should_quantize is for sums and means of real floating values, got {op} of "
            f"{tensor.dtype}: call without it"
        )


def reduce_in_turn(
    manager: Manager, tensor: Tensor, op: str, part: Participation, *, quantize: bool
) -> Future[Tensor]:
    """`Manager.allreduce` of a prepared tensor, after what is queued."""

    def work(group: ProcessGroup) -> None:
        if not quantize:
            group.allreduce([tensor], options_for(op)).wait()
            finish(tensor, op, part.participants)
            return
        jobs = [Reduction(piece) for piece in tensor.view(-1).split(_PIECE_VALUES)]
        reduce_quantized(group, DEFAULT_CODEC, jobs, part)

    return queue_of(manager).submit(work, tensor)
