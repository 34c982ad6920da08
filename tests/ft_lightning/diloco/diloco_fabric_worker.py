"""One process of a test of "ft_diloco" under Fabric: a loop that logs its outer steps.

    python tests/ft_lightning/diloco/diloco_fabric_worker.py '{"log": "/dir", ...}'

Options (JSON): see `OPTIONS`. Each outer step appends one line to `<log>/<name>.steps`, the end of
the loop writes `<log>/<name>.end`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ft_lightning.fabric
from tests.ft_lightning.diloco.diloco_worker import hold_in_slots
from tests.ft_lightning.fabric.scheduled import set_up
from tests.harness.script import Log, digest, options_of, process_name

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy_options": {},
    "epochs": 4,
    "samples": 152,
    "step_delay_s": 0.0,
    "holds": [],  # places to wait at, see `script.Log`: "step:<inner step>"
    "die": None,  # [replica, inner step]: SIGKILL itself there, in its first life
    "load": None,  # a checkpoint to go on from
}


def data(samples: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(samples, 8, generator=generator)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return DataLoader(TensorDataset(images, labels), 4, shuffle=True)


def run(options: dict[str, Any]) -> None:
    strategy = ft_lightning.fabric.FTDiLoCoStrategy(**options["strategy_options"])
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=1)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    log = Log(options["log"], process_name(), options["holds"])
    log.begin_life()
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=7, gamma=0.9)
    model, optimizer = set_up(fabric, net, inner, scheduler)[:2]
    loader = fabric.setup_dataloaders(data(options["samples"]))
    saved = {
        "model": model,
        "optimizer": optimizer,
        "progress": strategy.progress,
        "outer": strategy.outer,
    }
    if options["load"]:
        fabric.load(options["load"], saved)
    if log.holds:
        hold_in_slots(strategy.manager, log)
    log.ready()

    def write() -> None:
        with strategy.global_parameters():
            line = {
                "outer_step": strategy.outer_step,
                "committed": strategy.manager.last_outcome().committed,
                "participants": strategy.manager.last_outcome().participants,
                "step": strategy.current_step,
                "place": [strategy.progress.places[0].epoch, strategy.batch_idx],
                "lr": inner.param_groups[0]["lr"],
                "digest": digest(net.state_dict()),
            }
        log.step(**line)

    seen = None
    trained = 0
    for _ in strategy.epochs(options["epochs"]):
        for images, labels in loader:
            step = strategy.current_step
            if strategy.manager.last_outcome() is not seen:
                seen = strategy.manager.last_outcome()
                write()
            time.sleep(options["step_delay_s"])
            log.at(f"step:{step}")
            log.die_once([fabric.global_rank, step] == options["die"])
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            trained += 1
        with strategy.global_parameters():
            fabric.save(log.folder / "saved.ckpt", saved)
    log.end(step=strategy.current_step, digest=digest(net.state_dict()), trained=trained)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(options_of(OPTIONS))
