"""A model as `Accelerator.prepare` returns it: averages its gradients, and can be fast-forwarded. And all
that a script has prepared, as long as it lives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ft_accelerate.runtime.script_position import Phase, ScriptPosition
from ft_core.collectives.retry import RetryableReducer
from ft_core.ddp import RetryableDistributedDataParallel, never_compile
from ft_core.optimizer import Strangers, frozen_parameters, refuse_unfrozen

UNUSED_HINT = (
    "pass kwargs_handlers="
    "[DistributedDataParallelKwargs(find_unused_parameters=True)] to Accelerator"
)
UNFREEZE = (
    "Prepare the model with all of them trainable, and leave out of the optimizer what is trained later "
    "(optimizer.add_param_group)"
)
PREPARE = (
    "Give their model to accelerator.prepare, with the optimizer, when it has all its parameters"
)
BYPASSED = (
    "the optimizer trains a prepared model that was never called: its forward averages gradients, and that of the "
    "model inside it does not, so that each replica group would have weights of its own (stock DDP says nothing of "
    "it). Call what accelerator.prepare returned, and not model.module or accelerator.unwrap_model(model); what a "
    "method of its own computes belongs into forward"
)
COPIED_BYTES = 4096
"""Remembered outputs of up to this size are copied for each use."""


class TrainedModel(Protocol):
    """A model whose gradients are averaged: a `FaultTolerantModel`, or one of FSDP2."""

    training: bool

    def trained(self) -> list[Tensor]:
        """The parameters whose `.grad` holds the means, in the model's order. The loop's thread."""


class FaultTolerantModel(RetryableDistributedDataParallel):
    """`ft_core`'s model with kept gradients whose forward can be answered from memory.

    While the script's `position` remembers, the first call with inputs of some shapes computes. Later
    ones return that output again, whose backward ends at the output and counts in `position`. Neither this nor a forward that is replayed leaves a trace in running statistics: those
    came with the peers' state.
    """

    def __init__(
        self,
        reducer: RetryableReducer,
        module: nn.Module,
        position: ScriptPosition,
        **kwargs: Any,
    ) -> None:
        super().__init__(reducer, module, **kwargs)
        never_compile(__package__)
        self._memory = Memory(position)
        self._frozen = frozen_parameters(module)
        self.wrapped = list(module.parameters())
        """Those that were there; what the script adds to `module` later is not averaged."""
        self.is_called = False
        """Whether its gradients are averaged: its forward was called with gradients enabled (in eval mode, too),
        here or in peers whose place this process has taken."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Compute, or return the remembered output."""
        self.is_called |= torch.is_grad_enabled()
        reduces = super().forward

        def compute(answers: bool) -> Any:
            # The gradients of the script's past are not needed.
            return (self.module if answers else reduces)(*inputs, **kwargs)

        return self._memory.forward(
            self.module, compute, inputs, kwargs, counts=self.require_backward_grad_sync
        )

    def trained(self) -> list[Tensor]:
        """See `TrainedModel`."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def refuse_unaveraged(
        self, optimizer: torch.optim.Optimizer, others: Iterable[FaultTolerantModel]
    ) -> None:
        """Raise ValueError if `optimizer` is about to train a parameter that was frozen when it was prepared, or all of
        them without this wrapper, and without that of one of the `others` that has them, too."""
        if not self.require_backward_grad_sync:
            return  # LocalSGD averages parameters
        refuse_unfrozen(self._frozen, optimizer, "when the model was prepared", UNFREEZE)
        if not self.is_called:
            trained = {id(p) for p in self.wrapped if p.grad is not None}
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if trained & held - {id(p) for o in others if o.is_called for p in o.wrapped}:
                raise ValueError(BYPASSED)


class Memory:
    """Outputs of a model in the script's past.

    Args:
        position: of the script.
        all_agree: whether all processes that compute a forward together say so.
    """

    def __init__(
        self, position: ScriptPosition, all_agree: Callable[[bool], bool] = lambda mine: mine
    ) -> None:
        self._position, self._all_agree = position, all_agree
        self._remembered: dict[Any, Any] = {}
        self._shared: dict[Any, Tensor] = {}
        """Large values. Batches of many lengths have as many outputs, which together would not fit."""
        self._leaf = torch.zeros((), requires_grad=True)
        """A graph of remembered outputs ends here."""

    def forward(
        self,
        module: nn.Module,
        compute: Callable[[bool], Any],
        inputs: Any,
        kwargs: Any,
        *,
        counts: bool,
    ) -> Any:
        """What `compute(answers)` returns, or has returned. `answers`: for the script's past, in which its
        output stands for others. `counts`: a backward is one that synchronizes."""
        position = self._position
        if not position.live and position.remembers:
            return self._remembered_forward(module, compute, inputs, kwargs, counts)
        self._remembered.clear()
        self._shared.clear()
        trains = module.training and torch.is_grad_enabled()
        position.computed |= trains
        try:
            with _without_trace(module) if position.phase is Phase.REPLAY else nullcontext():
                return compute(False)
        except Exception:
            position.left_out |= trains
            raise

    def _remembered_forward(
        self,
        module: nn.Module,
        compute: Callable[[bool], Any],
        inputs: Any,
        kwargs: Any,
        counts: bool,
    ) -> Any:
        key = (module.training, _shapes((inputs, kwargs)))
        if not self._all_agree(key in self._remembered):
            with torch.no_grad(), _without_trace(module):
                self._remembered[key] = self._kept(compute(True))
        followed = _with_graph((inputs, kwargs)) if torch.is_grad_enabled() else []
        self._position.follows_inputs |= bool(followed)
        wants_grad = bool(followed) or (module.training and torch.is_grad_enabled())
        counts = wants_grad and counts
        self._position.backward_counts = False  # the last one may have raised

        numbers = itertools.count()

        def answer(tensor: Tensor) -> Tensor:
            place = next(numbers), tensor.dtype
            if tensor.is_meta:
                tensor = self._shared[place][: tensor.numel()].view(tensor.shape)
            if wants_grad and tensor.is_floating_point():
                counted = self._skipped_gradient if counts else None
                return _Answer.apply(self._leaf, tensor, counted, *followed)
            return _again(tensor)

        return _each_tensor(answer, self._remembered[key])

    def _kept(self, output: Any) -> Any:
        """`output`, without its large values: those of the largest output stand for those of all."""
        numbers = itertools.count()

        def keep(tensor: Tensor) -> Tensor:
            place = next(numbers), tensor.dtype
            values = type(tensor) is Tensor and tensor.is_floating_point()
            if not values or tensor.nbytes <= COPIED_BYTES:
                return tensor  # a number that the script may read, or indices
            if place not in self._shared or self._shared[place].numel() < tensor.numel():
                self._shared[place] = tensor.reshape(-1)
            return tensor.to("meta")

        return _each_tensor(keep, output)

    def _skipped_gradient(self) -> None:
        """Of a backward that goes through several models one gradient step is counted, as live."""
        if not self._position.backward_counts:
            self._position.backward_counts = True
            Variable._execution_engine.queue_callback(self._skipped_backward_over)

    def _skipped_backward_over(self) -> None:
        self._position.backward_counts = False
        self._position.replay_grad()


class _Answer(torch.autograd.Function):
    """A remembered output with a graph, in which the model's inputs have gradients of zeros. `counted` is called when a
    backward reaches it."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, tensor: Tensor, counted: Callable[[], None] | None, *inputs: Tensor
    ) -> Tensor:
        ctx.counted = counted
        ctx.like = [torch.empty_like(each, device="meta") for each in inputs]
        ctx.devices = [each.device for each in inputs]
        ctx.set_materialize_grads(False)
        return _again(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.counted is not None:
            ctx.counted()
        zeros = (
            torch.zeros_like(like, device=device)
            for like, device in zip(ctx.like, ctx.devices, strict=True)
        )
        return None, None, None, *zeros


def _with_graph(inputs: Any) -> list[Tensor]:
    """Those of a model's inputs that have gradients."""
    return [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.requires_grad]


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """What a backward from this loss would give gradients to."""
    ends, seen = [loss.grad_fn], set()
    while ends:
        node = ends.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            yield leaf
        ends.extend(following for following, _ in node.next_functions)


def _each_tensor(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Accelerate's `recursively_apply`, also within dataclasses and torch's distributions."""

    def apply(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        changed = copy.copy(value)
        for name in _attributes(value):
            object.__setattr__(changed, name, _each_tensor(function, getattr(value, name)))
        return changed

    def is_known(value: Any) -> bool:
        return isinstance(value, Tensor) or bool(_attributes(value))

    return recursively_apply(apply, output, test_type=is_known)


def _attributes(value: Any) -> list[str]:
    """That may hold a part of an output."""
    if isinstance(value, torch.distributions.Distribution):
        return list(vars(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _again(tensor: Tensor) -> Tensor:
    """`tensor` for another use. A large one is not copied: what a script writes to it is of no
    importance, since it stands for outputs of the past."""
    if tensor.nbytes <= COPIED_BYTES:
        return tensor.detach().clone()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    at, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
    return fresh.set_(tensor.untyped_storage(), at, shape, strides)  # no view: it may be written to


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were before; a graph made inside may still run backward."""
    buffers = list(module.buffers())
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, Mapping):
        return tuple((str(k), _shapes(v)) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(_shapes(v) for v in tree)
    if isinstance(tree, (int, float, str, bool, type(None))):
        return repr(tree)
    # A batch of a class of the script's own: its numbers may be counts, other ones in each.
    parts = getattr(tree, "__dict__", {}).items()
    return tuple((k, _shapes(v)) for k, v in parts if isinstance(v, (Tensor, Mapping)))


class Prepared:
    """The Accelerators and models of one process. The loop's thread only.

    Attributes:
        models: those that were prepared, held weakly; the ones that are gone stay in it.
        adding: whether another one is being prepared, which its accelerator does not know yet.
    """

    def __init__(self) -> None:
        self._accelerators: list[weakref.ref[Any]] = []
        self.models: list[weakref.ref[TrainedModel]] = []
        self.adding = False
        # What is registered heals, and the script may average it.
        self._strangers = Strangers(self._averaged, PREPARE)

    def adopt(self, accelerator: Any) -> None:
        """Heal this accelerator's objects, besides those of the others that live."""
        self._accelerators.append(weakref.ref(accelerator))

    def add(self, model: TrainedModel) -> None:
        """The script trains this model, too."""
        self.models.append(weakref.ref(model))

    @property
    def accelerators(self) -> dict[int, Any]:
        """Those that live, by their numbers in the order in which they were made."""
        numbered = ((number, ref()) for number, ref in enumerate(self._accelerators))
        return {number: found for number, found in numbered if found is not None}

    @property
    def optimizers(self) -> list[Any]:
        """torch's optimizers, without Accelerate's wrappers."""
        all_ = self.accelerators.values()
        return [wrapper.optimizer for each in all_ for wrapper in each._optimizers]

    @property
    def loaders(self) -> list[Any]:
        """Accelerate's wrappers of the prepared loaders."""
        return [loader for each in self.accelerators.values() for loader in each._dataloaders]

    def knows(self, model: Any) -> bool:
        """Whether this is one of the models."""
        return any(model is each for each in self._living())

    def _living(self) -> list[TrainedModel]:
        return [model for known in self.models if (model := known()) is not None]

    def refuse_unaveraged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if `optimizer` is about to train a parameter whose gradient no model averages."""
        models = self._replicated()
        for model in models:
            model.refuse_unaveraged(optimizer, models)
        self._strangers.refuse(optimizer)

    def _replicated(self) -> list[FaultTolerantModel]:
        return [model for model in self._living() if isinstance(model, FaultTolerantModel)]

    def _averaged(self) -> Iterator[Tensor]:
        replicated = self._replicated()
        for model in replicated:
            yield from model.wrapped
        living = self._living()
        registered = self.registered if living else ()  # without a model nothing heals
        for each in (*living, *registered):
            if isinstance(each, nn.Module) and each not in replicated:
                yield from each.parameters()

    def arrived(self) -> None:
        """This script goes on where its peers are, which may be behind a forward."""
        for model in self._replicated():
            model.is_called = True

    def fill_gradients(self, loss: Tensor | None) -> None:
        """After a backward of the script's past: what has no gradient has one of zeros, at which the script may look; and
        so has what leads to this `loss` (a batch that is attacked)."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        trained = (p for group in groups for p in group["params"] if p.requires_grad)
        for each in itertools.chain(trained, () if loss is None else _leaves(loss)):
            if each.grad is None:
                each.grad = torch.zeros_like(each)

    def forget_past(self) -> None:
        """This script stands where its peers' window began. Gradients that it has are none, and the losses by which it
        has set a trigger were not real."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for accelerator in self.accelerators.values():
            accelerator.flag_tensor = None

    def begin_accumulation(self) -> None:
        """The next batch is the first of those over which gradients are accumulated."""
        for accelerator in self.accelerators.values():
            accelerator.step = 0

    @property
    def registered(self) -> list[Any]:
        """What the script has registered for checkpointing."""
        return [thing for each in self.accelerators.values() for thing in each._custom_objects]

    def past(self, state: dict[str, Any], *, told: bool) -> bool | None:
        """What our own registered objects say of theirs in a dumped `state` (`FollowsTheScript`); None: there
        are none."""
        pairs = [
            pair
            for number, accelerator in self.accelerators.items()
            if (its := state["accelerators"].get(str(number))) is not None
            for pair in zip(accelerator._custom_objects, its["custom"], strict=False)
        ]
        said = [o.is_past(s, told=told) for o, s in pairs if isinstance(o, FollowsTheScript)]
        return any(said) if said else None

    @property
    def any_model(self) -> bool:
        """Whether a model lives."""
        return bool(self._living())

    @property
    def training(self) -> bool:
        """Whether the script is about to train: a prepared model is in training mode."""
        return any(model.training for model in self._living())

    @property
    def learns(self) -> bool:
        """Whether a model is in training mode inside what it was wrapped in. transformers' Trainer takes it out of
        that, and not the wrapper, for an evaluation and until the first batch after it."""
        return any(getattr(model, "module", model).training for model in self._living())

    @property
    def device(self) -> torch.device:
        """That of the newest accelerator."""
        living = self.accelerators
        if not living:
            raise RuntimeError(
                "the Accelerator that has prepared the model is gone: keep it in a variable while "
                "the script trains, since it tells what heals"
            )
        device: torch.device = living[max(living)].device
        return device


# ---------------------------------------------------------------- registered objects

_FROM_HERE = "_ft_frozen"


class FollowsTheScript:
    """Base of registered objects of our own, which change in the script's past, too."""

    def is_past(self, state: Any, *, told: bool) -> bool:
        """Whether this script has begun past the place at which one like it had this `state`. `told`: the
        script there has told where its epochs begin."""
        raise NotImplementedError


def freeze(objects: Iterable[Any]) -> None:
    """Let registered objects keep their peers' values while the script runs through its past.

    What a script gives to `register_for_checkpointing` (early stopping's patience, the best metric) heals.
    But on its way to its peers the script goes on using it, with results that are not real: models answer
    from memory. So its attributes are those of the peers meanwhile, and what is assigned to them is
    dropped: a check that has not ended the peers' loops does not end this one.

    Drop assignments to their attributes until `thaw`; idempotent.

    A `GradScaler` does nothing there by itself, but for what its first use makes.
    Objects of types that Python does not let change (extension types), or that take no subclass, stay as they are.
    """
    for each in objects:
        kind = type(each)
        changes = isinstance(each, FollowsTheScript | torch.amp.GradScaler)
        if _FROM_HERE not in vars(kind) and not changes:
            with contextlib.suppress(Exception):  # of the type's own `__init_subclass__`, too
                object.__setattr__(each, "__class__", _frozen(kind))


def thaw(objects: Iterable[Any]) -> None:
    """Let them change again; idempotent."""
    for each in objects:
        kind = type(each)
        if _FROM_HERE in vars(kind):
            object.__setattr__(each, "__class__", kind.__mro__[1])


def _frozen(kind: type) -> type:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        """Dropped."""

    def __delattr__(self: Any, name: str) -> None:
        """Dropped."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """As a `__deepcopy__` calls it: the object is the script's own, and changes."""
        return kind.__new__(kind, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A copy is the script's own, and changes."""
        object.__setattr__(self, "__class__", kind)
        try:
            return self.__reduce_ex__(protocol)
        finally:
            object.__setattr__(self, "__class__", frozen)

    names = {
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
        "__new__": __new__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__slots__": (),  # an instance may change its class only if the layout stays
        _FROM_HERE: True,
    }
    frozen = _making(kind)(kind.__name__, (kind,), names)
    return frozen


def _making(kind: type) -> type:
    """A metaclass whose types make objects of `kind`: what a frozen object makes by `type(self)(...)` changes."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    return type("_Making", (type(kind),), {"__call__": __call__})
