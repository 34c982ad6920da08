"""The strategy, written once for both of Lightning's namespaces.

`ft_lightning.pytorch` and `ft_lightning.pl` put `FTDDPMixin` in front of their own `DDPStrategy`.

Scopes. Everything that Lightning does collectively (barriers, broadcasts, `sync_dist`, decisions)
stays inside the replica group, which is one process here: nothing of it can hang on a group that
died. Only gradients, and the step's vote, go over the quorum. `trainer.world_size` and
`trainer.global_rank` are nominal: the configured number of groups, and this group's number. How
many take part right now is `trainer.strategy.num_participants`. Training data is sharded over the
nominal world; validation, test and prediction data is not sharded: each group computes the same
metrics, so that early stopping and plateau schedulers decide alike everywhere.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from ft_core.manager import Manager
from ft_core.telemetry import JsonlSink
from ft_lightning import healing, position
from ft_lightning.batches import Batches
from ft_lightning.launcher import SupervisorLauncher, die_with_supervisor
from ft_lightning.registration import DESCRIPTION, NAME
from ft_lightning.scope import ENV_DEVICE, Role, Scope, resolve
from ft_lightning.step import StepDriver

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

log = logging.getLogger("ft_lightning")

_REFUSED = {
    "ddp_comm_state": "gradients travel through the manager",
    "ddp_comm_hook": "gradients travel through the manager",
    "ddp_comm_wrapper": "gradients travel through the manager",
    "model_averaging_period": "post-local SGD needs a fixed world",
    "start_method": "each replica group runs the script itself",
    "process_group_backend": "it follows from the device",
}


class FTDDPMixin(_Base):
    """Strategy for data-parallel training that survives the loss of processes.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    train on. A process that (re)starts takes model, optimizers, schedulers, callbacks and the
    place in the data from its peers and joins them at their step.

    Args:
        min_replicas: no step is taken with fewer replica groups; the others wait.
        num_replica_groups: how many replica groups there are meant to be. The data is sharded by
            this number. Default: NUM_REPLICA_GROUPS, else the Trainer's ``devices``.
        lighthouse: address of the lighthouse, "tcp://host:port". Default: TORCHFT_LIGHTHOUSE, else
            one is started on this machine.
        timeout_s: how long one step's communication may take, in seconds. The other times follow
            from it.
        quorum_timeout_s: how long to wait for enough replica groups, in seconds; None: as long as
            it takes.
        replica_name: what this replica group is called; stable over restarts, unique in the job.
            Default: REPLICA_GROUP_ID.
        commit: "quorum": all groups take a step or none does. "group": each decides by its own
            success, which saves a round trip where links are slow.
        max_retries: raise after this many discarded steps in a row; None: never.
        max_restarts: how often each replica group is started again when the Trainer starts them
            (``devices`` greater than 1).
        heal_allow_objects: let states hold arbitrary Python objects, which travel by pickle. Only
            on a network that you trust.
        token: shared secret that replica groups ask of each other before they give their state.
        job_id: keeps two jobs on one lighthouse apart. Default: FT_JOB_ID.
        **kwargs: options of :class:`DDPStrategy` and of torch's DistributedDataParallel.
    """

    _namespace: str
    _hook_callback: Callable[..., Any]

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
        max_restarts: int = 10,
        heal_allow_objects: bool = False,
        token: str = "",
        job_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"ft_ddp takes no {name}: {reason}")
        if min_replicas < 1:
            raise ValueError(f"min_replicas must be at least 1, got {min_replicas}")
        if num_replica_groups is not None and num_replica_groups < min_replicas:
            raise ValueError(
                f"num_replica_groups ({num_replica_groups}) must be at least min_replicas "
                f"({min_replicas})"
            )
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        if commit not in ("quorum", "group"):
            raise ValueError(f'commit must be "quorum" or "group", got {commit!r}')
        super().__init__(**kwargs)
        self._min_replicas = min_replicas
        self._num_replica_groups = num_replica_groups
        self._lighthouse = lighthouse
        self._timeout_s = timeout_s
        self._quorum_timeout_s = quorum_timeout_s
        self._replica_name = replica_name
        self._commit = commit
        self._max_retries = max_retries
        self._max_restarts = max_restarts
        self._heal_allow_objects = heal_allow_objects
        self._token = token
        self._job_id = job_id
        self._scope: Scope | None = None
        self._leader = False
        self._manager: Manager | None = None
        self._driver: StepDriver | None = None
        self._batches: Batches | None = None
        self._callback: Any = None
        self._sink: JsonlSink | None = None
        self._prepare_lock: int | None = None
        self._owes_hyperparameters = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's convention; `import ft_lightning` does it."""
        strategy_registry.register(NAME, cls, description=DESCRIPTION, override=True)

    # ------------------------------------------------------------------ what users ask

    @property
    def manager(self) -> Manager | None:
        """The manager of the fit under way or, shut down, of the last one; None before a fit."""
        return self._manager

    @property
    def num_participants(self) -> int:
        """How many replica groups contribute to the current (or last) step; 0 before the first."""
        driver = self._driver
        return 0 if driver is None else driver.participants

    @property
    def last_step_committed(self) -> bool | None:
        """Whether the last optimizer step was committed; None before the first one's end."""
        return None if self._driver is None else self._driver.last_committed

    # ------------------------------------------------------------------ scopes

    @property
    def scope(self) -> Scope:
        """Who this process is. Known once the Trainer has been created."""
        assert self._scope is not None, "the strategy is not attached to a Trainer yet"
        return self._scope

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.scope.device if self._scope else 0]

    @property
    def global_rank(self) -> int:
        """Nominal: the number of this replica group."""
        return self._scope.index if self._scope else 0

    @property
    def world_size(self) -> int:
        """Nominal: the configured number of replica groups."""
        return self._scope.num_groups if self._scope else 1

    @property
    def local_rank(self) -> int:
        """Within the replica group, which is one process."""
        return 0

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this group is the leader: the first of those that take part in the step.

        Before its first quorum a process cannot know. Group 0 of a fresh start then acts as the
        leader on the screen; one that was restarted claims nothing.
        """
        return self._leader

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.training:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": 1, "rank": 0}

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision  # of the replica group, which is one process

    def set_world_ranks(self) -> None:
        """Called by Lightning when the Trainer is made, and before a run."""
        if self._scope is None:
            scope = resolve(
                os.environ,
                devices=len(self.parallel_devices or ()),
                num_nodes=self.num_nodes,
                num_replica_groups=self._num_replica_groups,
                replica_name=self._replica_name,
            )
            if scope.device >= len(self.parallel_devices or ()):
                raise ValueError(
                    f"{ENV_DEVICE} is {scope.device}, but the Trainer has "
                    f"{len(self.parallel_devices or ())} device(s)"
                )
            self._scope = scope
            self._leader = scope.index == 0 and scope.restarts == 0
            _act_as_leader(self._leader, scope)

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        if self.scope.role is Role.MEMBER:
            die_with_supervisor(self.scope.supervisor_pid)
            self._launcher = None
            return
        self._launcher = SupervisorLauncher(  # type: ignore[assignment]
            num_groups=self.scope.num_groups,
            min_replicas=self._min_replicas,
            timeout_s=self._timeout_s,
            lighthouse=self._lighthouse,
            max_restarts=self._max_restarts,
        )

    def setup_environment(self) -> None:
        if self.scope.num_groups > 1:
            self._prepare_lock = _lock_machine()
        super().setup_environment()
        if self.scope.num_groups > 1 and self._trainer.state.fn == "fit":
            # Loggers open their files at their first use as rank zero, under a version number
            # that follows from the files there are: nobody is rank zero until all have chosen.
            _act_as_leader(False, self.scope)
            self._owes_hyperparameters = True

    def setup_distributed(self) -> None:
        """No default process group: the replica group is this process."""
        self._from("fabric.utilities.seed").reset_seed()
        self.set_world_ranks()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Of the replica group. The first one after `prepare_data` lets the next process in."""
        if self._prepare_lock is not None:
            os.close(self._prepare_lock)
            self._prepare_lock = None

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                "ft_ddp does not synchronize batch norm over replica groups, which come and go: "
                "leave out sync_batchnorm=True"
            )
        if trainer.state.fn != "fit":
            super(self._ddp_class, self).setup(trainer)
            return
        position.check(trainer)
        self._shut_down()
        self._batches = Batches(
            self._at_boundary, self._from("fabric.utilities.data")._set_sampler_epoch
        )
        self._manager = self._make_manager()
        self._driver = StepDriver(
            trainer,
            self._manager,
            self._batches,
            on_quorum=self._on_quorum,
            hooks=self._call_hooks,
            leave=self._leave,
        )
        self._manager.set_state_dict_fns(self._driver.load, self._driver.state)
        super().setup(trainer)
        self._check_optimizers()
        # First in the list, so that the data fetcher of a new epoch is ours before any is used.
        self._callback = self._hook_callback(self._adopt_fetcher)
        trainer.callbacks.insert(0, self._callback)

    def _setup_model(self, model: Any) -> Any:
        from ft_core.ddp import DistributedDataParallel as FTDistributedDataParallel

        if self._manager is None:
            return model
        return FTDistributedDataParallel(self._manager, model, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """ft_core's wrapper has registered its own."""

    def _make_manager(self) -> Manager:
        manager = Manager(
            _process_group(self.root_device, self._timeout_s),
            min_replica_size=self._min_replicas,
            use_async_quorum=False,
            timeout=timedelta(seconds=self._timeout_s),
            quorum_timeout=_seconds(self._quorum_timeout_s),
            rank=0,
            world_size=1,
            lighthouse_addr=self._lighthouse,
            replica_id=self.scope.name,
            max_retries=self._max_retries,
            job_id=self._job_id,
            expected_replicas=self.scope.num_groups,
            commit=self._commit,
            heal_allow_objects=self._heal_allow_objects,
            token=self._token,
        )
        if self.scope.event_log:
            self._sink = JsonlSink(Path(self.scope.event_log), name=self.scope.name)
            manager.telemetry.add_sink(self._sink)
        return manager

    def _check_optimizers(self) -> None:
        if any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers):
            raise ValueError(
                "LBFGS evaluates the loss several times a step, which a fault-tolerant step "
                "cannot: use an optimizer that evaluates it once"
            )
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization and len(self.optimizers) > 1:
            raise ValueError(
                f"ft_ddp votes once a batch, and manual optimization with {len(self.optimizers)} "
                "optimizers steps more often: use one optimizer"
            )

    # ------------------------------------------------------------------ the step

    def on_train_start(self) -> None:
        """The state is complete: say where this group starts, and take over the data."""
        super().on_train_start()
        assert self._manager is not None
        trainer = self._trainer
        start = healing.lineage_of_start(trainer, allow_objects=self._heal_allow_objects)
        self._manager.load_state_dict(
            {"step": trainer.global_step, "batches_committed": 0, "lineage": start}
        )
        self._adopt_fetcher()

    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if self._batches is not None and self._trainer.training:
            self._batches.adopt_loader(loader)
        return loader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._driver is None or not self._driver.open:
            raise RuntimeError(
                "a batch began without a quorum: this version of Lightning fetches batches in "
                "another way; use the versions that ft_lightning was tested with (2.6)"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._driver is not None
        return self._driver.training_step(args, super().training_step)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Called by Lightning (or by the user's `optimizer.step`) once a step."""
        assert self._driver is not None
        assert self._manager is not None
        update = super().optimizer_step
        output = None

        def step(result: Any) -> None:
            nonlocal output
            output = update(optimizer, _once(result), model, **kwargs)

        result = self._driver.optimizer_step(closure, step, optimizer)
        if self._sink is not None and isinstance(result, torch.Tensor):
            outcome = self._manager.last_outcome()
            scale = self._trainer.accumulate_grad_batches
            self._manager.telemetry.emit(
                "loss", step=outcome.step if outcome else None, loss=float(result) * scale
            )
        return output

    def _at_boundary(self) -> None:
        if self._driver is not None:
            self._driver.at_boundary()

    def _adopt_fetcher(self) -> None:
        assert self._batches is not None
        self._batches.adopt_fetcher(self._trainer.fit_loop._data_fetcher)

    def _on_quorum(self) -> None:
        """Membership may have changed: so may the leader."""
        assert self._manager is not None
        assert self._driver is not None
        self._driver.participants = self._manager.num_participants()
        self._leader = self._manager.participating_rank() == 0
        _act_as_leader(self._leader, self.scope)
        if self._owes_hyperparameters:
            self._owes_hyperparameters = False
            if self._leader and self._trainer.enable_autolog_hparams:
                # At set-up, when Lightning does this, nobody was rank zero yet.
                self._from("loggers.utilities")._log_hyperparams(self._trainer)

    def _call_hooks(self, name: str) -> None:
        call = self._from("trainer.call")
        call._call_callback_hooks(self._trainer, name)
        call._call_lightning_module_hook(self._trainer, name)

    def _leave(self) -> None:
        raise self._from("utilities.exceptions").SIGTERMException

    # ------------------------------------------------------------------ the end

    def on_train_end(self) -> None:
        super().on_train_end()
        # Before user code that follows the fit: its duration is nobody's business.
        self._shut_down()

    def teardown(self) -> None:
        self.barrier()
        self._shut_down()
        # Unwrapped here: DDP's own teardown would recommend options that are refused.
        self.model = self.lightning_module
        super().teardown()

    def _shut_down(self) -> None:
        """Leave the quorum and undo what was put into Lightning's objects. Twice is once."""
        if self._driver is not None:
            self._driver.close()
        if self._batches is not None:
            self._batches.release()
        if self._callback is not None:
            callbacks = self._trainer.callbacks
            if self._callback in callbacks:
                callbacks.remove(self._callback)
            self._callback = None
        if self._manager is not None:
            self._manager.shutdown()
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    # ------------------------------------------------------------------ pieces

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _ddp_class(self) -> Any:
        return self._from("strategies").DDPStrategy

    def _from(self, module: str) -> Any:
        """A module of the Lightning that this class belongs to; "fabric." is its Fabric."""
        if module.startswith("fabric."):
            fabric = "lightning.fabric" if "." in self._namespace else "lightning_fabric"
            return importlib.import_module(fabric + module.removeprefix("fabric"))
        return importlib.import_module(f"{self._namespace}.{module}")


def _act_as_leader(leader: bool, scope: Scope) -> None:
    """Set the rank that Lightning's loggers and messages go by: 0 is who speaks."""
    rank: Any = rank_zero_only
    rank.rank = 0 if leader else max(scope.index, 1)


def _once(result: Any) -> Callable[[], Any]:
    """A closure for the optimizer: the loss was computed already, and for one evaluation."""
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                "this optimizer evaluates the loss several times a step, which a fault-tolerant "
                "step cannot: use an optimizer that evaluates it once"
            )
        return result

    return closure


def _process_group(device: torch.device, timeout_s: float) -> Any:
    from ft_core import process_group

    if device.type == "cuda":
        return process_group.ProcessGroupNCCL(timeout_s)  # type: ignore[attr-defined]
    if device.type == "cpu":
        return process_group.ProcessGroupGloo(timeout_s)
    raise ValueError(f"ft_ddp trains on cpu and cuda, not on {device.type}")


def _seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)


def _lock_machine() -> int:
    """Let one process of this user at a time download or prepare data on this machine.

    Returns a file descriptor that holds the lock; closing it (or dying) lets the next one in.
    """
    path = Path(tempfile.gettempdir()) / f"ft_lightning-{os.getuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
