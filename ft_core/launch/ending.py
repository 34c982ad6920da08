"""How a process that trains ends where its script is not at fault: a line, and an exit code that says so.

| exit code | meaning |
|---|---|
| 0 | trained to the end |
| 69 | no lighthouse answers, within the connect timeout |
| 75 | another process of its replica group is gone; the cause is in that process |
| 79 | the training is over, or its script's next one has begun: nothing is left to do |
| 143 | it was told to end by SIGTERM (`ft_core.launch.sigterm`) |
| other | the script's own error |

A traceback would show the loop's own lines, and hide the sentence that helps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from ft_core.errors import GroupBroken, StepInDoubt
from ft_core.launch.rank_group import BROKEN_EXIT_CODE
from ft_core.launch.restarts import AWAY_EXIT_CODE
from ft_core.launch.supervisor import OVER_EXIT_CODE
from lighthouse.errors import LighthouseUnavailable, TrainingOver

CODES: dict[type[BaseException], int] = {
    LighthouseUnavailable: AWAY_EXIT_CODE,
    StepInDoubt: AWAY_EXIT_CODE,
    GroupBroken: BROKEN_EXIT_CODE,
    TrainingOver: OVER_EXIT_CODE,
}
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_with_a_line(whose: str) -> None:
    """From now on an error of `CODES` that nothing catches ends this process so; idempotent.

    At once, without what waits for the interpreter's end: it could need the lighthouse. `whose`: the
    package that speaks.
    """
    if not hasattr(sys.excepthook, "ft_core"):
        sys.excepthook = _ending(whose, sys.excepthook)


def _ending(whose: str, otherwise: _Hook) -> _Hook:
    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        code = next((code for each, code in CODES.items() if issubclass(kind, each)), None)
        if code is None:
            otherwise(kind, error, trace)
            return
        # Not `sys.stderr`: torch.distributed has put a buffer there, which it prints when this returns.
        print(f"{whose}: {error}", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        os._exit(code)

    hook.ft_core = True  # type: ignore[attr-defined]
    return hook
