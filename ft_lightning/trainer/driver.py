"""The step protocol of a Trainer under a quorum: begin, reduce, vote, retry, heal.

    boundary (before a batch is fetched)   start_quorum: join, heal if behind, serve peers that are
    forward                                `self.log(sync_dist=True)` and others reduce in the step
    backward                               gradients are averaged over the participants
    end of backward                        vote; a discarded step is tried again from kept gradients
    optimizer.step                         local: its gradients are committed

Every backward pass that synchronizes is a step (`ft_core.collectives.retry`). Without gradient
accumulation and with one optimizer this is one step per batch. A window of accumulated batches votes
at its last backward. With manual optimization a batch may hold several steps; a later one begins
with its first gradient, or with the first collective of its forward. User code runs once: neither
`training_step` nor a hook is repeated when a step is discarded.

A group takes its peers' state only at the boundary. In the middle of a batch it may find that it is
behind, or that it would apply a different step from its peers. Then it abandons the batch:
`BatchAbandoned` unwinds to the loop, which fetches the next batch at the peers' place.

A group gives its state at the boundary, or while it tries again a step that began there: nothing
that travels has changed since, except for the loops' counters, which are counted back. After an
update within the batch (manual optimization) no state can be given, because the rest of the batch
is in local variables of user code. So votes keep newcomers waiting until the batch has had as many
steps as the one before. A group that is admitted within a batch nevertheless leaves again, and joins
until it is admitted at a boundary; its peers try the step again from kept gradients, without it. If
they are too few without it (`min_replicas`), the fit ends with an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ft_core.collectives.agreement import agree
from ft_core.collectives.retry import RetryableReducer, RetryHooks
from ft_core.collectives.sharded import RetryableShards
from ft_core.ddp import RetryableDistributedDataParallel
from ft_core.errors import GroupLeft, QuorumUnavailable
from ft_core.heal.changed import ChangedInStep
from ft_core.launch.ending import Sigterm
from ft_core.manager import Manager
from ft_core.replica.status import Participation
from ft_lightning.shared.step_collectives import (
    CopyRanks,
    end_step_as_stranger,
    forget_unscaling,
    gather_bytes,
    gather_in_step,
    operation,
    reduce_in_step,
    zero_loss,
)
from ft_lightning.trainer import healing
from ft_lightning.trainer.batches import Batches, DataShare
from ft_lightning.trainer.counters import rewind_counters
from ft_lightning.trainer.decisions import Decisions
from lighthouse.errors import TrainingOver

log = logging.getLogger("ft_lightning")


class Place(Enum):
    """Where in the code a quorum is asked for."""

    BOUNDARY = "before a batch"
    STEP = "in a batch"
    ROUND = "between batches"


class BatchAbandoned(BaseException):
    """Unwinds a batch whose step this group cannot apply. Caught in `advance` of the epoch's loop.

    Not an Exception: handlers in user code are not meant.
    """


class EndsFit(Sigterm):
    """Ends the fit instead of the process. `leave`: a method that raises what ends it, held weakly."""

    def __init__(self, is_waiting: Callable[[], bool], leave: Callable[[], None]) -> None:
        super().__init__(is_waiting)
        self._leave = weakref.WeakMethod(leave)

    def end(self) -> None:
        leave = self._leave()
        if leave is not None:  # else nothing of ours waits
            leave()


class GatherInStep(torch.autograd.Function):
    """`StepDriver.gather`. The gradient of a row is the sum of what all ranks have of it, which is reduced in the same step."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, driver: StepDriver, rank: int, world_size: int) -> Tensor:
        ctx.driver, ctx.rank = driver, rank
        rows = driver.gather(tensor, rank, world_size)
        if ctx.needs_input_grad[0] and len(rows) != world_size:
            raise ValueError(
                "all_gather(sync_grads=True) needs the number of replica groups: set NUM_REPLICA_GROUPS"
            )
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        return ctx.driver.reduce(total, "sum")[ctx.rank], None, None, None


class StepDriver:
    """The step protocol of one fit.

    Thread: the loop's, except for `state`. On CUDA, what happens at the end of backward runs in
    autograd's thread of the device, while the loop's waits.

    Args:
        share: of the training data, which this replica group reads.
        on_quorum: called when this process's part in the quorum has changed.
        hooks: `hooks(name)` calls the callbacks' and the module's hook of that name.
        leave: raises what ends a fit on SIGTERM.
        over: what to raise where the peers have ended the training.
        before_leaving: called before the vote with which this group leaves the others.
        after_leaving: called after it.
        patience_s: how long a peer may be late at the end of a validation or an epoch, in seconds.
        min_replicas: replica groups that a step needs.
        ranks: of this replica group, for what is to reach all ranks of all groups.
        shares_ends: epochs of unknown length end in all groups with the first one's.
    """

    def __init__(
        self,
        trainer: Any,
        manager: Manager,
        batches: Batches,
        decisions: Decisions,
        *,
        share: DataShare | None,
        on_quorum: Callable[[], object],
        hooks: Callable[[str], None],
        leave: Callable[[], None],
        over: Callable[[TrainingOver], BaseException],
        before_leaving: Callable[[], None],
        after_leaving: Callable[[], None],
        patience_s: float,
        min_replicas: int,
        ranks: CopyRanks,
        shares_ends: bool,
    ) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._decisions, self._share = decisions, share
        self._on_quorum, self._hooks, self._leave = on_quorum, hooks, leave
        self._over = over
        self._before_leaving, self._after_leaving = before_leaving, after_leaving
        self._shares_ends, self._ranks = shares_ends, ranks
        self._patience, self._min_replicas = timedelta(seconds=patience_s), min_replicas
        self._manual = not trainer.lightning_module.automatic_optimization
        # By hand the optimizers step within `training_step`.
        self._changed = ChangedInStep(frozen_only=self._manual)
        retry = RetryHooks(begin=self._begin_gradients, vote=self._vote, again=self._try_again)
        self._reducer = RetryableReducer(retry, manager)
        self._sharded = False
        self._thread = threading.get_ident()
        self._starting = 0  # thread that calls `start_quorum`
        self._place: Place | None = None  # where it is called; None: nowhere
        self._gathers = False  # the round under way gathers
        self._visit: str | None = None  # admitted where peers cannot be joined: what they are doing
        self._rereads = False  # the batches of the step under way are of another share of the data
        self._lost = False  # behind, and not where it can heal: no round until the next boundary
        self._peer: dict[str, Any] | None = None  # a state that came in the middle of a batch
        # Of a peer that had called hooks of this window already.
        self._ahead: dict[str, Any] | None = None
        self._at_end: list[Callable[[], None]] = []
        self._operations: list[Callable[[], None]] = []  # of the open step, in order
        self._window = 0  # batches since the open step began at a boundary
        self._repeated = 0  # on the window's batches before this one a validation is not due again
        self._within = False  # or it began in the middle of a batch
        self._earlier: list[Tensor | None] | None = None  # gradients before the open step's first
        self._votes = self._usual_votes = 0  # of the batch, and of the one before, committed
        self._runs = False  # `training_step` has been called for the batch at hand
        self.open = self.computing = False
        self.last_committed: bool | None = None
        self._part: Participation | None = None
        self.meets_next: Callable[[], bool] = lambda: False
        """Whether a round follows on the batch at hand. The strategy sets it."""
        batches.at_boundary = self.at_boundary
        batches.begin_fit(trainer, healing.kept_for_loaders)
        batches.adopt(trainer.fit_loop.epoch_loop, _catching(self))

    @property
    def _alone(self) -> bool:
        return bool(self._trainer.strategy.scope.world_size == 1)

    @property
    def waits(self) -> bool:
        """Whether the loop waits for a quorum."""
        return self._place is not None

    def wrap(self, module: nn.Module, **options: Any) -> RetryableDistributedDataParallel:
        """What averages the gradients of `module`."""
        return RetryableDistributedDataParallel(self._reducer, module, **options)

    def adopt_shards(self, module: nn.Module, data_parallel: int) -> RetryableShards:
        """What averages the gradients of `module`, which is sharded over the ranks of this group.
        `data_parallel`: over how many of them its data is."""
        shards = RetryableShards(self._reducer, module, data_parallel=data_parallel)
        self._sharded = True
        self._at_end.append(shards.close)
        return shards

    # ------------------------------------------------------------------ begin

    def at_boundary(self) -> None:
        """Before a batch is fetched."""
        if self._place is not None:
            return
        self._usual_votes, self._votes, self._runs = self._votes, 0, False
        if not self.open:
            self._lost = self._within = False
            self._window, self._repeated, self._earlier, self._ahead = 0, 0, None, None
            if self._decisions.timed:
                self._decisions.wait_with_validation()
            self._start(Place.BOUNDARY)
            self._batches.begin(self._trainer)
        if not self._window and self._share is not None:
            self._share.follow()
        if self._peer is not None:
            state, self._peer = self._peer, None
            self._window = 0
            self._restore(state)
        self._window += 1
        if self._window == 1 and not self._sharded:
            self._changed.begin({"": self._trainer.lightning_module})

    def ensure_open(self) -> None:
        """In a batch: another step begins if none is open. May raise BatchAbandoned."""
        if not self.open:
            self._within = True
            self._start(Place.STEP)

    def _begin_gradients(self) -> bool:
        self.ensure_open()
        return True

    def _start(self, place: Place) -> None:
        """Begin an attempt at a step (or a round). Raises as `Manager.start_quorum`."""
        self._starting, self._place = threading.get_ident(), place
        try:
            if self._trainer.received_sigterm and not self._manager.in_quorum():
                self._leave()  # it came before: there is no step to finish, and others may never come
            with self._ending():
                # Between batches the weights are in use: a validation is computed with one set of them.
                self._manager.start_quorum(takes_state=place is not Place.ROUND)
                while self._visit is not None:
                    self._sit_in(self._visit)
                    self._manager.start_quorum()
            self._follow_quorum()
        finally:
            self._starting, self._place = 0, None
        self.open = place is not Place.ROUND
        if place is Place.STEP:
            self._check_place()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """What ends a fit while it waits for its peers."""
        try:
            yield
        except GroupLeft:  # another rank of this group received SIGTERM, so this one ends, too
            self._leave()
        except TrainingOver as error:
            raise self._over(error) from None

    def _should_commit(self, **options: Any) -> bool:
        """Vote, as `Manager.should_commit`."""
        with self._ending():
            return self._manager.should_commit(**options)

    def _follow_quorum(self) -> None:
        """Tell `on_quorum` if this process's part in the quorum has changed."""
        part = self._manager.step.part
        if part is not None and part != self._part:
            self._part = part
            self._on_quorum()

    def _check_place(self) -> None:
        """In the middle of a batch: raise BatchAbandoned if this attempt is useless, RuntimeError
        if no further attempt could be, either."""
        if self._peer is not None:
            raise BatchAbandoned
        if not self._within:
            # A share moves within a step if too few are left to commit it without that one.
            self._rereads = self._share is not None and self._share.changes()
            if self._rereads:
                raise BatchAbandoned
            return
        with contextlib.suppress(QuorumUnavailable):  # the attempt has failed already
            if self._manager.num_participating_groups() < self._min_replicas:
                # The missing groups wait for a state, which can't be given here.
                raise RuntimeError(
                    "a replica group was lost between two steps of a batch (manual optimization), and "
                    f"min_replicas={self._min_replicas} does not let the others finish the batch: it "
                    "cannot be healed there, so start again from the last checkpoint, or with a "
                    "smaller min_replicas"
                )

    def _sit_in(self, doing: str) -> None:
        """Peers cannot be joined where they are: contribute nothing, and join again."""
        self._visit = None
        if doing != Place.STEP.value:
            if doing == "gather":
                gather_bytes(self._manager, b"")
            end_step_as_stranger(self._manager)
            self._visit = None  # again, if the quorum changed meanwhile
        # Joined before they commit the step: so it is admitted where that step ends.
        self._manager.rejoin(f"joined while its peers were {doing}", join_now=True)

    # ------------------------------------------------------------------ a batch

    def training_step(self, args: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        """One call of `Strategy.training_step`: `compute(*args)`."""
        if self._runs:
            # The optimizer evaluates the loss once more, as those that look around the weights do.
            self.ensure_open()
        if not self.open:
            raise RuntimeError(
                "a batch began without a quorum: this version of Lightning fetches batches in "
                "another way; use the versions that ft_lightning was tested with (2.5, 2.6)"
            )
        self.computing = self._runs = True
        if self._sharded:  # else the wrapper's forward does it
            self._reducer.before_forward()
        try:
            if self._manual:  # `compute` goes past the place where the peer was
                self._catch_up()
            output = compute(*args)
            if self._manual and not self._sharded:
                self._changed.note()
            self._catch_up()
            # Something was reduced after the last backward, or the epoch may end without one.
            if self._manual and self.open and (self._within or self._ends_by_hand()):
                self._commit()
        finally:
            self.computing = False
        if output is None and not self._manual:
            if not self._alone:  # the peers' gradients wait for one
                return zero_loss(self._trainer.lightning_module)
            # No vote follows that would carry it.
            self._decisions.agree_to_stop(self._trainer.should_stop or self._decisions.stop_wished)
        return output

    def _ends_by_hand(self) -> bool:
        """Manual optimization: whether the batch at hand is its epoch's last one. No step stays open behind it: the
        agreements that follow are steps, too, and counters are not counted back into an epoch that has ended.

        The first stream that ends ends the epoch of all, and votes tell: over streams a batch without a backward has
        a vote of its own, except within a window of gradients, which are of this group's batches."""
        if not self._batches.known_length and self._earlier is None:
            return True
        return bool(self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

    def before_backward(self) -> None:
        """Manual optimization: `manual_backward` begins. Earlier batches may have left gradients."""
        if self.open and not self._within and self._earlier is None:
            self._earlier = self._gradients()

    def reduce(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """In a `training_step`: reduce over the participants, in place.

        If the step is discarded later, the tensor is reduced again, so that a number that was
        logged is the one of the committed attempt.
        """
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._ranks.reduce(flat.detach(), operation(reduce_op))
        kept = flat.detach().clone()

        def again() -> Tensor:
            flat.data.copy_(kept)
            return reduce_in_step(self._manager, flat, reduce_op)

        return self._operation(again)

    def gather(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """In a `training_step`: the rows of all ranks, of which this one is `rank`. As `gather_in_step`."""
        mine, where = self._ranks.gather(tensor), self._ranks.place(rank, world_size)
        gathered = self._operation(lambda: gather_in_step(self._manager, mine, *where))
        return gathered.flatten(0, 1)

    def _operation(self, call: Callable[[], Tensor]) -> Tensor:
        """`call()`, which reduces in the open step. It is tried again at once if its attempt fails,
        so that user code never sees what a broken collective has left."""
        self.ensure_open()
        results: list[Tensor] = []

        def attempt() -> None:
            results[:] = [call()]

        self._operations.append(attempt)
        attempt()
        while self._ranks.any(self._is_in_vain()):
            put_back = self._reducer.keep_buffers()
            self._vote()
            self._try_again()
            put_back()
        return results[0]

    def _is_in_vain(self) -> bool:
        """Whether the attempt under way will be discarded: it has failed, or too few contribute. What was logged in a
        window of batches has been written before its vote."""
        if self._manager.errored() is not None:
            return True
        try:
            return self._manager.num_participating_groups() < self._min_replicas
        except QuorumUnavailable:  # it has failed meanwhile
            return True

    def _commit(self) -> None:
        """End a step that has no gradients: all that it reduces are operations."""
        put_back = self._reducer.keep_buffers()  # a discard undoes the forward
        while not self._vote():
            self._try_again()
            put_back()

    def _try_again(self) -> bool:
        """The step was discarded: begin it anew, up to its gradients."""
        self._start(Place.STEP)
        for attempt in self._operations:
            attempt()
        return True

    def _vote(self) -> bool:
        if not self._manual and not self._sharded:  # `on_before_zero_grad` is over, too
            self._changed.note()
        leaving = self._trainer.received_sigterm
        if leaving:
            # The vote announces it: the next quorum is formed without this group at once.
            self._before_leaving()
            self._manager.leave_after_step()
        ends = self._any_ends()
        control = self._decisions.control(self._votes)
        self.last_committed = self._should_commit(control=control, admits=self._batch_follows())
        self.open = False
        if leaving:
            self._after_leaving()
        if not self.last_committed:
            if leaving:
                self._leave()
            return False
        if not leaving:
            self._check_same_step()
        if ends is not None and float(ends) > 0:
            self._batches.end_epoch(self._trainer)
        self._operations.clear()
        self._votes += 1
        self._follow_quorum()  # it may have changed while the step had reduced nothing yet
        return True

    def _batch_follows(self) -> bool:
        """Whether the step under way is its batch's last one, and no round comes before the next batch,
        as far as can be foreseen: there a newcomer can heal."""
        return self._votes + 1 >= self._usual_votes and not self.meets_next()

    def _any_ends(self) -> Tensor | None:
        """Over a stream of unknown length: whether the batch at hand is a participant's last of this
        epoch. It is the last one of all then. Valid if the step is committed."""
        if not self._shares_ends or self._batches.known_length or self._is_in_vain():
            return None  # in vain, a peer may be at its gradients: it has retried all that came before them
        last = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ends = torch.tensor([float(last)], device=self._trainer.strategy.root_device)
        self._ranks.reduce(ends, ReduceOp.SUM)
        return reduce_in_step(self._manager, ends, "sum")

    def _check_same_step(self) -> None:
        """Raise BatchAbandoned if what was committed is not what this group would apply."""
        outcome = self._manager.last_outcome()
        difference = self._decisions.differs(outcome.control if outcome is not None else b"")
        if difference:
            log.warning("%s: it takes their state", difference)
            self.last_committed = False
            self._manager.rejoin(difference)
            raise BatchAbandoned

    def abandon(self) -> None:
        """A batch was left unfinished: nothing of it may reach the next one."""
        self._operations.clear()
        trainer = self._trainer
        module = trainer.lightning_module
        for parameter, wanted in module._param_requires_grad_state.items():
            parameter.requires_grad = wanted  # `toggle_optimizer` was in force
        module._param_requires_grad_state = {}
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
            forget_unscaling(trainer.precision_plugin, optimizer)
        if self._manual:
            with contextlib.suppress(ValueError):  # it was not started
                trainer.profiler.stop("optimizer_step")
        if self._rereads:  # the same batches of the share that is this group's now
            rewind_counters(trainer, self._window)
            self._changed.put_back()
            self._batches.numbers.put_back()
            self._put_gradients(self._earlier)
            self._window, self._repeated, self._rereads = 0, self._window, False

    def leave_out(self) -> None:
        """The epoch ends before a batch for which a step has begun (`on_train_batch_start` has returned -1): the next
        step is that of another epoch, and agreements between batches come before it.

        What the step has reduced is voted on: a group in which that has failed would reduce it again, while others
        were in the agreement. Called before schedulers step: what is given to a peer here is as of no such step."""
        if self._runs or not self.open or not self._batches.known_length:
            return
        self._catch_up()
        if self._operations:
            self._commit()
        self.open = False

    def close(self) -> None:
        """The fit is over."""
        self._operations.clear()
        self._peer, self._ahead, self.open = None, None, False
        for call in self._at_end:
            call()

    # ------------------------------------------------------------------ rounds

    def round(self, mine: bytes | None, last: bool) -> tuple[list[bytes], int | None] | None:
        """An agreement between batches: (each participant's contribution, the rank of this group; None:
        it is a hot spare).

        `mine` None: it gathers nothing. `last`: a batch follows, where newcomers heal. Returns None if this group is behind: it heals at the next
        batch.
        """
        if self.open:  # a validation within a window of batches, whose attempt can't be left
            return ([] if mine is None else [mine], 0) if self._alone else None
        self._lost = self._lost or self._manager.is_healing()  # evicted, and let in again
        if self._lost:
            return None
        self._gathers = mine is not None
        try:
            agreed = agree(
                lambda: [] if mine is None else gather_bytes(self._manager, mine),
                begin=self._begin_round,
                vote=lambda: self._should_commit(
                    timeout=self._patience, no_update=True, admits=last
                ),
                is_behind=self._manager.is_healing,
            )
        finally:
            self._starting, self._place = 0, None
        if agreed is None:
            self._lost = True
            self._manager.rejoin("fell behind between batches")
            return None
        rank = self._manager.participating_rank()
        columns = self._ranks.merge(agreed.result)  # of each rank of this group, a row per group
        rows = [contribution for row in zip(*columns, strict=True) for contribution in row]
        return rows, None if rank is None else rank * self._ranks.size + self._ranks.number

    def _begin_round(self) -> None:
        self._start(Place.ROUND)
        # A group that joins before the vote is told what this one is doing, too.
        self._starting, self._place = threading.get_ident(), Place.ROUND

    # ------------------------------------------------------------------ heal

    def is_at_boundary(self) -> bool:
        """Whether `state` gives the whole state now, and `load` can take one."""
        return self._place is Place.BOUNDARY

    def state(self) -> dict[str, Any]:
        """What a healing peer needs (see `healing.dump`), or what this group is doing instead.

        In a thread of ft_core: the tensors in which to receive a state. The loop waits then, and
        the user's hooks stay in their own thread.
        """
        if threading.get_ident() != self._starting:
            if threading.get_ident() == self._thread:
                raise RuntimeError("a state was asked for in the middle of a step")
            return healing.places(self._trainer)
        if self._place is Place.ROUND:
            return {"visit": "gather" if self._gathers else "meet"}
        if self._place is Place.STEP and self._within:
            return {"visit": Place.STEP.value}
        state = healing.dump(self._trainer, self._batches, batches=self._window)
        if self._window:
            # Callbacks may have put the model's parameters elsewhere, and an average in their place.
            state["checkpoint"] = self._changed.before(state["checkpoint"])
        gradients = (self._earlier or self._gradients()) if self._manual else None
        data = self._batches.states(self._trainer, mark=not self._window)
        return {
            **state,
            "data": data,
            "numbers": self._batches.numbers.marked(),
            "gradients": gradients,
            "window": self._window,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take a peer's state, or note what the peer is doing instead."""
        if self._place is Place.BOUNDARY and "visit" not in state:
            self._restore(state)
        elif "visit" not in state:
            self._peer = healing.set_aside(self._trainer, state)
        else:
            self._visit = state["visit"]
        if self._place is None:
            # The first collective or the vote of a step found that its quorum was lost before.
            self._visit = None if self._visit is None else Place.STEP.value
            self._manager.report_error(RuntimeError("fell behind in the middle of a batch"))

    def _restore(self, state: dict[str, Any]) -> None:
        healing.restore(self._trainer, state, self._batches, self._hooks)
        self._batches.numbers.take(state["numbers"])
        self._batches.numbers.put_back()
        self._ahead, self._repeated = state if state["window"] else None, state["window"]
        self._put_gradients(state["gradients"])

    def _catch_up(self) -> None:
        """In the batch of the window that the peer was computing when it gave its state: the hooks have been called
        here, too, and would count twice."""
        if self._ahead is not None and self._window >= self._ahead["window"]:
            state, self._ahead = self._ahead, None
            healing.put_back_hooks(self._trainer, state)

    def repeats(self) -> bool:
        """Whether the batch at hand is computed once more, in a window in which the peer that gave its state, or this
        process, was further: a validation that follows on it is done, and callbacks have heard of it."""
        return self._window < self._repeated

    def _parameters(self) -> list[nn.Parameter]:
        return list(self._trainer.lightning_module.parameters())

    def _put_gradients(self, gradients: list[Tensor | None] | None) -> None:
        """Manual optimization may keep them over batches; None: nothing is kept."""
        if gradients is not None:
            for parameter, value in zip(self._parameters(), gradients, strict=True):
                parameter.grad = _copy(value, parameter.device)

    def _gradients(self) -> list[Tensor | None]:
        return [_copy(parameter.grad) for parameter in self._parameters()]


def _copy(gradient: Tensor | None, device: Any = None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to(device, copy=True)


def _catching(driver: StepDriver) -> Callable[[Any], dict[str, Any]]:
    """Lightning's loop over batches, which goes on with the next one if one is abandoned."""

    def methods(cls: Any) -> dict[str, Any]:
        def advance(self: Any, data_fetcher: Any) -> None:
            module = self.trainer.lightning_module
            while True:
                name = module._current_fx_name
                try:
                    try:
                        return cls.advance(self, data_fetcher)
                    except StopIteration:
                        driver.leave_out()  # where schedulers have not stepped for the batch
                        raise
                except BatchAbandoned:
                    module._current_fx_name = name
                    driver.abandon()

        def update_lr_schedulers(self: Any, interval: str, update_plateau_schedulers: bool) -> None:
            # Since Lightning 2.6 they step for the batch that is left out, too, which is told as the last one then.
            if not update_plateau_schedulers and self.batch_progress.is_last_batch:
                driver.leave_out()
            cls.update_lr_schedulers(self, interval, update_plateau_schedulers)

        def _should_check_val_fx(self: Any, data_fetcher: Any) -> bool:
            due: bool = cls._should_check_val_fx(self, data_fetcher)
            return due and not driver.repeats()

        ours: tuple[Any, ...] = (advance, update_lr_schedulers, _should_check_val_fx)
        return {method.__name__: method for method in ours}

    return methods
