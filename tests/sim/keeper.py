"""The simulated keeper of states: an observer of one job, on the machine of all of its processes.

It decides by the rules of `ft_core.launch.kept`. It knows what it must not let happen:

K   When all processes of a job have died, no quorum forms from an older state than the keeper holds. (The
    job says how many groups it has, and none is known to be dead for longer than the join timeout: else
    it goes on with those that are here, by R6.)

That no process begins with a state that its peers have found to be a different one (K4) follows from S3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.launch.kept import Card, Version, takes
from lighthouse.wire.messages import JobKey, Quorum

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster, Start
    from tests.sim.groups import Groups

PLACE = ("job", "room", "schema")


class Keeper:
    """`every_s`: the interval of its fetches; 0: there is none."""

    def __init__(self, cluster: Cluster | Groups, job: JobKey, every_s: float) -> None:
        self._cluster, self.job, self._every_s = cluster, job, every_s
        self._card: Card | None = None
        self._state = 0
        self._due = 0.0
        self._alone = False
        """Whether all processes have died, and no quorum has formed since."""
        self.saved = 0
        """How often the job has gone on from what it holds."""

    def sees(self, shown: Start) -> bool:
        """K1 holds for `shown`. Whether it is kept."""
        now = self._cluster.clock.now
        if not self._every_s or now < self._due:
            return False
        (step, lineage), state, (genesis, held) = shown
        card = Card("tcp://source/word", PLACE, Version(step, lineage, genesis, held))
        if not takes(self._card, card):
            return False
        self._card, self._state, self._due = card, state, now + self._every_s
        return True

    def start_of(self, own: Start) -> Start:
        """With which state a process begins that has `own` (K3)."""
        (step, lineage), _, (genesis, held) = own
        kept = None if self._card is None else self._card.version
        mine = [p for p in self._cluster.running.values() if p.job == self.job]
        if kept is None or any(process.joined for process in mine):
            return own
        if not kept.begins_with(Version(step, lineage, genesis, held)):
            return own
        return (kept.step, kept.lineage), self._state, (kept.genesis, kept.held)

    def dies(self) -> None:
        """A new one holds nothing."""
        self._card, self._due, self._alone = None, 0.0, False

    def disowned(self) -> None:
        """K4: a process has learnt that its state is not its peers'."""
        self._card = None

    def alone(self) -> None:
        """All processes of the job have died."""
        self._alone = self._card is not None

    def hears(self, quorum: Quorum) -> None:
        """A lighthouse has formed `quorum`. One of the dead, whose silence it has not noticed yet, says
        nothing of where the job goes on."""
        checker = self._cluster.checkers[self.job]
        if not self._alone or checker.living().isdisjoint(checker.newest.members):
            return
        self._alone = False
        assert self._card is not None
        kept = self._card.version
        assert kept is not None
        start = Version(quorum.step, quorum.lineage, quorum.genesis, quorum.held)
        self.saved += start == kept
        profile = self._cluster.profile
        if profile.expected_replicas and profile.lighthouses == 1 and not profile.own_rules:
            older = quorum.genesis != kept.genesis or kept.newer_than(start)
            checker.require(
                not older, f"K: the job goes on from {start}, and the keeper holds {kept}"
            )


class GroupsKeeper(Keeper):
    """Of replica groups of several ranks: a version is kept when all ranks of one group have shown it."""

    def __init__(self, groups: Groups, job: JobKey, every_s: float, size: int) -> None:
        super().__init__(groups, job, every_s)
        self._size = size
        self._shown: dict[tuple[str, tuple[int, str]], dict[int, Start]] = {}
        self._parts: dict[int, Start] = {}

    def sees_part(self, replica_id: str, rank: int, shown: Start) -> None:
        """K1 holds for `shown`, which is the part of this rank."""
        parts = self._shown.setdefault((replica_id, shown[0]), {})
        parts[rank] = shown
        if len(parts) == self._size and self.sees(parts[0]):
            self._parts = parts

    def parts_of(self, own: list[Start]) -> list[Start]:
        """With which states the ranks of a group begin that have `own`: its rank 0 decides for all."""
        if self.start_of(own[0]) == own[0]:
            return own
        return [self._parts[rank] for rank in range(self._size)]
