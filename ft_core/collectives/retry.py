"""A discarded step is tried again from kept gradients. The one mechanism, for every integration.

    backward begins    `RetryHooks.begin` opens the step; buckets are reduced while backward runs
    backward ends      `RetryHooks.vote`; while the step is discarded: `RetryHooks.again` opens the
                       next attempt, and the members that are left reduce the kept gradients
    after backward     `.grad` holds the committed mean: unscaling, clipping and the optimizer's
                       step are local, and cannot fail any more

So user code runs once for each batch, also when a step is discarded. Every backward pass that
synchronizes is a step with a vote of its own. Passes inside `no_sync` only add to `.grad`: a window
of gradient accumulation votes at its last pass, which reduces the sum.

A further attempt must make the same collectives as the first one of the others, since Gloo ends
processes whose collectives do not match. The reducer repeats its own. What an integration reduces in
the same step before backward, its `again` repeats; or it makes that an agreement of its own
(`ft_core.collectives.agreement`), committed before backward.

Kept gradients cost memory and no time: autograd's own tensors, which torch's reducer has copied to
its buckets and would release, live until the vote. A gradient that shares memory with its bucket
(after `zero_grad(set_to_none=False)`, or accumulated there) is copied. docs/design.md says which
cases kept gradients cannot serve.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.collectives.allreduce import AsyncReduce, completed
from ft_core.process_group.work import EndedWork
from ft_core.step import GradientManager, StartedReduce, weak_if_method

T = TypeVar("T")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class RetryHooks:
    """What an integration does around a gradient step.

    Thread: the one that runs backward. On the CPU that is the loop's; on CUDA it is autograd's
    thread of the device, while the loop's waits in `backward`. Gradient mode is off. What a hook
    raises is raised by `backward`.

    Attributes:
        begin: the first gradients of a backward pass are there. Opens a step if none is open.
            False: this pass reduces nothing and there is no vote, as for an update that the peers
            have made already. A member that is only healing returns True: it contributes zeros, is
            given the mean, and votes.
        vote: backward has ended, all gradients are reduced: `Manager.should_commit`. True: the
            step is committed.
        again: the step was discarded: open the next attempt, as with `Manager.start_quorum` (and,
            with weighted means, `set_samples`), and repeat what was reduced in it before backward.
            False: the kept gradients are no longer of use, since this member has loaded
            a state other than the one on which it computed them. They are dropped, and nothing is reduced
            or voted on: if `again` has left a step open, the integration computes its batch anew
            in it. (While a state is still on its way, to be loaded at the vote, return True: the
            manager lets the member contribute zeros, and it is given the mean.)
        committed: `.grad` holds the mean.
        refused: backward ends, and `begin` or `again` has returned False.
        raised: a backward has raised whose step is about to end, discarded (`before_forward`).
        unused_hint: what to do about parameters that backward does not reach.
    """

    begin: Callable[[], bool]
    vote: Callable[[], bool]
    again: Callable[[], bool]
    committed: Callable[[], None] = _nothing
    refused: Callable[[], None] = _nothing
    raised: Callable[[], None] = _nothing
    unused_hint: str = "pass find_unused_parameters=True"


class RetryableModel(Protocol):
    """A model whose gradients are kept: `ft_core.ddp.RetryableDistributedDataParallel`, or
    `ft_core.collectives.sharded.RetryableShards`.

    Attributes:
        require_backward_grad_sync: whether the backward pass under way synchronizes.
        optional: its parameters, if a forward may leave out some.
    """

    require_backward_grad_sync: bool
    optional: OptionalParameters | None

    def unfinished(self) -> bool:
        """Whether a backward pass has not reached all parameters (yet)."""

    def forget_forward(self) -> None:
        """No backward will follow the forward passes so far."""


class CopyingModel(Protocol):
    """A model whose gradients are copied to buckets, and the means back: those of
    `ft_core.collectives.sharded.RetryableShards`. torch's reducer needs none of this: its buckets are `.grad`."""

    def end_backward(self) -> None:
        """Backward has ended: start the reductions that wait for gradients which have not come."""

    def end_step(self, committed: bool) -> None:
        """The step is over. `committed`: the mean is to be in `.grad` when this returns."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class OptionalParameters:
    """The parameters of a model of which a forward may leave out some (`find_unused_parameters`).

    Which members have used a parameter is known with the commit only: another attempt has other
    members. So torch's reducer is told that all were used, which gives each parameter a place in a
    bucket; gradients of those that no member has used are removed after the commit.

    Attributes:
        parameters: in the reducer's order.
        absent: whether each had no gradient when backward began.
        counts: how often members have used each, or had a gradient of it before, as the last attempt found
            out; None: unknown.
        reduced: done when `counts` is valid.
    """

    parameters: list[Tensor]
    absent: list[bool] = field(default_factory=list)
    counts: Tensor | None = None
    reduced: Future[Tensor] | None = None

    def begin(self) -> None:
        """A backward pass begins."""
        self.absent = [parameter.grad is None for parameter in self.parameters]
        self.counts = self.reduced = None

    def remove_unused(self) -> None:
        """Committed. None stays None where no member has used a parameter, or has had a gradient: an optimizer
        tells that from zero. A member that has just healed has none of those that a loop leaves at zero."""
        if self.counts is None or self.reduced is None or not any(self.absent):
            return
        self.reduced.wait()
        for parameter, absent, count in zip(
            self.parameters, self.absent, self.counts.tolist(), strict=True
        ):
            if absent and count == 0:
                parameter.grad = None


class KeptGradients:
    """This member's contribution to a step, until the step is over.

    An attempt reduces buckets in place, and one that breaks off leaves them undefined. So `write`
    copies from here into the buckets before each further attempt, under whatever quorum.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._bucket_memory: set[int] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def is_bucket(self, tensor: Tensor) -> None:
        """`tensor` shares memory with a bucket."""
        self._bucket_memory.add(tensor.untyped_storage().data_ptr())

    def keep(self, parameter: Tensor) -> None:
        """Hold the gradient of `parameter`, which is complete, and not in its bucket yet."""
        gradient = parameter.grad
        assert gradient is not None
        # After `forget_forward` a forward moves buckets, with the gradients that are in them.
        shared = gradient.untyped_storage().data_ptr() in self._bucket_memory
        if shared or gradient._is_view():
            gradient = gradient.clone()
        self._kept[id(parameter)] = (parameter, gradient)

    def write(self) -> None:
        """Copy what is kept into the buckets, of which `.grad` is a view by now."""
        for parameter, gradient in self._kept.values():
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class _Reduced:
    """A tensor that the step reduces. `kept`: what it held; None: gradients, kept one by one."""

    tensor: Tensor
    reduce_op: ReduceOp.RedOpType
    kept: Tensor | None

    def write(self) -> None:
        if self.kept is not None:
            self.tensor.copy_(self.kept)
        else:
            self.tensor.zero_()  # parameters without a gradient have a place, too


class RetryableReducer:
    """What `ft_core.ddp` calls in place of a `Manager`: reduces, keeps, votes and retries.

    Args:
        hooks: the integration's side of a step.
        manager: reduces gradients. None: it comes later (`attach`), as where models are prepared
            before there is a manager; until then gradients stay local.

    For a sum other than the mean over the participants (one with a constant divisor, say), a subclass has
    another `divisor` and another `reduce_bucket`; what is kept, and when, does not change.

    Thread: `attach`, `detach`, `register_...` and `before_forward` the loop's; all else the one that
    runs backward. What torch's reducer calls never raises, since that would end the process:
    `fail` remembers, and the end of backward raises.
    """

    def __init__(self, hooks: RetryHooks, manager: GradientManager | None = None) -> None:
        self._hooks, self._manager = hooks, manager
        self._registrations: dict[str, Callable[[GradientManager], None]] = {}
        self._saves: dict[str, Callable[[], Any]] = {}
        self._models: list[weakref.ref[RetryableModel]] = []
        self._copying: list[weakref.ref[CopyingModel]] = []
        self._buffers: list[weakref.WeakMethod[Callable[[], Callable[[], None]]]] = []
        self._gradients = KeptGradients()
        self._reduced: list[_Reduced | Callable[[], None]] = []
        self._optional: list[OptionalParameters] = []
        self._refilled: set[int] = set()
        self._reducing: bool | None = None
        self._retrying = False
        self._failure: BaseException | None = None
        self._ends_with = -1

    def attach(self, manager: GradientManager) -> None:
        """From now on this is the manager; before its first `start_quorum`."""
        self._manager = manager
        for register in self._registrations.values():
            register(manager)

    def detach(self) -> None:
        """The manager has shut down: gradients stay local."""
        self._manager = None

    def add_model(self, model: RetryableModel) -> None:
        """Held weakly."""
        self._models.append(weakref.ref(model))

    def copies_gradients(self, model: CopyingModel) -> None:
        """Tell `model` when a backward pass or a step has ended. Held weakly."""
        self._copying.append(weakref.ref(model))

    def has_buffers(self, keep: Callable[[], Callable[[], None]]) -> None:
        """A model has buffers (running statistics): `keep()` remembers them as forward left them, and what
        it returns puts them back. A method, weakly held."""
        self._buffers.append(weakref.WeakMethod(keep))

    def keep_buffers(self) -> Callable[[], None]:
        """Remember the buffers of all models; what is returned puts them back, after a discard has undone
        the forward."""
        kept = [keep() for known in self._buffers if (keep := known()) is not None]

        def put_back() -> None:
            for put in kept:
                put()

        return put_back

    # ------------------------------------------------------------------ what ft_core.ddp calls

    def _register(self, key: str, register: Callable[[GradientManager], None]) -> None:
        """With the manager that there is, and with each one that comes later."""
        self._registrations[key] = register
        if self._manager is not None:
            register(self._manager)

    def register_schema(self, key: str, text: str) -> None:
        """As `Manager.register_schema`, also before there is a manager."""
        self._register(f"schema {key}", lambda manager: manager.register_schema(key, text))

    def register_state_dict_fn(
        self, key: str, load: Callable[[Any], None], save: Callable[[], Any]
    ) -> None:
        """As `Manager.register_state_dict_fn`, also before there is a manager."""
        self._saves[key] = save
        self._register(
            f"state {key}", lambda manager: manager.register_state_dict_fn(key, load, save)
        )

    def registered(self, key: str) -> Callable[[], Any] | None:
        """How the state of this key is saved; None: it is not registered."""
        return self._saves.get(key)

    def register_vote_check(self, check: Callable[[], None]) -> None:
        """Ignored: a backward pass that left out parameters is an error here, not a discard."""

    def register_step_end(self, hook: Callable[[bool], None]) -> None:
        """As `Manager.register_step_end`, also before there is a manager."""
        number, known = len(self._registrations), weak_if_method(hook)

        def register(manager: GradientManager) -> None:
            if (living := known()) is not None:
                manager.register_step_end(living)

        self._register(f"step end {number}", register)

    def register_compared(self, key: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """As `Manager.register_compared`, also before there is a manager."""
        self._register(f"compared {key}", lambda manager: manager.register_compared(key, tensors))

    def errored(self) -> Exception | None:
        """As `Manager.errored`; None without a manager."""
        return None if self._manager is None else self._manager.errored()

    def report_error(self, error: Exception) -> None:
        """An error of communication discards the attempt; one of ours ends backward."""
        if self._manager is not None and self._reducing:
            self._manager.report_error(error)
        else:
            self.fail(error)

    def participating_rank(self) -> int | None:
        """Rank among the participants; None while this member contributes nothing."""
        if not self._reducing or self._manager is None:
            return None
        return self._manager.participating_rank()

    def mean_divisor(self) -> int:
        """Called with the first gradient of a backward pass, which begins a step."""
        return self.divisor if self._reduces() else 1

    def allreduce(
        self, tensor: Tensor, *, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> Future[Tensor]:
        """Reduce a tensor that is not a gradient, in place, and keep a copy of what it held."""
        if not self._reduces() or self._manager is None:
            return completed(tensor)
        if tensor.data_ptr() not in self._refilled:
            self._reduced.append(_Reduced(tensor, reduce_op, tensor.clone()))
        return self._manager.allreduce(tensor, reduce_op=reduce_op)

    def start_allreduce(self, tensor: Tensor, divided_by: int = 1) -> StartedReduce:
        """Reduce a bucket of gradients in place."""
        self._gradients.is_bucket(tensor)  # of a pass that is not reduced, too: `.grad` stays there
        if not self._reduces():
            return AsyncReduce(tensor, EndedWork(tensor))
        self._reduced.append(_Reduced(tensor, ReduceOp.AVG, None))
        return self.reduce_bucket(tensor, divided_by)

    @property
    def divisor(self) -> int:
        """What gradients are divided by while they are copied to their buckets: the participants
        as far as they are known."""
        return 1 if self._manager is None else self._manager.mean_divisor()

    def reduce_bucket(self, bucket: Tensor, divided_by: int) -> StartedReduce:
        """Start to reduce a bucket in place; `divided_by` tells how much of the division is done."""
        if self._manager is None:
            return AsyncReduce(bucket, EndedWork(bucket))
        return self._manager.start_allreduce(bucket, divided_by=divided_by)

    # ------------------------------------------------------------------ what a model calls

    @property
    def busy(self) -> bool:
        """Gradients of a backward pass have arrived, and their step is not over."""
        return self._reducing is not None

    @property
    def kept(self) -> int:
        """How many gradients are kept now."""
        return len(self._gradients)

    def before_forward(self) -> None:
        """A forward begins, or an operation of the loop's own. If the last backward raised, its step ends
        here, discarded; what a backward without a step has left (its forward was inside `no_sync`) is
        dropped."""
        if self._reducing is not None:
            if torch._C._current_graph_task_id() >= 0:
                return  # a forward inside backward
            if self._reducing and self._manager is not None:
                self._manager.report_error(RuntimeError("a backward pass raised an error"))
                self._hooks.raised()
                self._hooks.vote()
            for model in _living(self._models):
                model.forget_forward()
        self._failure = None
        if self._reducing is not None or self._gradients:
            self._over()

    def keep_gradients_of(self, model: RetryableModel, parameters: list[Tensor]) -> None:
        """Keep each gradient when it is complete, before torch's reducer copies it to its bucket.

        `parameters`: of `model`, which they do not keep alive.
        """
        its, mine = weakref.ref(model), weakref.ref(self)

        def ready(parameter: Tensor) -> None:
            model, me = its(), mine()
            if model is None or me is None or not model.require_backward_grad_sync:
                return
            if model.optional is not None:
                me._keep_accumulated(model.optional)
            me._gradients.keep(parameter)
            if me._reducing is not None:
                me._end_with_backward()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(ready)
            if parameter.grad is not None:
                self._gradients.is_bucket(parameter.grad)

    def _keep_accumulated(self, model: OptionalParameters) -> None:
        """Before the first gradient of a backward pass: the others may not come, and what earlier
        passes have accumulated there is reduced nevertheless."""
        if any(known is model for known in self._optional):
            return
        self._optional.append(model)
        model.begin()
        for parameter, absent in zip(model.parameters, model.absent, strict=True):
            if not absent:
                self._gradients.keep(parameter)

    def reduce_used(self, model: OptionalParameters | None, counts: Tensor) -> Future[Tensor]:
        """Find out which parameters were used, and tell torch's reducer that all were."""
        if model is not None and self._reduces():
            absent = torch.tensor(model.absent, device=counts.device)
            model.counts = counts + ~absent
            model.reduced = self.allreduce(model.counts, reduce_op=ReduceOp.SUM)
            counts.fill_(1)
        return completed(counts)

    def is_refilled(self, tensor: Tensor) -> None:
        """Its owner fills `tensor` anew for each attempt, so it needs no copy."""
        self._refilled.add(tensor.data_ptr())

    def sends_buffers(self, send: Callable[[], None]) -> bool:
        """A model's buffers follow its last bucket: whether they are to be sent. A further attempt
        calls `send`, at the same place in the order: other members may be in their first attempt."""
        if self._reducing and not self._retrying:
            self._reduced.append(send)
        return bool(self._reducing)

    def reduces(self) -> bool:
        """A gradient of this backward pass is complete. Whether it is to be reduced; opens a step if none
        is open, and ends it with this pass."""
        reduces = self._reduces()
        self._end_with_backward()
        return reduces

    def reduce_in_order(self, start: Callable[[], None]) -> None:
        """`start()` copies gradients that are complete, and starts to reduce the copy
        (`reduce_bucket`). It is called for each attempt, in the order of the first one. The vote waits
        for what it has started."""
        self._reduced.append(start)
        start()

    # ------------------------------------------------------------------ the step

    def fail(self, error: BaseException) -> None:
        """Have backward raise `error` at its end; the first one counts."""
        if self._failure is None:
            self._failure = error

    def check_complete(self) -> None:
        """Raises RuntimeError if a backward pass has left out parameters."""
        if self._incomplete():
            raise RuntimeError(
                "backward did not reach all parameters, so that gradients are missing: "
                f"{self._hooks.unused_hint}"
            )

    def _reduces(self) -> bool:
        """Whether this backward pass is reduced; its first gradient asks the integration."""
        if self._reducing is None:
            self._reducing = False
            self._end_with_backward()
            try:
                self._reducing = self._hooks.begin()
            except BaseException as error:
                self.fail(error)
        return self._reducing

    def _end_with_backward(self) -> None:
        """Have `_finish` called when this backward has ended, also if an inner one (of reentrant
        activation checkpointing) brought the first gradients."""
        backward = torch._C._current_graph_task_id()
        if backward != self._ends_with:
            self._ends_with = backward
            Variable._execution_engine.queue_callback(self._after_reducer)

    def _after_reducer(self) -> None:
        # By now torch's reducer has queued its callback, which waits for the buckets.
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Backward has ended: vote, and try again until the step is committed."""
        if self._reducing is None:
            return  # an inner backward has finished the step
        inner = torch._C._current_autograd_node() is not None
        if inner and self._failure is None and self._incomplete():
            return
        committed = False
        try:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._reducing:
                self.check_complete()
                for copying in _living(self._copying):
                    copying.end_backward()
            committed = self._reducing and self._commit()
            if committed:
                for copying in _living(self._copying):
                    copying.end_step(True)
                for optional in self._optional:
                    optional.remove_unused()
                self._hooks.committed()
            else:
                self._hooks.refused()
        finally:
            self._over(committed=committed)

    def _commit(self) -> bool:
        """Vote until the step is committed; False: the kept gradients are no longer of use."""
        put_back = self.keep_buffers()
        while not self._hooks.vote():
            if not self._hooks.again():
                return False
            put_back()
            self._reduce_again()
        return True

    def _reduce_again(self) -> None:
        """Reduce the kept gradients once more, in the order of the first attempt."""
        for each in self._reduced:
            if isinstance(each, _Reduced):
                each.write()
        self._gradients.write()
        started: list[StartedReduce | Future[Tensor]] = []
        self._retrying = True
        for each in self._reduced:
            if not isinstance(each, _Reduced):
                each()  # its gradients are in no bucket, or it keeps what it sends
            elif each.kept is None:
                started.append(self.reduce_bucket(each.tensor, 1))
            elif self._manager is not None:
                started.append(self._manager.allreduce(each.tensor, reduce_op=each.reduce_op))
        self._retrying = False
        for one in started:
            one.wait()

    def _incomplete(self) -> bool:
        return any(model.unfinished() for model in _living(self._models))

    def _over(self, *, committed: bool = False) -> None:
        """The step is committed, or given up: the kept gradients are no longer needed."""
        self._reduced.clear()
        self._gradients.clear()
        if not committed:  # else the models know
            for copying in _living(self._copying):
                copying.end_step(False)
        for optional in self._optional:
            optional.counts = optional.reduced = None
        self._optional.clear()
        self._reducing, self._ends_with = None, -1


def _living(known: list[weakref.ref[T]]) -> list[T]:
    return [it for ref in known if (it := ref()) is not None]


# ---------------------------------------------------------------- for a process that needs its peers'


def copies_of_gradients(
    parameters: Iterable[Tensor], *, but: Container[int] = ()
) -> list[Tensor | None]:
    """Copies of their gradients, in their order; None: there is none, or the parameter's `id` is in `but`."""
    return [None if p.grad is None or id(p) in but else p.grad.detach().clone() for p in parameters]


def put_gradients(parameters: Iterable[Tensor], values: Iterable[Tensor | None]) -> None:
    """Let their gradients be copies of `values`. Raises ValueError if there are not as many."""
    for parameter, value in zip(parameters, values, strict=True):
        if value is None or parameter.grad is None:
            parameter.grad = None if value is None else value.clone()
        else:
            parameter.grad.copy_(value)  # it may share memory with a bucket
