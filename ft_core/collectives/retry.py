"""The manager as the models see it: it comes later, and gradients survive a discarded step.

Models are prepared before there is a manager, whose state they are part of. And a raw loop can't be
asked to compute a batch again, so local gradients are kept until the step is committed: a discarded
step is tried again from them, with whoever is left, and the script does not notice.

Keeping them costs memory and no time: autograd's own tensors, which the reducer has copied to its
buckets and would let go of, live on until the vote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.collectives.allreduce import AsyncReduce
from ft_core.collectives.ops import completed
from ft_core.manager import Manager
from ft_core.process_group.work import CompletedWork
from ft_core.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Something on its way. `kept`: what `tensor` held; None: gradients, which are kept one by one."""

    tensor: Tensor
    reduce_op: ReduceOp.RedOpType
    kept: Tensor | None


@dataclass(eq=False, slots=True, weakref_slot=True)
class OptionalParameters:
    """Those of a model that a forward may leave out (`find_unused_parameters`).

    Who has used what is known with the commit: another attempt has other members. So the reducer is
    told that all were used, which gives each parameter its place in a bucket for a gradient, and
    what nobody had a gradient for is taken away afterwards (`RetryableReducer.committed`).

    Attributes:
        parameters: in the reducer's order.
        absent: those which had no gradient when backward began.
        counts: how many members have used each, as the last attempt found out; None: not asked.
    """

    parameters: list[Tensor]
    absent: list[bool] = field(default_factory=list)
    counts: Tensor | None = None
    reduced: Future[Tensor] | None = None


class RetryableReducer:
    """What `ft_core.ddp` calls in place of a `Manager`. Threads: as the manager's.

    `begin` is called at the first gradients of a backward pass, and says whether they are to be
    reduced; an error that it raises is the script's, and told when backward returns.
    """

    def __init__(self, begin: Callable[[], bool], fail: Callable[[BaseException], None]) -> None:
        self._begin, self._fail = begin, fail
        self._manager: Manager | None = None
        self._schemas: dict[str, str] = {}
        self._state_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._buckets: list[_Bucket | Callable[[], None]] = []
        self._repeats = False
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self._optional: list[OptionalParameters] = []
        self._memory: set[int] = set()
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

    def registered(self, key: str) -> Callable[[], Any] | None:
        """How the state of this key is saved; None: nobody has registered it."""
        return self._state_fns[key][1] if key in self._state_fns else None

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

    def allreduce(self, tensor: Tensor, *, reduce_op: ReduceOp.RedOpType) -> Future[Tensor]:
        """Reduce what is no gradient, and see to it that what it held can be had again."""
        if not self._reduces() or self._manager is None:
            return completed(tensor)
        if tensor.data_ptr() not in self._wires:
            self._buckets.append(_Bucket(tensor, reduce_op, tensor.clone()))
        return self._manager.allreduce(tensor, reduce_op=reduce_op)

    def start_allreduce(self, tensor: Tensor, divided_by: int = 1) -> AsyncReduce:
        """Reduce a bucket of gradients in place; they are kept one by one."""
        if not self._reduces() or self._manager is None:
            return AsyncReduce(tensor, CompletedWork(tensor))
        self._memory.add(tensor.untyped_storage().data_ptr())
        self._buckets.append(_Bucket(tensor, ReduceOp.AVG, None))
        return self._manager.start_allreduce(tensor, divided_by=divided_by)

    def _reduces(self) -> bool:
        """Whether this backward pass is to be averaged; its first gradient asks the runtime."""
        if self._reducing is None:
            self._reducing = False
            try:
                self._reducing = self._begin()
            except BaseException as error:  # in backward it would end the process with an abort
                self._fail(error)
        return self._reducing

    # ------------------------------------------------------------------ the attempt

    def is_wire(self, tensor: Tensor) -> None:
        """`tensor` is filled anew by its owner for each attempt: it needs no copy."""
        self._wires.add(tensor.data_ptr())

    def keep(self, parameter: Tensor) -> None:
        """A gradient is ready to be copied to its bucket: hold it until the step is over.

        One that is in its bucket already, since it was not set to None before backward, is copied.
        What was kept of this parameter before does not count any more.
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.untyped_storage().data_ptr() in self._memory:
            gradient = gradient.clone()
        self._gradients[id(parameter)] = (parameter, gradient)

    def keep_accumulated(self, model: OptionalParameters) -> None:
        """Before the first gradient of a backward pass is kept: the others may not come, and what
        earlier passes have left there is reduced nevertheless."""
        if any(known is model for known in self._optional):
            return
        self._optional.append(model)
        model.absent = [parameter.grad is None for parameter in model.parameters]
        model.counts = model.reduced = None
        for parameter, absent in zip(model.parameters, model.absent, strict=True):
            if not absent:
                self.keep(parameter)

    def reduce_used(self, model: OptionalParameters | None, counts: Tensor) -> Future[Tensor]:
        """Find out who has used what, and tell the reducer that everything was."""
        if model is not None and self._reduces():
            model.counts = counts.clone()
            model.reduced = self.allreduce(model.counts, reduce_op=ReduceOp.SUM)
            counts.fill_(1)
        return completed(counts)

    def sends_buffers(self, send: Callable[[], None]) -> bool:
        """A model's buffers follow its last bucket: whether they are to be sent. `send` does it
        when the step is tried again, in the same order: others may do it for the first time."""
        if self._reducing and not self._repeats:
            self._buckets.append(send)
        return bool(self._reducing)

    def is_bucket(self, gradient: Tensor) -> None:
        """`gradient` shares memory with a bucket from the beginning."""
        self._memory.add(gradient.untyped_storage().data_ptr())

    @property
    def busy(self) -> bool:
        """Gradients of a backward pass have arrived, and their step is not over."""
        return self._reducing is not None

    def again(self) -> None:
        """Reduce the kept gradients once more."""
        assert self._manager is not None
        for bucket in self._buckets:
            if not isinstance(bucket, _Bucket):
                continue
            if bucket.kept is not None:
                bucket.tensor.copy_(bucket.kept)
            else:
                bucket.tensor.zero_()  # unused parameters have no gradient, and a place
        for parameter, gradient in self._gradients.values():
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)  # which is the place in the bucket by now
        futures = []
        self._repeats = True
        for bucket in self._buckets:
            if isinstance(bucket, _Bucket):
                futures.append(self._manager.allreduce(bucket.tensor, reduce_op=bucket.reduce_op))
            else:
                bucket()
        self._repeats = False
        for future in futures:
            future.wait()

    def committed(self) -> None:
        """Gradients are as DistributedDataParallel leaves them: None stays None where no member
        has used the parameter. The optimizer tells that from zero."""
        for model in self._optional:
            if model.counts is None or model.reduced is None or not any(model.absent):
                continue
            model.reduced.wait()
            for parameter, absent, count in zip(
                model.parameters, model.absent, model.counts.tolist(), strict=True
            ):
                if absent and count == 0:
                    parameter.grad = None

    def over(self) -> None:
        """The step is committed, or given up: the kept gradients are not needed any more."""
        self._buckets.clear()
        self._gradients.clear()
        for model in self._optional:
            model.counts = model.reduced = None
        self._optional.clear()
        self._reducing = None
