"""Checks of what moves bytes: copies between device and host, codecs, heals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.links import Answered
from benchmarks.gpu.place import Crew, Member, Place
from benchmarks.gpu.trace import recorded
from benchmarks.gpu.training import State, coordinator, manager_of
from ft_core.collectives.quantized import codec_named, dequantize, quantize, requantize
from ft_core.heal import target
from ft_core.heal.same_host import host_identity
from ft_core.manager import Manager
from ft_core.telemetry import HEAL_DONE, Event

D2H_GB_S = 45.0
CODEC_GB_S = 1000.0
LAUNCHES = 4
STALL = 0.1
SMALL_BYTES = 256 << 10
GROUP_TIMEOUT_S = 30.0
_TENSORS = 64
_STEPS = 4
_FIRST_REDUCED = 0.4
"""Of a step's computation: forward, a third of it, and a bit of backward."""


def gb_s(place: Place, nbytes: int, work: Callable[[], object]) -> float:
    """Of the quickest of some repeats."""
    best = float("inf")
    for _ in range(5):
        place.synchronize()
        began = time.perf_counter()
        work()
        place.synchronize()
        best = min(best, time.perf_counter() - began)
    return nbytes / best / 1e9


def copies(place: Place) -> Answered:
    source = place.full(0, place.elements * 16, 1.0)
    host = torch.empty(source.shape, pin_memory=source.is_cuda)
    out = gb_s(place, source.nbytes, lambda: host.copy_(source, non_blocking=True))
    back = gb_s(place, source.nbytes, lambda: source.copy_(host, non_blocking=True))
    measured = f"{out:.1f} GB/s to the host, {back:.1f} GB/s from it"
    return measured, f"{D2H_GB_S:g} GB/s to the host", out >= D2H_GB_S


def codec(place: Place, name: str) -> Answered:
    """Speeds count the bytes of the plain values, of four members' rows."""
    coder, count = codec_named(name), place.elements * 16
    row = count // 4
    values = place.full(0, count, 1.0)
    data, _ = quantize(coder, values, None, 4, row)
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: quantize(coder, values, None, 4, row),
        "dequantize, add, quantize": lambda: requantize(coder, data, row, None),
        "dequantize": lambda: dequantize(coder, data, row, values),
    }
    speeds, launches = {}, 0
    for what, call in calls.items():
        speeds[what] = gb_s(place, values.nbytes, call)
        with recorded(place.activity, place.categories) as spans:
            call()
            place.synchronize()
        launches += len(spans)
    measured = ", ".join(f"{what} {speed:.0f} GB/s" for what, speed in speeds.items())
    good = min(speeds.values()) >= CODEC_GB_S and launches <= LAUNCHES
    bar = f"{CODEC_GB_S:g} GB/s, {LAUNCHES} launches"
    return f"{measured}; {launches} launches together", bar, good


# ---------------------------------------------------------------- a heal


class Joined(NamedTuple):
    """What it is when a member joins: whether it has the right state after one heal, that heal's figures, and
    the seconds of the source's usual step and of its longest."""

    right: bool
    cost: dict[str, float]
    usual_s: float
    longest_s: float


def state_of(place: Place, nbytes: int, value: float) -> State:
    count = nbytes // 4 // _TENSORS
    return {str(i): torch.full((count,), value + i, device=place.device) for i in range(_TENSORS)}


def train(member: Member, lighthouse: str, job: str, nbytes: int) -> None:
    """A step alone."""
    member.kept["state"] = state_of(member.place, nbytes, 1.0)
    manager = member.kept["manager"] = _manager(member, lighthouse, job)
    _step(member, manager)


def train_on(member: Member) -> tuple[float, float]:
    """Until some steps with the newcomer are committed. Returns the usual step's seconds, and those of the
    longest."""
    manager, took, together = member.kept["manager"], [], 0
    while together < _STEPS:
        began = time.perf_counter()
        _step(member, manager)
        took.append(time.perf_counter() - began)
        outcome = manager.last_outcome()
        together += outcome is not None and outcome.participants == 2
    manager.shutdown(finished=True)
    return statistics.median(took), max(took)


def join(
    member: Member, lighthouse: str, job: str, nbytes: int, same_host: bool
) -> tuple[bool, dict[str, float]]:
    """Heal, and train on. `same_host`: the source's memory may be read; else as from another machine."""
    member.kept["state"] = state_of(member.place, nbytes, -1.0)
    identity = host_identity if same_host else bytes
    heals: list[dict[str, float]] = []
    with mock.patch.object(target, "host_identity", identity):
        manager = _manager(member, lighthouse, job)

        def note(event: Event) -> None:
            if event.kind == HEAL_DONE:
                heals.append({k: event.data[k] for k in ("bytes", "same_host_bytes", "seconds")})

        manager.telemetry.add_sink(note)
        together = 0
        while together < _STEPS:
            _step(member, manager)
            outcome = manager.last_outcome()
            together += outcome is not None and outcome.participants == 2
    expected = state_of(member.place, nbytes, 1.0)
    right = all(torch.equal(expected[key], value) for key, value in member.kept["state"].items())
    manager.shutdown(finished=True)
    return right and len(heals) == 1, heals[-1]


def _manager(member: Member, lighthouse: str, job: str) -> Manager:
    def load(state: State) -> None:
        for key, value in state.items():
            if value is not member.kept["state"][key]:
                member.kept["state"][key].copy_(value)

    return manager_of(
        member,
        lighthouse,
        1,
        lambda: dict(member.kept["state"]),
        load,
        member.place.group(member.index, GROUP_TIMEOUT_S),
        use_async_quorum=True,
        job_id=job,
    )


def _step(member: Member, manager: Manager) -> None:
    """As DDP does it: what backward has first is reduced while the device is busy with the rest."""
    manager.start_quorum()
    computes = member.index == 0  # the newcomer has a device of its own, elsewhere
    if computes:
        _compute(member, _FIRST_REDUCED)
    reduced = manager.allreduce(member.place.full(member.index, 1024, 1.0))
    if computes:
        _compute(member, 1 - _FIRST_REDUCED)
    reduced.wait()
    manager.should_commit()


def _compute(member: Member, share: float) -> None:
    """Keep the device busy for this part of a step, as forward and backward do."""
    place, kept = member.place, member.kept
    if "factors" not in kept:
        kept["factors"] = torch.randn(
            2, place.side, place.side, device=place.device, dtype=torch.bfloat16
        )
        _multiply(kept["factors"], 10)  # the first ones are slow
        place.synchronize()
        began = time.perf_counter()
        _multiply(kept["factors"], 10)
        place.synchronize()
        kept["products"] = round(10 * place.step_s / (time.perf_counter() - began))
    _multiply(kept["factors"], round(kept["products"] * share))


def _multiply(factors: torch.Tensor, times: int) -> None:
    product = torch.empty_like(factors[0])
    for _ in range(times):
        torch.mm(factors[0], factors[1], out=product)


def _join(crew: Crew, lighthouse: str, job: str, nbytes: int, same_host: bool) -> Joined:
    crew.call(0, train, lighthouse, job, nbytes).result()
    others = crew.call(0, train_on)
    right, cost = crew.call(1, join, lighthouse, job, nbytes, same_host).result()
    return Joined(right, cost, *others.result())


def heal(place: Place, *, same_host: bool) -> Answered:
    """The stall is that of the state's bytes: a join makes new communicators, and a newcomer whose collective waits
    on a GPU that it shares with the source takes a part of the source's time, which is so with a small state too."""
    with coordinator(1) as lighthouse, place.crew(2, GROUP_TIMEOUT_S) as crew:
        _join(crew, lighthouse, "first", SMALL_BYTES, same_host)  # which loads libraries
        healed = _join(crew, lighthouse, "large", place.heal_bytes, same_host)
        small = _join(crew, lighthouse, "small", SMALL_BYTES, same_host)
    cost = healed.cost
    stall = (healed.longest_s - small.longest_s) / healed.usual_s
    read = cost["same_host_bytes"] / cost["bytes"]
    measured = (
        f"{'healed' if healed.right and small.right else 'NOT HEALED'} at "
        f"{cost['bytes'] / cost['seconds'] / 1e9:.2f} GB/s, {read:.0%} of it read from the source's memory; "
        f"the source's longest step {healed.longest_s * 1e3:.0f} ms, {small.longest_s * 1e3:.0f} ms where a member "
        f"joins with {SMALL_BYTES >> 10} KiB, usually {healed.usual_s * 1e3:.0f} ms: stall {stall:.1%}"
    )
    bar = f"the source's stall at most {STALL:.0%} of a step"
    if same_host:
        bar += ", all of it read from there"
    good = healed.right and small.right and stall <= STALL and read == same_host
    return measured, bar, good
