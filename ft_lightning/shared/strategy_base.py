"""What the strategies of Trainer and Fabric share: their options, their ranks, and the manager.

Each option is declared once, in the signature of `StrategyBase.__init__`. All strategies inherit
it, so that `help()`, LightningCLI and type checkers see every option with its type.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from ft_core.config import JobOptions
from ft_core.ddp import refuse_arguments
from ft_core.environment import SHARED_JOB, ReplicaEnv
from ft_core.errors import QuorumUnavailable
from ft_core.launch import board
from ft_core.launch.import_hook import newer_than_tested
from ft_core.launch.narrator import ONLY_GROUP, Narrator
from ft_core.launch.supervisor import say
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_core.shell.intra_group import IntraGroup
from ft_core.telemetry import JsonlSink, event_log
from ft_lightning.shared import trainings
from ft_lightning.shared.launch_env import ENV_DEVICE, LaunchEnv
from ft_lightning.shared.launcher import SupervisorLauncher, live_with_group
from ft_lightning.shared.topology import Role, Scope, resolve
from ft_lightning.shared.world_of_torch import stand_in
from lighthouse.errors import TrainingOver

if TYPE_CHECKING:

    class _Base:
        def __init__(self, **kwargs: Any) -> None: ...

else:
    _Base = object

NEWEST = "2.6"
"""The last version of Lightning that was tested."""
_TIMEOUT = timedelta(minutes=30)
KEEP_STATE_S = 30.0
"""Seconds of work that the death of all replica groups may cost, by default."""

# ---------------------------------------------------------------------- options


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `StrategyBase.__init__`. Raises ValueError for a value that no job can have.

    What a `JobOptions` checks is checked there.
    """

    min_replicas: int
    num_replica_groups: int | None
    lighthouse: str | None
    timeout_s: float
    quorum_timeout_s: float | None
    replica_name: str | None
    commit: str
    max_retries: int | None
    max_restarts: int | None
    heal_allow_objects: bool
    token: str
    job_id: str | None
    group_size: int | None = None
    validation: str = "replicated"
    resume: bool = True
    warm_start: bool = True
    keep_state_s: float = KEEP_STATE_S
    keep_state_dir: str | None = None
    spares: int = 0

    def __post_init__(self) -> None:
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        of_job = {each.name for each in fields(JobOptions)}
        known = {k: v for k, v in mine.items() if k in of_job and v is not None}
        expected = self.num_replica_groups or max(0, self.min_replicas + self.spares)
        JobOptions(name="0", expected_replicas=expected, async_quorum=False, **known)
        if not self.keep_state_s >= 0:
            raise ValueError(f"keep_state_s must not be negative, got {self.keep_state_s}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        groups = self.num_replica_groups
        if groups is not None and groups < self.min_replicas:
            raise ValueError(
                f"num_replica_groups ({groups}) must be at least min_replicas ({self.min_replicas})"
            )
        if self.validation not in ("replicated", "sharded"):
            raise ValueError(
                f'validation must be "replicated" or "sharded", got {self.validation!r}'
            )
        if self.validation == "sharded" and self.commit == "group":
            raise ValueError(
                'validation="sharded" needs commit="quorum": with commit="group" nothing says '
                "which groups are at the same validation"
            )
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")


_REFUSED = {
    "ddp_comm_state": "gradients travel through the manager",
    "ddp_comm_hook": "gradients travel through the manager",
    "ddp_comm_wrapper": "gradients travel through the manager",
    "model_averaging_period": "post-local SGD needs a fixed world",
    "start_method": "each replica group runs the script itself",
    "process_group_backend": "it follows from the device",
}
NO_SYNC_BATCHNORM = (
    "ft_ddp does not synchronize batch norm over replica groups, which come and go: leave out "
    "sync_batchnorm=True"
)
_DEFAULTS = {"start_method": "popen", "init_sync": True}


def refuse_ddp_options(given: dict[str, Any]) -> None:
    """Raise ValueError for options of DDPStrategy that cannot work here.

    Removes those that have their default: LightningCLI passes all options, set or not.
    """
    for name, default in _DEFAULTS.items():
        if given.get(name) == default:
            del given[name]
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise ValueError(f"ft_ddp takes no {name}: {reason}")


def refuse_lbfgs(optimizers: Any) -> None:
    """Raise ValueError for an optimizer that cannot step fault-tolerantly."""
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise ValueError(
            "LBFGS evaluates the loss several times a step, which a fault-tolerant step "
            "cannot: use an optimizer that evaluates it once"
        )


def job_of(options: Options, scope: Scope, known: ReplicaEnv) -> str | None:
    """The job of this fit; None: what the environment says.

    A fit without peers, as far as options and environment say, has a job of its own. Several such
    fits on one machine share a lighthouse, which would take them for lives of one replica group.
    """
    if options.job_id or known.job_id != SHARED_JOB:
        return options.job_id
    if scope.job_id:
        return scope.job_id
    if scope.num_groups > 1 or options.replica_name or known.name:
        return None
    if scope.group_size > 1:  # all its ranks must have the same name for it
        return f"alone-{scope.store_addr}:{scope.store_port}"
    return f"alone-{uuid.uuid4().hex[:12]}"


# ---------------------------------------------------------------------- the strategies' base


class StrategyBase(_Base):
    """Part of every strategy: options, ranks, the launcher and the manager.

    World size and ranks are those of the *configured* replica groups. They stay when groups die.
    """

    parallel_devices: Any
    _launcher: Any
    _options: Options
    _stock_name = "DDPStrategy"
    """Of Lightning's strategy that this one is built on."""
    _ranks_hold = "copies"
    """What the ranks of a replica group hold, see `ft_core.replica.status.RanksHold`."""
    _votes_each_step = True
    """False where a replica group trains on its own between two outer steps: it is one process."""
    _serves_spares = False
    """Whether a replica group can take over another one's share of the data between two steps."""
    _scope: Scope | None = None
    """Set when the Trainer or the Fabric is made."""
    _in_group: IntraGroup
    _job: JobOptions
    _training: JobOptions | None = None
    """`_job`, of the training under way or of the last one."""
    _manager: Manager | None = None
    _sink: JsonlSink | None = None
    _leader = False
    _group_leads = False
    """Whether this is a rank of the replica group that is the first to take part."""
    _met = False
    """Whether this process has been in a quorum of the training under way."""
    _trains_alone = False
    """The peers have finished the training, and this process is in a quorum without them."""
    _over = False
    """The last training of this process has ended regularly."""
    share = 0
    """Number of the share of the training data that this replica group reads. Any thread."""
    participants = 0
    """How many processes contributed when this one last looked."""

    def __init__(
        self,
        min_replicas: int = 1,
        num_replica_groups: int | None = None,
        lighthouse: str | None = None,
        timeout_s: float = 60.0,
        quorum_timeout_s: float | None = None,
        replica_name: str | None = None,
        commit: Literal["quorum", "group"] = "quorum",
        max_retries: int | None = None,
        max_restarts: int | None = None,
        heal_allow_objects: bool = False,
        token: str = "",
        job_id: str | None = None,
        group_size: int | None = None,
        validation: Literal["replicated", "sharded"] = "replicated",
        resume: bool = True,
        warm_start: bool = True,
        keep_state_s: float = KEEP_STATE_S,
        keep_state_dir: str | None = None,
        spares: int = 0,
        **kwargs: Any,
    ) -> None:
        """Take the options. Raises ValueError, in one sentence, for those that cannot work.

        Args:
            min_replicas: no step is taken with fewer replica groups; the others wait.
            num_replica_groups: how many replica groups there are meant to be; the data is sharded
                by their processes. Default: NUM_REPLICA_GROUPS, else as many as ``devices`` make.
            lighthouse: address of the lighthouse, "tcp://host:port". Default: TORCHFT_LIGHTHOUSE,
                else one is started on this machine.
            timeout_s: how long one step's communication may take, in seconds. The other times
                follow from it.
            quorum_timeout_s: how long to wait for enough replica groups, in seconds; None: forever.
            replica_name: name of this replica group; stable over restarts, unique in the job.
                Default: REPLICA_GROUP_ID.
            commit: "quorum": all groups take a step or none does. "group": each decides by its own
                success, which saves a round trip where links are slow.
            max_retries: raise after this many discarded steps in a row; None: never.
            max_restarts: how often each replica group is restarted within an hour, if ``devices=N``
                starts them; None: no limit while the job makes progress.
            heal_allow_objects: let states hold any Python object (pickle); for trusted networks only.
            token: shared secret that a replica group must show before a peer gives it its state.
            job_id: keeps two jobs on one lighthouse apart. Default: FT_JOB_ID.
            group_size: processes per replica group, which live and die together. Default: 1; all
                devices of a machine with ``num_nodes`` > 1; WORLD_SIZE under torchrun.
            validation: "replicated": each group validates on all of the data. "sharded" (Trainer
                only): the groups divide it; metrics are those of all of it, also if a group dies.
            resume: after all processes of the job have ended, a fit without a ckpt_path goes on from
                the newest whole checkpoint that this job has written (Trainer only).
            warm_start: a replica group that died is started again within a fraction of a second, from
                a process that has imported the libraries (if ``devices=N`` starts the groups).
                FT_WARM_START=0 switches it off, too.
            keep_state_s: a separate process takes a copy of the state at this interval, in seconds. When
                all replica groups have died they go on from it (with ``devices=N`` and ``resume``). Off where
                two copies exceed half of the free memory, and at 0.
            keep_state_dir: where it also writes the copy, for a job with its own id that is started again.
            spares: how many of the replica groups are hot spares, which take part with weight 0: the data
                is divided among the others, and a spare takes over the share of one that is gone.
            **kwargs: options of Lightning's strategy (:class:`DDPStrategy` takes those of torch's
                DistributedDataParallel).
        """
        said = locals()
        self._refuse_stock_options(kwargs)
        names = [each.name for each in fields(Options)]
        stock = inspect.signature(self._stock_class.__init__).parameters
        refuse_arguments({k: v for k, v in kwargs.items() if k not in stock}, *names, *stock)
        super().__init__(**kwargs)
        self._options = Options(**{each.name: said[each.name] for each in fields(Options)})
        self._prepare()

    def _refuse_stock_options(self, given: dict[str, Any]) -> None:
        """Raise ValueError for options of Lightning's strategy that cannot work here."""
        refuse_ddp_options(given)

    def _prepare(self) -> None:
        """The options are known: set up what the strategy keeps."""
        if self._options.spares and not self._serves_spares:
            raise ValueError(
                f"{type(self).__name__} has no hot spares: spares={self._options.spares} needs "
                '"ft_ddp", whose steps are taken by all replica groups together'
            )

    @property
    def _stock_class(self) -> Any:
        """The stock strategy of the Lightning that this strategy belongs to."""
        return next(cls for cls in type(self).__mro__ if cls.__name__ == self._stock_name)

    def _from(self, module: str) -> Any:
        """A module of the Lightning that this class belongs to; "fabric." is its Fabric."""
        namespace = self._stock_class.__module__.partition(".strategies")[0]
        if module.startswith("fabric."):
            namespace = "lightning.fabric" if "." in namespace else "lightning_fabric"
            module = module.removeprefix("fabric.")
        return importlib.import_module(f"{namespace}.{module}")

    def _say_if_newer(self) -> None:
        """Before the first step."""
        lightning = sys.modules[self._stock_class.__module__.partition(".")[0]]
        newer = newer_than_tested(lightning, NEWEST, "ft_lightning")
        if newer and self.scope.rank == 0:
            say("ft_lightning", newer)

    # ------------------------------------------------------------------ ranks

    @property
    def scope(self) -> Scope:
        """This process's place. Known once the Trainer or the Fabric has been created, which raises
        ValueError if the environment does not say it. Any thread."""
        assert self._scope is not None, "the strategy is not attached to a Trainer or a Fabric yet"
        return self._scope

    @property
    def root_device(self) -> torch.device:
        """This process's device; on CPU the same for all processes."""
        assert self.parallel_devices is not None
        number = self._scope.device if self._scope else 0
        # All CPUs are one: `devices` need not say how many processes torchrun has started.
        on_cpu = self.parallel_devices[0].type == "cpu"
        device: torch.device = self.parallel_devices[0 if on_cpu else number]
        return device

    @property
    def global_rank(self) -> int:
        """Number of this process among those of all configured replica groups. With hot spares: among
        those of all shares of the data; it changes when this group takes over another share."""
        scope = self._scope
        return self.share * scope.group_size + scope.group_rank if scope else 0

    @property
    def world_size(self) -> int:
        """Number of processes in all configured replica groups, less those of hot spares."""
        return self._job.data_shares * self._scope.group_size if self._scope else 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the leader, which saves: the first that takes part in the step.

        Before the first quorum of a fit none is; outside of a fit, rank 0 of a fresh start. After a
        fit it is the leader of its last step; if that one has died, and a supervisor has started all,
        the first that is left. Any thread; it may change with each step.
        """
        if self._over and not self._leader and self.scope.group_rank == 0:
            self._leader = board.slot().takes_over()
            if self._leader:
                act_as_leader(True, self.scope)
                board.slot().leads(True)
                self._on_takeover()
        return self._leader

    @property
    def divides_now(self) -> bool:
        """Whether `distributed_sampler_kwargs` say how a sampler that is made now divides its data: under a Trainer
        in a run, since nothing says before what it is for."""
        if not hasattr(self, "lightning_module"):
            return True
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.state.status == "running"

    @property
    def is_in_step(self) -> bool:
        """Whether the loop's thread computes a batch."""
        raise NotImplementedError

    def _on_takeover(self) -> None:
        """The training is over, the process that wrote is dead, and this one writes from now on."""

    @property
    def node_rank(self) -> int:
        """Number of this machine among those of the replica group."""
        return self._scope.node if self._scope else 0

    def _find_scope(self, num_nodes: int) -> None:
        """Find this process's place in the environment. Raises ValueError."""
        devices: list[Any] = list(self.parallel_devices or ())
        launched = LaunchEnv.read(num_nodes=num_nodes)
        size = self._group_size(launched, len(devices), num_nodes)
        scope = resolve(
            launched,
            devices=len(devices),
            num_nodes=num_nodes,
            group_size=size,
            num_replica_groups=self._options.num_replica_groups,
            replica_name=self._options.replica_name,
            lighthouse=self._options.lighthouse,
        )
        if scope.device >= len(devices) and devices[0].type != "cpu":
            raise ValueError(
                f"this process is to use device number {scope.device} ({ENV_DEVICE} and LOCAL_RANK "
                f"say so), but there are {len(devices)} device(s): make devices the number of "
                "processes that are started on this machine"
            )
        if scope.group_size > 1 and self._options.commit == "group":
            raise ValueError(
                'commit="group" lets each process decide for itself, and the ranks of a replica '
                'group must decide as one: use commit="quorum", or group_size=1'
            )
        timeout = getattr(self, "_timeout", None) or _TIMEOUT
        self._job = JobOptions.resolve(
            self._options,
            name=scope.name,
            expected_replicas=scope.num_groups,
            async_quorum=False,
            objects_option=f"{type(self).__name__}(heal_allow_objects=True)",
            group_rank=scope.group_rank,
            # A supervisor has ranks, and no peers.
            group_world_size=scope.group_size if scope.role is Role.MEMBER else 1,
            ranks_hold=self._ranks_hold,
            store_addr=scope.store_addr,
            store_port=scope.store_port,
        )
        self._in_group = IntraGroup(self._job, timeout_s=timeout.total_seconds())
        self._scope = scope
        self.share = min(scope.index, self._job.data_shares - 1)
        self._leader = scope.rank == 0 and scope.restarts == 0
        self._group_leads = scope.index == 0
        act_as_leader(self._leader, scope)
        stand_in(self)

    def _group_size(self, launched: LaunchEnv, devices: int, num_nodes: int) -> int | None:
        """How many processes a replica group has, as far as options say. Raises ValueError."""
        size = self._options.group_size
        if not self._votes_each_step:
            started = launched.replica.group_world_size if launched.ranked else 1
            size = self._one_process(max(size or 1, started))
        return size

    def _one_process(self, size: int) -> int:
        if size > 1:
            raise ValueError(
                f"{type(self).__name__} trains one process a replica group, not {size}: "
                "the ranks of a group would have to average gradients among themselves between two "
                "outer steps; use group_size=1 (under torchrun --nproc-per-node 1), or ft_ddp"
            )
        return size

    def _configure_launcher(self) -> None:
        """Called by Lightning when the Trainer or the Fabric is made: what can't work is said here,
        before processes start."""
        if getattr(self, "_layer_sync", None) is not None:
            raise ValueError(NO_SYNC_BATCHNORM)
        groups, least = self._job.data_shares, self._options.min_replicas
        if self.scope.role is not Role.MEMBER and groups < least:
            raise ValueError(
                f"min_replicas ({least}) must be at most the number of replica groups ({groups}, from "
                "devices and num_nodes), or no step is ever taken"
            )
        if self.scope.role is Role.MEMBER:
            live_with_group(self.scope)
            self._launcher = None
            if (processes := len(self.parallel_devices or ())) > 1:  # as the stock launcher does
                self._from("fabric.utilities.distributed")._set_num_threads_if_needed(processes)
        else:
            self._launcher = SupervisorLauncher(
                self.scope,
                self._job,
                self._options.max_restarts,
                warm_start=self._options.warm_start,
                keep_state_s=self._keep_state_s,
                keep_state_dir=self._options.keep_state_dir or "",
                refuse=self._refuse_trainer,
            )

    def _refuse_trainer(self, trainer: Any) -> None:
        """Raise ValueError for a Trainer that can't work in the replica groups which are about to start."""

    @property
    def _keep_state_s(self) -> float:
        able = self._votes_each_step and self._options.resume
        return self._options.keep_state_s if able else 0.0

    # ------------------------------------------------------------------ the manager

    @property
    def manager(self) -> Manager | None:
        """The manager of the training under way or, shut down, of the last one; None before.

        Its questions may be asked in any thread; steps are the strategy's. Any thread."""
        return self._manager

    @property
    def num_participants(self) -> int:
        """How many processes contribute to the current (or last) step; 0 before the first one.
        Never waits; any thread."""
        return self.participants

    def _next_training(self, model: Any = None) -> JobOptions:
        """The job of the training that begins now. Once for each.

        That of the last one, if an exception has ended it and the script has caught that: a process that
        comes back begins one where this one begins it twice, or its peers have not failed. Another
        strategy's counts where it has trained the same `model`: the script may make a new Trainer for
        each try, and a sweep one for each of its trainings.
        """
        before = self._training
        if before is not None and not self._over and trainings.is_latest(before):
            return before
        job_id = job_of(self._options, self.scope, ReplicaEnv.read())
        job = self._job if job_id is None else replace(self._job, job_id=job_id)
        self._training = job = replace(job, room_id=trainings.next_room(job, model))
        self._tell_training(over=False)
        return job

    def _make_manager(self) -> Manager:
        """The manager of the training under way. Opens no connection yet."""
        scope, job = self.scope, self._training
        assert job is not None
        manager = Manager.from_options(process_group_for(self.root_device, job.timeout_s), job)
        if scope.event_log and scope.group_rank == 0:
            self._sink = event_log(scope.event_log, scope.name)
            manager.telemetry.add_sink(self._sink)
        manager.register_schema("replica groups", str(scope.num_groups))
        manager.register_schema("processes a replica group", str(scope.group_size))
        return manager

    def _narrate(self, step: Callable[[], int]) -> None:
        """Tell the person who watches the terminal how the training goes. `step`: optimizer steps that
        this process has committed, or taken from its peers."""
        assert self._manager is not None and self._training is not None
        scope = self.scope
        if scope.group_rank:
            return
        if scope.num_groups > 1:
            self._manager.telemetry.add_sink(
                Narrator(
                    "ft_lightning",
                    scope.name,
                    scope.num_groups,
                    self._training.lighthouse,
                    lambda: f"step {step():,}" if step() else "",
                    deaths=not board.slot().whole,  # else the supervisor of all groups reports them
                )
            )
        elif scope.group_size > 1 and not scope.supervisor_pid:
            say("ft_lightning", ONLY_GROUP.format(scope.group_size, "python"))

    def _refuse_if_over(self) -> None:
        """Raise TrainingOver (or what `_when_over` makes of it) if the peers of this group have ended this
        training of the script. All ranks of the group call it, before they first ask for a quorum."""
        job = self._training
        assert job is not None
        if self.scope.num_groups > 1:
            why = self._in_group.from_rank_0(self._why_over)
            if why:
                error = self._when_over(TrainingOver(why))
                if isinstance(error, TrainingOver):
                    self._in_group.from_rank_0(lambda: trainings.give_up(job))
                raise error

    def _why_over(self) -> str:
        """Why this training can't be joined, as far as rank 0 of the group can tell; "": it can."""
        assert self._training is not None
        return trainings.over(self._training)

    def _when_over(self, error: TrainingOver) -> BaseException:
        """What to raise where peers have ended the training."""
        return error

    def _training_is_over(self, yes: bool) -> None:
        """A training has ended regularly; `yes` False: another one begins."""
        self._over = yes
        if yes and self._training is not None:
            trainings.has_ended(self._training)
        self._tell_training(over=yes)

    def _tell_training(self, *, over: bool) -> None:
        """Tell the supervisor and the other replica groups where in its script this one is."""
        if self.scope.group_rank == 0:
            board.slot().training(self._training_number, over=over)

    @property
    def _training_number(self) -> int:
        """Of the training under way, or of the last one, in this script; from 1."""
        assert self._training is not None
        return trainings.number_of(self._training.room_id)

    def _on_quorum(self) -> bool:
        """Membership may have changed, and with it the leader. False: there is no quorum now."""
        assert self._manager is not None
        try:
            shards = self._ranks_hold == "shards"
            ranks = self.scope.group_size if shards else 1
            self.participants = self._manager.num_participants() * ranks
            first = self._manager.participating_rank() == 0
        except QuorumUnavailable:
            return False  # the attempt has failed already; the next one tells
        with_peers = self._options.commit == "quorum"
        self._trains_alone = with_peers and self._manager.others_finished()
        if not self._trains_alone:  # else the leader of the last step that all have made stays it
            self._group_leads = first
            self._leader = first and not (shards and self.scope.group_rank)
        self._show_lead()
        return True

    def _still_leads(self) -> bool:
        """Whether this leader leads, as far as the lighthouse has told by now. One that was stopped for
        a while, or cut off, has a successor, and must not write into what that writes."""
        manager = self._manager
        if self._group_leads and self._met and manager is not None and not manager.left():
            part = manager.in_quorum()  # None: its peers have gone, and there are too few to go on
            if manager.evicted() or (part is not None and part.rank != 0):
                self._give_up_lead()
        return self.is_global_zero

    def _give_up_lead(self) -> None:
        """Another process leads, or will."""
        self._leader = self._group_leads = False
        self._show_lead()

    def _show_lead(self) -> None:
        """It may have changed whether this process leads."""
        act_as_leader(self._leader, self.scope)
        if self.scope.group_rank == 0:
            board.slot().leads(self._leader)

    def _refuse_to_train_alone(self) -> None:
        """A batch is computed by a process that `_trains_alone`. Raises RuntimeError.

        Not sooner: a process that takes part in a quorum without them may be at its end, too."""
        assert self._manager is not None
        self._manager.shutdown(finished=True)  # started again, it does not train from the start
        raise RuntimeError(
            "this process goes on training, and its peers have finished: its loop or its data is "
            "longer than theirs. It ends here, so that it does not write over what they have saved"
        )


class NoLongerLeads(Exception):
    """The leader had a successor before it had written a checkpoint."""


def act_as_leader(leader: bool, scope: Scope) -> None:
    """Set the rank by which Lightning's loggers and messages go: rank 0 writes and prints."""
    rank: Any = rank_zero_only
    # Others must differ from each other, too: seeds of data loader workers follow from it.
    rank.rank = 0 if leader else scope.rank or scope.world_size
