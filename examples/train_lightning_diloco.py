"""DiLoCo with PyTorch Lightning: replica groups that may die, on links that may be slow.

    python examples/train_lightning_diloco.py --devices 2

starts two replica groups on this machine that communicate every 20 steps. Kill -9 one of the
processes: the other loses nothing, and the killed one comes back at an outer step. Streaming DiLoCo
hides its communication and sends 4 bits a parameter:

    python examples/train_lightning_diloco.py --devices 2 --fragments 2 --delay 3 --codec int4

On several machines, start a lighthouse and set TORCHFT_LIGHTHOUSE, REPLICA_GROUP_ID and
NUM_REPLICA_GROUPS for each process, as in examples/train_lightning.py. Model and data are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything

import ft_lightning

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_lightning import Digits, data, digest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1, help="replica groups on this machine")
    parser.add_argument("--accelerator", default="cpu", help="what Trainer takes")
    parser.add_argument("--max-steps", type=int, default=400, help="inner steps")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps in a window (H)")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0, help="inner steps to hide behind (tau)")
    parser.add_argument("--codec", choices=["int8", "int4", "fp8"])
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    args = parser.parse_args()

    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    model = Digits(args.step_delay)
    train, val = data(batch_size=32)
    trainer = Trainer(
        strategy=ft_lightning.FTDiLoCoStrategy(  # or strategy="ft_diloco", with its defaults
            sync_every=args.sync_every,
            outer_lr=args.outer_lr,
            outer_momentum=args.outer_momentum,
            fragments=args.fragments,
            fragment_sync_delay=args.delay,
            codec=args.codec,
        ),
        accelerator=args.accelerator,
        devices=args.devices,
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=args.progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, train, val)

    stats = trainer.strategy.algorithm.stats
    result = {
        "replica_group": os.environ.get("REPLICA_GROUP_ID", "0"),
        "step": trainer.global_step,
        "outer_steps": trainer.strategy.manager.current_step(),
        "bytes_sent": stats.bytes_sent,
        "val_accuracy": round(float(trainer.callback_metrics["val_accuracy"]), 3),
        "digest": digest(model),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
