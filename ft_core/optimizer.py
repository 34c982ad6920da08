"""OptimizerWrapper: begins a step of the manager, and steps the optimizer if it was committed. And what an
optimizer may not train."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer as TorchOptimizer

from ft_core.step import StepManager, new_part, update

log = logging.getLogger("ft_core")


class OptimizerWrapper(TorchOptimizer):
    """A torch optimizer that updates the parameters only if its manager commits the step.

    `zero_grad()` begins a step (`manager.start_quorum`), and `step()` ends it
    (`manager.should_commit`): call `zero_grad` before forward, once a step. Optimizers that update by turns have a
    wrapper each. Everything else (param_groups, state, hooks, state dicts) is `optim`'s own, and
    schedulers take this object. A scheduler that counts steps should count committed ones:

        optimizer.step()
        if not optimizer.step_was_skipped:
            scheduler.step()

    With a GradScaler: `scaler.step(optimizer)`, `scaler.unscale_(optimizer)` and
    `scaler.update()` as usual. Gradients are averaged before they are checked, so that an
    overflow in one replica group is seen by all: such a step is committed (the scale that changes
    is state) but does not touch the parameters. A discarded step leaves the scale alone.

    Args:
        manager: begins and ends steps.
        optim: updates the parameters. Its parameters must have the same shapes in all replica
            groups: checked when they join.
        grad_scaler: heals with the rest of the state. Without it, put the scaler's state dict
            into the manager's state yourself.

    Raises ValueError for LBFGS. Thread: the training loop's.
    """

    # No super().__init__(): all of its attributes are those of `optim`.
    def __init__(
        self, manager: StepManager, optim: TorchOptimizer, *, grad_scaler: GradScaler | None = None
    ) -> None:
        if isinstance(optim, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates its closure several times a step, which can't be voted on: use "
                "another optimizer"
            )
        self.manager = manager
        self.optim = optim
        self.step_was_skipped = False
        """Whether the last `step` left the parameters alone: discarded, or an overflow."""
        manager.register_schema(new_part(manager, "optimizer"), _describe(optim))
        manager.preallocate_state(optim)
        if grad_scaler is not None:
            manager.register_state_dict_fn(
                "grad_scaler", grad_scaler.load_state_dict, grad_scaler.state_dict
            )

    # ------------------------------------------------------------------ the step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step of the manager, and clear the gradients. Raises as `start_quorum` does.

        If a step is open in which no gradient was averaged yet, it only clears; after that, it discards the step
        that it interrupts, and begins another.
        """
        if self.manager.step_is_untouched() is not True:  # nor is a mock's answer
            self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> Any:
        """End the step: vote, and update the parameters if it was committed.

        `closure` is run once, before the vote, and its result is returned; it must not call
        `zero_grad`. `GradScaler.step` passes `grad_scaler`. Raises as `should_commit` does, what
        `optim.step` raises (then this member discards its state, and heals in the next step), and
        RuntimeError for a GradScaler that does not pass itself.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for wrapped in _wrapped.get(self.manager, ()):
            wrapped.refuse_unaveraged(self.optim)
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                f"this GradScaler (torch {torch.__version__}) does not hand itself to the "
                "optimizer any more: use bfloat16, or an older torch"
            )
        if grad_scaler is not None:
            self._step_scaled(grad_scaler)
            return loss
        self.step_was_skipped = not self._vote()
        if not self.step_was_skipped:
            self._update()
        return loss

    def _update(self) -> None:
        update(self.manager, self.optim.step)

    def _vote(self) -> bool:
        return self.manager.should_commit()

    # ------------------------------------------------------------------ torch.amp.GradScaler

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler looks for this, then calls `step(grad_scaler=itself)`, also on overflow.

        The other contract (no attribute) would not call `step` then: no vote, no commit. torch
        warns of this one at each call, which no user could act on.
        """
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself")
        return True

    def _step_scaled(self, scaler: GradScaler) -> None:
        state = scaler._per_optimizer_states[id(self)]
        unscaled = state["stage"] is OptState.UNSCALED
        if unscaled and self.manager.is_healing():
            # Its scale is loaded with the vote; these gradients were divided by another.
            self.manager.report_error(
                RuntimeError("gradients were unscaled before the scale was healed")
            )
        committed = self._vote()
        if not unscaled:
            scaler.unscale_(self)  # after the vote, which may have loaded another scale
        found = scaler._found_inf_per_device(self)
        if not committed:
            _leave_scale_alone(scaler, found)
            self.step_was_skipped = True
            return
        self.step_was_skipped = any(flag.item() for flag in found.values())
        if not self.step_was_skipped:
            self._update()

    # ------------------------------------------------------------------ all else is `optim`'s

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """`optim`'s own."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """`optim`'s own."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optim.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """`optim`'s own."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optim.defaults = value

    def state_dict(self) -> dict[str, Any]:
        """`optim`'s state dict; the wrapper has no state of its own."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `optim`."""
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. All replica groups must do it at the same step."""
        self.optim.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """As torch's. `hook` runs before an update, not in a skipped step; it is given `optim`."""
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """As torch's. `hook` runs after an update, not in a skipped step; it is given `optim`."""
        return self.optim.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As torch's, of `optim`."""
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As torch's, of `optim`."""
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As torch's, of `optim`."""
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As torch's, of `optim`."""
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __getattr__(self, name: str) -> Any:
        if name in ("optim", "manager", "grad_scale", "found_inf"):
            raise AttributeError(name)  # before __init__; or GradScaler's, never `optim`'s
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"

    def __getstate__(self) -> NoReturn:
        raise TypeError("an OptimizerWrapper can't be pickled or copied: save its state_dict()")


Optimizer = OptimizerWrapper


def _leave_scale_alone(scaler: GradScaler, found: dict[Any, Tensor]) -> None:
    """Make the coming `scaler.update()` change nothing.

    A discarded step's gradients are arbitrary, and differ among members; the scale must not. An
    update without overflow adds one to the growth tracker: take one away before. It stays below
    the growth interval, so that the scale does not grow either.
    """
    if not found:  # no gradient has arrived; update() wants to see a check
        found[torch.device(scaler._device)] = torch.zeros(1, device=scaler._device)
    for flag in found.values():
        flag.zero_()
    state = scaler.state_dict()
    state["_growth_tracker"] -= 1
    scaler.load_state_dict(state)


def _describe(optim: TorchOptimizer) -> str:
    from hashlib import blake2b

    shapes = [[tuple(p.shape) for p in group["params"]] for group in optim.param_groups]
    digest = blake2b(repr(shapes).encode(), digest_size=6).hexdigest()
    sizes = "+".join(str(len(group)) for group in shapes)
    return f"{type(optim).__name__} of {sizes} tensors ({digest})"


# ---------------------------------------------------------------- what no model averages
# torch's DDP averages the gradients of the parameters that are in the model, and trainable, when it wraps it. Under
# stock DDP each process trains all others by itself, without a word; nor would they heal.

MOST_NAMED = 3

Frozen = list[tuple[str, nn.Parameter]]


def frozen_parameters(module: nn.Module) -> Frozen:
    """Those that are frozen when `module` is wrapped, with their names."""
    return [(name, p) for name, p in module.named_parameters() if not p.requires_grad]


def refuse_unfrozen(
    frozen: Frozen, optimizer: torch.optim.Optimizer, when: str, advice: str
) -> None:
    """Raise ValueError if `optimizer` is about to train one of `frozen`; see `refuse_once_frozen`."""
    if any(p.grad is not None for _, p in frozen):
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, p in frozen if p.grad is not None and id(p) in trained]
        refuse_once_frozen(names, when, advice)


def refuse_once_frozen(names: list[str], when: str, advice: str) -> None:
    """Raise ValueError if there are parameters that were frozen `when` gradients to average were chosen, and are trained
    now; `advice` is a sentence."""
    if names:
        raise ValueError(
            f"{_some(names)}: frozen {when}, and trained now. They are not "
            "averaged, so that each replica group had weights of its own (stock DDP says nothing of it). "
            f"{advice}"
        )


def refuse_newcomers(names: list[str], made: str) -> None:
    """Raise ValueError if there are parameters that are trained, and that the model has got since `made`."""
    if names:
        raise ValueError(
            f"{_some(names)}: in the model since {made}, and trained. They are not averaged, so that each replica "
            "group had weights of its own. Add or replace parameters before"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


UNFREEZE = "Wrap the model with all of them trainable (and find_unused_parameters=True), and freeze them after that"
BYPASSED = (
    "the optimizer trains a model whose DistributedDataParallel was never called: its forward averages gradients, and "
    "that of the model inside it does not, so that each replica group would have weights of its own (stock DDP says "
    "nothing of it). Call the wrapped model: model = DistributedDataParallel(manager, network), and model(batch)"
)


class WrappedModel:
    """What a model that averages its gradients for `manager` tells the manager's `Optimizer`; the model holds it.

    Attributes:
        is_called: whether there was a forward with gradients.
    """

    def __init__(self, manager: Any, module: nn.Module, *, is_called: bool = False) -> None:
        self.is_called = is_called
        self._frozen = frozen_parameters(module)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._others = _wrapped.setdefault(manager, weakref.WeakSet())
        self._others.add(self)

    def refuse_unaveraged(self, optimizer: TorchOptimizer) -> None:
        """Raise ValueError if `optimizer` is about to train parameters whose gradients no model has averaged."""
        refuse_unfrozen(self._frozen, optimizer, "when the model was wrapped", UNFREEZE)
        if not self.is_called:
            trained = {id(p) for p in self._parameters if p.grad is not None}
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            averaged = {id(p) for o in self._others if o.is_called for p in o._parameters}
            if trained & held - averaged:
                raise ValueError(BYPASSED)


_wrapped: weakref.WeakKeyDictionary[Any, weakref.WeakSet[WrappedModel]] = (
    weakref.WeakKeyDictionary()
)


class Strangers:
    """What optimizers train and is not among the `averaged` parameters. `advice` is a sentence. The loop's thread."""

    def __init__(self, averaged: Callable[[], Iterable[Tensor]], advice: str) -> None:
        self._averaged, self._advice = averaged, advice
        self._found: weakref.WeakKeyDictionary[Any, tuple[int, list[Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if `optimizer` is about to train such a parameter."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._found.get(optimizer, (None, []))[0] != count:
            self._found[optimizer] = count, self.of(optimizer)
        if any(p.grad is not None for p in self._found[optimizer][1]):
            now = self.of(optimizer)  # there may be more modules by now
            self._found[optimizer] = count, now
            self.refuse_these([p for p in now if p.grad is not None])

    def of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Those of `optimizer`, in its order."""
        known = {id(p) for p in self._averaged()}
        all_ = (p for group in optimizer.param_groups for p in group["params"])
        return [p for p in all_ if id(p) not in known]

    def refuse_these(self, parameters: list[Tensor]) -> None:
        """Raise ValueError if there are any."""
        if parameters:
            shapes = ", ".join(str(list(p.shape)) for p in parameters[:MOST_NAMED])
            more = ", ..." if len(parameters) > MOST_NAMED else ""
            raise ValueError(
                f"the optimizer trains {len(parameters)} parameters (of shapes {shapes}{more}) that are in no "
                "model whose gradients are averaged, or came into it later, so that each replica group would have "
                f"weights of its own (stock DDP says nothing of it). {self._advice}"
            )
