"""A script of transformers' Trainer as users write them: nothing in it knows of fault tolerance.

But for one callback of the test, which kills processes at named places, and the report that it
leaves. TRAINER_KILLS holds "group:life:event:count", such as "1:0:on_step_end:12": replica group 1
in its first life, when the event comes for the 12th time. "1.0" is the first process of group 1;
the event "writing" comes when a checkpoint's first files are there.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from ft_accelerate.runtime import process as processes
from ft_core.heal.shardings import local_part
from tests.harness.script import Log, digest
from tests.harness.stock import leave_stock


class Sources(Dataset[Any]):
    """The standard library's own text, byte by byte: windows of `length` bytes of some modules."""

    def __init__(self, modules: list[str], size: int, length: int = 32) -> None:
        home = Path(os.__file__).parent
        text = b"".join((home / f"{name}.py").read_bytes() for name in modules)
        step = (len(text) - length) // size
        self.windows = [list(text[i * step : i * step + length]) for i in range(size)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # Some windows end early: a mean over tokens must weigh what each process has.
        ids = torch.tensor(self.windows[index])
        labels = ids.clone()
        labels[len(ids) - index % 8 :] = -100
        return {"input_ids": ids, "labels": labels}


def by_length() -> dict[str, Any]:
    """A sampler that draws from torch's own generator; transformers 5 has another name for it."""
    if hasattr(TrainingArguments, "train_sampling_strategy"):
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


class Kill(TrainerCallback):
    """End this process by SIGKILL at the n-th call of an event in one of its lives."""

    def __init__(self) -> None:
        group = os.environ.get("ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID", "")
        life = os.environ.get("FT_RESTARTS", "")
        self.event, self.left = "", 0
        for kill in os.environ.get("TRAINER_KILLS", "").split():
            of_group, of_life, event, count = kill.split(":")
            of_group, _, rank = of_group.partition(".")
            if (of_group, of_life) == (group, life) and rank in ("", os.environ["LOCAL_RANK"]):
                self.event, self.left = event, int(count)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name == object.__getattribute__(self, "event"):
            return self.count
        return object.__getattribute__(self, name)

    def count(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Model(GPT2LMHeadModel):
    """A model in whose saving a process may die."""

    kill: Any = None
    other: Path
    """What the other group's first process writes at its end."""

    def save_pretrained(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(folder, *args, **kwargs)
        if self.kill.event == "writing":
            self.kill.count()
        if self.kill.event == "writing_last" and Path(folder).name == "final":
            (Path(folder) / "model.safetensors").write_bytes(b"half")
            await_(self.other.exists)
            self.kill.count()


class Watch(TrainerCallback):
    """Looks for checkpoints that are not whole: the newest one, since older ones are deleted."""

    def __init__(self) -> None:
        self.torn: set[str] = set()

    def look(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = list(Path(args.output_dir).glob("checkpoint-*"))
        newest = max(found, key=lambda path: int(path.name.split("-")[1]), default=None)
        optimizer = "optimizer.bin" if args.fsdp else "optimizer.pt"
        wanted = ("*model.safetensors", optimizer, "trainer_state.json")  # or that of an adapter
        if newest is not None and not all(any(newest.glob(name)) for name in wanted):
            self.torn.add(newest.name)

    on_step_begin = on_substep_end = on_train_begin = on_train_end = look


class Hold(TrainerCallback):
    """TRAINER_HOLD names a folder: group 1 waits after 20 steps (or at TRAINER_HOLD_AT, "event:step") until
    group 0, in its second life, asks for a quorum; that life begins when group 1 waits. The event "predicting" comes
    before a batch of an evaluation is computed."""

    def __init__(self) -> None:
        folder = os.environ.get("TRAINER_HOLD", "")
        group = os.environ.get("ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID", "")
        life = os.environ.get("FT_RESTARTS", "")
        self.holds = bool(folder) and group == "1"
        self.event, _, step = os.environ.get("TRAINER_HOLD_AT", "on_step_end:20").partition(":")
        self.step = int(step or -1)
        self.events = Path(os.environ.get("FT_EVENT_LOG", ""))
        self.held, self.asked = Path(folder) / "held", Path(folder) / "asked"
        if folder and (group, life) == ("0", "1"):
            await_(self.held.exists)
            self.asked.with_suffix(".part").write_text(str(self.requests()))
            self.asked.with_suffix(".part").rename(self.asked)

    def requests(self) -> int:
        """How often group 0 has heard from the lighthouse that it waits or is in a quorum."""
        lines = self.events.read_text().splitlines()
        return sum('"name": "0"' in x and ('"waiting"' in x or '"quorum"' in x) for x in lines)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name == object.__getattribute__(self, "event"):
            return self.hold
        return object.__getattribute__(self, name)

    def hold(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.wait()

    def wait(self) -> None:
        if self.holds:
            self.held.touch()
            await_(self.asked.exists)
            asked = int(self.asked.read_text())
            await_(lambda: self.requests() > asked)

    def before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if self.event == "predicting" and not module.training:
            self.wait()


class Tracker(TrainerCallback):
    """As transformers' own are written: the main process opens a run when training begins, and notes
    that it is set up; so do the others, which do nothing. Its rows go to one file."""

    def __init__(self, folder: Path) -> None:
        self.path, self.initialized, self.run = folder / "tracked", False, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.initialized:
            self.initialized = True
            if state.is_world_process_zero:
                self.run = self.path.open("a", buffering=1)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            assert self.run is not None, "You must call init() before log()"
            self.run.write(f"{state.global_step}\n")


class Stop(TrainerCallback):
    """Ends the training with the evaluation after `step` steps, as early stopping does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


class SaveBetter(TrainerCallback, ExportableState):
    """Has a checkpoint written when an evaluation was better than all before."""

    def __init__(self, best: float = float("inf")) -> None:
        self.best = best

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if kwargs["metrics"]["eval_loss"] < self.best:
            self.best = kwargs["metrics"]["eval_loss"]
            control.should_save = True

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"best": self.best}}


class EvaluateFirst(TrainerCallback):
    """Evaluates where each epoch begins."""

    trainer: Trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate()


class EpochsBatches(BatchSampler):
    """Batches in an order that follows from `set_epoch`, as those of sentence-transformers."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.length, self.batch_size, self.drop_last, self.epoch = length, batch_size, False, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        return iter([batch.tolist() for batch in order.split(self.batch_size)])

    def __len__(self) -> int:
        return math.ceil(self.length / self.batch_size)


class EpochsTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        batches = EpochsBatches(len(self.train_dataset), self.args.train_batch_size)
        loader = DataLoader(
            self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


class FullDiskTrainer(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        if self.args.should_save:
            raise OSError(errno.ENOSPC, "No space left on device")


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Draws for each batch as it is read, as transformers' own for masked language models does."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.15] = 0
    return batch


def await_(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def sharded() -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--scheduler", default="cosine")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--grouped", action="store_true")
    parser.add_argument("--save_model", action="store_true")
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--evaluated", type=int, default=24)
    parser.add_argument("--evaluate_first", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--stop_at", type=int, default=-1)
    parser.add_argument("--save_better", action="store_true")
    parser.add_argument("--evaluate_each_first", action="store_true")
    parser.add_argument("--epochs_batches", action="store_true")
    parser.add_argument("--await_late", action="store_true")
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--full_disk", action="store_true")
    parser.add_argument("--persistent", action="store_true")  # workers, and dropout
    parser.add_argument("--evaluate_at_start", action="store_true")
    options = parser.parse_args()
    out = Path(options.out)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.1 if options.persistent else 0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Model(config)
    model.kill, watch = Kill(), Watch()
    model.other = out / f"{os.environ.get('LOCAL_WORLD_SIZE', '1')}.end"
    save = options.save_steps or 10_000
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=2,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        learning_rate=3e-3,
        lr_scheduler_type=options.scheduler,
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="best" if options.patience else "steps",
        save_steps=save,
        save_total_limit=2 if options.patience else options.limit,
        load_best_model_at_end=bool(options.patience),
        metric_for_best_model="eval_loss",
        seed=1,
        report_to=os.environ.get("TRAINER_REPORT_TO", "none").split(),
        use_cpu=True,
        dataloader_pin_memory=False,
        dataloader_num_workers=int(options.persistent),
        dataloader_persistent_workers=options.persistent,
        eval_on_start=options.evaluate_at_start,
        include_num_input_tokens_seen=options.tokens,
        torch_compile=options.compile,
        torch_compile_backend="eager" if options.compile else None,
        **(by_length() if options.grouped else {}),
        **(sharded() if options.fsdp else {}),
    )
    tracker = Tracker(out)
    hold = Hold()
    model.register_forward_pre_hook(hold.before_forward)
    callbacks: list[TrainerCallback] = [model.kill, Stop(options.stop_at), hold, watch, tracker]
    if options.patience:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=options.patience))
    if options.save_better:
        callbacks.append(SaveBetter())
    of_batches = EpochsTrainer if options.epochs_batches else Trainer
    trainer = (FullDiskTrainer if options.full_disk else of_batches)(
        model=model,
        args=arguments,
        train_dataset=Sources(["argparse", "ast", "abc"], 104),
        eval_dataset=Sources(["bisect", "calendar"], options.evaluated),
        callbacks=callbacks,
        data_collator=masked if options.masked else None,
    )
    if options.evaluate_each_first:
        first = EvaluateFirst()
        first.trainer = trainer
        trainer.add_callback(first)
    if options.evaluate_first:
        trainer.remove_callback(tracker)  # its run begins with the training
        trainer.evaluate()
        trainer.add_callback(tracker)
    result = train(trainer, options.resume, out / "late")
    if options.await_late:
        trainer.accelerator.end_training()
        Path(os.environ["TRAINER_HOLD"], "held").touch()
        await_((out / "late").exists)
    if options.predict:
        trainer.predict(Sources(["bisect", "calendar"], 40))
        trainer.evaluate(Sources(["bisect", "calendar"], 40))
    if options.save_model:
        trainer.save_model(str(out / "final"))
        trainer.save_metrics("train", {"train_loss": result.training_loss})
        trainer.save_state()
    report(trainer, result.training_loss, watch.torn, out)


def train(trainer: Trainer, resume: bool, late: Path) -> Any:
    """`late` is there when a process has been told that it has come too late."""
    try:
        return trainer.train(resume_from_checkpoint=resume or None)
    except SystemExit:
        late.touch()
        raise


def report(trainer: Trainer, training_loss: float, torn: set[str], out: Path) -> None:
    moments = {
        f"{number}.{name}": local_part(torch.as_tensor(value))
        for number, values in trainer.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    model = trainer.accelerator.unwrap_model(trainer.model)
    timing = ("runtime", "_per_second", "total_flos")
    found = {
        "weights": digest((name, local_part(value)) for name, value in model.state_dict().items()),
        "optimizer": digest(moments),
        "global_step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "max_steps": trainer.state.max_steps,
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "ticks": trainer.lr_scheduler.state_dict().get("last_epoch"),
        "training_loss": training_loss,
        "best": trainer.state.best_metric,
        "best_checkpoint": Path(trainer.state.best_model_checkpoint or "").name,
        "seen": [trainer.state.total_flos, trainer.state.num_input_tokens_seen],
        "torn": sorted(torn),
        "logs": [
            {k: v for k, v in entry.items() if not any(t in k for t in timing)}
            for entry in trainer.state.log_history
        ],
        "checkpoints": sorted(p.name for p in (out / "checkpoints").glob("checkpoint-*")),
        "world": [trainer.args.world_size, trainer.args.process_index],
    }
    runtime = processes.active()
    number = trainer.args.process_index if runtime is None else runtime.group_ranks.number
    Log(out, str(number)).end(**found)


if __name__ == "__main__":
    main()
    if os.environ.get("ACCELERATE_USE_FAULT_TOLERANCE") != "true":
        leave_stock()
