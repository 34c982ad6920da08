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


def capture(trainer: Any, *, batches: int = 0) -> dict[str, Any]:
    """The fit loop's state as of the boundary at which the current step began. Plain values.

    `batches`: of the step under way, if the Trainer computes the last of them; 0 at the boundary.
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    # Data has ways of its own to its place (`Batches.jump`).
    state.get("state_dict", {}).pop("combined_loader", None)
    state[BATCHES]["is_last_batch"] = False
    for part in PARTS if batches else ():
        counts = state[BATCHES][part]
        counts["ready"] -= batches
        counts["started"] -= batches
        counts["processed"] -= batches - 1
        counts["completed"] -= batches - 1
        for steps in (state[STEPS]["optimizer"]["step"][part], state[UPDATES][part]):
            steps["ready"] = steps["completed"]
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


def place(trainer: Any) -> list[int]:
    """[epochs done, index in the epoch of the batch under way]."""
    return [epoch(trainer), batch_index(trainer)]
