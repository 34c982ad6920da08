"""One process of a test: a Fabric loop with a log of everything that must agree.

    python tests/lightning/fabric_worker.py '{"log": "/dir", "strategy": "ft_ddp", ...}'

Options (JSON): see `OPTIONS`. Each optimizer step appends one line to `<log>/<name>.steps`, the
end of the loop writes `<log>/<name>.end`. Written so that it runs under stock "ddp" as well.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ft_lightning  # noqa: F401
from tests.lightning.worker import digest
from tests.stock import leave_stock

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy": "ft_ddp",
    "devices": 1,
    "epochs": 3,
    "samples": 76,
    "batch_size": 4,
    "accumulate": 1,
    "clip": None,
    "step_delay_s": 0.0,
    "hold": None,  # before this step wait until the file <log>/go is there
    "inject": {},  # {"<step>": replica index}: this replica reports an error once
    "save_at": None,  # save after this step
    "load": False,  # start from what was saved
    "stop_at": None,  # end after this step
    "precision": None,
}


class Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.log = Path(options["log"])
        self.fabric = Fabric(
            accelerator="cpu",
            strategy=options["strategy"],
            devices=options["devices"],
            precision=options["precision"],
        )
        self.fabric.launch()
        self.fabric.seed_everything(7, verbose=False)
        self.strategy: Any = self.fabric.strategy
        self.ours = options["strategy"] == "ft_ddp"
        self.name = os.environ.get("REPLICA_GROUP_ID") or os.environ.get("LOCAL_RANK", "0")
        self.counts = {"committed": 0}
        self.injected: set[str] = set()
        self.set_up()

    def set_up(self) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
        self.net, self.optimizer, self.scheduler = self.fabric.setup(
            net, optimizer, scheduler=scheduler
        )
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(self.options["samples"], 8, generator=generator)
        images[:, 0] = torch.arange(self.options["samples"]) / 64
        labels = torch.randint(0, 3, (self.options["samples"],), generator=generator)
        dataset = TensorDataset(images, labels)
        self.loader, self.val = self.fabric.setup_dataloaders(
            DataLoader(dataset, self.options["batch_size"], shuffle=True), DataLoader(dataset, 50)
        )
        self.step = 0
        if self.ours:
            self.strategy.register("counts", self.counts)
        state = {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler,
                 "progress": self.strategy.progress if self.ours else {}}  # fmt: skip
        self.checkpoint = state
        if self.options["load"]:
            self.fabric.load(self.log / "saved.ckpt", state)
            self.step = self.strategy.progress.step
        with (self.log / f"{self.name}.ready").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def train(self) -> None:
        total = self.options["epochs"]
        for epoch in self.strategy.epochs(total) if self.ours else range(total):
            self.net.train()
            window: list[float] = []
            for number, (images, labels) in enumerate(self.loader):
                if self.ours:
                    self.step, number = self.strategy.current_step, self.place() - 1
                self.disturb()
                window += [round(float(x) * 64) for x in images[:, 0]]
                k = self.options["accumulate"]
                last = (number + 1) % k == 0
                with self.fabric.no_backward_sync(self.net, enabled=not last):
                    loss = nn.functional.cross_entropy(self.net(images), labels)
                    self.fabric.backward(loss / k)
                if last:
                    self.finish_step(loss, epoch, number, window)
                    window = []
                    if self.step == self.options["stop_at"]:
                        return
            self.net.eval()
            with torch.no_grad():
                losses = [
                    nn.functional.cross_entropy(self.net(x), y, reduction="sum")
                    for x, y in self.val
                ]
            self.val_loss = float(sum(losses))

    def place(self) -> int:
        place: int = self.strategy.progress.places[0].batch
        return place

    def finish_step(self, loss: Any, epoch: int, number: int, window: list[float]) -> None:
        mean = self.fabric.all_reduce(loss.detach().clone())
        everyone = self.fabric.all_gather(torch.tensor(self.fabric.global_rank))
        if self.options["clip"]:
            self.fabric.clip_gradients(self.net, self.optimizer, max_norm=self.options["clip"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.ours and not self.strategy.last_step_committed:
            return
        self.counts["committed"] += 1
        self.step += 1
        if self.ours:
            assert self.step == self.strategy.current_step
        line = {
            "pid": os.getpid(),
            "step": self.step,
            "epoch": epoch if not self.ours else self.strategy.progress.places[0].epoch,
            "batch_idx": number,
            "digest": digest(self.net.module),
            "lr": self.optimizer.param_groups[0]["lr"],
            "loss": float(mean),
            "ranks": sorted(int(x) for x in everyone.flatten()),
            "count": self.counts["committed"],
            "batch": window,
            "leader": self.fabric.is_global_zero,
        }
        with (self.log / f"{self.name}.steps").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.step == self.options["save_at"]:
            self.fabric.save(self.log / "saved.ckpt", self.checkpoint)

    def disturb(self) -> None:
        time.sleep(self.options["step_delay_s"])
        while self.step == self.options["hold"] and not (self.log / "go").exists():
            time.sleep(0.02)
        step = str(self.step)
        if self.options["inject"].get(step) == self.fabric.global_rank and (
            step not in self.injected
        ):
            self.injected.add(step)
            self.strategy.manager.report_error(RuntimeError("injected"))

    def end(self) -> None:
        end = {
            "step": self.step,
            "digest": digest(self.net.module),
            "world_size": self.fabric.world_size,
            "rank": self.fabric.global_rank,
            "epoch": self.strategy.progress.epoch if self.ours else self.options["epochs"],
        }
        (self.log / f"{self.name}.end").write_text(json.dumps(end))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the harness asks before it gives up
    torch.set_num_threads(1)
    worker = Worker({**OPTIONS, **json.loads(sys.argv[1])})
    worker.train()
    worker.end()
    if not worker.ours:
        leave_stock()
