"""Manager: per-step fault tolerance for a training loop. The public interface.

The loop calls `start_quorum`, `allreduce`, `should_commit` once a step, in this order, from one
thread. Two state machines decide (`lighthouse.machine.job`, `ft_core.replica.machine`). This file
turns calls into events of the replica's machine and waits for its status. Names, arguments and
meanings are those of torchft's documentation, so that a script moves over by changing its import;
docs/torchft.md lists the differences.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future
from torch.optim import Optimizer

from ft_core.attempt import Attempts
from ft_core.collectives import allreduce as reduction
from ft_core.collectives.allreduce import AsyncReduce, with_default
from ft_core.config import JobOptions, new_replica_id
from ft_core.errors import QuorumUnavailable
from ft_core.heal.shardings import ShardedModel
from ft_core.launch import kept_files
from ft_core.launch.ending import end_with_a_line
from ft_core.launch.kept import Version
from ft_core.process_group import ProcessGroup
from ft_core.replica import events
from ft_core.replica.shares import Shares
from ft_core.replica.status import Attempt, Outcome, Participation, Stage, WorldSizeMode
from ft_core.shell.session import Session
from ft_core.state import State
from ft_core.telemetry import DiscardsTold, Telemetry
from lighthouse.wire.messages import FINISHED, NOT_COUNTED, OTHERS_FINISHED

log = logging.getLogger("ft_core")
T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(seconds=60)


class Manager:
    """Fault tolerance for one rank of a replica group.

    Args:
        pg: the process group that spans this `group_rank` of all replica groups.
        load_state_dict: puts a healed state in place. None: see `register_state_dict_fn`.
        state_dict: gives the state that a healing peer needs: everything that a checkpoint would
            hold. Called at the start of a step, in the loop's thread, when a peer must heal. In a
            group whose ranks hold shards it returns this rank's, and calls no collective.
        min_replica_size: a step with fewer participants is not committed, and no quorum forms
            with fewer members.
        use_async_quorum: True: `start_quorum` returns at once; a healing member computes its first
            step while its state arrives (large tensors in place), adds nothing, loads, and votes.
            False: it returns when the state is loaded, and the step counts what the member computes
            (not with `spares`). All members choose alike.
        timeout: the one knob; see docs/timeouts.md.
        quorum_timeout: how long `start_quorum` waits for a quorum; None: as long as the
            lighthouse can be reached.
        connect_timeout: how long the lighthouse may be unreachable.
        rank, world_size: of this process in its replica group; default RANK and WORLD_SIZE.
        ranks_hold: of groups of several ranks: "shards" (of one copy of the model, as with FSDP):
            a rank's collectives reach the ranks of its own number in the other groups. "copies"
            (each the whole model): they reach all ranks of all groups, and `num_participants`,
            `participating_rank` and `batches_committed` count ranks.
        world_size_mode: see `WorldSizeMode`.
        store_addr, store_port: the replica group's own rendezvous store (groups of several ranks
            only); default MASTER_ADDR and MASTER_PORT.
        lighthouse_addr: "tcp://host:port"; default TORCHFT_LIGHTHOUSE; else one is started here.
        replica_id: what the replica group is called (stable over restarts, unique in the job);
            default REPLICA_GROUP_ID. A fresh suffix is added at every start.
        port: of this rank's heal server; 0: any. Any, too, if another rank of the group has it.
        hostname: address or interface to advertise; default: the one that routes to the lighthouse.
        heartbeat_interval: how often a connected host proves that it lives.
        init_sync: True: members that start with different states all take the first one's.
            False: their states are equal already (same seed); nothing is compared.
        max_retries: raise after this many discarded steps in a row; None: never.
        compare_steps: members compare all of their parameters once in so many committed steps, and
            after each heal (`register_compared`; docs/protocol.md); 0: never; None: FT_COMPARE_STEPS,
            else 1024. All members must agree on this.
        job_id: keeps two jobs on one lighthouse apart; default FT_JOB_ID.
        expected_replicas: the first quorum waits for this many; default NUM_REPLICA_GROUPS.
        spares: how many of the `expected_replicas` groups are hot spares, which take part with weight 0
            and replace a dead group from its next step on: see `data_share` and docs/own_loop.md.
        commit: "quorum": all members commit a step or none does. "group": each replica group
            acts on its own vote and does not wait for the others' (docs/protocol.md).
        heal_allow_objects: allow states that hold arbitrary Python objects (pickle: only on
            a network that you trust).
        weighted: means are weighted by the samples of each participant's batch: call
            `set_samples` in every step. All members must agree on this.
        token: shared secret that heal servers ask for.
        watch_process: start the watcher that sees this process die (Linux).

    Raises:
        ValueError: an option is wrong.

    Thread: the training loop's, but for `allreduce`, `report_error`, `errored` and
    `wrap_future`, which autograd's threads may call too.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        *,
        job_id: str | None = None,
        expected_replicas: int | None = None,
        commit: str = "quorum",
        heal_allow_objects: bool = False,
        weighted: bool = False,
        token: str = "",
        watch_process: bool = True,
        ranks_hold: str = "shards",
        compare_steps: int | None = None,
        spares: int = 0,
    ) -> None:
        options = JobOptions.resolve(
            name=replica_id,
            job_id=job_id,
            lighthouse=lighthouse_addr,
            min_replicas=min_replica_size,
            expected_replicas=expected_replicas,
            commit=commit,
            async_quorum=use_async_quorum,
            init_sync=init_sync,
            weighted=weighted,
            world_size_mode=world_size_mode,
            max_retries=max_retries,
            compare_steps=compare_steps,
            timeout_s=timeout,
            quorum_timeout_s=quorum_timeout,
            connect_timeout_s=connect_timeout,
            heartbeat_s=heartbeat_interval,
            group_rank=rank,
            group_world_size=world_size,
            ranks_hold=ranks_hold,
            store_addr=store_addr,
            store_port=store_port or None,
            interface=hostname,
            watch_process=watch_process,
            heal_port=port,
            token=token,
            heal_allow_objects=heal_allow_objects,
            spares=spares,
            own_loop=True,
        )
        self._set_up(pg, options)
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        elif load_state_dict is not None or state_dict is not None:
            raise ValueError("give both load_state_dict and state_dict, or neither")

    @classmethod
    def from_options(cls, pg: ProcessGroup, options: JobOptions) -> Manager:
        """A manager whose options are settled already: how integrations make theirs."""
        manager = cls.__new__(cls)
        manager._set_up(pg, options)
        return manager

    def _set_up(self, pg: ProcessGroup, options: JobOptions) -> None:
        self._options, self._replica_id = options, new_replica_id(options.name)
        self._pg = pg
        self.state = State()
        if options.spares:
            self.state.shares = Shares.vacant(options.data_shares, options.min_replicas)
        self._schema = dict(options.schema)
        self._closed, self._leaves, self._pid = False, False, os.getpid()
        self.telemetry = Telemetry()
        if options.own_loop:
            end_with_a_line("ft_core", options.name, at_once=False)
            self.telemetry.add_sink(DiscardsTold(options.name))
        self._attempts = Attempts(options, pg, self.state, self.telemetry)
        self.step = self._attempts.step
        """The step under way, for collectives and algorithms."""

    # ------------------------------------------------------------------ state

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add (or replace) a part of the state that heals under `key`."""
        self.state.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """The main part of the state, as the constructor takes it."""
        self.register_state_dict_fn("default", load_state_dict, state_dict)

    def register_schema(self, key: str, text: str) -> None:
        """Something that must be equal in all members, such as the parameters' shapes.
        A replica group whose schema differs is refused when it joins. Call before the first `start_quorum`."""
        self._schema[key] = text

    def register_vote_check(self, check: Callable[[], None]) -> None:
        """Have `check` called (weakly held if it is a method) when a step ends, before its vote.
        It calls `report_error` if the step must not be committed."""
        self.step.before_vote(check)

    def register_compared(
        self,
        key: str,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        within: int | None = None,
        after_heals: bool = False,
    ) -> None:
        """Have members compare these tensors, which must be equal in all of them at each vote.

        `DistributedDataParallel`, LocalSGD and DiLoCo register their parameters. A member whose tensors
        differ from those of more than half of the members is named, discards its state, and heals.
        Where no state has such a majority, the run ends with `JoinRefused`. `tensors` is called
        once, in the loop's thread; it returns the same sizes in the same order in all members.
        `within`: compare at least once in so many committed steps, where these are long.
        `after_heals`: compare these with the rest after each heal, and at no other time: the state of an
        optimizer, say. `tensors` is called each time then. A `ShardedModel` is at rest when states are saved.
        """
        if after_heals:
            self._attempts.compared.register_after_heals(key, tensors)
            return
        if isinstance(tensors, ShardedModel):
            self.state.sharded_models[key] = tensors
        self._attempts.compared.register(key, tensors, within)

    def compare_states(self, equal: bool) -> None:
        """Whether this member's state is to be equal to its peers' now, as it is by default. Between
        the averages of LocalSGD, say, it is not: then votes say nothing about it."""
        self._attempts.compared.equal = equal

    def register_step_end(self, hook: Callable[[bool], None]) -> None:
        """Have `hook(committed)` called (weakly held if it is a method) when a step has ended: in
        `should_commit`, or in the `start_quorum` that abandons the step."""
        self.step.on_end(hook)

    def preallocate_state(self, *optimizers: Optimizer) -> None:
        """The state of these optimizers is part of the registered state: allocate it before the
        first quorum, so that a restarted process heals into memory that is there."""
        self.state.preallocate(*optimizers)

    def state_dict(self) -> dict[str, Any]:
        """The manager's own state: save and restore it with every checkpoint."""
        step, lineage = self._position()
        start = self._attempts.start.genesis, self._attempts.start.held
        genesis, held = self._session.control.status.origin if self._session else start
        return {
            "step": step,
            "batches_committed": self.state.batches_committed,
            "lineage": lineage,
            "genesis": genesis,
            "held": held,
            **self.state.held_shares(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from a checkpoint; before the first `start_quorum`.

        Raises RuntimeError after it: a running member's position is the quorum's.
        """
        if self._session is not None:
            raise RuntimeError("load_state_dict must be called before the first start_quorum")
        batches, lineage = int(state_dict["batches_committed"]), str(state_dict.get("lineage", ""))
        genesis, held = int(state_dict.get("genesis", 0)), int(state_dict.get("held", 0))
        self._attempts.start = Version(int(state_dict["step"]), lineage, genesis, held)
        self.state.batches_committed = batches
        self.state.take_shares(state_dict)

    def allow_state_dict_read(self) -> None:
        """Kept for torchft scripts: reads need no permission (`should_commit` checks them)."""

    disallow_state_dict_read = allow_state_dict_read

    # ------------------------------------------------------------------ the step

    def start_quorum(
        self,
        room_id: str = "default",
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
        *,
        takes_state: bool = True,
    ) -> None:
        """Begin a step: be in a quorum, serve peers that must heal, heal if behind.

        `room_id`: several quorums in one job; the first call chooses it ("default": what the options
        say). `allow_heal` False: a replica group that is behind is not admitted. `shrink_only` is
        accepted and has no effect: no member is admitted within a step. `timeout`: for this quorum
        only. `takes_state` False: the state is in use (in a validation, say), so nothing is received into
        it. If this member is behind, `is_healing` says so and the step fails: `rejoin`, then heal.

        Raises:
            QuorumUnavailable: no quorum within the timeout; says what it waited for.
            JoinRefused: the lighthouse refuses this replica group, or its peers refuse it their state
                (another `token`, `heal_allow_objects`); says why. TrainingOver, TooFewLeft: others have finished.
            LighthouseUnavailable: no lighthouse answers at the address.
            GroupBroken: another rank of this replica group is gone.
            StepInDoubt: the outcome of a vote that was given up is still not known.
        """
        if room_id == "default":
            room_id = self._options.room_id
        session = self._session or self._open_session(room_id, allow_heal, timeout)
        if room_id != session.room_id:
            known = session.room_id
            raise ValueError(f"this manager is in room {known!r}; use one manager for {room_id!r}")
        self._attempts.begin(timeout, takes_state=takes_state)

    def try_start_quorum(self) -> bool:
        """`start_quorum`, but only if this rank is a member of a quorum and stays one; returns whether.

        At the end of a training members leave one after the other: another quorum may never come,
        and a member that waited for one after its last step would wait forever.
        """
        session = self._session
        if session is None or self.left():
            return False
        limit_s = self._options.timeouts.timeout_s
        session.control.wait(
            lambda status: status.ready or status.stage is not Stage.MEMBER,
            time.monotonic() + limit_s,
        )
        if not session.control.status.ready:
            return False
        try:
            self._attempts.begin(timedelta(seconds=limit_s), stays=True)
        except QuorumUnavailable:  # lost in this very moment
            return False
        return True

    def wait_quorum(self) -> None:
        """Wait until collectives may start. Raises as `start_quorum` does."""
        self._attempts.enter()

    def should_commit(
        self,
        timeout: timedelta | None = None,
        *,
        control: bytes = b"",
        no_update: bool = False,
        admits: bool = True,
    ) -> bool:
        """End the step: wait for its collectives, vote, and say whether to step the optimizer.

        All ranks of the group must call it, once a step. False: drop the gradients; the step was
        not counted, and `last_outcome` says why. `timeout`: how long to wait for the answer; None:
        as long as the lighthouse is there.
        `control`: up to 1,024 bytes that travel with a yes; when the step is committed, all
        members find those of the lowest-ranked one in `last_outcome().control` (empty under
        per-group commit). `no_update`: fewer than `min_replica_size` participants may commit it.
        `admits`: whether the next `start_quorum` could give this member's state to a newcomer. A
        loop that goes on with an exchange between two updates says False; newcomers that must heal
        then wait for a later step, instead of joining one in which they can't heal.

        Raises:
            StepInDoubt: the lighthouse stayed away for the connect timeout, or there was no answer
                within `timeout`. Call it again to wait longer. A loop that begins another step instead gives up this one: if
                it was committed after all, this member heals, since its update is missing here.
            TooManyDiscards: `max_retries` steps in a row were discarded.
            QuorumUnavailable, JoinRefused, TrainingOver, GroupBroken: as `start_quorum`.
        """
        return self._attempts.end(
            timeout,
            control=control,
            needed=1 if no_update else self._options.min_replicas,
            admits=admits,
        )

    def set_samples(self, samples: int) -> None:
        """How many samples this member's batch has; before the step's first collective.

        Only with `weighted`: the step's means are then sum(samples_i x_i) / sum(samples_i).
        """
        if not self.step.weighted:
            raise ValueError("set_samples needs Manager(weighted=True) on all members")
        if samples < 0:
            raise ValueError(f"samples must not be negative, got {samples}")
        self.step.samples = samples

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
        *,
        divided_by: int = 1,
    ) -> Future[Tensor]:
        """Reduce `tensor` (any shape, without gaps between its values) in place over the participants.

        Returns a future of the same tensor. It never fails: an error is kept (`errored`), the
        tensor's contents are then undefined, all later calls of the step return at once, and the
        step is not committed. Non-participants contribute what is neutral under `reduce_op` and
        receive the result. AVG scales before the sum, like DDP; `divided_by` says that part of it
        is done (`mean_divisor`). Several calls may be in flight; all members must make the same
        calls in the same order. `should_quantize`: floating values travel as int8 with a scale for
        each block (SUM and AVG only); all members get the same bits.

        Raises ValueError for a tensor or an operation that no backend takes, before anything is sent,
        and OutsideStep between two steps.
        """
        return reduction.reduce(
            self.step, tensor, reduce_op, divided_by=divided_by, quantize=should_quantize
        )

    def start_allreduce(
        self,
        tensor: Tensor,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
        *,
        divided_by: int = 1,
    ) -> AsyncReduce:
        """`allreduce` for a caller that calls `wait()` on the result, in one thread, before the vote.

        Cheaper than waiting for a future. On CUDA `wait` orders streams, as a future's does.
        """
        return reduction.start(self.step, tensor, reduce_op, divided_by=divided_by)

    def bind(self) -> bool:
        """Bind this step to its quorum, as its first collective does; False: it has failed."""
        return self.step.bind() is not None

    def bind_step(self) -> int | None:
        """`bind`; the step that the quorum works on, also for a member that is behind. None: the
        attempt has failed, `errored` says why, and this member has reduced nothing."""
        if self.step.bind() is None:
            return None
        status = self._attempts.session.control.status
        return status.view.step if status.view and status.attempt is Attempt.BOUND else None

    def mean_divisor(self) -> int:
        """The divisor that a caller may apply to a tensor itself, passing it as `divided_by`.

        The number of participants as far as it is known now; 1 if it is not, or if means are
        weighted. Never waits; any thread.
        """
        part = self.step.part
        return 1 if part is None or self.step.weighted else part.participants

    def report_error(self, e: Exception) -> None:
        """The gradients of this step are unusable: discard it, and tell the others now. Any thread."""
        self.step.fail(e)

    def errored(self) -> Exception | None:
        """The first error of this step, or None."""
        return self.step.error

    def wrap_future(
        self, fut: Future[T], default: T, timeout: timedelta | None = None
    ) -> Future[T]:
        """`fut`, with `default` in place of an error or a late result, which is reported."""
        _ = self._attempts.session  # raises before the first `start_quorum`
        limit_s = self._options.timeouts.timeout_s if timeout is None else timeout.total_seconds()
        return with_default(fut, default, timeout_s=limit_s, on_error=self.report_error)

    # ------------------------------------------------------------------ asking

    def current_step(self) -> int:
        """Number of committed steps."""
        return self._position()[0]

    def batches_committed(self) -> int:
        """Batches in all committed steps: one per participant and step."""
        return self.state.batches_committed

    def num_participants(self) -> int:
        """How many replica groups, or ranks with a copy each, contribute. Waits for the quorum."""
        return self._known_part().participants

    def num_participating_groups(self) -> int:
        """How many replica groups contribute to this step. Waits for the quorum."""
        return self._known_part().groups

    def participating_rank(self) -> int | None:
        """Rank among the participants, None if this one contributes nothing. Waits, too."""
        return self._known_part().rank

    def data_share(self) -> int | None:
        """This group's share of the data in this step: 0 to `num_data_shares` - 1; None: it is a spare, and
        its batch does not count. Ask after each `start_quorum`. Waits, and raises without `spares`."""
        self.num_data_shares()
        self.step.part = self._known_part()  # by which the loop computes
        return self.step.part.share

    def num_data_shares(self) -> int:
        """Into how many shares the data is divided. Raises RuntimeError without `spares`."""
        if self.state.shares is None:
            raise RuntimeError("shares of the data need Manager(spares=...), at least 1")
        return self._options.data_shares

    def is_participating(self) -> bool:
        """Whether this group contributes to this step. Waits for the quorum."""
        return self.participating_rank() is not None

    def is_healing(self) -> bool:
        """Whether this group's state is still to be loaded (asynchronous quorum, or `takes_state`)."""
        session = self._session
        return session is not None and (self._attempts.behind or session.control.status.healing)

    def step_failed(self) -> bool:
        """Whether this step can no longer be committed, whichever member failed. Any thread."""
        session = self._session
        return session is not None and session.control.status.attempt is Attempt.FAILED

    def step_is_untouched(self) -> bool:
        """Whether a step is open that has had no collective yet."""
        return self.step.is_begun and self.step.bound_at is None

    def replica_rank(self) -> int:
        """Rank among the members of the quorum. Waits for the quorum."""
        return self._known_part().replica_rank

    def replica_world_size(self) -> int:
        """Number of members of the quorum. Waits for the quorum."""
        return self._known_part().replica_world_size

    def quorum_id(self) -> int:
        """Id of the quorum. Waits for it."""
        return self._known_part().quorum_id

    def last_outcome(self) -> Outcome | None:
        """The outcome of the last step: committed or not, and why."""
        return self._attempts.last_outcome

    @property
    def replica_id(self) -> str:
        """This group's name with the suffix of this start."""
        return self._replica_id

    @property
    def name(self) -> str:
        """This group's name."""
        return self._options.name

    @property
    def group_world_size(self) -> int:
        """How many ranks this replica group has."""
        return self._options.group_world_size

    @property
    def ranks_hold(self) -> str:
        """As given to the constructor."""
        return self._options.ranks_hold.value

    @property
    def spares(self) -> int:
        """As given to the constructor."""
        return self._options.spares

    @property
    def world_size_mode(self) -> WorldSizeMode:
        """As given to the constructor."""
        return self._options.world_size_mode

    # ------------------------------------------------------------------ leaving

    def rejoin(self, reason: str, *, discard_state: bool = True, join_now: bool = False) -> None:
        """Leave the quorum; the next `start_quorum` joins again, and heals.

        After a decision, or in place of one (the open attempt is discarded). One rank does it for
        its whole group. The members lose at most the step that they are in. `discard_state`: join as
        a member that holds no state. False: as one that holds the state with which it left, from
        which the job goes on if no member has a newer one. `join_now`: do not wait for
        `start_quorum`, which follows at once: so the members commit no step before they know that
        this one asks for a place.
        """
        self._attempts.rejoin(events.Rejoin(reason, discard_state, join_now))

    def updated(self) -> None:
        """The state was updated: after each update, for loops without `Optimizer`.

        Members count updates since the last committed step. A member that has made fewer than its
        peers (its loop has caught an exception, say) discards its state, and heals.
        """
        if self.state.updates != NOT_COUNTED:
            self.state.updates += 1

    def update_failed(self, e: BaseException) -> None:
        """The update of a committed step raised `e`, and may be half done: `rejoin` without a state. A
        member keeps its state where no other member holds one."""
        self._attempts.update_failed(e)

    def leave_after_step(self) -> None:
        """The next committed or discarded step is this group's last (graceful leave). Idempotent."""
        self._leaves = True
        if self._session is not None:
            self._session.control.submit(events.LeaveAfterStep())

    def in_quorum(self) -> Participation | None:
        """This group's part in the quorum that it is in now, as last heard; None: in none. Never waits."""
        return self._attempts.standing()

    def evicted(self) -> bool:
        """Whether its peers may have a quorum without this group, as last heard (see `Session`)."""
        return self._session is not None and self._session.evicted()

    def others_finished(self) -> bool:
        """Whether other members have not made the open step: they left with `shutdown(finished=True)`."""
        view = None if self._session is None else self._session.control.status.view
        part = self.step.part or self.in_quorum()
        known = view if part and view and view.quorum_id == part.quorum_id else None
        return known is not None and known.reason.endswith(OTHERS_FINISHED)

    def left(self) -> bool:
        """Whether this group has left its quorum for good."""
        return self._session is not None and self._session.control.status.stage is Stage.LEFT

    def shutdown(self, wait: bool = True, *, finished: bool = False) -> None:
        """Leave the quorum and free everything: threads, sockets, the process group. Nothing, in a forked process.

        `finished`: the training is at its end; a member that comes back does not start it over.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._attempts.close()
        self.state.sharded_models.clear()
        if finished and self._options.trains:
            kept_files.forget(self._options.job_id)
        if self._session is not None:
            self._session.close(FINISHED if finished else "shutdown")
        else:
            self._attempts.rendezvous.close()
            self._pg.shutdown()

    # ------------------------------------------------------------------ pieces of a step

    def _open_session(self, room_id: str, allow_heal: bool, timeout: timedelta | None) -> Session:
        if self._closed:
            raise RuntimeError("this manager was shut down; create a new one")
        schema = "; ".join(f"{key}: {text}" for key, text in sorted(self._schema.items()))
        session = self._attempts.open_session(
            self._replica_id, room_id, schema, allow_heal, timeout
        )
        if self._leaves:  # it was told so before its first step
            self.leave_after_step()
        session.await_lighthouse()
        return session

    @property
    def _session(self) -> Session | None:
        """None before the first step."""
        return self._attempts.opened

    def _known_part(self) -> Participation:
        session = self._attempts.session
        if self.step.part is None:
            self.wait_quorum()
        status = session.control.status
        part = self.step.part or self._attempts.part(status)
        if part is None:
            raise QuorumUnavailable(f"no quorum: {status.reason}")
        return part

    def _position(self) -> tuple[int, str]:
        if self._session is None:
            return self._attempts.start.step, self._attempts.start.lineage
        status = self._session.control.status
        return status.step, status.lineage


__all__ = ["Manager", "WorldSizeMode"]
