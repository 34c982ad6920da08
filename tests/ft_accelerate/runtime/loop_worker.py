"""One process of a test: a raw Accelerate loop, with a log of everything that must agree.

    python tests/ft_accelerate/runtime/loop_worker.py '{"log": "/dir", ...}'

The loop itself has no line that knows of fault tolerance. Each optimizer step appends one line to
`<log>/<index>.steps`, the end writes `<log>/<index>.end`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from tests.ft_accelerate.installed import is_fault_tolerant, run_script
from tests.harness.following import Following
from tests.harness.script import Log, digest, fail_once, flip_bit

OPTIONS: dict[str, Any] = {
    "log": "",
    "epochs": 2,
    "told": False,  # epochs and batches from `ft_accelerate.epochs`
    "samples": 152,
    "evaluated": 50,  # of these samples
    "streams": False,  # the evaluation reads a stream
    "trains_on_stream": False,
    "alone": False,  # it is the main process's alone, without operations
    "batch_size": 4,
    "accumulate": 1,
    "across": False,  # accumulation goes on across the end of an epoch
    "each_batch": False,  # the scheduler steps with each, and a registered object counts it before its backward
    "triggered": False,  # two forwards without synchronization, of which the second one's backward has it
    "moves": False,  # the optimizer is `Moving`
    "restores": False,  # the second epoch begins with the weights of the first one's beginning
    "clip": 0.5,
    "precision": "no",
    "norm": True,
    "dropout": 0.0,
    "follows": False,  # the script changes parameters itself, before each forward
    "own_dropout": False,  # each process draws its own, as with `set_seed(device_specific=True)`
    "seed": 7,
    # catch_up.STAY_S: none leaves the quorum unless a test says so, as on a machine that is not busy.
    # A peer that is held meanwhile would be none to come back to.
    "stay_s": 60.0,
    "first_seed_only": False,  # the others begin with weights of their own
    "step_delay_s": 0.0,
    "delays_past": False,  # when the script runs through its past, too
    "eval_delay_s": 0.0,
    # places to wait at, see `script.Log`: "step-12", "eval-1"; "loss-0": behind `gather_loss`;
    # "past-step-3": when the script runs through its past
    "holds": [],
    "inject": {},  # {"<step>": index}: this replica group reports an error once
    "raises": {},  # {"<step>": [index, ...]}: their optimizers raise once, and the loop goes on
    "flips": {},  # {"<step>": index}: a bit of its parameters flips after that step, once
    "gather_loss": False,
    "save": 0,  # save_state each so many steps
    "data": {},  # more of Accelerate's DataLoaderConfiguration
    "seedable": False,
    # of a sampler that is no `RandomSampler`: "torch" has none, and draws from torch's; "own"
    "generator": "",
    "workers": 0,  # of the loaders
    "persistent": False,  # workers, seeded from the sampler's generator
    "prepare_data": True,
    "losses": [],  # of the evaluations: the best is saved, and after two worse ones the loop ends
    "grows": 0,  # the epoch in which the optimizer gets the first layer, as a group of its own; 0: it has it
    "in_variables": False,  # these are kept in the script's own variables, and the loop never ends early
    "local": "",  # "stock": accelerate's LocalSGD; "local_sgd", "diloco": ours
    "local_steps": 5,
    "diloco": {"fragments": 2, "codec": "int8"},
}


class Net(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if options["norm"] else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(options["dropout"]), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Average:
    """A registered object: healed like all the rest."""

    def __init__(self) -> None:
        self.value, self.count = torch.zeros(()), 0

    def update(self, module: nn.Module) -> None:
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.value = self.value * 0.9 + flat.double().sum().float() * 0.1
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


class Best:
    """Early stopping and the best metric, as scripts write them, in a registered object."""

    def __init__(self) -> None:
        self.loss, self.worse = 1e9, 0

    def improves(self, loss: float) -> bool:
        if loss < self.loss:
            self.loss, self.worse = loss, 0
            return True
        self.worse += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "worse": self.worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.worse = state["loss"], state["worse"]


class Moving(torch.optim.AdamW):
    """Is evaluated elsewhere than it trains, as a schedule-free optimizer is: the way there and back rounds."""

    def eval(self) -> None:
        self._move(-0.25, training=False)

    def train(self) -> None:
        self._move(0.2, training=True)

    @torch.no_grad()
    def _move(self, part: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group.setdefault("training", True) is not training:
                group["training"] = training
                for parameter in group["params"]:
                    parameter.lerp_(self.state[parameter]["exp_avg"], part)


def first_of_two(accelerator: Any, model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a second forward, when the first one has had its backward."""
    with accelerator.no_sync(model):
        first = nn.functional.cross_entropy(model(x), y)
        second = nn.functional.cross_entropy(model(x / 2), y)
        accelerator.backward(first)
    return second


def loaders(options: dict[str, Any]) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(options["samples"], 8, generator=generator)
    images[:, 0] = torch.arange(options["samples"]) / 64  # every sample can be told by its number
    labels = torch.randint(0, 3, (options["samples"],), generator=generator)
    train = TensorDataset(images, labels)
    few = options["evaluated"]
    test = TensorDataset(images[:few], labels[:few])
    evaluated = Stream(test) if options["streams"] else test
    order: Any = RandomSampler(train)
    own = None
    if options["generator"]:
        own = torch.Generator().manual_seed(5) if options["generator"] == "own" else None
        order = SubsetRandomSampler(range(len(train)), own)
    workers = {"num_workers": options["workers"]}
    more = {"persistent_workers": True, "generator": own} if options["persistent"] else {}
    if options["trains_on_stream"]:
        loader = DataLoader(SizedStream(train), options["batch_size"], **workers)
        return loader, DataLoader(evaluated, 8, **workers)
    return (
        DataLoader(train, options["batch_size"], sampler=order, **workers, **more),
        DataLoader(evaluated, 8, **workers),
    )


class Stream(IterableDataset[Any]):
    """The samples in their order, without a length."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class LoopLog(Log):
    """Only what is trained is logged, not what a script runs through of its past."""

    def __init__(self, options: dict[str, Any], accelerator: Any) -> None:
        from ft_accelerate.runtime import process as processes

        runtime = processes.active()
        number = accelerator.process_index if runtime is None else runtime.group_ranks.number
        super().__init__(options["log"], str(number), options["holds"])
        self.options, self.started = options, False

    @property
    def live(self) -> bool:
        from ft_accelerate.runtime import process as processes

        runtime = processes.active()
        return runtime is None or runtime.live

    @property
    def share(self) -> int | None:
        """Of the data, that counts in the last step; None: there are no shares, or a spare has none."""
        from ft_accelerate.runtime import process as processes

        runtime = processes.active()
        manager = None if runtime is None else runtime.manager
        return None if manager is None or manager.step.part is None else manager.step.part.share

    @property
    def leads_another(self) -> bool:
        from ft_accelerate.runtime import process as processes

        runtime = processes.active()
        if runtime is None or runtime.manager is None or not runtime.leader:
            return False
        part = runtime.manager.step.part
        return part is not None and part.participants == 2

    def at(self, place: str) -> None:
        super().at(place if self.live else f"past-{place}")

    def inject(self, step: int) -> None:
        from ft_accelerate.runtime import process as processes

        runtime = processes.active()
        if self.options["inject"].get(str(step)) == int(self.name) and self.live:
            assert runtime is not None and runtime.manager is not None
            runtime.manager.report_error(RuntimeError("injected"))

    def step(self, **line: Any) -> None:
        if not self.live:
            return
        if not self.started:
            self.started = True
            self.ready()
        super().step(**line)

    def evaluated(self, **line: Any) -> None:
        self.append("evals", live=self.live, **line)


def local_training(options: dict[str, Any], accelerator: Any, model: Any) -> Any:
    """What a pass over the data runs in; has a `step`."""
    if options["local"] in ("", "stock"):
        from accelerate.local_sgd import LocalSGD as Local
    elif options["local"] == "local_sgd":
        from ft_accelerate import LocalSGD as Local
    else:
        from ft_accelerate import DiLoCo as Local
    return Local(
        accelerator=accelerator,
        model=model,
        local_sgd_steps=options["local_steps"],
        enabled=bool(options["local"]),
        **(options["diloco"] if options["local"] == "diloco" else {}),
    )


def evaluate(accelerator: Any, model: Any, loader: Any, log: LoopLog, epoch: int) -> float:
    model.eval()
    right = total = 0
    if log.options["alone"]:
        if accelerator.is_main_process:
            right = sum(len(x) for x, _ in loader)
        accelerator.wait_for_everyone()
        return right
    for x, y in loader:
        time.sleep(log.options["eval_delay_s"] if log.live else 0)
        log.at(f"eval-{epoch}")
        with torch.no_grad():
            guess = model(x).argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guess, y))
        right += int((guesses == labels).sum())
        total += len(labels)
    log.evaluated(epoch=epoch, right=right, total=total)
    return right / total


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed

    if is_fault_tolerant():
        from ft_accelerate.runtime import catch_up

        catch_up.STAY_S = options["stay_s"]
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=options["accumulate"], sync_with_dataloader=not options["across"]
        ),
        step_scheduler_with_optimizer=not options["each_batch"],
        mixed_precision=options["precision"],
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=options["seedable"], **options["data"]
        ),
    )
    set_seed(options["seed"])
    log = LoopLog(options, accelerator)
    train, test = loaders(options)
    if options["first_seed_only"] and accelerator.process_index:
        torch.manual_seed(accelerator.process_index)
    model = whole = Net(options)
    if options["follows"]:
        model = whole = Following(whole, whole.net[4].weight)
    later = [*model.net[0].parameters()] if options["grows"] else []
    trained = [
        p for p in model.parameters() if p.requires_grad and all(p is not each for each in later)
    ]
    optimizer = (Moving if options["moves"] else torch.optim.AdamW)(trained, lr=0.01)
    total = len(train) * options["epochs"]
    ticks = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / total))
    model, optimizer, test, scheduler = accelerator.prepare(model, optimizer, test, ticks)
    if options["prepare_data"]:
        train = accelerator.prepare(train)
    if options["own_dropout"]:
        torch.manual_seed(accelerator.process_index)
    fail_once(
        optimizer.optimizer,
        lambda: (
            accelerator.process_index in options["raises"].get(str(global_step), ()) and log.live
        ),
        half=True,
    )
    average = Average()
    best = Best()
    accelerator.register_for_checkpointing(average)
    if not options["in_variables"]:
        accelerator.register_for_checkpointing(best)
    results: list[float] = []
    local = local_training(options, accelerator, model)
    global_step = 0
    accuracy = 0.0
    epochs: Any = range(options["epochs"])
    batches: Any = enumerate
    if options["told"]:
        import ft_accelerate

        epochs = ft_accelerate.epochs(options["epochs"])
        batches = epochs.batches
    start = copy.deepcopy(model.state_dict())
    for epoch in epochs:
        if options["restores"] and epoch == 1:  # as behind a search for a learning rate
            model.load_state_dict(start)
        if later and epoch >= options["grows"]:
            optimizer.add_param_group({"params": later, "lr": 0.01, "initial_lr": 0.01})
            ticks.base_lrs.append(0.01)
            ticks.lr_lambdas.append(ticks.lr_lambdas[0])
            later = []
        model.train()
        optimizer.train()
        with local as inner:
            for index, (x, y) in batches(train):
                if options["told"]:
                    global_step = epoch * len(train) + index
                slow = log.live or options["delays_past"]
                time.sleep(options["step_delay_s"] if slow else 0)
                log.at(f"step-{global_step}")
                average.count += options["each_batch"]
                if options["follows"]:
                    whole.follow()
                with accelerator.accumulate(model):
                    if not options["triggered"]:
                        loss = nn.functional.cross_entropy(model(x), y)
                    if options["gather_loss"]:
                        accelerator.gather(loss.detach().repeat(len(x))).mean()
                        log.at(f"loss-{global_step}")
                    if accelerator.sync_gradients:
                        log.inject(global_step)
                    if options["triggered"]:
                        loss = first_of_two(accelerator, model, x, y)
                        with accelerator.trigger_sync_in_backward(model):
                            accelerator.backward(loss)
                    else:
                        accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), options["clip"])
                    raised = False
                    try:
                        optimizer.step()
                    except torch.OutOfMemoryError:
                        raised = True
                    scheduler.step()
                    optimizer.zero_grad()
                    inner.step()
                if accelerator.sync_gradients:
                    global_step += 1
                    if raised:
                        log.append("raised", step=global_step)
                        continue
                    if log.live:
                        average.update(accelerator.unwrap_model(model))
                    log.step(
                        step=global_step,
                        epoch=epoch,
                        index=index,
                        digest=digest(accelerator.unwrap_model(model).state_dict()),
                        weights=digest(dict(accelerator.unwrap_model(model).named_parameters())),
                        lr=scheduler.get_last_lr()[0],
                        ticks=ticks.last_epoch,
                        average=float(average.value),
                        count=average.count,
                        batch=[round(float(v) * 64) for v in x[:, 0]],
                        skipped=accelerator.optimizer_step_was_skipped,
                        main=accelerator.is_main_process,
                        share=log.share,
                    )
                    if log.live and options["flips"].get(str(global_step)) == int(log.name):
                        options["flips"].clear()
                        flip_bit(next(accelerator.unwrap_model(model).parameters()))
                    if options["save"] and global_step % options["save"] == 0:
                        accelerator.save_state(f"{options['log']}/checkpoint_{global_step}")
        optimizer.eval()
        accuracy = evaluate(accelerator, model, test, log, epoch)
        if options["losses"]:
            loss = options["losses"][epoch] if log.live else 1e6  # of an output from memory
            results.append(loss)
            if best.improves(loss):
                accelerator.save({"loss": loss, "epoch": epoch}, f"{options['log']}/best.pt")
            if best.worse == 2 and not options["in_variables"]:
                break
    accelerator.wait_for_everyone()
    log.end(
        step=global_step,
        digest=digest(accelerator.unwrap_model(model).state_dict()),
        weights=digest(dict(accelerator.unwrap_model(model).named_parameters())),
        ticks=ticks.last_epoch,
        lr=scheduler.get_last_lr()[0],
        accuracy=accuracy,
        count=average.count,
        results=results,
        best=best.loss,
        values=[float(v) for p in model.parameters() for v in p.detach().flatten()],
        processes=accelerator.num_processes,
        index=accelerator.process_index,
        main=accelerator.is_main_process,
    )
    accelerator.end_training()


if __name__ == "__main__":
    run_script(OPTIONS, run)
