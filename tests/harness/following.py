"""A model that its script changes within a step, besides its optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Following(nn.Module):
    """`net`, a copy that follows it slowly, and a weight that is scaled with each batch."""

    def __init__(self, net: nn.Module, scaled: nn.Parameter) -> None:
        super().__init__()
        self.net, self.slow = net, copy.deepcopy(net).requires_grad_(False)
        self.scaled = [scaled]

    def forward(self, x: Any) -> Tensor:
        logits: Tensor = self.net(x) + 0.1 * self.slow(x)
        return logits

    @torch.no_grad()
    def follow(self) -> None:
        """As libraries do it: one in place, one by another tensor in the parameter."""
        for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        self.scaled[0].mul_(1.001)
