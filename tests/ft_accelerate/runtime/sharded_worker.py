"""One process of a test of FSDP2: a raw Accelerate loop.

    accelerate launch ... tests/ft_accelerate/runtime/sharded_worker.py '{"log": "/dir", ...}'

Without fault tolerance it is Accelerate's own HSDP, which it has on GPUs only: this script tells it that
its processes have some. The loop itself has no line that knows of fault tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ft_accelerate.installed import is_fault_tolerant, run_script
from tests.harness.script import Log, digest

OPTIONS: dict[str, Any] = {
    "log": "",
    "epochs": 2,
    "samples": 160,
    "batch_size": 4,
    "accumulate": 1,
    "precision": "no",
    "from_first": False,  # cpu_ram_efficient_loading: the other processes begin without weights
    "by_code": True,  # the plugins are given in the script, not in the config file
    "recomputes": False,  # activations in backward, from weights that stay gathered
    "shuffle": True,
    "saves": "",  # a folder: it saves the state there when the first epoch is over, in both forms
    "resumes": "",  # a state that was saved so
    "holds": [],  # "step-<step>": it waits there
    "dies": {},  # {"<process>": step}: one of them is killed there in its first life, no hot spare
}


FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 17), nn.Linear(17, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def made(options: dict[str, Any]) -> Any:
    from accelerate import Accelerator, ParallelismConfig, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if not is_fault_tolerant():
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugins: dict[str, Any] = {}
    if options["by_code"]:
        plugins = {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                state_dict_type=FORMS["FULL" in options["resumes"]],
                cpu_ram_efficient_loading=options["from_first"],
                activation_checkpointing=options["recomputes"],
                reshard_after_forward=not options["recomputes"],
            ),
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        }
    return Accelerator(
        gradient_accumulation_steps=options["accumulate"],
        mixed_precision=options["precision"],
        cpu=True,
        **plugins,
    )


def number_of(accelerator: Any) -> int:
    """Of this process among all, hot spares too."""
    from ft_accelerate.runtime import process as processes

    runtime = processes.active()
    return int(accelerator.process_index if runtime is None else runtime.group_ranks.number)


def is_spare() -> bool:
    """Whether other groups have all shares of the data: any group may be late at the start."""
    from ft_accelerate.runtime import process as processes

    runtime = processes.active()
    manager = None if runtime is None else runtime.manager
    part = None if manager is None else manager.in_quorum()
    return manager is not None and manager.spares > 0 and (part is None or part.share is None)


def is_first(path: Path) -> bool:
    """Whether no other process has made this file."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def shards(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.to_local() for name, p in model.state_dict().items()}


def save(accelerator: Any, folder: str) -> None:
    for form in FORMS:
        accelerator.state.fsdp_plugin.set_state_dict_type(form)
        accelerator.save_state(f"{folder}/{form}")


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    from accelerate.utils import set_seed

    accelerator = made(options)
    index = accelerator.process_index
    log = Log(options["log"], str(number_of(accelerator)), options["holds"])
    log.begin_life()
    set_seed(7)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(options["samples"], 8, generator=generator)
    y = torch.randint(0, 3, (options["samples"],), generator=generator)
    model = Net()
    if options["from_first"] and index % 2:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    data = DataLoader(TensorDataset(x, y), options["batch_size"], shuffle=options["shuffle"])
    test = DataLoader(TensorDataset(x[:50], y[:50]), 8)
    model, optimizer, data, test, scheduler = accelerator.prepare(
        model, optimizer, data, test, scheduler
    )
    step, right, norms = 0, [], []
    first = bool(options["resumes"])
    if first:
        accelerator.load_state(options["resumes"])
        step = len(data) // options["accumulate"]
    for epoch in range(first, options["epochs"]):
        model.train()
        for inputs, labels in data:
            log.at(f"step-{step}")
            if options["dies"].get(log.name) == step and not is_spare():
                log.die_once(is_first(log.folder / "died"))
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
        model.eval()
        hits = []
        for inputs, labels in test:
            with torch.no_grad():
                guesses = model(inputs).argmax(-1)
            hits.append(accelerator.gather_for_metrics((guesses == labels).float()))
        right.append(float(torch.cat(hits).sum()))
        if options["saves"] and epoch == 0:
            save(accelerator, options["saves"])
    mean = float(accelerator.reduce(loss.detach(), "mean"))
    names = accelerator.gather_for_metrics([f"p{index}"], use_gather_object=True)
    whole = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    log.end(
        weights=digest(shards(model)),
        moments=digest(
            (f"{n}.{key}", value.to_local())
            for n, each in optimizer.state_dict()["state"].items()
            for key, value in each.items()
            if hasattr(value, "to_local")
        ),
        sizes=[list(value.shape) for value in shards(model).values()],
        whole=digest(whole) if whole else "",
        step=step,
        right=right,
        norms=norms,
        loss=mean,
        names=names,
        lr=scheduler.get_last_lr()[0],
        processes=accelerator.num_processes,
        main=accelerator.is_main_process,
        sharded=type(next(model.parameters())).__name__,
    )
    accelerator.end_training()


if __name__ == "__main__":
    run_script(OPTIONS, run)
