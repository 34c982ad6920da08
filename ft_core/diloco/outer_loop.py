"""The outer loop: what LocalSGD and DiLoCo do between a member's inner steps.

A context manager around a training loop. A hook counts the inner optimizer's steps; at the ends of
slots (`ft_core.diloco.schedule`) a fragment is *launched* (its values are sent) and *applied* (its
values are awaited, the step is voted on, the model updated; `ft_core.diloco.outer_step`). One outer
step is one step of the manager. Its attempt is opened when the slot begins, so that the quorum is
there before it is needed and joiners are served the global state while the others compute. It is
bound to the quorum at the launch, and voted on when the fragment is applied. What may go wrong, and
what then becomes of a window, is in docs/diloco_protocol.md.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor
from torch.optim import Optimizer

from ft_core.diloco.fragments import Fragment, describe
from ft_core.diloco.global_state import drop_bad_state, refuse_drifting
from ft_core.diloco.outer_step import OuterReduce, OuterStep, squared_norm
from ft_core.diloco.schedule import Schedule, ScheduleEvent, Windows
from ft_core.optimizer import frozen_parameters, refuse_newcomers, refuse_unfrozen
from ft_core.process_group import ProcessGroupError
from ft_core.replica.status import WorldSizeMode
from ft_core.step import update

if TYPE_CHECKING:
    from ft_core.manager import Manager

log = logging.getLogger("ft_core")

BIND_TRIES = 3
COMPARED_WITHIN = 32
"""Outer steps in which members compare all global parameters."""
UNFREEZE = "Make it while all of them are trainable, and freeze them after that"
RELAUNCHES = 2
"""How often a kept window is sent again at once after its outer step was discarded."""


class _NothingContributed(RuntimeError):
    """No participant had a window that counts; that is no member's fault."""


class OuterLoop:
    """See the module's docstring. Thread: the training loop's."""

    KEY: ClassVar[str]
    """Of its part of the manager's state."""

    JOINS_AT_ENTRY: ClassVar[bool] = True
    """Join where `with` begins, if the manager's state does not drift. False: join after the first inner
    step, which a member that heals then loses."""

    def __init__(
        self,
        manager: Manager,
        outer: OuterStep,
        inner_optimizer: Optimizer,
        schedule: Schedule,
        *,
        weighted: bool | str,
        keep_windows: bool,
        settings: str,
    ) -> None:
        if manager.step.weighted:
            raise ValueError(
                f"give weighted to {type(self).__name__}, not to the Manager: an outer step's mean "
                "is over windows, not over batches"
            )
        if manager.spares:
            raise ValueError(
                f"{type(self).__name__} has no hot spares: Manager(spares={manager.spares}) serves loops "
                "that average gradients in each step"
            )
        assert outer.state is not None
        self._manager, self._inner = manager, inner_optimizer
        self._outer, self._state, self._fragments = outer, outer.state, outer.fragments
        self._frozen = frozen_parameters(outer.model)
        self._schedule = schedule
        unit = "steps" if weighted is True else (weighted or "")
        self._windows = Windows(len(self._fragments), schedule.sync_every, unit)
        self._keep = keep_windows
        self._hook: Any = None
        self._open = False  # an attempt is under way
        self._loaded = False  # the state came from a peer or a checkpoint
        self._was_current = False  # this process has been at the quorum's position
        self._contributed = False  # this process, to the outer step under way
        self._torn = False  # a heal is overwriting the global state
        self._local_step = 0
        self._syncs = False  # in `sync`
        self.to_sync = 0
        """Outer steps that are left of the `sync` under way; 0: of none. While a state is loaded, a member that
        takes its peer's place sets it to the peer's: its own `sync` is then the rest of that one. The loop's thread."""
        self._moved = False  # it has taken a peer's place in the data, where something else is due
        self._sent: OuterReduce | None = None  # the fragment that is on its way
        self._loop_thread = threading.get_ident()
        self.control: Callable[[], bytes] = bytes
        """What this member's vote on an outer step carries: see `Manager.should_commit`. The loop's thread."""
        self.stats = outer.stats
        manager.register_schema(
            self.KEY,
            f"{describe(self._fragments, outer.model)}, sync_every={schedule.sync_every}, "
            f"delay={schedule.delay}, weighted={unit or False}, "
            f"bucket_bytes={outer.bucket_bytes}, keep_windows={keep_windows}{settings}",
        )
        manager.register_compared(
            self.KEY, self._state.state_dict()["parameters"].values, within=COMPARED_WITHIN
        )
        # A window that is to be kept is measured from the present globals until they are loaded.
        # The outer optimizer's moments are made by its first update.
        manager.state.register(
            self.KEY,
            self._load_healed,
            self._served,
            in_place=False,
            sharded_as=outer.model.parameters(),
        )

    # ------------------------------------------------------------------ for the training loop

    def __enter__(self) -> Self:
        """Join the quorum (with a synchronous one: heal, too), and watch the inner optimizer.

        Raises as `Manager.start_quorum`; ValueError if the manager's own state holds the model.
        """
        if self._hook is not None:
            raise RuntimeError(f"this {type(self).__name__} is entered already")
        first = not self._was_current and not self._loaded
        if first:
            self._outer.form.check()
            self._state.snapshot()  # the model may have been filled since construction
        if first and self.JOINS_AT_ENTRY:
            refuse_drifting(self._manager, self.KEY, self._outer.model, self._inner)
        if not self._open and self.JOINS_AT_ENTRY:
            self._open_slot()
            while self._moved:  # to where a peer waits, with what is due there
                self._do_what_is_due()
        self._hook = self._inner.register_step_post_hook(self._after_inner_step)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Stop watching. An outer step under way is brought to its end; on an error it is dropped,
        and the model returns to the global parameters."""
        self._hook.remove()
        self._hook = None
        if error is None:
            if self._sent is not None:
                self._apply()
            return
        if self._sent is not None:
            self._manager.report_error(RuntimeError(f"the training loop raised {error!r}"))
            self._sent, self._open = None, False
        self._local_step = 0
        if not self._torn:
            self._state.restore_all()
        self._windows.drop_all()

    def sync(self) -> bool:
        """Run the outer steps of one whole window now, wherever the slots stand, and wait.

        All members must call it at the same place. Returns whether all of them were committed.
        """
        if self._hook is None:
            raise RuntimeError(f"sync() works inside `with {type(self).__name__}(...)` only")
        committed, self._syncs = True, True
        self._moved = False  # wherever it is by now, this is due
        self.to_sync = self.to_sync or len(self._fragments) + (self._sent is not None)
        try:
            while self.to_sync:
                if self._sent is None:
                    if not (self._open or self._open_slot()) or not self.to_sync:
                        break
                    self._launch()
                committed = self._apply() and committed
        finally:
            self._syncs, self.to_sync = False, 0
        return committed and not self._manager.left()

    def add_samples(self, samples: int) -> None:
        """Count samples of the inner step under way, with weighted="samples"; before its step."""
        self._windows.add_samples(samples)

    def drop_window(self, why: str) -> None:
        """Discard this member's own work since the last outer steps (a loss that exploded, say).

        The model returns to the global parameters now, and the window goes on from there: the
        others lose nothing, unless a fragment is on its way. All ranks of a group must call it.
        """
        if self._sent is not None:
            self._manager.report_error(RuntimeError(why))
        self._give_up_window(why)

    @property
    def in_slot(self) -> bool:
        """Whether this member is in a quorum in which its slot has begun. False behind an outer step whose quorum has
        ended: it is in the next one behind its next inner step. Asking that quorum for anything waits only then."""
        return self._open

    @property
    def local_step(self) -> int:
        """Inner steps since the slot began, with the one that has just ended. While a state is loaded,
        a member that takes its peer's place in the data sets it to the peer's."""
        return self._local_step

    @local_step.setter
    def local_step(self, steps: int) -> None:
        self._local_step, self._moved = steps, not self._syncs

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: the global parameters and buffers, and the outer optimizer's state.

        Goes with `manager.state_dict()`. The unfinished window is not part of it.
        """
        return self._state.state_dict(copy=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint, into the model too; before the first `with`.

        Raises RuntimeError later, ValueError if it is another model's.
        """
        if self._was_current or self._open:
            raise RuntimeError("load_state_dict must be called before the first outer step begins")
        self._state.load_state_dict(state)
        self._state.restore_all()
        self._loaded = True

    # ------------------------------------------------------------------ inner steps

    def _after_inner_step(self, *_: Any) -> None:
        refuse_unfrozen(self._frozen, self._inner, f"when {type(self).__name__} was made", UNFREEZE)
        self._windows.inner_step()
        self._local_step += 1
        self.to_sync = 0  # the loop was not at the end of a peer's, after all
        if not self._open and not self._open_slot():
            return
        self._do_what_is_due()
        while self._moved:
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        self._moved = False
        due = self._schedule.due(self._manager.current_step(), self._local_step)
        if due and self._sent is None:
            self._launch()
            if self._moved:
                return
        if ScheduleEvent.APPLY in due:
            self._apply()
        elif self._sent is None and not self._manager.errored() and self._manager.step_failed():
            # The members changed in a way that this attempt can't follow (a peer must heal from
            # this state, or this member must). Nothing was reduced: nothing is lost.
            self._restart()

    def _open_slot(self, *, patient: bool = True) -> bool:
        """Open an attempt: the slot begins. Whether it does.

        Not `patient`: only within the present quorum (`Manager.try_start_quorum`).
        """
        self._loop_thread = threading.get_ident()
        manager = self._manager
        self._open = False  # also where this raises: a loop may catch that, and come here again
        if not patient:
            self._open = manager.try_start_quorum()
        elif not manager.left():
            manager.start_quorum()
            self._open = True
        return self._open

    def _restart(self) -> None:
        """Open another attempt in the same slot; this one has failed before its launch."""
        self._open = False
        self._manager.should_commit()
        self._manager.start_quorum()
        self._open = True

    # ------------------------------------------------------------------ launch

    def _launch(self) -> None:
        """Send the scheduled fragment; `_apply` finds out what became of it. Nothing is sent if this
        member has moved: it is not due there."""
        self._refuse_newcomers()
        self._outer.form.check()
        manager, bad = self._manager, ""
        if manager.errored() is not None:
            bad = str(manager.errored())
            self._give_up_window(bad)
            self._restart()
            if self._moved:
                return
        for _ in range(BIND_TRIES):
            fragment = self._scheduled(manager.current_step())
            deltas = self._state.deltas(fragment)
            squared = squared_norm(deltas)
            if not math.isfinite(squared):
                bad = "parameters are not finite"
                self._give_up_window(bad)
                deltas, squared = self._state.deltas(fragment), 0.0
            step = manager.bind_step()
            if step is not None:
                break
            self._restart()
            if self._moved:
                return
        else:
            return
        if bad and manager.group_world_size > 1:
            # The other ranks of the group know nothing of it, and would contribute.
            manager.report_error(RuntimeError(f"a rank's window was dropped: {bad}"))
        if not manager.is_healing():
            self._was_current = True
            self._windows.in_step()
        actual = self._scheduled(step)
        if actual is not fragment:  # this member is behind, so it contributes nothing anyway
            fragment, deltas, squared = actual, self._state.deltas(actual), 0.0
        self._send(fragment, deltas, squared)

    def _refuse_newcomers(self) -> None:
        """Raise ValueError if the inner optimizer trains parameters that the model has got since this loop was made:
        they are in no fragment."""
        known = {id(p) for fragment in self._fragments for p in fragment.parameters}
        known.update(id(p) for _, p in self._frozen)
        groups = self._inner.param_groups
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        new, named = trained - known, self._outer.model.named_parameters()
        refuse_newcomers(
            [name for name, p in named if id(p) in new],
            f"{type(self).__name__} was made",
        )

    def _scheduled(self, step: int) -> Fragment:
        return self._fragments[self._schedule.fragment_of(step)]

    def _send(self, fragment: Fragment, deltas: Sequence[Tensor], squared: float) -> None:
        self._contributed = self._manager.is_participating()
        if self._contributed:
            self._windows.sent(fragment.index)
        weight = self._windows.weight(fragment.index)
        self._sent = self._outer.launch(
            self._manager, fragment, deltas, weight=weight, squared=squared
        )

    # ------------------------------------------------------------------ apply

    def _apply(self) -> bool:
        """End the outer step under way, and begin the next slot. Returns whether it committed."""
        committed = self._complete()
        relaunches = RELAUNCHES if self._keep else 0
        while not committed and relaunches and self._open_slot():
            relaunches -= 1
            if self._syncs and not self.to_sync:
                return True  # it has healed: its peers have made the last one
            if not self._moved:
                self._launch()
            if self._moved:
                return False
            committed = self._complete()
        self._local_step, self.to_sync = 0, max(0, self.to_sync - 1)
        self._open_slot(patient=False)
        return committed

    def _complete(self) -> bool:
        """Wait for the fragment, vote, and do what the decision asks for."""
        sent, manager = self._sent, self._manager
        if sent is not None:
            sent.wait()
        if manager.errored() is None and (sent is None or not sent.weight_sum > 0):
            manager.report_error(_NothingContributed("nothing was contributed to the outer step"))
        self._sent, self._open = None, False
        try:
            committed = self._vote()
        except BaseException:
            self._state.restore_all()
            self._windows.drop_all()
            raise
        if not committed:
            self._discard(sent)
            return False
        assert sent is not None
        update(manager, partial(self._finish, sent))
        self.stats.committed += 1
        return True

    def _vote(self) -> bool:
        """The end of the step. Tests put their faults in front of it.

        One that joins within a `sync` would go on to its own next slot, and miss the rest."""
        more_follow = self._syncs and self.to_sync > 1
        return self._manager.should_commit(control=self.control(), admits=not more_follow)

    def _finish(self, sent: OuterReduce) -> None:
        """The outer step was committed."""
        fragment, kept = sent.fragment, None
        if self._keep and not self._contributed and not self._is_spare():
            kept = self._state.deltas(fragment)  # it could not contribute yet: it will
        self._outer.finish(sent)
        self._windows.committed(fragment.index)
        self._was_current = True
        if kept is not None:
            self._state.rebase(fragment, kept)
        else:
            self._windows.restart(fragment.index)

    def _discard(self, sent: OuterReduce | None) -> None:
        """The outer step was discarded."""
        self.stats.discarded += 1
        error = self._manager.errored()
        own = error is not None and not isinstance(error, (ProcessGroupError, _NothingContributed))
        if sent is None:
            return
        if own:
            self._give_up_window(str(error))
        elif not self._keep:
            self._state.restore(sent.fragment)
            self._windows.restart(sent.fragment.index)
            if self._outer.is_last(sent.fragment):
                self._state.restore_buffers()

    def _give_up_window(self, why: str) -> None:
        """Discard this member's own work: the whole model returns to the global state."""
        log.warning(
            "the window is dropped, and the model returns to the global parameters: %s", why
        )
        self._state.restore_all()
        self._windows.drop_all()
        self.stats.void += 1
        drop_bad_state(self._inner)

    def _is_spare(self) -> bool:
        return self._manager.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES

    # ------------------------------------------------------------------ heal

    def _served(self) -> dict[str, Any]:
        """For healing peers, and for the digest of the start."""
        # The heal thread asks for memory to receive into, but a window that is to be kept is
        # measured from the present global parameters.
        foreign = threading.get_ident() != self._loop_thread
        copy = foreign and self._keep and self._was_current
        self._torn = foreign and not copy
        return self._state.state_dict(copy=copy)

    def _load_healed(self, state: dict[str, Any]) -> None:
        """A peer's global state has arrived. The window goes on from there, or is dropped.

        It is dropped if it may have been counted already, because it was sent in an outer step whose
        decision never reached this member. It is kept only with `keep_windows`, by a member that
        was current before.
        """
        keeps = self._keep and self._was_current and not self._is_spare()
        kept = [f for f in self._fragments if keeps and self._windows.may_be_kept(f.index)]
        self._outer.forget()
        self._state.overtake(state, kept)
        for fragment in self._fragments:
            if fragment not in kept:
                self._windows.restart(fragment.index)
        self._windows.in_step()
        self._torn, self._loaded = False, True
