"""python benchmarks/compare_states.py [--device cuda] [--json FILE]

What comparing states costs (`ft_core/heal/digests.py`): the mean time that digests add to a step with
the default `compare_steps`, as a part of a step of that model (forward, backward and AdamW in one
process, no communication, so that the ratio is an upper bound); the largest slice; and the whole,
which is read once after a heal. Limit: 0.1 % of a step.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import arguments, report
from torch import nn

from ft_core.environment import COMPARE_STEPS
from ft_core.heal.digests import ComparedState

CASES = {
    "9 k": (64, 64, 3),
    "301 k": (256, 256, 5),
    "4.35 M": (1024, 1024, 5),
    "50 M": (2048, 2048, 13),
}
BLOCKS, BATCH = 5, 32
BLOCK_S = 0.5
"""About how long a block of steps takes."""


def network(width: int, hidden: int, layers: int, device: str) -> nn.Module:
    """Many tensors, as in real models: each layer has a norm."""
    parts: list[nn.Module] = []
    for number in range(layers):
        parts += [
            nn.Linear(width if number == 0 else hidden, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
        ]
    return nn.Sequential(*parts[:-1]).to(device)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def step_s(net: nn.Module, width: int, device: str) -> float:
    """Seconds of a step: the best block's mean."""
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.randn(BATCH, width, device=device)
    blocks = []
    for _ in range(BLOCKS):
        wait(device)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() < start + BLOCK_S:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            steps += 1
        wait(device)
        blocks.append((time.perf_counter() - start) / steps)
    return min(blocks)


def digests_s(net: nn.Module) -> tuple[float, float, float]:
    """Seconds that digests add to a step on average; of the longest one; of the whole."""
    compared = ComparedState(COMPARE_STEPS)
    compared.register("net", net.parameters)
    means, longest, whole = [], [], []
    for _ in range(BLOCKS):
        times = []
        for step in range(COMPARE_STEPS):
            start = time.perf_counter()
            digest = compared.at(step, whole=False)
            if digest is not None:
                digest.finish()
            times.append(time.perf_counter() - start)
        means.append(statistics.fmean(times))
        longest.append(max(times))
        start = time.perf_counter()
        everything = compared.at(0, whole=True)
        assert everything is not None
        everything.finish()
        whole.append(time.perf_counter() - start)
    return min(means), min(longest), min(whole)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[1])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    for name, (width, hidden, layers) in CASES.items():
        net = network(width, hidden, layers, options.device)
        step = step_s(net, width, options.device)
        mean, longest, whole = digests_s(net)
        ratio = mean / step
        figures[name] = {
            "step": step,
            "mean": mean,
            "longest": longest,
            "whole": whole,
            "ratio": ratio,
        }
        rows.append(
            [
                name,
                f"{step * 1e3:.2f}",
                f"{mean * 1e6:.2f}",
                f"{ratio:.3%}",
                f"{longest * 1e6:.0f}",
                f"{whole * 1e3:.2f}",
            ]
        )
    columns = ["parameters", "step ms", "digests us", "of a step", "longest us", "whole ms"]
    title = f"Comparing states once in {COMPARE_STEPS} steps, on {options.device}"
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
