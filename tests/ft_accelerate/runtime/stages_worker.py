"""One process of a test: a script with two models, each with an Accelerator: at once or one after the other.

    python tests/ft_accelerate/runtime/stages_worker.py '{"log": "/dir", ...}'

At once: two models are trained on the same batches, each by its own Accelerator. One after the
other: each trains a model on data of its own. "folds": one Accelerator trains one after the other, and
each process draws weights of its own. "seedable": so it does, and is seeded once. "evaluates": on data that
it prepares when the first epoch is over, in an order that is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ft_accelerate.installed import run_script
from tests.ft_accelerate.runtime.loop_worker import LoopLog
from tests.harness.script import digest

OPTIONS: dict[str, Any] = {
    "log": "",
    "one_by_one": False,
    "folds": False,
    "seedable": False,
    "evaluates": False,
    "ends": False,  # one by one: each ends its training
    "epochs": 3,
    "samples": 64,
    "holds": [],  # places to wait at: "step-<stage>-<step>", "evaluation-<epoch>-<index>"
    "inject": {},
}


def loader(options: dict[str, Any], stage: int) -> Any:
    generator = torch.Generator().manual_seed(stage)
    images = torch.randn(options["samples"], 8, generator=generator)
    labels = torch.randint(0, 3, (options["samples"],), generator=generator)
    return DataLoader(TensorDataset(images, labels), 4, shuffle=True)


def model(width: int) -> Any:
    net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(options: dict[str, Any], stage: int, widths: list[int], accelerators: list[Any]) -> None:
    log = LoopLog(options, accelerators[0])
    batches: Any = accelerators[0].prepare(loader(options, stage))
    bare = [model(width) for width in widths]
    pairs = [a.prepare(*each) for a, each in zip(accelerators, bare, strict=True)]
    step, held_out = 0, None
    for epoch in range(options["epochs"]):
        for index, (x, y) in enumerate(batches):
            log.at(f"step-{stage}-{step}")
            for accelerator, (net, optimizer) in zip(accelerators, pairs, strict=True):
                accelerator.backward(nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            parameters = [
                (f"{n}.{name}", value)
                for n, (net, _) in enumerate(bare)
                for name, value in net.state_dict().items()
            ]
            moments = [
                (f"{n}.{key}", state["exp_avg"])
                for n, (_, optimizer) in enumerate(bare)
                for key, state in enumerate(optimizer.state.values())
            ]
            log.step(
                step=step,
                epoch=epoch,
                index=index,
                stage=stage,
                digest=digest(parameters),
                lr=0,
                ticks=0,
                average=digest(moments),
                count=0,
                rows=x[:, 0].tolist(),
            )
        if options["evaluates"]:
            held_out = held_out or accelerators[0].prepare(loader(options, 3))
            for index, (x, _) in enumerate(held_out):
                log.at(f"evaluation-{epoch}-{index}")
                assert accelerators[0].gather(x).shape == (2 * len(x), 8)
    log.end(step=step, digest=digest(parameters))


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    if options["folds"]:
        seedable = options["seedable"]
        loading = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=loading)
        set_seed(3)
        for stage in (1, 2):
            if not seedable:
                torch.manual_seed(10 * stage + accelerator.process_index)
            train(options, stage, [16], [accelerator])
            accelerator.free_memory()
    elif options["one_by_one"]:
        for stage in (1, 2):
            accelerator = Accelerator(cpu=True)
            set_seed(stage)
            train(options, stage, [16], [accelerator])
            if options["ends"]:
                accelerator.end_training()
    else:
        both = [Accelerator(cpu=True), Accelerator(cpu=True)]
        set_seed(7)
        train(options, 1, [16, 16], both)


if __name__ == "__main__":
    run_script(OPTIONS, run)
