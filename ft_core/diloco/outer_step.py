"""One outer step's communication: a fragment on its way, from launch to apply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.attempts import participation_of
from ft_core.diloco.fragments import Flat, Fragment

if TYPE_CHECKING:
    from ft_core.manager import Manager


@dataclass(slots=True)
class OuterStats:
    """Sums since the start of this process; any thread may read.

    Attributes:
        committed, discarded: outer steps (of one fragment each).
        void: windows of this member that were dropped because they were bad.
        bytes_sent: by this member, for outer steps.
        communication_s: from each launch until its collectives were over.
        hidden_s: how much of that the loop did not wait for.
        divergence: of the last committed outer step: root mean square over the participants of
            the distance between their parameters and the mean of those (Euclidean norm).
    """

    committed: int = 0
    discarded: int = 0
    void: int = 0
    bytes_sent: int = 0
    communication_s: float = 0.0
    hidden_s: float = 0.0
    divergence: float = 0.0


@dataclass(slots=True)
class OuterReduce:
    """See the module's docstring. Thread: the training loop's.

    Attributes:
        values: this member's weighted values; once over, the participants' sum.
        meta: fp64: the sum of weights, and of weighted squared norms of the pseudo-gradients.
        means: floating buffers, weighted like values. others: the bytes of all other buffers.
        futures: of all collectives; none ever fails (`Manager.errored` tells).
        quantized: `Reduction`s, where values travel by a codec.
    """

    fragment: Fragment
    values: Flat
    meta: Tensor
    stats: OuterStats
    means: Flat | None = None
    others: Tensor | None = None
    futures: list[Future[Any]] = field(default_factory=list)
    quantized: list[Any] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        manager: Manager,
        fragment: Fragment,
        contribution: Sequence[Tensor],
        weight: float,
        squared: float,
        bucket_bytes: int,
        stats: OuterStats,
    ) -> OuterReduce:
        """Lay out `contribution`, times `weight` (0: whatever it holds counts for nothing)."""
        values = Flat(contribution, bucket_bytes, _wire_device(manager))
        _fill(values, contribution, weight)
        device = next(iter(values.parts.values())).device
        meta = torch.tensor([weight, weight * squared], dtype=torch.float64, device=device)
        flight = cls(fragment, values, meta, stats)
        flight.send(manager, meta)
        return flight

    def send(self, manager: Manager, tensor: Tensor) -> None:
        """Start the plain sum of a tensor, in place."""
        self.futures.append(manager.allreduce(tensor, reduce_op=ReduceOp.SUM))
        members = participation_of(manager).replica_world_size
        self.stats.bytes_sent += 2 * (members - 1) * tensor.nbytes // members

    @torch.no_grad()
    def send_buffers(
        self, manager: Manager, buffers: Sequence[Tensor], weight: float, bucket_bytes: int
    ) -> None:
        """Floating buffers are averaged like parameters; of others the first participant's count."""
        device = _wire_device(manager)
        floating = [b for b in buffers if _is_real_valued(b)]
        others = [b for b in buffers if not _is_real_valued(b)]
        if floating:
            self.means = Flat(floating, bucket_bytes, device)
            _fill(self.means, floating, weight)
            for bucket in self.means.buckets():
                self.send(manager, bucket)
        if others:
            # A sum to which one adds anything but zeros: exact for every dtype.
            joined = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in others])
            self.others = joined.to(device or joined.device)
            if participation_of(manager).rank != 0:
                self.others.zero_()
            self.send(manager, self.others)

    @torch.no_grad()
    def take_buffers(self, buffers: Sequence[Tensor], total: float) -> bool:
        """Put what arrived into `buffers`; whether buffers had been sent."""
        if self.means is not None:
            floating = [b for b in buffers if _is_real_valued(b)]
            for buffer, view in zip(floating, self.means.views, strict=True):
                buffer.copy_(view.div_(total))
        if self.others is not None:
            start = 0
            for buffer in (b for b in buffers if not _is_real_valued(b)):
                piece = self.others[start : start + buffer.nbytes].clone()
                buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))
                start += buffer.nbytes
        return self.means is not None or self.others is not None

    def watch(self) -> None:
        """All collectives are started: note when they end."""
        for future in self.futures:
            future.add_done_callback(self._mark_end)

    def wait(self) -> None:
        """Wait for all collectives, and count the time that they took."""
        began_s = time.monotonic()
        for future in self.futures:
            future.wait()
        waited_s = time.monotonic() - began_s
        took_s = max(0.0, self.ended_s - self.began_s)
        self.stats.communication_s += took_s
        self.stats.hidden_s += max(0.0, took_s - waited_s)

    def _mark_end(self, _: Future[Any]) -> None:
        self.ended_s = max(self.ended_s, time.monotonic())


def _fill(flat: Flat, tensors: Sequence[Tensor], weight: float) -> None:
    for view, tensor in zip(flat.views, tensors, strict=True):
        if weight:
            view.copy_(tensor)
            if weight != 1.0:
                view.mul_(weight)


def _is_real_valued(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wire_device(manager: Manager) -> torch.device | None:
    """Where values must lie to travel; None: where they are."""
    return torch.device("cpu") if "gloo" in manager.step.group.getBackendName() else None


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all of them together, summed in double precision."""
    wide = (torch.complex128 if t.is_complex() else torch.float64 for t in tensors)
    norms = (torch.linalg.vector_norm(t, dtype=d) for t, d in zip(tensors, wide, strict=True))
    return sum(float(norm) ** 2 for norm in norms)
