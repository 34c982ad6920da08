"""Gradient steps of a Fabric loop under a quorum.

    a training loader fetches a batch   a window begins: start_quorum; heal if behind, serve peers
    forward, backward                   gradients are averaged over the participants; at the end of
                                        backward the step is voted on, and retried from the kept
                                        gradients until it is committed
    backward (of the same batch)        a further step
    optimizer.step()                    local: its gradients are committed

So the loop sees each batch once, whatever happens to other groups. If a group heals to another
place than that of the batch at hand, the rest of this pass of its loop has no effect, and its
loader goes to the peers' place (`loop_position.py`). With data that Fabric does not know, a window
begins at the forward.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from ft_core.collectives.retry import RetryableReducer, RetryHooks
from ft_core.errors import GroupLeft
from ft_core.heal.changed import ChangedInStep
from ft_core.heal.random_numbers import RandomNumbers
from ft_core.launch.ending import Sigterm
from ft_core.optimizer import Frozen, Strangers, refuse_unfrozen
from ft_core.replica.status import Participation
from ft_core.step import update
from ft_lightning.fabric.averaged_gradients import AveragedGradients
from ft_lightning.fabric.fabric_agreements import (
    BACKWARD,
    COMPARED_STEPS,
    UNKNOWN,
    FabricAgreementsMixin,
)
from ft_lightning.fabric.loop_position import LoaderPlace, Place, Progress, Where, Window
from ft_lightning.shared.step_collectives import forget_unscaling
from lighthouse.errors import TooFewLeft

log = logging.getLogger("ft_lightning")

UNFREEZE = "Set the model up with all of them trainable (and find_unused_parameters=True), and freeze them after that"
SET_UP = "Set their model up, too, when it has all its parameters: fabric.setup(model, optimizer)"

PAST = (
    "this process came back {}: its script runs through its past, with one batch of each loader in a pass. What it "
    "prints there counts for nothing, and it saves and logs nothing. With `for epoch in fabric.strategy.epochs(total)` "
    "in place of `for epoch in range(total)` it goes to its peers at once"
)
LEFT_OUT = (
    "this replica group came back between two backward passes of one optimizer step, and can't know what its "
    "peers have averaged in the first: call fabric.backward(loss) in place of loss.backward()"
)


class FabricStepMixin(FabricAgreementsMixin):
    """The part of the strategy that begins and ends steps. The loop's thread."""

    last_step_committed: bool | None = None
    """Whether the last optimizer step was committed; None before the first one's end. Any thread."""
    _part: Participation | None = None
    """In the quorum that this process has seen last."""
    _compared_in: int | None = None
    """The quorum under which a gradient step was committed: its members call the same."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the stock `backward`, which `fabric.backward` calls, so that a further step begins
        before it.

        It is not an override, since Lightning refuses `loss.backward()` where a strategy has one. With
        one step per batch `loss.backward()` works here.
        """
        super().__init_subclass__(**kwargs)
        inherited: Any = getattr(super(), "backward", None)
        if inherited is None:
            return

        @wraps(inherited)
        def backward(self: Any, *args: Any, **options: Any) -> None:
            if self._before_backward():
                inherited(self, *args, **options)
            self._window.after_backward()

        cls.backward = backward  # type: ignore[method-assign]

    def _prepare(self) -> None:
        super()._prepare()
        self._window = Window()
        self._sigterm = Sigterm(self._is_waiting)
        self._models: list[nn.Module] = []
        self._wrapped: list[Any] = []
        """Those of the models that are trained, in ft_core's wrapper."""
        self._frozen: Frozen = []
        self._known: list[Tensor] = []
        """Parameters of the models, as they were set up."""
        self._strangers = Strangers(lambda: self._known, SET_UP)
        self._optimizers: list[Any] = []
        self._averaged = AveragedGradients(self._wrapped, self._optimizers)
        self.progress = Progress()
        self._numbers = RandomNumbers()
        self._changed = ChangedInStep()
        self._starting = self._started = self._healed = self._took_over = False
        self._fed_by_loader = False
        self._fetching: LoaderPlace | None = None
        self._before: list[Place] = []
        """Places of the loaders when the window began."""
        self._epoch_before = 0
        """The progress's epoch then: a window of several batches may be longer than a pass over the data, and where a
        stream ends one begins before the next pass."""
        self._alone: Any = None
        """The optimizer that steps, where no loader says where a batch begins."""
        self._reducer: RetryableReducer | None = None
        self._kept: list[Tensor] | None = None
        """Buffers to put back when this pass of the loop has left out what it must."""
        self._counts_passes = self._past = False
        """The loop counts its passes over the data itself; it is in one that its peers have ended."""
        self._registered_before: dict[str, Any] | None = None
        """What was registered, to put back when the past is over, or this pass of the loop has left out what it must."""

    # ------------------------------------------------------------------ begin

    def _watch_forward(self, model: nn.Module) -> None:
        """Let a window begin with a forward of `model`, where no loader has begun one."""
        strategy = weakref.ref(self)

        def before_forward(module: nn.Module, args: Any) -> None:
            me = strategy()
            if me is not None and module.training and torch.is_grad_enabled():
                me.begin_window(by_loader=False)

        model.register_forward_pre_hook(before_forward)

    def _before_batch(self, place: LoaderPlace) -> None:
        """A loader is about to fetch; for training, if models train and gradients are recorded."""
        training = torch.is_grad_enabled() and any(model.training for model in self._models)
        self._end_if_told(training)
        if training:
            self._fetching = place
            self.begin_window(by_loader=True)

    def begin_window(self, *, by_loader: bool) -> None:
        """At a loader's fetch, or at a forward, where a window may begin or come again."""
        if self._starting or self._manager is None or not self._optimizers:
            return
        window = self._window
        if not by_loader:
            if self._fed_by_loader or window.open:
                return  # a further step of one batch begins with its backward
            self._end_if_told(True)
            self._refuse_unshared(None)
        elif not self._leads(self._fetching) or (window.open and not window.void):
            return
        self._fed_by_loader = by_loader
        if not self._started:
            self._start()
        if window.void:
            self._forget_gradients()
            self._put_back()
            self._changed.put_back()
            self._numbers.put_back()
        self._put_back_registered()
        if window.void and not self._abandoned():
            self._go_to_window()
        else:
            window.start_over()
            self._averaged.start_over()
            self._mark()
        if not self._open:
            self._attempt(Where.BOUNDARY)
        place = self._fetching if by_loader and self._counts_passes else None
        if place is not None and place.is_over:
            self._begin_past(place)
            return
        self._votes, self._strays = 0, ""
        self._mark()
        self._lost = self._healed = False
        window.begin()
        self._averaged.begin()
        self._kept = None if window.arrived else self._copies()
        self._changed.begin(self._models_by_prefix())
        if not window.arrived:
            self._registered_before = copy.deepcopy(self._registered_now())
        for model in self._wrapped:
            model.forget_forward()

    def _mark(self) -> None:
        """A window begins here, or comes here again."""
        self._note_places()
        self._numbers.mark()

    def _begin_past(self, place: LoaderPlace) -> None:
        """Leave the quorum until the loop has come to its peers' pass over the data. What this process has healed
        is as new as any if all others die meanwhile."""
        assert self._manager is not None
        behind = f"in pass {place.turn} over its data, and its peers are in pass {place.epoch}"
        log.warning(PAST.format(behind))
        self._open, self._past = False, True
        self._in_group.barrier()  # one that waits for its state still would wait for the others' next quorum
        self._manager.rejoin(behind, discard_state=False)
        self._give_up_lead()
        self._break_off()
        self._registered_before = copy.deepcopy(self._registered_now())

    def _in_past(self, place: LoaderPlace) -> bool:
        """Whether the iteration of `place` that has begun is of the loop's past, which ends here if it has come to
        its peers' pass."""
        if self._past:
            self._end_if_told(False)
            self._past = place is not self.progress.lead or place.is_over
        return self._past

    def _registered_now(self) -> dict[str, Any]:
        """The states of what the script has registered."""
        raise NotImplementedError

    def _put_registered(self, states: dict[str, Any]) -> None:
        raise NotImplementedError

    def _abandoned(self) -> bool:
        """Whether the loop began a new epoch instead of going on at the peers' place."""
        lead = self.progress.lead
        if self._open or lead is None:
            return False
        known = dict(zip(map(id, self.progress.places), self._before, strict=False))
        return id(lead) not in known or lead.epoch != known[id(lead)][0]

    def _leads(self, place: LoaderPlace | None) -> bool:
        """Whether windows begin with this loader's batches. They begin with those of the first
        loader that is read, while it is read; others are read within windows."""
        lead = self.progress.lead
        if lead is None or not lead.active or lead is place:
            self._refuse_unshared(place)
            self.progress.lead = place
        return self.progress.lead is place

    def _refuse_unshared(self, place: LoaderPlace | None) -> None:
        """Raise ValueError for training data of which a hot spare could not take over a share."""
        told = place is not None and place.placeable and place.sampler is not None
        if self._job.spares and self._job.data_shares > 1 and not told:
            raise ValueError(
                "spares needs training data of which a group can take over another one's share: "
                "DataLoaders over map-style datasets, given to fabric.setup_dataloaders, with the "
                "DistributedSampler that it puts into them; set spares=0 for other data"
            )

    def _start(self) -> None:
        """The first step of all."""
        raise NotImplementedError

    def _attempt(self, where: Where) -> None:
        """Be in a quorum. Raises as `Manager.start_quorum`. The caller ends a round."""
        manager = self._manager
        assert manager is not None
        self._thread = threading.get_ident()
        self._starting, self._where, self._healed = True, where, False
        too_few = False
        if where is not Where.ROUND:
            self._before_rounds.discard(self._votes)
        try:
            if self._sigterm.noted and not manager.in_quorum():
                self._sigterm.end()  # it came before: others may never come
            # Between steps the weights are in use: a validation is computed with one set of them.
            manager.start_quorum(takes_state=where is not Where.ROUND)
            while self._visit is not None:
                self._sit_in(self._visit)
                manager.start_quorum()
        except TooFewLeft:
            if where is not Where.BOUNDARY:
                raise
            too_few = True  # there may be no batch, as for the others. If there is, its backward asks again
        except GroupLeft:  # another rank of this group received SIGTERM, so this one ends, too
            self._sigterm.end()
        finally:
            self._starting = False
            self._where = where if where is Where.ROUND else None
        self._open = where is not Where.ROUND and not too_few
        self._follow_quorum()
        if self._part is not None and where is not Where.ROUND:
            self._follow_share(self._part, where)

    def _follow_quorum(self) -> None:
        """Call `_on_quorum` if this process's part in the quorum has changed."""
        part = None if self._manager is None else self._manager.step.part
        if part is not None and part is not self._part:
            self._part = part
            self._on_quorum()

    def _follow_share(self, part: Participation, where: Where) -> None:
        """Read the share of the data that this group has been given: from the batch on that is about to be
        fetched, or from the first of the window under way, all of which is computed once more."""
        if part.share is None or part.share == self.share:
            return
        self.share = part.share
        self._took_over = where is Where.BATCH and not self._healed
        for place in self.progress.places:
            if (sampler := place.sampler) is not None:
                sampler.rank = self.distributed_sampler_kwargs["rank"]
                if place.active:
                    place.read_again()
        if self._took_over:
            self._go_to_window()

    def _aligned(self) -> bool:
        lead = self.progress.lead
        return self._fed_by_loader and lead is not None and lead.placeable

    def _batch(self) -> tuple[int, int]:
        lead = self.progress.lead
        return (lead.at_hand, lead.epoch) if lead is not None and self._aligned() else UNKNOWN

    def _in_pass(self) -> bool:
        lead = self.progress.lead
        return self._window.open or (lead is not None and lead.active)

    # ------------------------------------------------------------------ gradients

    def _make_reducer(self) -> RetryableReducer:
        hooks = RetryHooks(
            begin=self._begin_gradients,
            vote=self._vote,
            again=self._begin_again,
            committed=self._committed,
            refused=self._gradients_refused,
            raised=self._backward_raised,
            unused_hint="pass find_unused_parameters=True to the strategy",
        )
        return RetryableReducer(hooks, self._manager)

    def _before_backward(self) -> bool:
        """`fabric.backward` is called; whether it is to compute gradients.

        Not in a pass that is void: parameters or running statistics may have changed under what
        it has computed. Its gradients are zeros.
        """
        window, manager = self._window, self._manager
        if self._votes_each_step and not window.muted:
            self._averaged.before_backward(window.place.committed)
        ready = manager is not None and self._started and self._fed_by_loader
        if ready and self._votes_each_step and not window.muted and not self._open:
            assert manager is not None
            if manager.left() or not self._open_in_batch():
                self._break_off()
        window.before_backward()
        self._put_back_on_arrival()
        if window.void:
            self._zero_gradients()
        return not window.void

    def _begin_gradients(self) -> bool:
        """The first gradients of a backward pass are there: whether they are to be averaged."""
        if not self._window.gradients():
            return False
        if self._trains_alone:
            self._refuse_to_train_alone()
        if not self._window.place.committed:
            self._changed.note()
        self._put_back_on_arrival()
        if not self._open and not self._open_in_batch():
            self._break_off()
            raise RuntimeError(
                "this replica group has healed to another place within loss.backward(), which "
                "ends its graph: call fabric.backward(loss) in place of loss.backward()"
            )
        if self._averaged.wanted:
            raise RuntimeError(LEFT_OUT)
        self._compare_calls(computes=True)
        return True

    def _open_in_batch(self) -> bool:
        """Be in a quorum. False: this group has healed, to a place other than the batch at hand, or was
        given another share of the data."""
        self._took_over = False
        self._attempt(Where.BATCH)
        moved, self._healed = self._healed or self._took_over, False
        return not moved

    def _vote(self) -> bool:
        """Backward has ended."""
        manager = self._manager
        assert manager is not None
        self._thread = threading.get_ident()
        if self._sigterm.noted:
            # The vote announces it: the next quorum is formed without this group at once.
            manager.leave_after_step()
        committed = manager.should_commit(control=self._control(), admits=self._may_heal_next())
        self._voted(committed)
        self._open = False
        if committed:
            part = manager.step.part
            self._compared_in = None if part is None else part.quorum_id
            self._follow_quorum()  # it may have changed while the step had reduced nothing yet
        if committed and self._healed:
            # It was evicted while it computed: its loop is not at its peers' place.
            manager.rejoin("healed within a step")
            self._break_off()
        return committed

    def _backward_raised(self) -> None:
        self._raised += 1

    def _committed(self) -> None:
        self._window.committed()
        self._averaged.committed()

    def _control(self) -> bytes:
        """What travels with this group's vote."""
        raise NotImplementedError

    def _begin_again(self) -> bool:
        """The step was discarded: open the next attempt; False: the kept gradients are void."""
        assert self._manager is not None
        if self._strays:
            log.warning(self._strays)
            if self._ahead:
                self._manager.rejoin("left out a batch")
        elif not self._manager.left() and self._open_in_batch():
            self._compare_calls()
            return True
        self._break_off()
        return False

    def _compare_calls(self, *, computes: bool = False) -> None:
        """Before the first gradients under a quorum: are all in a backward pass? Its members have seen then
        that they call the same. Where they stop doing so, a step fails, and another quorum follows."""
        manager = self._manager
        assert manager is not None
        if not self._votes_each_step or self._options.commit != "quorum" or not manager.bind():
            return
        part, seldom = manager.step.part, manager.current_step() % COMPARED_STEPS == 0
        if part is not None and (seldom or part.quorum_id != self._compared_in):
            self._all_call(BACKWARD, computes=computes)

    def _gradients_refused(self) -> None:
        self._window.refused()
        if self._window.void:
            self._zero_gradients()

    def _zero_gradients(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    # ------------------------------------------------------------------ updates

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Called by `optimizer.step()`: update the parameters with committed gradients.

        Does nothing in a pass that is void, and where the peers have made the update already;
        `last_step_committed` tells. Several optimizers may step on the gradients of one backward.
        Raises RuntimeError if no backward pass was committed before, or if optimizers take turns on
        data that Fabric does not know. The loop's thread.
        """
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)
        result = None if closure is None else closure()
        self.last_step_committed = not self._window.local
        if self.last_step_committed:
            self._check_update(optimizer)
            self.progress.step += self._window.count_update()
            assert self._manager is not None
            step = partial(super().optimizer_step, optimizer, **kwargs)
            output = update(self._manager, step)
            self._averaged.stepped(optimizer)
            return output if closure is None else result
        forget_unscaling(self.precision, optimizer)
        return result

    def _check_update(self, optimizer: Any) -> None:
        if self._manager is None or not self._window.fresh:
            raise RuntimeError(
                "the optimizer was stepped without gradients of a step: fetch a batch (in train mode, "
                "with gradients enabled) and call fabric.backward(loss) before"
            )
        if not self._is_alone:
            refuse_unfrozen(self._frozen, optimizer, "at fabric.setup", UNFREEZE)
            self._strangers.refuse(optimizer)
        if self._fed_by_loader or self._alone is None or self._is_alone:
            self._alone = optimizer
        if self._alone is not optimizer:
            raise RuntimeError(
                "optimizers that take turns need data from fabric.setup_dataloaders: else a "
                "replica group that comes back cannot know whose turn it is"
            )

    def _forget_gradients(self) -> None:
        for each in self._optimizers:
            each.zero_grad()
            forget_unscaling(self.precision, each)

    def _parameters(self) -> list[Tensor]:
        groups = (group for each in self._optimizers for group in each.param_groups)
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _models_by_prefix(self) -> dict[str, nn.Module]:
        return {f"{number}.": model for number, model in enumerate(self._models)}

    # ------------------------------------------------------------------ a pass that is void

    def _break_off(self) -> None:
        """What the loop does until it asks for a batch has no effect."""
        self._window.break_off()
        self._averaged.break_off()
        self._note_places()
        self._kept = self._copies()
        self._changed.begin(self._models_by_prefix(), all_small=True)

    def _places(self) -> list[Place]:
        return [place.now() for place in self.progress.places]

    def _note_places(self) -> None:
        self._before, self._epoch_before = self._places(), self.progress.epoch

    def _go_to_window(self) -> None:
        self.progress.epoch = self._epoch_before
        for place, before in zip(self.progress.places, self._before, strict=False):
            place.go_to(*before)

    def _buffers(self) -> list[Tensor]:
        return [buffer for model in self._models for buffer in model.buffers()]

    def _copies(self) -> list[Tensor]:
        """Of the buffers: forward passes change running statistics, also those without effect."""
        return [buffer.detach().clone() for buffer in self._buffers()]

    def _put_back(self) -> None:
        kept, self._kept = self._kept, None
        for buffer, value in zip(self._buffers(), kept or (), strict=False):
            # Past autograd: batch norm saves its statistics for a backward that does not read them.
            buffer.data.copy_(value)

    def _put_back_registered(self) -> None:
        if self._registered_before is not None:
            self._put_registered(self._registered_before)
            self._registered_before = None

    def _put_back_on_arrival(self) -> None:
        """The statistics that this group took from its peers, and what was registered, hold what it did again
        before it came to their place."""
        if self._kept is not None and self._window.arrived and not self._window.void:
            self._put_back()
            self._put_back_registered()

    # ------------------------------------------------------------------ SIGTERM

    def _is_waiting(self) -> bool:
        """Whether the loop waits for a quorum."""
        return self._starting

    def _end_if_told(self, training: bool) -> None:
        """End if SIGTERM has come, and no step is under way that could be the last one."""
        if not self._sigterm.noted:
            return
        manager = self._manager
        finishes = manager is not None and self._votes_each_step and not manager.left()
        if not self._window.open and not (training and finishes):
            self._sigterm.end()
