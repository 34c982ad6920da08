"""One replica group writes: logs, checkpoints, configuration. It may die, and another takes over.

| when | writes | prints what rank zero prints |
|---|---|---|
| only one replica group is configured | it does, as under stock `ddp` | it does |
| until the first quorum of a fit | none: the leader is not known | group 0, if it was not restarted |
| in a quorum | the first participant (`FTDDPMixin._on_quorum`) | the same |
| after a fit without a quorum | group 0: no other has done more | the same |
| after a fit that is passed over | the same; under a supervisor of all groups the first that is left, if none writes | the same |

What the leader before has written stays, and the next one goes on with it (`loggers.py`).

A checkpoint file is written whole or not at all, with the manager's position inside. A full disk
must not end a training that survives the loss of machines: a save that fails is logged, and as long
as the newest file is missing, no file that it was to replace is removed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_map

from ft_core.errors import GroupBroken
from ft_core.launch import board
from ft_core.launch.trackers import HeldSaves
from ft_core.manager import Manager
from ft_lightning.shared.launch_env import ends_folder
from ft_lightning.shared.strategy_base import NoLongerLeads, act_as_leader
from ft_lightning.shared.topology import Scope
from ft_lightning.trainer.batches import Batches
from ft_lightning.trainer.checkpoint_names import CheckpointNames
from ft_lightning.trainer.loggers import Loggers, keep_metrics, released
from ft_lightning.trainer.resumption import Resumption
from ft_lightning.trainer.saves import versions, with_copied_buffers, write_whole

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

from lightning_utilities.core.rank_zero import rank_zero_only

log = logging.getLogger("ft_lightning")


def before_quorum(
    trainer: Any, scope: Scope, dummy: Any, still_leads: Callable[[], bool]
) -> tuple[bool, Loggers | None]:
    """A fit is being set up. The loop's thread.

    Returns whether this group writes already, and the loggers that wait for the first quorum: they
    open their files at their first use as rank zero, under a version number that follows from the
    files that exist. None: they are as they are, since this is the only group, or one of them is of
    a class that has no subclasses. `dummy()`: the experiment of a logger that is not rank zero's.
    `still_leads()`: of this process, which has been the leader.
    Raises ValueError for what several groups cannot agree on.
    """
    first = scope.index == 0 and scope.group_rank == 0
    released(trainer)
    if scope.num_groups == 1:
        act_as_leader(first, scope)
        return first, None
    refuse_search(trainer)
    loggers = None
    with contextlib.suppress(TypeError):
        loggers = Loggers(trainer, dummy, still_leads)
    act_as_leader(first and scope.restarts == 0 and loggers is not None, scope)
    return False, loggers


def without_quorum(trainer: Any, scope: Scope, *, on_board: bool = False) -> bool:
    """Whether this group writes after a fit that took no step, or failed before its first quorum.

    The peers of a restarted group may have newer files than the state with which it failed.
    `on_board`: the supervisor's board says which process writes (`StrategyBase.is_global_zero`).
    """
    released(trainer)
    risky = scope.num_groups > 1 and scope.restarts > 0 and trainer.interrupted
    leads = scope.index == 0 and scope.group_rank == 0 and not risky and not on_board
    act_as_leader(leads, scope)
    if leads:
        keep_logs(trainer)
    return leads


def leads_again(trainer: Any, scope: Scope) -> bool:
    """Whether this process, which evaluates before any training, writes though it is not a fresh start.

    It wrote before it died, and none of the others has: until a training tells, it is the first one.
    """
    leads = scope.rank == 0 and scope.restarts > 0 and board.slot().none_has_trained()
    if leads:
        act_as_leader(True, scope)
        keep_logs(trainer)
    return leads


def keep_logs(trainer: Any) -> None:
    """This process writes from now on: what others have logged stays."""
    for logger in trainer.loggers:
        keep_metrics(logger)


def searching(trainer: Any) -> bool:
    """Whether the learning rate finder trains before the fit, with only its own callback."""
    return any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks)


def refuse_search(trainer: Any, *, outer: bool = False) -> None:
    """Raise ValueError for a search before the training. Several groups would find several rates, and
    with `outer` steps a fit begins only once."""
    kinds = {cls.__name__ for each in trainer.callbacks for cls in type(each).mro()}
    if "BatchSizeFinder" in kinds:
        raise ValueError(
            "a batch size is found by one process: run BatchSizeFinder (Tuner.scale_batch_size) in a Trainer "
            'with devices=1 and strategy="auto" first, and give the size to all'
        )
    if "LearningRateFinder" in kinds:
        raise ValueError(
            "LocalSGD and DiLoCo cannot find a learning rate, which is one of their inner steps: run "
            "the finder in a Trainer with devices=1 and another strategy first"
            if outer
            else "ft_ddp finds a learning rate with one replica group only, whose losses decide: run "
            "the finder in a Trainer with devices=1 first, and give the rate to all"
        )


def begin(trainer: Any, log_hyperparams: Any, *, takes_over: bool) -> None:
    """This group writes from now on; first, what set-up would have written.

    `log_hyperparams(trainer)`: Lightning's own. `takes_over`: another group wrote before. The
    loop's thread.
    """
    if not takes_over:
        keep_logs(trainer)
    if getattr(trainer, "enable_autolog_hparams", True):  # 2.5 has no such switch
        log_hyperparams(trainer)
    for callback in trainer.callbacks:
        if not takes_over and hasattr(callback, "summarize") and hasattr(callback, "_max_depth"):
            callback.on_fit_start(trainer, trainer.lightning_module)  # the model's summary
        if hasattr(callback, "save_config") and not getattr(callback, "already_saved", True):
            _save_config(trainer, callback)


def _save_config(trainer: Any, callback: Any) -> None:
    """Have LightningCLI's callback save, which found no leader at set-up."""
    directory, name = trainer.log_dir, getattr(callback, "config_filename", "")
    if directory and name and os.path.exists(os.path.join(directory, name)):
        callback.already_saved = True  # by the leader before this one
        return
    callback.setup(trainer, trainer.lightning_module, "fit")


# ---------------------------------------------------------------------- checkpoints


def _size_of(module: Any) -> int:
    """Bytes of its tensors; what else a module puts into its state is small."""
    return sum(getattr(each, "nbytes", 0) for each in module.state_dict().values())


def _kept_in(folder: str) -> int:
    """Bytes of the files in a folder."""
    return sum(each.stat().st_size for each in os.scandir(folder))


END_BYTES = 256 * 2**20
"""Of models and what is kept already, up to which the end of a fit is kept where no callback has saved it."""
KEY = "ft_lightning"
"""Where a checkpoint holds `Manager.state_dict()`."""

_LIVE = (
    "_manager",
    "_driver",
    "_batches",
    "_decisions",
    "_rounds",
    "_sink",
    "_preparing",
    "_sigterm",
    "_loggers",
    "_resumption",
    "_names",
    "_shards",
    "_store",
)
"""Attributes of the strategy that belong to a fit under way."""


class Checkpoints(HeldSaves):
    """The checkpoint files of one strategy. Thread: the one that saves."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = 0
        """Saves in a row that failed."""
        self.error: Exception | None = None
        """Of the last save, if none has worked in this fit."""
        self._worked = False
        self.loaded: dict[str, Any] = {}
        """The manager's part of the checkpoint that was loaded last."""

    def save(self, path: Any, write: Callable[[], None]) -> bool:
        """Have `write()` write `path` (see `write_whole`); whether it worked. Raises what it raises where no
        callback saves, but the user's own call of `save_checkpoint`; and NoLongerLeads, GroupBroken."""
        try:
            write()
        except (NoLongerLeads, GroupBroken):
            raise
        except Exception as error:  # a storage's own errors are of any kind
            if not self.makes_up and not _in_callback():
                raise
            self.failed += 1
            self.error = None if self._worked else error
            log.warning("checkpoint %s could not be saved (%s): training goes on", path, error)
            return False
        self.failed, self.error, self._worked = 0, None, True
        return True

    def begin(self) -> None:
        """A fit begins."""
        self.failed, self.error, self._worked = 0, None, False
        self.settled()

    def end(self) -> None:
        """The fit has ended. Raises RuntimeError if saves have failed, and none has worked."""
        if self.error is not None:
            raise RuntimeError(
                f"the fit has ended, and this process could save none of its checkpoints: {self.error}"
            ) from self.error

    def may_remove(self, path: Any) -> bool:
        """Whether a file that a newer one was to replace may go."""
        if self.failed:
            log.warning("checkpoint %s is kept: the newer one could not be saved", path)
        return not self.failed

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Remove the manager's part from a loaded checkpoint, so that hooks do not see it."""
        self.loaded = dict(checkpoint.pop(KEY, None) or {})


def _in_callback() -> bool:
    """Whether a callback that makes checkpoints has called this."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(cls.__name__ == "Checkpoint" for cls in type(owner).__mro__):
            return True
        frame = frame.f_back
    return False


class CheckpointMixin(_Base):
    """The part of the strategy that saves and loads."""

    _manager: Manager | None
    _from: Callable[[str], Any]
    _batches: Batches | None
    _saved: Checkpoints | None = None
    _names: CheckpointNames | None = None
    _resumption: Resumption | None = None
    _ranks_hold: str
    scope: Scope
    _leader: bool
    _follows: Callable[[], bool]
    _still_leads: Callable[[], bool]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a fit under way (sockets, threads), which a copy has not."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        dead = {name: None for name in _LIVE if name in state}
        return {**state, **dead, "_model": self.lightning_module}  # without its wrapper

    @property
    def _checkpoints(self) -> Checkpoints:
        if self._saved is None:
            self._saved = Checkpoints()
        return self._saved

    @property
    def checkpoint_names(self) -> CheckpointNames:
        """Those that are taken. The loop's thread."""
        if self._names is None:
            self._names = CheckpointNames()
        return self._names

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Called on all; the leader writes. A failure of a callback to write is logged, and the training
        goes on; the fit raises at its end if no save has worked. The user's own call raises at once.

        The thread that calls `Trainer.save_checkpoint`, which must be the loop's."""
        self.checkpoint_names.saved(filepath)
        writes = self._writes_checkpoint()
        if not writes and not self._follows():
            return
        # In a copy: hooks may have kept the checkpoint that they were given.
        checkpoint = {**checkpoint, **self._place()}
        if writes:
            self._write(checkpoint, filepath, storage_options)
        else:
            self._hold(checkpoint, filepath, storage_options)

    @property
    def _saves_here(self) -> bool:
        """Whether this rank takes part when its replica group saves."""
        return self.scope.group_rank == 0

    def _writes_checkpoint(self) -> bool:
        """Whether this process takes part in writing a checkpoint now."""
        return self._still_leads()

    def _place(self) -> dict[str, Any]:
        """What a checkpoint has besides Lightning's: where the job is."""
        if self._manager is None:
            return {}
        place = {**self._manager.state_dict(), "world_size": self.world_size}
        module = self.lightning_module
        if self._batches is not None and module is not None:
            place["data"] = self._batches.read_so_far(module.trainer)
        return {KEY: place}

    def _hold(self, checkpoint: dict[str, Any], *where: Any) -> None:
        # Callbacks give their own dicts (the best checkpoints so far), which the next save changes.
        kept = tree_map(lambda leaf: leaf, self._unchanged(checkpoint))
        before = versions(kept)

        def write() -> None:
            if versions(kept) == before:
                self._write(kept, *where)
            else:  # by the script, after the fit
                log.warning(
                    "checkpoint %s may be missing: the process that wrote it has died, and the weights "
                    "have been changed here since",
                    where[0],
                )

        self._checkpoints.hold(write)

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """This process leads, and saves."""
        self._keep_for_earlier(filepath)
        io, plain = self._checkpoint_writer()
        given = io, checkpoint, filepath, storage_options
        write = partial(write_whole, *given, plain=plain, still_leads=self._still_leads)
        try:
            whole = self._checkpoints.save(filepath, write)
        except NoLongerLeads:  # its successor saves, or it does when it leads again
            self._hold(checkpoint, filepath, storage_options)
            return
        saved = self._resumption.saved if self._resumption is not None else None
        if whole and saved is not None and self.is_global_zero and "optimizer_states" in checkpoint:
            saved(filepath)

    def _make_up_saves(self) -> None:
        """The leader before is dead: save what it may not have saved, and record the end of the fit."""
        self._checkpoints.make_up()
        module, resumption = self.lightning_module, self._resumption
        ends_fit = module is not None and module.trainer.state.fn == "fit"
        if resumption is not None and ends_fit and self._leader:
            resumption.took_over()
            self._record_end()

    def _record_end(self) -> None:
        """This process writes, and the fit has ended: one that comes back passes over it.

        Where no callback has saved the last step, or `on_train_end` has put other weights into the model since (an
        average), it is kept in a folder of the supervisor's."""
        resumption, module, folder = self._resumption, self.lightning_module, ends_folder()
        if resumption is None or module is None:
            return
        if folder and self._ranks_hold == "copies":
            connector = module.trainer._checkpoint_connector
            io = self._from("plugins.io").TorchCheckpointIO()
            path = os.path.join(folder, f"{resumption.number}.ckpt")
            try:
                has_room = _size_of(module) + _kept_in(folder) <= END_BYTES
                if has_room and not resumption.end_is_saved_of(module):  # last: it reads a file
                    checkpoint = connector.dump_checkpoint(weights_only=False)
                    io.save_checkpoint({**checkpoint, **self._place()}, path)
                    resumption.saved(path)
            except Exception as error:  # of what the script has put into the checkpoint, too
                log.warning("the end of the fit could not be kept (%s)", error)
        resumption.finished()

    def _checkpoint_writer(self) -> tuple[Any, bool]:
        """(a `CheckpointIO`, whether it writes one file, and now)."""
        io = self.checkpoint_io
        return io, isinstance(io, self._from("plugins.io").TorchCheckpointIO)

    def remove_checkpoint(self, filepath: Any) -> None:
        """The leader removes it; a follower keeps the call in case it becomes the leader."""
        self.checkpoint_names.removed(filepath)
        if not self._still_leads():
            if self._follows():
                self._checkpoints.hold(lambda: self._remove(filepath))
        else:
            self._remove(filepath)

    def _remove(self, filepath: Any) -> None:
        if self.is_global_zero and self._checkpoints.may_remove(filepath):
            self._keep_for_earlier(filepath)
            super().remove_checkpoint(filepath)

    def _keep_for_earlier(self, filepath: Any) -> None:
        """A callback of this fit removes, or writes anew, what one of an earlier fit has saved: if that fit is passed over
        with it, or it is its best, which the script may read then, it is copied to the supervisor's folder."""
        folder, resumption = ends_folder(), self._resumption
        if not folder or resumption is None:
            return
        if not (numbers := resumption.needed_by(filepath)):
            return
        try:
            path = os.path.join(folder, f"{numbers[-1]}-{len(os.listdir(folder))}.ckpt")
            if os.path.getsize(filepath) + _kept_in(folder) <= END_BYTES:
                shutil.copyfile(filepath, path)
                resumption.has_moved(numbers, filepath, path)
        except OSError as error:  # of a file that is gone, or the folder, too
            log.warning("checkpoint %s of an earlier fit could not be kept (%s)", filepath, error)

    def _unchanged(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """As it is until the next update."""
        module = self.lightning_module
        return checkpoint if module is None else with_copied_buffers(checkpoint, module)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; keeps what the strategy has saved of itself for the run that
        begins."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoints.take(checkpoint)
        return checkpoint

    def forget_checkpoint(self) -> None:
        """What was loaded last is not what the run begins with."""
        self._checkpoints.take({})


# ---------------------------------------------------------------- hooks that a follower has skipped

ENDS = {
    "setup": "",
    "on_fit_start": "",
    "on_train_start": "",
    "on_train_epoch_start": "on_train_epoch_end",
    "on_train_batch_start": "on_train_batch_end",
    "on_validation_start": "on_validation_end",
    "on_validation_epoch_start": "on_validation_epoch_end",
}
"""Hooks that set something up, in order, each with the one with which that ends."""


def _nothing() -> None:
    return None


_GUARD = getattr(rank_zero_only(_nothing), "__code__", None)


def is_guarded(method: Any) -> bool:
    """Whether `rank_zero_only` is around a hook, under whatever other decorators keep `__wrapped__`."""
    function = getattr(method, "__func__", method)
    while function is not None:
        if getattr(function, "__code__", _nothing) is _GUARD:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class SkippedHooks:
    """Hooks with `@rank_zero_only` that set something up, which this process has skipped in one fit.

    Callbacks like ThroughputMonitor set themselves up in `on_train_start`, on rank zero only. Rank zero is
    the leader, and may die. The next leader would use what it has never set up. So the hooks that were
    skipped here, and only those, are called when this process becomes the leader: of each set-up that is
    still in force (this fit, this epoch, this batch, this validation), in the order of Lightning.

    The guard is told by its code object, since `rank_zero_only` returns one and the same function around
    all that it guards. A hook that asks `trainer.is_global_zero` itself has run, and is not called again.
    The loop's thread.
    """

    def __init__(self) -> None:
        self._skipped: dict[str, tuple[Any, ...]] = {}
        self.begins("setup")

    def begins(self, hook: str, *arguments: Any) -> None:
        """Lightning calls this hook now, with `arguments` after Trainer and module."""
        if getattr(rank_zero_only, "rank", 0) == 0:
            self._skipped.pop(hook, None)
        else:
            self._skipped[hook] = arguments

    def ends(self, hook: str) -> None:
        """What this hook has set up is over."""
        self._skipped.pop(hook, None)

    def run(self, trainer: Any) -> None:
        """Rank zero is here now: call what was skipped, of callbacks and of the module."""
        if not self._skipped:
            return
        module, state = trainer.lightning_module, trainer.state
        skipped, self._skipped = self._skipped, {}
        name, stage = module._current_fx_name, state.stage
        try:
            for hook in ENDS:
                if hook not in skipped:
                    continue
                named = {"stage": state.fn} if hook == "setup" else {}
                module._current_fx_name = hook
                # in a validation, too, the training's hooks are called as in the training
                state.stage = stage if "validation" in hook else type(stage)("train")
                for callback in trainer.callbacks:
                    _call(callback, hook, (trainer, module, *skipped[hook]), named)
                _call(module, hook, skipped[hook], named)
        finally:
            module._current_fx_name, state.stage = name, stage

    def watching(self, hooks: dict[str, Callable[..., None]]) -> dict[str, Callable[..., None]]:
        """Hooks of a callback that is called before all others, with `hooks` among them."""

        def begins(hook: str) -> Callable[..., None]:
            def call(this: Any, trainer: Any, module: Any, *arguments: Any) -> None:
                self.begins(hook, *arguments)
                if hook in hooks:
                    hooks[hook](this, trainer, module, *arguments)

            return call

        def ends(hook: str, end: str) -> Callable[..., None]:
            def call(this: Any, trainer: Any, module: Any, *arguments: Any) -> None:
                if end in hooks:  # may meet the others, and become the leader
                    hooks[end](this, trainer, module, *arguments)
                self.ends(hook)

            return call

        first = {hook: begins(hook) for hook in ENDS if hook != "setup"}
        return {**hooks, **first, **{end: ends(hook, end) for hook, end in ENDS.items() if end}}


def _call(owner: Any, hook: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    method = getattr(owner, hook, None)
    if method is not None and is_guarded(method):
        method(*arguments, **named)
