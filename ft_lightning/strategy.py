"""The strategy, written once for both of Lightning's namespaces.

`ft_lightning.pytorch` and `ft_lightning.pl` put `FTDDPMixin` in front of their own `DDPStrategy`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from ft_core.errors import QuorumUnavailable
from ft_core.manager import Manager
from ft_core.supervisor import report_joined
from ft_core.telemetry import JsonlSink
from ft_lightning import healing, position
from ft_lightning.batches import Batches
from ft_lightning.launcher import SupervisorLauncher, die_with_supervisor
from ft_lightning.options import Options, make_manager, refuse_ddp_options
from ft_lightning.registration import DESCRIPTION, NAME
from ft_lightning.scope import Role
from ft_lightning.scoping import ScopedMixin, act_as_leader, lock_machine
from ft_lightning.step import StepDriver


class FTDDPMixin(ScopedMixin):
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
        )
        self._manager: Manager | None = None
        self._driver: StepDriver | None = None
        self._batches: Batches | None = None
        self._callback: Any = None
        self._sink: JsonlSink | None = None
        self._owes_hyperparameters = False
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
        """How many replica groups contribute to the current (or last) step; 0 before the first."""
        driver = self._driver
        return 0 if driver is None else driver.participants

    @property
    def last_step_committed(self) -> bool | None:
        """Whether the last optimizer step was committed; None before the first one's end."""
        return None if self._driver is None else self._driver.last_committed

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        if self.scope.role is Role.MEMBER:
            die_with_supervisor(self.scope.supervisor_pid)
            self._launcher = None
            return
        self._launcher = SupervisorLauncher(  # type: ignore[assignment]
            num_groups=self.scope.num_groups,
            min_replicas=self._options.min_replicas,
            timeout_s=self._options.timeout_s,
            lighthouse=self._options.lighthouse,
            max_restarts=self._options.max_restarts,
        )

    def setup_environment(self) -> None:
        if self.scope.num_groups > 1:
            self._prepare_lock = lock_machine(self._options.job_id or "")
        super().setup_environment()
        if self.scope.num_groups > 1 and self._trainer.state.fn == "fit":
            # Loggers open their files at their first use as rank zero, under a version number
            # that follows from the files there are: nobody is rank zero until all have chosen.
            act_as_leader(False, self.scope)
            self._owes_hyperparameters = True

    def setup_distributed(self) -> None:
        """No default process group: the replica group is this process."""
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
        self._manager = make_manager(self._options, self.scope, self.root_device)
        if self.scope.event_log:
            self._sink = JsonlSink(Path(self.scope.event_log), name=self.scope.name)
            self._manager.telemetry.add_sink(self._sink)
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

        if self._manager is None or self._trainer.state.fn != "fit":
            return model
        return FTDistributedDataParallel(self._manager, model, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """ft_core's wrapper has registered its own."""

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
        start = healing.lineage_of_start(trainer, allow_objects=self._options.heal_allow_objects)
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
        assert self.model is not None
        # Lightning puts the wrapper into eval mode for validation and only what is inside back.
        self.model.training = True
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
        try:
            self._driver.participants = self._manager.num_participants()
            self._leader = self._manager.participating_rank() == 0
        except QuorumUnavailable:
            return  # the attempt has failed already; the next one tells
        act_as_leader(self._leader, self.scope)
        if self._owes_join_report:
            self._owes_join_report = False
            report_joined(os.environ, self.scope.index)
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
        self.release_machine()
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
