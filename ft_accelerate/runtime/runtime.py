"""One training process: its manager, the position of its script, its steps and operations.

    loader asks for a batch   `at_fetch`: a window begins; join, heal, serve others
    backward                  `reducer`: gradients are averaged while backward runs; at its end the
                              step is voted on, and retried from kept gradients until committed
    gather, reduce, ...       `operation`: an agreement, repeated until it is committed
    optimizer.step            local: its gradients are committed already

So when the optimizer steps nothing can fail any more: a raw loop never sees a discarded step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ft_accelerate.plugin.options import FaultTolerancePlugin, GroupPlace, Supervision
from ft_accelerate.runtime import peer_state as states
from ft_accelerate.runtime.checked_collectives import CheckedCollectives, Diverged, Kind
from ft_accelerate.runtime.membership import Membership
from ft_accelerate.runtime.models import FaultTolerantModel
from ft_accelerate.runtime.script_position import Iteration, Phase
from ft_core.collectives.agreement import agree
from ft_core.collectives.retry import RetryableReducer, RetryHooks

log = logging.getLogger("ft_accelerate")

PATIENCE = 0.25
"""Of the timeout: how long a header waits for processes that may be at a gradient step without one."""
NO_QUORUM = -1
UNUSED_HINT = (
    "pass kwargs_handlers="
    "[DistributedDataParallelKwargs(find_unused_parameters=True)] to Accelerator"
)


class Runtime(Membership):
    """Fault tolerance of one process. The loop's thread, but where said otherwise."""

    def __init__(
        self, options: FaultTolerancePlugin, place: GroupPlace, supervision: Supervision
    ) -> None:
        hooks = RetryHooks(
            begin=self._begin_gradients,
            vote=self._vote,
            again=self._begin_gradients_again,
            committed=self._graded,
            refused=self._gradients_refused,
            unused_hint=UNUSED_HINT,
        )
        super().__init__(options, place, supervision, RetryableReducer(hooks))
        self._models: list[weakref.ref[FaultTolerantModel]] = []
        self._graded_in = NO_QUORUM
        """The quorum that has committed a gradient step, so that later ones go without a header."""
        self.unfinished: Callable[[], None] | None = None
        """Ends what `begin_early` has begun. Called before any other event."""

    # ------------------------------------------------------------------ models

    @property
    def ready(self) -> bool:
        """Whether there is something to train: from then on operations reach over the quorum."""
        # A model that was freed does not end the operations of its process.
        met = bool(self._models) and self.manager is not None
        return (met or any(ref() is not None for ref in self._models)) and not self._closed

    @property
    def beginning(self) -> bool:
        """Whether no model was prepared yet (`ft_accelerate.runtime.startup_collectives`)."""
        return not self._models and not self._closed

    def wrap(self, module: Any, **kwargs: Any) -> FaultTolerantModel:
        """What `prepare_model` uses in place of DistributedDataParallel."""
        model = FaultTolerantModel(
            self.reducer,
            module,
            is_fast_forward=lambda: self.position.fast_forwarding,
            is_replay=lambda: self.position.phase is Phase.REPLAY,
            on_skipped_backward=self._skipped_backward,
            **kwargs,
        )
        self._models.append(weakref.ref(model))
        return model

    def models(self) -> list[FaultTolerantModel]:
        return [model for ref in self._models if (model := ref()) is not None]

    def training(self) -> bool:
        """Whether the script is about to train: a prepared model is in training mode."""
        return any(model.training for model in self.models())

    # ------------------------------------------------------------------ a batch is asked for

    def at_fetch(self, loader: Any, iteration: Iteration) -> None:
        """Before the next batch: where windows begin, and where a process that is behind arrives."""
        position = self.position
        while True:
            if position.phase is Phase.FAST_FORWARD:
                if not position.arrive(iteration):
                    self._end_if_told()
                    return
                self._arrived(iteration)
                if self._aside:
                    self._join("fetch")
                    continue
            self._settle()
            exhausted = iteration.yielded and loader.end_of_dataloader
            if position.phase is not Phase.LIVE or exhausted or not self.ready:
                return
            if not self.training():
                return
            position.open_window(iteration)
            if self._open:
                return
            self._begin("fetch")
            if position.phase is Phase.LIVE:
                return

    def _arrived(self, iteration: Iteration) -> None:
        """The script stands where its peers' window began: forget what it did while it fast-forwarded."""
        self._restore(models=True)
        for optimizer in self.accelerator._optimizers:
            optimizer.optimizer.zero_grad()

    def _settle(self) -> None:
        """Go live if it is time."""
        models = self.position.fast_forwarding
        target = self.position.target
        if self.position.settle():
            assert target is not None
            self._restore(models=models or target.at == "fetch")
            self._healed = None
            for arrived in self.on_live:
                arrived()
            states.reseed(torch.initial_seed(), self.process_index, target.events)
            log.info("live at event %s of the script", target.events)

    def _restore(self, *, models: bool) -> None:
        if self._healed is not None:
            states.restore(self.accelerator, self._healed, models=models)

    # ------------------------------------------------------------------ gradients

    def _begin_gradients(self) -> bool:
        """First gradients of a backward pass: whether to reduce."""
        self._settle()
        if self.position.grad_is_done:
            return False
        if self.unfinished is not None:
            raise RuntimeError(
                "gradients are to be averaged while a fragment of DiLoCo is on its way: use "
                "fragment_sync_delay=0 in a script that does both"
            )
        return self._begin_gradients_again()

    def _begin_gradients_again(self) -> bool:
        """Open an attempt. False: this process has healed, and its peers have done this step."""
        self._begin("grad")
        if self.position.grad_is_done:
            return False
        self._agree_on_gradients()
        return True

    def _agree_on_gradients(self) -> None:
        """Check that all processes are at this step; else the attempt fails.

        Not again under a quorum that has committed a gradient step, which all its members know
        (`ft_accelerate.runtime.checked_collectives`). With NCCL always, since it does not keep a
        header apart from gradients; and with several models, as the others may be at another one.
        """
        manager = self._manager
        if not manager.bind():
            return
        if self._graded_in != manager.quorum_id() or len(self._models) != 1:
            self._agree(Kind.GRADIENTS)

    def _graded(self) -> None:
        """A gradient step is committed."""
        self.position.graded()
        alike = self.options.commit == "quorum" and len(self._models) == 1
        alike = alike and self._device.type == "cpu"
        self._graded_in = self._manager.quorum_id() if alike else NO_QUORUM

    def _gradients_refused(self) -> None:
        """Backward is over, and its step was done by the peers."""
        if self.position.phase is Phase.REPLAY:
            self.position.replay_grad()

    def check_gradients(self) -> None:
        """Before an optimizer steps: backward has left nothing half done."""
        if self.reducer.busy:
            self.reducer.check_complete()

    def _skipped_backward(self) -> None:
        if self.position.phase is Phase.REPLAY and self.position.grad_is_done:
            self.position.replay_grad()

    # ------------------------------------------------------------------ operations

    def operation(
        self,
        kind: Kind,
        attempt: Callable[[CheckedCollectives, Callable[..., Any]], Any],
        alone: Callable[[], Any],
        size: Callable[[Any], int] = lambda result: 0,
        *,
        keep: bool = True,
    ) -> Any:
        """One operation over the quorum, repeated until it is committed.

        Args:
            attempt: `attempt(collectives, agree)` does it once; `agree` exchanges headers. What it
                returns counts if the attempt is committed.
            alone: the result where this process has no peers at this place of the script.
            size: bytes of a result.
            keep: keep the result for processes that come back in this window. False: they get
                `alone()`, since the result is in their state.
        """
        if self.unfinished is not None:
            finish, self.unfinished = self.unfinished, None
            finish()
        if self.beginning:
            return self.startup.operation(kind, attempt, alone)
        if not self.ready:
            return alone()
        agreed = agree(
            lambda: self._attempt(kind, attempt),
            begin=lambda: self._begin("op"),
            vote=self._vote,
            is_behind=self._op_is_done,
        )
        if agreed is not None:
            result = agreed.result
            self.position.log(result if keep else None, size(result) if keep else 0)
            return result
        if self.position.phase is Phase.FAST_FORWARD:
            return alone()
        result = self.position.replay_op()
        return alone() if result is None else result

    def _op_is_done(self) -> bool:
        """Whether the peers have done the operation that the script is about to do."""
        self._settle()
        return self.position.op_is_done

    def begin_early(
        self, kind: Kind, attempt: Callable[[CheckedCollectives, Callable[..., Any]], Any]
    ) -> Any:
        """Begin what a later `operation` of this kind ends; `unfinished` must say how.

        What `attempt` returns belongs to the attempt that is open now: it is void once
        `attempts_discarded` has grown. None where this process has nothing to begin.
        """
        if self.beginning or not self.ready:
            return None
        if self._op_is_done():
            return None
        self._begin("op")
        return None if self._op_is_done() else self._attempt(kind, attempt)

    def _attempt(self, kind: Kind, attempt: Callable[..., Any]) -> Any:
        def headers(nbytes: int = 0, shape: Any = ()) -> Any:
            return self._agree(kind, nbytes, shape)

        manager = self._manager
        if manager.errored() is not None:
            return None
        try:
            return attempt(
                CheckedCollectives(manager, self.process_index, self.num_processes, self._device),
                headers,
            )
        except ValueError:
            self.close()
            raise

    def _agree(self, kind: Kind, nbytes: int = 0, shape: Any = ()) -> Any:
        manager = self._manager
        collectives = CheckedCollectives(
            manager, self.process_index, self.num_processes, self._device
        )
        patience_s = None
        if manager.bind() and manager.quorum_id() == self._graded_in:
            patience_s = PATIENCE * self.options.timeout_s
        try:
            return collectives.agree(
                kind,
                self.position.events,
                self.position.agreed,
                nbytes,
                shape,
                patience_s=patience_s,
            )
        except Diverged:
            self.close()  # the others go on without this process
            raise
