"""Searches for a batch size: `find_executable_batch_size`, and Trainer's `auto_find_batch_size`.

The script's function is called with smaller and smaller sizes until one does not run out of memory. A process that
comes back begins with the first size. It has the memory for it, perhaps, and its peers have not the time: in its first
batch or operation it learns which try theirs is (`ScriptPosition.searches`), leaves the quorum, and what it raises from
then on lets its search go on to their size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate.utils.memory import should_reduce_batch_size

from ft_accelerate.runtime.process import activate
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import SizeGivenUp
from ft_accelerate.seams import around

ALONE = (
    "this process came back, and had no memory left for the batch size with which its peers train: it is no "
    "reason to try a smaller one"
)


@around
def search(original: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`find_executable_batch_size`. Without a function it calls itself again, with one."""
    return original(None if function is None else _counted(function), *args, **kwargs)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Each call is a try of the batch size that it gets."""
    ran_out = False

    @functools.wraps(function)
    def one_try(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran_out
        if (runtime := activate()) is None:
            return function(*args, **kwargs)
        position, again, ran_out = runtime.position, ran_out, False
        runtime.begin_try(again=again)
        position.tries = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            ran_out = should_reduce_batch_size(error)
            if ran_out and not runtime.live and not isinstance(error, SizeGivenUp):
                raise RuntimeError(ALONE) from error
            raise
        finally:
            position.tries = False

    return one_try


def begins_anew(runtime: Runtime, error: BaseException) -> bool:
    """Whether all have run out of memory, and begin anew with a smaller batch. Else what an update raises, which
    the script may catch, costs this process its state, since that may be half updated."""
    all_do = runtime.position.tries and isinstance(error, Exception)
    return all_do and should_reduce_batch_size(error)
