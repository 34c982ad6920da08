"""LocalSGD and DiLoCo: replica groups train by themselves and meet every so many steps.

A meeting is an operation over the quorum: voted on, and tried again with whoever is left, so that
no group's work since the last meeting is lost. Newcomers enter right after a meeting, with its
result. Between two meetings groups differ; a group that dies loses its steps since the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.local_sgd import LocalSGD as StockLocalSGD
from torch import Tensor

from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime.meeting import Meeting
from ft_core.collectives.codecs import codec_named
from ft_core.diloco.diloco import check_options, nesterov
from ft_core.diloco.fragments import DEFAULT_BUCKET_BYTES, Fragment, FragmentSpec, split
from ft_core.diloco.schedule import Schedule, ScheduleEvent, trace


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

    def __enter__(self) -> Any:
        return enter(self, super().__enter__)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        leave(self, super().__exit__, kind, value, traceback)

    def _sync_and_avg_model_params(self) -> None:
        average(self, super()._sync_and_avg_model_params)


class DiLoCo(LocalSGD):
    """
    LocalSGD whose average is a step of an outer optimizer (arXiv 2311.08105): the mean over the
    quorum of the pseudo-gradients, which are the parameters after the last meeting minus those now.
    Make one for the whole training, and enter it as often as you like. At the end of each `with`
    the parameters of all processes are equal.

    Args:
        accelerator (`Accelerator`), model (`torch.nn.Module`), local_sgd_steps (`int`), enabled:
            As [`LocalSGD`]'s.
        outer_optimizer (`Callable`, *optional*):
            Makes the outer optimizer of a list of parameters. Default: SGD with Nesterov momentum,
            and the two numbers below. Its state heals.
        outer_lr (`float`, *optional*, defaults to 0.7), outer_momentum (`float`, 0.9):
            Of the default outer optimizer.
        fragments (`int` or `list`, *optional*):
            Parts of the model with a meeting of their own, spread over the `local_sgd_steps`
            (arXiv 2501.18512): a number, or a list with a module, or parameter names, for each.
        fragment_sync_delay (`int`, *optional*, defaults to 0):
            Steps between sending a fragment and applying it, behind which its transfer hides
            (tau). An operation of the script in between (a `gather`, say) applies it at once.
        fragment_update_alpha (`float`, *optional*, defaults to 0):
            How much of the local parameters stays at a meeting.
        codec (`str`, *optional*):
            `"int8"`, `"int4"` or `"fp8"`: what pseudo-gradients travel as.
        error_feedback (`bool`, *optional*, defaults to `False`):
            Keep what the codec loses and send it the next time.
        bucket_bytes (`int`, *optional*, defaults to 32 MiB):
            How much travels in one piece.
        backup_device (`torch.device`, *optional*):
            Where the parameters after the last meeting are kept, and the outer optimizer steps.
            Default: where the model is.
        weighted, keep_windows:
            As `ft_core.DiLoCo`'s; `False` and `True` are all that a script's loop has use for.

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
        check_options(fragment_update_alpha, codec, error_feedback)
        _check(weighted, bucket_bytes, keep_windows)
        self._fragments = split(accelerator.unwrap_model(model), fragments)
        schedule = Schedule(local_sgd_steps, len(self._fragments), fragment_sync_delay)
        self._due: dict[int, list[tuple[ScheduleEvent, Fragment]]] = {}
        for inner, event, index in trace(schedule, local_sgd_steps):
            self._due.setdefault(inner, []).append((event, self._fragments[index]))
        self._alpha, self._bucket_bytes = fragment_update_alpha, bucket_bytes
        self._codec = None if codec is None else codec_named(codec)
        self._feedback = error_feedback
        self._residuals: dict[int, list[Tensor]] = {}
        self._flight: tuple[Fragment, Meeting] | None = None
        self._met: dict[int, int] = {f.index: 0 for f in self._fragments}
        self._last = {
            p: p.detach().clone().to(backup_device or p.device)
            for f in self._fragments
            for p in f.parameters
        }
        make = outer_optimizer or nesterov(outer_lr, outer_momentum)
        self.outer_optimizer = make(list(self._last.values()))
        self.settings = (
            f"DiLoCo every {local_sgd_steps} steps, fragments={len(self._fragments)}, "
            f"fragment_sync_delay={fragment_sync_delay}, alpha={fragment_update_alpha}, "
            f"codec={codec}, error_feedback={error_feedback}, {_told(self.outer_optimizer)}"
        )
        self._register(processes.current())

    def _register(self, runtime: Any) -> None:
        """Heal from now on; one that is made by a process that catches up continues its
        predecessor, which has its peers' state."""
        before = None if runtime.live else runtime.reducer.registered("diloco")
        if before is not None:
            self._load(before())
        runtime.reducer.register_state_dict_fn("diloco", self._load, self._save)

    def step(self) -> None:
        self.num_steps += 1
        if not self.enabled:
            return
        for event, fragment in self._due.get((self.num_steps - 1) % self.local_sgd_steps + 1, ()):
            if event is ScheduleEvent.LAUNCH:
                self._launch(fragment)
            else:
                self._apply()

    def _sync_and_avg_model_params(self) -> None:
        """The end of the `with`: whatever was done since each fragment's last meeting is brought
        in, and nobody keeps parameters of its own."""
        self._apply()
        for fragment in self._fragments:
            if self._met[fragment.index] != self.num_steps:
                self._launch(fragment)
                self._apply()
        if processes.current().live:
            with torch.no_grad():
                for p, last in self._last.items():
                    p.copy_(last)

    @torch.no_grad()
    def _launch(self, fragment: Fragment) -> None:
        """Send a fragment; running statistics travel with the last one of a window."""
        runtime = processes.current()
        drift = [self._last[p].to(p.device) - p for p in fragment.parameters]
        rest = _statistics(self.model) if fragment is self._fragments[-1] else []
        meeting = Meeting(
            runtime, drift, [t.clone() for t in rest],
            settings=self.settings, codec=self._codec, error_feedback=self._feedback,
            residuals=self._residuals.get(fragment.index), bucket_bytes=self._bucket_bytes,
        )  # fmt: skip
        self._flight = fragment, meeting
        meeting.launch()
        runtime.unfinished = self._apply

    @torch.no_grad()
    def _apply(self) -> None:
        """One outer step of the fragment that is on its way, if one is."""
        flight, self._flight = self._flight, None
        runtime = processes.current()
        runtime.unfinished = None
        if flight is None:
            return
        (fragment, meeting), mine = flight, flight[0].parameters
        self._met[fragment.index] = self.num_steps
        means = meeting.means()
        if means is None or not runtime.live:
            return
        lost = meeting.lost()
        if lost is not None:
            self._residuals[fragment.index] = lost
        for p, mean in zip(mine, means, strict=False):
            self._last[p].grad = mean.to(self._last[p].device)
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for p in mine:
            p.copy_(torch.lerp(self._last[p].to(p.device), p, self._alpha))
        rest = _statistics(self.model) if fragment is self._fragments[-1] else []
        for tensor, mean in zip(rest, means[len(mine) :], strict=True):
            tensor.copy_(mean)

    def drop(self) -> None:
        """The script has failed: what is on its way is nobody's any more."""
        if self._flight is not None:
            self._flight, processes.current().unfinished = None, None

    def _save(self) -> dict[str, Any]:
        return {
            "parameters": [p.clone() for p in self._last.values()],
            "outer": self.outer_optimizer.state_dict(),
        }

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        for mine, healed in zip(self._last.values(), state["parameters"], strict=True):
            mine.copy_(healed)
        self.outer_optimizer.load_state_dict(state["outer"])
        self._residuals.clear()  # what was lost on the way to a state that this process missed


def _check(weighted: bool | str, bucket_bytes: int, keep_windows: bool) -> None:
    """Raises ValueError, in a sentence, for options that can't be in a script's loop."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if weighted:
        raise ValueError(
            f"weighted={weighted!r} has nothing to weigh under Accelerate, whose loaders give every "
            "process as many batches between two meetings: leave it out"
        )
    if not keep_windows:
        raise ValueError(
            "keep_windows=False can't be had under Accelerate: a meeting that fails is tried again "
            "on the spot, so that no window is ever dropped: leave it out"
        )


def _told(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's name and numbers."""
    numbers = {k: v for k, v in optimizer.defaults.items() if isinstance(v, int | float) and v}
    return f"outer={type(optimizer).__name__} {numbers}"


# ---------------------------------------------------------------------- also for the stock class


def enter(local: Any, stock: Callable[[], Any]) -> Any:
    """Steps change what a peer may be reading from here on: serve copies."""
    runtime = processes.active()
    if runtime is not None and local.enabled:
        runtime.serve_copies = True
        if runtime.manager is None:  # who differs is refused when it joins
            runtime.reducer.register_schema("meetings", settings_of(local))
    return stock()


def leave(local: Any, stock: Callable[..., Any], kind: Any, value: Any, traceback: Any) -> None:
    """Average once more, unless the script has failed: the others are not at this place then."""
    runtime = processes.active()
    if runtime is None or not local.enabled:
        stock(kind, value, traceback)
        return
    if kind is None:
        local._sync_and_avg_model_params()
    elif isinstance(local, DiLoCo):
        local.drop()
    local.model_sync_obj.__exit__(kind, value, traceback)
    runtime.serve_copies = False


def average(local: Any, stock: Callable[[], Any]) -> bool:
    """Parameters and running statistics become the mean over the quorum, in place; False where
    this process only passes by."""
    runtime = processes.active()
    if runtime is None:
        stock()
        return True
    tensors = [p for p in local.model.parameters() if p.requires_grad] + _statistics(local.model)
    means = Meeting(runtime, tensors, settings=settings_of(local)).means()
    if means is None:
        return False
    with torch.no_grad():
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)
    return True


def settings_of(local: Any) -> str:
    """What must be equal in all processes."""
    return str(getattr(local, "settings", f"LocalSGD every {local.local_sgd_steps} steps"))


def _statistics(model: Any) -> list[Tensor]:
    return [b for b in model.buffers() if b.is_floating_point()]
