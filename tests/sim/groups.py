"""Replica groups of several ranks in the simulator: the real `GroupLeader` between `Replica` machines
and the real lighthouse.

Each rank number is a world of its own (`World`): the processes of that rank in all groups, with
their own mesh, state and checker, as with sharded models. What ties the worlds together are the
leaders, so all that a rank is promised must hold in each world, and all ranks of a group must hear
the same of each step. Leaders talk to the lighthouse over the simulator's network; ranks talk to
their leader over links that keep order and lose nothing while both live.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

from ft_core.replica.group_leader import GroupEffect, GroupLeader, SendUp, peer_of
from ft_core.replica.machine import Replica
from ft_core.replica.status import ParticipationRule
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.machine.job import Remember
from lighthouse.wire.messages import (
    JobKey,
    Join,
    Quorum,
    Refused,
    Reply,
    Request,
    Vote,
)
from tests.sim.checker import Checker, Position, Violation
from tests.sim.clock import Clock
from tests.sim.cluster import START, Cluster, Start
from tests.sim.keeper import GroupsKeeper
from tests.sim.lighthouses import Lighthouses
from tests.sim.network import Link, Network, NetworkProfile
from tests.sim.plane import Plane
from tests.sim.process import Habits, Process, shares_of_states
from tests.sim.profile import Profile, heals_first

JOB = JobKey("job", "room0")
LOCAL_S = (0.0002, 0.01)
"""How far a rank is from its leader, at least and at most; it stays so, since its link keeps order."""
RESTART_S = 0.3
COMMITS_WANTED = 3
"""Steps that all ranks of all groups must have made together once faults have stopped."""
FAULTS = (
    "kill a rank",
    "kill the leader",
    "kill the group",
    "no",
    "give up",
    "all give up",
    "hang a rank",
    "lighthouse",
)


class RankChecker(Checker):
    """A rank's yes is not its group's: it may be told "discard" of a step that others commit when
    another rank of its group hung, and the group was evicted."""

    group_yes: Set[tuple[str, int, int]] = frozenset()

    def discarded(
        self, replica_id: str, quorum_id: int, step: int, ok: bool, position: Position, heals: bool
    ) -> None:
        ok = ok and (replica_id, quorum_id, step) in self.group_yes
        super().discarded(replica_id, quorum_id, step, ok, position, heals)


class World:
    """What a `Process` takes for its cluster: one rank number of all groups."""

    short = staticmethod(Cluster.short)

    def __init__(self, groups: Groups, rank: int) -> None:
        self.groups, self.rank, self.tracing = groups, rank, groups.tracing
        self.clock, self.work_rng, self.profile = groups.clock, groups.rng, groups.profile
        self.network = self  # `attach` and `send_up`
        self.running: dict[str, Process] = {}
        self.checkpoints: dict[str, Any] = {}
        self.shares = shares_of_states(groups.profile)
        self.checker = RankChecker(
            now=lambda: self.clock.now,
            unreachable=lambda: frozenset(groups.excused | groups.torn()),
            living=lambda: frozenset(self.running),
            cut_since=lambda since: frozenset(groups.excused),
            life=lambda: sum(groups.network.lives),
            lighthouses=groups.homes,
            heals_first=groups.profile.heals_first,
        )
        self.checker.group_yes = groups.group_yes
        self.checkers = {JOB: self.checker}
        self.planes = {JOB: Plane(self.clock, self.work_rng, self.checker)}

    def log(self, text: str) -> None:
        self.groups.log(f"rank {self.rank} of {text}")

    def make_replica(self, template: Join, *, resend_s: float, revoke_grace_s: float) -> Replica:
        rule = ParticipationRule(heals_first=self.profile.heals_first)
        return Replica(template, resend_s=resend_s, revoke_grace_s=revoke_grace_s, rule=rule)

    def expected(self, job: JobKey) -> int:
        return self.profile.expected_replicas

    def attach(self, link: Link) -> None:
        self.clock.after(self.work_rng.random() * 0.01, link.owner.link_up)

    def send_up(self, link: Link, message: Request) -> None:
        group = self.groups.living.get(link.name)
        if group is not None:
            self.clock.after(group.away_s[self.rank], group.asked, self.rank, message)

    def process_ended(self, process: Process) -> None:
        """It has left, or was refused."""
        if process.alive:
            process.alive = False
            self.ended(process)
            self.groups.rank_ended(process.replica_id, self.rank)

    def observed(self, process: Process, shown: Start) -> None:
        self.groups.keeper.sees_part(process.replica_id, self.rank, shown)

    def disowned(self, process: Process) -> None:
        self.groups.keeper.disowned()

    def ended(self, process: Process) -> None:
        self.running.pop(process.replica_id, None)
        if not self.groups.running:
            self.groups.keeper.alone()
        self.checker.ended(process.replica_id)


class Group:
    """One life of a replica group: its leader, and a process in each world."""

    def __init__(self, groups: Groups, slot: str, life: int) -> None:
        self.groups, self.slot, self.replica_id = groups, slot, f"{slot}:{life}"
        self.leader = GroupLeader(len(groups.worlds))
        self.alive = True
        self.link = Link(self.replica_id, self)
        self.away_s = [groups.rng.uniform(*LOCAL_S) for _ in groups.worlds]
        self.ranks = {
            world.rank: Process(
                world,  # type: ignore[arg-type]
                slot,
                JOB,
                life,
                replace(groups.habits, forward_s=groups.rng.uniform(0.04, 0.1)),
                start,
            )
            for world, start in zip(groups.worlds, groups.starts_of(slot), strict=True)
        }

    def start(self) -> None:
        self.groups.network.attach(self.link)
        for rank, process in self.ranks.items():
            self.groups.worlds[rank].running[self.replica_id] = process
            process.start()

    # ------------------------------------------------------------------ the leader

    def asked(self, rank: int, message: Request) -> None:
        if self.alive:
            self._apply(self.leader.handle(peer_of(rank), message))

    def hear(self, message: Reply) -> None:
        if self.alive:
            self._apply(self.leader.from_lighthouse(message))

    def link_up(self) -> None:
        if self.leader.unanswered is not None:
            self.groups.network.send_up(self.link, self.leader.unanswered)

    def link_down(self) -> None:
        pass

    def _apply(self, effects: list[GroupEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendUp):
                message = effect.message
                if isinstance(message, Vote) and message.ok:
                    key = self.ranks[0].group_key
                    self.groups.group_yes.add((self.replica_id, key, message.step))
                self.groups.network.send_up(self.link, effect.message)
                continue
            for rank, process in self.ranks.items():
                if peer_of(rank) in effect.peers:
                    self.groups.clock.after(self.away_s[rank], process.hear, effect.message)
        self.leader.check()

    # ------------------------------------------------------------------ ends

    def kill(self, rank: int) -> None:
        process = self.ranks[rank]
        if not process.alive:
            return
        process.crash()
        self.groups.worlds[rank].ended(process)
        if rank == 0:
            self._leader_gone()
        else:
            self.lost(rank)

    def lost(self, rank: int) -> None:
        """The leader sees the connection of `rank` close, after what it had sent."""
        self.groups.clock.after(2 * self.away_s[rank], self._lost, rank)

    def _lost(self, rank: int) -> None:
        if self.alive:
            self._apply(self.leader.disconnected(peer_of(rank)))
        self.groups.restart_if_ended(self)

    def _leader_gone(self) -> None:
        self.alive = False
        self.groups.network.break_link(self.link, lighthouse_s=0.002, process_s=0.0)
        for rank, process in self.ranks.items():
            gone = Refused(JOB, "replica group broken: its leader is gone")
            self.groups.clock.after(self.away_s[rank], process.hear, gone)
        self.groups.restart_if_ended(self)

    def rank_ended(self, rank: int) -> None:
        if rank == 0:
            self.groups.clock.after(2 * self.away_s[rank], self._leader_gone)
        else:
            self.lost(rank)


@dataclass
class Groups:
    """The whole: `slots` groups of `size` ranks, lighthouses, faults of `kinds` by `seed`."""

    seed: int
    slots: tuple[str, ...] = ("a", "b", "c")
    size: int = 2
    kinds: tuple[str, ...] = FAULTS
    faults: int = 6
    faulty_s: float = 6.0
    keep_every_s: float = 0.0
    """Interval of the keeper's fetches; 0: there is none."""
    kills_all: int = 3
    """How often all groups are killed, where there is a keeper."""
    compare_steps: int = 1
    homes: int = 1
    """How many lighthouses share the address."""
    tracing: bool = False
    clock: Clock = field(default_factory=Clock)
    living: dict[str, Group] = field(default_factory=dict)
    lives: list[Group] = field(default_factory=list)
    group_yes: set[tuple[str, int, int]] = field(default_factory=set)
    excused: set[str] = field(default_factory=set)
    struck: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    """What the lighthouses have been asked, by the kind of message."""
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"groups {self.seed}")
        habits = random.Random(f"habits {self.seed}")
        self.habits = Habits(
            asynchronous=habits.random() < 0.3,
            buckets=habits.choice((1, 1, 2)),
            checkpoint_every=habits.choice((0, 0, 5)),
        )
        self.profile = Profile(
            slots=self.slots,
            timeouts=Timeouts.derive(self.rng.choice((3.0, 6.0))),
            heal_in_place=self.rng.random() < 0.5,
            lighthouses=self.homes,
            expected_replicas=len(self.slots) if self.keep_every_s or self.homes > 1 else 0,
            compare_steps=self.compare_steps,
            heals_first=heals_first(self.seed, self.habits.asynchronous),
        )
        network = NetworkProfile(
            heartbeat_timeout_s=self.profile.timeouts.heartbeat_timeout_s, stable_peers=True
        )
        self.network = Network(self.clock, self.rng, network, self.homes)
        config = LighthouseConfig(min_replicas=1, timeouts=self.profile.timeouts)
        skews_s = [0.0, *(self.rng.uniform(-1e6, 1e6) for _ in range(1, self.homes))]
        self.lighthouses = Lighthouses(self.clock, self.network, config, self, self.rng, skews_s)
        self.worlds: list[World] = []
        self.keeper = GroupsKeeper(self, JOB, self.keep_every_s, self.size)
        self.worlds = [World(self, rank) for rank in range(self.size)]
        self.checkers = self.worlds[0].checkers
        self._lives = dict.fromkeys(self.slots, 0)
        self._whole: dict[str, list[Start]] = {}

    # ------------------------------------------------------------------ groups

    @property
    def running(self) -> dict[tuple[str, int], Process]:
        """The processes of all ranks."""
        return {(name, w.rank): p for w in self.worlds for name, p in w.running.items()}

    def starts_of(self, slot: str) -> list[Start]:
        """Of its ranks: the last checkpoint that is whole, unless the keeper has a newer state."""
        parts = [world.checkpoints.get(slot, START) for world in self.worlds]
        if len({position for position, _, _ in parts}) == 1:
            self._whole[slot] = parts
        return self.keeper.parts_of(self._whole.get(slot, [START] * self.size))

    def spawn(self, slot: str) -> None:
        self._lives[slot] += 1
        group = Group(self, slot, self._lives[slot])
        self.living[group.replica_id] = group
        self.lives.append(group)
        group.start()

    def restart_if_ended(self, group: Group) -> None:
        """The launcher: a group that has lost a rank is started again when all have ended."""
        if group.replica_id not in self.living or any(p.alive for p in group.ranks.values()):
            return
        if group.alive:
            group.alive = False
            self.network.break_link(group.link, lighthouse_s=0.002, process_s=0.0)
        del self.living[group.replica_id]
        self.clock.after(RESTART_S, self.spawn, group.slot)

    def rank_ended(self, replica_id: str, rank: int) -> None:
        group = self.living.get(replica_id)
        if group is not None:
            group.rank_ended(rank)

    def torn(self) -> set[str]:
        """Groups whose ranks hold different states: together they hold none."""
        found = set()
        for replica_id in self.living:
            held = {world.checker.at.get(replica_id) for world in self.worlds}
            if len(held) > 1:
                found.add(replica_id)
        return found

    # ------------------------------------------------------------------ what the lighthouses say

    def crash_lighthouse(self) -> None:
        self.excused |= set(self.living)
        self.lighthouses.crash()

    def arrives(self, home: int, peer: bytes, message: Request) -> None:
        self.asked[type(message).__name__] += 1
        if self.tracing:
            self.log(f"lighthouse {home} <- {peer.decode()}: {Cluster.short(message)}")

    def shows(self, quorum: Quorum) -> None:
        self.keeper.hears(quorum)
        for world in self.worlds:
            world.checker.starts(quorum)

    def evicts(self, job: JobKey, replica_id: str) -> None:
        for world in self.worlds:
            world.checker.evicts(replica_id)

    def forms(self, effect: Remember) -> None:
        for world in self.worlds:
            world.checker.announced(effect.nonce, effect.quorum_id, effect.members)

    def log(self, text: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.clock.now:9.4f} {text}")

    # ------------------------------------------------------------------ faults

    def _links(self, slot: str) -> list[Link]:
        return [group.link for group in self.living.values() if group.slot == slot]

    def strike(self, kind: str) -> None:
        """Let a fault of this kind happen to some group now."""
        if kind == "lighthouse":
            self.crash_lighthouse()
            self.clock.after(self.rng.choice((0.1, 1.0)), self.lighthouses.start)
            return
        if not self.living:
            return
        if kind == "kill all":
            for replica_id in sorted(self.living):
                self.excused.add(replica_id)
                self.kill(self.living[replica_id])
            return
        group = self.living[self.rng.choice(sorted(self.living))]
        rank = self.rng.randrange(self.size)
        self.excused.add(group.replica_id)
        self.struck.append(kind)
        if kind == "kill a rank":
            group.kill(rank)
        elif kind == "kill the leader":
            group.kill(0)
        elif kind == "kill the group":
            self.kill(group)
        elif kind == "no":
            group.ranks[rank].habits.error_rate = 0.3
        elif kind == "hang a rank":
            group.ranks[rank].habits.hung = True
            self.clock.after(self.rng.choice((0.5, 4.0)), group.ranks[rank].unhang)
        else:
            for number in range(self.size) if kind == "all give up" else (rank,):
                group.ranks[number].habits.gives_up = True

    def flip(self) -> None:
        """A bit of one rank's part flips: the state of its group is not that of its peers."""
        group = self.living[self.rng.choice(sorted(self.living))]
        group.ranks[self.rng.randrange(self.size)].flip()
        for world in self.worlds:
            world.checker.flipped.add(group.replica_id)

    def kill(self, group: Group) -> None:
        """All of its processes."""
        for number in reversed(range(self.size)):
            group.kill(number)

    def calm(self) -> None:
        self.lighthouses.start()
        if self.homes > 1:
            self.network.mend()
            self.lighthouses.lead((0,))
            self.lighthouses.resume()
            self.lighthouses.crash(1)
        for group in self.living.values():
            for process in group.ranks.values():
                process.habits.error_rate, process.habits.gives_up = 0.0, False
                if process.habits.hung:
                    process.unhang()

    def run(self) -> None:
        """Raises Violation (a broken promise) or AssertionError (a broken invariant)."""
        for home in range(self.homes):
            self.clock.at(0.0, self.lighthouses.start, home)
        if self.homes > 1:
            front = random.Random(f"front {self.seed}")
            self.lighthouses.mislead(front, self.faulty_s, self.slots, self._links)
        for slot in self.slots:
            self.clock.at(self.rng.random() * 0.3, self.spawn, slot)
        kinds = self.rng.sample(self.kinds, min(self.rng.randint(1, 4), len(self.kinds)))
        for _ in range(self.faults):
            when = self.rng.uniform(0.2, self.faulty_s)
            self.clock.at(when, self.strike, self.rng.choice(kinds))
        for _ in range(self.kills_all if self.keep_every_s else 0):
            self.clock.at(self.rng.uniform(1.5, self.faulty_s), self.strike, "kill all")
        self.clock.run_until(self.faulty_s)
        self.calm()
        wanted = max(self._steps(), default=0) + COMMITS_WANTED
        until = self.clock.now + self.profile.recovery_s
        if not self.clock.run_until(until, lambda: self._all_past(wanted)):
            raise Violation(f"L1: steps {self._steps()} {self.profile.recovery_s:.0f} s later")
        self._agree()

    def _steps(self) -> list[int]:
        return [p.replica.step for w in self.worlds for p in w.running.values()]

    def _all_past(self, step: int) -> bool:
        steps = self._steps()
        return len(steps) == len(self.slots) * self.size and min(steps) >= step

    def _agree(self) -> None:
        """All ranks of a group have heard the same of each step, in all worlds."""
        for key in self.worlds[0].checker.told:
            for replica_id in self.worlds[0].checker.told[key]:
                heard = {
                    world.checker.told[key][replica_id]
                    for world in self.worlds
                    if replica_id in world.checker.told.get(key, {})
                }
                if len(heard) > 1:
                    raise Violation(f"ranks of {replica_id} heard {heard} of {key}")
        for group in self.lives:
            attempts = zip(*(process.attempts for process in group.ranks.values()), strict=False)
            for number, made in enumerate(attempts, 1):
                under = {quorum_id for quorum_id, _ in made if quorum_id is not None}
                ends = {committed for _, committed in made if committed is not None}
                # What a rank hears after it has left may be of a quorum that another rank has left, too.
                if len(ends) > 1 or (len(under) > 1 and ends != {False}):
                    raise Violation(f"attempt {number} of {group.replica_id} is {made}")
