"""Puts fault tolerance into Accelerate's classes, in place, and takes it out again.

In place, since scripts and libraries have imported these classes before, and Trainer makes its own
`Accelerator`. Each name that is replaced is looked at first: one that has moved is refused with a
sentence, rather than trained with unprotected. A process that is not told to be fault tolerant runs
Accelerate's own code through all of this.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import accelerate

from ft_accelerate.runtime import forbid_world as guard
from ft_accelerate.runtime import patches
from ft_accelerate.runtime import process as processes
from ft_accelerate.transformers import trainer_hooks as transformers_hooks

_missing = object()

SEAMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("accelerate.state", "PartialState.__init__", ("self", "cpu")),
    ("accelerate.state", "PartialState.is_main_process", ()),
    ("accelerate.state", "PartialState.is_local_main_process", ()),
    ("accelerate.state", "PartialState.main_process_first", ("self",)),
    ("accelerate.state", "PartialState.local_main_process_first", ("self",)),
    ("accelerate.state", "torch", ()),
    ("accelerate.utils.operations", "torch", ()),
    ("accelerate.utils.operations", "_gpu_gather", ("tensor",)),
    ("accelerate.utils.random", "torch", ()),
    ("accelerate.accelerator", "torch", ()),
    ("accelerate.accelerator", "Accelerator.__init__", ("self", "kwargs_handlers")),
    ("accelerate.accelerator", "Accelerator.prepare_model", ("self", "model")),
    ("accelerate.accelerator", "Accelerator.prepare_data_loader", ("self", "data_loader")),
    ("accelerate.accelerator", "Accelerator.join_uneven_inputs", ("self", "joinables")),
    ("accelerate.accelerator", "Accelerator.pad_across_processes", ("self", "tensor")),
    ("accelerate.accelerator", "Accelerator.save_state", ("self", "output_dir")),
    ("accelerate.accelerator", "Accelerator.save_model", ("self", "model", "save_directory")),
    ("accelerate.accelerator", "Accelerator.save", ("self", "obj", "f")),
    ("accelerate.accelerator", "Accelerator.init_trackers", ()),
    ("accelerate.accelerator", "Accelerator.log", ()),
    ("accelerate.accelerator", "Accelerator.end_training", ("self",)),
    ("accelerate.local_sgd", "LocalSGD.__enter__", ("self",)),
    ("accelerate.local_sgd", "LocalSGD.__exit__", ("self",)),
    ("accelerate.local_sgd", "LocalSGD._sync_and_avg_model_params", ("self",)),
    ("accelerate.optimizer", "AcceleratedOptimizer.step", ("self", "closure")),
    ("accelerate.scheduler", "AcceleratedScheduler.step", ("self",)),
    ("accelerate.data_loader", "DataLoaderShard.__iter__", ("self",)),
    ("accelerate.data_loader", "DataLoaderShard.begin", ("self",)),
    ("accelerate.data_loader", "DataLoaderShard.end", ("self",)),
    ("accelerate.data_loader", "BatchSamplerShard.__iter__", ("self",)),
)
"""(module, name in it, parameters that it must have): all that we lean on by name."""

_undo: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Replace; twice is once. Raises RuntimeError if this Accelerate is not one that we know."""
    if _undo:
        return
    check_seams()
    try:
        for owner, name, value in [*patches.replacements(), *guard.replacements()]:
            _replace(owner, name, value)
    except BaseException:
        uninstall()
        raise
    transformers_hooks.watch()


def uninstall() -> None:
    """Give Accelerate its own code back, and leave the quorum."""
    processes.forget()
    while _undo:
        owner, name, before = _undo.pop()
        if before is _missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def check_seams() -> None:
    """Raise RuntimeError, in one sentence, if a name that we replace has moved."""
    for module, name, parameters in SEAMS:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = inspect.getattr_static(found, part)
        except (ImportError, AttributeError):
            raise RuntimeError(_moved(f"{module}.{name} is not there")) from None
        if not parameters:
            continue
        code: Callable[..., Any] = getattr(found, "__func__", found)
        try:
            known = inspect.signature(code).parameters
        except (TypeError, ValueError):
            raise RuntimeError(_moved(f"{module}.{name} is not a function")) from None
        lost = [p for p in parameters if p not in known]
        if lost:
            raise RuntimeError(_moved(f"{module}.{name} takes no {lost[0]!r}"))


def _moved(what: str) -> str:
    return (
        f"ft_accelerate does not know accelerate {accelerate.__version__} ({what}): install "
        "accelerate 1.15, or train without fault tolerance"
    )


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _missing)))
    setattr(owner, name, value)
