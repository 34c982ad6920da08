"""Two callbacks of ours, while a fit lasts: for what happens to be no hook of a strategy.

Lightning calls callbacks that decide by an epoch's metrics (EarlyStopping and checkpoints) after
all others and after the module's own `on_train_epoch_end`; by their class. So ours are such, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ft_lightning.trainer.agreements import Rounds
from ft_lightning.trainer.decisions import Decisions


def searching(trainer: Any) -> bool:
    """Whether the learning rate finder trains, before the fit: with a callback of its own only."""
    return any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks)


def refuse_search(trainer: Any, *, outer: bool = False) -> None:
    """Several groups would find several rates; and `outer` steps begin once. Raises ValueError."""
    if any(
        cls.__name__ == "LearningRateFinder" for c in trainer.callbacks for cls in type(c).mro()
    ):
        raise ValueError(
            "LocalSGD and DiLoCo cannot find a learning rate, which is one of their inner steps: run "
            "the finder in a Trainer with devices=1 and another strategy first"
            if outer
            else "ft_ddp finds a learning rate with one replica group only, whose losses decide: run "
            "the finder in a Trainer with devices=1 first, and give the rate to all"
        )


def make(
    early_stopping: type, adopt_fetcher: Callable[[], None], rounds: Rounds, decisions: Decisions
) -> tuple[Any, Any]:
    """(one to be the first in the Trainer's list, one to be the last).

    `early_stopping`: the class of the Lightning that is used. `adopt_fetcher()`: the data fetcher
    of a new epoch is to be ours before it is used.
    """

    def first_epoch_start(self: Any, trainer: Any, module: Any) -> None:
        adopt_fetcher()

    def first_validation_epoch_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.meet()

    def first_validation_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.validation_metrics()

    def first_epoch_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.epoch_metrics()

    def last_validation_end(self: Any, trainer: Any, module: Any) -> None:
        decisions.validated()
        rounds.stop()

    def last_epoch_end(self: Any, trainer: Any, module: Any) -> None:
        rounds.stop()

    first = {
        "on_train_epoch_start": first_epoch_start,
        "on_validation_epoch_end": first_validation_epoch_end,
        "on_validation_end": first_validation_end,
        "on_train_epoch_end": first_epoch_end,
    }
    last = {
        "on_train_epoch_start": first_epoch_start,  # a callback may have made another fetcher
        "on_validation_end": last_validation_end,
        "on_train_epoch_end": last_epoch_end,
    }
    return _callback("First", early_stopping, first), _callback("Last", early_stopping, last)


def _callback(name: str, base: type, hooks: dict[str, Any]) -> Any:
    """Nothing of `base` but its class: no monitor, no state."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def state(self: Any) -> dict[str, Any]:
        return {}

    members = {
        "_ft_internal": True,
        "__init__": nothing,
        "monitor": None,
        "state_key": f"ft_lightning.{name}",
        "setup": nothing,
        "state_dict": state,
        "load_state_dict": nothing,
        "on_validation_end": nothing,
        "on_train_epoch_end": nothing,
        **hooks,
    }
    return type(f"_FT{name}", (base,), members)()
