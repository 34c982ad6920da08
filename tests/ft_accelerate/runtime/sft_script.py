"""A script of TRL's SFTTrainer, or its DPOTrainer, as users write them; kill and report are those of trainer_script."""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_script import Kill, Watch, report
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.harness.stock import leave_stock


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    table = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=table, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def texts() -> list[str]:
    """The lines of a module, of many lengths."""
    lines = (Path(os.__file__).parent / "argparse.py").read_text().splitlines()
    return [line.strip() for line in lines if len(line.strip()) > 20][:96]


def adapter() -> Any:
    """What PEFT trains in place of the model."""
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )


class Freezes(TrainerCallback):
    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.epoch == 1:
            model.transformer.wte.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--freezes", action="store_true", help="a part of it in the second epoch")
    parser.add_argument("--dpo", action="store_true", help="with a reference model that is moved")
    options = parser.parse_args()
    out = Path(options.out)
    torch.manual_seed(0)
    words = tokenizer()
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    watch = Watch()
    common: dict[str, Any] = {
        "output_dir": str(out / "checkpoints"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_length": 48,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "save_strategy": "epoch" if options.lora else "no",  # of the adapter
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    model = GPT2LMHeadModel(config)
    callbacks: list[TrainerCallback] = [Kill(), watch]
    callbacks += [Freezes()] * options.freezes
    trainer: Any
    if options.dpo:
        pairs = [{"prompt": a[:9], "chosen": a[9:], "rejected": a[:8:-1]} for a in texts()]
        trainer = DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=DPOConfig(**common, sync_ref_model=True, ref_model_sync_steps=3),
            train_dataset=Dataset.from_list(pairs),
            processing_class=words,
            callbacks=callbacks,
        )
    else:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**common),
            train_dataset=Dataset.from_dict({"text": texts()}),
            processing_class=words,
            peft_config=adapter() if options.lora else None,
            callbacks=callbacks,
        )
    result = trainer.train()
    report(trainer, result.training_loss, watch.torn, out)


if __name__ == "__main__":
    main()
    if os.environ.get("ACCELERATE_USE_FAULT_TOLERANCE") != "true":
        leave_stock()
