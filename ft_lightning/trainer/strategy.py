"""The strategy, written once for both of Lightning's namespaces.

`ft_lightning.pytorch` and `ft_lightning.pl` put `FTDDPMixin` in front of their own `DDPStrategy`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Literal

import torch

from ft_core.errors import QuorumUnavailable
from ft_core.launch.supervisor import report_joined
from ft_core.manager import Manager
from ft_core.telemetry import JsonlSink
from ft_lightning.shared.launcher import SupervisorLauncher, live_with_group
from ft_lightning.shared.registration import DESCRIPTION, NAME
from ft_lightning.shared.step_collectives import zero_loss
from ft_lightning.shared.strategy_options import (
    Options,
    make_manager,
    refuse_ddp_options,
    refuse_lbfgs,
)
from ft_lightning.shared.topology import Role
from ft_lightning.trainer import healing, hooks, leader
from ft_lightning.trainer import loop_counters as position
from ft_lightning.trainer.agreements import Rounds
from ft_lightning.trainer.batches import Batches
from ft_lightning.trainer.checkpoint_files import CheckpointMixin
from ft_lightning.trainer.decisions import Decisions
from ft_lightning.trainer.driver import StepDriver
from ft_lightning.trainer.reporting import Counts, count, hide_from_bar, show_in_bar
from ft_lightning.trainer.validation import Validation
from ft_lightning.trainer.world_view import ScopedMixin, lock_machine, schema


class FTDDPMixin(CheckpointMixin, ScopedMixin):
    """Strategy for data-parallel training that survives the loss of processes.

    Each replica group (one process, or several) holds the whole model and may die at any time; the
    others train on. One that (re)starts takes model, optimizers, schedulers, callbacks and the
    place in the data from its peers and joins them at their step.

    Args:
        min_replicas: no step is taken with fewer replica groups; the others wait.
        num_replica_groups: how many replica groups there are meant to be; the data is sharded by
            their processes. Default: NUM_REPLICA_GROUPS, else as many as ``devices`` make.
        lighthouse: address of the lighthouse, "tcp://host:port". Default: TORCHFT_LIGHTHOUSE, else
            one is started on this machine.
        timeout_s: how long one step's communication may take, in seconds. The other times follow
            from it.
        quorum_timeout_s: how long to wait for enough replica groups, in seconds; None: for ever.
        replica_name: what this replica group is called; stable over restarts, unique in the job.
            Default: REPLICA_GROUP_ID.
        commit: "quorum": all groups take a step or none does. "group": each decides by its own
            success, which saves a round trip where links are slow.
        max_retries: raise after this many discarded steps in a row; None: never.
        max_restarts: how often each group is started again that the Trainer (``devices=N``) starts.
        heal_allow_objects: let states hold any Python object (pickle): on trusted networks only.
        token: shared secret that replica groups ask of each other before they give their state.
        job_id: keeps two jobs on one lighthouse apart. Default: FT_JOB_ID.
        group_size: processes a replica group, which live and die together. Default: 1; all devices
            of a machine with ``num_nodes`` > 1; WORLD_SIZE under torchrun.
        validation: "replicated": each group validates on all of the data. "sharded": the groups
            divide it; metrics are those of all of it, also if a group dies meanwhile.
        **kwargs: options of :class:`DDPStrategy` and of torch's DistributedDataParallel.
    """

    _namespace: str
    counts: Counts | None = None  # steps, discards, heals of the fit under way or the last one

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
        group_size: int | None = None,
        validation: Literal["replicated", "sharded"] = "replicated",
        **kwargs: Any,
    ) -> None:
        refuse_ddp_options(kwargs)
        super().__init__(**kwargs)
        self._options = Options(
            min_replicas=min_replicas,
            num_replica_groups=num_replica_groups,
            lighthouse=lighthouse,
            timeout_s=timeout_s,
            quorum_timeout_s=quorum_timeout_s,
            replica_name=replica_name,
            commit=commit,
            max_retries=max_retries,
            max_restarts=max_restarts,
            heal_allow_objects=heal_allow_objects,
            token=token,
            job_id=job_id,
            group_size=group_size,
            validation=validation,
        )
        self._manager: Manager | None = None
        self._driver: StepDriver | None = None
        self._batches: Batches | None = None
        self._decisions: Decisions | None = None
        self._rounds: Rounds | None = None
        self._callbacks: tuple[Any, ...] = ()
        self._sink: JsonlSink | None = None
        self._writes = self._met = self._shows_bar = False
        self._owes_join_report = True

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
        """How many processes contribute to the current (or last) step; 0 before the first."""
        return 0 if self._driver is None else self._driver.participants

    @property
    def last_step_committed(self) -> bool | None:
        """Whether the last optimizer step was committed; None before the first one's end."""
        return None if self._driver is None else self._driver.last_committed

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        if self.scope.role is Role.MEMBER:
            live_with_group(self.scope)
            self._launcher = None
            return
        self._launcher = SupervisorLauncher(self.scope, self._options)  # type: ignore[assignment]

    def setup_environment(self) -> None:
        if self.scope.world_size > 1:
            # Before callbacks are set up, which disables bars where rank zero is not.
            self._shows_bar = getattr(self._trainer.progress_bar_callback, "is_enabled", False)
            if self.scope.local_rank == 0:
                self._prepare_lock = lock_machine(self._options.job_id or "")
        super().setup_environment()
        if self._trainer.state.fn == "fit":
            dummy = self._from("fabric.loggers.logger")._DummyExperiment
            self._leader = self._writes = leader.before_quorum(self._trainer, self.scope, dummy)
            self._met = False

    def setup_distributed(self) -> None:
        """No default process group: Lightning would take the replica group for the world."""
        self._from("fabric.utilities.seed").reset_seed()
        self.set_world_ranks()

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
        self._manager = make_manager(self._job, self._options, self.scope, self.root_device)
        self.counts = count(self._manager, self.scope.num_groups)
        show_in_bar(trainer, self.counts, visible=self._shows_bar and self.scope.rank == 0)
        if self.scope.event_log and self.scope.group_rank == 0:
            self._sink = JsonlSink(Path(self.scope.event_log), name=self.scope.name)
            self._manager.telemetry.add_sink(self._sink)
        self._decisions = Decisions(trainer)
        self._driver = self._make_driver(trainer)
        # Without a decision by the quorum, or without one a step, each group decides for itself.
        agrees = isinstance(self._driver, StepDriver) and self._options.commit == "quorum"
        self._decisions.alone = not agrees
        self._rounds = Rounds(trainer, self._decisions, self._driver.round if agrees else None)
        if self._options.validation == "sharded":
            Validation(trainer, self._rounds, self._batches)
        local_only = self._in_group.local_only()
        self._manager.set_state_dict_fns(
            local_only(self._driver.load), local_only(self._driver.state)
        )
        super().setup(trainer)
        refuse_lbfgs(self.optimizers)
        if isinstance(self._driver, StepDriver):
            self._manager.preallocate_state(*self.optimizers)
        stopping = self._from("callbacks").EarlyStopping
        first, last = hooks.make(stopping, self._adopt_fetcher, self._rounds, self._decisions)
        self._callbacks, trainer.callbacks[:] = (first, last), [first, *trainer.callbacks, last]

    def _make_driver(self, trainer: Any) -> Any:
        """What works the manager at each step; before the model is wrapped."""
        assert self._manager is not None
        assert self._batches is not None
        assert self._decisions is not None
        return StepDriver(
            trainer,
            self._manager,
            self._batches,
            self._decisions,
            on_quorum=self._on_quorum,
            hooks=self._call_hooks,
            leave=self._leave,
            patience_s=4 * self._options.timeout_s,  # the lighthouse evicts a hung group before
            min_replicas=self._options.min_replicas,
        )

    def _setup_model(self, model: Any) -> Any:
        if self._driver is None or self._trainer.state.fn != "fit":
            return model
        options = dict(self._ddp_kwargs)
        if not model.automatic_optimization:
            # With several optimizers each backward reaches some of the parameters only.
            options.setdefault("find_unused_parameters", True)
        return self._driver.wrap(model, **options)

    def _register_ddp_hooks(self) -> None:
        """ft_core's wrapper has registered its own."""

    # ------------------------------------------------------------------ the step

    def on_train_start(self) -> None:
        """The state is complete: say where this group starts, and take over the data."""
        super().on_train_start()
        assert self._manager is not None and self._decisions is not None
        if not self._met:  # else the learning rate finder has trained already
            self._manager.load_state_dict(self._start())
            for key, text in schema(self._trainer, self.scope).items():
                self._manager.register_schema(key, text)
        self._decisions.begin()
        self._adopt_fetcher()

    def _start(self) -> dict[str, Any]:
        known = self._checkpoints.loaded
        return {
            "step": known.get("step", self._trainer.global_step),
            "batches_committed": known.get("batches_committed", 0),
            "lineage": healing.begin(self._trainer, self._in_group, self._job),
        }

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
        assert self.model is not None
        # Lightning puts the wrapper into eval mode for validation and only what is inside back.
        self.model.training = True
        output = self._driver.training_step(args, super().training_step)
        module = self.lightning_module
        assert module is not None
        steps = isinstance(self._driver, StepDriver)
        if output is None and steps and module.automatic_optimization and self.world_size > 1:
            # The others' gradients wait for this one's.
            return zero_loss(module)
        return output

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Called by Lightning (or by the user's `manual_backward`); its end is a step's."""
        steps = self._driver if isinstance(self._driver, StepDriver) else None
        module = self.lightning_module
        if steps is not None and module is not None and not module.automatic_optimization:
            steps.before_backward()
        output = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._sink is not None and steps is not None and not steps.open:
            self._tell_loss(closure_loss)
        return output

    def _tell_loss(self, loss: torch.Tensor) -> None:
        """To the event log: the loss of the last step."""
        assert self._manager is not None
        outcome = self._manager.last_outcome()
        self._manager.telemetry.emit(
            "loss",
            step=outcome.step if outcome else None,
            loss=float(loss) * self._trainer.accumulate_grad_batches,
        )

    def _at_boundary(self) -> None:
        if self._driver is not None:
            self._driver.at_boundary()

    def _adopt_fetcher(self) -> None:
        """An epoch begins: the data fetcher of a new epoch is to be ours before it is used."""
        assert self._batches is not None
        self._batches.adopt_fetcher(self._trainer.fit_loop._data_fetcher)

    def _on_quorum(self) -> None:
        """Membership may have changed: so may the leader."""
        assert self._manager is not None
        assert self._driver is not None
        try:
            self._driver.participants = self._manager.num_participants()
            self._leader = self._manager.participating_rank() == 0
        except QuorumUnavailable:
            return  # the attempt has failed already; the next one tells
        leader.in_quorum(self._trainer, self.scope, self._leader)
        if self._owes_join_report:
            self._owes_join_report = False
            report_joined(os.environ, self.scope.number)
        if self._leader and not self._writes:
            self._writes = True
            log_hyperparams = self._from("loggers.utilities")._log_hyperparams
            with self._in_group.local_only():
                leader.begin(self._trainer, log_hyperparams, takes_over=self._met)
        self._met = True

    def _call_hooks(self, name: str) -> None:
        call = self._from("trainer.call")
        call._call_callback_hooks(self._trainer, name)
        call._call_lightning_module_hook(self._trainer, name)

    def _leave(self) -> None:
        raise self._from("utilities.exceptions").SIGTERMException

    # ------------------------------------------------------------------ the end

    def on_train_end(self) -> None:
        super().on_train_end()
        if not hooks.searching(self._trainer):
            # Before user code that follows the fit: peers must not wait for it.
            self._shut_down(finished=True)

    def teardown(self) -> None:
        self.release_machine()
        self._shut_down()
        if self._trainer.state.fn == "fit" and not self._met:
            self._leader = leader.without_quorum(self._trainer, self.scope)
        # Unwrapped here: DDP's own teardown would recommend options that are refused.
        self.model = self.lightning_module
        super().teardown()

    def _shut_down(self, *, finished: bool = False) -> None:
        """Leave the quorum and undo what was put into Lightning's objects. Idempotent."""
        if self._driver is not None:
            self._driver.close()
        if self._batches is not None:
            self._batches.release()
        if self._decisions is not None:
            self._decisions.release()
            self._decisions = None
        for callback in self._callbacks:
            if callback in self._trainer.callbacks:
                self._trainer.callbacks.remove(callback)
        self._callbacks = ()
        if self._manager is not None:
            self._manager.shutdown(finished=finished)
            hide_from_bar(self._trainer.progress_bar_callback)
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
