"""Where a Trainer is in its run: the loops' counters.

Lightning counts a batch in four stages (ready, started, processed, completed) while it works on it,
so raw counters say *where in the code* a Trainer is, too. A state may be asked for at two places:
at the boundary before the first batch of a step is fetched, and at the end of backward, when a
discarded step is tried again. What travels always has the form of the boundary.

Reads and writes attributes of Lightning 2.5 and 2.6 that are not public. `check_counters` says in one
sentence if they have moved.
"""

from __future__ import annotations

from typing import Any

BATCHES = "epoch_loop.batch_progress"
STEPS = "epoch_loop.automatic_optimization.optim_progress"
UPDATES = "epoch_loop.manual_optimization.optim_step_progress"
PARTS = ("total", "current")


def check_counters(trainer: Any) -> None:
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
        _ = trainer.fit_loop._can_stop_early
        _ = trainer._checkpoint_connector.dump_checkpoint, trainer.fit_loop._data_fetcher
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"this version of Lightning keeps its loop state in another way ({error!r}): use the "
            "versions that ft_lightning was tested with (2.5, 2.6)"
        ) from error


def capture_counters(trainer: Any, *, batches: int = 0) -> dict[str, Any]:
    """The fit loop's state as of the boundary at which the current step began. Plain values.

    `batches`: of the step under way, the last of which is computed now, or left out; 0 at the boundary.
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    # Data is placed by `Batches.jump`.
    state.get("state_dict", {}).pop("combined_loader", None)
    state[BATCHES]["is_last_batch"] = False
    if batches and not trainer.lightning_module.automatic_optimization:
        # By hand each batch counts as one that has stepped: rows have this number.
        state["epoch_loop.state_dict"]["_batches_that_stepped"] -= batches - 1
    now = state[BATCHES]["current"]
    computes = now["ready"] - now["processed"]  # 0: the last one is left out, and counts otherwise
    for part in PARTS if batches else ():
        counts = state[BATCHES][part]
        counts["ready"] -= batches
        counts["started"] -= batches - 1 + computes
        counts["processed"] -= batches - computes
        counts["completed"] -= batches - 1
        for steps in (state[STEPS]["optimizer"]["step"][part], state[UPDATES][part]):
            steps["ready"] = steps["completed"]
    return state


def rewind_counters(trainer: Any, batches: int) -> None:
    """Go back to the boundary at which the step under way began, of whose `batches` the last one was
    broken off."""
    trainer.fit_loop.load_state_dict(capture_counters(trainer, batches=batches))
    settle_counters(trainer)


def settle_counters(trainer: Any) -> None:
    """Make the loops go on from a captured state that they have loaded.

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


def epochs_done(trainer: Any) -> int:
    """Epochs done: what samplers are seeded with."""
    done: int = trainer.fit_loop.epoch_progress.current.processed
    return done


def batches_done(trainer: Any) -> int:
    """Batches of this epoch before the one that is fetched next (at the boundary)."""
    done: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done
