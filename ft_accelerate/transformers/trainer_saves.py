"""Trainer's checkpoints: whole or absent, whenever the process that writes them dies.

Trainer writes a checkpoint's files under its final name one after the other, and looks for the best
one by that name. Here each process writes to a folder of its own, as under `save_state`
(`ft_accelerate.runtime.checkpoint_folders`), and the main process gives it the name at the end. So whatever looks
for checkpoints sees whole ones only: `get_last_checkpoint`, `save_total_limit`,
`load_best_model_at_end`, a script's own code.

The best checkpoint is agreed on by all: if the main process dies before it is there, the next one
writes it. One that is not the best is just absent then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime.checkpoint_folders import FOLDER, publish
from ft_accelerate.runtime.world_collectives import Collectives


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
        if not best or _anybody(published):
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
    """Have it written elsewhere, and named if this process has `leads`; whether it was."""
    state = trainer.state

    def write(draft: Path) -> Path:
        written = draft / final.name
        written.mkdir()  # also for one that comes to lead in the midst of it, and writes the rest
        with _elsewhere(trainer, str(draft)):
            stock(*args)
        if state.best_model_checkpoint == str(written):  # Trainer has found it there
            state.best_model_checkpoint = str(final)
            state.save_to_json(str(written / "trainer_state.json"))
        return written

    # Who has come to lead in the midst of it has not written the model.
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


def _anybody(published: bool) -> bool:
    """Whether one of those who are there has; in a past that is run through, somebody had."""
    runtime = processes.current()
    answers: list[Any] = [None] * runtime.num_processes
    Collectives(processes.current).all_gather_object(answers, published)
    others = [
        said for index, said in enumerate(answers) if index != runtime.process_index and said != []
    ]
    if not runtime.live and not others:
        return True  # what they said then is not known
    return any(said is True for said in answers)
