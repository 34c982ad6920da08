"""accelerate launch --config_file examples/ft.yaml examples/transformers_trainer.py --output_dir out

An ordinary script of transformers' Trainer: a small GPT-2 learns the bytes of the standard
library's sources. Fault tolerance is a section of the config file and needs nothing in the script
(`ft-accelerate launch` does the same if the package is not installed). Kill a process while it
trains (`kill -9`): the others continue, it is restarted and heals, and all end with equal weights.
"""

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sources(Dataset[Any]):
    """Windows of 64 bytes of some modules; a byte is a token."""

    def __init__(self, modules: list[str], windows: int) -> None:
        home = Path(os.__file__).parent
        text = b"".join((home / f"{name}.py").read_bytes() for name in modules)
        self.text = torch.tensor(list(text))
        self.windows = windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * (len(self.text) - 64) // self.windows
        ids = self.text[start : start + 64]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--output_dir", required=True, help="for checkpoints")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            logging_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            report_to="none",
        ),
        train_dataset=Sources(["argparse", "ast", "inspect"], 1024),
        eval_dataset=Sources(["bisect", "calendar"], 64),
    )
    print(f"process {trainer.args.process_index} has pid {os.getpid()}", flush=True)
    trainer.train()
    trainer.save_model(options.output_dir)
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.cpu().numpy().tobytes())
    print(
        f"process {trainer.args.process_index}: {trainer.state.global_step} steps, "
        f"weights {weights.hexdigest()[:16]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
