"""LocalSGD and (Streaming) DiLoCo in one process, with loops over members: what the papers say.

Nothing of ft_core in here. Each member has a model of its own; outer steps are plain arithmetic on
lists of tensors. Members contribute in the order of their numbers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ft_core.diloco.schedule import Schedule, ScheduleEvent

_seeding = threading.Lock()  # torch's generator is the process's


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Three layers with a tied weight, a frozen one and one that no loss reaches. Any thread."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5)
            self.head = nn.Linear(5, 3)
            self.c.weight = self.b.weight  # tied
            self.scale = nn.Parameter(torch.ones(5), requires_grad=False)  # frozen
            self.unused = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(x))
            x = torch.tanh(self.c(torch.tanh(self.b(x)))) * self.scale
            return self.head(x)

    with _seeding:
        torch.manual_seed(seed)
        return Net().to(dtype)


def backward(model: nn.Module, member: int, inner: int) -> None:
    """One inner step's gradients: random data that follow from the two numbers."""
    generator = torch.Generator().manual_seed(10_007 * inner + member)
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 6, generator=generator).to(dtype)
    y = torch.randn(4, 3, generator=generator).to(dtype) + member
    for p in model.parameters():
        p.grad = None
    ((model(x) - y) ** 2).mean().backward()


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def outer_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


@dataclass
class Member:
    """One member's local model and inner optimizer. `inner`: its next inner step's number."""

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inner: int = 0
    counts: dict[int, int] = field(default_factory=dict)  # inner steps since the fragment's apply


class Reference:
    """All members of a run, and the global state.

    `parts`: names of each fragment's parameters. `outer` None: LocalSGD.
    """

    def __init__(
        self,
        members: Sequence[int],
        parts: Sequence[Sequence[str]],
        *,
        model: nn.Module | None = None,
        local_sgd: bool = False,
        alpha: float = 0.0,
        weighted: bool = False,
    ) -> None:
        self.model = model if model is not None else network()
        self.parts = [list(names) for names in parts]
        self.alpha, self.weighted, self.local_sgd = alpha, weighted, local_sgd
        self.momentum: dict[str, Tensor] = {}
        self.members = {n: self.new_member(n) for n in members}
        self.sent: dict[int, dict[str, Tensor]] = {}
        self.weights: dict[int, float] = {}

    def new_member(self, number: int, inner: int = 0) -> Member:
        model = copy.deepcopy(self.model)
        return Member(number, model, inner_optimizer(model), inner)

    def inner_step(self, member: Member) -> None:
        backward(member.model, member.number, member.inner)
        member.optimizer.step()
        member.inner += 1
        for part in range(len(self.parts)):
            member.counts[part] = member.counts.get(part, 0) + 1

    def launch(self, part: int, contributors: Sequence[int] | None = None) -> None:
        """Remember what each contributor sends."""
        shared = dict(self.model.named_parameters())
        self.sent, self.weights = {}, {}
        for n in self.members if contributors is None else contributors:
            local = dict(self.members[n].model.named_parameters())
            self.sent[n] = {
                name: (local[name] if self.local_sgd else shared[name] - local[name])
                .detach()
                .clone()
                for name in self.parts[part]
            }
            self.weights[n] = float(self.members[n].counts.get(part, 0)) if self.weighted else 1.0

    @torch.no_grad()
    def apply(self, part: int) -> None:
        total = sum(self.weights.values())
        shared = dict(self.model.named_parameters())
        for name in self.parts[part]:
            mean = sum(self.weights[n] * self.sent[n][name] for n in self.sent) / total
            if self.local_sgd:
                shared[name].copy_(mean)
            else:  # SGD with Nesterov's momentum, rounded where torch rounds
                momentum = self.momentum.get(name)
                momentum = mean.clone() if momentum is None else momentum.mul_(0.9).add_(mean)
                self.momentum[name] = momentum
                shared[name].add_(mean.add(momentum, alpha=0.9), alpha=-0.7)
            for member in self.members.values():
                local = dict(member.model.named_parameters())[name]
                local.copy_(torch.lerp(shared[name], local, self.alpha))
        for member in self.members.values():
            member.counts[part] = 0

    @torch.no_grad()
    def reset(self, part: int, members: Sequence[int] | None = None) -> None:
        """A discarded outer step: the fragment returns to the global values."""
        shared = dict(self.model.named_parameters())
        for n in self.members if members is None else members:
            local = dict(self.members[n].model.named_parameters())
            for name in self.parts[part]:
                local[name].copy_(shared[name])
            self.members[n].counts[part] = 0


def trace(
    schedule: Schedule,
    inner_steps: int,
    *,
    start: int = 0,
    commits: Callable[[int], bool] = lambda attempt: True,
) -> Iterator[tuple[int, ScheduleEvent, int]]:
    """(inner step from 1, event, fragment) for a member that starts a slot at outer step `start`.

    `commits(n)`: whether attempt n (0, 1, ...) at an outer step is committed.
    """
    step, local_step, attempt = start, 0, 0
    for inner in range(1, inner_steps + 1):
        local_step += 1
        for event in schedule.due(step, local_step):
            yield inner, event, schedule.fragment_of(step)
            if event is ScheduleEvent.APPLY:
                step, local_step = step + commits(attempt), 0
                attempt += 1
