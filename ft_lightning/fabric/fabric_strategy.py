"""The strategy for Lightning Fabric, written once for both of its namespaces.

The loop is the user's and cannot be rewound. A step begins before a training loader fetches a batch (or,
with data that Fabric does not know, at the forward) and is committed when backward ends; a discarded
one is tried again there, from kept gradients. See `fabric_step.py`.
"""

from __future__ import annotations

import atexit
import importlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import astuple
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ft_core.heal import digest
from ft_core.manager import Manager
from ft_core.telemetry import JsonlSink
from ft_lightning.fabric.fabric_data import LoaderPlace, Progress, follow, is_placeable
from ft_lightning.fabric.fabric_step import FabricStepMixin
from ft_lightning.fabric.fabric_window import Where, WindowPlace
from ft_lightning.shared.launcher import SupervisorLauncher, live_with_group
from ft_lightning.shared.strategy_options import (
    Options,
    make_manager,
    refuse_ddp_options,
    refuse_lbfgs,
)
from ft_lightning.shared.topology import Role
from ft_lightning.trainer.batches import adopt


class FTFabricMixin(FabricStepMixin):
    """Strategy for data-parallel training with Fabric that survives the loss of processes.

    Each replica group (one process, or several) holds the whole model and may die at any time; the
    others train on. One that (re)starts takes models, optimizers, the scheduler, what was given to
    :meth:`register`, and its place in the data from its peers, and joins them at their step.

    Args:
        min_replicas: no step is taken with fewer replica groups; the others wait.
        num_replica_groups: how many replica groups there are meant to be; the data is sharded by
            their processes. Default: NUM_REPLICA_GROUPS, else as many as ``devices`` make.
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
        group_size: processes a replica group, which live and die together. Default: 1; all devices
            of a machine with ``num_nodes`` > 1; WORLD_SIZE under torchrun.
        **kwargs: options of :class:`DDPStrategy` and of torch's DistributedDataParallel.
    """

    _namespace: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put the beginning of a further step before `backward`, which `fabric.backward` calls.

        In the form of a wrapper: Lightning refuses `loss.backward()` where a strategy overrides
        `backward`, and with one step a batch it works here.
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
        )
        self._thread = threading.get_ident()
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._wrapped: list[Any] = []
        self._finished = False
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
        """How many processes contribute to the step under way, or to the last one; 0 before the
        first. Never waits."""
        return self.participants

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
        self._sigterm.unwatch()
        if self._manager is not None:
            self._manager.shutdown(finished=self._finished)

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        if self.scope.role is Role.MEMBER:
            live_with_group(self.scope)
            self._launcher = None
            return
        self._launcher = SupervisorLauncher(self.scope, self._options)  # type: ignore[assignment]

    def setup_environment(self) -> None:
        """Called by Fabric when it is launched, or made under `fabric run`."""
        if self.scope.role is Role.SUPERVISOR:
            assert isinstance(self._launcher, SupervisorLauncher)
            self._launcher.launch(lambda: None)  # `fabric run`: the script is not to call launch
        super().setup_environment()

    def _setup_distributed(self) -> None:
        """No default process group: Fabric would take the replica group for the world."""
        self._set_world_ranks()

    def setup_module(self, module: nn.Module) -> Any:
        """Called by `fabric.setup` and `setup_module`. A frozen module is left as it is."""
        from ft_core.ddp import RetryableDistributedDataParallel

        if self._started:
            raise RuntimeError("set up all models before the first batch: peers heal them as one")
        self._models.append(module)
        if not any(p.requires_grad for p in module.parameters()):
            return module
        self._ensure_manager()
        self._reducer = self._reducer or self._make_reducer()
        wrapped = RetryableDistributedDataParallel(self._reducer, module, **self._ddp_kwargs)
        strategy = weakref.ref(self)

        def before_forward(module: nn.Module, args: Any) -> None:
            me = strategy()
            if me is not None and module.training and torch.is_grad_enabled():
                me.begin_window(by_loader=False)

        wrapped.register_forward_pre_hook(before_forward)
        self._wrapped.append(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Called by `fabric.setup` and `setup_optimizers`."""
        refuse_lbfgs([optimizer])
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
        place = LoaderPlace()
        self.progress.places.append(place)
        set_epoch = importlib.import_module(f"{self._namespace}.utilities.data")._set_sampler_epoch
        place.placeable = is_placeable(loader)
        follow(loader, place, boundary=partial(self._before_batch, place), set_epoch=set_epoch)
        return loader

    def _ensure_manager(self) -> Manager:
        if self._manager is None:
            self._manager = make_manager(self._job, self._options, self.scope, self.root_device)
            local_only = self._in_group.local_only()
            self._manager.set_state_dict_fns(local_only(self._load), local_only(self._state))
            self._manager.register_schema("replica groups", str(self.scope.num_groups))
            self._manager.register_schema("processes a group", str(self.scope.group_size))
            if self.scope.event_log and self.scope.group_rank == 0:
                sink = JsonlSink(Path(self.scope.event_log), name=self.scope.name)
                self._manager.telemetry.add_sink(sink)
        return self._manager

    # ------------------------------------------------------------------ the step

    def _start(self) -> None:
        """Now all is set up, and a checkpoint loaded: say where this group starts."""
        assert self._manager is not None
        self._started = True
        if self._votes_each_step:
            self._manager.preallocate_state(*self._optimizers)
        objects = self._options.heal_allow_objects

        def name() -> str:
            state = {**self._places_to_receive(), "step": self.progress.step}
            return digest(state, allow_objects=objects)

        def take(states: list[dict[str, Any]]) -> None:
            for model, state in zip(self._models, states, strict=True):
                model.load_state_dict(state)

        def give() -> list[dict[str, Any]]:
            return [model.state_dict() for model in self._models]

        start = self._in_group.sync_initial_state(name, give, take, into=give)
        self._manager.load_state_dict(
            {"step": self.progress.step, "batches_committed": 0, "lineage": f"start-{start}"}
        )
        me = weakref.ref(self)

        def leave() -> None:
            strategy = me()
            if strategy is not None:
                strategy.leave()

        atexit.register(leave)
        self._sigterm.watch()

    # ------------------------------------------------------------------ heal

    def _state(self) -> dict[str, Any]:
        """What a healing peer needs, as of where the step began."""
        in_round = self._where is Where.ROUND
        if threading.get_ident() != self._thread:
            # Asked for where to receive a state; users' objects keep their thread.
            return {} if in_round else self._places_to_receive()
        if in_round:
            return {"round": self._round_of}
        lead = self._lead
        # Of where the window began: its batches are what the target begins with.
        places = self._before if self._votes_each_step else self._places()
        return {
            **self._places_to_receive(),
            "window": astuple(self._window.place),
            "results": list(self._window.results),
            "lead": -1 if lead is None else self.progress.places.index(lead),
            "schedulers": [s.state_dict() for s in self._schedulers],
            "precision": self.precision.state_dict(),
            "progress": {**self.progress.state_dict(), "places": [[*p] for p in places]},
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
        if self._where is Where.ROUND:
            self._lost = True
            return
        if "round" in state:
            name, dtype, shape, op = state["round"]
            self._visit = (name, dtype, list(shape), op)
            return
        self._healed = True
        self._window.place = WindowPlace(*state["window"])
        self._window.results = list(state["results"])
        for name in ("models", "optimizers", "schedulers"):
            for mine, its in zip(getattr(self, f"_{name}"), state[name], strict=True):
                mine.load_state_dict(its)
        self.precision.load_state_dict(state["precision"])
        self.progress.load_state_dict(state["progress"])
        lead = state["lead"]
        self._lead = self.progress.places[lead] if lead >= 0 else None
        for name, thing in self._registered.items():
            if isinstance(thing, dict):
                thing.clear()
                thing.update(state["registered"][name])
            else:
                thing.load_state_dict(state["registered"][name])
