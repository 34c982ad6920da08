"""The manager as the models see it: it may be replaced, and gradients survive a discarded step.

A process that comes back may leave the quorum and join it again while its script catches up, each
time with a new manager; models are prepared once. And a raw loop can't be asked to compute a batch
again, so each bucket's local gradients are kept until the step is committed: a discarded step is
tried again from them, with whoever is left, and the script does not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.allreduce import completed
from ft_core.manager import Manager
from ft_core.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients on their way. `kept`: what `tensor` held, divided by `divided_by` already."""

    tensor: Tensor
    reduce_op: ReduceOp.RedOpType
    divided_by: int
    kept: Tensor


class Gate:
    """What `ft_core.ddp` calls in place of a `Manager`. Threads: as the manager's.

    `begin` is called at the first gradients of a backward pass, and says whether they are to be
    reduced; an error that it raises is the script's, and told when backward returns.
    """

    def __init__(self, begin: Callable[[], bool], fail: Callable[[Exception], None]) -> None:
        self._begin, self._fail = begin, fail
        self._manager: Manager | None = None
        self._schemas: dict[str, str] = {}
        self._state_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._buckets: list[_Bucket] = []
        self._spare: dict[int, Tensor] = {}
        self._wires: set[int] = set()
        self._reducing: bool | None = None
        self.telemetry = Telemetry()
        self.vote_checks: list[Callable[[], None]] = []

    def attach(self, manager: Manager) -> None:
        """From now on this is the manager; before its first `start_quorum`."""
        self._manager = manager
        manager.telemetry = self.telemetry
        for key, text in self._schemas.items():
            manager.register_schema(key, text)
        for key, (load, save) in self._state_fns.items():
            manager.register_state_dict_fn(key, load, save)

    def detach(self) -> None:
        self._manager = None

    # ------------------------------------------------------------------ what ft_core.ddp calls

    def register_schema(self, key: str, text: str) -> None:
        self._schemas[key] = text
        if self._manager is not None:
            self._manager.register_schema(key, text)

    def register_state_dict_fn(
        self, key: str, load: Callable[[Any], None], save: Callable[[], Any]
    ) -> None:
        self._state_fns[key] = (load, save)
        if self._manager is not None:
            self._manager.register_state_dict_fn(key, load, save)

    def register_vote_check(self, check: Callable[[], None]) -> None:
        self.vote_checks.append(check)

    def errored(self) -> Exception | None:
        return None if self._manager is None else self._manager.errored()

    def report_error(self, error: Exception) -> None:
        """An error of communication discards the attempt; one of ours ends backward."""
        if self._manager is not None and self._reducing:
            self._manager.report_error(error)
        else:
            self._fail(error)

    def participating_rank(self) -> int | None:
        """Rank among the participants; None while this group contributes nothing."""
        if not self._reducing or self._manager is None:
            return None
        return self._manager.participating_rank()

    def mean_divisor(self) -> int:
        """Asked with the first gradient of a backward pass: here its step begins."""
        return self._manager.mean_divisor() if self._reduces() and self._manager else 1

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
        divided_by: int = 1,
    ) -> Future[Tensor]:
        """Reduce a bucket in place, and keep what it held."""
        if not self._reduces() or self._manager is None:
            return completed(tensor)
        if tensor.data_ptr() not in self._wires:
            self._buckets.append(_Bucket(tensor, reduce_op, divided_by, self._kept(tensor)))
        return self._manager.allreduce(tensor, reduce_op=reduce_op, divided_by=divided_by)

    def _reduces(self) -> bool:
        """Whether this backward pass is to be averaged; its first gradient asks the runtime."""
        if self._reducing is None:
            self._reducing = False
            try:
                self._reducing = self._begin()
            except Exception as error:  # in backward it would end the process
                self._fail(error)
        return self._reducing

    # ------------------------------------------------------------------ the attempt

    def is_wire(self, tensor: Tensor) -> None:
        """`tensor` is filled anew by its owner for each attempt: it needs no copy."""
        self._wires.add(tensor.data_ptr())

    @property
    def busy(self) -> bool:
        """Gradients of a backward pass have arrived, and their step is not over."""
        return self._reducing is not None

    def again(self) -> None:
        """Reduce the kept gradients once more."""
        assert self._manager is not None
        futures = []
        for bucket in self._buckets:
            bucket.tensor.copy_(bucket.kept)
            futures.append(
                self._manager.allreduce(
                    bucket.tensor, reduce_op=bucket.reduce_op, divided_by=bucket.divided_by
                )
            )
        for future in futures:
            future.wait()

    def over(self) -> None:
        """The step is committed, or given up: the kept gradients are not needed any more."""
        self._buckets.clear()
        self._reducing = None

    def _kept(self, tensor: Tensor) -> Tensor:
        """A copy, in memory that the last step's copy of this bucket used."""
        spare = self._spare.get(tensor.data_ptr())
        if spare is None or spare.shape != tensor.shape or spare.dtype != tensor.dtype:
            spare = torch.empty_like(tensor)
            self._spare[tensor.data_ptr()] = spare
        spare.copy_(tensor)
        return spare
