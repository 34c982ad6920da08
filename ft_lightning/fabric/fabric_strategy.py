"""The strategy for Lightning Fabric, written once for both of its namespaces.

The loop is the user's and cannot be rewound. A step begins before a training loader fetches a batch
(or, with data that Fabric does not know, at the forward) and is committed when backward ends. A
discarded step is tried again there, from kept gradients. See `fabric_step.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ft_core.collectives.retry import RetryableReducer
from ft_core.ddp import RetryableDistributedDataParallel
from ft_core.environment import SHARED_JOB
from ft_core.heal import digest
from ft_core.launch import board
from ft_core.launch.ending import end_at_once, note_exit_codes, unless_forked
from ft_core.launch.supervisor import say
from ft_core.launch.trackers import HeldSaves
from ft_core.manager import Manager
from ft_core.optimizer import frozen_parameters
from ft_lightning.fabric.fabric_loggers import FabricLoggersMixin
from ft_lightning.fabric.fabric_step import LEFT_OUT
from ft_lightning.fabric.loop_position import LoaderPlace, Where, WindowPlace, follow
from ft_lightning.shared.draws import travelling
from ft_lightning.shared.launcher import SupervisorLauncher
from ft_lightning.shared.registration import NAME
from ft_lightning.shared.strategy_base import NoLongerLeads, refuse_lbfgs
from ft_lightning.shared.topology import Role
from ft_lightning.shared.world_of_torch import sharding_sampler
from ft_lightning.trainer.batches import adopt, release
from ft_lightning.trainer.saves import copied, write_whole
from lighthouse.files import machine_file, replace_whole

log = logging.getLogger("ft_lightning")

ENDED_IN_PAST = (
    "this process came back, and its script has ended before it came to the pass over the data in which its peers are: "
    "a loop that resumes from a checkpoint must save and load fabric.strategy.progress with it, or be written as "
    "`for epoch in fabric.strategy.epochs(total)`"
)


class FabricSavesMixin(FabricLoggersMixin):
    """The part of the strategy that saves and loads (`fabric.save`, `fabric.load`). The loop's thread.

    The script itself decides what it loads. When all processes of a job have died, its supervisor starts
    the script again. It goes on from the state that the supervisor's keeper holds, unless what it has
    loaded is newer. A line says from where the job goes on. This machine remembers the newest file of
    each job for that.
    """

    _loaded = ""
    """The file that this process has loaded last."""
    _went_on = False
    """The state that is loaded next is one that was kept."""

    def _prepare(self) -> None:
        super()._prepare()
        self._held = HeldSaves()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Called by `fabric.save`, on all: the leader writes. If it dies before all know that it has
        written, the next leader writes. Raises what the storage raises."""
        while True:
            wrote = self._save(path, state, storage_options=storage_options, filter=filter)
            if not self._meets():
                while (known := self._window.answer("save")) is not None and not float(known) > 0:
                    pass  # of the rounds of this save that the peers have had: not the answers of a later call
                if not wrote and self._follows():
                    kept = copied(self._convert_stateful_objects_in_state(state, filter or {}))
                    self._held.hold(partial(self._write, path, kept, storage_options))
                return
            wrote_here = torch.tensor([float(wrote)], device=self.root_device)
            written = self._round("save", wrote_here, "sum")
            if written is None or float(written) > 0:
                return

    def _save(self, path: Any, state: dict[str, Any], *, storage_options: Any, filter: Any) -> bool:
        """Save once; whether this process has written, or its group has."""
        checkpoint = self._convert_stateful_objects_in_state(state, filter or {})
        return self._write(path, checkpoint, storage_options)

    def _write(self, path: Any, checkpoint: dict[str, Any], storage_options: Any) -> bool:
        """Write if this process leads; whether it has written."""
        if not self._still_leads():
            return False
        io = self.checkpoint_io
        plain = isinstance(io, self._from("fabric.plugins.io").TorchCheckpointIO)
        try:
            write_whole(
                io, checkpoint, path, storage_options, plain=plain, still_leads=self._still_leads
            )
        except NoLongerLeads:
            return False
        self._remember(path)
        return True

    def _follows(self) -> bool:
        """Whether this process can save in the leader's place, when it leads: where they do not meet."""
        manager = self._manager
        trains = self._met and manager is not None and not manager.left()
        behind = self._window.local or self._lost
        return trains and not behind and self.scope.group_size == 1

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by `fabric.load`, on all."""
        self._loaded = str(path)
        remainder: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return remainder

    def _on_quorum(self) -> bool:
        known = super()._on_quorum()
        if known and self._group_leads:
            self._held.make_up()
        if known and not self._met:
            self._met = True
            goes_on = self._goes_on() if self.scope.restarts else ""
            for sentence in filter(None, (goes_on, self.progress.unknown) if self._leader else ()):
                say("ft_lightning", sentence)
        return known

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        if self._votes_each_step and self.last_step_committed:
            self._held.settled()
        return output

    def _goes_on(self) -> str:
        """This process was started again, and found no peer to heal from: where the job goes on from."""
        assert self._manager is not None
        if self._manager.state.kept is not None:
            return ""  # the narrator tells
        record, saved = self._record(), ""
        with contextlib.suppress(OSError):
            saved = "" if record is None else record.read_text()
        if not saved:
            return ""
        if self.progress.step:
            return (
                f"all had ended; the job goes on from {self._loaded or saved} (step "
                f"{self.progress.step:,})"
            )
        if self._loaded:
            return (
                f"all had ended; the job goes on from {self._loaded}, which has no progress: steps and "
                "batches are counted anew. Save fabric.strategy.progress with the model"
            )
        return (
            "all had ended, and the script has not called fabric.load, though the job has saved "
            f"{saved}: it begins anew. Load that before the first batch to go on from there"
        )

    def _takes_kept(self, parts: dict[str, Any]) -> bool:
        """Whether the loop can go on from a state that the supervisor's keeper holds, instead of from what
        the script has loaded."""
        state, mine = parts["default"], self.progress.step
        trained = self._loaded or any(optimizer.state for optimizer in self._optimizers)
        if state["progress"]["step"] < mine or (trained and not mine):
            return False
        why = self._lost_place(state)
        if why:
            log.warning("the kept state of the job is not used: %s", why)
        self._went_on = not why
        return not why

    def _lost_place(self, state: dict[str, Any]) -> str:
        raise NotImplementedError

    def _remember(self, path: Any) -> None:
        """This process has saved `path`."""
        record = self._record()
        if record is not None:
            with contextlib.suppress(OSError), replace_whole(record) as draft:
                draft.write_text(str(path))

    def _forget_saves(self) -> None:
        """The training is at its end."""
        record = self._record()
        if record is not None and self._leader:
            with contextlib.suppress(OSError):
                record.unlink(missing_ok=True)

    def _record(self) -> Path | None:
        """The file that holds the path of the job's newest checkpoint. None: its id may be another
        job's, too."""
        job = self._training
        if job is None or job.job_id == SHARED_JOB or job.job_id.startswith("alone-"):
            return None
        return machine_file("ft_lightning", f"{job.job_id} {job.room_id}", "saved")


class FTFabricMixin(FabricSavesMixin):
    """Strategy for data-parallel training with Fabric that survives the loss of processes.

    Each replica group (one process, or several) holds the whole model and may die at any time; the
    others train on. One that (re)starts takes models, optimizers, the scheduler, what was given to
    :meth:`register`, and its place in the data from its peers, and joins them at their step.

    Its options are those of `__init__`. Thread: one, which runs the loop, for all that users call;
    properties may be read in any.
    """

    strategy_name = NAME
    _serves_spares = True

    def _prepare(self) -> None:
        super()._prepare()
        if self._options.validation == "sharded":
            raise ValueError(
                'validation="sharded" needs a Trainer: in a Fabric loop, give each process its part '
                "of the validation data and reduce what it computes with fabric.all_reduce"
            )
        self._thread = threading.get_ident()
        self._schedulers: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._finished = self._asks_where = self._unkept = False
        self._asks_number = False
        self._joined: tuple[int, int] | None = None
        """The pass over the data in which this group has healed, and how much its source's loop had not
        counted of it."""
        self._backward_sync_control: Any = _CountedSync(self)
        self._began: tuple[int, list[int], int] = (0, [], 0)

    # ------------------------------------------------------------------ what users call

    @property
    def current_step(self) -> int:
        """Committed optimizer steps: equal in all groups. Any thread."""
        self._asks_where = True
        return self.progress.step

    @property
    def batch_idx(self) -> int:
        """The number of the batch at hand in the pass over its data, from 0. It is equal in all groups;
        `enumerate` counts what this process has read. So decide by it where gradients are accumulated:
        ``fabric.no_backward_sync(model, enabled=(fabric.strategy.batch_idx + 1) % 8 != 0)``.

        Raises RuntimeError if no batch was read from `fabric.setup_dataloaders`. Any thread.
        """
        self._asks_number = True
        lead = self.progress.lead
        if self._past:
            return 0
        if lead is None or lead.at_hand < 0:
            raise RuntimeError(
                "strategy.batch_idx is the number of a batch: read it within a loop over training data "
                "from fabric.setup_dataloaders"
            )
        return lead.at_hand

    def register(self, name: str, state: Any) -> None:
        """Have `state` heal with the model: a dict, or an object with `state_dict` and
        `load_state_dict`. A scheduler leaves out steps without effect, as one of `fabric.setup` does.

        Call it before the first batch. The state may change between `optimizer.step()` and the next
        batch. Another process gets a copy of plain values and tensors; anything else needs
        ``heal_allow_objects``. Raises ValueError for a name that is taken, or after the first batch.
        """
        if self._started or name in self._registered:
            why = "the first batch was fetched already" if self._started else "the name is taken"
            raise ValueError(f"strategy.register({name!r}) comes too late or twice: {why}")
        if isinstance(state, LRScheduler):
            self._gate(state)
        self._registered[name] = state

    def epochs(self, total: int) -> Iterator[int]:
        """`for epoch in fabric.strategy.epochs(10)`: like `range`, but it follows heals and
        resumptions (a process that joined its peers in epoch 3 continues with 4). Raises nothing
        itself. When it is exhausted, the training is finished: a process that comes back later does
        not start it over."""
        self._asks_where = True
        while self.progress.epoch < total:
            yield self.progress.epoch
            self.progress.end_epoch()
        self._finished = True

    def _at_exit(self) -> None:
        """The script has ended: at the end of its data, or by an error or a signal?"""
        failed, lead = hasattr(sys, "last_value") or self._sigterm.noted, self.progress.lead
        if self._past and not failed:
            self.leave()
            end_at_once("ft_lightning", ENDED_IN_PAST, 1)
        if lead is not None and lead.exhausted and not failed:
            self._finished = True
        self.leave()

    def leave(self) -> None:
        """Leave the quorum for good. The end of the process does it, too; call it if long work
        without training follows. Not within a step: between two batches. Idempotent."""
        self._open = False
        self._sigterm.unwatch()
        if self._finished:
            self._forget_saves()
            if self._training is not None:  # before peers that come back can find that it is over
                self._training_is_over(True)
        if self._manager is not None:
            self._manager.shutdown(finished=self._finished)
        if self._sink is not None:
            self._sink.close()

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Called by Fabric when it is launched, or made under `fabric run`."""
        self._supervise()
        super().setup_environment()
        self._find_loggers()

    def _supervise(self) -> None:
        if self.scope.role is Role.SUPERVISOR:
            assert isinstance(self._launcher, SupervisorLauncher)
            self._launcher.launch(lambda: None)  # `fabric run`: the script does not call launch

    def _setup_distributed(self) -> None:
        """No default process group: Fabric would take the replica group for the world."""
        self._set_world_ranks()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Itself: a copy of a model that was set up refers to it, too."""
        return self

    def setup_module(self, module: nn.Module) -> Any:
        """Called by `fabric.setup` and `setup_module`. A frozen module is left as it is.

        Raises RuntimeError after the first batch, and what `ft_core.ddp` raises for options of DDP."""
        if self._started:
            raise RuntimeError("set up all models before the first batch: peers heal them as one")
        self._models.append(module)
        self._known += module.parameters()
        if self._votes_each_step:  # else parameters are averaged
            self._frozen += frozen_parameters(module)
        if not any(p.requires_grad for p in module.parameters()):
            return module
        self._ensure_manager()
        self._reducer = self._reducer or self._make_reducer()
        wrapped = self._wrap(self._reducer, module)
        self._watch_forward(wrapped)
        return wrapped

    def _wrap(self, reducer: RetryableReducer, module: nn.Module) -> Any:
        """What trains `module`, whose gradients `reducer` averages."""
        wrapped = RetryableDistributedDataParallel(reducer, module, **self._ddp_kwargs)
        self._wrapped.append(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Called by `fabric.setup` and `setup_optimizers`. Raises ValueError for LBFGS."""
        refuse_lbfgs([optimizer])
        self._optimizers.append(optimizer)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> Any:
        """Called by `fabric.setup`. The scheduler heals, and leaves out steps without effect."""
        if scheduler is not None and not any(scheduler is s for s in self._schedulers):
            self._gate(scheduler)
            self._schedulers.append(scheduler)
        given = () if scheduler is None else (scheduler,)  # Lightning 2.5 has no such argument
        return super().setup_module_and_optimizers(module, optimizers, *given)

    def _gate(self, scheduler: Any) -> None:
        release(scheduler)  # of another Fabric, or of this one
        adopt(scheduler, self._gated)

    def _passes_over(self) -> bool:
        """Whether a scheduler is to stay where it is: its optimizer does, or its peers' are past this place."""
        return self.last_step_committed is False or self._window.local

    def _gated(self, cls: Any) -> dict[str, Any]:
        strategy = weakref.ref(self)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            me = strategy()
            if me is None or not me._passes_over():
                cls.step(scheduler, *args, **kwargs)

        return {"step": step}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Called by `fabric.setup_dataloaders`."""
        loader = super().process_dataloader(dataloader)
        place = LoaderPlace.of(loader, self.world_size)
        self.progress.places.append(place)
        set_epoch = self._from("fabric.utilities.data")._set_sampler_epoch
        place.sampler = sharding_sampler(loader, self.distributed_sampler_kwargs["num_replicas"])
        follow(
            loader,
            place,
            boundary=partial(self._before_batch, place),
            in_past=partial(self._in_past, place),
            set_epoch=set_epoch,
        )
        return loader

    def _ensure_manager(self) -> Manager:
        if self._manager is None:
            self._next_training()
            self._manager = self._make_manager()
            self._narrate(lambda: self.progress.step)
            local_only = self._in_group.local_only()
            self._manager.set_state_dict_fns(local_only(self._load), local_only(self._state))
        return self._manager

    # ------------------------------------------------------------------ the step

    def _start(self) -> None:
        """All is set up, and a checkpoint loaded: tell the manager where this group starts."""
        assert self._manager is not None
        self._say_if_newer()
        self._refuse_if_over()
        self._find_schedulers()
        self._started = True
        for place in self.progress.places:
            place.begin_counting()
        if self._votes_each_step:
            self._counts_passes = not self._asks_where
            self._manager.preallocate_state(*self._optimizers)
            self._began = self.progress.step, self._passes(), len(self._optimizers)
            self._manager.state.whole = self._can_be_kept
            self._manager.state.takes_kept = self._takes_kept
        start = self._agree_on_start()
        self._manager.load_state_dict(
            {"step": self.progress.step, "batches_committed": 0, "lineage": f"start-{start}"}
        )
        me = weakref.ref(self)

        def leave() -> None:
            strategy = me()
            if strategy is not None:
                strategy._at_exit()

        atexit.register(unless_forked(leave))
        note_exit_codes()
        self._sigterm.watch()

    def _find_schedulers(self) -> None:
        """Register the schedulers that the script has not: nothing but them says how far they are. Not two of one
        class and optimizer, which could be taken for each other."""
        made = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        inner = [part for each in made for part in getattr(each, "_schedulers", ())]
        known = {id(each) for each in (*inner, *self._schedulers, *self._registered.values())}
        found = defaultdict(list)
        for number, optimizer in enumerate(self._optimizers):
            for each in made:
                its = getattr(each, "optimizer", None)  # that, or Fabric's wrapper of it
                is_its = its is optimizer or getattr(its, "optimizer", None) is optimizer
                if is_its and id(each) not in known:
                    found[f"{type(each).__name__} of optimizer {number}"].append(each)
        for name, those in found.items():
            if len(those) == 1:
                self.register(name, those[0])

    def _name_of_start(self) -> str:
        state = {**self._tensors_to_heal(), "step": self.progress.step}
        return digest(state, allow_objects=self._options.heal_allow_objects)

    def _agree_on_start(self) -> str:
        """Have all ranks of this group begin with one state; its name."""

        def take(states: list[dict[str, Any]]) -> None:
            for model, state in zip(self._models, states, strict=True):
                model.load_state_dict(state)

        def give() -> list[dict[str, Any]]:
            return [model.state_dict() for model in self._models]

        return self._in_group.sync_initial_state(self._name_of_start, give, take, into=give)

    # ------------------------------------------------------------------ heal

    def _state(self) -> dict[str, Any]:
        """What a healing peer needs, as of the place where the step began."""
        in_round = self._where is Where.ROUND
        if threading.get_ident() != self._thread:
            # The tensors in which to receive a state; users' objects keep their thread.
            return {} if in_round else self._tensors_to_heal()
        if in_round:
            return {"round": self._round_of}
        lead = self.progress.lead
        # The target begins with the first batch of the window.
        places, epoch = self._places(), self.progress.completed()
        if self._votes_each_step:
            places, epoch = self._before, self._epoch_before
        tensors = self._tensors_to_heal()
        if self._where is Where.BATCH:
            tensors["models"] = self._changed.before(tensors["models"])
        return {
            **tensors,
            "numbers": self._numbers.marked(),
            "window": astuple(self._window.place),
            "results": list(self._window.results),
            "gradients": self._gradients(),
            "logs": self._logs(),
            "lead": -1 if lead is None else self.progress.places.index(lead),
            "uncounted": 0 if lead is None else lead.uncounted,
            "schedulers": [s.state_dict() for s in self._schedulers],
            "precision": self.precision.state_dict(),
            "progress": {
                **self.progress.state_dict(),
                "epoch": epoch,
                "places": [[*place[:3]] for place in places],
                "states": [travelling(place[3]) for place in places],
            },
            "registered": self._registered_now(),
        }

    def _registered_now(self) -> dict[str, Any]:
        return {
            name: dict(thing) if isinstance(thing, dict) else thing.state_dict()
            for name, thing in self._registered.items()
        }

    def _put_registered(self, states: dict[str, Any]) -> None:
        for name, thing in self._registered.items():
            if isinstance(thing, dict):
                thing.clear()
                thing.update(states[name])
            else:
                thing.load_state_dict(states[name])

    def _gradients(self) -> dict[str, Any]:
        if not self._votes_each_step:  # parameters are averaged
            return {"known": True}
        in_backward = self._where is Where.BATCH
        return self._averaged.given(self._window.place.committed, in_backward=in_backward)

    def _tensors_to_heal(self) -> dict[str, Any]:
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
        if why := self._lost_place(state) or ("" if state["gradients"]["known"] else LEFT_OUT):
            raise RuntimeError(why)
        self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        """Load `state`: this loop can go on at its place."""
        self._healed, self._together = True, 0
        self._window.place = WindowPlace(*state["window"])
        self._window.results = [(call, result) for call, result in state["results"]]
        if self._votes_each_step:
            self._averaged.healed(state["gradients"])
        self._take_logs(state["logs"])
        for name in ("models", "optimizers", "schedulers"):
            for mine, its in zip(getattr(self, f"_{name}"), state[name], strict=True):
                mine.load_state_dict(its)
        self.precision.load_state_dict(state["precision"])
        self.progress.take(state["progress"])
        self._numbers.take(state["numbers"])
        lead = state["lead"]
        place = self.progress.lead = self.progress.places[lead] if lead >= 0 else None
        # From what was kept all go on, with equal counts.
        self._joined = None
        if place is not None and not self._went_on:
            self._joined = place.epoch, state["uncounted"]
        self._went_on = False
        self._put_registered(state["registered"])

    def refuse_own_count(self) -> None:
        """Gradients are about to be accumulated. Raises RuntimeError if the script decides that by a count
        of its own, which is not its peers' since this group came back."""
        lead = self.progress.lead
        if self._joined is None or lead is None or self._asks_number or self._past:
            return
        epoch, uncounted = self._joined
        if lead.epoch != epoch or lead.uncounted == uncounted:
            return
        if any(not hasattr(each, "optimizer") for each in self._registered.values()):
            return  # its count may be among them
        raise RuntimeError(
            f"this process came back at batch {lead.batch - 1} of its pass over the data, which is number "
            f"{lead.given - 1} for `enumerate`: it would accumulate gradients over other batches than "
            "its peers. Decide by `fabric.strategy.batch_idx`, which is equal in all processes, or "
            "give your own counter to fabric.strategy.register"
        )

    def _passes(self) -> list[int]:
        return [place.epoch for place in self.progress.places]

    def _can_be_kept(self) -> bool:
        """Whether a process that begins as this one did could go on from here. If not, nothing older is kept
        either: all would be made again."""
        if self._where is not Where.BOUNDARY:
            return False
        if not self._unkept and self._lost_place(self._state(), self._began):
            self._unkept = True
            board.slot().forget_kept(self.scope.group_size)
            if self._leader and board.slot().there:
                log.warning(
                    "the state is kept no longer in case that all replica groups die: a process that "
                    "begins could not go on from it. Give optimizers, their schedulers and the training data to "
                    "fabric.setup and fabric.setup_dataloaders before the first batch"
                )
        return not self._unkept

    def _lost_place(
        self, state: dict[str, Any], began: tuple[int, list[int], int] | None = None
    ) -> str:
        """A sentence, if the loop would go on at a different place from the loop that had this state;
        else "". `began`: the step, passes, and number of optimizers of another process."""
        step, passes, made = began or (self.progress.step, self._passes(), len(self._optimizers))
        if len(state["optimizers"]) != made:
            return (
                f"this process came back with {made} optimizers, and its peers have set up "
                f"{len(state['optimizers'])}: one that is set up after the first batch can't heal. Give all "
                "of them to fabric.setup or fabric.setup_optimizers before the first batch"
            )
        places, lead = state["progress"]["places"], state["lead"]
        if lead >= len(passes):
            return (
                f"this process came back with {len(passes)} data loaders, and its peers train on one that they have set "
                f"up after those: one that is set up after the first batch has no place to come back to. Give all "
                "training data to fabric.setup_dataloaders before the first batch"
            )
        if lead >= 0 and not (self._asks_where or self._votes_each_step):
            mine, its = passes[lead], places[lead][0]
            if mine != its:
                return (
                    f"this process came back in pass {mine} over its data, and its peers are in pass "
                    f"{its}: a loop over `range` can't go there, and would train on alone when they have "
                    "finished. Write `for epoch in fabric.strategy.epochs(total)` in place of "
                    "`for epoch in range(total)`"
                )
        if state["progress"]["step"] == step:
            return ""
        known = [*self._schedulers, *self._registered.values()]
        healed = {
            id(_first_parameter(each.optimizer)) for each in known if hasattr(each, "optimizer")
        }
        for each in self._optimizers:
            scheduled = any("initial_lr" in group for group in each.param_groups)
            if scheduled and id(_first_parameter(each)) not in healed:
                return (
                    "this process came back, and its learning rate scheduler does not know how far its "
                    "peers' are: make it before the first batch, and give it to "
                    "fabric.setup(model, optimizer, scheduler=scheduler), or to "
                    'fabric.strategy.register("scheduler", scheduler)'
                )
        return ""


class _CountedSync:
    """What `fabric.no_backward_sync` asks, in the place of Lightning's."""

    def __init__(self, strategy: FTFabricMixin) -> None:
        self._stock: Any = strategy._backward_sync_control
        self._strategy = weakref.ref(strategy)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """As Lightning's."""
        strategy = self._strategy()
        if enabled and strategy is not None:
            strategy.refuse_own_count()
        return self._stock.no_backward_sync(module, enabled)


def _first_parameter(optimizer: Any) -> Any:
    every = (p for group in optimizer.param_groups for p in group["params"])
    return next(every, None)  # a group may be empty
