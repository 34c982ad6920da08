"""The options of one member of a job: made once, from arguments, environment and framework.

`JobOptions` is handed on whole, from `Manager` or an integration down to heal source and target.
Arguments beat environment variables (`ft_core.environment`). Imports no torch.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from ft_core.environment import COMPARE_STEPS, SHARED_JOB, ReplicaEnv
from ft_core.replica.status import CopyIndex, ParticipationRule, RanksHold, WorldSizeMode
from lighthouse.config import Timeouts, normalize_address
from lighthouse.wire.messages import INCARNATION_DIGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """All options of one rank of a replica group. `resolve` makes them.

    Attributes:
        name: of the replica group: stable over restarts, unique in the job.
        job_id: keeps two jobs on one lighthouse apart.
        room_id: keeps the trainings of one job apart, where it has several.
        lighthouse: "tcp://host:port"; "": one is started on this machine.
        min_replicas: no quorum forms with fewer replica groups, and no step is committed with fewer
            participants.
        expected_replicas: the first quorum waits for this many replica groups; 0: not known.
        spares: how many of the expected replica groups are hot spares (`ft_core.replica.shares`).
        commit: "quorum": all members commit a step or none does. "group": each replica group acts
            on its own vote.
        async_quorum: `start_quorum` returns at once, and a heal runs alongside the step.
        own_loop: the manager is used by a training loop, and not by an integration.
        init_sync: members that start with different states take the first one's. False: their
            states are equal already, and nothing is compared.
        weighted: means are weighted by the samples of each participant's batch.
        world_size_mode: see `WorldSizeMode`.
        max_retries: how many discarded steps in a row are tried again; None: no limit.
        compare_steps: members compare all of their parameters once in so many committed steps; 0:
            never. All members choose alike.
        timeout_s: seconds that one step's communication may take; `timeouts` derives from it.
        quorum_timeout_s: how long a step waits for its quorum; None: while the lighthouse answers.
        connect_timeout_s: how long the lighthouse may be unreachable; None: derived.
        heartbeat_s: how often a connected host proves that it is alive; None: derived.
        group_rank, group_world_size: of this process in its replica group.
        ranks_hold: what the ranks of a replica group hold, see `RanksHold`.
        store_addr, store_port: of the group's rendezvous store; "" and 0 with one rank.
        interface: IP address, or name of a network interface, to advertise; "": the one that routes
            to the lighthouse.
        watch_process: start the watcher, which reports this process's death (Linux).
        heal_port: where this rank's heal server listens; 0: any free port. The bytes of a state go over
            another, free port, as those of the process group do.
        token: shared secret; a heal server refuses members that present another one.
        heal_allow_objects: let states hold arbitrary Python objects, which travel by pickle: only on
            a network that you trust. All members choose alike.
        trains: a supervisor counts this manager's steps. False: they come before the training.
        objects_option: how a user of this integration writes `heal_allow_objects=True`.
        timeouts: every duration of the protocol; derived.

    Raises ValueError, in one sentence, for a value that no job can have.
    """

    name: str
    job_id: str = SHARED_JOB
    room_id: str = "default"
    lighthouse: str = ""
    min_replicas: int = 1
    expected_replicas: int = 0
    spares: int = 0
    commit: str = "quorum"
    async_quorum: bool = True
    own_loop: bool = False
    init_sync: bool = True
    weighted: bool = False
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    max_retries: int | None = None
    compare_steps: int = COMPARE_STEPS
    timeout_s: float = 60.0
    quorum_timeout_s: float | None = None
    connect_timeout_s: float | None = None
    heartbeat_s: float | None = None
    group_rank: int = 0
    group_world_size: int = 1
    ranks_hold: RanksHold = RanksHold.SHARDS
    store_addr: str = ""
    store_port: int = 0
    interface: str = ""
    watch_process: bool = True
    heal_port: int = 0
    token: str = field(default="", repr=False)
    heal_allow_objects: bool = False
    trains: bool = True
    objects_option: str = "Manager(heal_allow_objects=True)"
    timeouts: Timeouts = field(init=False)

    def __post_init__(self) -> None:
        if self.own_loop:
            self._check_own_loop()
        for name, least in (
            ("min_replicas", 1),
            ("expected_replicas", 0),
            ("spares", 0),
            ("max_retries", 0),
            ("compare_steps", 0),
            ("group_world_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.group_rank < self.group_world_size:
            raise ValueError(
                f"the rank in the replica group must be from 0 to {self.group_world_size - 1} "
                f"(the group's world size less one), got {self.group_rank}"
            )
        if self.commit not in ("quorum", "group"):
            raise ValueError(f'commit must be "quorum" or "group", got {self.commit!r}')
        if not isinstance(self.ranks_hold, RanksHold):
            raise ValueError(f'ranks_hold must be "shards" or "copies", got {self.ranks_hold!r}')
        if self.quorum_timeout_s is not None and not self.quorum_timeout_s > 0:
            raise ValueError(f"quorum_timeout_s must be positive, got {self.quorum_timeout_s}")
        if not 0 <= self.heal_port <= 65_535:
            raise ValueError(f"port must be from 0 (any free port) to 65535, got {self.heal_port}")
        if self.spares:
            self._check_spares()
        if self.lighthouse:
            normalize_address(self.lighthouse)
        timeouts = Timeouts.derive(
            self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            heartbeat_timeout_s=None if self.heartbeat_s is None else 3 * self.heartbeat_s,
        )
        object.__setattr__(self, "timeouts", timeouts)

    def _check_spares(self) -> None:
        if not self.expected_replicas:
            raise ValueError(
                "spares needs the number of all replica groups, spares included: expected_replicas, or "
                "NUM_REPLICA_GROUPS"
            )
        if self.data_shares < self.min_replicas:
            raise ValueError(
                f"spares={self.spares} of {self.expected_replicas} replica groups leaves "
                f"{self.data_shares} that contribute, fewer than min_replicas={self.min_replicas}"
            )
        served = "quorum", False, WorldSizeMode.DYNAMIC
        if (self.commit, self.async_quorum, self.world_size_mode) != served:
            raise ValueError(
                'spares needs commit="quorum", a synchronous quorum (use_async_quorum=False) and '
                "WorldSizeMode.DYNAMIC: which group holds which share of the data follows from each commit"
            )

    def _check_own_loop(self) -> None:
        """In the words of `Manager`; integrations have their own."""
        if self.min_replicas < 1:
            raise ValueError(f"min_replica_size must be at least 1, got {self.min_replicas}")
        if 0 < self.expected_replicas < self.min_replicas:
            raise ValueError(
                f"min_replica_size ({self.min_replicas}) must be at most the number of replica groups "
                f"({self.expected_replicas}: expected_replicas, or NUM_REPLICA_GROUPS), or no step is ever "
                "committed"
            )

    @classmethod
    def resolve(cls, chosen: object = None, **arguments: Any) -> JobOptions:
        """Options from `arguments`, else from `chosen`, else from the environment, else the defaults.

        `chosen`: a framework's own options; those of its attributes are taken that have the name of
        a field here. A value of None or "" counts as not given. Durations are seconds or timedeltas.
        Raises ValueError. Any thread.
        """
        env = ReplicaEnv.read()
        known: dict[str, Any] = {
            "name": env.name or default_name(),
            "job_id": env.job_id,
            "lighthouse": env.lighthouse,
            "expected_replicas": env.num_groups,
            "compare_steps": env.compare_steps,
            "heartbeat_s": env.heartbeat_s,
            "group_rank": env.group_rank,
            "group_world_size": env.group_world_size,
            "store_addr": env.master_addr,
            "store_port": env.master_port,
            "interface": env.interface,
        }
        options = [f.name for f in fields(cls) if f.init]
        taken = {name: getattr(chosen, name, None) for name in options}
        for said in (taken, arguments):
            known |= {name: value for name, value in said.items() if value not in (None, "")}
        for name, value in known.items():
            if isinstance(value, timedelta):
                known[name] = value.total_seconds()
        if known.get("ranks_hold") in ("shards", "copies"):
            known["ranks_hold"] = RanksHold(known["ranks_hold"])
        return cls(**known)

    def as_written(self, text: str) -> str:
        """A message of a heal, with the option's name as the user of this integration writes it."""
        return text.replace("heal_allow_objects=True", self.objects_option, 1)

    @property
    def group_commit(self) -> bool:
        """Whether a replica group acts on its own vote."""
        return self.commit == "group"

    @property
    def parts(self) -> int:
        """Into how many parts the state of a replica group is divided: one per rank, or one
        that rank 0 holds."""
        return self.group_world_size if self.ranks_hold is RanksHold.SHARDS else 1

    @property
    def data_shares(self) -> int:
        """How many replica groups contribute at most, where the job has spares."""
        return self.expected_replicas - self.spares

    @property
    def place(self) -> CopyIndex:
        """This rank's number among those of its group that hold a copy each."""
        if self.ranks_hold is RanksHold.SHARDS:
            return CopyIndex()
        return CopyIndex(self.group_rank, self.group_world_size)

    @property
    def heals_first(self) -> bool:
        """Whether members that heal do so before they compute, and contribute to that step. A group of an integration may
        have to take part in a step of its peers' that it can't compute."""
        return self.own_loop and not (self.async_quorum or self.spares)

    @property
    def participation(self) -> ParticipationRule:
        """Which members contribute to a step."""
        return ParticipationRule(
            self.world_size_mode, self.min_replicas, self.place, self.heals_first
        )

    @property
    def schema(self) -> dict[str, str]:
        """Those options that must be equal in all members."""
        size = self.place.size
        found = {"ranks of a replica group": str(size)} if size > 1 else {}
        if self.compare_steps != COMPARE_STEPS:
            found["parameters are compared"] = f"in {self.compare_steps} steps"
        if self.heals_first:
            found["members that heal"] = "contribute (use_async_quorum=False)"
        if self.spares:
            said = f"{self.data_shares}; {self.spares}; {self.min_replicas}"
            found["shares of the data; spares; min_replicas"] = said
        return found | ({"mean": "by samples"} if self.weighted else {})


UNNAMED = JobOptions(name="")
"""Defaults only: for a heal outside of a job."""


def new_replica_id(name: str) -> str:
    """`name:incarnation`; never the same twice."""
    return f"{name}:{uuid.uuid4().hex[:INCARNATION_DIGITS]}"


def default_name() -> str:
    """A name for a replica group that was given none."""
    return f"{socket.gethostname()}-{os.getpid()}"
