"""Before there is anything to heal: the processes of a replica group, and operations before a model.

Each process holds a whole copy of the model, and its collectives reach all processes of all groups
(`ft_core.Manager(ranks_hold="copies")`); with FSDP it holds a shard
(`ft_accelerate.runtime.group_shards`). A group joins, votes and heals as one, so its processes must begin
with one state (`ft_core.shell.intra_group`). Those of another group need not: they would heal.

A script may have operations before it prepares a model: a run's name that is broadcast, a barrier
after the main process has made a folder, an evaluation. Processes that start together do them together, in a
quorum of its own that ends when a model is prepared. A process that comes back to others that are further, or
whose others are, has its own value for each. The processes of the only replica group do them together also
when the group was restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ft_accelerate.options import FaultTolerancePlugin
from ft_accelerate.runtime.checked_collectives import (
    Attempt,
    CheckedCollectives,
    Diverged,
    Header,
    Kind,
)
from ft_core.collectives.agreement import agree
from ft_core.environment import ReplicaEnv, Supervision
from ft_core.errors import GroupBroken, GroupLeft, QuorumUnavailable
from ft_core.heal import digest
from ft_core.launch.board import slot
from ft_core.launch.ending import end_at_once
from ft_core.launch.narrator import ONLY_GROUP, Narrator
from ft_core.launch.restarts import BROKEN_EXIT_CODE, SIGTERM_EXIT_CODE
from ft_core.launch.supervisor import say
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_core.replica.status import Participation, RanksHold
from ft_core.shell.group_store import store_of_life
from ft_core.shell.intra_group import OPEN_TIMEOUT_S, IntraGroup
from ft_core.shell.local_lighthouse import DEFAULT_PORT
from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseError, TooFewLeft, TrainingOver
from lighthouse.files import machine_lock

log = logging.getLogger("ft_accelerate")

ASK_TIMEOUT_S = 5.0
ASK_AGAIN_AFTER = timedelta(seconds=2)
ALONE = (
    "the other replica groups have left the operations before the first accelerator.prepare(model), and too few are "
    "left: what follows of them reaches this process alone"
)
TRAINING = 1
"""The number of the training on the supervisor's board: a script has one."""
SUFFIX = "/before"
"""Of the job's name on the lighthouse."""
ENDED = (
    "the script trains on after accelerator.end_training(), with which this process has left the others: "
    "call it once, when all trainings of the script are over"
)


class GroupRanks:
    """This process's replica group. The loop's thread only.

    Attributes:
        restarts: how often the group was started again.
    """

    def __init__(
        self, options: FaultTolerancePlugin, place: ReplicaEnv, supervision: Supervision
    ) -> None:
        self.options, self.place, self.restarts = options, place, supervision.restarts
        self._child, self._children = supervision.child, supervision.children
        self._job = options.job(place)
        self.num_processes = self._job.data_shares * place.group_world_size
        self.number = options.replica_group_id * place.group_world_size + place.group_rank
        """Among the processes of all groups. A hot spare's is not one that the script knows."""
        self.share = options.replica_group_id % self._job.data_shares
        """Of the training data: which one this group reads (`ft_accelerate.runtime.divided_data`)."""
        self._in_group = IntraGroup(self._job)
        self.shards = False
        """Whether the processes of a group share one copy of the model; else each has one."""
        self._closed = False

    @property
    def process_index(self) -> int:
        """This process's number as the script knows it: among those that read the data."""
        return self.share * self.place.group_world_size + self.place.group_rank

    @property
    def local_process_index(self) -> int:
        """This process's number among those of its machine, as its launcher has started them."""
        return self._child * self.place.group_world_size + self.place.local_rank

    @property
    def several_machines(self) -> bool:
        """Whether the launcher of this machine has started some of the job's groups only."""
        return 0 < self._children < self.options.num_replica_groups

    def index_in(self, part: Participation | None) -> int:
        """`process_index` in a step: a spare may act within it for a group that is gone."""
        share = self.share if part is None or part.share is None else part.share
        return share * self.place.group_world_size + self.place.group_rank

    @property
    def is_only_group(self) -> bool:
        """Whether the job has no other replica group."""
        return self.options.num_replica_groups == 1

    def manager(self, device: torch.device, *, suffix: str = "", **changes: Any) -> Manager:
        """Make this process's manager; the group's other processes must make theirs, too.

        `suffix`: of the job's name. `changes`: fields of `JobOptions` that differ. Waits for the
        others. Raises ValueError if this process has left the other groups.
        """
        if self._closed and not self.is_only_group:
            raise ValueError(ENDED)
        # What follows waits for as long as the lighthouse may be away.
        self.from_rank_0(lambda: None)
        hold = RanksHold.SHARDS if self.shards else RanksHold.COPIES
        changes = {"ranks_hold": hold, **changes}
        job = replace(self._job, job_id=self._job.job_id + suffix, **changes)
        return Manager.from_options(process_group_for(device, job.timeout_s), job)

    def narrate(self, manager: Manager, place: Callable[[], str]) -> None:
        """Tell the person who watches of evictions, and of discards that repeat. `place`: of the script.

        Of deaths and the start the launcher tells, if it has all groups. That this group is back is told
        when its script is.
        """
        options, others, size = self.options, not slot().whole, self.place.group_world_size
        if self.place.group_rank:
            return
        if self.is_only_group:
            if size > 1 and not self._children:
                say("ft_accelerate", ONLY_GROUP.format(size, "accelerate launch"))
            return
        name, groups = str(options.replica_group_id), options.num_replica_groups
        manager.telemetry.add_sink(
            Narrator(
                "ft_accelerate",
                name,
                groups,
                options.lighthouse,
                place,
                deaths=others,
                start=others,
                returns=False,
                ends=True,
            )
        )

    def tell(self, text: str) -> None:
        """A line of this group for the person who watches."""
        if self.place.group_rank == 0:
            say("ft_accelerate", f"replica group {self.options.replica_group_id} {text}")

    @property
    def sharers(self) -> int:
        """How many processes share one copy of the model."""
        return self.place.group_world_size if self.shards else 1

    def hold_shards(self) -> None:
        """The script shards its models over this group. Raises ValueError if it is too late for that."""
        if self.shards:
            return
        if dist.is_initialized() and self.place.group_world_size > 1:
            raise ValueError(
                "PartialState was used before Accelerator(fsdp_plugin=...): create the Accelerator "
                "first, or switch FSDP on in the configuration"
            )
        self.shards = True

    def default_group(self) -> dict[str, Any]:
        """Of which processes torch's default process group is, and their store."""
        if not self.shards:
            # A world of this process alone, which no other's end can break; it needs no port.
            return {"rank": 0, "world_size": 1, "store": dist.HashStore()}
        place = self.place
        rank, size = place.group_rank, place.group_world_size
        store = store_of_life(
            place.master_addr,
            place.master_port,
            timedelta(seconds=OPEN_TIMEOUT_S),
            rank=rank,
            size=size,
        )
        return {"rank": rank, "world_size": size, "store": store}

    def gather(self, value: Any) -> list[Any]:
        """The `value` of each process of the group, in their order."""
        with ended_with_its_group():
            return self._in_group.gather(value)

    def all_agree(self, mine: bool) -> bool:
        """Whether all processes of the group say so."""
        with ended_with_its_group():
            return self._in_group.decide(mine, all_of_them=True)

    def from_rank_0(self, decide: Callable[[], Any]) -> Any:
        """What the group's rank 0 decides; all of its processes must call this at the same place."""
        with ended_with_its_group():
            return self._in_group.from_rank_0(decide)

    def as_one(self, decide: Callable[[], bool]) -> bool:
        """Whether the group's rank 0 decides so. Where they share a model all of them hear it, since none can
        write alone; else the others have no part in it."""
        if self.shards:
            return bool(self.from_rank_0(decide))
        return self.place.group_rank == 0 and decide()

    def sync_initial_state(
        self,
        name: Callable[[], str],
        give: Callable[[], Any],
        take: Callable[[Any], None],
        into: Callable[[], Any],
    ) -> str:
        """As `IntraGroup.sync_initial_state`. Where each process has its own shards, `give` and `take` leave
        them out, and the state's name covers all of them."""
        if self.shards:
            take(self.from_rank_0(give))
            return f"start-{digest(self.gather(name()))}"
        with ended_with_its_group():
            return self._in_group.sync_initial_state(name, give, take, into=into)

    def others_train(self) -> bool:
        """Whether a process has committed steps of this job and is there, in a quorum or waiting.

        A collective of the group: all its processes call it, and get the same answer.
        """
        # What a job's state remembers does not count: all of its members may be gone.
        return bool(self.from_rank_0(lambda: any(job["highest_step"] > 0 for job in self._ask())))

    def others_are_there(self) -> bool:
        """Whether a process has joined this job, which it does when its script has prepared a model. As
        `others_train`."""
        return bool(self.from_rank_0(lambda: any(map(_members, self._ask()))))

    def _ask(self) -> list[dict[str, Any]]:
        """This job as the lighthouse has it, or nothing."""
        address = self.options.lighthouse or f"tcp://127.0.0.1:{DEFAULT_PORT}"
        try:
            with LighthouseClient(address, timeout_s=ASK_TIMEOUT_S) as client:
                jobs = client.status()["jobs"]
        except (LighthouseError, OSError):
            return []  # no lighthouse yet; what is wrong is reported when this process joins
        return [job for job in jobs if job["job_id"] == self.options.job_id]

    def tell_training(self, *, over: bool) -> None:
        """Tell the supervisor and the other groups whether this one has ended the training."""
        if self.place.group_rank == 0:
            slot().training(TRAINING, over=over)

    def close(self) -> None:
        """The training has ended; end the connections to the group's other processes. Idempotent."""
        self._closed = True
        self._in_group.close()


@contextmanager
def ended_with_its_group() -> Iterator[None]:
    """If another process of the group is gone, end this one at once, with a line on stderr.

    The launcher starts the group again. Nothing that the script would do on its way out could work:
    its files belong to the main process, and its peers are gone. If the other was told to end by
    SIGTERM, this one ends in the same way (`ft_core.launch.ending`).
    """
    try:
        yield
    except GroupBroken as error:
        end_with_group(error)


def end_with_group(error: GroupBroken) -> NoReturn:
    """What `ended_with_its_group` does, for an `except` on the way of each step."""
    if isinstance(error, GroupLeft):
        raise SystemExit(SIGTERM_EXIT_CODE) from error
    end_at_once("ft_accelerate", str(error), BROKEN_EXIT_CODE)


class StartupCollectives:
    """Operations before a model is prepared. The loop's thread only."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks
        self._manager: Manager | None = None
        self._events = 0
        self._has_turn = False
        self._over = ranks.num_processes == 1

    def together(self) -> bool:
        """Whether this process has started together with the others, as far as it knows."""
        if not self._over and self._manager is None:
            self._over = self._others_are_further()
        return not self._over

    def _others_are_further(self) -> bool:
        return not self._ranks.is_only_group and self._ranks.others_are_there()

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Let one process of this job and machine in at a time, where they do not come `together`.

        Reentrant.
        """
        if self._has_turn:
            yield
            return
        with machine_lock("ft_accelerate", self._ranks.options.job_id):
            self._has_turn = True
            try:
                yield
            finally:
                self._has_turn = False

    def operation(self, kind: Kind, attempt: Attempt, alone: Callable[[], Any]) -> Any:
        """As `Runtime.operation`."""
        if not self.together():
            return alone()
        if self._manager is None:
            self._manager = self._connect()
        agreed = agree(
            lambda: self._attempt(kind, attempt),
            begin=self._begin,
            vote=self._vote,
            is_behind=lambda: self._over,
        )
        if agreed is None:  # the others have done more than this process: it is late
            self.close(finished=True)
            return alone()
        self._events += 1
        return agreed.result

    def _begin(self) -> None:
        while not self._begun():
            # One that was restarted is not coming: it has prepared a model, and waits for this process there.
            if self._others_are_further():
                self.close()
                return

    def _begun(self) -> bool:
        """Whether all processes of the group are in a quorum, or wait for none any more."""
        begun, waits = True, True
        try:
            with ended_with_its_group():
                self._connected.start_quorum(timeout=ASK_AGAIN_AFTER)
        except QuorumUnavailable:
            begun = False
        except (TooFewLeft, TrainingOver):
            waits = False
        if not self._ranks.all_agree(waits):
            log.warning(ALONE)
            self.close()
            return True
        return self._ranks.all_agree(begun)

    def _vote(self) -> bool:
        with ended_with_its_group():
            committed = self._connected.should_commit()
        return committed

    def _attempt(self, kind: Kind, attempt: Attempt) -> Any:
        manager, ranks, events = self._connected, self._ranks, self._events
        if manager.errored() is not None or not manager.bind():
            return None
        try:
            return attempt(
                CheckedCollectives(
                    manager,
                    ranks.index_in(manager.step.part),
                    ranks.num_processes,
                    _device(),
                    Header(kind, events, agreed=events),
                )
            )
        except Diverged:
            self.close()
            raise

    @property
    def _connected(self) -> Manager:
        assert self._manager is not None
        return self._manager

    def close(self, *, finished: bool = False) -> None:
        """Leave the quorum, if there is one. Idempotent. `finished`: whoever waits for this process here waits in
        vain, though it may never prepare a model."""
        manager, self._manager, self._over = self._manager, None, True
        if manager is not None:
            manager.shutdown(finished=finished)

    def _connect(self) -> Manager:
        # There is no state that could differ: nothing to compare, and no member to sit out a step.
        manager = self._ranks.manager(
            _device(),
            suffix=SUFFIX,
            commit="quorum",
            init_sync=False,
            trains=False,
            ranks_hold=RanksHold.COPIES,
        )
        manager.set_state_dict_fns(self._late, lambda: {"events": self._events})
        return manager

    def _late(self, state: dict[str, Any]) -> None:
        if state["events"] != self._events:
            self._over = True


def _members(job: dict[str, Any]) -> bool:
    return bool(job["waiting"]) or not all(member["gone"] for member in job["members"])


def _device() -> torch.device:
    from accelerate.state import PartialState

    device: torch.device = PartialState().device
    return device
