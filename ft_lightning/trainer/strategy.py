"""The strategy for Lightning's Trainer, written once for both of its namespaces.

`ft_lightning.pytorch` and `ft_lightning.pl` put `FTDDPMixin` in front of their own `DDPStrategy`.

Barriers, broadcasts and boolean decisions stay inside the replica group
(`ft_core.shell.intra_group`), which lives and dies as a whole: none of them waits for a group that
died. The quorum carries gradients, what is reduced or gathered inside `training_step`
(`driver.py`), the votes (`decisions.py`), and agreements at the ends of validations and epochs
(`agreements.py`).

`trainer.world_size` counts the processes of all configured groups, and `trainer.global_rank` is
this one's number among them; `trainer.strategy.num_participants` is how many contribute right now.
Training data is sharded over all configured processes, less those of hot spares (`batches.DataShare`). Validation, test and prediction data is not
sharded: each group computes the same metrics, so that early stopping and plateau schedulers decide
alike everywhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ft_core.errors import StartAgain
from ft_core.launch import board
from ft_core.launch.restarts import SIGTERM_EXIT_CODE
from ft_core.launch.supervisor import say
from ft_lightning.shared.epoch_rest import what_is_not_known
from ft_lightning.shared.registration import DESCRIPTION, NAME
from ft_lightning.shared.strategy_base import refuse_lbfgs
from ft_lightning.shared.world_of_torch import divide_anew
from ft_lightning.trainer import finetuning, healing, leader
from ft_lightning.trainer.agreements import Rounds, make_callbacks
from ft_lightning.trainer.batches import Batches, DataShare, Preparing, check_loader, release
from ft_lightning.trainer.counters import batches_done, check_counters
from ft_lightning.trainer.decisions import Decisions
from ft_lightning.trainer.driver import EndsFit, StepDriver
from ft_lightning.trainer.later_rows import later_rows, make_up_rows
from ft_lightning.trainer.leader import SkippedHooks
from ft_lightning.trainer.loggers import Loggers
from ft_lightning.trainer.rank_collectives import CollectivesMixin
from ft_lightning.trainer.reporting import Counts, show_in_bar
from ft_lightning.trainer.resumption import Resumption
from ft_lightning.trainer.validation import Validation
from lighthouse.errors import TrainingOver

ENV_WORLD_SIZE = "WORLD_SIZE"

ENDED_MEANWHILE = (
    "this training has ended just as the process came back: it starts again, and passes over it"
)


class FTDDPMixin(leader.CheckpointMixin, CollectivesMixin):
    """Strategy for data-parallel training that survives the loss of processes.

    Each replica group (one process, or several) holds the whole model and may die at any time; the
    others train on. One that (re)starts takes model, optimizers, schedulers, callbacks and the
    place in the data from its peers and joins them at their step.

    Its options are those of `__init__`. Lightning calls its methods in the loop's thread; what users
    ask may be read in any.
    """

    strategy_name = NAME
    _serves_spares = True
    counts: Counts | None = None
    """Steps, discards and heals of the fit under way, or of the last one; None before. Any thread."""
    _batches: Batches | None = None
    _decisions: Decisions | None = None
    _rounds: Rounds | None = None
    _loggers: Loggers | None = None
    _skipped: SkippedHooks
    _callbacks: tuple[Any, ...] = ()
    _sigterm: EndsFit | None = None
    _averaged: set[int] | None = None
    """Ids of the parameters that are averaged; None: all that are trainable."""
    _first_step = 0
    """Of the manager, at which this group has begun the fit."""
    _writes = _shows_bar = _leaves_peers = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's convention; `import ft_lightning` does it."""
        strategy_registry.register(NAME, cls, description=DESCRIPTION, override=True)

    # ------------------------------------------------------------------ what users ask

    @property
    def last_step_committed(self) -> bool | None:
        """Whether the last optimizer step was committed; None before the first one's end.

        Any thread."""
        return None if self._driver is None else self._driver.last_committed

    # ------------------------------------------------------------------ set-up

    def set_world_ranks(self) -> None:
        """Called by Lightning when the Trainer is made, and before a run."""
        if self._scope is None:
            self._find_scope(self.num_nodes)

    def _refuse_trainer(self, trainer: Any) -> None:
        if self.scope.num_groups > 1:
            leader.refuse_search(trainer)

    def setup_environment(self) -> None:
        """Called by Lightning before callbacks and loggers: decide who writes and what is resumed."""
        if self.scope.world_size > 1:
            # Before callbacks are set up, which disables bars where rank zero is not.
            self._shows_bar = getattr(self._trainer.progress_bar_callback, "is_enabled", False)
            if self.scope.local_rank == 0:
                subject = f"{os.path.abspath(sys.argv[0])} {self._job.job_id}"
                data, model = self._trainer.datamodule, self.lightning_module
                self._preparing = Preparing(subject, data, model)
        self._prepared = False
        self._setup_stock_environment()
        if self._trainer.state.fn == "fit":
            dummy = self._from("fabric.loggers.logger")._DummyExperiment
            writes, self._loggers = leader.before_quorum(
                self._trainer, self.scope, dummy, self._still_leads
            )
            self._leader = self._writes = writes
            self._skipped, self._met = SkippedHooks(), False
            self.forget_checkpoint()
            before, job = self._training, self._next_training(self.lightning_module)
            self._resumption = Resumption(
                self._trainer,
                job,
                self.scope,
                wanted=self._options.resume,
                goes_on=job is before,
                ask=self._in_group.from_rank_0,
            )
            if writes and (self.scope.restarts or self._resumption.continues):
                leader.keep_logs(self._trainer)
        elif self._over and (rows := later_rows()) is not None:
            ranks, first = self._in_group, self.scope.group_rank == 0
            rows.begin(self._trainer, lambda: self.is_global_zero, ranks, waits=first)
        elif self._training is None and leader.leads_again(self._trainer, self.scope):
            self._leader = True

    def _setup_stock_environment(self) -> None:
        super().setup_environment()

    def setup_distributed(self) -> None:
        """No default process group: Lightning would take the replica group for the world."""
        self._from("fabric.utilities.seed").reset_seed()
        self.set_world_ranks()

    def setup(self, trainer: Any) -> None:
        """Called by Lightning when a run begins: for a fit, make the manager and wrap the model.

        Raises RuntimeError for a Lightning that keeps its counters elsewhere, and ValueError for
        what a job of several replica groups can't do (LBFGS, say).
        """
        if self.scope.world_size > 1:
            # Its files carry Lightning's local rank, which would be one number in all groups.
            trainer.profiler._local_rank = self.scope.rank
        if trainer.state.fn != "fit":
            self._setup_evaluation(trainer)
            return
        check_counters(trainer)
        self._say_if_newer()
        self._shut_down()
        self._training_is_over(False)
        self._checkpoints.begin()
        self._batches = Batches(self._from("fabric.utilities.data")._set_sampler_epoch)
        self._manager = self._make_manager()
        self.counts = Counts(self._job.data_shares)
        self._manager.telemetry.add_sink(self.counts)
        self._narrate(lambda: int(trainer.global_step))
        show_in_bar(trainer, self.counts, visible=self._shows_bar and self.scope.rank == 0)
        self._decisions = Decisions(trainer)
        self._driver = self._make_driver(trainer)
        agrees = self._agrees
        self._decisions.alone = not agrees
        self._decisions.saves_alone = self._options.commit != "quorum"
        self._rounds = Rounds(
            trainer,
            self._decisions,
            self._driver.round if agrees else None,
            settled=self._checkpoints.settled,
        )
        if agrees:
            self._driver.meets_next = self._rounds.follow
        if self._options.validation == "sharded":
            Validation(trainer, self._rounds, self._batches)
        local_only = self._in_group.local_only()
        self._manager.set_state_dict_fns(
            local_only(self._driver.load), local_only(self._driver.state)
        )
        super().setup(trainer)
        if self.scope.num_groups > 1:
            files = self._from("fabric.utilities.cloud_io").get_filesystem
            self.checkpoint_names.begin(trainer.checkpoint_callbacks, files, self.broadcast)
        self._adopt_model()
        self._register(schema_of_updates(trainer))
        refuse_lbfgs(self.optimizers)
        if self._votes_each_step:
            self._manager.state.whole = self._driver.is_at_boundary
            self._manager.preallocate_state(*self.optimizers)
        stopping = self._from("callbacks").EarlyStopping
        if self._loggers is not None:
            self._decisions.tell, self._decisions.hear = self._loggers.news, self._loggers.hear
        first, last = make_callbacks(
            stopping, self._begin_epoch, self._rounds, self._decisions, self._skipped
        )
        self._callbacks, trainer.callbacks[:] = (first, last), [first, *trainer.callbacks, last]

    def _setup_evaluation(self, trainer: Any) -> None:
        """Stock set-up of a run that is not a fit, without DDP's: each process has the whole model."""
        super(self._stock_class, self).setup(trainer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Called by Lightning."""
        self._see_who_leads()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Called by Lightning."""
        self._see_who_leads()
        return super().test_step(*args, **kwargs)

    def _see_who_leads(self) -> None:
        """After the training, loggers ask no one else, and the process that writes may have died."""
        _ = self.is_global_zero

    def _on_takeover(self) -> None:
        leader.keep_logs(self._trainer)
        make_up_rows()
        self._make_up_saves()

    def kept_rows(self) -> list[Any]:
        """For a healing peer: the rows that each logger keeps."""
        return [] if self._loggers is None else self._loggers.rows()

    def take_rows(self, told: list[Any]) -> None:
        """Take a peer's `kept_rows`."""
        if self._loggers is not None:
            self._loggers.take_rows(told)

    def _adopt_model(self) -> None:
        """The model is set up: have its gradients averaged, if that is not done by its wrapper."""

    def as_it_is(self) -> contextlib.AbstractContextManager[None]:
        """Within it, state dicts are those of this rank alone, with the tensors themselves, and no
        collective is called for them."""
        return contextlib.nullcontext()

    def _follows(self) -> bool:
        """Whether another process writes, whose files this one could write as well: it is at the same
        place of the training, or may take over after it."""
        if self._over:
            return board.slot().whole and self._saves_here
        return self._met and self._manager is not None and self._saves_here

    @property
    def _agrees(self) -> bool:
        """If the quorum does not decide each step, each group decides for itself."""
        return self._votes_each_step and self._options.commit == "quorum"

    def _make_driver(self, trainer: Any) -> Any:
        """What calls the manager at each step. Made before the model is wrapped."""
        assert self._manager is not None
        assert self._batches is not None
        assert self._decisions is not None
        return StepDriver(
            trainer,
            self._manager,
            self._batches,
            self._decisions,
            share=DataShare(trainer, self._manager, self._batches)
            if self._options.spares
            else None,
            on_quorum=self._on_quorum,
            hooks=self._call_hooks,
            leave=self._leave,
            over=self._when_over,
            before_leaving=self._before_leaving,
            after_leaving=self._after_leaving,
            patience_s=4
            * self._options.timeout_s,  # the lighthouse evicts a group that hangs before
            min_replicas=self._options.min_replicas,
            ranks=self._ranks,
            shares_ends=self._agrees,
        )

    def _setup_model(self, model: Any) -> Any:
        if self._driver is None or self._trainer.state.fn != "fit":
            return model
        options = dict(self._ddp_kwargs)
        if finetuning.finetunes(self._trainer) or not model.automatic_optimization:
            # With several optimizers each backward reaches some of the parameters only.
            options.setdefault("find_unused_parameters", True)
        with self._averaging(model):
            return self._driver.wrap(model, **options)

    @contextlib.contextmanager
    def _averaging(self, model: Any) -> Iterator[None]:
        """Within it, those parameters of `model` are trainable that are to be averaged during the fit."""
        unfreezes = finetuning.finetunes(self._trainer)
        with finetuning.all_trainable(model) if unfreezes else contextlib.nullcontext():
            self._averaged = {id(p) for p in model.parameters() if p.requires_grad}
            yield

    def _register_ddp_hooks(self) -> None:
        """ft_core's wrapper has registered its own."""

    # ------------------------------------------------------------------ the step

    def on_train_start(self) -> None:
        """The state is complete: tell the manager where this group starts, and adopt the data."""
        super().on_train_start()
        self._sigterm = EndsFit(self._awaits_quorum, self._leave)
        self._sigterm.watch()  # calls Lightning's, which is there by now, first
        assert self._manager is not None and self._decisions is not None
        if not self._met:  # else the learning rate finder has trained already
            self._refuse_if_over()
            self._manager.load_state_dict(self._start())
            self._first_step = self._manager.current_step()
            self._resume_epoch()
            self._register(schema(self._trainer))
        self._decisions.begin()
        self._begin_epoch()

    def _why_over(self) -> str:
        """Also by the record, which outlives the processes that have ended the fit."""
        return super()._why_over() or (ENDED_MEANWHILE if self._ended_meanwhile() else "")

    def _ended_meanwhile(self) -> bool:
        """Whether the fit has ended since this process began with it, so that its next life passes over it."""
        return board.slot().whole and self._resumption is not None and self._resumption.has_ended()

    def _when_over(self, error: TrainingOver) -> BaseException:
        """`error`, unless it was just now that peers have ended this fit. A rank may learn it alone: the others may
        wait for it at the next batch, so it asks none of them."""
        slot = board.slot()
        if slot.whole:
            slot.await_leader(self._training_number)  # it saves the end, and records it
        return StartAgain(ENDED_MEANWHILE) if self._ended_meanwhile() else error

    def _register(self, texts: dict[str, str]) -> None:
        """What a member must have in common with its peers."""
        assert self._manager is not None
        for key, text in texts.items():
            self._manager.register_schema(key, text)

    def _start(self) -> dict[str, Any]:
        known = self._checkpoints.loaded
        return {
            "step": known.get("step", self._trainer.global_step),
            "batches_committed": known.get("batches_committed", 0),
            "lineage": self._lineage(),
            "genesis": known.get("genesis", 0),
            "held": known.get("held", 0),
            "shares": known.get("shares", ()),
        }

    def _lineage(self) -> str:
        """The name of the state in which this group begins."""
        return healing.begin(self._trainer, self._in_group, self._job)

    def _resume_epoch(self) -> None:
        """A checkpoint that was saved within an epoch: that epoch goes on with the samples that are left."""
        assert self._batches is not None
        loaded, now = self._checkpoints.loaded, self.world_size
        before, trainer = loaded.get("world_size", 0), self._trainer
        if not before:  # no checkpoint, or one that another strategy has saved
            return
        placed = self._batches.resume(trainer, loaded.get("data", {}), same_world=before == now)
        if not placed and self.scope.rank == 0:
            say("ft_lightning", what_is_not_known(before, now, batches_done(trainer)))

    def process_dataloader(self, dataloader: object) -> object:
        """As the stock method; a training loader is divided among the replica groups, another one is not."""
        loader, place = super().process_dataloader(dataloader), self.distributed_sampler_kwargs
        if not self._trainer.training:
            divide_anew(loader, self.world_size, place)
        elif self._batches is not None:
            if self._options.spares and self._job.data_shares > 1:
                check_loader(loader, place["num_replicas"])
            self._batches.adopt_loader(loader)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Called by Lightning for each batch: the user's `training_step`, run once, in a step
        of the job."""
        assert self._driver is not None
        assert self.model is not None
        if self._trains_alone:
            self._refuse_to_train_alone()
        begins = not self._trainer.fit_loop.epoch_loop.batch_idx  # an epoch
        if begins and self._averaged is not None and self.world_size > 1:
            finetuning.refuse_unaveraged(self.lightning_module, self._averaged, self.optimizers)
        if self.model is not self.lightning_module:
            # Lightning puts the wrapper into eval mode for validation and only what is inside back.
            self.model.training = True
        return self._driver.training_step(args, super().training_step)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Called by Lightning (or by the user's `manual_backward`). A step ends with it."""
        driver, module = self._driver, self.lightning_module
        if driver is not None and module is not None and not module.automatic_optimization:
            driver.before_backward()
        output = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._sink is not None and driver is not None and not driver.open:
            self._tell_loss(closure_loss)
        return output

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Called by Lightning (or by the user's `optimizer.step`). An update that raises, which the user's
        code may catch, costs this group its state: it may be half done."""
        if not self._votes_each_step:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        module = self.lightning_module
        due = module is not None and not module.automatic_optimization

        def ends_step() -> Any:  # with the vote, in automatic optimization
            nonlocal due
            output = closure()
            due = True
            return output

        try:
            output = super().optimizer_step(optimizer, ends_step, model, **kwargs)
        except BaseException as error:
            if due and self._manager is not None:
                self._manager.update_failed(error)
            raise
        if self._saved is not None:
            self._saved.settled()
        if self._manager is not None:
            self._manager.updated()
        return output

    def _tell_loss(self, loss: torch.Tensor) -> None:
        """Write the loss of the last step to the event log."""
        assert self._manager is not None
        outcome = self._manager.last_outcome()
        self._manager.telemetry.emit(
            "loss",
            step=outcome.step if outcome else None,
            loss=float(loss.detach()) * self._trainer.accumulate_grad_batches,
        )

    def _begin_epoch(self) -> None:
        """An epoch begins: adopt its data fetcher before it is used."""
        assert self._batches is not None
        self._batches.begin_epoch(self._trainer)

    def _on_quorum(self) -> bool:
        if not super()._on_quorum():
            return False
        assert self._manager is not None and self._resumption is not None
        if self._loggers is not None:
            begins = self._manager.current_step() <= self._first_step + 1
            self._loggers.in_quorum(self._leader, takes_over=self._met, begins=begins)
        starts, self._writes = self._leader and not self._writes, self._leader
        if starts:
            log_hyperparams = self._from("loggers.utilities")._log_hyperparams
            with self._in_group.local_only():
                leader.begin(self._trainer, log_hyperparams, takes_over=self._met)
                if self._loggers is not None and not self._met:
                    self._loggers.begin()
                self._skipped.run(self._trainer)
                make_up_rows()
            if self._met:
                self._resumption.took_over()
        if self._group_leads:
            self._checkpoints.make_up()
        # The only group of a job leads before its first quorum.
        kept = self._manager.state.kept is not None
        if self._leader and not self._met and (sentence := self._resumption.begin(kept=kept)):
            say("ft_lightning", sentence)
        self._met = True
        return True

    def _before_leaving(self) -> None:
        part = None if self._manager is None else self._manager.step.part
        self._leaves_peers = part is not None and part.replica_world_size > 1
        board.slot().leaves()
        if self._loggers is not None and self._leaves_peers:
            self._loggers.before_leaving()

    def _after_leaving(self) -> None:
        """The others go on, unless all were told to end: the leader then logs the last step, too."""
        if self._loggers is not None and self._leaves_peers and not board.slot().others_leave():
            self._loggers.leave()

    def _call_hooks(self, name: str) -> None:
        call = self._from("trainer.call")
        call._call_callback_hooks(self._trainer, name)
        call._call_lightning_module_hook(self._trainer, name)

    def _awaits_quorum(self) -> bool:
        """Whether the loop waits for peers. In a signal handler of its thread: takes no lock."""
        asks = getattr(self._driver, "waits", False)
        return asks and self._manager is not None and not self._manager.in_quorum()

    def _leave(self) -> None:
        """Raise what ends a fit on SIGTERM."""
        raise self._from("utilities.exceptions").SIGTERMException

    # ------------------------------------------------------------------ the end

    def on_exception(self, exception: BaseException) -> None:
        """Called by Lightning when a run ends with an error, or as SIGTERM asks."""
        super().on_exception(exception)
        ending = self._from("utilities.exceptions").SIGTERMException
        if board.slot().there and isinstance(exception, ending):
            # Lightning's is 0: the supervisor would take it that this group has trained to the end.
            exception.code = SIGTERM_EXIT_CODE

    def on_train_end(self) -> None:
        """Called by Lightning after the last step: leave the job before any code that follows
        the fit."""
        super().on_train_end()
        if not leader.searching(self._trainer):
            # Before any user code that follows the fit, so that peers do not wait for it.
            self._shut_down(finished=True)
            if self._leader:
                self._record_end()
                self._training_is_over(True)
            else:  # the leader may die in its last save, or before it has recorded the end
                self._training_is_over(True)
                board.slot().await_leader(self._training_number)
                self._see_who_leads()
            self._checkpoints.end()

    def teardown(self) -> None:
        """Called by Lightning when a run is over, also with an error: leave the job, and
        release what this process holds of its machine."""
        self._preparing.release()
        self._shut_down()
        if self._loggers is not None:
            self._loggers.end()
        trainer = getattr(self.lightning_module, "_trainer", None)  # None: the launcher has failed
        if (rows := later_rows()) is not None:
            rows.end(well=trainer is not None and not trainer.interrupted)
        if trainer is not None and trainer.state.fn == "fit" and not self._met:
            if passes := self._resumption is not None and self._resumption.passes_over:
                sentence = self._resumption.passed_over()
                if self.scope.group_rank == 0:
                    say("ft_lightning", sentence)
                self._training_is_over(True)
            on_board = passes and board.slot().whole
            self._leader = leader.without_quorum(trainer, self.scope, on_board=on_board)
        if self._resumption is not None:
            self._resumption.release()
        self.checkpoint_names.release()
        # Unwrapped here: DDP's own teardown would recommend options that are refused.
        self.model = self.lightning_module
        if self._sigterm is not None:
            self._sigterm.unwatch()
            self._sigterm = None
        place = os.environ.get(ENV_WORLD_SIZE)
        super().teardown()
        if place is not None:  # Lightning's environment takes it off; this process keeps its place
            os.environ[ENV_WORLD_SIZE] = place

    def _shut_down(self, *, finished: bool = False) -> None:
        """Leave the quorum, and release what was adopted of Lightning. Idempotent."""
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
            release(self._trainer.progress_bar_callback)
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    # ------------------------------------------------------------------ pieces

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def schema(trainer: Any) -> dict[str, str]:
    """What replica groups must have in common; one that differs is refused when it joins."""
    module = trainer.lightning_module
    reloads = trainer.reload_dataloaders_every_n_epochs  # each epoch may have another number
    return {
        "batches an epoch": "" if reloads else str(trainer.num_training_batches),
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "precision": str(trainer.precision),
        "gradient clipping": f"{trainer.gradient_clip_val} {trainer.gradient_clip_algorithm}",
        "optimization": "automatic" if module.automatic_optimization else "manual",
    }


def schema_of_updates(trainer: Any) -> dict[str, str]:
    """The same, of what `configure_optimizers` has made. To be asked at once: a callback may replace the
    schedulers later (stochastic weight averaging does, and in a fit that is resumed sooner)."""
    return {
        "optimizers": ", ".join(type(o).__name__ for o in trainer.optimizers),
        "schedulers": ", ".join(
            f"{type(c.scheduler).__name__} each {c.frequency} {c.interval}"
            for c in trainer.lr_scheduler_configs
        ),
    }
