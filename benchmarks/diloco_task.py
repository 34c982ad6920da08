"""What the DiLoCo benchmarks train: a byte-level transformer on the standard library's sources.

The text ships with every Python: its own modules, without tests. One file in twenty,
chosen by the hash of its name, is held out for validation.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 128
VOCABULARY = 256
EXCLUDED = ("site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__")
HELD_OUT = 20


def text() -> tuple[Tensor, Tensor]:
    """(training, validation) bytes, uint8, 1-d. The same on every machine with this Python."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in EXCLUDED for part in name.split("/")):
            continue
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        parts[number % HELD_OUT == 0].append(path.read_bytes())
    training, validation = (
        torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
    )
    return training, validation


def batch(data: Tensor, step: int, replica: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `replica`'s inner step `step`, (size, CONTEXT) each, int64.

    Follows from the two numbers, so that all algorithms see the same samples: step `s` of two
    replicas is one synchronous step of both batches.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + replica)
    starts = torch.randint(0, len(data) - CONTEXT - 1, (size,), generator=generator)
    rows = starts[:, None] + torch.arange(CONTEXT + 1)
    window = data[rows].long()
    return window[:, :-1], window[:, 1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        shape = (size, length, self.heads, width // self.heads)
        q, k, v = (
            part.reshape(shape).transpose(1, 2)
            for part in self.attend(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """Pre-norm decoder over bytes. `forward` returns the mean loss in nats a byte."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.token(inputs) + self.place
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def build(width: int, layers: int, seed: int = 0) -> Transformer:
    """The same weights in every process."""
    torch.manual_seed(seed)
    return Transformer(width, layers)


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(steps - warm_up, 1)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, part: int = 0, batches: int = 8) -> float:
    """Mean loss on fixed windows of `data`, in nats a byte; other parts are other windows."""
    model.eval()
    losses = [float(model(*batch(data, number, 10_007 + part, 64))) for number in range(batches)]
    model.train()
    return sum(losses) / len(losses)
