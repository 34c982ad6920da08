"""Which faults happen when: drawn from a seed before anything starts. PURE."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SYNC, ASYNC, GROUP, RANKS, DILOCO = MODES = ("sync", "async", "group", "ranks", "diloco")
MEAN_PAUSE_S = 4.0
QUIET_BEGIN_S = 5.0

WEIGHTS = {
    "kill": 6,
    "stop": 4,
    "term": 3,
    "storm": 2,
    "kill_all": 1,
    "lighthouse_kill": 2,
    "lighthouse_stop": 1,
    "cut_pair": 3,
    "cut_lighthouse": 2,
    "stray": 2,
}
"""How often each kind of fault is drawn, in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained. `networks`: each replica group has a network of its own, which may be cut."""

    mode: str
    groups: int
    ranks: int
    networks: bool

    @property
    def kinds(self) -> Sequence[str]:
        """The faults that this run can have."""
        without = set() if self.networks else {"cut_pair", "cut_lighthouse"}
        if self.mode == DILOCO:  # its worker has no checkpoints, and trains on after SIGTERM
            without |= {"kill_all", "term"}
        return [kind for kind in WEIGHTS if kind not in without]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `at_s` after the start; `for_s`: how long it lasts; `groups`, `rank`: where."""

    at_s: float
    kind: str
    groups: tuple[int, ...] = ()
    rank: int = 0
    for_s: float = 0.0
    both_ways: bool = True
    seed: int = field(default=0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def schedule(
    seed: int, seconds: float, shape: Shape, kinds: Sequence[str] | None = None
) -> list[Fault]:
    """The faults of a run: the same ones for the same arguments. `kinds`: only these."""
    chance = random.Random(f"{seed} {shape}")
    possible = [kind for kind in shape.kinds if kinds is None or kind in kinds]
    faults, at_s = [], QUIET_BEGIN_S
    while possible:
        at_s += chance.expovariate(1 / MEAN_PAUSE_S)
        if at_s >= seconds:
            break
        (kind,) = chance.choices(possible, [WEIGHTS[kind] for kind in possible])
        faults.append(_fault(chance, kind, at_s, shape))
    return faults


def _fault(chance: random.Random, kind: str, at_s: float, shape: Shape) -> Fault:
    everyone = range(shape.groups)
    count = {"cut_pair": 2, "storm": chance.randint(2, shape.groups)}.get(kind, 1)
    lasts = {"stop": 8.0, "cut_pair": 15.0, "cut_lighthouse": 6.0, "lighthouse_stop": 5.0}
    return Fault(
        at_s=round(at_s, 3),
        kind=kind,
        groups=tuple(chance.sample(everyone, count)),
        rank=chance.randrange(shape.ranks),
        for_s=round(chance.uniform(0.1, lasts.get(kind, 2.0)), 3),
        both_ways=chance.random() < 0.5,
        seed=chance.randrange(1 << 30),
    )
