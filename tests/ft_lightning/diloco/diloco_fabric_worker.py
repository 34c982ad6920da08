"""One process of a test of "ft_diloco" under Fabric: a loop that logs its outer steps.

    python tests/ft_lightning/diloco/diloco_fabric_worker.py '{"log": "/dir", ...}'

Options (JSON): see `OPTIONS`. Each outer step appends one line to `<log>/<name>.steps`, the end of
the loop writes `<log>/<name>.end`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ft_lightning.fabric
from tests.ft_lightning.trainer.worker import digest
from tests.harness.script import Holds

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy_options": {},
    "epochs": 4,
    "samples": 152,
    "step_delay_s": 0.0,
    "holds": [],  # places to wait at, see `script.Holds`: "step:<inner step>"
    "die": None,  # [replica, inner step]: SIGKILL itself there, in its first life
    "load": None,  # a checkpoint to go on from
}


def data(samples: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(samples, 8, generator=generator)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return DataLoader(TensorDataset(images, labels), 4, shuffle=True)


def run(options: dict[str, Any]) -> None:
    log, options = Path(options["log"]), {**OPTIONS, **options}
    strategy = ft_lightning.fabric.FTDiLoCoStrategy(**options["strategy_options"])
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=1)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    name = os.environ["REPLICA_GROUP_ID"]
    holds = Holds(log, name, options["holds"])
    holds.begin_life()
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=7, gamma=0.9)
    model, optimizer = fabric.setup(net, inner, scheduler=scheduler)[:2]
    loader = fabric.setup_dataloaders(data(options["samples"]))
    saved = {"model": model, "optimizer": optimizer, "progress": strategy.progress,
             "outer": strategy.outer}  # fmt: skip
    if options["load"]:
        fabric.load(options["load"], saved)
    with (log / f"{name}.ready").open("a") as file:
        file.write(f"{os.getpid()}\n")

    def write() -> None:
        with strategy.global_parameters():
            line = {
                "pid": os.getpid(),
                "outer_step": strategy.outer_step,
                "committed": strategy.manager.last_outcome().committed,
                "participants": strategy.manager.last_outcome().participants,
                "step": strategy.current_step,
                "place": [strategy.progress.places[0].epoch, strategy.progress.places[0].batch],
                "lr": inner.param_groups[0]["lr"],
                "digest": digest(net),
            }
        with (log / f"{name}.steps").open("a") as file:
            file.write(json.dumps(line) + "\n")

    seen = None
    trained = 0
    for _ in strategy.epochs(options["epochs"]):
        for images, labels in loader:
            step = strategy.current_step
            if strategy.manager.last_outcome() is not seen:
                seen = strategy.manager.last_outcome()
                write()
            time.sleep(options["step_delay_s"])
            holds.at(f"step:{step}")
            first_life = len((log / f"{name}.ready").read_text().split()) == 1
            if [fabric.global_rank, step] == options["die"] and first_life:
                os.kill(os.getpid(), signal.SIGKILL)
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            trained += 1
        with strategy.global_parameters():
            fabric.save(log / "saved.ckpt", saved)
    end = {"step": strategy.current_step, "digest": digest(net), "trained": trained}
    (log / f"{name}.end").write_text(json.dumps(end))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the harness asks before it gives up
    torch.set_num_threads(1)
    run(json.loads(sys.argv[1]))
