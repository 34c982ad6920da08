"""Fault-tolerant training for Accelerate and transformers' Trainer, by configuration alone.

    accelerate config                      # asks whether to train fault-tolerantly
    accelerate launch train.py             # the same script as before

or, in code, `Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])`.

Names are loaded when they are first used: importing the package loads neither torch nor
Accelerate.

Modules. Switching it on:

    options              what can be set, and the environment that carries it: the one reader of it
    values               texts of flags, files and the environment as values (pure)
    handler              the options as one of Accelerate's kwargs handlers
    config               the section of the YAML, and which groups a machine starts
    questions            those of `accelerate config`
    autoload             what the package does by being installed
    launch_hooks         Accelerate's commands learn the section, its flags and its questions
    launch               what `accelerate launch` becomes: groups under a supervisor
    run                  `python -m ft_accelerate.run`: one process of one group
    cli                  the command `ft-accelerate`
    cli_config           its `config`
    cli_env              its `env`
    cli_test             its `test`
    cli_test_script      what that trains

In Accelerate's place:

    install              puts it into Accelerate's classes; lists every name that is replaced
    patches              what stands in their place
    view                 what Accelerate's modules see as `torch`
    collectives          `torch.distributed` as its functions see it
    guard                refuses the script's own use of torch's world
    trackers             experiment trackers under a main process that may change
    checkpoints          `save_state`: whole or not there
    transformers_hooks   what Trainer does besides Accelerate
    transformers_saves   Trainer's checkpoints: whole or not there
    transformers_start   at which checkpoint a training starts, and one that comes back

A training process:

    processes            the one runtime of this process
    runtime              its steps and operations
    membership           its manager, whom it meets, the state that it gives and takes
    peers                how a process is made a member of a quorum, with its group
    prelude              operations before there is anything to train
    exchange             operations over the quorum, checked before data moves
    gate                 the manager as models see it; gradients survive a discard
    models               a model as `prepare` returns it
    loaders              passes over data, real ones and a ghost's
    course               where the script is, and how one that returns gets there (pure)
    state                what a process that comes back takes from its peers
    local_sgd            LocalSGD and DiLoCo
    meeting              one meeting of theirs: what each brings becomes the mean

Why they are cut as they are: docs/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_accelerate.handler import FaultToleranceKwargs
    from ft_accelerate.local_sgd import DiLoCo, LocalSGD
    from ft_accelerate.options import FaultTolerancePlugin

_HOMES = {
    "DiLoCo": "ft_accelerate.local_sgd",
    "FaultToleranceKwargs": "ft_accelerate.handler",
    "FaultTolerancePlugin": "ft_accelerate.options",
    "LocalSGD": "ft_accelerate.local_sgd",
}

__all__ = ["DiLoCo", "FaultToleranceKwargs", "FaultTolerancePlugin", "LocalSGD"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ft_accelerate' has no attribute {name!r}")
    import importlib

    if home != "ft_accelerate.options":
        # First, and alone: the package's entry point acts at the end of this import.
        importlib.import_module("accelerate")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
