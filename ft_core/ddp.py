"""DistributedDataParallel over replica groups that join and leave.

Bucket layout. torch's reducer starts with one bucket and regroups after the first step by the order in which
gradients arrived. Members must agree on the layout, and one that restarted is in its first step while the others
are not; so the layout is fixed at construction: parameters in reverse order of registration, which is about the
order in which gradients arrive, the first bucket small. That is the layout which torch ends up with for models that
use their layers in order, and unlike `find_unused_parameters=True` (which also stops the regrouping) it costs
nothing per step.

Communication. The reducer is given a process group of ours (`_Reduction`), not a communication hook.
With a hook it copies gradients into their bucket and leaves the division to the hook, which costs
another pass over memory. Without one it divides while it copies, by the size of the group.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ReduceOp
from torch.futures import Future
from torch.nn import parallel
from torch.nn.parallel.distributed import _find_tensors

from ft_core.collectives.allreduce import check_devices, completed, work_of
from ft_core.collectives.buffers import SharedBuffers
from ft_core.collectives.retry import OptionalParameters, RetryableReducer
from ft_core.optimizer import WrappedModel
from ft_core.process_group.torch_versions import ddp_arguments, ddp_without_buffers
from ft_core.step import GradientManager, StartedReduce, new_part

log = logging.getLogger("ft_core")

_FILLING = threading.Lock()
_REFUSED = {
    "process_group": "the manager's process group is used",
    "device_mesh": "the manager's process group is used",
    "static_graph": "its first step has other collectives, and a restarted replica is in its first"
    " step when the others are not: leave it out, or set find_unused_parameters=True if parameters get"
    " no gradients",
    "mixed_precision": "use torch.autocast",
    "delay_all_reduce_named_params": "gradients are reduced during backward",
    "param_to_hook_all_reduce": "gradients are reduced during backward",
    "init_sync": "the manager syncs members when they join",
}


def refuse_arguments(given: Mapping[str, Any], *also: str) -> None:
    """Raise ValueError, in one sentence, for arguments of DistributedDataParallel that do not exist or
    cannot work, before there is a module to wrap. `also`: further names to accept."""
    for name, why in _REFUSED.items():
        if given.get(name) not in (None, False):
            raise ValueError(f"{name} is not available with fault tolerance: {why}")
    known = [*ddp_arguments(), *also]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, set(known) - set(_REFUSED), 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ValueError(f"there is no argument {name}{hint}")


def _copied(model: Any, memo: dict[int, Any]) -> nn.Module:
    """For weights that a script keeps (an average, the best so far): wrapped as `model` is, and nobody averages it."""
    wrapper = parallel.DataParallel.__new__(parallel.DataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module, wrapper.device_ids = copy.deepcopy(model.module, memo), []
    return wrapper


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel whose gradients are averaged by a `Manager`.

    Wrap the module once, before the first `manager.start_quorum()`. Starting weights need not be equal: the manager
    brings members to one state (`init_sync`).

    Args:
        manager: averages each bucket over the participants while backward runs.
        module: as torch's. All replica groups must have the same parameters: checked when they join.
        kwargs: as torch's, with these differences. `gradient_as_bucket_view` is True by default.
            `find_unused_parameters=True` is needed if a forward may leave out a parameter; one more small
            collective then tells which were used by any member. `forward_sync_buffers` (or `broadcast_buffers`)
            False leaves buffers such as running statistics to each replica group; by default they follow the first
            participant, and are set back when a step is discarded. `static_graph`, `mixed_precision`,
            `process_group` and others that cannot work are a ValueError.

    Each backward is averaged, also several after one forward, where torch's averages the first only (with
    `find_unused_parameters`, such a step is not committed). A step whose backward did not reach every parameter is
    not committed (unless `find_unused_parameters`). Backward raises no error of communication: `manager.errored`
    returns it, and `should_commit` votes no.

    Raises ValueError for arguments that cannot work and for sparse gradients, RuntimeError if this torch cannot
    fix the layout of its buckets. Thread: the training loop's; autograd's threads reduce.
    """

    __deepcopy__ = _copied

    def __init__(self, manager: GradientManager, module: nn.Module, **kwargs: Any) -> None:
        refuse_arguments(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _REFUSED}
        buffers_follow = kwargs.pop("forward_sync_buffers", None)
        old_name = kwargs.pop("broadcast_buffers", None)
        if buffers_follow is None:
            buffers_follow = True if old_name is None else old_name
        check_devices(module.parameters())
        # Sharing memory with the buckets saves the pass over memory that copies gradients back.
        kwargs.setdefault("gradient_as_bucket_view", True)
        reduction = _Reduction(manager)
        super().__init__(
            module,
            process_group=reduction,
            init_sync=False,
            **ddp_without_buffers(),
            **kwargs,
        )
        self._manager, self._wrapped = manager, WrappedModel(manager, module)
        never_compile(__package__)
        if not self.find_unused_parameters:
            self._freeze_buckets()
        key = new_part(manager, "module")
        manager.register_schema(key, describe(module))
        self._shared = SharedBuffers(
            manager,
            module if buffers_follow else nn.Module(),
            key=f"{key}.buffers",
            ignored=set(self.parameters_to_ignore),
        )
        self._shares = bool(self._shared)
        reduction.begin_with(self._trained_values(), self._shared)
        manager.register_vote_check(reduction.before_vote)
        manager.register_step_end(reduction.step_over)
        me = weakref.ref(self)

        def compared() -> list[Tensor]:
            model = me()
            return [] if model is None else model._compared_parameters()

        manager.register_compared(key, compared)
        self._reduction = reduction

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. In training it first remembers the buffers, for a discard."""
        awaits = torch.is_grad_enabled() and self.require_backward_grad_sync
        if awaits:
            self._forget_what_was_cut_short()
        self._wrapped.is_called |= torch.is_grad_enabled()
        if self._shares and self.training and torch.is_grad_enabled():
            self._shared.begin()
        outputs = super().forward(*inputs, **kwargs)
        if awaits:
            self._reduction.finished = False
            self._hear_of_backwards(outputs)
        return outputs

    def _hear_of_backwards(self, outputs: Any) -> None:
        """Have each backward through `outputs` averaged. torch's reducer awaits one, and would leave the gradients
        of a second one (`retain_graph`, or of an earlier forward) as they are in this process."""
        me = weakref.ref(self)

        def backward_begins(_: Tensor) -> None:
            model = me()
            if model is not None and model._reduction.finished:
                model._await_another_backward()

        for output in _find_tensors(outputs):
            if output.grad_fn is not None:
                output.register_hook(backward_begins)

    def _await_another_backward(self) -> None:
        self._reduction.finished = False
        if self.find_unused_parameters:  # torch would look for them in outputs that may be gone
            self._refuse_another_backward(
                RuntimeError(
                    "a second backward since the last forward is not averaged with "
                    "find_unused_parameters=True: add the losses, and call backward once"
                )
            )
        else:
            self.reducer.prepare_for_backward([])

    def _refuse_another_backward(self, error: RuntimeError) -> None:
        self._manager.report_error(error)

    def forget_forward(self) -> None:
        """Declare that no backward will follow the forward passes so far. Otherwise torch's reducer would wait for
        one, and reduce in the next `no_sync`, in which other members reduce nothing."""
        self.reducer._reset_state()
        if not self.find_unused_parameters:
            self._freeze_buckets()  # it would regroup, in this member alone

    def _forget_what_was_cut_short(self) -> None:
        """A backward that has raised leaves torch's reducer in the middle of its work. One that has come to its end
        without some parameters does, too: then torch's own error, which says so, follows."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            if self._reduction.was_cut_short():
                self.forget_forward()

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Raises NotImplementedError: a hook would reduce in place of the manager."""
        raise NotImplementedError(
            "communication hooks are not available with fault tolerance: the manager reduces "
            "gradients; change them before (parameter hooks) or after (the optimizer's pre-hook)"
        )

    def join_hook(self, **kwargs: Any) -> Any:
        """For `join()` and torch's `Join`. Raises NotImplementedError: a replica group that runs out of data leaves the quorum."""
        raise NotImplementedError(
            "join() is not available with fault tolerance: give all replica groups the same "
            "number of batches, or let one leave with manager.shutdown()"
        )

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        if any(sparse):
            raise ValueError("sparse gradients can't be averaged here: use sparse=False")
        if self.find_unused_parameters:
            return parameters, sparse  # torch reverses the buckets itself in this mode
        return parameters[::-1], sparse

    def _trained_values(self) -> int:
        """Values in all buckets together, in which a complex one is two."""
        ignored = set(self.parameters_to_ignore)
        parameters = {p for n, p in self.module.named_parameters() if n not in ignored}
        return sum(p.numel() * (1 + p.is_complex()) for p in parameters if p.requires_grad)

    def _compared_parameters(self) -> list[Tensor]:
        """Those that are equal in all members."""
        ignored = set(self.parameters_to_ignore)
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    def _freeze_buckets(self) -> None:
        """Regroup now and never again. See the module's docstring."""
        self.reducer._push_all_rebuilt_params()
        with _touched_memory():
            frozen = self.reducer._rebuild_buckets()
        if not frozen:
            advice = "at construction: pass find_unused_parameters=True, and report this"
            raise RuntimeError(f"torch {torch.__version__} does not fix the bucket layout {advice}")
        self._has_rebuilt_buckets = True


class RetryableDistributedDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` whose gradients are kept until their step is committed.

    Each backward pass that synchronizes ends with a vote, and a discarded step is tried again before backward
    returns: see `ft_core.collectives.retry`. Buffers (running statistics) follow: a further attempt begins with
    those that this member's forward has left.

    Args:
        reducer: reduces, votes and retries. Several models may share it.
        module, kwargs: as `DistributedDataParallel`'s; `gradient_as_bucket_view` is always True,
            since a further attempt writes kept gradients through `.grad` into the buckets.
    """

    def __init__(self, reducer: RetryableReducer, module: nn.Module, **kwargs: Any) -> None:
        kwargs["gradient_as_bucket_view"] = True
        super().__init__(reducer, module, **kwargs)
        self._retry = reducer
        self.optional: OptionalParameters | None = None
        reducer.add_model(self)
        if self._shared:
            reducer.has_buffers(self._keep_buffers)
            reducer.is_refilled(self._shared.wire)
            send = weakref.WeakMethod(self._shared.send)

            def before_send() -> bool:
                again = send()
                return again is not None and reducer.sends_buffers(again)

            self._shared.before_send = before_send
        if self.find_unused_parameters:
            parameters, _ = self._build_params_for_reducer()
            self.optional = OptionalParameters(parameters)
            optional = weakref.ref(self.optional)
            self._reduction.reduce_used = lambda counts: reducer.reduce_used(optional(), counts)
        named, ignored = self.module.named_parameters(), set(self.parameters_to_ignore)
        reducer.keep_gradients_of(
            self, [p for name, p in named if p.requires_grad and name not in ignored]
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. If the last backward raised, its step is discarded first."""
        self._retry.before_forward()
        return super().forward(*inputs, **kwargs)

    def _refuse_another_backward(self, error: RuntimeError) -> None:
        """Raised by it: the first one's step is committed, so there may be none to discard."""
        raise error

    def unfinished(self) -> bool:
        """Whether a backward pass has left out parameters, so that some gradients are not averaged."""
        return self._reduction.unsent > 0

    def _keep_buffers(self) -> Callable[[], None]:
        kept = [buffer.detach().clone() for buffer in self._shared.tensors()]

        def put_back() -> None:
            for buffer, value in zip(self._shared.tensors(), kept, strict=True):
                buffer.data.copy_(value)  # `data`: see `ft_core.ddp`

        return put_back


@contextmanager
def _touched_memory() -> Iterator[None]:
    """Have torch fill what it allocates (`torch.utils.deterministic.fill_uninitialized_memory`).

    Else the kernel would map the buckets' memory in the first backward, while the peers of a
    process that joins a running job wait for it (up to 1 s for 336 MiB).
    """
    with _FILLING:  # the setting is global to the process
        before = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        # Called by torch.use_deterministic_algorithms, which also imports inductor (0.9 s).
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warns)


class _Reduction(dist.ProcessGroup):
    """The process group that torch's reducer is given. Its size is what gradients are divided by.

    Notices a backward pass that left out a bucket before the step's vote. torch notices it in the next forward,
    when the optimizer has stepped on gradients of which only some were averaged.

    At the end of backward it waits for the buckets, before torch's reducer does: see
    `ft_core.collectives.allreduce.AsyncReduce`.

    Thread: autograd's for `getSize` and `allreduce`. They never raise, since an error inside backward would end
    the process; errors are reported to the manager.
    """

    def __init__(self, manager: GradientManager) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # 2.14's stub asks for a store
        self._manager = manager
        self._shared: SharedBuffers | None = None
        self._begun = self._in_step = self._missed = False
        self.finished = False
        """One has averaged all gradients since the last forward that synchronizes."""
        self._values = self.unsent = 0
        self._divisor = 1
        self._on_their_way: list[StartedReduce] = []
        self._awaited_in = -1
        self.reduce_used: Callable[[Tensor], Future[Tensor]] | None = None
        """Given how often this member used each parameter, gives what torch's reducer sees of it."""

    def begin_with(self, values: int, shared: SharedBuffers) -> None:
        """Backward passes begin: each sends `values` values, then the buffers."""
        self._values, self._begun = values, True
        self._shared = shared or None

    def before_vote(self) -> None:
        """Report a backward that has begun and not reached all parameters."""
        unsent, self.unsent = self.unsent, 0
        if unsent:
            self._manager.report_error(
                RuntimeError(
                    "backward did not reach all parameters, so that gradients are missing: pass "
                    "find_unused_parameters=True to DistributedDataParallel"
                )
            )

    def step_over(self, committed: bool) -> None:
        """A step has ended; what its backward has sent does not count in the next one."""
        self._in_step = False

    def was_cut_short(self) -> bool:
        """Whether the last backward has raised. In the same step the peers would take what comes now for the rest of
        it, so that step is discarded."""
        if self._missed or torch._C._current_graph_task_id() >= 0:
            return False
        if self._in_step:
            self._manager.report_error(RuntimeError("a backward pass raised an error"))
        return True

    def _backward_over(self) -> None:
        self._missed = self.unsent > 0
        self.finished = not self._missed

    def getBackendName(self) -> str:
        return "ft-reduction"

    def getSize(self) -> int:
        """torch's reducer asks once a backward pass, at its first gradient; others at any time."""
        if self._begun and torch._C._current_graph_task_id() >= 0:
            self.unsent = self._values
            self._in_step, self._missed = True, False
            Variable._execution_engine.queue_callback(self._backward_over)
            self._divisor = self._manager.mean_divisor()
        return self._divisor

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """A bucket of gradients, or (integers) how often each parameter was used."""
        tensor = tensors[0]
        try:
            if not tensor.is_floating_point():
                return work_of((self.reduce_used or self._reduce_used)(tensor))
            bucket = self._manager.start_allreduce(tensor, divided_by=self._divisor)
            self._await_later(bucket)
            self.unsent -= tensor.numel()
            if self.unsent == 0 and self._shared is not None:
                self._shared.send()
            return work_of(bucket.future)
        except Exception as error:
            self._manager.report_error(error)
            return work_of(completed(tensor))

    def _await_later(self, bucket: StartedReduce) -> None:
        """Wait for `bucket` when backward ends, before torch's reducer, which queues its callback
        after its last bucket. A backward within a backward (activation checkpointing) has callbacks
        of its own, at its own end."""
        self._on_their_way.append(bucket)
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            self._await_buckets()
        elif backward != self._awaited_in:
            self._awaited_in = backward
            Variable._execution_engine.queue_callback(self._await_buckets)

    def _await_buckets(self) -> None:
        buckets, self._on_their_way = self._on_their_way, []
        for bucket in reversed(buckets):  # when the last one has ended, mostly all have
            bucket.wait()

    def _reduce_used(self, counts: Tensor) -> Future[Tensor]:
        return self._manager.allreduce(counts, reduce_op=ReduceOp.SUM)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return work_of(completed(tensors[0]))


def never_compile(package: str | None) -> None:
    """Have torch.compile leave this package's functions alone, as it does torch's own
    DistributedDataParallel, and compile the module inside. Idempotent."""
    assert package is not None
    if package not in _not_compiled:
        _not_compiled.add(package)
        torch._dynamo.trace_rules.add(package)


_not_compiled: set[str] = set()


class PureDistributedDataParallel(nn.Module):
    """Averages each gradient as soon as it is complete, without buckets, in plain Python.

    Slow for models with many parameters: use `DistributedDataParallel` for those. When backward returns, all
    gradients are averages. All members must use the same parameters in each step. Gradients may accumulate over
    several backward passes: earlier ones are averages already, and the average of sums is the sum of averages.
    `no_sync` saves the transfers. Buffers follow the first participant, as in `DistributedDataParallel`.

    Args:
        manager: averages the gradients over the participants.
        module: with the same parameters in all replica groups: checked when they join.

    Raises ValueError if the module's buffers are on several devices, or it is on a device that has no way to the
    other members. Backward raises no error of communication, as in `DistributedDataParallel`. Thread: the training
    loop's; autograd's threads reduce.
    """

    __deepcopy__ = _copied

    def __init__(self, manager: GradientManager, module: nn.Module) -> None:
        super().__init__()
        check_devices(module.parameters())
        self.module = module
        self._manager, self._wrapped = manager, WrappedModel(manager, module, is_called=True)
        self._sync = True
        self._pending: list[tuple[Tensor, Tensor, Future[Tensor]]] = []
        self._queued = False
        key = new_part(manager, "module")
        manager.register_schema(key, describe(module))
        self._shared = SharedBuffers(manager, module, key=f"{key}.buffers")
        manager.register_compared(key, module.parameters)
        ready = weakref.WeakMethod(self._gradient_ready)  # see DistributedDataParallel's hook

        def hook(parameter: Tensor) -> None:
            method = ready()
            if method is not None:
                method(parameter)

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. In training it first remembers the buffers, for a discard."""
        self._queued = False  # a backward that raised never came to its end
        self._pending.clear()
        if self.training and torch.is_grad_enabled():
            self._shared.begin()
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients local."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _gradient_ready(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self._sync or gradient is None:
            return
        try:
            if not self._queued:
                self._queued = True
                Variable._execution_engine.queue_callback(self._backward_over)
            flat = gradient if gradient.is_contiguous() else gradient.contiguous()
            self._pending.append((gradient, flat, self._manager.allreduce(flat)))
        except Exception as error:  # see `_Reduction`
            self._manager.report_error(error)

    def _backward_over(self) -> None:
        self._queued = False
        pending, self._pending = self._pending, []
        try:
            self._shared.send()
            for gradient, flat, future in pending:
                future.wait()
                if flat is not gradient:
                    gradient.copy_(flat)
        except Exception as error:  # see `_Reduction`
            self._manager.report_error(error)


def describe(module: nn.Module) -> str:
    """One line that is equal for equal modules: a digest of names, shapes and dtypes."""
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    lines = [f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for n, t in named]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()
    parameters = list(module.parameters())
    return f"{len(parameters)} tensors of {sum(p.numel() for p in parameters)} values ({digest})"
