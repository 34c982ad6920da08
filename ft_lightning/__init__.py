"""Fault-tolerant training for PyTorch Lightning: `Trainer(strategy="ft_ddp")`.

    trainer = Trainer(strategy="ft_ddp", devices=4)     # the name is known where this is installed
    fabric = Fabric(strategy="ft_ddp", devices=4)

or by object, with options: `Trainer(strategy=ft_lightning.FTDDPStrategy(min_replicas=2))`.

Both of Lightning's namespaces are served: `ft_lightning.pytorch` holds the strategy for
`lightning.pytorch`, `ft_lightning.pl` the one for `pytorch_lightning` (they are different classes
there, and a Trainer takes only its own), `ft_lightning.fabric` and `ft_lightning.fabric_lf` those
for Fabric. `ft_lightning.FTDDPStrategy` is the one that fits what
is imported already.

Map: scope, slurm, nominal (who is who) - strategy (Lightning's view) - step (quorum, vote, retry), replay (several
steps in a batch), logged (what retries must not log twice) - decisions, rounds, hooks (decided by
all, at a step and between batches) - collectives, in_group (how far calls reach) - leader, checkpoints (who
writes) - healing (a checkpoint that travels) - position (loop counters) - batches (data at the
right place) -
launcher (replica groups under a supervisor) - registration (names; `import ft_lightning`
registers, ft_lightning_autoload does without, `python -m ft_lightning` too) - fabric_strategy,
fabric_data (Fabric) - counts, reporting (progress bar, loggers, picture) - diloco (strategies
whose replica groups talk every so many steps), diloco_driver, diloco_state.
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
