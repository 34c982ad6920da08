"""The outer loop: what LocalSGD and DiLoCo do between a member's inner steps.

A context manager around a training loop. A hook counts the inner optimizer's steps; at the ends of
slots (`ft_core.diloco.schedule`) a fragment is *launched* (its values are sent) and *applied*
(awaited, voted on, stepped). One outer step is one step of the manager: the attempt is opened when
the slot begins, so that the quorum is there before it is needed and joiners are served the global
state while the others compute; it is bound to the quorum at the launch, and voted on when it is
applied. What may go wrong, and what then becomes of a window, is in docs/diloco_protocol.md.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ft_core.attempts import attempt_failed, bind, start
from ft_core.diloco.fragments import Fragment, describe
from ft_core.diloco.global_state import GlobalState, drop_bad_state, refuse_drifting
from ft_core.diloco.outer_step import OuterReduce, OuterStats, squared_norm
from ft_core.diloco.schedule import Schedule, ScheduleEvent
from ft_core.diloco.windows import Windows
from ft_core.process_group import ProcessGroupError
from ft_core.replica.participation import WorldSizeMode

if TYPE_CHECKING:
    from ft_core.manager import Manager

log = logging.getLogger("ft_core")

BIND_TRIES = 3
RELAUNCHES = 2  # of a kept window whose outer step was discarded, at once


class _Nobody(RuntimeError):
    """There is nothing to step on, by nobody's fault."""


class OuterLoop(ABC):
    """See the module's docstring. Thread: the training loop's."""

    KEY: ClassVar[str]
    """Of its part of the manager's state."""

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        inner_optimizer: Optimizer,
        schedule: Schedule,
        fragments: Sequence[Fragment],
        outer_optimizer: Optimizer | None,
        *,
        weighted: bool | str,
        bucket_bytes: int,
        keep_windows: bool,
        settings: str,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        if manager.step.weighted:
            raise ValueError(
                f"give weighted to {type(self).__name__}, not to the Manager: an outer step's mean "
                "is over windows, not over batches"
            )
        self._manager, self._model, self._inner = manager, model, inner_optimizer
        self._schedule, self._fragments = schedule, list(fragments)
        unit = "steps" if weighted is True else (weighted or "")
        self._windows = Windows(len(self._fragments), schedule.sync_every, unit)
        self._bucket_bytes, self._keep = bucket_bytes, keep_windows
        self._state = GlobalState(
            model, self._fragments, outer_optimizer,
            backup_device=backup_device, pin_memory=pin_memory,
        )  # fmt: skip
        self._hook: Any = None
        self._open = False  # an attempt is under way
        self._loaded = False  # the state came from a peer or a checkpoint
        self._settled = False  # this process has stood at the quorum's position
        self._healed_now = False  # ... and was brought there in this attempt
        self._torn = False  # a heal is overwriting the global state
        self._local_step = 0
        self._flight: OuterReduce | None = None
        self._loop_thread = threading.get_ident()
        self.stats = OuterStats()
        manager.register_schema(
            self.KEY,
            f"{describe(self._fragments, model)}, sync_every={schedule.sync_every}, "
            f"delay={schedule.delay}, weighted={unit or False}, bucket_bytes={bucket_bytes}, "
            f"keep_windows={keep_windows}{settings}",
        )
        # A window that is to be kept is measured from the present globals until they are loaded.
        manager.state.register(self.KEY, self._load_healed, self._served, lends=False)

    # ------------------------------------------------------------------ for the training loop

    def __enter__(self) -> Self:
        """Join the quorum (with a synchronous one: heal, too), and watch the inner optimizer.

        Raises as `Manager.start_quorum`; ValueError if the manager's own state holds the model.
        """
        if self._hook is not None:
            raise RuntimeError(f"this {type(self).__name__} is entered already")
        if not self._settled and not self._loaded:
            self._state.snapshot()  # the model may have been filled since construction
            refuse_drifting(self._manager, self.KEY, self._model, self._inner)
        if not self._open:
            self._begin()
        self._hook = self._inner.register_step_post_hook(self._after_inner_step)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Stop watching. An outer step under way is brought to its end; on an error it is dropped,
        and the model returns to the global parameters."""
        self._hook.remove()
        self._hook = None
        if error is None:
            if self._flight is not None:
                self._apply()
            return
        if self._flight is not None:
            self._manager.report_error(RuntimeError(f"the training loop raised {error!r}"))
            self._flight, self._open = None, False
        if not self._torn:
            self._state.restore_all()
        self._windows.drop_all()

    def sync(self) -> bool:
        """Have the outer steps of one whole window now, wherever the slots stand, and wait.

        All members must call it at the same place. Whether all of them were committed.
        """
        if self._hook is None:
            raise RuntimeError(f"sync() works inside `with {type(self).__name__}(...)` only")
        committed = True
        if self._flight is not None:
            committed = self._apply()
        for _ in self._fragments:
            if self._open or self._begin():
                self._launch()
                committed = self._apply() and committed
        return committed and not self._manager.left()

    def add_samples(self, samples: int) -> None:
        """Count samples of the inner step under way, with weighted="samples"; before its step."""
        self._windows.add_samples(samples)

    def drop_window(self, why: str) -> None:
        """This member's own work since the last outer steps is no good (a loss that exploded).

        The model returns to the global parameters now, and the window goes on from there: the
        others lose nothing, unless a fragment is on its way. All ranks of a group must call it.
        """
        if self._flight is not None:
            self._manager.report_error(RuntimeError(why))
        self._give_up_window(why)

    @property
    def local_step(self) -> int:
        """Inner steps since the slot began."""
        return self._local_step

    @local_step.setter
    def local_step(self, steps: int) -> None:  # one that has taken a peer's place in the data
        self._local_step = steps

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: the global parameters and buffers, and the outer optimizer's state.

        Goes with `manager.state_dict()`. The unfinished window is no part of it.
        """
        return self._state.state_dict(copy=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint, into the model too; before the first `with`.

        Raises RuntimeError later, ValueError if it is another model's.
        """
        if self._settled or self._open:
            raise RuntimeError("load_state_dict must be called before the first outer step begins")
        self._state.load_state_dict(state)
        self._state.restore_all()
        self._loaded = True

    # ------------------------------------------------------------------ LocalSGD or DiLoCo

    @abstractmethod
    def _contribution(self, fragment: Fragment, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
        """What this member gives to the mean, for each parameter."""

    @abstractmethod
    def _outer_update(self, fragment: Fragment, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make `means` of the contributions the fragment's new global parameters, in the model and
        in `_state`. Returns the mean delta that they amount to, for the statistics."""

    def _reduce(self, flight: OuterReduce, weight: float) -> None:
        """Start the reduction of the flight's values."""
        for bucket in flight.values.buckets():
            flight.send(self._manager, bucket)

    # ------------------------------------------------------------------ inner steps

    def _after_inner_step(self, *_: Any) -> None:
        self._windows.inner_step()
        if not self._open and not self._begin():
            return
        self._local_step += 1
        due = self._schedule.due(self._manager.current_step(), self._local_step)
        if due and self._flight is None:
            self._launch()
        if ScheduleEvent.APPLY in due:
            self._apply()
        elif self._flight is None and not self._manager.errored() and attempt_failed(self._manager):
            # The members changed in a way that this attempt can't follow (a peer must heal from
            # this state, or this member must). Nothing was reduced: nothing is lost.
            self._restart()

    def _begin(self, *, patient: bool = True) -> bool:
        """Open an attempt: the slot begins. Whether it does (`attempts.start`)."""
        self._loop_thread = threading.get_ident()
        self._local_step = 0
        self._healed_now = False
        self._open = start(self._manager, patient=patient)
        return self._open

    def _restart(self) -> None:
        """Open another attempt in the same slot; this one has failed before its launch."""
        self._manager.should_commit()
        self._open = True
        self._manager.start_quorum()

    # ------------------------------------------------------------------ launch

    def _launch(self) -> None:
        """Send the scheduled fragment; `_apply` finds out what became of it."""
        manager, bad = self._manager, ""
        if manager.errored() is not None:
            bad = str(manager.errored())
            self._give_up_window(bad)
            self._restart()
        for _ in range(BIND_TRIES):
            fragment = self._scheduled(manager.current_step())
            deltas = self._state.deltas(fragment)
            squared = squared_norm(deltas)
            if not math.isfinite(squared):
                bad = "parameters are not finite"
                self._give_up_window(bad)
                deltas, squared = self._state.deltas(fragment), 0.0
            step = bind(manager)
            if step is not None:
                break
            self._restart()
        else:
            return
        if bad and manager._options.group_world_size > 1:
            # The other ranks of the group know nothing of it, and would contribute.
            manager.report_error(RuntimeError(f"a rank's window was dropped: {bad}"))
        if not manager.is_healing():
            self._settled = True
            self._windows.in_step()
        actual = self._scheduled(step)
        if actual is not fragment:  # behind, so that it contributes nothing anyhow
            fragment, deltas, squared = actual, self._state.deltas(actual), 0.0
        self._send(fragment, deltas, squared)

    def _scheduled(self, step: int) -> Fragment:
        return self._fragments[self._schedule.fragment_of(step)]

    def _send(self, fragment: Fragment, deltas: Sequence[Tensor], squared: float) -> None:
        weight, manager = self._windows.weight(fragment.index), self._manager
        contribution = self._contribution(fragment, deltas)
        if manager.is_participating():
            self._windows.sent(fragment.index)
        flight = self._flight = OuterReduce.of(
            manager, fragment, contribution, weight, squared, self._bucket_bytes, self.stats
        )
        if self._is_last(fragment):
            flight.send_buffers(manager, self._state.buffers(), weight, self._bucket_bytes)
        self._reduce(flight, weight)
        flight.watch()

    def _is_last(self, fragment: Fragment) -> bool:
        return fragment.index == len(self._fragments) - 1

    # ------------------------------------------------------------------ apply

    def _apply(self) -> bool:
        """End the outer step under way, and begin the next slot. Whether it was committed."""
        committed = self._settle()
        relaunches = RELAUNCHES if self._keep else 0
        while not committed and relaunches and self._begin():
            relaunches -= 1
            self._launch()
            committed = self._settle()
        self._local_step = 0
        self._begin(patient=False)
        return committed

    def _settle(self) -> bool:
        flight, manager = self._flight, self._manager
        if flight is not None:
            flight.wait()
        if manager.errored() is None and (flight is None or not float(flight.meta[0]) > 0):
            manager.report_error(_Nobody("nothing was contributed to the outer step"))
        self._flight, self._open = None, False
        try:
            committed = self._vote()
        except BaseException:
            self._state.restore_all()
            self._windows.drop_all()
            raise
        if not committed:
            self._discard(flight)
            return False
        assert flight is not None
        self._finish(flight)
        self.stats.committed += 1
        return True

    def _vote(self) -> bool:
        """The end of the step. Tests put their faults in front of it."""
        return self._manager.should_commit()

    def _finish(self, flight: OuterReduce) -> None:
        """The outer step was committed: the same computation in all members."""
        fragment, total = flight.fragment, float(flight.meta[0])
        kept = None
        if self._healed_now and self._keep and not self._is_spare():
            kept = self._state.deltas(fragment)  # it could not contribute yet: it will
        means = [view.div_(total) for view in flight.values.views]
        mean_deltas = self._outer_update(fragment, means)
        squared = float(flight.meta[1]) / total - squared_norm(mean_deltas)
        self.stats.divergence = math.sqrt(max(0.0, squared))
        if flight.take_buffers(self._state.buffers(), total):
            self._state.take_buffers()
        self._windows.committed(fragment.index)
        self._settled = True
        if kept is not None:
            self._state.rebase(fragment, kept)
        else:
            self._windows.restart(fragment.index)

    def _discard(self, flight: OuterReduce | None) -> None:
        """The outer step was discarded."""
        self.stats.discarded += 1
        error = self._manager.errored()
        own = error is not None and not isinstance(error, (ProcessGroupError, _Nobody))
        if own and flight is not None:
            self._give_up_window(str(error))
        elif flight is not None and not self._keep:
            self._state.restore(flight.fragment)
            self._windows.restart(flight.fragment.index)
            if self._is_last(flight.fragment):
                self._state.restore_buffers()

    def _give_up_window(self, why: str) -> None:
        """This member's own work is no good: all of it returns to the global state."""
        log.warning("the window is dropped, and the model returns to the global parameters: %s", why)
        self._state.restore_all()
        self._windows.drop_all()
        self.stats.void += 1
        drop_bad_state(self._inner)

    def _is_spare(self) -> bool:
        return self._manager._seat.mode is WorldSizeMode.FIXED_WITH_SPARES

    # ------------------------------------------------------------------ heal

    def _served(self) -> dict[str, Any]:
        """For healing peers, and for the digest of the start."""
        # The heal thread asks for memory to receive into, but a window that is to be kept is
        # measured from the present global parameters.
        foreign = threading.get_ident() != self._loop_thread
        copy = foreign and self._keep and self._settled
        self._torn = foreign and not copy
        return self._state.state_dict(copy=copy)

    def _load_healed(self, state: dict[str, Any]) -> None:
        """A peer's global state has arrived. The window goes on from there, or is dropped.

        Dropped, if it may have been counted already: it was sent in an outer step of which this
        member never heard the end. Kept only with `keep_windows`, by a member that had a state of
        the quorum's before.
        """
        keeps = self._keep and self._settled and not self._is_spare()
        kept = [f for f in self._fragments if keeps and self._windows.may_be_kept(f.index)]
        self._state.overtake(state, kept)
        for fragment in self._fragments:
            if fragment not in kept:
                self._windows.restart(fragment.index)
        self._windows.in_step()
        self._torn, self._loaded, self._healed_now = False, True, True
