"""Checks of whole steps: a manager, a model and an optimizer, in one member or in two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.links import Answered
from benchmarks.gpu.place import Crew, Member, Place, Shape
from benchmarks.gpu.trace import hidden, idle_us, longest_gap, recorded
from ft_core import DiLoCo, DistributedDataParallel, Manager, Optimizer
from ft_core.collectives.sharded import replicate
from ft_core.process_group import ProcessGroup
from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts

IDLE_MS = 0.3
HIDDEN = 0.8
DIFFERS = 0.05
"""By so much the shares of two runs of the same differ."""
LIMIT = timedelta(seconds=60)
STEPS = 4
CASES = ("float32", "bfloat16", "scaler", "compile", "fully_shard")
_WARM, _TIMED = 3, 10
_MEMBERS = 2
State = dict[str, Any]


# ---------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class LanguageModel(nn.Module):
    """Predicts the next token; embedding and head share their weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.last = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        x = self.last(self.blocks(self.embedding(tokens[:, :-1]) + self.places(where)))
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def language_model(place: Place) -> tuple[nn.Module, Tensor]:
    """The model in bfloat16, and a batch."""
    shape = place.shape
    torch.manual_seed(0)
    with torch.device(place.device):
        model = LanguageModel(shape).to(torch.bfloat16)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    return model, tokens


def small_model(place: Place, case: str) -> nn.Module:
    """Its kernels give the same bits each time."""
    layers = [nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128)]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    model.to(place.device)
    return model.to(torch.bfloat16) if case == "bfloat16" else model


# ---------------------------------------------------------------- loops


@contextmanager
def coordinator(groups: int) -> Iterator[str]:
    """The address of a lighthouse, whose first quorum has all groups."""
    timeouts = Timeouts.derive(LIMIT.total_seconds(), join_timeout_s=LIMIT.total_seconds())
    with LighthouseServer(
        "tcp://127.0.0.1:0", config=LighthouseConfig(timeouts=timeouts)
    ) as server:
        yield server.address()


def manager_of(
    member: Member,
    lighthouse: str,
    groups: int,
    state: Callable[[], State] | None,
    load: Any,
    group: ProcessGroup | None = None,
    **more: Any,
) -> Manager:
    """`group`: another one than the member's."""
    options: State = {
        "min_replica_size": groups,
        "expected_replicas": groups,
        "use_async_quorum": False,
        **more,
    }
    return Manager(
        group or member.group,
        load,
        state,
        lighthouse_addr=lighthouse,
        replica_id=str(member.index),
        rank=0,
        world_size=1,
        watch_process=False,
        timeout=LIMIT,
        connect_timeout=LIMIT,
        **options,
    )


def managed(
    member: Member,
    lighthouse: str,
    groups: int,
    model: nn.Module,
    inner: Any,
    *,
    shards: bool = False,
) -> tuple[Manager, nn.Module, Optimizer]:
    """A manager, the model that reduces through it, and the optimizer that votes."""

    def load(state: State) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = manager_of(
        member,
        lighthouse,
        groups,
        lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load,
    )
    wrapped = replicate(model, manager) if shards else DistributedDataParallel(manager, model)
    return manager, wrapped, Optimizer(manager, inner)


def train(model: nn.Module, optimizer: Any, batch: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def seconds_a_step(
    place: Place, model: nn.Module, optimizer: Any, batch: Tensor, steps: int
) -> float:
    """Seconds of one of so many steps."""
    place.synchronize()
    began = time.perf_counter()
    train(model, optimizer, batch, steps)
    place.synchronize()
    return (time.perf_counter() - began) / steps


def overhead_of(member: Member, lighthouse: str) -> tuple[float, float, float, float, str]:
    """Of plain steps and of managed ones of one member: milliseconds, and idle milliseconds a step; and the
    longest time without work in managed steps."""
    place, kinds = member.place, []
    model, batch = language_model(place)
    kinds.append((model, torch.optim.AdamW(model.parameters(), lr=1e-4)))
    model, batch = language_model(place)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager, wrapped, optimizer = managed(member, lighthouse, 1, model, inner)
    kinds.append((wrapped, optimizer))
    took: list[list[float]] = [[], []]
    for _ in range(6):  # in turns: both see the same machine
        for kind, (one, steps) in enumerate(kinds):
            train(one, steps, batch, 1)
            took[kind].append(seconds_a_step(place, one, steps, batch, _TIMED))
    idle = []
    for one, steps in kinds:
        with recorded(place.activity, place.categories) as spans:
            train(one, steps, batch, _TIMED)
            place.synchronize()
        idle.append(idle_us(spans) / _TIMED / 1e3)
    manager.shutdown(finished=True)
    plain, ours = (statistics.median(one) * 1e3 for one in took)
    return plain, ours, idle[0], idle[1], longest_gap(spans)


class Overlap(NamedTuple):
    """The hidden part of the collectives' time (None: no collective was recorded), and a step's seconds."""

    share: float | None
    step_s: float


def overlap_of(member: Member, lighthouse: str) -> Overlap:
    model, batch = language_model(member.place)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager, wrapped, optimizer = managed(member, lighthouse, _MEMBERS, model, inner)
    found = _overlap(member, wrapped, optimizer, batch)
    manager.shutdown(finished=True)
    return found


def stock_overlap_of(member: Member, port: int) -> Overlap:
    """The same with torch's DDP and its own group; `port`: of its store."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("nccl", store=store, rank=member.index, world_size=_MEMBERS)
    model, batch = language_model(member.place)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = _overlap(member, nn.parallel.DistributedDataParallel(model), inner, batch)
    dist.destroy_process_group()
    return found


def _overlap(member: Member, model: nn.Module, optimizer: Any, batch: Tensor) -> Overlap:
    place, share = member.place, None
    train(model, optimizer, batch, _WARM)
    took = seconds_a_step(place, model, optimizer, batch, STEPS)
    if member.index == 0:
        with recorded(place.activity, place.categories) as spans:
            train(model, optimizer, batch, STEPS)
            place.synchronize()
        share = hidden(spans, lambda name: "nccl" in name.lower())
    else:
        train(model, optimizer, batch, STEPS)
    return Overlap(share, took)


def batch_of(place: Place, case: str, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    batch = torch.randn(32, 256, generator=generator).to(place.device)
    return batch.to(torch.bfloat16) if case == "bfloat16" else batch


def loss_of(model: nn.Module, batch: Tensor, case: str) -> Tensor:
    with torch.autocast(batch.device.type, torch.float16, enabled=case == "scaler"):
        return model(batch).float().square().mean()


def expected_parameters(place: Place, case: str) -> list[Tensor]:
    """After the steps, from a loop without members: it has all batches, and means of gradients."""
    model = small_model(place, case)
    if case == "compile":
        model.compile(backend=place.compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler(place.device.type, init_scale=1024.0, enabled=case == "scaler")
    for step in range(STEPS):
        means: list[Tensor] = []
        for index in range(_MEMBERS):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(place, case, step, index), case)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            parts = [p.grad / _MEMBERS for p in model.parameters() if p.grad is not None]
            means = [a + b for a, b in zip(means, parts, strict=True)] if means else parts
        for parameter, mean in zip(model.parameters(), means, strict=True):
            parameter.grad = mean
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in model.parameters()]


def differing(member: Member, lighthouse: str, case: str) -> list[str]:
    """Names of the parameters that differ in any bit from those of a plain loop."""
    place = member.place
    model, shards = small_model(place, case), case == "fully_shard"
    if shards:
        fully_shard(model, mesh=init_device_mesh(place.device.type, (1,)))
    if case == "compile":
        model.compile(backend=place.compiler)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager, wrapped, optimizer = managed(member, lighthouse, _MEMBERS, model, inner, shards=shards)
    scaler = GradScaler(place.device.type, init_scale=1024.0, enabled=case == "scaler")
    while (step := manager.current_step()) < STEPS:
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch_of(place, case, step, member.index), case)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    place.synchronize()
    manager.shutdown(finished=True)
    found = []
    for (name, one), other in zip(
        model.named_parameters(), expected_parameters(place, case), strict=True
    ):
        mine = one.detach().full_tensor() if shards else one.detach()  # type: ignore[operator]
        if not torch.equal(mine, other):
            found.append(name)
    return found


def outer_steps(member: Member, lighthouse: str, device: torch.device) -> list[Tensor]:
    """The parameters after DiLoCo's outer steps over Gloo, quantized. Inner steps add what is the same on
    each device."""
    model = small_model(member.place, "float32").to(device)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    manager = manager_of(member, lighthouse, _MEMBERS, None, None, group=member.place.gloo(30.0))
    generator = torch.Generator().manual_seed(member.index)
    with DiLoCo(manager, model, inner, outer, sync_every=2, codec="int8") as loop:
        while loop.stats.committed < STEPS:
            for parameter in model.parameters():
                change = torch.randn(parameter.shape, generator=generator)
                parameter.grad = change.to(device)
            inner.step()
        manager.shutdown(finished=True)
    return [parameter.detach().cpu() for parameter in model.parameters()]


def join_own_group(member: Member) -> None:
    """The default process group of a replica group of one rank, which fully_shard needs."""
    if not dist.is_initialized():
        backend = "nccl" if member.place.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


# ---------------------------------------------------------------- the checks


def overhead(place: Place) -> Answered:
    with coordinator(1) as lighthouse, place.crew(1, 30.0) as crew:
        plain, ours, idle, idle_ours, gap = crew.call(0, overhead_of, lighthouse).result()
    more = idle_ours - idle
    measured = (
        f"{ours:.2f} ms a step, {plain:.2f} ms without manager and DDP (ratio {ours / plain:.3f}); "
        f"idle {more:.3f} ms a step more than the {idle:.3f} ms there, at most {gap}"
    )
    return measured, f"{IDLE_MS} ms idle", more <= IDLE_MS


def overlap(place: Place) -> Answered:
    with coordinator(_MEMBERS) as lighthouse, place.crew(_MEMBERS, 30.0) as crew:
        calls = [crew.call(index, overlap_of, lighthouse) for index in range(_MEMBERS)]
        ours, _ = (call.result() for call in calls)
        stock = _stock_overlap(crew) if place.stock else None
    bar = (
        f"{HIDDEN:.0%} hidden, or torch's DDP less {DIFFERS:.0%}: one GPU's members take turns, and no two runs "
        "are alike"
    )
    if ours.share is None:
        return "no collective in the trace", bar, False
    measured = (
        f"{ours.share:.0%} of the collectives' time hidden, {ours.step_s * 1e3:.1f} ms a step"
    )
    if stock is None or stock.share is None:
        return measured, bar, ours.share >= HIDDEN
    theirs = f"{stock.share:.0%} and {stock.step_s * 1e3:.1f} ms"
    return (
        f"{measured}; torch's DDP {theirs}",
        bar,
        ours.share >= min(HIDDEN, stock.share - DIFFERS),
    )


def _stock_overlap(crew: Crew) -> Overlap:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = [crew.call(index, stock_overlap_of, store.port) for index in range(_MEMBERS)]
    found, _ = (call.result() for call in calls)
    return found


def numbers(place: Place, case: str) -> Answered:
    with coordinator(_MEMBERS) as lighthouse, place.crew(_MEMBERS, 30.0) as crew:
        if case == "fully_shard":
            for index in range(_MEMBERS):
                crew.call(index, join_own_group).result()
        calls = [crew.call(index, differing, lighthouse, case) for index in range(_MEMBERS)]
        found = [name for call in calls for name in call.result()]
    measured = f"differing parameters: {', '.join(found) or 'none'}"
    return measured, "bitwise a plain loop's", not found


def diloco(place: Place) -> Answered:
    found = []
    for device in (place.device, torch.device("cpu")):
        with coordinator(_MEMBERS) as lighthouse, place.crew(_MEMBERS, 30.0) as crew:
            calls = [crew.call(index, outer_steps, lighthouse, device) for index in range(_MEMBERS)]
            found += [call.result() for call in calls]
    equal = all(
        torch.equal(one, other) for each in found for one, other in zip(found[0], each, strict=True)
    )
    measured = f"{'all alike' if equal else 'DIFFERENT'} in {_MEMBERS} members"
    return measured, "bitwise the CPU's", equal


def contexts(place: Place) -> Answered:
    with coordinator(_MEMBERS) as lighthouse, place.crew(_MEMBERS, 30.0) as crew:
        calls = [crew.call(index, differing, lighthouse, "float32") for index in range(_MEMBERS)]
        for call in calls:
            call.result()
        counts = [crew.call(index, Member.contexts).result() for index in range(_MEMBERS)]
    measured = f"{' and '.join(map(str, counts))} in the members' processes"
    return measured, "1 a process", counts == [1] * _MEMBERS
