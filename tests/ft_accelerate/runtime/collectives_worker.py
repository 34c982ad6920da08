"""A process that does each operation four times, while membership changes.

    python tests/ft_accelerate/runtime/collectives_worker.py '{"log": "/dir", "operations": ["gather", ...]}'

Processes 0 and 1 stay. The others, from 2 on, are in the last replica group (`group`, its number).
They leave before the first time, and ask to come back when the others have done it without waiting
for them; those do the second time when they ask. So they are away in both, heal in the third, and
are there in the fourth. `<log>/<index>.end` gets what each call returned.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ft_accelerate.installed import run_script
from tests.harness.script import Log
from tests.harness.waiting import until

VICTIM = 2
OPTIONS: dict[str, Any] = {
    "log": "",
    "operations": [],  # names of `operations`, one after the other
    "group": 2,  # the number of the last replica group, which leaves
    "stay_together": False,  # else the scripts part at the end
}


def make_tracker(folder: Path, index: int) -> Any:
    from accelerate.tracking import GeneralTracker, on_main_process

    class FileTracker(GeneralTracker):
        name = "file"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.path = folder / f"tracked.{index}"

        @property
        def tracker(self) -> Path:
            return self.path

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")

    return FileTracker()


def operations(accelerator: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    from accelerate import utils

    from ft_accelerate.runtime import process as processes
    from ft_accelerate.runtime import world_collectives as world

    mine = accelerator.process_index + 1

    def first() -> Any:
        with accelerator.main_process_first():
            return "in"

    def everyone() -> Any:
        accelerator.wait_for_everyone()
        return "out"

    def trigger() -> Any:
        if mine == 2:
            accelerator.set_trigger()
        return accelerator.check_trigger()

    def save() -> Any:
        accelerator.save_state(str(folder / "state"))
        accelerator.wait_for_everyone()
        return accelerator.save_iteration

    def load() -> Any:
        accelerator.load_state(str(folder / "state"))
        accelerator.wait_for_everyone()
        return "loaded"

    def log() -> Any:
        accelerator.log({"from": mine})
        accelerator.wait_for_everyone()
        return "logged"

    def metric(name: str) -> Any:
        import torchmetrics

        found = getattr(torchmetrics, name)()
        found.update(torch.full((mine,), float(mine)))
        return found.compute().tolist()

    def gather_embeddings() -> Any:
        own = torch.tensor([float(mine)], requires_grad=True)
        rows = world.gather_embeddings(processes.current(), None, own, with_grad=True)
        (mine * rows.sum()).backward()
        assert own.grad is not None
        return [rows.tolist(), own.grad.item()]

    return {
        "gather_embeddings": gather_embeddings,
        "torchmetrics_sum": lambda: metric("SumMetric"),
        "torchmetrics_cat": lambda: metric("CatMetric"),
        "gather": lambda: accelerator.gather(torch.tensor([float(mine)])).tolist(),
        "gather_nested": lambda: [
            t.tolist() for t in accelerator.gather([torch.tensor(mine), torch.tensor([mine > 1])])
        ],
        "gather_conjugate": lambda: torch.view_as_real(
            accelerator.gather(torch.tensor([mine * 1j]).conj()).resolve_conj()
        ).tolist(),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(torch.tensor([mine])).tolist(),
        "gather_object": lambda: utils.gather_object([f"p{mine}"]),
        "reduce_sum": lambda: accelerator.reduce(torch.tensor(float(mine))).item(),
        "reduce_imaginary": lambda: accelerator.reduce(torch.tensor(mine * 1j).conj().imag).item(),
        "reduce_int": lambda: accelerator.reduce(torch.tensor(mine)).item(),
        "reduce_mean": lambda: accelerator.reduce(torch.tensor(float(mine)), "mean").item(),
        "reduce_max": lambda: utils.reduce(torch.tensor(float(mine)), "max").item(),
        "broadcast": lambda: utils.broadcast(torch.tensor([mine]), from_process=VICTIM).tolist(),
        "broadcast_object_list": lambda: utils.broadcast_object_list([f"p{mine}"], VICTIM),
        "pad_across_processes": lambda: accelerator.gather(
            accelerator.pad_across_processes(torch.full((mine,), mine), pad_index=-1)
        ).tolist(),
        "check_trigger": trigger,
        "wait_for_everyone": everyone,
        "main_process_first": first,
        "save_state": save,
        "load_state": load,
        "log": log,
    }


def asks(events: Path) -> int:
    """How often the victim has asked for a quorum that did not take it at once."""
    return events.read_text().count("waiting for the step in progress to end")


def asks_again(events: Path, before: int) -> bool:
    return asks(events) > before


def all_there(paths: list[Path]) -> bool:
    return all(path.exists() for path in paths)


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from ft_accelerate.runtime import process as processes

    folder = Path(options["log"])
    events = folder / f"{options['group']}.events"
    accelerator = Accelerator(cpu=True)
    accelerator.log_with = [make_tracker(folder, accelerator.process_index)]
    accelerator.init_trackers("job")
    set_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    log = Log(folder, str(accelerator.process_index))
    log.ready()
    results: dict[str, list[Any]] = {}

    def train(batches: int) -> None:
        for number, (x,) in enumerate(loader):
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if number + 1 == batches:
                break

    train(2)
    calls = operations(accelerator, folder)
    for name in options["operations"]:
        marks = [folder / f"{name}.{index}" for index in (0, 1)]
        for turn in range(4):
            if accelerator.process_index >= VICTIM:
                if turn == 0:
                    processes.current().leave_for_now("the test lets it leave")
                    until(partial(all_there, marks))
            elif turn == 1:
                before = asks(events)
                marks[accelerator.process_index].touch()
                until(partial(asks_again, events, before))
            results.setdefault(name, []).append(calls[name]())
    train(2)

    def weight() -> list[float]:
        return accelerator.unwrap_model(model).weight.detach().flatten().tolist()

    end = {"results": results, "weight": weight(), "main": accelerator.is_main_process}
    # Now the scripts part, where gradients have gone without a header for two steps.
    if options["stay_together"]:
        pass
    elif accelerator.process_index == VICTIM:
        try:
            accelerator.gather(torch.ones(1))
        except RuntimeError as error:
            end["parted"] = str(error)
    else:
        train(1)
        end["parted"] = weight()
    log.end(**end)
    accelerator.end_training()


if __name__ == "__main__":
    run_script(OPTIONS, run)
