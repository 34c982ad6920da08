"""The strategy for Lightning Fabric, written once for both of its namespaces.

The loop is the user's: it cannot be rewound, as a Trainer's can. So a step begins before a training
loader fetches a batch (or, with data that Fabric does not know, at the forward), and ends with
`optimizer.step()`. A discarded step changes nothing; its batches come out of the loader again.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ft_core.errors import QuorumUnavailable
from ft_core.heal import digest
from ft_core.manager import Manager
from ft_core.supervisor import report_joined
from ft_core.telemetry import JsonlSink
from ft_lightning.batches import adopt
from ft_lightning.fabric_data import Place, Progress, follow
from ft_lightning.fabric_scoping import FabricScopedMixin
from ft_lightning.launcher import SupervisorLauncher, die_with_supervisor
from ft_lightning.options import Options, make_manager, refuse_ddp_options
from ft_lightning.scope import Role
from ft_lightning.scoping import act_as_leader


class FTFabricMixin(FabricScopedMixin):
    """Strategy for data-parallel training with Fabric that survives the loss of processes.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    train on. A process that (re)starts takes models, optimizers, the scheduler, what was given to
    :meth:`register`, and its place in the data from its peers, and joins them at their step.

    Args:
        min_replicas: no step is taken with fewer replica groups; the others wait.
        num_replica_groups: how many replica groups there are meant to be. The data is sharded by
            this number. Default: NUM_REPLICA_GROUPS, else Fabric's ``devices``.
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
        max_restarts: how often each replica group is started again when Fabric starts them
            (``devices`` greater than 1).
        heal_allow_objects: let states hold arbitrary Python objects, which travel by pickle. Only
            on a network that you trust.
        token: shared secret that replica groups ask of each other before they give their state.
        job_id: keeps two jobs on one lighthouse apart. Default: FT_JOB_ID.
        **kwargs: options of :class:`DDPStrategy` and of torch's DistributedDataParallel.
    """

    _namespace: str

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
        self._thread = threading.get_ident()
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._before: list[tuple[int, int, bool]] = []
        """Places of the loaders when the open step began."""
        self._open = self._starting = self._started = False
        self._fed_by_loader = self._finished = False
        self.progress = Progress()
        self.last_step_committed: bool | None = None
        """Whether the last optimizer step was committed; None before the first one's end."""

    # ------------------------------------------------------------------ what users call

    @property
    def manager(self) -> Manager | None:
        """The manager; None before a model is set up."""
        return self._manager

    @property
    def num_participants(self) -> int:
        """How many replica groups contribute to the step; 0 before the first. Never waits."""
        return self._manager.num_participants() if self._open and self._manager else 0

    @property
    def current_step(self) -> int:
        """Committed optimizer steps: equal in all groups."""
        return self.progress.step

    def register(self, name: str, state: Any) -> None:
        """Have `state` heal with the model: a dict, or what has `state_dict`, `load_state_dict`.

        Before the first batch. It may change between `optimizer.step()` and the next batch.
        Raises ValueError for a name taken, or after the first batch.
        """
        if self._started or name in self._registered:
            why = "the first batch was fetched already" if self._started else "the name is taken"
            raise ValueError(f"strategy.register({name!r}) comes too late or twice: {why}")
        self._registered[name] = state

    def epochs(self, total: int) -> Iterator[int]:
        """`for epoch in fabric.strategy.epochs(10)`: like `range`, but it follows heals and
        resumes (a process that joined its peers in epoch 3 goes on with 4)."""
        while self.progress.epoch < total:
            yield self.progress.epoch
            self.progress.epoch += 1
        self._finished = True

    def leave(self) -> None:
        """Leave the quorum, for good. Done at the end of the process, if not before: call it if
        long work without training follows. Twice is once."""
        self._open = False
        if self._manager is not None:
            self._manager.shutdown(finished=self._finished)

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        if self.scope.role is Role.MEMBER:
            die_with_supervisor(self.scope.supervisor_pid)
            self._launcher = None
            return
        self._launcher = SupervisorLauncher(self.scope, self._options)  # type: ignore[assignment]

    def _setup_distributed(self) -> None:
        """No default process group: the replica group is this process."""
        self._set_world_ranks()

    def setup_module(self, module: nn.Module) -> Any:
        """Called by `fabric.setup` and `setup_module`. A frozen module is left as it is."""
        from ft_core.ddp import DistributedDataParallel as FTDistributedDataParallel

        if self._started:
            raise RuntimeError("set up all models before the first batch: peers heal them as one")
        self._models.append(module)
        if not any(p.requires_grad for p in module.parameters()):
            return module
        wrapped = FTDistributedDataParallel(self._ensure_manager(), module, **self._ddp_kwargs)
        strategy = weakref.ref(self)

        def before_forward(module: nn.Module, args: Any) -> None:
            me = strategy()
            if me is not None and module.training and torch.is_grad_enabled():
                me._begin(by_loader=False)

        wrapped.register_forward_pre_hook(before_forward)
        return wrapped

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Called by `fabric.setup` and `setup_optimizers`."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss several times a step, which a fault-tolerant step "
                "cannot: use an optimizer that evaluates it once"
            )
        self._optimizers.append(optimizer)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> Any:
        """Called by `fabric.setup`. The scheduler heals, and takes no step that was discarded."""
        if scheduler is not None and not any(scheduler is s for s in self._schedulers):
            adopt(scheduler, self._gated)
            self._schedulers.append(scheduler)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def _gated(self, cls: Any) -> dict[str, Any]:
        strategy = weakref.ref(self)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            me = strategy()
            if me is None or me.last_step_committed is not False:
                cls.step(scheduler, *args, **kwargs)

        return {"step": step}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Called by `fabric.setup_dataloaders`."""
        loader = super().process_dataloader(dataloader)
        place = Place()
        self.progress.places.append(place)
        set_epoch = importlib.import_module(f"{self._namespace}.utilities.data")._set_sampler_epoch
        follow(loader, place, boundary=self._before_batch, set_epoch=set_epoch)
        return loader

    def _ensure_manager(self) -> Manager:
        if self._manager is None:
            self._manager = make_manager(self._options, self.scope, self.root_device)
            self._manager.set_state_dict_fns(self._load, self._state)
            self._manager.register_schema("replica groups", str(self.world_size))
            if self.scope.event_log:
                sink = JsonlSink(Path(self.scope.event_log), name=self.scope.name)
                self._manager.telemetry.add_sink(sink)
        return self._manager

    # ------------------------------------------------------------------ the step

    def _before_batch(self) -> None:
        """A loader is about to fetch: for training, if models train and gradients are recorded."""
        if torch.is_grad_enabled() and any(model.training for model in self._models):
            self._begin(by_loader=True)

    def _begin(self, *, by_loader: bool) -> None:
        if self._open or self._starting or self._manager is None or not self._optimizers:
            return
        if self._fed_by_loader and not by_loader:
            return  # the second step of one batch; `optimizer_step` says so
        self._fed_by_loader = by_loader
        if not self._started:
            self._start()
        self._starting = True
        try:
            self._manager.start_quorum()
        finally:
            self._starting = False
        self._open = True
        self._before = [(p.epoch, p.batch, p.active) for p in self.progress.places]
        self._follow_leader()

    def _start(self) -> None:
        """Now all is set up, and a checkpoint loaded: say where this group starts."""
        assert self._manager is not None
        self._started = True
        state = {**self._places_to_receive(), "step": self.progress.step}
        start = digest(state, allow_objects=self._options.heal_allow_objects)
        self._manager.load_state_dict(
            {"step": self.progress.step, "batches_committed": 0, "lineage": f"start-{start}"}
        )
        me = weakref.ref(self)

        def leave() -> None:
            strategy = me()
            if strategy is not None:
                strategy.leave()

        atexit.register(leave)

    def _follow_leader(self) -> None:
        """Membership may have changed: so may the leader."""
        assert self._manager is not None
        try:
            self._leader = self._manager.participating_rank() == 0
        except QuorumUnavailable:
            return  # the attempt has failed already; the next one tells
        act_as_leader(self._leader, self.scope)
        report_joined(os.environ, self.scope.device)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Called by `optimizer.step()`: vote, and step if all agreed.

        A discarded step leaves the parameters alone, clears the gradients, and has the loader give
        out its batches again; `last_step_committed` tells.
        """
        manager = self._manager
        if manager is None or not self._open:
            raise RuntimeError(
                "the optimizer was stepped without a step under way: fetch a batch (in train mode, "
                "with gradients enabled) before each optimizer.step(), and step once a batch (or "
                "accumulation window) - a fault-tolerant step holds one update"
            )
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)
        result = None if closure is None else closure()
        committed = manager.should_commit()
        self._open, self.last_step_committed = False, committed
        self.progress.step = manager.current_step()
        if committed:
            output = super().optimizer_step(optimizer, **kwargs)
            return output if closure is None else result
        for each in self._optimizers:
            each.zero_grad()
            scaler = getattr(self.precision, "scaler", None)
            if scaler is not None:
                # If the user has unscaled these gradients, the next ones may be unscaled again.
                scaler._per_optimizer_states.pop(id(each), None)
        for place, before in zip(self.progress.places, self._before, strict=False):
            place.go_to(*before)
        return result

    # ------------------------------------------------------------------ heal

    def _state(self) -> dict[str, Any]:
        """What a healing peer needs, as of the boundary at which the step began."""
        state = self._places_to_receive()
        if threading.get_ident() != self._thread:
            return state  # asked for where to receive a state; users' objects keep their thread
        return {
            **state,
            "schedulers": [s.state_dict() for s in self._schedulers],
            "precision": self.precision.state_dict(),
            "progress": self.progress.state_dict(),
            "registered": {
                name: dict(thing) if isinstance(thing, dict) else thing.state_dict()
                for name, thing in self._registered.items()
            },
        }

    def _places_to_receive(self) -> dict[str, Any]:
        return {
            "models": [model.state_dict() for model in self._models],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def _load(self, state: dict[str, Any]) -> None:
        for name in ("models", "optimizers", "schedulers"):
            for mine, its in zip(getattr(self, f"_{name}"), state[name], strict=True):
                mine.load_state_dict(its)
        self.precision.load_state_dict(state["precision"])
        self.progress.load_state_dict(state["progress"])
        for name, thing in self._registered.items():
            if isinstance(thing, dict):
                thing.clear()
                thing.update(state["registered"][name])
            else:
                thing.load_state_dict(state["registered"][name])
