"""Real fits, several in one process: what of Lightning's holds under a quorum, and as under `ddp`.

    REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=... \
        python tests/ft_lightning/trainer/scenarios.py '{"log": "/dir", "run": ["accumulate", ...]}'

Importing Lightning takes longer than all of these. Each scenario is a function of a `Place` that
returns what must be equal (over replicas, or to stock `ddp` in as many processes); it is written to
`<log>/<rank>.<scenario>`. With `"strategy": "ddp"` the same scenarios run under stock Lightning.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ft_lightning
from tests.harness.script import digest
from tests.harness.stock import leave_stock

SAMPLES, BATCH = 96, 4
BATCHES = SAMPLES // BATCH // 2  # of one of two replicas

Result = dict[str, Any]


@dataclass
class Place:
    """Where a scenario runs. `inject`: {step: rank}: this rank's attempt at this vote fails."""

    log: Path
    strategy: str
    rank: int
    inject: dict[int, int] = field(default_factory=dict)

    @property
    def tolerant(self) -> bool:
        return self.strategy == "ft_ddp"

    def trainer(self, *callbacks: Callback, unused: bool = False, **options: Any) -> Trainer:
        strategy: Any = options.pop("strategy", self.strategy)
        if not self.tolerant and unused:
            strategy = "ddp_find_unused_parameters_true"
        known: dict[str, Any] = {
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            **options,
        }
        return Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=1 if self.tolerant else int(os.environ["WORLD_SIZE"]),
            callbacks=list(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **known,
        )


def counted(step: Callable[..., Any]) -> Callable[..., Any]:
    """A `training_step` that notes the batch it runs on; not again if a subclass's calls it."""

    @functools.wraps(step)
    def training_step(self: Net, batch: Any, batch_idx: int) -> Any:
        if not self.inside:
            self.runs.append((self.trainer.current_epoch, batch_idx))
        before, self.inside = self.inside, True
        try:
            return step(self, batch, batch_idx)
        finally:
            self.inside = before

    return training_step


class Net(LightningModule):
    """Classifies noise. Reports an error for `place.inject`, once each."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "training_step" in vars(cls):
            cls.training_step = counted(cls.training_step)  # type: ignore[method-assign]

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.runs: list[tuple[int, int]] = []
        self.inside = False
        self.place = place
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.votes = 0
        self.events: list[str] = []

    def on_train_start(self) -> None:
        if self.place.tolerant:
            telemetry = self.trainer.strategy.manager.telemetry
            telemetry.add_sink(lambda event: self.events.append(event.kind))

    def inject_at_votes(self) -> None:
        """Fail at the votes themselves, in place of the beginning of `training_step`."""
        if self.place.tolerant:
            self.trainer.strategy.manager.register_vote_check(self.inject)

    def inject(self) -> None:
        """Call once a vote, before it."""
        if not self.place.tolerant:
            return
        manager = self.trainer.strategy.manager
        step = manager.current_step()
        if self.place.inject.get(step) == self.place.rank:
            del self.place.inject[step]
            manager.report_error(RuntimeError("injected"))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @counted
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inject()
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Trace(Callback):
    """What must be equal after each batch; and how often user code ran."""

    def __init__(self) -> None:
        self.hooks: Counter[str] = Counter()
        self.digests: list[str] = []
        self.lrs: list[float] = []
        self.steps: list[int] = []
        self.logged: list[float] = []
        self.participants: set[int] = set()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.digests.append(digest(module.state_dict()))
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.steps.append(trainer.global_step)
        self.participants.add(getattr(trainer.strategy, "num_participants", 0))
        value = trainer.callback_metrics.get("train_step")
        if value is not None:
            self.logged.append(float(value))

    def on_train_batch_start(self, *_: Any) -> None:
        self.hooks["batch start"] += 1

    def on_before_backward(self, *_: Any) -> None:
        self.hooks["before backward"] += 1

    def on_after_backward(self, *_: Any) -> None:
        self.hooks["after backward"] += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.hooks["before optimizer step"] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.hooks["before zero_grad"] += 1

    def result(self, trainer: Trainer) -> Result:
        return {
            "runs": trainer.lightning_module.runs,
            "hooks": dict(self.hooks),
            "digests": self.digests,
            "lrs": self.lrs,
            "steps": self.steps,
            "logged": self.logged,
            "participants": sorted(self.participants),
            "epoch": trainer.current_epoch,
            "metrics": {k: float(v) for k, v in sorted(trainer.callback_metrics.items())},
        }


def data(samples: int = SAMPLES, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (samples,), generator=generator))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(data(), BATCH, shuffle=True), DataLoader(data(32, 5), 16)


def fit(trainer: Trainer, module: LightningModule, **options: Any) -> None:
    train, val = loaders()
    trainer.fit(module, train, val, **options)


# ---------------------------------------------------------------------- as stock does


def accumulate(place: Place) -> Result:
    """Windows, clipping, schedulers of each kind, early stopping, validation."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            kinds = torch.optim.lr_scheduler
            return [optimizer], [
                {"scheduler": kinds.StepLR(optimizer, 2, 0.9), "interval": "step"},
                {"scheduler": kinds.ExponentialLR(optimizer, 0.9), "interval": "epoch"},
                {
                    "scheduler": kinds.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0),
                    "monitor": "val",
                },
            ]

    trace = Trace()
    stopping = EarlyStopping("val", patience=2, min_delta=10.0)
    trainer = place.trainer(
        trace, stopping, max_epochs=9, accumulate_grad_batches=5, gradient_clip_val=0.5
    )
    fit(trainer, Scheduled(place))
    return {**trace.result(trainer), "stopped": stopping.stopped_epoch}


def bf16(place: Place) -> Result:
    trace = Trace()
    trainer = place.trainer(trace, precision="bf16-mixed")
    fit(trainer, Net(place))
    return trace.result(trainer)


def fp16(place: Place) -> Result:
    """With a loss scale that overflows at first: such steps are committed, and change nothing."""
    trace = Trace()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = place.trainer(trace, plugins=[plugin], gradient_clip_val=0.5)
    fit(trainer, Net(place))
    return {**trace.result(trainer), "scale": scaler.get_scale()}


class Gan(Net):
    """Two optimizers, a scheduler stepped by hand, toggling: three votes a batch.

    One for each backward, and one for what is reduced after the last of them.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.automatic_optimization = False
        self.generator = nn.Linear(4, 8)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.inject_at_votes()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        noise = batch[0][:, :4]
        self.toggle_optimizer(first)
        loss = self.net(self.generator(noise)).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.lr_schedulers().step()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            fake = self.net(self.generator(noise).detach()).square().mean()
            second.zero_grad()
            self.manual_backward(self.loss(batch) - 0.1 * fake)
            second.step()
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        second = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.5)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.97)]


def gan(place: Place) -> Result:
    trace = Trace()
    trainer = place.trainer(trace, unused=True)
    module = Gan(place)
    fit(trainer, module)
    assert all(p.requires_grad for p in module.parameters())
    return trace.result(trainer)


def every_second_step(place: Place) -> Result:
    """A user's `optimizer_step` that only computes gradients in every other batch."""

    class Overriding(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
            if batch_idx % 2:
                optimizer.step(closure=closure)
            else:
                closure()

    trace = Trace()
    trainer = place.trainer(trace)
    fit(trainer, Overriding(place))
    return trace.result(trainer)


def own_samplers(place: Place) -> Result:
    """A library's loaders divide their data by torch's sampler, which asks how many processes there are."""

    class Divides(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.val = (loader.dataset for loader in loaders())
            self.of_val: Any = DistributedSampler(self.val, shuffle=False)

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, BATCH, sampler=DistributedSampler(self.train, seed=4))

        def val_dataloader(self) -> Any:
            return DataLoader(self.val, 16, sampler=self.of_val)

    trace = Trace()
    trainer = place.trainer(trace)
    trainer.fit(Net(place), datamodule=Divides())
    return trace.result(trainer)


# ---------------------------------------------------------------------- better than stock


def nothing_on_one(place: Place) -> Result:
    """`training_step` returns None, on one replica, on another one, on both."""
    left_out = {2: (1,), 5: (0,), 8: (0, 1)}

    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if place.rank in left_out.get(batch_idx, ()) else loss

    trace = Trace()
    trainer = place.trainer(trace)
    fit(trainer, Skipping(place))
    return trace.result(trainer)


def scopes(place: Place) -> Result:
    """What the collective calls give, in a step and out of it."""
    seen: dict[str, Any] = {}

    class Calling(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            mine = torch.tensor([float(place.rank + 1), 2.0])
            strategy = self.trainer.strategy
            if batch_idx == 1:
                rows = self.all_gather(mine.requires_grad_())
                seen["gathered"] = rows.tolist()
                seen["gradients flow"] = rows.requires_grad
                rows = self.all_gather(mine, sync_grads=True)
                factors = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
                (rows * factors * (place.rank + 1)).sum().backward()
                seen["gradient"] = mine.grad.tolist()
                mine = mine.detach()
                for op in ("mean", "sum", "max", "min"):
                    seen[op] = strategy.reduce(mine.clone(), reduce_op=op).tolist()
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            mine = torch.tensor([float(place.rank + 1)])
            strategy = self.trainer.strategy
            seen["alone"] = [
                self.all_gather(mine).shape == (1, 1),
                float(strategy.reduce(mine.clone())) == place.rank + 1,
                strategy.broadcast(place.rank) == place.rank,
            ]
            strategy.barrier("nobody waits")

    trainer = place.trainer(max_epochs=1)
    fit(trainer, Calling(place))
    return {**seen, "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}}


def stops(place: Place) -> Result:
    """Wishes to stop that replicas have at different times, or for different reasons."""
    found: dict[str, Any] = {}

    class Wishing(Net):
        def __init__(self, where: str, who: int) -> None:
            super().__init__(place)
            self.where, self.who = where, who

        def wish(self, where: str, now: bool) -> None:
            if where == self.where and now and place.rank == self.who:
                self.trainer.should_stop = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.wish("step", batch_idx == 3)
            self.log("shard", float(place.rank), sync_dist=False, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.wish("batch end", batch_idx == 3)

        def on_validation_end(self) -> None:
            self.wish("validation", True)

    leader = 0
    cases = {
        "step": ("step", leader, []),
        "batch end": ("batch end", leader, []),
        "follower": ("step", 1, []),
        "local metric": (
            "",
            leader,
            [
                EarlyStopping(
                    "shard", stopping_threshold=0.5, mode="min", check_on_train_epoch_end=True
                )
            ],
        ),
        "clock": ("", leader, [Timer(duration={"seconds": 1e-6 if place.rank == 0 else 60.0})]),
        "over before": ("", leader, [Timer(duration={"seconds": 0.0})]),
    }
    for name, (where, who, callbacks) in cases.items():
        trace = Trace()
        trainer = place.trainer(trace, *callbacks, max_epochs=3)
        fit(trainer, Wishing(where, who))
        found[name] = [trainer.global_step, trainer.current_epoch, trace.digests[-1:]]
    return found


def clocks(place: Place) -> Result:
    """Validation by the clock, with clocks that differ: at the same steps everywhere. Lightning 2.5 has
    none."""
    if RequirementCache("lightning<2.6"):
        return {"at": None}
    at: list[int] = []

    class Timed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.03)
            return super().training_step(batch, batch_idx)

        def on_validation_end(self) -> None:
            at.append(self.trainer.global_step)

    trainer = place.trainer(
        val_check_interval={"seconds": 0.15 if place.rank == 0 else 0.05},
        check_val_every_n_epoch=1,
    )
    fit(trainer, Timed(place))
    return {"at": at}


def saves_by_the_clock(place: Place) -> Result:
    """A ModelCheckpoint with `train_time_interval`, with clocks that differ."""
    interval = timedelta(seconds=0.15 if place.rank == 0 else 0.05)
    saves = ModelCheckpoint(place.log / "timed", train_time_interval=interval)
    at: list[str] = []

    class Timed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.03)
            at.append(Path(saves.best_model_path).name)
            return super().training_step(batch, batch_idx)

    fit(place.trainer(saves, enable_checkpointing=True), Timed(place))
    at.append(Path(saves.best_model_path).name)
    return {"at": at, "files": sorted(p.name for p in (place.log / "timed").glob("*"))}


def plateau_by_step(place: Place) -> Result:
    """A plateau scheduler that looks at each replica's own loss, each step."""

    class Plateau(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("own", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
            config = {"scheduler": plateau, "monitor": "own", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    trace = Trace()
    trainer = place.trainer(trace)
    module = Plateau(place)
    fit(trainer, module)
    return {**trace.result(trainer), "heals": module.events.count("heal_done")}


def differing_rate(place: Place) -> Result:
    """One replica's learning rate goes wrong: it is never stepped with. That replica has trained for 1,000 s
    by its own Timer."""
    timer = Timer()

    class Changing(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if place.rank == 1 and self.trainer.global_step == 4 and not self.votes:
                self.votes = 1
                self.trainer.optimizers[0].param_groups[0]["lr"] = 123.0
                timer._start_time[RunningStage.TRAINING] = time.monotonic() - 1000

    trace = Trace()
    trainer = place.trainer(trace, timer)
    module = Changing(place)
    fit(trainer, module)
    heals = module.events.count("heal_done")
    return {
        **trace.result(trainer),
        "healed": heals == place.rank,
        "elapsed_s": timer.time_elapsed(),
    }


def leftovers(place: Place) -> Result:
    """What a fit leaves behind: nothing."""

    class Failing(Net):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("a user's error")

    def kept(trainer: Trainer) -> list[Any]:
        return [
            type(trainer),
            *map(type, trainer.callbacks),
            sorted(vars(trainer.fit_loop.epoch_loop)),
        ]

    environment, threads = dict(os.environ), set(threading.enumerate())
    sockets = _sockets()
    found: dict[str, Any] = {}
    for kind in (Net, Failing):
        trainer = place.trainer(EarlyStopping("val"), max_epochs=1)
        train, val = loaders()
        before, sampler = kept(trainer), type(train.batch_sampler)
        module = kind(place)
        with contextlib.suppress(RuntimeError):
            trainer.fit(module, train, val)
        assert kept(trainer) == before
        assert type(train.batch_sampler) is sampler
        assert trainer.strategy.model is module
        new = set(threading.enumerate()) - threads
        found[kind.__name__] = [
            sorted(t.name for t in new if t.is_alive()),
            len(_sockets() - sockets),
            sorted(set(os.environ) ^ set(environment)),
        ]
    return found


def _sockets() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the folder's own
    return {link for link in links if link.startswith("socket:")}


def refusals(place: Place) -> Result:
    """What cannot work is said in a sentence, before anything is trained."""

    class Lbfgs(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    said = {}
    finder = LearningRateFinder(num_training_steps=5)
    for name, module, callbacks in (("lbfgs", Lbfgs(place), []), ("finder", Net(place), [finder])):
        try:
            fit(place.trainer(*callbacks), module)
        except ValueError as error:
            said[name] = str(error)
    if place.rank == 0:
        with alone():
            local = ft_lightning.FTLocalSGDStrategy(sync_every=2)
            for name, callback in (("outer", finder), ("batch size", BatchSizeFinder())):
                strategy = local if name == "outer" else place.strategy
                try:
                    fit(place.trainer(callback, strategy=strategy), Net(place))
                except (ValueError, MisconfigurationException) as error:
                    said[name] = str(error)
    return said


class FullDisk(TorchCheckpointIO):
    """Fails from its second save on, until told otherwise."""

    def __init__(self) -> None:
        self.saves, self.works = 0, False

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saves += 1
        if self.saves > 1 and not self.works:
            Path(path).write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def failing_saves(place: Place) -> Result:
    """A disk that fills up ends nothing, and costs no file that was there."""
    folder = place.log / "full"
    disk = FullDisk()
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=1, filename="{step}")
    trace = Trace()
    trainer = place.trainer(trace, saving, plugins=[disk], enable_checkpointing=True)
    fit(trainer, Net(place))
    (place.log / f"full.{place.rank}").touch()
    while not (place.log / "full.0").exists() or not (place.log / "full.1").exists():
        time.sleep(0.01)
    files = sorted(path.name for path in folder.iterdir())
    return {**trace.result(trainer), "files": files}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """This process as the only replica group of another job."""
    groups, job = os.environ["NUM_REPLICA_GROUPS"], os.environ["FT_JOB_ID"]
    os.environ.update(NUM_REPLICA_GROUPS="1", FT_JOB_ID=f"{job} alone")
    try:
        yield
    finally:
        os.environ.update(NUM_REPLICA_GROUPS=groups, FT_JOB_ID=job)


def resume(place: Place) -> Result:
    """Two groups save; one of them goes on alone from there, as one group."""
    folder = place.log / "resume"
    saving = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
    trainer = place.trainer(saving, enable_checkpointing=True)
    fit(trainer, Net(place))
    saved = trainer.strategy.manager.current_step()
    if place.rank:
        return {}
    with alone():
        trace = Trace()
        saving = ModelCheckpoint(folder, save_last=True)
        trainer = place.trainer(trace, saving, enable_checkpointing=True, max_epochs=3)
        module = Net(place)
        fit(trainer, module, ckpt_path="last")
    manager = trainer.strategy.manager
    return {
        **trace.result(trainer),
        "from": saved,
        "to": manager.current_step(),
        "batches": manager.batches_committed(),
    }


def resume_within(place: Place) -> Result:
    """Two groups save within an epoch; one of them goes on alone, saves within that epoch, and goes on."""

    class Seeing(Net):
        def on_fit_start(self) -> None:
            self.seen: dict[int, list[float]] = {0: [], 1: []}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen[self.trainer.current_epoch] += [float(x) for x in batch[0][:, 0]]
            return super().training_step(batch, batch_idx)

    def part(steps: int, every: int, **options: Any) -> Seeing:
        saving = ModelCheckpoint(place.log / "within", save_last=True, every_n_train_steps=every)
        trainer = place.trainer(saving, enable_checkpointing=True, max_steps=steps)
        module = Seeing(place)
        fit(trainer, module, **options)
        return module

    first = part(steps=7, every=5)
    seen = [first.seen[0][: 5 * BATCH]]  # of what was saved
    if place.rank:
        return {"seen": seen}
    with alone():
        second = part(steps=14, every=3, ckpt_path="last")
        third = part(steps=-1, every=1000, ckpt_path="last")
    seen += [second.seen[0][: (12 - 5) * BATCH], third.seen[0]]
    return {"seen": seen, "next": third.seen[1], "runs": [second.runs, third.runs]}


def around(place: Place) -> Result:
    """What is said before the first quorum; pickles; a fit without a step; a search before one."""
    logger = CSVLogger(place.log, "around", version=0)
    seen: dict[str, Any] = {}

    class Saying(Net):
        def on_fit_start(self) -> None:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                rank_zero_warn("said by one")
            seen["heard"] = len(heard)
            logger.experiment.log_metrics({"early": 1.0})
            logger.log_metrics({"early": 1.0})
            logger.save()

        def on_train_start(self) -> None:
            super().on_train_start()
            seen["wrote"] = os.path.exists(logger.log_dir)
            strategy = copy.deepcopy(self.trainer.strategy)
            seen["copied"] = [strategy.manager is None, type(strategy.model) is type(self)]

    trainer = place.trainer(max_epochs=1, logger=logger)
    fit(trainer, Saying(place))
    seen["loggers"] = type(logger) is CSVLogger
    trainer = place.trainer(max_epochs=1)
    fit(trainer, Net(place))
    twin = pickle.loads(pickle.dumps(trainer))
    seen["pickled"] = [twin.global_step, twin.strategy.manager is None]
    seen["manager"] = trainer.strategy.manager.current_step() > 0
    trainer = place.trainer(max_steps=0)
    fit(trainer, Net(place))
    seen["writer"] = trainer.is_global_zero
    path = place.log / f"no_step.{place.rank}.ckpt"
    trainer.save_checkpoint(path)
    seen["saved"] = path.exists()
    if place.rank == 0:
        with alone():
            finder = LearningRateFinder(num_training_steps=15)
            trainer = place.trainer(finder, max_epochs=1, default_root_dir=place.log)
            module = Net(place)
            module.lr = 0.01
            fit(trainer, module)
            seen["found"] = [module.lr != 0.01, trainer.global_step]
    return seen


SCENARIOS: dict[str, Callable[[Place], Result]] = {
    f.__name__: f
    for f in (
        accumulate,
        bf16,
        fp16,
        gan,
        every_second_step,
        own_samplers,
        nothing_on_one,
        scopes,
        stops,
        clocks,
        saves_by_the_clock,
        plateau_by_step,
        differing_rate,
        leftovers,
        refusals,
        failing_saves,
        resume,
        resume_within,
        around,
    )
}


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("REPLICA_GROUP_ID", "") or os.environ["LOCAL_RANK"])
    log = Path(options["log"])
    world = os.environ.get("WORLD_SIZE")
    for name in options["run"]:
        kind, _, variant = name.partition(":")
        seed_everything(11, verbose=False)
        inject = {int(k): v for k, v in options.get("inject", {}).get(name, {}).items()}
        place = Place(log, options.get("strategy", "ft_ddp"), rank, inject)
        os.environ["FT_JOB_ID"] = f"{log} {name}"
        if world is not None:
            os.environ["WORLD_SIZE"] = world  # stock Lightning takes it away
        if kind in SCENARIOS:
            result = SCENARIOS[kind](place)
        else:
            from tests.ft_lightning.trainer import (
                manual_scenarios,
                stream_scenarios,
                validation_scenarios,
            )

            if kind in manual_scenarios.SCENARIOS:
                result = manual_scenarios.SCENARIOS[kind](place)
            else:
                more = {**stream_scenarios.SCENARIOS, **validation_scenarios.SCENARIOS}
                result = more[kind](place, variant)
        missed = [step for step, who in place.inject.items() if who == rank]
        assert not (variant and missed), f"{name}: no vote on {missed}"
        (log / f"{rank}.{name}").write_text(json.dumps(result))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the harness asks before it gives up
    assert ft_lightning
    given = json.loads(sys.argv[1])
    main(given)
    if given.get("strategy") == "ddp":
        leave_stock()
