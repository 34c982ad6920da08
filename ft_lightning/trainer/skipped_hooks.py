"""Hooks with `@rank_zero_only` that set something up, which this process has skipped.

Callbacks like ThroughputMonitor set themselves up in `on_train_start`, on rank zero only. Rank zero is
the leader, and may die. The next leader would use what it has never set up. So the hooks that were
skipped here, and only those, are called when this process becomes the leader: of each set-up that is
still in force (this fit, this epoch, this batch, this validation), in the order of Lightning.

The guard is told by its code object, since `rank_zero_only` returns one and the same function around
all that it guards. A hook that asks `trainer.is_global_zero` itself has run, and is not called again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

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
    """Those of one fit. The loop's thread."""

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
        module = trainer.lightning_module
        skipped, self._skipped = self._skipped, {}
        name = module._current_fx_name
        try:
            for hook in ENDS:
                if hook not in skipped:
                    continue
                named = {"stage": trainer.state.fn} if hook == "setup" else {}
                module._current_fx_name = hook
                for callback in trainer.callbacks:
                    _call(callback, hook, (trainer, module, *skipped[hook]), named)
                _call(module, hook, skipped[hook], named)
        finally:
            module._current_fx_name = name

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
