"""python benchmarks/vote_fingerprint.py [--json FILE]

What a replica group's vote costs before it is sent: microseconds for the fingerprint of
hyperparameters and position in the run that travels with it (`ft_lightning/trainer/decisions.py`),
by number of optimizers and parameter groups, with constant hyperparameters and with a learning rate
that a scheduler changes in each step. Limit: at most 50 us for one optimizer with one group.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import arguments, report

CASES = {"1 x 1": (1, 1), "1 x 2": (1, 2), "3 x 100": (3, 100)}
CALLS, BLOCKS = 400, 7


def fitted(optimizers: int, groups: int) -> Any:
    """A Trainer after a step, whose optimizers have that many parameter groups each."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.parts = torch.nn.ModuleList(
                torch.nn.Linear(1, 1, bias=False) for _ in range(optimizers * groups)
            )

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers() if optimizers > 1 else [self.optimizers()]:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            parts = [{"params": part.parameters(), "lr": 1e-3} for part in self.parts]
            return [
                torch.optim.AdamW(parts[i * groups : (i + 1) * groups]) for i in range(optimizers)
            ]

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.zeros(4, 1))))
    return trainer


def measure(trainer: Any, *, changing: bool) -> float:
    """Microseconds a vote: the best block's mean."""
    from ft_lightning.trainer.decisions import Decisions

    decisions = Decisions(trainer)
    decisions.begin()
    blocks = []
    for _ in range(BLOCKS):
        spent = 0.0
        for call in range(CALLS):
            if changing:
                for known in trainer.optimizers:
                    for group in known.param_groups:
                        group["lr"] = 1e-3 / (call + 1)
            start = time.perf_counter()
            decisions.control(0)
            spent += time.perf_counter() - start
        blocks.append(spent / CALLS)
    decisions.release()
    return min(blocks) * 1e6


def main() -> None:
    options = arguments(__doc__.split("\n\n")[1]).parse_args()
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows, figures = [], {}
    for name, (optimizers, groups) in CASES.items():
        trainer = fitted(optimizers, groups)
        same, changing = measure(trainer, changing=False), measure(trainer, changing=True)
        figures[name] = {"same": same, "changing": changing}
        rows.append([name, f"{same:.1f}", f"{changing:.1f}", "50" if name == "1 x 1" else ""])
    columns = ["optimizers x groups", "same us", "changing us", "bar us"]
    report("A vote's fingerprint", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
