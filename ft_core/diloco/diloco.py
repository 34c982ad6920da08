"""LocalSGD: members train by themselves, and average their parameters every so many steps. DiLoCo and
Streaming DiLoCo: an outer optimizer steps on the members' mean drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ft_core.collectives.quantized import Reduction, codec_named, reduce_quantized, wire_bytes
from ft_core.diloco.fragments import (
    DEFAULT_BUCKET_BYTES,
    Fragment,
    FragmentSpec,
    like,
    local_values,
    split,
)
from ft_core.diloco.global_state import GlobalState, OuterOptimizer, SeveralOptimizers
from ft_core.diloco.outer_loop import OuterLoop
from ft_core.diloco.outer_step import OuterReduce, OuterStep
from ft_core.diloco.schedule import Schedule

if TYPE_CHECKING:
    from ft_core.manager import Manager


def check_options(fragment_update_alpha: float, codec: str | None, error_feedback: bool) -> None:
    """Raises ValueError for options that contradict each other."""
    if not 0.0 <= fragment_update_alpha <= 1.0:
        raise ValueError(f"fragment_update_alpha must be from 0 to 1, got {fragment_update_alpha}")
    if error_feedback and codec is None:
        raise ValueError("error_feedback has nothing to correct without a codec: set codec")


def nesterov(outer_lr: float, outer_momentum: float) -> Callable[[list[Tensor]], Optimizer]:
    """A factory of the outer optimizer of arXiv 2311.08105. Raises ValueError."""
    if not outer_lr > 0:
        raise ValueError(f"outer_lr must be positive, got {outer_lr}")
    if not 0.0 <= outer_momentum < 1.0:
        raise ValueError(f"outer_momentum must be from 0 to below 1, got {outer_momentum}")
    return partial(
        torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
    )


class OuterOptimizerStep(OuterStep):
    """The mean pseudo-gradient is the gradient of a step of `optimizer` on the global parameters.

    Args:
        optimizer: over all trainable parameters of the model; or several, each over a part of them.
        fragment_update_alpha, codec, error_feedback: as `DiLoCo`'s.
        backup_device, pin_memory: as `GlobalState`'s.

    Raises ValueError for options that contradict each other.
    """

    state: GlobalState

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        fragment_update_alpha: float,
        codec: str | None,
        error_feedback: bool,
        bucket_bytes: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
    ) -> None:
        check_options(fragment_update_alpha, codec, error_feedback)
        parts = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if any(isinstance(part, torch.optim.LBFGS) for part in parts):
            raise ValueError(
                "LBFGS evaluates its closure several times a step, and the mean of pseudo-gradients is computed once: "
                "take another outer optimizer"
            )
        joint: OuterOptimizer = parts[0] if len(parts) == 1 else SeveralOptimizers(parts)
        _check_covers(joint, fragments)
        state = GlobalState(
            model, fragments, joint, backup_device=backup_device, pin_memory=pin_memory
        )
        super().__init__(model, fragments, state, bucket_bytes)
        self.optimizer = joint
        self._alpha = fragment_update_alpha
        self._codec = None if codec is None else codec_named(codec)
        self.encodes = codec is not None
        self._feedback = error_feedback
        self._residuals: dict[int, list[Tensor]] = {}
        self.settings = (
            f"alpha={fragment_update_alpha}, codec={codec}, error_feedback={error_feedback}, "
            f"outer={'+'.join(type(each).__name__ for each in parts)}"
        )

    def contribution(self, fragment: Fragment, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        """Delta_i = theta(t-1) - theta_i(t) (arXiv 2311.08105, algorithm 1, line 12)."""
        return deltas

    def mean_deltas(self, fragment: Fragment, means: Sequence[Tensor]) -> Sequence[Tensor]:
        return means

    def send_values(self, manager: Manager, sent: OuterReduce, weight: float) -> None:
        if self._codec is None:
            super().send_values(manager, sent, weight)
            return
        codec, buckets, part = self._codec, sent.values.buckets(), manager.step.participation()
        residuals: list[Tensor | None] = [None] * len(buckets)
        if self._feedback and weight:  # a window that was given up leaves earlier losses for later
            known = self._residuals.get(sent.fragment.index)
            zeros = (b.new_zeros(b.numel(), dtype=torch.float32) for b in buckets)
            residuals = list(known or zeros)
        jobs = [Reduction(b, r) for b, r in zip(buckets, residuals, strict=True)]
        sent.quantized = jobs
        sent.futures.append(
            manager.step.queue.submit(lambda pg: reduce_quantized(pg, codec, jobs, part))
        )
        members = part.replica_world_size
        self.stats.bytes_sent += sum(wire_bytes(codec, b.numel(), members) for b in buckets)

    def finish(self, sent: OuterReduce) -> None:
        super().finish(sent)
        left = [job.next_residual for job in sent.quantized]
        if left and all(r is not None for r in left):
            self._residuals[sent.fragment.index] = left

    @torch.no_grad()
    def update(self, fragment: Fragment, means: Sequence[Tensor]) -> None:
        """theta(t) = OuterOpt(theta(t-1), Delta(t)) (arXiv 2311.08105, algorithm 1, line 14), then
        theta_m <- alpha theta_m + (1 - alpha) theta (arXiv 2501.18512, algorithm 2)."""
        drifted = [local_values(p).clone() for p in fragment.parameters] if self._alpha else []
        # The outer optimizer is over the model's parameters: it steps those that have a gradient.
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients: list[Any] = [p.grad for p in every]
        try:
            for p in every:
                p.grad = None
            self.state.restore(fragment)
            for p, mean in zip(fragment.parameters, means, strict=True):
                p.grad = like(mean.to(local_values(p).device), p)
            self.optimizer.step()
        finally:
            for p, gradient in zip(every, gradients, strict=True):
                p.grad = gradient
        self.state.take(fragment)
        for p, before in zip(fragment.parameters, drifted, strict=bool(drifted)):
            # With alpha 0 the model has the global values already.
            local_values(p).lerp_(before, self._alpha)

    def forget(self) -> None:
        self._residuals.clear()  # what was lost on the way to a state that this member missed


def extract_local_tensor(t: Tensor) -> Tensor:
    """A copy of `t`, without gradient; of a DTensor, a copy of its local part."""
    return local_values(t).clone()


class ParameterMean(OuterStep):
    """The parameters become the participants' mean. Needs no global parameters of its own."""

    def contribution(self, fragment: Fragment, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        return [local_values(p) for p in fragment.parameters]

    def mean_deltas(self, fragment: Fragment, means: Sequence[Tensor]) -> Sequence[Tensor]:
        assert self.state is not None
        olds = self.state.of(fragment)
        return [old.to(mean.device) - mean for old, mean in zip(olds, means, strict=True)]

    @torch.no_grad()
    def update(self, fragment: Fragment, means: Sequence[Tensor]) -> None:
        """x_{t+1} = 1/K sum_k x_t^k, for t + 1 in the synchronization indices (algorithm 1)."""
        for p, mean in zip(fragment.parameters, means, strict=True):
            local_values(p).copy_(mean)
        if self.state is not None:
            self.state.take(fragment)


class LocalSGD(OuterLoop):
    """Fault-tolerant LocalSGD (arXiv 1805.09767, algorithm 1).

        with LocalSGD(manager, model, optimizer, sync_every=8):
            for batch in batches:
                optimizer.zero_grad()
                loss(model(batch)).backward()
                optimizer.step()      # every 8th: the parameters become the members' mean

    A window whose sync fails is discarded: the parameters return to the last mean. The model and
    its optimizer must not be in the manager's own state. A healing member gets the last mean from
    here, and keeps an optimizer state of its own.

    Args:
        manager: its steps are the syncs.
        model: trainable parameters are averaged; persistent buffers too (integers: the first
            participant's).
        optimizer: its `step` is an inner step.
        sync_every: inner steps between two syncs.
        weighted: True or "steps": the mean is weighted by each member's inner steps in the window.
            "samples": by what `add_samples` has counted.
        bucket_bytes: of one all-reduce.
        keep_windows: True: a window whose sync was discarded through another member's fault is
            kept, and contributes to the next one. False: it is dropped, as documented for torchft.

    All settings must be equal in all members: checked when they join.
    """

    KEY = "local_sgd"

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        *,
        weighted: bool | str = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        keep_windows: bool = False,
    ) -> None:
        fragments = split(model, None)
        state = GlobalState(model, fragments, None)
        super().__init__(
            manager,
            ParameterMean(model, fragments, state, bucket_bytes),
            optimizer,
            Schedule(sync_every),
            weighted=weighted,
            keep_windows=keep_windows,
            settings="",
        )


class DiLoCo(OuterLoop):
    """Fault-tolerant DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, model, inner, outer, sync_every=100):
            for batch in batches:
                inner.zero_grad()
                loss(model(batch)).backward()
                inner.step()

    Each window of `sync_every` inner steps every fragment has one outer step: the mean of the
    members' pseudo-gradients (global minus local parameters) is the gradient with which
    `outer_optimizer` steps the global parameters. If an error occurs, the outer step is discarded,
    and the fragment's parameters return to the last global ones. The model and both optimizers
    must not be in the manager's own state: a healing member gets the global parameters and the
    outer optimizer's state from here, and starts with a fresh inner optimizer.

    Args:
        manager: its steps are the outer steps.
        model: its trainable parameters are synchronized; persistent buffers are averaged once a
            window (integers: the first participant's).
        inner_optimizer: its `step` is an inner step.
        outer_optimizer: over all trainable parameters of the model; steps one fragment at a time. Or
            several, each over a part of the parameters, for example one per fragment.
        sync_every: inner steps in a window (the paper's H).
        backup_device: where the global parameters are kept; None: in CPU memory.
        pin_memory: page-locked, if that is CPU memory and there is a CUDA device.
        fragments: a number of parts of about equal size, or a list with a module, or parameter
            names, for each; None: one.
        fragment_sync_delay: inner steps between sending a fragment and applying it, behind which
            its communication hides (tau).
        fragment_update_alpha: how much of the local parameters stays when a fragment is applied:
            0, they become the global ones; 1, they stay what they are.
        codec: None, "int8", "int4" or "fp8": what pseudo-gradients travel as.
        error_feedback: keep what the codec loses and send it the next time.
        weighted, bucket_bytes, keep_windows: as `LocalSGD`.

    All settings must be equal in all members: checked when they join. Raises ValueError for those
    that contradict each other.
    """

    KEY = "diloco"

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | Sequence[Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        *,
        fragments: FragmentSpec = None,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        codec: str | None = None,
        error_feedback: bool = False,
        weighted: bool | str = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        keep_windows: bool = False,
    ) -> None:
        if outer_optimizer is inner_optimizer:
            raise ValueError("inner_optimizer and outer_optimizer must be two optimizers")
        outer = OuterOptimizerStep(
            model,
            split(model, fragments),
            outer_optimizer,
            fragment_update_alpha=fragment_update_alpha,
            codec=codec,
            error_feedback=error_feedback,
            bucket_bytes=bucket_bytes,
            backup_device=backup_device,
            pin_memory=pin_memory,
        )
        super().__init__(
            manager,
            outer,
            inner_optimizer,
            Schedule(sync_every, len(outer.fragments), fragment_sync_delay),
            weighted=weighted,
            keep_windows=keep_windows,
            settings=f", {outer.settings}",
        )


def _check_covers(outer: OuterOptimizer, fragments: Sequence[Fragment]) -> None:
    known = {id(p) for group in outer.param_groups for p in group["params"]}
    for fragment in fragments:
        for name, p in zip(fragment.names, fragment.parameters, strict=True):
            if id(p) not in known:
                raise ValueError(
                    f"outer_optimizer lacks parameter {name!r}: build it over model.parameters()"
                )
