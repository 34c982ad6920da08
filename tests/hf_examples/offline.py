"""python -m tests.hf_examples.offline EXAMPLE REPORT [ARGUMENTS...]: one process of an example of HF's.

The example runs unmodified. What it fetches from the hub is made here: tiny models from a config, a
tokenizer of words, a few sentences under the names of GLUE's and WikiText's columns, and the metric of
MRPC. At the end the process writes to REPORT.INDEX what it has trained. HF_KILL="group:step" kills that
replica group, in its first life, within that optimizer step.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ft_core.environment import Supervision
from tests.harness.script import digest
from tests.harness.stock import leave_stock

WORDS = [f"word{n}" for n in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"]


class Metric:
    """Accuracy and F1 of MRPC, as `evaluate.load("glue", "mrpc")` has them."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs += zip([int(p) for p in predictions], [int(r) for r in references], strict=True)

    def compute(self, *, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        self.add_batch(predictions=predictions, references=references)
        pairs, self._pairs = self._pairs, []
        right = sum(p == r for p, r in pairs)
        both = sum(p == r == 1 for p, r in pairs)
        ones = sum(p + r for p, r in pairs)
        return {"accuracy": right / max(1, len(pairs)), "f1": 2 * both / max(1, ones)}


def tokenizer(*args: Any, **kwargs: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    base = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[EOS]",
        model_max_length=64,
    )


def load_dataset(name: str, *args: Any, **kwargs: Any) -> Any:
    import random

    from datasets import Dataset, DatasetDict

    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randrange(4, 20)))

    def split(rows: int) -> Any:
        if "wikitext" in name:
            return Dataset.from_dict({"text": [sentence() for _ in range(rows)]})
        labels = [draw.randrange(2) for _ in range(rows)]
        return Dataset.from_dict(
            {
                "sentence1": [f"word{label} {sentence()}" for label in labels],
                "sentence2": [sentence() for _ in labels],
                "label": labels,
                "idx": list(range(rows)),
            }
        )

    sizes = {"train": 500 if "wikitext" in name else 168, "validation": 42, "test": 42}
    return DatasetDict({part: split(rows) for part, rows in sizes.items()})


def classifier(*args: Any, **kwargs: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(SPECIAL) + len(WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def language_model(*args: Any, **kwargs: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + len(WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
        )
    )


def make_what_the_hub_has() -> None:
    import datasets
    import transformers

    evaluate: Any = ModuleType("evaluate")
    evaluate.__spec__ = importlib.machinery.ModuleSpec("evaluate", None)
    evaluate.load = lambda *args, **kwargs: Metric()
    sys.modules["evaluate"] = evaluate
    datasets.load_dataset = load_dataset
    for name, make in (
        ("AutoTokenizer", tokenizer),
        ("AutoModelForSequenceClassification", classifier),
        ("AutoModelForCausalLM", language_model),
    ):
        getattr(transformers, name).from_pretrained = make


def kill_where_told() -> None:
    group, _, step = os.environ.get("HF_KILL", "").partition(":")
    mine = os.environ.get("ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID")
    if not step or mine != group or Supervision.read().restarts:
        return
    left = [int(step)]

    def count(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(count)


def main(example: str, report: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    make_what_the_hub_has()
    kill_where_told()
    from accelerate import Accelerator

    models: list[Any] = []
    prepare = Accelerator.prepare_model
    indices: list[int] = []

    def prepare_and_note(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        models.append(model)
        indices.append(self.process_index)
        return prepare(self, model, *args, **kwargs)

    Accelerator.prepare_model = prepare_and_note
    sys.argv = [example, *arguments]
    sys.path.insert(0, str(Path(example).parent))
    runpy.run_path(example, run_name="__main__")
    found = {"models": [digest(model.state_dict()) for model in models]}
    Path(f"{report}.{indices[0]}").write_text(json.dumps(found))
    if os.environ.get("ACCELERATE_USE_FAULT_TOLERANCE") != "true":
        sys.stdout.flush()
        leave_stock()


if __name__ == "__main__":
    main(*sys.argv[1:])
