"""`fabric.setup` with a scheduler, in each version of Lightning."""

from __future__ import annotations

import inspect
from typing import Any


def set_up(fabric: Any, net: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any]:
    """What `fabric.setup` makes of them. Lightning 2.5's takes no scheduler: ours are registered there."""
    if "scheduler" in inspect.signature(fabric.setup).parameters:
        model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    else:
        if hasattr(fabric.strategy, "register"):
            fabric.strategy.register("scheduler", scheduler)
        model, optimizer = fabric.setup(net, optimizer)
    return model, optimizer, scheduler
