"""Where a Trainer is in its run: the loops' counters, in one canonical form.

Lightning counts a batch in four stages (ready, started, processed, completed) while it works on
it, so that raw counters say *where in the code* a Trainer is, too. A state may be asked for at two
places: at the boundary before the first batch of a step is fetched, and inside the optimizer's
step when a discarded one is tried again. What travels is always the form of the boundary.

Reads and writes loop attributes of Lightning 2.6 that are not public; `check` says in one sentence
if they have moved.
"""

from __future__ import annotations

from typing import Any

BATCHES = "epoch_loop.batch_progress"
STEPS = "epoch_loop.automatic_optimization.optim_progress"
UPDATES = "epoch_loop.manual_optimization.optim_step_progress"
PARTS = ("total", "current")


def check(trainer: Any) -> None:
    """Raise RuntimeError unless this Lightning keeps its counters where we look for them."""
    try:
        state = trainer.fit_loop.state_dict()
        for part in PARTS:
            _ = state[BATCHES][part]["ready"], state[BATCHES][part]["started"]
            _ = state[STEPS]["optimizer"]["step"][part]["ready"]
            _ = state[UPDATES][part]["ready"], state[UPDATES][part]["completed"]
            _ = state["epoch_progress"][part]["processed"]
        loop = trainer.fit_loop.epoch_loop
        _ = loop._batches_that_stepped, loop._should_accumulate, trainer.fit_loop._combined_loader
        _ = trainer._checkpoint_connector.dump_checkpoint, trainer.fit_loop._data_fetcher
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"this version of Lightning keeps its loop state in another way ({error!r}): use the "
            "versions that ft_lightning was tested with (2.6)"
        ) from error


def capture(trainer: Any, *, batches: int = 0, updates: int = 0) -> dict[str, Any]:
    """The fit loop's state as of the boundary at which the current step began. Plain values.

    `batches`: of the step under way, if the Trainer is inside the optimizer's step of the last of
    them; 0 at the boundary. `updates`: optimizer steps since then that are counted already
    (manual optimization).
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    # Data has ways of its own to its place (`Batches.jump`).
    state.get("state_dict", {}).pop("combined_loader", None)
    state[BATCHES]["is_last_batch"] = False
    for part in PARTS:
        counts = state[UPDATES][part]
        counts["completed"] -= updates
        counts["ready"] = counts["completed"]
    for part in PARTS if batches else ():
        counts = state[BATCHES][part]
        counts["ready"] -= batches
        counts["started"] -= batches
        counts["processed"] -= batches - 1
        counts["completed"] -= batches - 1
    return state


def settle(trainer: Any) -> None:
    """After `fit_loop.load_state_dict` of a captured state: make the loops go on from there.

    They would take it for a restart otherwise, and skip or repeat parts of an epoch.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    for loop in (
        fit_loop,
        epoch_loop,
        epoch_loop.val_loop,
        epoch_loop.automatic_optimization,
        epoch_loop.manual_optimization,
    ):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def uncount_attempt(trainer: Any) -> None:
    """The optimizer's step under way is discarded: leave no trace of it.

    Afterwards the counters of steps and of `zero_grad` are those of the step's boundary.
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        counts = loop.automatic_optimization.optim_progress.optimizer
        for tracker in (counts.zero_grad.total, counts.zero_grad.current):
            tracker.ready -= 1
            tracker.started -= 1
            tracker.completed -= 1
        steps = counts.step
    else:
        steps = loop.manual_optimization.optim_step_progress
        trainer.profiler.stop("optimizer_step")
    steps.total.ready -= 1
    steps.current.ready -= 1


def uncount_updates(trainer: Any, updates: int) -> None:
    """So many optimizer steps (manual optimization) are gone through once more."""
    steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    for tracker in (steps.total, steps.current):
        tracker.ready -= updates
        tracker.completed -= updates


def count_fetched(trainer: Any) -> bool:
    """Count a batch that was fetched for a step under way as the loop would have.

    Returns whether the step needs another one (gradients are accumulated).
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    progress.is_last_batch = trainer.fit_loop._data_fetcher.done
    progress.increment_ready()
    progress.increment_started()
    if not (trainer.lightning_module.automatic_optimization and loop._should_accumulate()):
        return False
    progress.increment_processed()
    progress.increment_completed()
    return True


def batch_index(trainer: Any) -> int:
    """Index in the epoch of the batch that was fetched last."""
    index: int = trainer.fit_loop.epoch_loop.batch_idx
    return index


def epoch(trainer: Any) -> int:
    """Epochs done: what samplers are seeded with."""
    done: int = trainer.fit_loop.epoch_progress.current.processed
    return done


def batches_done(trainer: Any) -> int:
    """Batches of this epoch before the one that is fetched next (at the boundary)."""
    done: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done
