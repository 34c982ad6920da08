"""One process of a test: a GAN under plain Accelerate, with what scripts use besides a plain loop.

    python tests/ft_accelerate/runtime/breadth_worker.py '{"log": "/dir", ...}'

Two models and two optimizers, each with a backward and a step of its own in a batch; accumulation
over both; a part that is left out of every other forward, and a frozen one; a compiled module; a
stateful loader. No line of the loop knows of fault tolerance.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ft_accelerate.installed import run_script
from tests.ft_accelerate.runtime.loop_worker import LoopLog
from tests.harness.script import digest

OPTIONS: dict[str, Any] = {
    "log": "",
    "epochs": 3,
    "samples": 72,
    "accumulate": 1,
    "optional": False,  # a part that most batches leave out; no two replicas use it at once
    "compile": "",  # backend for the generator
    "dynamo": "",  # accelerate's own: backend for all models
    "stateful": False,
    "seedable": False,
    "norm": True,
    "start": 0,  # skip_first_batches in the first epoch
    "save": 0,
    "die_in_save": 0,  # the first main process is killed in a save from this step on, with a peer
    "step_delay_s": 0.0,
    "holds": [],
    "inject": {},  # {"<step>": index}: in the discriminator's update
    "inject_second": {},  # in the generator's
}


class Grave:
    """A registered object, in whose turn to be written a process may die."""

    def __init__(self) -> None:
        self.dies = False

    def state_dict(self) -> dict[str, Any]:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Generator(nn.Module):
    def __init__(self, *, norm: bool, optional: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU()
        )
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.sometimes = nn.Linear(16, 16) if optional else None
        self.last = nn.Linear(16, 8)

    def forward(self, noise: Tensor, batch: int = 0) -> Tensor:
        hidden = self.frozen(self.first(noise))
        if self.sometimes is not None and batch % 4 == 1:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden)


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def judged(scores: Tensor, truth: float) -> Tensor:
    wanted = torch.full_like(scores, truth)
    return nn.functional.binary_cross_entropy_with_logits(scores, wanted)


def loader(options: dict[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(options["samples"], 8, generator=generator)
    images[:, 0] = torch.arange(options["samples"]) / 64  # every sample can be told by its number
    return DataLoader(TensorDataset(images), 4, shuffle=True)


def injection(log: LoopLog, step: int) -> Any:
    """A gradient's hook: fails the step in the midst of its reductions."""

    def hook(gradient: Tensor) -> None:
        log.inject(step)

    return hook


def make(options: dict[str, Any]) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DataLoaderConfiguration

    return Accelerator(
        gradient_accumulation_steps=options["accumulate"],
        cpu=True,
        dynamo_backend=options["dynamo"] or None,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=options["stateful"], use_seedable_sampler=options["seedable"]
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=options["optional"])],
    )


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    from accelerate.utils import set_seed

    accelerator = make(options)
    set_seed(7)
    log = LoopLog(options, accelerator)
    second = LoopLog({**options, "inject": options["inject_second"]}, accelerator)
    draws = Generator(norm=options["norm"], optional=options["optional"])
    judges = discriminator()
    bare = {"g": draws, "d": judges}
    if options["compile"]:
        draws = torch.compile(draws, backend=options["compile"])
    g_steps = torch.optim.AdamW([p for p in draws.parameters() if p.requires_grad], lr=0.01)
    d_steps = torch.optim.SGD(judges.parameters(), lr=0.05, momentum=0.9)
    g_ticks = torch.optim.lr_scheduler.LambdaLR(g_steps, lambda n: 0.99**n)
    draws, judges, g_steps, d_steps, train, g_ticks = accelerator.prepare(
        draws, judges, g_steps, d_steps, loader(options), g_ticks
    )
    grave = Grave()
    accelerator.register_for_checkpointing(grave)
    first_life = "FT_RESTARTS" not in os.environ
    step = 0
    for epoch in range(options["epochs"]):
        batches = train
        if epoch == 0 and options["start"]:
            batches = accelerator.skip_first_batches(train, options["start"])
        for index, (x,) in enumerate(batches):
            time.sleep(options["step_delay_s"] if log.live else 0)
            log.at(f"step-{step}")
            with accelerator.accumulate(draws, judges):
                fake = draws(x[:, :4], index + accelerator.process_index)
                scores = judges(torch.cat([x, fake.detach()]))
                loss = judged(scores[: len(x)], 1.0) + judged(scores[len(x) :], 0.0)
                if accelerator.sync_gradients:
                    log.inject(step)
                accelerator.backward(loss)
                d_steps.step()
                d_steps.zero_grad()
                log.at(f"between-{step}")
                loss = judged(judges(fake), 1.0)
                if accelerator.sync_gradients and fake.requires_grad:
                    fake.register_hook(injection(second, step))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(draws.parameters(), 1.0)
                g_steps.step()
                g_ticks.step()
                g_steps.zero_grad()
                d_steps.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                state = {f"{n}.{k}": v for n, m in bare.items() for k, v in m.state_dict().items()}
                weights = {f"{n}.{k}": v for n, m in bare.items() for k, v in m.named_parameters()}
                log.step(
                    step=step,
                    epoch=epoch,
                    index=index,
                    digest=digest(state),
                    weights=digest(weights),
                    lr=g_ticks.get_last_lr()[0],
                    average=0,
                    count=0,
                    ticks=g_ticks.scheduler.last_epoch,
                    main=accelerator.is_main_process,
                    loader=str(train.state_dict()) if options["stateful"] else "",
                    batch=[round(float(v) * 64) for v in x[:, 0]],
                )
                if options["save"] and step % options["save"] == 0:
                    late = 0 < options["die_in_save"] <= step
                    grave.dies = late and first_life and log.leads_another
                    accelerator.save_state(f"{options['log']}/checkpoint_{step}")
    log.end(step=step, digest=digest(state), weights=digest(weights))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    run_script(OPTIONS, run)
