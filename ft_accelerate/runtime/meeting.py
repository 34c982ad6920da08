"""One meeting of LocalSGD or DiLoCo: what each process brings becomes the mean over the quorum.

A meeting is an operation of `Runtime`: voted on, and tried again with whoever is left. It may be
begun some steps before its result is needed (`launch`): then its values travel while the script
trains on, in the attempt that is open between two meetings anyhow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_accelerate.runtime.checked_collectives import CheckedCollectives, Kind
from ft_accelerate.runtime.runtime import Runtime
from ft_core.attempts import participation_of
from ft_core.collectives.codecs import Codec
from ft_core.collectives.quantized import Reduction, reduce_quantized
from ft_core.diloco.fragments import DEFAULT_BUCKET_BYTES, Flat


class Meeting:
    """See the module's docstring. Thread: the script's.

    Args:
        values: what travels as `codec` says; they are read when they are sent (again).
        exact: what travels as it is.
        settings: what must be equal in all processes, for a person to read.
        residuals: flat fp32, one a bucket of `values`: what the codec lost before; None: error
            feedback begins; without `error_feedback` not used.
        bucket_bytes: of one all-reduce.
    """

    def __init__(
        self,
        runtime: Runtime,
        values: Sequence[Tensor],
        exact: Sequence[Tensor] = (),
        *,
        settings: str,
        codec: Codec | None = None,
        error_feedback: bool = False,
        residuals: Sequence[Tensor] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._runtime, self._settings = runtime, settings
        self._values, self._exact = list(values), list(exact)
        self._codec, self._feedback, self._residuals = codec, error_feedback, residuals
        self._bucket_bytes = bucket_bytes
        self._sent: _Sent | None = None
        self._sent_in = 0
        self._last: _Sent | None = None

    def launch(self) -> None:
        """Send what there is now; `means` waits for it. All processes launch at the same place."""
        self._sent_in = self._runtime.attempts_discarded
        self._sent = self._runtime.begin_early(Kind.PARAMETERS, self._send)

    def means(self) -> list[Tensor] | None:
        """Of `values` and then of `exact`, committed; None where this process only passes by."""
        found: list[Tensor] | None = self._runtime.operation(
            Kind.PARAMETERS, self._attempt, lambda: None, keep=False
        )
        return found

    def lost(self) -> list[Tensor] | None:
        """The next meeting's `residuals`, once `means` are there; None: nothing is known."""
        jobs = [] if self._last is None else self._last.jobs
        left = [job.next_residual for job in jobs if job.next_residual is not None]
        return left if left and len(left) == len(jobs) else None

    def _attempt(
        self, collectives: CheckedCollectives, agree: Callable[..., Any]
    ) -> list[Tensor] | None:
        sent, self._sent = self._sent, None
        if sent is None or self._sent_in != self._runtime.attempts_discarded:
            sent = self._send(collectives, agree)
        self._last = sent
        return None if sent is None else sent.wait()

    def _send(self, collectives: CheckedCollectives, agree: Callable[..., Any]) -> _Sent | None:
        said = agree(self._fingerprint())
        if said is None:
            return None
        if len({s[2] for s in said if s is not None}) > 1:
            raise ValueError(
                "the replica groups meet with different settings or models, this one with "
                f"{self._settings}: start all of them with the same script and options"
            )
        return _Sent(
            collectives, self._values, self._exact, self._codec, self._first_residuals,
            self._bucket_bytes,
        )  # fmt: skip

    def _first_residuals(self, buckets: Sequence[Tensor]) -> list[Tensor | None]:
        if not self._feedback:
            return [None] * len(buckets)
        return list(self._residuals or [b.new_zeros(b.shape).float() for b in buckets])

    def _fingerprint(self) -> int:
        """Of what all must have in common, so that no two collectives of different sizes meet."""
        shapes = [(t.numel(), str(t.dtype)) for t in (*self._values, *self._exact)]
        text = repr((self._settings, self._bucket_bytes, len(self._values), shapes))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


class _Sent:
    """Values on their way in one attempt."""

    def __init__(
        self,
        collectives: CheckedCollectives,
        values: Sequence[Tensor],
        exact: Sequence[Tensor],
        codec: Codec | None,
        residuals: Callable[[Sequence[Tensor]], list[Tensor | None]],
        bucket_bytes: int,
    ) -> None:
        manager = collectives.manager
        part = participation_of(manager)
        self._coded = codec is not None
        self._participants = part.participants
        self._flats = [_laid_out(values, bucket_bytes), _laid_out(exact, bucket_bytes)]
        self._futures: list[Future[Any]] = []
        self.jobs: list[Reduction] = []
        for flat in self._flats[self._coded :]:
            for bucket in flat.buckets():
                self._futures.append(manager.allreduce(bucket, reduce_op=ReduceOp.AVG))
        if codec is not None:
            buckets = self._flats[0].buckets()
            jobs = self.jobs = [
                Reduction(b, r) for b, r in zip(buckets, residuals(buckets), strict=True)
            ]
            self._futures.append(
                manager.step.queue.submit(lambda pg: reduce_quantized(pg, codec, jobs, part))
            )

    def wait(self) -> list[Tensor]:
        """The means; undefined if the attempt has failed."""
        for future in self._futures:
            future.wait()
        if self._coded:
            for view in self._flats[0].views:
                view.div_(self._participants)
        return [view for flat in self._flats for view in flat.views]


def _laid_out(tensors: Sequence[Tensor], bucket_bytes: int) -> Flat:
    flat = Flat(tensors, bucket_bytes)
    for view, tensor in zip(flat.views, tensors, strict=True):
        view.copy_(tensor.detach())
    return flat
