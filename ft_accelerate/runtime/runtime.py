"""One training process: its manager, the position of its script, its steps and operations.

    loader asks for a batch   `at_fetch`: a window begins; join, heal, serve others
    backward                  `reducer`: gradients are averaged while backward runs; at its end the
                              step is voted on, and retried from kept gradients until committed
    gather, reduce, ...       `operation`: an agreement, repeated until it is committed
    optimizer.step            local: its gradients are committed already

So when the optimizer steps nothing can fail any more: a raw loop never sees a discarded step.
"""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ft_accelerate.options import FaultTolerancePlugin
from ft_accelerate.runtime import peer_state as states
from ft_accelerate.runtime.catch_up import LONGEST, CatchUp
from ft_accelerate.runtime.checked_collectives import (
    TRAINING,
    Attempt,
    CheckedCollectives,
    Diverged,
    GradientHeaders,
    Header,
    Kind,
    align,
)
from ft_accelerate.runtime.checkpoints import SavedPosition
from ft_accelerate.runtime.divided_data import DRIFTING, LATE_SHARE, DividedData
from ft_accelerate.runtime.leadership import NO_QUORUM, Leadership, OwnWrites, Saves, TrackerRuns
from ft_accelerate.runtime.means import Means
from ft_accelerate.runtime.models import UNUSED_HINT, FaultTolerantModel, Prepared
from ft_accelerate.runtime.past_results import PastResults, refuse_unlike
from ft_accelerate.runtime.script_position import (
    CAUGHT,
    EARLY,
    Iteration,
    Phase,
    ScriptPosition,
)
from ft_accelerate.runtime.startup import GroupRanks, StartupCollectives, end_with_group
from ft_accelerate.runtime.state_exchange import StateExchange
from ft_core.collectives.agreement import agree
from ft_core.collectives.retry import RetryableReducer, RetryHooks
from ft_core.environment import SHARED_JOB, ReplicaEnv, Supervision
from ft_core.errors import GroupBroken
from ft_core.launch.board import slot
from ft_core.launch.ending import Sigterm, end_at_once, unless_forked
from ft_core.launch.restarts import OVER_EXIT_CODE
from ft_core.launch.supervisor import after, age_s, die_with
from ft_core.manager import Manager
from ft_core.telemetry import event_log
from lighthouse.errors import TooFewLeft, TrainingOver

log = logging.getLogger("ft_accelerate")

LEFT_BATCH = "a process has healed to a batch that is left out here"
UNREACHABLE_PAUSE_S = 0.05
EARLY_EXIT_CODE = 1


class Runtime:
    """Fault tolerance of one process. The loop's thread, but where said otherwise.

    `num_processes`: of all replica groups, without those of hot spares.
    """

    def __init__(
        self, options: FaultTolerancePlugin, place: ReplicaEnv, supervision: Supervision
    ) -> None:
        self.options = options
        self.group_ranks = ranks = GroupRanks(options, place, supervision)
        self.num_processes = ranks.num_processes
        self.startup = StartupCollectives(ranks)
        self.position, self.prepared = ScriptPosition(), Prepared()
        self.means, self.past = Means(self.prepared, self.position), PastResults(self.position)
        self._exchange = StateExchange(self.prepared, self.position, self.means, self.past)
        self._begun = self._exchange.begun
        self.drawn_before_fetch = self._begun.drawn_before_fetch
        self._data = DividedData.of(ranks, self.position)
        alone, longest_s = place.group_world_size == 1, LONGEST * options.timeout_s
        self._catch_up = CatchUp(self.position, measures=alone, longest_s=longest_s)
        self.reducer = RetryableReducer(
            RetryHooks(
                begin=self._begin_gradients,
                vote=self._vote,
                again=self._open_gradients,
                committed=self._gradients_committed,
                refused=self.position.replay_grad,
                raised=self.position.backward_raised,
                unused_hint=UNUSED_HINT,
            )
        )
        self.manager: Manager | None = None
        same = options.job_id != SHARED_JOB or supervision.restarts > 0
        self.saved = SavedPosition(self.position, options.job_id if same else "")
        self.runs, self.own_writes = TrackerRuns(), OwnWrites(slot())
        self.attempts_discarded = 0
        self._operations = 0  # that the script has come to
        self.contributes = True
        """Whether this process's values count in the current step: it is not only healing."""
        self.on_live: list[Callable[[], None]] = []
        """Called when the script stands where its peers' stood when they sent their state."""
        self.unfinished: Callable[[], None] | None = None
        """Ends what `begin_early` has begun. Called before any other event."""
        self.leadership = Leadership(
            self.position,
            group_size=place.group_world_size,
            speaks=place.group_rank == 0,
            first=ranks.number == 0 and (supervision.restarts == 0 or ranks.is_only_group),
        )
        self.saves = Saves(self.leadership, self.reducer.keep_buffers)
        self._there_at = time.monotonic() - age_s()
        self._open = self._aside = self._closed = self._finished = False
        self._failed = ""
        self._exit_hook = unless_forked(self._at_exit)
        self._at, self._starting = "fetch", 0  # the thread in which a quorum is being started
        self._headers = GradientHeaders(kept_apart=False)
        self._sigterm = Sigterm(self._is_waiting)
        log_to = place.event_log
        self._sink = event_log(log_to, str(ranks.number)) if log_to else None
        if supervision.pid:
            die_with(supervision.pid)
        atexit.register(self._exit_hook)

    # ------------------------------------------------------------------ which processes are there

    @property
    def process_index(self) -> int:
        """Its number among the processes that the script knows."""
        return self.group_ranks.process_index

    @property
    def live(self) -> bool:
        """Whether the script's work counts."""
        # As `ScriptPosition.live`, without a call: it is asked several times a step.
        return self.position.phase is Phase.LIVE

    @property
    def leader(self) -> bool:
        """Whether this process is the main one (`Leadership.mine`)."""
        return self.leadership.mine

    @property
    def local_leader(self) -> bool:
        """Whether this process is the main one of its machine: of several, the first one that the launcher has
        started there, since each has files of its own. On the only one: the main one, so that one speaks."""
        if self.group_ranks.several_machines:
            return self.group_ranks.local_process_index == 0 and self.live
        return self.leader

    # ------------------------------------------------------------------ accelerators and models

    def adopt(self, accelerator: Any) -> None:
        """Heal this accelerator's objects, besides those of the others that live."""
        self.prepared.adopt(accelerator)
        accelerator.register_save_state_pre_hook(self.saved.on_save)
        accelerator.register_load_state_pre_hook(self.saved.on_load)

    def wrap(self, module: Any, **kwargs: Any) -> FaultTolerantModel:
        """What `prepare_model` uses in place of DistributedDataParallel."""
        model = FaultTolerantModel(self.reducer, module, self.position, **kwargs)
        self.trains(model)
        return model

    def trains(self, model: Any) -> None:
        """The script has prepared a model, whose gradients our reducer averages."""
        self.comes_to_another_place()
        self.prepared.add(model)
        self.position.begun += 1

    def comes_to_another_place(self) -> None:
        """The script calls, so what it may have been writing by itself is written."""
        if self.own_writes.places:
            self.own_writes.over()

    @property
    def ready(self) -> bool:
        """Whether there is something to train: from then on operations reach over the quorum."""
        # A model that was freed does not end the operations of its process.
        met = bool(self.prepared.models) and self.manager is not None
        return (met or self.prepared.any_model) and not self._closed

    @property
    def done_together(self) -> tuple[int, int]:
        """What the script has come to that all processes do: operations, and passes over loaders. Another one with each."""
        return self._operations, self.position.iterations

    @property
    def beginning(self) -> bool:
        """Whether no model was prepared yet (`ft_accelerate.runtime.startup`)."""
        return not self.prepared.models and not self._closed

    # ------------------------------------------------------------------ a batch is asked for

    def at_fetch(self, loader: Any, iteration: Iteration) -> None:
        """Before a batch: windows begin, a process that is behind arrives. Raises as `ScriptPosition.leap`."""
        position = self.position
        self.comes_to_another_place()
        if self._failed:
            self._end_if_due()
        while True:
            if position.phase is Phase.FAST_FORWARD:
                if self.prepared.learns:  # else it may be taken for an evaluation's own error
                    position.refuse_size()
                self._exchange.take()
                if position.leap(iteration):
                    self.prepared.begin_accumulation()
                if not position.arrive(iteration):
                    self._begun.weights.note()
                    self._end_if_due()
                    self._keep_peers_going()
                    return
                self._exchange.arrive()
                if self._begun.weights.changed():
                    self.leave_for_now("its script has changed a model on its way to its peers")
                if self._aside:
                    self._join("fetch")
                    continue
            trains = self.prepared.training or position.trains_in(iteration)
            if not self.ready or not trains:
                break  # nor have the peers begun anything here, so this is not where they are
            if position.leaves not in (None, iteration.seq):
                break  # an evaluation within an epoch, in which a window could not be entered
            if position.asked(iteration) and loader.end_of_dataloader:
                break
            self._go_live_if_there("fetch")
            if not self.live:
                break
            if self._data is not None:
                self._data.refuse_undivided(loader)
            if not position.stepped:
                self.means.before_window()
                left = position.stepped and self.manager is not None  # a batch that all leave out
                if left and self._manager.state.withdraw() and self._open:
                    self._manager.report_error(RuntimeError(LEFT_BATCH))
                    self._vote()
            if position.open_window(iteration):
                self._begun.mark(self.prepared.accelerators, loader)
            if not self._open:
                self._begin("fetch")
            if self.live:
                self._begun.computes(self.prepared.accelerators)
                break
        if self.manager is not None and self._data is not None:
            self._data.follow(iteration, self.manager.step.part)

    def begin_try(self, *, again: bool) -> None:
        """See `ScriptPosition.begin_try`."""
        self.position.begin_try(again=again)
        self._exchange.begin_try()

    def _go_live_if_there(self, at: str) -> None:
        """Go live if the peers have done no more. One that has left meanwhile asks them first: they have gone on."""
        if self.live:
            return
        self._exchange.take()
        if self._aside:
            return
        target, missed = self.position.target, self.position.missed
        if self.position.settle(at):
            assert target is not None
            if self.position.missed > missed and (place := self.position.in_words()):
                away = after(time.monotonic() - self._there_at)
                self.group_ranks.tell(f"is back at {place}{away and ','}{away}")
            self._exchange.go_live(target.at)
            self._catch_up.live()
            for arrived in self.on_live:
                arrived()
            self._begun.go_live(self.group_ranks.number, target.events)
            log.info("live at event %s of the script", target.events)

    def step_left_out(self) -> None:
        """An optimizer would have stepped in a past that the script runs through."""
        self.position.step_taken()
        self._keep_peers_going()

    def _keep_peers_going(self) -> None:
        """Leave the quorum for now if the peers have waited long enough for this script."""
        now, manager = time.monotonic(), self.manager
        if manager is not None and self._catch_up.overstays(now, manager.evicted):
            # What it has healed is as new as any if all others die meanwhile.
            reason = f"about {self.position.distance} batches behind"
            self.leave_for_now(reason, discard_state=False)
            self._catch_up.left()
        if text := self._catch_up.news(now):
            self.group_ranks.tell(text)

    # ------------------------------------------------------------------ gradients

    def _begin_gradients(self) -> bool:
        """First gradients of a backward pass: whether to reduce."""
        if not self.position.grads:
            self._begun.changed.note()
        self.comes_to_another_place()
        self._go_live_if_there("grad")
        if not self.live and self.position.grad_is_done:
            return False
        if self._data is not None:
            self._data.refuse_unknown()
        if self.unfinished is not None:
            raise RuntimeError(
                "gradients are to be averaged while a fragment of DiLoCo is on its way: use "
                "fragment_sync_delay=0 in a script that does both"
            )
        return self._open_gradients(computes=True)

    def _open_gradients(self, *, computes: bool = False) -> bool:
        """Open an attempt. False: this process has healed, and its peers have done this step. `computes`: backward is
        under way. All processes check that they are at this step; else the attempt fails. Under a quorum that has
        committed a gradient step they seldom check again (`_gradients_committed`)."""
        self._begin("grad")
        self._go_live_if_there("grad")
        if not self.live and self.position.grad_is_done:
            return False
        self._manager.state.trains = True
        if self._manager.step.bind() and self._headers.due(self._quorum_id, self.position.events):
            self._attempt(Kind.GRADIENTS, CheckedCollectives.check, computes=computes)
        return True

    def _gradients_committed(self) -> None:
        """A gradient step is committed, as its quorum knows: its next gradients seldom need a header."""
        self.means.committed()
        self._headers.committed(self._quorum_id, models=len(self.prepared.models))

    def drift(self, drifts: bool) -> None:
        """Whether models change between votes, each process's in its own way (LocalSGD): sent as copies, not compared."""
        if drifts and self.options.spares:
            raise ValueError(DRIFTING)
        self._exchange.copies = drifts
        self._begun.changed.forget()
        if self.manager is not None:
            self.manager.compare_states(not drifts)

    # ------------------------------------------------------------------ operations

    def operation(
        self,
        kind: Kind,
        attempt: Attempt,
        alone: Callable[[], Any],
        size: Callable[[Any], int] = lambda result: 0,
        *,
        keep: bool = True,
    ) -> Any:
        """One operation over the quorum, repeated until it is committed.

        Args:
            attempt: does it once. What it returns counts if the attempt is committed.
            alone: the result where this process has no peers at this place of the script.
            size: bytes of a result.
            keep: keep the result for processes that come back. False: it is in the state that they take.
        """
        self.comes_to_another_place()
        self._operations += 1
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
            for kept in (self.position.log, self.past.add):
                kept(kind.what, result if keep else None, size(result) if keep else 0)
            return result
        if self.position.phase is Phase.FAST_FORWARD:
            return self.past.answer(kind.what, alone)
        theirs, own = self.position.replay_op(kind.what), alone()
        return own if theirs is None else refuse_unlike(kind.what, own, theirs)

    def begin_early(self, kind: Kind, attempt: Attempt) -> Any:
        """Begin what a later `operation` of this kind ends; `unfinished` must say how.

        What `attempt` returns is of the attempt that is open now: void once `attempts_discarded` has grown. None
        where this process has nothing to begin."""
        if self.beginning or not self.ready:
            return None
        if self._op_is_done():
            return None
        self._begin("op")
        return None if self._op_is_done() else self._attempt(kind, attempt)

    def _op_is_done(self) -> bool:
        """Whether the peers have done the operation that the script is about to do."""
        self._go_live_if_there("op")
        return self.position.op_is_done

    def _attempt(self, kind: Kind, attempt: Attempt, *, computes: bool = False) -> Any:
        manager = self._manager
        together = self.group_ranks.shards and kind is not Kind.GRADIENTS
        if manager.errored() is not None and not together:
            return None
        manager.state.trains = kind in TRAINING
        manager.bind()
        collectives = CheckedCollectives(
            manager,
            self.group_ranks.index_in(manager.step.part),
            self.num_processes,
            self.prepared.device,
            Header.of(self.position, kind, computes=computes),
            self._headers.patience_s(kind, self._quorum_id, self.options.timeout_s),
            self._take_headers,
            self.group_ranks.gather if together else None,
        )
        try:
            return attempt(collectives)
        except (Diverged, ValueError) as error:
            self.close()  # the others go on without this process
            self._failed = str(error)
            raise

    # ------------------------------------------------------------------ a step of the manager

    def _begin(self, at: str) -> None:
        """Open an attempt, unless one is open: be in a quorum, heal, serve."""
        self._end_if_due()
        if at == "op" and self.reducer.busy:
            self.reducer.before_forward()  # a backward has raised, and the script has caught it
        if self._exchange.untaken and self.live and at != "op":
            self.leave_for_now("it came back while a model was prepared: the rest has not healed")
        if not self._open:
            self._join(at)

    def _take_headers(self, headers: dict[int, Header]) -> None:
        align(self.position, headers.values())
        part, whole = self._manager.step.part, {i: bool(h.whole) for i, h in headers.items()}
        self.leadership.decide(part, self.group_ranks.index_in(part), whole)

    def _vote(self) -> bool:
        if self._sigterm.noted:
            self._manager.leave_after_step()
        manager, runs, quorum_id = self._manager, self.runs, self._quorum_id
        news = runs.news(quorum_id) if self.leadership.holds else b""
        try:
            committed = manager.should_commit(control=news)
        except GroupBroken as error:
            end_with_group(error)
        self._open = False
        self.attempts_discarded += not committed
        if committed:
            self._there_at = time.monotonic()  # one that is evicted in a step is away from then on
            self.saves.committed()
            outcome = manager.last_outcome()
            if outcome is not None and outcome.control:
                if self.leadership.holds:
                    runs.told(quorum_id)
                else:
                    runs.hear(outcome.control)
        return committed

    @property
    def _quorum_id(self) -> int:
        """Under which the attempt is, or was."""
        part = self._manager.step.part
        return NO_QUORUM if part is None else part.quorum_id

    @property
    def _manager(self) -> Manager:
        if self.manager is None:
            raise RuntimeError("this process has left its quorum")
        return self.manager

    # ------------------------------------------------------------------ join

    def _join(self, at: str) -> None:
        """Begin a step: join if this process is in no quorum, and learn where the others are if it has healed; stay
        if that place is near. The processes of one group get the same state, and so decide alike."""
        while True:
            first, self._at = self.manager is None, at
            joins, self._aside = first or self._aside, False
            self._starting = threading.get_ident()
            try:
                if first:
                    self._connect()
                self._manager.start_quorum()
            except TrainingOver as error:
                self._end_too_late(error)
            except TooFewLeft:
                if at != "fetch" or not self.live:
                    raise
                return  # there may be no batch, as for the others. If there is, its backward asks again
            except GroupBroken as error:
                end_with_group(error)
            finally:
                self._starting = 0
            self._open = True
            part = self._manager.step.part
            if part is not None:  # else the attempt has failed already; its vote tells
                self.contributes = part.rank is not None
                self.leadership.follow(part)
                if self._data is not None and self._data.is_another(part, at):
                    self._end_early(LATE_SHARE.format(self.options.replica_group_id, part.share))
            target = self.position.target
            if target is None or self.live:
                if joins and self._exchange.received is None and self.leadership.holds:
                    self.saved.trains()
                return
            if self.position.given_up:
                self.leave_for_now("the others have another batch size", discard_state=False)
                return
            if not target.pending or self.means.peers:
                self._catch_up.joined(time.monotonic())
                self._keep_peers_going()
                return
            self.leave_for_now("the others are where this process cannot join them")
            time.sleep(UNREACHABLE_PAUSE_S)
            self._end_if_due()

    def _end_too_late(self, error: TrainingOver) -> NoReturn:
        """Nothing is left to do, and nothing has failed."""
        late = self._exchange.received is None
        how = "came back too late" if late else "was still catching up"
        log.warning("this process %s: %s", how, error)
        self._leave_for_good()
        raise SystemExit(OVER_EXIT_CODE if late else 0) from None

    def _connect(self) -> None:
        """Make the manager, with the state that all processes of this group begin with."""
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._sigterm.watch()  # a handler of the script's own stays
        self.startup.close()
        self.group_ranks.tell_training(over=False)
        allow_objects, device = self.options.heal_allow_objects, self.prepared.device
        # NCCL does not keep a header apart from gradients.
        apart = self.options.commit == "quorum" and device.type == "cpu"
        self._headers = GradientHeaders(kept_apart=apart)
        manager = self.group_ranks.manager(device)
        manager.set_state_dict_fns(self._exchange.load, self._dump)
        manager.preallocate_state(*self.prepared.optimizers)
        manager.register_compared(
            "optimizers", lambda: states.moments(self.prepared.optimizers), after_heals=True
        )
        if self._sink is not None:
            manager.telemetry.add_sink(self._sink)
        self.group_ranks.narrate(manager, self.saved.in_words)
        self.reducer.attach(manager)
        prepared, whole = self.prepared.accelerators, not self.group_ranks.shards
        lineage = self.group_ranks.sync_initial_state(
            lambda: states.lineage_of_start(prepared, allow_objects=allow_objects),
            give=lambda: states.dump(prepared, None, models=whole),
            take=lambda state: states.take_start(prepared, self.position.active, state, whole),
            into=lambda: states.places(prepared),
        )
        manager.load_state_dict({"step": 0, "batches_committed": 0, "lineage": lineage})
        manager.compare_states(not self._exchange.copies)
        manager.state.whole = self._exchange.can_be_kept
        manager.state.takes_kept = lambda parts: self._exchange.takes_kept(parts, self.saved)
        self.manager = manager
        # The exit hooks of last come first: this process leaves before its process group is shut down.
        atexit.unregister(self._exit_hook)
        atexit.register(self._exit_hook)

    def _dump(self) -> dict[str, Any]:
        if threading.get_ident() != self._starting:  # the heal's thread asks where to receive
            return self._exchange.places()
        return self._exchange.dump(self._at)

    # ------------------------------------------------------------------ leave

    def _is_waiting(self) -> bool:
        """Whether the script waits for peers. Called in a signal handler: takes no lock."""
        return self.manager is None or (self._starting != 0 and not self.manager.in_quorum())

    def _end_if_due(self) -> None:
        """End this process, between two steps, if SIGTERM has come or its script has caught its last error."""
        if self._failed:
            self._end_early(CAUGHT.format(self._failed))
        if self._sigterm.noted and not self._open:
            log.warning("ended by SIGTERM, after the last step that it took part in")
            self._sigterm.end()

    def leave_for_now(self, reason: str, *, discard_state: bool = True) -> None:
        """Leave the quorum, to join it again and heal; the whole group leaves."""
        self._open, self._aside = False, True
        self._manager.rejoin(reason, discard_state=discard_state)

    def _leave_for_good(self, *, finished: bool = False) -> None:
        manager, self.manager, self._open = self.manager, None, False
        self.reducer.detach()
        if manager is not None:
            manager.shutdown(finished=finished and self.live)

    def _at_exit(self) -> None:
        """The script has ended: without `end_training`, or by an error?"""
        if hasattr(sys, "last_value") or self._sigterm.noted:
            if not (self.live or self._sigterm.noted):
                log.warning(EARLY)
            self.close()
            return
        if self.ends_early():
            self._end_early(EARLY)
        self.close(finished=True)
        if self._finished:
            self.comes_to_another_place()
            self.saves.outlive(slot(), self.group_ranks.as_one)

    def _end_early(self, why: str) -> None:
        """End this process, so that it is started again."""
        self.close()
        end_at_once("ft_accelerate", why, EARLY_EXIT_CODE)

    def ends_early(self) -> bool:
        """Whether the script, which is at its end, has not reached its peers' place."""
        if self._closed or self.manager is None:
            return False
        self._go_live_if_there("end")
        return not self.live

    def close(self, *, finished: bool = False) -> None:
        """Leave for good; the others go on at once. Idempotent. `finished`: the training is at its end; a process
        that comes later does not begin it anew."""
        if self._closed:
            return
        self._closed, self._finished = True, finished
        self._sigterm.unwatch()
        self.startup.close(finished=finished)
        self.group_ranks.close()
        if finished:
            self.comes_to_another_place()
            self.group_ranks.tell_training(over=True)
            if self.leadership.holds:
                self.saved.forget()
        else:
            atexit.unregister(self._exit_hook)
        self._leave_for_good(finished=finished)
        if self._sink is not None:
            self._sink.close()
