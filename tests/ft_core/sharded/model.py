"""A transformer that is small enough for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.before(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    """Predicts the next of `vocabulary` tokens. `tied`: embedding and head share their weights. The first norm
    is the root's own, whose backward comes last and needs the weight that forward has gathered."""

    def __init__(
        self, *, vocabulary: int = 32, width: int = 16, depth: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor, *, skip: bool = False) -> Tensor:
        """The loss of a batch. `skip`: the last block is not used."""
        x = self.norm(self.embedding(tokens))
        for block in self.blocks[:-1] if skip else self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).to(torch.float32), targets.flatten())
