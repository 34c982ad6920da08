"""Puts fault tolerance into Accelerate's classes, in place, and takes it out again.

In place, since scripts and libraries have imported these classes before, and Trainer makes its own
`Accelerator`. Each name that is replaced is looked at first: one that has moved is refused with a
sentence, rather than trained with unprotected. A process that is not told to be fault tolerant runs
Accelerate's own code through all of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import accelerate
from accelerate.utils import KwargsHandler

from ft_accelerate.plugin.options import FaultTolerancePlugin
from ft_accelerate.runtime import patches, torch_proxy
from ft_accelerate.runtime import process as processes
from ft_accelerate.transformers import trainer_hooks

_missing = object()

SEAMS: tuple[patches.Seam, ...] = (
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
"""All that we lean on by name."""

_undo: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Replace the names; idempotent. Raises RuntimeError if this Accelerate is not a known one."""
    if _undo:
        return
    check_seams()
    try:
        for owner, name, value in [*patches.replacements(), *torch_proxy.refusals()]:
            _replace(owner, name, value)
    except BaseException:
        uninstall()
        raise
    trainer_hooks.watch()


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
    patches.check_seams(SEAMS, accelerate, "accelerate 1.15")


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _missing)))
    setattr(owner, name, value)


@dataclass
class FaultToleranceKwargs(FaultTolerancePlugin, KwargsHandler):
    """
    Use this object in your [`~accelerate.Accelerator`] to train fault-tolerantly. Its fields are
    those of [`~ft_accelerate.FaultTolerancePlugin`]; what is not passed comes from the environment.

    Creating one is what makes `Accelerator` know it.

    Example:

    ```python
    from accelerate import Accelerator
    from ft_accelerate import FaultToleranceKwargs

    accelerator = Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])
    ```
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        install()
