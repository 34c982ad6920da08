"""The checkpoints of transformers' Trainer.

*Checkpoints are whole or absent.* Trainer writes a checkpoint's files under its final name one after
the other, and looks for the best one by that name. Here each process writes to a folder of its own, as
under `save_state` (`checkpoints`), and the main process gives it the name at the end. So
`get_last_checkpoint`, `save_total_limit`, `load_best_model_at_end` and a script's own code see whole
checkpoints only. All processes agree on the best one: if the main process dies before it is there, the
next main process writes it. Another checkpoint is just absent then.

*All start from one checkpoint.* `train(resume_from_checkpoint=True)`, and scripts that look for the last
checkpoint themselves, find a newer one when they are started again. They would count their epochs from
there, while their peers count from the one that *they* started with. So each start is noted in the
output folder, and a process that finds others in training starts where the note says.

*FSDP.* The processes of a group share a model, and write and read a checkpoint together, as under
`save_state`.

*All dead.* Each checkpoint says which job has written it. Where no process of the job is left in
training, `train()` goes on from the newest that this job has written; `resume_from_checkpoint=False`
starts anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime import world_collectives as world
from ft_accelerate.runtime.checkpoints import FOLDER, publish
from ft_accelerate.runtime.process import while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_core.environment import SHARED_JOB
from lighthouse.files import replace_whole

log = logging.getLogger("ft_accelerate")

NOTE = ".ft_started_from.json"
MARK = ".ft_written_by.json"
"""In a checkpoint: the job that has written it, and in which of its trainings."""

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
started_with: MutableMapping[Any, Path] = WeakIdKeyDictionary()
"""The checkpoint that a Trainer's training has started from, if from one."""


def started_from(
    arguments: Any, given: str | None, runtime: Runtime, *, goes_on: bool
) -> str | None:
    """The checkpoint to start this `train` with: `given`, or that of the peers in training.

    A script may train several times: the n-th call is noted as such. `goes_on`: without peers it
    starts from what the job has written, if there is something.
    """
    number = _calls[runtime] = _calls.get(runtime, 0) + 1
    path = Path(arguments.output_dir) / NOTE
    first = number == 1
    comes_back = runtime.group_ranks.others_train() if first else not runtime.live
    starts = [] if first and not comes_back else _read(path)
    if comes_back:
        if len(starts) < number:
            return given
        noted: str | None = starts[number - 1]
        if noted != given:
            log.info("the others started from %s, so this process does", noted or "the beginning")
        return noted
    written = _written_by_job(arguments.output_dir, runtime, number) if goes_on else None
    if written is not None:
        given = written
        # Said when it trains: one that comes after the last step, while the others finish, never does.
        runtime.saved.goes_on = (
            f"no process of this job is left in training: it goes on from {written} "
            "(resume_from_checkpoint=False starts anew)"
        )
        # A later training of the script: this process is in the quorum already.
        if runtime.manager is not None and runtime.leader:
            runtime.saved.trains()
    starts[number - 1 :] = [given]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_whole(path) as draft:
            draft.write_text(json.dumps(starts))
    except OSError:
        # A Trainer that saves nothing needs no folder that can be written to, and one that comes back finds
        # what was found here. An older note would say otherwise.
        if arguments.save_strategy != "no" or _read(path) not in ([], starts):
            raise
    return given


def _written_by_job(output_dir: str, runtime: Runtime, number: int) -> str | None:
    """The newest whole checkpoint that the `number`-th training of this job has written, if any.

    Jobs without an id of their own are the same one only under one launcher.
    """
    job = runtime.options.job_id
    if job == SHARED_JOB and not runtime.group_ranks.restarts:
        return None
    found: list[tuple[int, Path]] = []
    for mark in Path(output_dir).glob(f"checkpoint-*/{MARK}"):
        with contextlib.suppress(OSError, ValueError):  # it is being deleted
            if json.loads(mark.read_text()) == [job, number]:
                found.append((int(mark.parent.name.rpartition("-")[2]), mark.parent))
    return str(max(found)[1]) if found else None


def _read(path: Path) -> list[str | None]:
    try:
        starts: list[str | None] = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return starts


@while_active
def checkpoint(
    runtime: Runtime, original: Any, self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
) -> None:
    """All processes call it."""
    state, run_dir = self.state, self._get_output_dir(trial=trial)
    final = os.path.join(run_dir, f"checkpoint-{state.global_step}")

    def write() -> None:
        original(self, model, trial, *args, **kwargs)

    published = _write(write, self, Path(run_dir), Path(final))
    while not _published_by_any(runtime, published):
        published = _write(write, self, Path(run_dir), Path(final))
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = final
    if self.args.push_to_hub and runtime.live:
        self._push_from_checkpoint(final)
    if published:
        _rotate(self, run_dir)


def _rotate(trainer: Any, run_dir: str) -> None:
    """Delete checkpoints above `save_total_limit`, as Trainer does; but not the one that this training has
    started from, with which a process that comes back begins."""
    limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
    if limit is None or limit <= 0:
        return
    found = [Path(each) for each in _oldest_first(trainer, run_dir)]
    kept = {*found[-1:], *([] if best is None else [Path(best)])}
    above = len(found) - max(limit, len(kept))
    start = started_with.get(trainer)
    for path in [path for path in found if path not in kept][: max(0, above)]:
        if start is None or path.resolve() != start:
            shutil.rmtree(path, ignore_errors=True)


def _oldest_first(trainer: Any, run_dir: str) -> list[str]:
    """A function of transformers 5, a method before."""
    if hasattr(trainer, "_sorted_checkpoints"):
        return list(trainer._sorted_checkpoints(use_mtime=True, output_dir=run_dir))
    from transformers.trainer_utils import sort_checkpoints

    return sort_checkpoints(run_dir, use_mtime=True)


def _write(write: Callable[[], None], trainer: Any, run: Path, final: Path) -> bool:
    """Have it written elsewhere, and named by the main process. Returns whether this one did."""
    state = trainer.state
    # One that becomes the main process meanwhile has not written the model.
    leads = bool(trainer.args.should_save)

    def write_in(draft: Path) -> Path:
        written = draft / final.name
        # Also for a process that becomes the main one meanwhile, and writes the rest.
        written.mkdir(exist_ok=True)
        with _elsewhere(trainer, str(draft)):
            write()
        if state.best_model_checkpoint == str(written):  # Trainer has found it there
            state.best_model_checkpoint = str(final)
            state.save_to_json(str(written / "trainer_state.json"))
        if not trainer.args.save_only_model:
            job = [processes.current().options.job_id, _calls[processes.current()]]
            (written / MARK).write_text(json.dumps(job))
        return written

    ranks = processes.current().group_ranks
    return publish(final, run / FOLDER, ranks, write_in, lambda: leads)


@contextmanager
def _elsewhere(trainer: Any, folder: str) -> Iterator[None]:
    """Trainer's checkpoints go there, and nowhere else yet."""
    vars(trainer)["_get_output_dir"] = lambda trial=None: folder
    vars(trainer)["_push_from_checkpoint"] = lambda checkpoint_folder: None
    try:
        yield
    finally:
        del vars(trainer)["_get_output_dir"], vars(trainer)["_push_from_checkpoint"]


def _published_by_any(runtime: Runtime, published: bool) -> bool:
    """Whether one of the participants has published it; in a past that is run through, one had."""
    answers: list[Any] = [None] * runtime.num_processes
    world.all_gather_object(answers, published)
    others = [
        said for index, said in enumerate(answers) if index != runtime.process_index and said != []
    ]
    if not runtime.live and not others:
        return True  # what they said then is not known
    return any(said is True for said in answers)
