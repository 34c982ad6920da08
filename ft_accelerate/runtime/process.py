"""The one runtime of this process, made when Accelerate first asks for the world's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ft_accelerate.options import (
    FaultTolerancePlugin,
    is_enabled,
    refuse_notebooks,
    switch_on,
    uses,
)
from ft_accelerate.runtime.runtime import Runtime
from ft_core.environment import ReplicaEnv, Supervision
from ft_core.launch.ending import end_with_a_line

_runtime: Runtime | None = None


def current() -> Runtime:
    """The runtime. Raises RuntimeError where fault tolerance is off."""
    if _runtime is None:
        raise RuntimeError("fault tolerance is not switched on in this process")
    return _runtime


def active() -> Runtime | None:
    """The runtime, or None where fault tolerance is off."""
    return _runtime


def while_active(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A `Seam.replace` for functions and methods of the frameworks.

    While fault tolerance is on it calls `function(runtime, original, *args, **kwargs)`, else the
    original.
    """

    def replace(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _runtime is None:
                return original(*args, **kwargs)
            return function(_runtime, original, *args, **kwargs)

        return wrapper

    return replace


@while_active
def unless_catching_up(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Nothing, if the peers have done this already: they have saved it, or it is in their state."""
    return original(*args, **kwargs) if runtime.live else None


@while_active
def is_main(runtime: Runtime, original: Any, self: Any) -> bool:
    """Whether this is the main process."""
    if leads := runtime.leader:
        runtime.own_writes.may_begin()
    return leads


@while_active
def is_main_to_log(runtime: Runtime, original: Any, self: Any) -> bool:
    """Whether this is the main process, asked by a script that is about to log lines and not to write a file."""
    return runtime.leader


@while_active
def saves(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
    """What only the main process writes: the next one does, if it dies in it. Nothing, where the peers have
    done this already."""
    if not runtime.live:
        return None
    return runtime.saves.save(lambda: original(*args, **kwargs))


def activate() -> Runtime | None:
    """Make the runtime if the environment asks for it; idempotent. Raises ValueError."""
    global _runtime
    if _runtime is None and is_enabled():
        _runtime = _make(FaultTolerancePlugin.from_env())
    return _runtime


def activate_with(plugin: FaultTolerancePlugin, *, state_exists: bool) -> Runtime:
    """Make the runtime with these options. Raises ValueError if it is too late for that."""
    global _runtime
    if _runtime is not None:
        if _runtime.options.to_env() != plugin.to_env():
            raise ValueError(
                "fault tolerance runs with other options than this FaultToleranceKwargs: pass the "
                "same to each Accelerator, or use the environment"
            )
        return _runtime
    if state_exists:
        raise ValueError(
            "PartialState was used before Accelerator(kwargs_handlers=[FaultToleranceKwargs()]): "
            "create the Accelerator first, or switch fault tolerance on in the configuration"
        )
    refuse_notebooks()
    switch_on()
    _runtime = _make(plugin)
    return _runtime


def forget() -> None:
    """Leave the quorum; the next Accelerator starts anew (tests)."""
    global _runtime
    if _runtime is not None:
        _runtime.close()
        _runtime = None


def _make(plugin: FaultTolerancePlugin) -> Runtime:
    end_with_a_line("ft_accelerate", str(plugin.replica_group_id))
    runtime = Runtime(plugin, ReplicaEnv.read(), Supervision.read())
    if uses("FSDP"):
        runtime.group_ranks.hold_shards()
    return runtime
