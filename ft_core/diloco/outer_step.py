"""One outer step of one fragment: what is sent, and what its mean makes of the model.

`OuterStep` is the algorithm (the parameters' mean, or a step of an outer optimizer). It does not know
when a fragment is due or whether its step commits: that is its driver's. There are two:
`ft_core.diloco.outer_loop` (a step of a manager, around a training loop's inner steps) and
`ft_accelerate.runtime.periodic` (an operation of an Accelerate script). `OuterReduce` is a fragment on
its way between the two calls.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.diloco.fragments import Flat, Fragment, SentForm, persistent_buffers
from ft_core.diloco.global_state import GlobalState

if TYPE_CHECKING:
    from ft_core.manager import Manager


_AVERAGED = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""Of buffers: those that every backend sums and torch divides. float8 and complex32 travel as bytes."""


@dataclass(slots=True)
class OuterStats:
    """Sums since the start of this process; any thread may read.

    Attributes:
        committed, discarded: outer steps (of one fragment each).
        void: windows of this member that were dropped because they were bad.
        bytes_sent: by this member, for outer steps.
        communication_s: from each launch until its collectives were over.
        hidden_s: how much of that had passed when the training loop began to wait for them.
        divergence: of the last committed outer step: the root mean square, over the participants,
            of the distance between their parameters and the mean of those (Euclidean norm).
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
    """The communication of one outer step, from launch to apply. Thread: the training loop's.

    Attributes:
        values: this member's weighted values; once the collectives are over, the participants' sum.
        meta: fp64: the sum of weights, and of weighted squared norms of the pseudo-gradients.
        measured: whether the squared norm was given, so that the divergence is known.
        means: buffers of `_AVERAGED`, weighted like `values`.
        others: the bytes of all other buffers.
        futures: of all collectives. None ever fails: `Manager.errored` has the error.
        quantized: one `Reduction` per bucket, where values travel by a codec.
    """

    fragment: Fragment
    values: Flat
    meta: Tensor
    measured: bool
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
        *,
        weight: float,
        squared: float | None,
        bucket_bytes: int,
        stats: OuterStats,
        encodes: bool,
    ) -> OuterReduce:
        """Lay out `contribution` times `weight`. With weight 0 its values do not matter. Values to be
        encoded stay on their device until then."""
        wire = _wire_device(manager)
        values = Flat(contribution, bucket_bytes, None if encodes else wire)
        _fill(values, contribution, weight)
        device = wire or next(iter(values.parts.values())).device
        meta = torch.tensor([weight, weight * (squared or 0.0)], dtype=torch.float64, device=device)
        made = cls(fragment, values, meta, squared is not None, stats)
        made.send(manager, meta)
        return made

    @property
    def weight_sum(self) -> float:
        """What the participants' weights add up to, once the collectives are over."""
        return float(self.meta[0])

    def send(self, manager: Manager, tensor: Tensor) -> None:
        """Start the plain sum of a tensor, in place."""
        self.futures.append(manager.allreduce(tensor, reduce_op=ReduceOp.SUM))
        members = manager.step.participation().replica_world_size
        self.stats.bytes_sent += 2 * (members - 1) * tensor.nbytes // members

    @torch.no_grad()
    def send_buffers(
        self, manager: Manager, buffers: Sequence[Tensor], weight: float, bucket_bytes: int
    ) -> None:
        """Buffers of `_AVERAGED` are averaged like parameters; of others the first participant's count."""
        device = _wire_device(manager)
        floating = [b for b in buffers if b.dtype in _AVERAGED]
        others = [b for b in buffers if b.dtype not in _AVERAGED]
        if floating:
            self.means = Flat(floating, bucket_bytes, device)
            _fill(self.means, floating, weight)
            for bucket in self.means.buckets():
                self.send(manager, bucket)
        if others:
            # A sum to which all but one member add zeros: exact for every dtype.
            joined = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in others])
            self.others = joined.to(device or joined.device)
            if manager.step.participation().rank != 0:
                self.others.zero_()
            self.send(manager, self.others)

    @torch.no_grad()
    def take_buffers(self, buffers: Sequence[Tensor]) -> bool:
        """Put what arrived into `buffers`. Returns whether buffers had been sent."""
        if self.means is not None:
            floating = [b for b in buffers if b.dtype in _AVERAGED]
            for buffer, view in zip(floating, self.means.views, strict=True):
                buffer.copy_(view.div_(self.weight_sum))
        if self.others is not None:
            start = 0
            for buffer in (b for b in buffers if b.dtype not in _AVERAGED):
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
        asked_s = time.monotonic()
        for future in self.futures:
            future.wait()
        self.stats.communication_s += max(0.0, self.ended_s - self.began_s)
        self.stats.hidden_s += max(0.0, min(asked_s, self.ended_s) - self.began_s)

    def _mark_end(self, _: Future[Any]) -> None:
        self.ended_s = max(self.ended_s, time.monotonic())


class OuterStep(ABC):
    """What an outer step does to a fragment. See the module's docstring.

    Attributes:
        encodes: whether values travel by a codec.
        form: of what travels. A driver checks it before an outer step's first computation.

    Args:
        model: its persistent buffers travel with the last fragment, once a window.
        fragments: of the model's trainable parameters.
        state: the global parameters; None: the algorithm needs none and none are kept.
        bucket_bytes: of one all-reduce.

    Raises ValueError. Thread: the training loop's.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        state: GlobalState | None,
        bucket_bytes: int,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self.model, self.fragments, self.state = model, list(fragments), state
        self.bucket_bytes = bucket_bytes
        self.form = SentForm(self.fragments, model)
        self.stats = OuterStats()
        self.encodes = False

    @abstractmethod
    def contribution(self, fragment: Fragment, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this member gives to the mean, for each parameter. `deltas`: global minus local."""

    @abstractmethod
    def mean_deltas(self, fragment: Fragment, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """The mean pseudo-gradient that the means of the contributions amount to."""

    @abstractmethod
    def update(self, fragment: Fragment, means: Sequence[Tensor]) -> None:
        """Make `means` of the contributions the fragment's new parameters, global ones too."""

    def is_last(self, fragment: Fragment) -> bool:
        """Whether this is the window's last fragment, with which the buffers travel."""
        return fragment.index == len(self.fragments) - 1

    def launch(
        self,
        manager: Manager,
        fragment: Fragment,
        deltas: Sequence[Tensor],
        *,
        weight: float = 1.0,
        squared: float | None = None,
    ) -> OuterReduce:
        """Send a fragment, in a step of `manager` that is bound to its quorum.

        `deltas`: this member's pseudo-gradients. `weight`: its share of the mean (0: none).
        `squared`: the squared norm of `deltas`, for the divergence; all members give it or none.
        """
        sent = OuterReduce.of(
            manager,
            fragment,
            self.contribution(fragment, deltas),
            weight=weight,
            squared=squared,
            bucket_bytes=self.bucket_bytes,
            stats=self.stats,
            encodes=self.encodes,
        )
        if self.is_last(fragment):
            sent.send_buffers(manager, self._buffers(), weight, self.bucket_bytes)
        self.send_values(manager, sent, weight)
        sent.watch()
        return sent

    def send_values(self, manager: Manager, sent: OuterReduce, weight: float) -> None:
        """Start the reduction of `sent.values`."""
        for bucket in sent.values.buckets():
            sent.send(manager, bucket)

    def finish(self, sent: OuterReduce) -> None:
        """The outer step was committed: the same computation in all members."""
        total = sent.weight_sum
        means = [view.div_(total) for view in sent.values.views]
        if sent.measured:
            spread = float(sent.meta[1]) / total
            spread -= squared_norm(self.mean_deltas(sent.fragment, means))
            self.stats.divergence = math.sqrt(max(0.0, spread))
        self.update(sent.fragment, means)
        if sent.take_buffers(self._buffers()) and self.state is not None:
            self.state.take_buffers()

    def forget(self) -> None:
        """The state was replaced by a peer's: nothing of this member's past applies to it."""
        return

    def _buffers(self) -> list[Tensor]:
        return list(persistent_buffers(self.model).values())


def _fill(flat: Flat, tensors: Sequence[Tensor], weight: float) -> None:
    for view, tensor in zip(flat.views, tensors, strict=True):
        if weight:
            view.copy_(tensor)
            if weight != 1.0:
                view.mul_(weight)


def _wire_device(manager: Manager) -> torch.device | None:
    """Where values must lie to travel; None: where they are."""
    return torch.device("cpu") if "gloo" in manager.step.group.getBackendName() else None


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all of them together, summed in double precision."""
    wide = (torch.complex128 if t.is_complex() else torch.float64 for t in tensors)
    norms = (torch.linalg.vector_norm(t, dtype=d) for t, d in zip(tensors, wide, strict=True))
    return sum(float(norm) ** 2 for norm in norms)
