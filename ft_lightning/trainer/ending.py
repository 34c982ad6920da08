"""SIGTERM while a Trainer waits for its quorum: there is no step to finish, so the fit ends.

Elsewhere Lightning notes the signal, and the step under way is the last one (`step.py`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ft_core.launch.sigterm import Sigterm

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class EndingMixin(_Base):
    """Part of a strategy: looks after SIGTERM from the beginning of a fit's training on."""

    _driver: Any
    _manager: Any
    _sigterm: Sigterm | None = None

    def on_train_start(self) -> None:
        super().on_train_start()
        self._sigterm = _Ending(self)
        self._sigterm.watch()  # calls Lightning's, which is there by now, first

    def teardown(self) -> None:
        if self._sigterm is not None:
            self._sigterm.unwatch()
            self._sigterm = None
        super().teardown()

    def _awaits_quorum(self) -> bool:
        """Whether the loop waits for peers. In a signal handler of its thread: takes no lock."""
        asks = getattr(self._driver, "waits", False)
        return asks and self._manager is not None and not self._manager.in_quorum()

    def _leave(self) -> None:
        """Raise what ends a fit on SIGTERM."""
        raise NotImplementedError


class _Ending(Sigterm):
    """Ends the fit instead of the process."""

    def __init__(self, strategy: EndingMixin) -> None:
        super().__init__(strategy._awaits_quorum)
        self._strategy = weakref.ref(strategy)

    def end(self) -> None:
        strategy = self._strategy()
        if strategy is not None:  # else nothing of ours waits
            strategy._leave()
