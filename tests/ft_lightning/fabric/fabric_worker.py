"""One process of a test: a Fabric loop with a log of everything that must agree.

    python tests/ft_lightning/fabric/fabric_worker.py '{"log": "/dir", "strategy": "ft_ddp", ...}'

Options (JSON): see `OPTIONS`. Each optimizer step appends one line to `<log>/<name>.steps`, the
end of the loop writes `<log>/<name>.end`. Written so that it runs under stock "ddp" as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import ft_lightning  # noqa: F401
from ft_core.errors import StepInDoubt
from ft_lightning.fabric import FTDDPStrategy
from tests.ft_lightning.fabric.scheduled import set_up
from tests.harness.following import Following
from tests.harness.script import Log, digest, options_of, process_name
from tests.harness.stock import leave_stock
from tests.harness.waiting import gone, until

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy": "ft_ddp",
    "strategy_options": None,  # given: by object
    "devices": 1,
    "num_nodes": 1,
    "epochs": 3,
    "range": False,  # the loop counts its epochs itself
    "samples": 76,
    "batch_size": 4,
    "accumulate": 1,
    "clip": None,
    "step_delay_s": 0.0,
    "holds": [],  # places to wait at, see `script.Log`: "step:<number>", "between:<number>",
    # "validation:<number>"; "trained": behind the loop, "exit": when Python shuts down
    "inject": {},  # {"<step>": replica index}: this replica reports an error once, in backward
    "critic": False,  # every second window has two updates: of a critic, then of the net
    "told_in_vote": {},  # {"<step>": rank}: this rank gets SIGTERM, and is killed when it has voted,
    "late": [],  # before these ranks vote
    "save_at": None,  # save after this step
    "load": False,  # start from what was saved
    "stop_at": None,  # end after this step
    "precision": None,
    "follows": False,  # the loop changes parameters itself, before each forward
    "draws": False,  # dropout, and a sampler without a generator of its own: from torch's
}


class Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        signal.signal(signal.SIGTERM, self.note_sigterm)
        if os.environ.get("LT_CLI_USED"):  # `fabric run` has the options, and launches
            self.fabric = Fabric()
        else:
            self.fabric = Fabric(
                accelerator="cpu",
                strategy=options["strategy"]
                if options["strategy_options"] is None
                else FTDDPStrategy(**options["strategy_options"]),
                devices=options["devices"],
                num_nodes=options["num_nodes"],
                precision=options["precision"],
            )
            self.fabric.launch()
        self.fabric.seed_everything(7, verbose=False)
        self.strategy: Any = self.fabric.strategy
        self.ours = options["strategy"] == "ft_ddp"
        self.log = Log(options["log"], process_name(), options["holds"])
        atexit.register(self.log.at, "exit")
        self.log.begin_life()
        self.counts = {"committed": 0}
        self.injected: set[str] = set()
        self.set_up()

    def set_up(self) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        if self.options["draws"]:
            net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
        net = self.whole = Following(net, net[3].weight) if self.options["follows"] else net
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
        self.net, self.optimizer, self.scheduler = set_up(self.fabric, net, optimizer, scheduler)
        critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        if self.options["critic"]:
            self.critic, self.critic_optimizer = self.fabric.setup(
                critic, torch.optim.AdamW(critic.parameters(), lr=0.02)
            )
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(self.options["samples"], 8, generator=generator)
        images[:, 0] = torch.arange(self.options["samples"]) / 64
        labels = torch.randint(0, 3, (self.options["samples"],), generator=generator)
        dataset = TensorDataset(images, labels)
        order: dict[str, Any] = {"shuffle": True}
        if self.options["draws"]:
            order = {
                "sampler": WeightedRandomSampler(torch.arange(len(dataset)) + 1.0, len(dataset))
            }
        self.loader, self.val = self.fabric.setup_dataloaders(
            DataLoader(dataset, self.options["batch_size"], **order), DataLoader(dataset, 50)
        )
        self.step, self.criticism, self.val_loss = 0, 0.0, 0.0
        self.val_ranks: list[int] = []
        if self.ours:
            self.strategy.register("counts", self.counts)
        if self.options["told_in_vote"]:
            self.watch_votes()
        state = {
            "net": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.strategy.progress if self.ours else {},
        }
        if self.options["critic"]:
            state |= {"critic": self.critic, "critic_optimizer": self.critic_optimizer}
        self.checkpoint = state
        if self.options["load"]:
            self.fabric.load(self.log.folder / "saved.ckpt", state)
            self.step = self.strategy.progress.step
        self.log.ready()

    def train(self) -> None:
        total = self.options["epochs"]
        follows = self.ours and not self.options["range"]
        for epoch in self.strategy.epochs(total) if follows else range(total):
            self.net.train()
            window: list[float] = []
            for number, (images, labels) in enumerate(self.loader):
                if self.ours:
                    self.step, number = self.strategy.current_step, self.strategy.batch_idx
                time.sleep(self.options["step_delay_s"])
                self.log.at(f"step:{self.step}")
                window += [round(float(x) * 64) for x in images[:, 0]]
                k = self.options["accumulate"]
                last = (number + 1) % k == 0
                if self.options["follows"]:
                    self.whole.follow()
                with self.fabric.no_backward_sync(self.net, enabled=not last):
                    logits = self.net(images)
                    loss = nn.functional.cross_entropy(logits, labels)
                    if last and self.options["critic"] and number // k % 2 == 0:
                        # As in a GAN: the critic's update first, then the net's, through both.
                        self.criticise(logits, labels)
                        loss = loss + 0.1 * self.critic(logits).mean()
                    if self.options["told_in_vote"].get(str(self.step)) == self.fabric.global_rank:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if last:
                        # Within the step: after a vote that says goodbye the others are alone.
                        mean = self.fabric.all_reduce(loss.detach().clone())
                        everyone = self.gather_ranks()
                        self.inject(loss)
                    self.fabric.backward(loss / k)
                if last:
                    self.finish_step(loss, mean, everyone, epoch, number, window)
                    window = []
                    if self.step == self.options["stop_at"]:
                        return
            self.validate()

    def validate(self) -> None:
        """Each process sees its shard; the metric is over all."""
        self.net.eval()
        with torch.no_grad():
            losses = [
                nn.functional.cross_entropy(self.net(x), y, reduction="sum") for x, y in self.val
            ]
        self.log.at(f"validation:{self.step}")
        self.val_loss = float(self.fabric.all_reduce(sum(losses), reduce_op="sum"))
        self.val_ranks = self.gather_ranks()
        self.fabric.barrier()

    def gather_ranks(self) -> list[int]:
        everyone = self.fabric.all_gather(torch.tensor(self.fabric.global_rank))
        return sorted(int(x) for x in everyone.flatten())

    def criticise(self, logits: Any, labels: Any) -> None:
        """The first update of a window that has two."""
        self.critic_optimizer.zero_grad()
        wanted = (labels == 0).float()[:, None]
        loss = (self.critic(logits.detach()) - wanted).square().mean()
        self.inject(loss)
        self.fabric.backward(loss)
        self.critic_optimizer.step()
        # Outside of a step: between two. Where it comes again, it is this process's value.
        mean = self.fabric.all_reduce(self.critic(logits.detach()).mean().detach())
        if self.count_update():
            self.criticism = float(mean)
            self.log.at(f"between:{self.step}")

    def count_update(self) -> bool:
        """Whether the update is made, and for the first time."""
        if self.ours and not self.strategy.last_step_committed:
            return False
        self.counts["committed"] += 1
        self.step += 1
        if self.ours:
            assert self.step == self.strategy.current_step
        return True

    def place(self) -> int:
        place: int = self.strategy.progress.places[0].batch
        return place

    def finish_step(
        self,
        loss: Any,
        mean: Any,
        everyone: list[int],
        epoch: int,
        number: int,
        window: list[float],
    ) -> None:
        if self.options["clip"]:
            self.fabric.clip_gradients(self.net, self.optimizer, max_norm=self.options["clip"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if not self.count_update():
            return
        line = {
            "step": self.step,
            "epoch": epoch if not self.ours else self.strategy.progress.places[0].epoch,
            "batch_idx": number,
            "digest": digest(self.net.module.state_dict()),
            "lr": self.optimizer.param_groups[0]["lr"],
            "loss": float(mean),
            "after": float(self.fabric.all_reduce(loss.detach().clone())),
            "criticism": self.criticism,
            "ranks": everyone,
            "count": self.counts["committed"],
            "batch": window,
            "leader": self.fabric.is_global_zero,
        }
        self.log.step(**line)
        if self.step == self.options["save_at"]:
            self.fabric.save(self.log.folder / "saved.ckpt", self.checkpoint)

    def note_sigterm(self, number: int, frame: Any) -> None:
        """Announce a SIGTERM. The strategy's own handler calls this one first."""
        self.log.append("told", signal=number)
        if signal.getsignal(number) == self.note_sigterm:  # the strategy's is not there
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def inject(self, loss: Any) -> None:
        """In the step that begins, when the backward pass from `loss` does."""
        step = str(self.step)
        if self.options["inject"].get(step) == self.fabric.global_rank and (
            step not in self.injected
        ):
            self.injected.add(step)
            error = RuntimeError("injected")
            loss.register_hook(lambda gradient: self.strategy.manager.report_error(error))

    def watch_votes(self) -> None:
        """See `told_in_vote`."""
        vote = self.strategy.manager.should_commit

        def should_commit(*args: Any, **options: Any) -> Any:
            of_round = options.get("no_update")
            rank = None if of_round else self.options["told_in_vote"].get(str(self.step))
            if rank == self.fabric.global_rank:
                with contextlib.suppress(StepInDoubt):
                    vote(timedelta(seconds=0.5), **options)
                os.kill(os.getpid(), signal.SIGKILL)
            if rank is not None and self.fabric.global_rank in self.options["late"]:
                other = int((self.log.folder / f"{rank}.started").read_text())
                until(lambda: gone(other), "the other rank to be killed")
            return vote(*args, **options)

        self.strategy.manager.should_commit = should_commit

    def end(self) -> None:
        end = {
            "step": self.step,
            "digest": digest(self.net.module.state_dict()),
            "world_size": self.fabric.world_size,
            "rank": self.fabric.global_rank,
            "epoch": self.strategy.progress.epoch if self.ours else self.options["epochs"],
            "val_loss": self.val_loss,
            "val_ranks": self.val_ranks,
        }
        self.log.end(**end)


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker = Worker(options_of(OPTIONS))
    worker.train()
    worker.log.at("trained")
    worker.end()
    if not worker.ours:
        leave_stock()
