"""Fault-tolerant training for PyTorch Lightning: `Trainer(strategy="ft_ddp")`.

    trainer = Trainer(strategy="ft_ddp", devices=4)     # the name is known where this is installed
    fabric = Fabric(strategy="ft_ddp", devices=4)

or by object, with options: `Trainer(strategy=ft_lightning.FTDDPStrategy(min_replicas=2))`.

Both of Lightning's namespaces are served: they have different classes, and a Trainer takes only its
own. `ft_lightning.FTDDPStrategy` is the one that fits what is imported already.

Modules. Being found and started:

    pytorch, pl            the strategies for `lightning.pytorch`, for `pytorch_lightning`
    fabric, fabric_lf      those for `lightning.fabric`, for `lightning_fabric`
    registration           makes the names known; `ft_lightning_autoload` does without an import
    __main__               `python -m ft_lightning`: runs a script with the names known
    options                the strategies' options, and the manager that they make
    scope                  who this process is among the replica groups (pure)
    slurm                  the same where SLURM has started it (pure)
    nominal                ranks as both frameworks' strategies answer them
    launcher               `devices=N`: replica groups under a supervisor

A Trainer's steps:

    strategy               Lightning's view of it all
    step                   begin, vote, and what follows a discard
    closures               what an optimizer is given to compute its loss with
    repeat                 a discarded step runs the user's `optimizer_step` again
    replay                 several optimizer steps in a batch that is begun again
    batches                the data at the right place, and the boundary before each batch
    position               the loops' counters in one form
    healing                a Trainer's state as a checkpoint that travels
    logged                 what `self.log` has gathered, put back after a discard
    ending                 SIGTERM while a quorum is waited for

What all agree on:

    scoping                what a Trainer is told about the world, how far calls reach
    collectives            reductions within a step
    decisions              what the first group decides for all, carried by votes
    fingerprint            a digest of hyperparameters, to see that they are equal
    rounds                 agreements between steps: at the ends of validations and epochs
    validation             validation divided over the groups
    shares                 who validates which batches, what is missing (pure)
    totals                 logged numbers, over all members
    metric_states          logged values and torchmetrics' states on their way to peers

Writing and showing:

    leader                 who writes, who says what rank zero says
    checkpoints            files that are whole or not there; pickles of a strategy
    hooks                  callbacks of ours, for what is no hook of a strategy
    counts                 how a fit is doing, in numbers
    reporting              the same for loggers, and as a picture

Fabric:

    fabric_strategy        the strategy
    fabric_scoping         what a Fabric is told about the world
    fabric_data            places in the data, loaders that go there
    fabric_step            begin, vote, and what follows a discard
    fabric_window          which updates of a batch count when it comes again
    fabric_rounds          `all_reduce`, `all_gather`, `barrier`: in a step and between steps

LocalSGD and DiLoCo:

    diloco                 the strategies for a Trainer
    diloco_arguments       their options
    diloco_driver          inner steps of a fit, heals between two of them
    diloco_state           what of a Trainer's state is equal in all groups
    diloco_fabric          the strategies for Fabric

Why they are cut as they are: docs/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_lightning.registration import install

if TYPE_CHECKING:
    from ft_lightning.pytorch import (
        FTDDPStrategy,
        FTDiLoCoStrategy,
        FTLocalSGDStrategy,
        FTMetricsCallback,
        FTTimeline,
    )

__all__ = [
    "FTDDPStrategy",
    "FTDiLoCoStrategy",
    "FTLocalSGDStrategy",
    "FTMetricsCallback",
    "FTTimeline",
]

# The purpose of this import, and all that it does: the name must be there before a Trainer is.
install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        from ft_lightning.registration import preferred_module

        return getattr(importlib.import_module(preferred_module()), name)
    raise AttributeError(f"module 'ft_lightning' has no attribute {name!r}")
