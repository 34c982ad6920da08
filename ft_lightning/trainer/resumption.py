"""A job of which all processes have died goes on from its newest whole checkpoint.

Each job has a record of its checkpoint files: `.ft_lightning/JOB.json` in the Trainer's
`default_root_dir`, which may be a URL. The leader writes it after each save. The job's id says which
record is its own:

| job id | started again by its launcher | started anew |
|---|---|---|
| a supervisor's (a new one for each start of a script) | goes on | has no record |
| `FT_JOB_ID`, `job_id=`, or SLURM's | goes on | goes on; a fit that has finished begins anew, unless peers are in a later one |
| none | goes on | begins anew |

A fit that has finished is passed over: its state is that of the checkpoint of its last step. Without such a
checkpoint it can't be (`trainings.over`). A process that comes back to peers that train reads the checkpoint, too, and then takes their state.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ft_core.config import JobOptions
from ft_core.environment import SHARED_JOB
from ft_core.heal.random_numbers import RandomNumbers
from ft_lightning.shared import trainings
from ft_lightning.shared.topology import Scope
from ft_lightning.trainer.batches import adopt, release
from ft_lightning.trainer.counters import settle_counters
from ft_lightning.trainer.loggers import adopt_log_places, log_places
from ft_lightning.trainer.saves import SmallFile, lasts, local_path
from lighthouse.files import file_name

log = logging.getLogger("ft_lightning")

FOLDER = ".ft_lightning"
KEPT_SAVES = 100
"""Of a fit, in its record."""
KEPT_RECORDS = 20
"""In a folder of this machine: each start of a script under a supervisor makes one."""


class Resumption:
    """The record of one fit. The loop's thread.

    Args:
        wanted: the option `resume`.
        goes_on: this process has the state: an earlier call of `fit` has failed in it.
        ask: `ask(question)` is the answer of rank 0 of this replica group.
    """

    def __init__(
        self,
        trainer: Any,
        job: JobOptions,
        scope: Scope,
        *,
        wanted: bool,
        goes_on: bool = False,
        ask: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._trainer, self._wanted, self._goes_on = trainer, wanted, goes_on
        self.number = str(trainings.number_of(job.room_id))
        root = trainer.default_root_dir
        alone = job.job_id.startswith("alone-") and scope.group_size == 1
        self._file: SmallFile | None = None
        if not alone and lasts(root):
            self._file = SmallFile(root, f"{FOLDER}/{file_name(job.job_id)}.json")
        self._lost = not alone and not lasts(root)
        self._named = job.job_id != SHARED_JOB and not job.job_id.startswith("alone-")
        self._restarted = scope.restarts > 0
        self._known: dict[str, Any] = ask(self._read) or {}
        self._peers_are_later = lambda: bool(ask(lambda: trainings.over(job)))
        self._peers_train = lambda: bool(ask(lambda: trainings.has_others(job)))
        self.source = ""
        """The checkpoint from which this process has begun; "": none of this job."""
        self.passes_over = False
        """The fit has finished, and this process has its state."""
        self.continues = self._continues()
        """Whether this process goes on from a checkpoint of this job, in its log. Read only."""
        if self.continues:
            adopt_log_places(trainer, self._known.get("logs", []))
            adopt(trainer._checkpoint_connector, self._methods)

    def _continues(self) -> bool:
        known = self._known
        if not self._wanted or self._goes_on or not known.get("saves"):
            return False
        if self._restarted or (self._named and not known.get("finished")):
            return True
        return self._named and self._peers_are_later()

    def _methods(self, cls: Any) -> dict[str, Any]:
        resumption = self
        # This job has written the file. Lightning 2.5 always reads it as a whole.
        whole = {"weights_only": False}
        if "weights_only" not in inspect.signature(cls.resume_start).parameters:
            whole = {}

        def resume_start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            if checkpoint_path:
                cls.resume_start(self, checkpoint_path, *args, **kwargs)
                return
            for path, step in reversed(resumption._known["saves"]):
                try:
                    if local_path(path) is None or os.path.exists(path):
                        cls.resume_start(self, path, *args, **{**kwargs, **whole})
                        if resumption._may_begin_from(self._loaded_checkpoint, step):
                            resumption._begin_from(path, step)
                            return
                except Exception as error:  # of a storage, or of any unpickler
                    log.warning(
                        "checkpoint %s can't be read (%s): an older one is tried", path, error
                    )
            resumption._trainer.strategy.forget_checkpoint()
            self._loaded_checkpoint = {}
            cls.resume_start(self, None, *args, **kwargs)

        def resume_end(self: Any) -> None:
            cls.resume_end(self)
            if resumption.source:
                # Not the user's `ckpt_path`: ModelCheckpoint would never remove it.
                self._ckpt_path = None

        return {"resume_start": resume_start, "resume_end": resume_end}

    def _may_begin_from(self, checkpoint: dict[str, Any], step: int) -> bool:
        """Whether a checkpoint that was written at `step` is still that, and leaves something to train. Peers that
        are behind the last step, and have not finished, may need this process for it, and it has nothing to ask
        them for then."""
        if checkpoint.get("global_step", step) != step:
            return False  # a later fit has written a file of the same name
        if self._known.get("finished") == step or not self._is_at_end(checkpoint):
            return True
        return not self._peers_train()

    def _is_at_end(self, checkpoint: dict[str, Any]) -> bool:
        loop, trainer = checkpoint.get("loops", {}).get("fit_loop", {}), self._trainer
        # Behind its last batch an epoch has no step left, though its validation and its end may be still to come.
        behind = loop.get("epoch_loop.batch_progress", {}).get("is_last_batch")
        counts = loop.get("epoch_progress", {}).get("current", {})
        epochs = counts.get("ready" if behind else "processed", 0)
        limits = (
            (epochs, trainer.max_epochs),
            (checkpoint.get("global_step", 0), trainer.max_steps),
        )
        return any(limit not in (None, -1) and done >= limit for done, limit in limits)

    def _begin_from(self, path: str, step: int) -> None:
        self.source = path
        if self._known.get("finished") == step:
            self.passes_over = True

            def skip(loop: Any) -> bool:
                return bool(loop.done) or True  # `done` settles counters

            adopt(self._trainer.fit_loop, lambda cls: {"skip": property(skip)})

    def passed_over(self) -> str:
        """The fit has been passed over: its results are here. Returns a sentence for the user."""
        for name, value in self._known.get("metrics", {}).items():
            self._trainer.callback_metrics[name] = torch.tensor(value)
        # A validation at the end of the last epoch may have saved it, before the epoch was counted.
        completed = self._known.get("epoch", self._trainer.current_epoch)
        loop = self._trainer.fit_loop
        loop.epoch_progress.current.completed = completed
        settle_counters(self._trainer)  # the next fit begins as behind one that has run
        loop.reset_restart_stage()
        # What the script draws next, for its next fit, too.
        RandomNumbers().take([_unpacked(text) for text in self._known.get("numbers", ())])
        moved = self._known.get("moved", {})
        for callback in self._trainer.checkpoint_callbacks:  # for `test(ckpt_path="best")`
            if (best := _best_of(callback)) in moved:
                callback.best_model_path = moved[best]
        return f"training {self.number} of the script is over; its state is that of {self.source}"

    def has_ended(self) -> bool:
        """Whether the fit has finished since this process began with it, and its next life can pass over
        it. Reads the record."""
        if not self._wanted or "finished" in self._known:
            return False
        return bool(_end_of(self._read()))

    # ------------------------------------------------------------------ the leader's

    def begin(self, *, kept: bool = False) -> str:
        """The first leader begins; returns a sentence for the user, or "". What an earlier run of
        this job has saved is forgotten, unless this one goes on from it. `kept`: it goes on from the
        state that the supervisor's keeper held, which has been told."""
        if kept or self.source:
            self._known.pop("finished", None)
        if kept or self._goes_on:
            return ""
        if self.source:
            return (
                f"all had ended; the job goes on from {self.source} (step "
                f"{self._trainer.global_step:,}). FTDDPStrategy(resume=False) begins anew"
            )
        if self._lost:
            return (
                "default_root_dir is in the memory of each process: when all have died the job begins "
                "anew. Set one that lasts, so that it goes on from its newest checkpoint"
            )
        earlier, self._known = self._known, {}
        self._change(lambda fits: {n: fit for n, fit in fits.items() if int(n) < int(self.number)})
        if not earlier.get("saves") or earlier.get("finished") or self._trainer.global_step:
            return ""
        path, step = earlier["saves"][-1]
        return (
            f"an earlier run has not finished; its newest checkpoint is {path} (step {step:,}). This one "
            "begins anew: set ckpt_path to go on from there, or FT_JOB_ID so that it always does"
        )

    def saved(self, path: Any) -> None:
        """A whole checkpoint of this fit was written."""
        path = _place(path) or str(path)
        known = self._known
        saves = [each for each in known.get("saves", []) if each[0] != path]
        known["saves"] = [*saves[-KEPT_SAVES:], [path, self._trainer.global_step]]
        known["logs"] = log_places(self._trainer)
        self._change(lambda fits: {**fits, self.number: known})

    def took_over(self) -> None:
        """Another process was the leader: what it has saved counts."""
        self._known = self._read()

    def end_is_saved_of(self, module: Any) -> bool:
        """Whether nothing more has to be saved for a process that passes over this fit."""
        saves = self._known.get("saves")
        if not self._wanted or self._file is None:
            return True
        if not saves or saves[-1][1] != self._trainer.global_step:
            return False
        return _has_weights_of(saves[-1][0], module)

    def finished(self) -> None:
        """The fit has ended regularly."""
        if self._known.get("saves"):
            self._known["finished"] = self._trainer.global_step
            metrics = self._trainer.callback_metrics
            self._known["epoch"] = self._trainer.current_epoch
            self._known["metrics"] = {
                name: torch.as_tensor(value).tolist() for name, value in metrics.items()
            }
            numbers = RandomNumbers()
            numbers.mark()
            self._known["numbers"] = [_packed(state) for state in numbers.marked()]
            self._known["best"] = [_best_of(each) for each in self._trainer.checkpoint_callbacks]
            self._change(lambda fits: {**fits, self.number: self._known})

    def needed_by(self, path: Any) -> list[str]:
        """The numbers of the finished fits that are passed over with this checkpoint, or have it as their best."""
        place = _place(path)
        if not os.path.exists(place):
            return []
        return [
            number
            for number, fit in self._fits().items()
            if place == _end_of(fit) or ("finished" in fit and place in fit.get("best", ()))
        ]

    def has_moved(self, numbers: list[str], path: Any, copy: str) -> None:
        """A checkpoint of these fits is at `copy` from now on, and goes where it was."""
        place = _place(path)

        def moved(fit: dict[str, Any]) -> dict[str, Any]:
            saves = [[copy if where == place else where, step] for where, step in fit["saves"]]
            return {**fit, "saves": saves, "moved": {**fit.get("moved", {}), place: copy}}

        self._change(
            lambda fits: {n: moved(fit) if n in numbers else fit for n, fit in fits.items()}
        )

    # ------------------------------------------------------------------ the file

    def _read(self) -> dict[str, Any]:
        fit: dict[str, Any] = self._fits().get(self.number, {})
        return fit

    def _fits(self) -> dict[str, Any]:
        try:
            fits: dict[str, Any] = json.loads(self._file.read()) if self._file is not None else {}
        except ValueError:
            return {}
        return fits

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        before = self._fits()
        after = change(before)
        if self._file is None or before == after:
            return
        try:
            self._file.write(json.dumps(after).encode())
            others = set(self._file.folder.glob("*.json")) if self._file.folder else set()
            others.discard(Path(str(self._file)))
            for old in sorted(others, key=os.path.getmtime)[: 1 - KEPT_RECORDS]:
                old.unlink(missing_ok=True)
        except Exception as error:  # a storage's own errors are of any kind
            log.warning("%s can't be written (%s): the job can't go on from it", self._file, error)

    def release(self) -> None:
        """Lightning's objects are themselves again."""
        release(self._trainer._checkpoint_connector)
        release(self._trainer.fit_loop)


def _packed(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _unpacked(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _has_weights_of(path: str, module: Any) -> bool:
    """Whether a checkpoint gives the model what it has now, as far as is known: it may be another storage's."""
    if not _place(path):
        return True
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        # A file of `WeightAveraging` has the averages in place of the model's.
        saved = checkpoint.get("current_model_state", checkpoint["state_dict"])
        both = ((x, saved[name]) for name, x in module.state_dict().items() if name in saved)
        return all(torch.equal(x.cpu(), other) for x, other in both if torch.is_tensor(x))
    except Exception:  # it can't be read or compared, for any reason
        return False


def _best_of(callback: Any) -> str:
    """The path of its best checkpoint; "": it has none on this machine."""
    best = getattr(callback, "best_model_path", "")
    return _place(best) if best else ""


def _place(path: Any) -> str:
    """The absolute path on this machine; "": it is another storage's."""
    local = local_path(path)
    return "" if local is None else os.path.abspath(local)


def _end_of(fit: dict[str, Any]) -> str:
    """The checkpoint of a finished fit's last step; "": there is none."""
    path, step = fit["saves"][-1] if fit.get("saves") else ("", -1)
    there = local_path(path) is None or os.path.exists(path)
    return path if there and fit.get("finished") == step else ""
