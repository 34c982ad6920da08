"""Where a Trainer is in its run: the loops' counters, in one canonical form.

Lightning counts a batch in four stages (ready, started, processed, completed) while it works on
it, so that raw counters say *where in the code* a Trainer is, too. A state may be asked for at two
places: at the boundary before a batch is fetched, and inside the optimizer's step when a discarded
step is tried again. What travels is always the form of the boundary; `capture` translates to it
and `settle` back.

Reads and writes loop attributes of Lightning 2.6 that are not public; `check` says in one sentence
if they have moved.
"""

from __future__ import annotations

from typing import Any

BATCHES = "epoch_loop.batch_progress"
STEPS = "epoch_loop.automatic_optimization.optim_progress"
PARTS = ("total", "current")


def check(trainer: Any) -> None:
    """Raise RuntimeError unless this Lightning keeps its counters where we look for them."""
    try:
        state = trainer.fit_loop.state_dict()
        for part in PARTS:
            _ = state[BATCHES][part]["ready"], state[BATCHES][part]["started"]
            _ = state[STEPS]["optimizer"]["step"][part]["ready"]
            _ = state["epoch_progress"][part]["processed"]
        loop = trainer.fit_loop.epoch_loop
        _ = loop._batches_that_stepped, loop._should_accumulate, trainer.fit_loop._combined_loader
        _ = trainer._checkpoint_connector.dump_checkpoint, trainer.fit_loop._data_fetcher
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"this version of Lightning keeps its loop state in another way ({error!r}): use the "
            "versions that ft_lightning was tested with (2.6)"
        ) from error


def capture(trainer: Any, *, in_step: bool) -> dict[str, Any]:
    """The fit loop's state as of the boundary before the current batch. Plain values.

    `in_step`: the Trainer is inside the optimizer's step of that batch.
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    # The state of a peer's data loader is that of the peer's shard.
    state.get("state_dict", {}).pop("combined_loader", None)
    state[BATCHES]["is_last_batch"] = False
    if in_step:
        for part in PARTS:
            state[BATCHES][part]["ready"] -= 1
            state[BATCHES][part]["started"] -= 1
            state[STEPS]["optimizer"]["step"][part]["ready"] -= 1
    return state


def settle(trainer: Any, *, in_step: bool) -> None:
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
    if in_step:
        epoch_loop.batch_progress.increment_ready()
        epoch_loop.batch_progress.increment_started()
        epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_ready()


def uncount_zero_grad(trainer: Any) -> None:
    """A step is tried again: its `zero_grad` is counted once."""
    counts = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
    for tracker in (counts.total, counts.current):
        tracker.ready -= 1
        tracker.started -= 1
        tracker.completed -= 1


def uncount_step(trainer: Any) -> None:
    """The optimizer step under way will not be done: Lightning's `completed += 1` nets to zero."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        counts = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        counts = loop.manual_optimization.optim_step_progress
    for tracker in (counts.total, counts.current):
        tracker.ready -= 1
        tracker.completed -= 1


def epoch(trainer: Any) -> int:
    """Epochs done: what samplers are seeded with."""
    done: int = trainer.fit_loop.epoch_progress.current.processed
    return done


def batches_done(trainer: Any) -> int:
    """Batches of this epoch before the one that is fetched next (at the boundary)."""
    done: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done
