"""A discarded step under automatic optimization: the user's `optimizer_step` runs again as a whole.

What it does besides the update, such as calling the closure by itself or changing gradients before
`optimizer.step()`, belongs to each attempt. So a discarded step is left by an exception that passes
the user's hook, and the loop that calls the hook calls it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ft_lightning.trainer import loop_counters as position
from ft_lightning.trainer.batches import adopt, release
from ft_lightning.trainer.replay import StepDiscarded

Window = list[tuple[Any, ...]]
"""Arguments of `training_step`, for each batch of a step."""


class Repeating:
    """Lightning's automatic optimization, until a step is committed. The loop's thread."""

    def __init__(
        self,
        trainer: Any,
        again: Callable[[Callable[[Window], None]], tuple[bool, Window]],
    ) -> None:
        """`again(earlier)`: begins a discarded step anew, and calls `earlier(window)`; returns
        whether this group healed to another place, and the window."""
        self._trainer, self._again = trainer, again
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        adopt(self._loop, _until_committed(self))

    def release(self) -> None:
        """Give the loop its own class back."""
        release(self._loop)

    def run(self, hook: Callable[[int, Any], None], batch_idx: int, closure: Any) -> None:
        """`hook(batch_idx, closure)`: the user's `optimizer_step`, on these."""
        module, own = self._trainer.lightning_module, closure
        name = module._current_fx_name
        while True:
            try:
                hook(batch_idx, closure)
            except StepDiscarded:
                module._current_fx_name = name
            else:
                own._result = closure._result  # what the loop reads
                return
            healed, window = self._again(self._earlier)
            if healed:
                batch_idx = position.batch_index(self._trainer)
                closure = self._closure(window[-1], batch_idx)

    def _earlier(self, window: Window) -> None:
        """Compute the gradients of the window's batches before its last."""
        strategy = self._trainer.strategy
        first = position.batch_index(self._trainer) - len(window) + 1
        for batch_idx, args in enumerate(window[:-1], first):
            closure = self._closure(args, batch_idx)
            if (batch_idx + 1) % self._trainer.accumulate_grad_batches:
                with strategy.block_backward_sync():
                    closure()
            else:
                closure()  # the user left out its update: its gradients travelled

    def _closure(self, args: tuple[Any, ...], batch_idx: int) -> Any:
        """Lightning's own: forward, zero_grad if the window's first, backward."""
        optimizer = self._trainer.optimizers[0]
        return self._loop._make_closure(OrderedDict(enumerate(args)), optimizer, batch_idx)


def _until_committed(repeating: Repeating) -> Callable[[Any], dict[str, Any]]:
    """Lightning's loop, with each optimizer's step repeated by `repeating`."""

    def methods(cls: Any) -> dict[str, Any]:
        def _optimizer_step(self: Any, batch_idx: int, closure: Any) -> None:
            repeating.run(lambda *args: cls._optimizer_step(self, *args), batch_idx, closure)

        return {"_optimizer_step": _optimizer_step}

    return methods
