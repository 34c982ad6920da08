"""Trainer's checkpoints: which one a training starts from, and how each is whole or absent.

Trainer writes a checkpoint's files under its final name one after the other, and looks for the best
one by that name. Here each process writes to a folder of its own, as under `save_state`
(`ft_accelerate.runtime.checkpoint_folders`), and the main process gives it the name at the end. So
`get_last_checkpoint`, `save_total_limit`, `load_best_model_at_end` and a script's own code see whole
checkpoints only. All processes agree on the best one: if the main process dies before it is there,
the next main process writes it. Another checkpoint is just absent then.

`train(resume_from_checkpoint=True)`, and scripts that look for the last checkpoint themselves, find a
newer one when they are started again. They would count their epochs from there, while their peers
count from the one that *they* started with. So each start is noted in the output folder, and a
process that finds others in training starts where the note says.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime import world_collectives as world
from ft_accelerate.runtime.checkpoint_folders import FOLDER, publish
from lighthouse.files import replace_whole

log = logging.getLogger("ft_accelerate")

NOTE = ".ft_started_from.json"

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def started_from(output_dir: str, given: str | None, runtime: Any) -> str | None:
    """The checkpoint to start this `train` with: `given`, or that of the peers in training.

    A script may train several times: the n-th call is noted as such.
    """
    number = _calls[runtime] = _calls.get(runtime, 0) + 1
    path = Path(output_dir) / NOTE
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
    starts[number - 1 :] = [given]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_whole(path) as draft:
        draft.write_text(json.dumps(starts))
    return given


def _read(path: Path) -> list[str | None]:
    try:
        starts: list[str | None] = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return starts


def save_checkpoint(stock: Callable[..., Any], trainer: Any, trial: Any, *args: Any) -> None:
    """`Trainer._save_checkpoint`; `stock(*args)` is transformers' own. All processes call it."""
    runtime, state = processes.current(), trainer.state
    run_dir = trainer._get_output_dir(trial=trial)
    final = os.path.join(run_dir, f"checkpoint-{state.global_step}")
    while True:
        leads = bool(trainer.args.should_save)
        published = _write(stock, trainer, Path(run_dir), Path(final), leads, *args)
        # Only now: one that has just come back to its peers has their state since the barrier.
        best = state.best_global_step == state.global_step
        if not best or _published_by_any(published):
            break
    if best:
        state.best_model_checkpoint = final
    if trainer.args.push_to_hub and runtime.live:
        trainer._push_from_checkpoint(final)
    if published:
        from transformers.trainer_utils import rotate_checkpoints

        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )


def _write(
    stock: Callable[..., Any], trainer: Any, run: Path, final: Path, leads: bool, *args: Any
) -> bool:
    """Have it written elsewhere, and named if this process `leads`. Returns whether it was."""
    state = trainer.state

    def write(draft: Path) -> Path:
        written = draft / final.name
        written.mkdir()  # also for a process that becomes the main one meanwhile, and writes the rest
        with _elsewhere(trainer, str(draft)):
            stock(*args)
        if state.best_model_checkpoint == str(written):  # Trainer has found it there
            state.best_model_checkpoint = str(final)
            state.save_to_json(str(written / "trainer_state.json"))
        return written

    # A process that has become the main one meanwhile has not written the model.
    return publish(final, run / FOLDER, trainer.args.process_index, write, lambda: leads)


@contextmanager
def _elsewhere(trainer: Any, folder: str) -> Iterator[None]:
    """Trainer's checkpoints go there, and nowhere else yet."""
    vars(trainer)["_get_output_dir"] = lambda trial=None: folder
    vars(trainer)["_push_from_checkpoint"] = lambda checkpoint_folder: None
    try:
        yield
    finally:
        del vars(trainer)["_get_output_dir"], vars(trainer)["_push_from_checkpoint"]


def _published_by_any(published: bool) -> bool:
    """Whether one of the participants has published it; in a past that is run through, one had."""
    runtime = processes.current()
    answers: list[Any] = [None] * runtime.num_processes
    world.all_gather_object(answers, published)
    others = [
        said for index, said in enumerate(answers) if index != runtime.process_index and said != []
    ]
    if not runtime.live and not others:
        return True  # what they said then is not known
    return any(said is True for said in answers)
