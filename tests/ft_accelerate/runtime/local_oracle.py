"""What DiLoCo's formulas give, without processes, groups or a quorum: all replicas in one process.

Reads what each replica of a run has logged of its batches and learning rates (`loop_worker.py`), and
trains once more, with no code of ours but the schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ft_core.diloco.schedule import Schedule, ScheduleEvent
from tests.ft_accelerate.runtime.loop_worker import OPTIONS, Net, loaders
from tests.ft_core.diloco.reference import trace

Lines = list[dict[str, Any]]


def trained(
    logs: list[Lines], options: dict[str, Any], *, parts: list[list[int]], delay: int, alpha: float
) -> Tensor:
    """The parameters, one after the other, after all of `logs`, one a replica: the end of a `with`,
    where all replicas are alike. `parts`: numbers of the parameters of each fragment."""
    options = {**OPTIONS, **options}
    data = loaders(options)[0].dataset
    torch.manual_seed(options["seed"])
    first = Net(options)
    nets = [Net(options) for _ in logs]
    for net in nets:
        net.load_state_dict(first.state_dict())
    inner = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    parameters = [list(net.parameters()) for net in nets]
    last = [p.detach().clone() for p in first.parameters()]
    outer = torch.optim.SGD(last, lr=0.7, momentum=0.9, nesterov=True)
    every = options["local_steps"]
    due: dict[int, list[tuple[ScheduleEvent, int]]] = {}
    for step, event, index in trace(Schedule(every, len(parts), delay), every):
        due.setdefault(step, []).append((event, index))
    sent: tuple[int, dict[int, Tensor]] | None = None
    met = [0] * len(parts)

    @torch.no_grad()
    def launch(index: int) -> None:
        nonlocal sent
        means = {
            i: torch.stack([last[i] - own[i] for own in parameters]).mean(0) for i in parts[index]
        }
        sent = index, means

    @torch.no_grad()
    def apply(now: int) -> None:
        nonlocal sent
        if sent is None:
            return
        (index, means), sent = sent, None
        met[index] = now
        for i, mean in means.items():
            last[i].grad = mean
        outer.step()
        outer.zero_grad()
        for own in parameters:
            for i in means:
                own[i].copy_(torch.lerp(last[i], own[i], alpha))

    for count, lines in enumerate(zip(*logs, strict=True), start=1):
        for log, line, net, optimizer in zip(logs, lines, nets, inner, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = log[count - 2]["lr"] if count > 1 else 0.01
            x = torch.stack([data[i][0] for i in line["batch"]])
            y = torch.stack([data[i][1] for i in line["batch"]])
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), options["clip"])
            optimizer.step()
        for event, index in due.get((count - 1) % every + 1, ()):
            launch(index) if event is ScheduleEvent.LAUNCH else apply(count)
        ends = count == len(logs[0]) or logs[0][count]["epoch"] != logs[0][count - 1]["epoch"]
        if ends:
            apply(count)
            for index in range(len(parts)):
                if met[index] != count:
                    launch(index)
                    apply(count)
            with torch.no_grad():
                for own in parameters:
                    for i, value in enumerate(last):
                        own[i].copy_(value)
    return torch.cat([p.flatten() for p in last])
