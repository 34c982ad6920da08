"""One process of a test: a script that searches for a batch size, with Accelerate's `find_executable_batch_size`.

    python tests/ft_accelerate/runtime/search_worker.py '{"log": "/dir", "runs_out": "forward", ...}'

Sizes above 8 run out of memory at the third batch.
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
    "runs_out": "forward",  # or "backward", "update"
    "seedable": True,
    # "bare", "model": which hears of it; before the first batch of each try. An error is no reason to try another size
    "evaluates_first": "",
    "epochs": 2,
    "samples": 128,
    # places to wait at: "step-<size>-<step>", of one replica with "-of-<replica>" behind it; "evaluates-<size>"
    "holds": [],
    "inject": {},
}
FITS = 8


class Memory:
    """What is left of it. At the place in the loop that `runs_out` names it may not be enough."""

    def __init__(self, runs_out: str) -> None:
        self._runs_out, self.too_small = runs_out, False

    def need(self, place: str) -> None:
        if self.too_small and place == self._runs_out:
            raise RuntimeError("CUDA out of memory.")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        ctx.memory = memory
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.memory.need("backward")
        return gradient, None


class Net(nn.Module):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.first, self.second, self.memory = nn.Linear(8, 16), nn.Linear(16, 3), memory
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.need("forward")
        hidden: torch.Tensor = InBackward.apply(self.first(x).relu(), self.memory)
        result: torch.Tensor = self.second(self.drop(hidden))
        return result


class Update(torch.optim.AdamW):
    def __init__(self, net: Net) -> None:
        super().__init__(net.parameters(), lr=0.01)
        self._memory = net.memory

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._memory.need("update")
        super().step(closure)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(samples, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (samples,), generator=generator))


def evaluate(accelerator: Any, model: Any, hears: Any, batches: Any, log: LoopLog) -> None:
    """As transformers' Trainer with `eval_on_start`, of which only the bare model hears."""
    hears.eval()
    try:
        for x, _ in accelerator.prepare(batches):
            accelerator.gather_for_metrics(model(x))
            log.at(f"evaluates-{batches.batch_size}")
    except RuntimeError as error:
        raise RuntimeError("an evaluation failed") from error


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import find_executable_batch_size, set_seed

    loading = DataLoaderConfiguration(use_seedable_sampler=options["seedable"])
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    log, memory = LoopLog(options, accelerator), Memory(options["runs_out"])
    set_seed(3)

    @find_executable_batch_size(starting_batch_size=12)
    def train(size: int) -> None:
        accelerator.free_memory()
        net = Net(memory)
        model, optimizer, batches = accelerator.prepare(
            net, Update(net), DataLoader(data(options["samples"]), size, shuffle=True)
        )
        if first := options["evaluates_first"]:
            hears = net if first == "bare" else model
            evaluate(accelerator, model, hears, DataLoader(data(32), size), log)
        step = 0
        for epoch in range(options["epochs"]):
            for index, (x, y) in enumerate(batches):
                for place in (f"step-{size}-{step}", f"step-{size}-{step}-of-{log.name}"):
                    log.at(place)
                model.train()
                memory.too_small = size > FITS and step == 2
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                log.step(
                    step=100 * size + step,
                    epoch=epoch,
                    index=index,
                    digest=digest(net.state_dict().items()),
                    lr=0,
                    ticks=0,
                    average="",
                    count=0,
                    rows=x[:, 0].tolist(),
                )
        draw = torch.rand(()).item()
        log.end(size=size, step=step, digest=digest(net.state_dict().items()), draw=draw)

    train()


if __name__ == "__main__":
    run_script(OPTIONS, run)
