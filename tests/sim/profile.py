"""What a seed means: sizes, durations and which faults strike when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from lighthouse.config import Timeouts
from lighthouse.machine.pairs import ANSWER_S
from tests.sim.network import NetworkProfile

FAULTS = (
    "crash",
    "pause",
    "stall",
    "partition",
    "drop",
    "hang",
    "lighthouse",
    "leave",
    "leave_after_step",
    "false_death_notice",
    "bad_heal",
    "slow_heal",
    "bad_configure",
    "slow_configure",
    "errors",
    "slow",
)


MORE_FAULTS = ("lighthouse_pause", "kill_all", "stop_waiting", "update_fails", "finish")


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` something strikes `slot` (where it needs one) and lasts `for_s`."""

    at_s: float
    kind: str
    slot: str = ""
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """One run. `faulty_s`: length of the phase under faults; then they stop."""

    slots: tuple[str, ...] = ("a", "b", "c")
    jobs: int = 1
    lighthouses: int = 1
    min_replicas: int = 1
    expected_replicas: int = 0
    timeouts: Timeouts = field(default_factory=lambda: Timeouts.derive(6.0))
    network: NetworkProfile = field(default_factory=NetworkProfile)
    faulty_s: float = 10.0
    faults: tuple[Fault, ...] = ()
    forward_s: float = 0.1
    buckets: int = 1
    asynchronous: bool = False
    group_commit: bool = False
    journal: bool = True
    death_notices: float = 0.5
    checkpoint_every: int = 0
    restart_s: float = 0.5
    start_spread_s: float = 0.2
    heal_in_place: bool = False
    healing_stays_out: bool = True
    heals_first: bool = False  # members that heal contribute, too (`ParticipationRule`)
    compare_steps: int = 1  # at each so many steps votes tell what the state is; 0: never
    no_heal: tuple[str, ...] = ()  # slots that may not heal
    own_rules: bool = False  # slots wish for other numbers of members
    own_checkpoints: bool = False  # slots make checkpoints at other steps
    other_clocks: bool = False  # a lighthouse starts again on a host with another clock
    old_journal: bool = False  # ... with what its journal held some quorums ago
    keep_every_s: float = 0.0  # interval at which the keeper fetches the state; 0: there is none
    shut_every: int = 0  # of so many steps the second half ends where no state can be given

    @property
    def recovery_s(self) -> float:
        """L1's bound: how long after the last fault a healthy core may take to its next commits.

        In the worst case a hung member must first be evicted (step timeout, or the timeout of a
        collective that waits for it), the quorum that results loses another member that nobody
        noticed yet (revoke timeout), the lighthouse waits for members it knew (join timeout), and
        a member heals; and one that failed often before pauses for up to 8 heal timeouts.
        """
        t = self.timeouts
        once = t.timeout_s + t.step_timeout_s + 2 * t.revoke_timeout_s + t.join_timeout_s
        pause_s = 8 * t.heal_timeout_s
        if any(fault.kind == "cut" for fault in self.faults):
            # A pair rests for at most as long as it failed until then. Answers may be lost.
            pause_s += self.faulty_s + 2 * ANSWER_S
        return 2 * once + 4 * t.heal_timeout_s + pause_s + 20 * t.resend_s + 20 * self.forward_s


def profile_of(seed: int) -> Profile:
    """The run that `seed` names."""
    rng = random.Random(f"profile {seed}")
    count = rng.choice((2, 2, 3, 3, 3, 4, 4, 5, 6))
    slots = tuple("abcdef"[:count])
    timeout_s = rng.choice((3.0, 6.0, 6.0, 12.0))
    timeouts = Timeouts.derive(timeout_s)
    faulty_s = rng.uniform(3.0, 8.0)
    profile = Profile(
        slots=slots,
        jobs=2 if rng.random() < 0.06 else 1,
        min_replicas=rng.choice((1, 1, 1, max(1, count // 2), max(1, count - 1))),
        expected_replicas=rng.choice((0, 0, count)),
        timeouts=timeouts,
        network=_network(rng, timeouts),
        faulty_s=faulty_s,
        forward_s=rng.choice((0.05, 0.1, 0.1, 0.2, 0.5)),
        buckets=rng.choice((1, 1, 2)),
        asynchronous=rng.random() < 0.4,
        group_commit=rng.random() < 0.12,
        journal=rng.random() < 0.5,
        death_notices=rng.choice((0.0, 0.5, 1.0)),
        checkpoint_every=rng.choice((0, 0, 0, 5)),
        heal_in_place=rng.random() < 0.5,
        restart_s=rng.choice((0.05, 0.3, 1.0, 3.0)),
        start_spread_s=rng.choice((0.01, 0.2, 1.0)),
    )
    faults = _faults(rng, profile) + _given_up(seed, profile) + _cut(seed, profile)
    faults += _suspended(seed, profile)
    profile = replace(profile, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))
    profile = _kept(seed, _shut(seed, _more(seed, profile)))
    return replace(profile, heals_first=heals_first(seed, profile.asynchronous))


def dense_profile_of(seed: int) -> Profile:
    """The run that `seed` names, with other faults: many of few kinds in a short time. So what a process
    says about one of them crosses what it hears about another."""
    rng = random.Random(f"dense {seed}")
    profile = replace(profile_of(seed), faulty_s=rng.uniform(2.0, 5.0))
    some = (*FAULTS, *MORE_FAULTS, "give_up", "cut")
    kinds = rng.sample(some, rng.choice((1, 2, 2, 3)))
    limit = profile.timeouts.heartbeat_timeout_s
    faults = [
        Fault(
            rng.uniform(0.0, profile.faulty_s),
            rng.choice(kinds),
            rng.choice(profile.slots),
            rng.choice((0.1 * limit, 0.5 * limit, 2 * limit, 1.0)),
        )
        for _ in range(rng.choice((20, 40, 80)))
    ]
    faults += _suspended(seed, profile)
    return replace(profile, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _given_up(seed: int, profile: Profile) -> tuple[Fault, ...]:
    """In every fifth run some processes give up their state. Drawn apart: a seed keeps its other
    faults."""
    rng = random.Random(f"given up {seed}")
    if rng.random() > 0.2:
        return ()
    times = [rng.uniform(0.0, profile.faulty_s) for _ in range(rng.choice((1, 3, 10)))]
    return tuple(Fault(at_s, "give_up", rng.choice(profile.slots), 0.0) for at_s in times)


def _cut(seed: int, profile: Profile) -> tuple[Fault, ...]:
    """In every fifth run some hosts are cut off from another one. Drawn apart, as above."""
    rng = random.Random(f"cut {seed}")
    if rng.random() > 0.2:
        return ()
    times = [rng.uniform(0.0, profile.faulty_s) for _ in range(rng.choice((1, 2, 5)))]
    return tuple(
        Fault(at_s, "cut", rng.choice(profile.slots), rng.choice((0.5, 2.0, 5.0))) for at_s in times
    )


def _suspended(seed: int, profile: Profile) -> tuple[Fault, ...]:
    """In every tenth run virtual machines are suspended for about as long as a timeout: all that was due
    meanwhile is late, and comes at once. Drawn apart, as above."""
    rng = random.Random(f"suspended {seed}")
    if rng.random() > 0.1:
        return ()
    return tuple(
        Fault(
            rng.uniform(0.0, profile.faulty_s),
            rng.choice(("suspend", "suspend_lighthouse")),
            rng.choice(profile.slots),
            rng.uniform(0.1, 1.2) * profile.timeouts.timeout_s,
        )
        for _ in range(rng.choice((1, 2, 4)))
    )


def _more(seed: int, profile: Profile) -> Profile:
    """In every fourth run members and lighthouses have habits of their own, and all processes are struck
    at once. Drawn apart, as above."""
    rng = random.Random(f"more {seed}")
    if rng.random() > 0.25:
        return profile
    limit, kinds = profile.timeouts.heartbeat_timeout_s, rng.sample(MORE_FAULTS, rng.choice((1, 2)))
    faults = [
        Fault(
            rng.uniform(0.0, profile.faulty_s),
            rng.choice(kinds),
            rng.choice(profile.slots),
            rng.choice((0.5 * limit, 3 * limit, 2.0)),
        )
        for _ in range(rng.choice((1, 3, 6)))
    ]
    for_all = profile.min_replicas == 1 and not profile.expected_replicas
    return replace(
        profile,
        network=replace(profile.network, reconnect_s=rng.choice((0.02, 0.5, 3.0))),
        no_heal=(profile.slots[-1],) if for_all and rng.random() < 0.3 else (),
        own_rules=rng.random() < 0.3,
        own_checkpoints=rng.random() < 0.5,
        other_clocks=rng.random() < 0.5,
        old_journal=rng.random() < 0.5,
        faults=tuple(sorted((*profile.faults, *faults), key=lambda fault: fault.at_s)),
    )


def _shut(seed: int, profile: Profile) -> Profile:
    """In every third run members exchange something between their updates. Drawn apart, as above."""
    rng = random.Random(f"shut {seed}")
    return replace(profile, shut_every=rng.choice((0, 0, 0, 0, 4, 10)))


def heals_first(seed: int, asynchronous: bool) -> bool:
    """Whether members that heal contribute, too: in every other run with a synchronous quorum. Drawn
    apart, as above."""
    return not asynchronous and random.Random(f"heals first {seed}").random() < 0.5


def _kept(seed: int, profile: Profile) -> Profile:
    """In every fourth run there is a keeper of states, and all processes are killed. Drawn apart, as above."""
    rng = random.Random(f"kept {seed}")
    if rng.random() > 0.25:
        return profile
    times = [rng.uniform(0.3, 1.0) * profile.faulty_s for _ in range(rng.choice((1, 1, 2, 4)))]
    faults = [Fault(at_s, "kill_all") for at_s in times]
    if rng.random() < 0.3:
        faults.append(Fault(rng.uniform(0.0, profile.faulty_s), "keeper_dies"))
    return replace(
        profile,
        keep_every_s=rng.choice((0.1, 0.5, 2.0)),
        expected_replicas=rng.choice((profile.expected_replicas, len(profile.slots))),
        faults=tuple(sorted((*profile.faults, *faults), key=lambda fault: fault.at_s)),
    )


def _network(rng: random.Random, timeouts: Timeouts) -> NetworkProfile:
    profile = NetworkProfile(
        stable_peers=rng.random() < 0.3,
        heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        jitter_s=rng.choice((0.001, 0.004, 0.03)),
    )
    if rng.random() < 0.35:
        rate = rng.choice((0.01, 0.03, 0.1))
        profile = replace(profile, loss=rate, repeat=rate, reorder=rate)
    return profile


def _faults(rng: random.Random, profile: Profile) -> tuple[Fault, ...]:
    """A handful of kinds a run, so that runs differ in character."""
    kinds = rng.sample(FAULTS, rng.randint(1, 6))
    faults = []
    for _ in range(rng.choice((3, 6, 12, 24))):
        kind = rng.choice(kinds)
        at_s = rng.uniform(0.0, profile.faulty_s)
        limit = profile.timeouts.heartbeat_timeout_s
        for_s = rng.choice((0.5 * limit, 2 * limit, 1.0, 2.0, 4.0))
        faults.append(Fault(at_s, kind, rng.choice(profile.slots), for_s))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
