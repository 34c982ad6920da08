"""LocalSGD and DiLoCo in Accelerate scripts: replica groups train by themselves between outer steps.

The outer step, its fragments, codecs and schedule are `ft_core.diloco`'s. The driver is this file:
a script's outer step is an operation of `Runtime`. It is checked, voted on, and tried again with the
members that are left, so no group's work since the last outer step is lost. `ft_core`'s `OuterLoop`
can't drive it: it opens and votes on the manager's steps itself, where a script shares them with
gather, reduce and the gradient steps around it, and it heals the global parameters only, where a
process that comes back also needs its script's position.

Newcomers enter after an outer step, with its result. A group that dies loses its steps since then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate.local_sgd import LocalSGD as StockLocalSGD
from torch import Tensor

from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime.checked_collectives import CheckedCollectives, Kind
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import UNKNOWN
from ft_core.diloco.diloco import OuterOptimizerStep, ParameterMean, nesterov
from ft_core.diloco.fragments import DEFAULT_BUCKET_BYTES, Fragment, FragmentSpec, describe, split
from ft_core.diloco.outer_step import OuterReduce, OuterStep
from ft_core.diloco.schedule import Schedule, ScheduleEvent


class LocalSGD(StockLocalSGD):
    """
    [`~accelerate.local_sgd.LocalSGD`] over replica groups that may fail, leave and join.

    Args:
        accelerator (`Accelerator`):
            The accelerator that has prepared the model.
        model (`torch.nn.Module`):
            The prepared model whose parameters (and running statistics) are averaged.
        local_sgd_steps (`int`):
            How many calls of `step` lie between two averages.
        enabled (`bool`, *optional*, defaults to `True`):
            `False`: gradients are averaged in each step, as without this class.

    Example:

    ```python
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    ```
    """

    def __init__(
        self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps must be at least 1, got {local_sgd_steps}")
        super().__init__(accelerator, model, local_sgd_steps, enabled)


class DiLoCo(LocalSGD):
    """
    LocalSGD whose average is a step of an outer optimizer (arXiv 2311.08105) on the mean of the
    pseudo-gradients, which are the parameters after the last outer step minus those now. Make one
    for the whole training, and enter it as often as you like. At the end of each `with` the
    parameters of all processes are equal.

    Args:
        accelerator (`Accelerator`), model (`torch.nn.Module`), local_sgd_steps (`int`), enabled:
            As [`LocalSGD`]'s.
        outer_optimizer (`Callable`, *optional*):
            Makes the outer optimizer, given the list of the model's trainable parameters. Default:
            SGD with Nesterov momentum, and the two numbers below. Its state heals.
        outer_lr (`float`, *optional*, defaults to 0.7), outer_momentum (`float`, 0.9):
            Of the default outer optimizer.
        fragments (`int` or `list`, *optional*):
            Parts of the model with outer steps of their own, spread over the `local_sgd_steps`
            (arXiv 2501.18512): a number, or a list with a module, or parameter names, for each.
        fragment_sync_delay (`int`, *optional*, defaults to 0):
            Steps between sending a fragment and applying it, behind which its transfer hides
            (tau). An operation of the script in between (a `gather`, say) applies it at once.
        fragment_update_alpha (`float`, *optional*, defaults to 0):
            How much of the local parameters stays when a fragment is applied.
        codec (`str`, *optional*):
            `"int8"`, `"int4"` or `"fp8"`: what pseudo-gradients travel as.
        error_feedback (`bool`, *optional*, defaults to `False`):
            Keep what the codec loses and send it the next time.
        bucket_bytes (`int`, *optional*, defaults to 32 MiB):
            Of one all-reduce.
        backup_device (`torch.device`, *optional*):
            Where the global parameters (those after the last outer steps) are kept. Default: where
            the model is.
        weighted, keep_windows:
            As `ft_core.DiLoCo`'s. Only `False` and `True` are accepted.

    Raises RuntimeError without fault tolerance, ValueError for options that contradict each other.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: FragmentSpec = None,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        codec: str | None = None,
        error_feedback: bool = False,
        weighted: bool | str = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        backup_device: torch.device | str | None = None,
        keep_windows: bool = True,
    ) -> None:
        super().__init__(accelerator, model, local_sgd_steps, enabled)
        _refuse(weighted, keep_windows)
        unwrapped = accelerator.unwrap_model(model)
        parts = split(unwrapped, fragments)
        parameters = [p for fragment in parts for p in fragment.parameters]
        make = outer_optimizer or nesterov(outer_lr, outer_momentum)
        self.outer_optimizer = make([*parameters])
        self._outer = OuterOptimizerStep(
            unwrapped,
            parts,
            self.outer_optimizer,
            fragment_update_alpha=fragment_update_alpha,
            codec=codec,
            error_feedback=error_feedback,
            bucket_bytes=bucket_bytes,
            backup_device=torch.device(backup_device or parameters[0].device),
        )
        self._schedule = Schedule(local_sgd_steps, len(parts), fragment_sync_delay)
        self._outer_steps, self._local_step = 0, 0
        self._sent: _Operation | None = None
        self._synced_at = dict.fromkeys(range(len(parts)), 0)
        self.settings = (
            f"DiLoCo every {local_sgd_steps} steps, fragments={len(parts)}, "
            f"fragment_sync_delay={fragment_sync_delay}, {self._outer.settings} "
            f"{_numbers(self.outer_optimizer)}"
        )
        self._register(processes.current())

    def _register(self, runtime: Runtime) -> None:
        """Heal from now on. One that is made by a process that catches up continues its
        predecessor, which has its peers' state."""
        before = None if runtime.live else runtime.reducer.registered("diloco")
        if before is not None:
            self._load(before())
        runtime.reducer.register_state_dict_fn("diloco", self._load, self._save)

    def step(self) -> None:
        """Count an inner step, and launch or apply the outer step that is due."""
        self.num_steps += 1
        if not self.enabled:
            return
        self._local_step += 1
        due = self._schedule.due(self._outer_steps, self._local_step)
        if ScheduleEvent.LAUNCH in due:
            self._launch(self._schedule.fragment_of(self._outer_steps))
        if ScheduleEvent.APPLY in due:
            self._apply()
            self._outer_steps += 1
            self._local_step = 0

    def _sync_and_avg_model_params(self) -> None:
        """The end of the `with`: bring in what was done since each fragment's last outer step, and
        keep no parameters of this process's own."""
        self._apply()
        for fragment in self._outer.fragments:
            if self._synced_at[fragment.index] != self.num_steps:
                self._launch(fragment.index)
                self._apply()
        if processes.current().live:
            for fragment in self._outer.fragments:
                self._outer.state.restore(fragment)

    def _launch(self, index: int) -> None:
        """Send a fragment; any operation of the script, or `_apply`, ends its outer step."""
        runtime = processes.current()
        self._sent = _Operation(runtime, self._outer, self._outer.fragments[index], self.settings)
        self._sent.launch()
        runtime.unfinished = self._apply

    def _apply(self) -> None:
        """End the outer step of the fragment that is on its way, if one is."""
        sent, self._sent = self._sent, None
        processes.current().unfinished = None
        if sent is not None:
            self._synced_at[sent.fragment.index] = self.num_steps
            sent.apply()

    def drop(self) -> None:
        """The script has failed: what is on its way is not applied."""
        if self._sent is not None:
            self._sent, processes.current().unfinished = None, None

    def _save(self) -> dict[str, Any]:
        return self._outer.state.state_dict(copy=True)

    def _load(self, state: dict[str, Any]) -> None:
        self._outer.state.load_state_dict(state)
        self._outer.forget()


def _refuse(weighted: bool | str, keep_windows: bool) -> None:
    """Raises ValueError, in a sentence, for options that a script's loop can't have."""
    if weighted:
        raise ValueError(
            f"weighted={weighted!r} has nothing to weigh under Accelerate, whose loaders give every "
            "process as many batches between two outer steps: leave it out"
        )
    if not keep_windows:
        raise ValueError(
            "keep_windows=False is not possible under Accelerate: an outer step that fails is tried "
            "again on the spot, so that no window is ever dropped: leave it out"
        )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.defaults.items() if isinstance(v, int | float) and v}


class _Operation:
    """One outer step as an operation of the script, which may be launched some steps earlier.

    Between launch and apply its values travel in the attempt that is open anyway. Should that be
    discarded, the present values are sent in the next one.
    """

    def __init__(
        self, runtime: Runtime, outer: OuterStep, fragment: Fragment, settings: str
    ) -> None:
        self.fragment = fragment
        self._runtime, self._outer, self._settings = runtime, outer, settings
        # Where it is launched: attempts may begin later. In its past a script is given no batches to count.
        self._batch = runtime.position.batch if runtime.live else UNKNOWN
        self._sent: OuterReduce | None = None
        self._sent_in = 0

    def launch(self) -> None:
        """Send the fragment now. All processes launch at the same place of the script."""
        self._sent_in = self._runtime.attempts_discarded
        self._sent = self._runtime.begin_early(Kind.PARAMETERS, self._send)

    def apply(self) -> bool:
        """Wait until an attempt is committed, and take its result; False: a process that catches
        up has this result in its state already."""
        sent: OuterReduce | None = self._runtime.operation(
            Kind.PARAMETERS, self._attempt, lambda: None, keep=False
        )
        if sent is None or not self._runtime.live:
            return False
        self._outer.finish(sent)
        return True

    def _attempt(self, collectives: CheckedCollectives) -> OuterReduce | None:
        sent, self._sent = self._sent, None
        if sent is None or self._sent_in != self._runtime.attempts_discarded:
            sent = self._send(collectives)
        if sent is not None:
            sent.wait()
        return sent

    def _send(self, collectives: CheckedCollectives) -> OuterReduce | None:
        headers = collectives.check(self._fingerprint(), batch=self._batch)
        if headers is None:
            return None
        if len({header.nbytes for header in headers.values()}) > 1:
            raise ValueError(
                "the replica groups average parameters with different settings or models, this one "
                f"with {self._settings}: start all of them with the same script and options"
            )
        self._outer.form.check()
        state = self._outer.state
        deltas = [] if state is None else state.deltas(self.fragment)
        return self._outer.launch(collectives.manager, self.fragment, deltas)

    def _fingerprint(self) -> int:
        """Of what all must have in common, so that no two collectives of different sizes meet."""
        outer = self._outer
        known = (self._settings, outer.bucket_bytes, describe(outer.fragments, outer.model))
        text = repr((*known, self.fragment.index))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


# ------------------------------------------------------ in the place of Accelerate's own methods


def enter(runtime: Runtime, original: Callable[..., Any], local: Any) -> Any:
    """Steps change what a peer may be reading from here on."""
    if local.enabled:
        runtime.drift(True)
        if runtime.manager is None:  # a group with other settings is refused when it joins
            runtime.reducer.register_schema("outer steps", settings_of(local))
    return original(local)


def leave(
    runtime: Runtime, original: Callable[..., Any], local: Any, kind: Any, *error: Any
) -> None:
    """Average once more, unless the script has failed: the others are not at this place then."""
    if not local.enabled:
        original(local, kind, *error)
        return
    try:
        if kind is None:
            local._sync_and_avg_model_params()
        elif isinstance(local, DiLoCo):
            local.drop()
    finally:
        runtime.drift(False)
        local.model_sync_obj.__exit__(kind, *error)


def average(runtime: Runtime, original: Callable[..., Any], local: Any) -> None:
    """Parameters and running statistics become the mean over the quorum, in place."""
    model = local.accelerator.unwrap_model(local.model)
    outer = ParameterMean(model, split(model, None), None, DEFAULT_BUCKET_BYTES)
    _Operation(runtime, outer, outer.fragments[0], settings_of(local)).apply()


def settings_of(local: Any) -> str:
    """What must be equal in all processes."""
    return str(getattr(local, "settings", f"LocalSGD every {local.local_sgd_steps} steps"))
