"""A simulated process: the real `Replica` machine, a training loop, a heal server, a connection.

The loop is a generator that does what a manager does: it yields how long it computes, or a condition
that it waits for. Its model state is a number: committing a sum hashes the sum into it, so equal
numbers mean equal histories. So does which process holds which share of the data (`ft_core.replica.shares`), as each
process finds it from its state and the quorum under which it was bound. A paused process does nothing and finds all it missed when it goes on;
a hung loop stands still while the rest of the process works.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ft_core.replica.events import (
    Abort,
    Begin,
    Bind,
    CastVote,
    Configure,
    Configured,
    Connected,
    Depart,
    Disconnected,
    Effect,
    Entered,
    Fail,
    Fetched,
    FetchState,
    Loaded,
    Overwrite,
    Published,
    Rejoin,
    Remark,
    ReplicaEvent,
    StopWaiting,
    Transmit,
    Tried,
    TryToReach,
    Unapplied,
    Withdraw,
)
from ft_core.replica.machine import Replica
from ft_core.replica.shares import Shares
from ft_core.replica.status import Attempt, Stage, View
from lighthouse.wire.messages import (
    NO_QUORUM,
    NOT_COUNTED,
    TORN,
    JobKey,
    Join,
    Leave,
    Reply,
    Silence,
    Term,
    Vote,
)
from tests.sim.checker import id_of, key_of, state_after
from tests.sim.network import Link
from tests.sim.plane import Contribution, Sum

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.profile import Profile

Wait = float | Callable[[], bool]
Position = tuple[int, str]


@dataclass(slots=True)
class Habits:
    """How one process behaves; faults change it while it runs."""

    forward_s: float = 0.1
    buckets: int = 1
    asynchronous: bool = False
    heal_s: float = 0.05
    heal_failures: float = 0.0
    configure_s: float = 0.005
    configure_failures: float = 0.0
    hung: bool = False
    error_rate: float = 0.0
    checkpoint_every: int = 0
    gives_up: bool = False  # after its next decision, if another process holds the state
    stops_waiting: bool = False  # for the answer to its next vote
    update_fails: bool = False  # the next one, if another process holds the state


def shares_of_states(profile: Profile) -> defaultdict[int, Shares]:
    """Who holds which share of the data, by the state that it is part of: one process is a spare."""
    count = max(1, len(profile.slots) - 1)
    start = Shares.vacant(count, min(profile.min_replicas, count))
    return defaultdict(lambda: start)


class Process:
    """See the module's docstring."""

    def __init__(
        self,
        cluster: Cluster,
        slot: str,
        job: JobKey,
        life: int,
        habits: Habits,
        start: tuple[Position, int, tuple[int, int]],
    ) -> None:
        self.cluster, self.clock, self.plane = cluster, cluster.clock, cluster.planes[job]
        self.rng: random.Random = cluster.work_rng
        self.checker = cluster.checkers[job]
        self.slot, self.job, self.habits = slot, job, habits
        self.replica_id = f"{slot}:{life}"
        (step, lineage), self.state, (genesis, held) = start
        options = cluster.profile
        template = Join(
            job,
            slot,
            self.replica_id,
            step,
            lineage,
            (self.replica_id.encode(),),
            group_commit=options.group_commit,
            min_replicas=options.min_replicas,
            expected_replicas=cluster.expected(job),
            can_heal=slot not in options.no_heal,
            genesis=genesis,
            held=held,
        )
        # Where there are several jobs, the lighthouse's option is the number of all their processes.
        if options.own_rules and cluster.work_rng.random() < 0.5 and options.jobs == 1:
            template = replace(template, min_replicas=0, expected_replicas=0)
        limits = options.timeouts
        self.replica: Replica = cluster.make_replica(
            template, resend_s=limits.resend_s, revoke_grace_s=limits.resend_s
        )
        self.alive, self.paused, self.left = True, False, False
        self.timers_first = False  # when it goes on after a pause; else in order of time
        self.stays_away_s = 0.0  # longer than its supervisor takes, once it has ended
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.snapshot: tuple[Position, int] | None = None
        self.fetched_state: tuple[Position, int] | None = None
        self.results: dict[tuple[int, int], Sum | None] = {}
        self._keys: dict[int, int] = {}  # of the quorums it was in, by quorum_id
        self.fetches = 0
        self.commits = 0
        self.attempts: list[tuple[int | None, bool | None]] = []  # bound under; committed
        self.updates = NOT_COUNTED  # since the last commit
        self.joined = False  # a quorum, as the supervisor's board says
        self.flipped = 0  # the bits of its state that are wrong
        self._showable = False  # the state may travel at the next boundary
        self._timer: float | None = None
        self._bound_at: float | None = None
        self._under: View | None = None  # the quorum under which the attempt was bound
        self._loop: Generator[Wait, None, None] = self._train()
        self._waits: Callable[[], bool] | None = None
        self._sleeping = False
        self.link = Link(self.replica_id, self)

    def start(self) -> None:
        self.cluster.network.attach(self.link)
        self.checker.born(self.replica_id, (self.replica.step, self.replica.lineage), self.state)
        self._advance()

    # ------------------------------------------------------------------ events

    def _event(self, call: Callable[..., None], *args: Any) -> None:
        """Everything that happens to the process goes through here."""
        if not self.alive:
            return
        if self.paused:
            self.backlog.append((call, args))
            return
        call(*args)
        self._settle()

    def _settle(self) -> None:
        """After an event: invariants, the loop's condition, the next timer."""
        if not self.alive:
            return
        if self._waits is not None and not self.habits.hung and self._waits():
            self._advance()
        self.replica.check()
        self._plan_timer()

    def _plan_timer(self) -> None:
        wanted = self.replica.deadline()
        if wanted is not None and (self._timer is None or wanted < self._timer):
            self._timer = wanted
            self.clock.at(wanted, self._timer_fires, wanted)

    def _timer_fires(self, planned: float) -> None:
        if self._timer == planned:
            self._timer = None
        wanted = self.replica.deadline()
        if self.paused or (wanted is not None and wanted <= self.clock.now):
            self._event(self._expire)
        elif self.alive:  # it has been put off since
            self._plan_timer()

    def _expire(self) -> None:
        wanted = self.replica.deadline()
        if wanted is not None and wanted <= self.clock.now:
            self.carry_out(self.replica.expire(self.clock.now))

    def hear(self, message: Reply) -> None:
        self._event(self._received, message)

    def _received(self, message: Reply) -> None:
        cluster = self.cluster
        if cluster.tracing:
            cluster.log(f"{self.replica_id} <- {cluster.short(message)}")
        self.checker.heard(self.replica_id, message)
        held = not self.replica.lineage.startswith(TORN)
        self.carry_out(self.replica.handle(message, self.clock.now))
        if held and self.replica.lineage.startswith(TORN):
            self._state_is_gone()

    def link_up(self) -> None:
        self._event(lambda: self.carry_out(self.replica.handle(Connected(), self.clock.now)))

    def link_down(self) -> None:
        self._event(lambda: self.carry_out(self.replica.handle(Disconnected(), self.clock.now)))

    def group_made(self, quorum_id: int, error: str, missed: tuple[str, ...] = ()) -> None:
        self._event(self._configured, quorum_id, error, missed)

    def _configured(self, quorum_id: int, error: str, missed: tuple[str, ...] = ()) -> None:
        if self._configuring == quorum_id:
            self._configuring = 0
        self._tell(Configured(id_of(quorum_id), error, missed))

    def connects(self, quorum_id: int) -> bool:
        return self.alive and self._configuring == quorum_id

    def hears_nothing(self, quorum_id: int, silent: tuple[str, ...]) -> None:
        silence = Silence(id_of(quorum_id), 0, silent, (0,) * len(silent))
        if not self.paused:
            self._event(self._tell, Tried((), (), silence))

    def reduced(self, quorum_id: int, sequence: int, total: Sum | None) -> None:
        self._event(self._reduced, quorum_id, sequence, total)

    def _reduced(self, quorum_id: int, sequence: int, total: Sum | None) -> None:
        self.results.setdefault((quorum_id, sequence), total)

    def noticed(self, quorum_id: int, sequence: int, missed: tuple[str, ...]) -> None:
        self._event(self._noticed, quorum_id, sequence, missed)

    def _noticed(self, quorum_id: int, sequence: int, missed: tuple[str, ...]) -> None:
        if (quorum_id, sequence) not in self.results:
            self._tell(Tried(missed, ()))
        self._reduced(quorum_id, sequence, None)

    def crash(self) -> None:
        self.alive = False
        self._loop.close()
        for quorum_id in self._groups:
            self.plane.leave(self.replica_id, quorum_id)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self.timers_first:
            self.timers_first = False
            self._event(self._expire)
        backlog, self.backlog = self.backlog, []
        for call, args in backlog:
            self._event(call, *args)

    def flip(self) -> None:
        """A bit of the state flips: shown and compared from now on. The sums do not have it, since the
        checker tells states apart by them."""
        self.flipped = 1 << 40
        self.checker.flipped.add(self.replica_id)

    def leave(self, reason: str) -> None:
        """A graceful goodbye in the midst of whatever happens."""
        self._event(self._leave, reason)

    def _leave(self, reason: str) -> None:
        self._tell(Depart(reason))
        self._gone()

    def _gone(self) -> None:
        self.left = True
        for quorum_id in self._groups:
            self.plane.leave(self.replica_id, quorum_id)
        self.clock.after(0.05, self.cluster.process_ended, self)

    def _tell(self, event: ReplicaEvent) -> None:
        self.carry_out(self.replica.handle(event, self.clock.now))

    # ------------------------------------------------------------------ effects

    @property
    def group_key(self) -> int:
        """`key_of` the quorum in view; 0: there was none yet."""
        view = self.replica.view
        return key_of(view.nonce, view.quorum_id) if view is not None else 0

    _groups: tuple[int, ...] = ()
    _configuring = 0  # whose group is being made

    def carry_out(self, effects: list[Effect]) -> None:
        cluster = self.cluster
        for effect in effects:
            if cluster.tracing:
                cluster.log(f"{self.replica_id} -> {cluster.short(effect)}")
            if isinstance(effect, Transmit):
                if isinstance(effect.message, Vote) and not effect.message.ok:
                    vote = effect.message
                    self.checker.votes_no(self.replica_id, self._keys[vote.quorum_id], vote.step)
                elif isinstance(effect.message, Leave):
                    self.checker.leaves(self.replica_id)
                cluster.network.send_up(self.link, effect.message)
            elif isinstance(effect, Configure):
                self._configure(effect)
            elif isinstance(effect, Abort):
                quorum_id = self._keys[effect.quorum_id]
                if self._configuring == quorum_id:
                    self._configuring = 0
                self.plane.leave(self.replica_id, quorum_id)
                self._break_own(quorum_id)
            elif isinstance(effect, Withdraw):
                self.snapshot = None
                if effect.diverged:
                    cluster.disowned(self)
            elif isinstance(effect, TryToReach):
                members = tuple(m.replica_id for m in effect.members)
                missed = self.plane.missed(self.replica_id, members)
                reached = tuple(m for m in members if m not in missed)
                delay_s = self.plane.connect_s * self.rng.random() if missed else 0.002
                self.clock.after(delay_s, self._event, self._tell, Tried(missed, reached))
            elif isinstance(effect, FetchState):
                self.fetches += 1
                give_up = self.clock.now + cluster.profile.timeouts.heal_timeout_s
                self.clock.after(0.002, self._fetch, effect, self.fetches, give_up)
            else:
                assert isinstance(effect, Remark)

    def _configure(self, effect: Configure) -> None:
        members, view = tuple(m.replica_id for m in effect.members), self.replica.view
        assert view is not None and view.quorum_id == effect.quorum_id
        key = self._keys[effect.quorum_id] = key_of(view.nonce, view.quorum_id)
        self.checker.configured(self.replica_id, key, effect.members)
        self.checker.require(
            not self._configuring,
            f"{self.replica_id} must wait for the group of quorum {self._configuring}, which may "
            "never be made, to make another",
        )
        self._configuring = key
        for quorum_id in self._groups:
            self.plane.leave(self.replica_id, quorum_id)
            self._break_own(quorum_id)
        self._groups = (key,)
        habits = self.habits
        delay_s = habits.configure_s * self.rng.random()
        if self.rng.random() < habits.configure_failures:
            self.clock.after(delay_s, self.group_made, key, "simulated failure")
            return
        self.clock.after(delay_s, self._event, self._join_group, key, members)
        limit_s = self.cluster.profile.timeouts.timeout_s
        self.clock.after(limit_s, self._configure_times_out, key)

    def _join_group(self, quorum_id: int, members: tuple[str, ...]) -> None:
        if quorum_id in self._groups:
            self.plane.configure(self, quorum_id, members)

    def _configure_times_out(self, quorum_id: int) -> None:
        view = self.replica.view
        if view is not None and self.group_key == quorum_id and not self.replica.ready:
            self.group_made(quorum_id, "timeout")

    def _break_own(self, quorum_id: int) -> None:
        """A blocked collective of an aborted group fails."""
        bound = self._bound
        if bound is not None and bound[0] == quorum_id and bound not in self.results:
            self.results[bound] = None

    def _fetch(self, effect: FetchState, number: int, give_up: float) -> None:
        """Look for a source that serves exactly this state."""
        if not self.alive or number != self.fetches:
            return
        if self.paused:
            self.backlog.append((self._fetch, (effect, number, give_up)))
            return
        if self.rng.random() < self.habits.heal_failures:
            self._event(self._fetch_ends, effect, number, None, "simulated failure")
            return
        key = (effect.step, effect.lineage)
        for member in effect.sources:
            source = self.cluster.running.get(member.replica_id)
            if source is None or source.paused or source.snapshot is None:
                continue
            if self.plane.apart(self.replica_id, source.replica_id):
                continue
            if source.snapshot[0] == key:
                self._spoil(effect)
                delay_s = self.habits.heal_s * (0.5 + self.rng.random())
                self.clock.after(
                    delay_s, self._event, self._arrived, effect, number, source, source.snapshot
                )
                return
        if self.clock.now >= give_up:
            self._event(self._fetch_ends, effect, number, None, "no source serves this state")
            return
        self.clock.after(0.03, self._fetch, effect, number, give_up)

    def _spoil(self, effect: FetchState) -> None:
        """A loop that waits receives into its own state, which is no state from here on; so does
        one that computes on what counts for nothing."""
        replica = self.replica
        in_step = self.habits.asynchronous
        if not self.cluster.profile.heal_in_place or (in_step and not self.lent):
            return
        self._tell(Overwrite(in_step))
        if replica.status.overwriting:
            self.state = -self.rng.getrandbits(40)
            self.checker.spoiled(self.replica_id, (replica.step, replica.lineage), self.state)

    def _arrived(
        self, effect: FetchState, number: int, source: Process, snapshot: tuple[Position, int]
    ) -> None:
        """The transfer is over, unless its source has dropped that state meanwhile. (Another one goes on
        where a source has died.)"""
        dropped = source.alive and source.snapshot != snapshot
        state, error = (None, "the source trained on") if dropped else (snapshot[1], "")
        self._fetch_ends(effect, number, state, error)

    def _fetch_ends(self, effect: FetchState, number: int, state: int | None, error: str) -> None:
        if number != self.fetches:
            return  # outrun by a later fetch
        key = (effect.step, effect.lineage)
        if state is not None:
            self.fetched_state = (key, state)
        self._tell(Fetched(effect, error))

    @property
    def place(self) -> tuple[Term, int]:
        """What its watcher says of it: the term that it obeys, and its newest quorum."""
        view = self.replica.view
        return self.replica.promised, NO_QUORUM if view is None else view.quorum_id

    # ------------------------------------------------------------------ the training loop

    _bound: tuple[int, int] | None = None

    def _advance(self) -> None:
        """Run the loop until it computes or waits for something that is not so yet."""
        self._waits = None
        while True:
            try:
                wait = next(self._loop)
            except StopIteration:
                if not self.left:
                    self._gone()
                return
            if isinstance(wait, float):
                self._sleeping = True
                self.clock.after(wait, self._event, self._wake)
                return
            if self.habits.hung or not wait():
                self._waits = wait
                return

    def _wake(self) -> None:
        if self.habits.hung:
            self._waits = lambda: True
            return
        self._advance()

    def unhang(self) -> None:
        self.habits.hung = False
        self._event(lambda: None)

    def _over(self) -> bool:
        return self.replica.stage in (Stage.REFUSED, Stage.LEFT)

    def _may_enter(self, heal: bool) -> bool:
        replica = self.replica
        if replica.attempt is Attempt.FAILED or self._over():
            return True
        if replica.attempt is Attempt.BOUND:
            return not (heal and replica.healing) or replica.state_fetched
        if not replica.ready:
            return False
        return not (heal and replica.healing) or replica.state_fetched

    def _enter(self, heal: bool) -> Generator[Wait, None, None]:
        """Wait until the attempt may go on; heal and serve at its boundary."""
        replica = self.replica
        while True:
            yield lambda: self._may_enter(heal)
            if replica.attempt is Attempt.FAILED or self._over():
                return
            if not (heal and replica.healing):
                break
            assert self.fetched_state is not None
            key, self.state = self.fetched_state
            self.updates, self.flipped = NOT_COUNTED, 0
            self._tell(Loaded())
            assert (replica.step, replica.lineage) == key, "loaded another state than fetched"
            self.checker.healed(self.replica_id, key, self.state)
        key = (replica.step, replica.lineage)
        if replica.targets and replica.published != key:
            self.snapshot = (key, self.state)
            self._tell(Published(key))
        elif replica.published is not None and not replica.status.still_read:
            self._tell(Published(None))
            self.snapshot = None
        self._tell(Entered())
        self.joined = self.joined or replica.stage is Stage.MEMBER

    def _train(self) -> Generator[Wait, None, None]:
        while not self._over():
            yield from self._step()
            if self.habits.gives_up and not self._over():
                yield self.rng.random() * 0.02  # in which it may hear of its peers
                if self._dispensable() and not self._over():
                    self.habits.gives_up = False
                    self._give_up()

    def _dispensable(self) -> bool:
        """Whether this process is to heal from another if it gives up its state."""
        view = self.replica.view
        return view is not None and any(
            not m.healing and m.replica_id != self.replica_id for m in view.members
        )

    def _give_up(self) -> None:
        """Its state is not what the quorum takes it for: join anew, and heal."""
        self._tell(Rejoin("simulated", join_now=self.replica.step % 2 == 1))
        self._state_is_gone()

    def _state_is_gone(self) -> None:
        self.snapshot, self.fetched_state, self.fetches = None, None, self.fetches + 1
        self.state = -self.rng.getrandbits(40)
        position = (self.replica.step, self.replica.lineage)
        self.checker.spoiled(self.replica_id, position, self.state)

    def _step(self) -> Generator[Wait, None, None]:
        replica, habits = self.replica, self.habits
        in_step = habits.asynchronous
        self.lent = in_step and (replica.stage is not Stage.MEMBER or replica.healing)
        self._tell(Begin(heal_in_step=in_step))
        self.attempts.append((None, None))
        shown = self._shown() if self._showable else None
        self._showable = False
        if not in_step or replica.stage is Stage.MEMBER:
            yield from self._enter(heal=not in_step)
        if self._over():
            return
        computed_on = self.state
        yield habits.forward_s * (0.5 + self.rng.random())
        if replica.attempt is not Attempt.FAILED:
            yield from self._enter(heal=not in_step)
        if self._over():
            return
        total: Sum | None = None
        if replica.ready and replica.attempt is Attempt.OPEN:
            total = yield from self._collectives(computed_on)
        if replica.attempt in (Attempt.OPEN, Attempt.BOUND):
            if total is None:
                self._tell(Fail("collective failed", follows=True))
            elif self.rng.random() < habits.error_rate:
                self._tell(Fail("simulated error"))
            else:
                yield from self._enter(heal=True)
        if self._over():
            return
        yield from self._end_step(total, shown)

    def _shown(self) -> tuple[Position, int, tuple[int, int]] | None:
        """What an observer sees at a boundary of the steady state."""
        replica = self.replica
        if not replica.status.entered:
            return None
        return (replica.step, replica.lineage), self.state ^ self.flipped, replica.origin

    def _collectives(self, computed_on: int) -> Generator[Wait, None, Sum | None]:
        replica, clock = self.replica, self.clock
        self._tell(Bind())
        view = replica.view
        assert view is not None
        self.attempts[-1], self._under = (view.quorum_id, None), view
        mine = next(m for m in view.members if m.replica_id == self.replica_id)
        part = None
        if not (mine.healing and self._stays_out()):
            part = Contribution(self.replica_id, computed_on, self.rng.getrandbits(40))
        total: Sum | None = None
        for bucket in range(self.habits.buckets):
            quorum_id = self.group_key
            sequence = self.plane.enter(self, quorum_id, view.step, part)
            self._bound = key = (quorum_id, sequence)
            clock.after(self._patience_s(), self._stalls, key)
            yield partial(self._collective_over, key)
            total = self.results.pop(key, None)
            self._bound = None
            if total is None or replica.attempt is not Attempt.BOUND:
                return None
            if bucket + 1 < self.habits.buckets:
                yield 0.001
                if replica.attempt is not Attempt.BOUND:
                    return None
        return total

    def _collective_over(self, key: tuple[int, int]) -> bool:
        return key in self.results or self.replica.attempt is not Attempt.BOUND

    def _stays_out(self) -> bool:
        """Whether a member that the quorum counts as healing stays out of sums (it must, unless it heals first)."""
        profile = self.cluster.profile
        return profile.healing_stays_out and not profile.heals_first

    def _patience_s(self) -> float:
        """How long a collective may wait: less where a peer has to heal first."""
        limits, view = self.cluster.profile.timeouts, self.replica.view
        healing = view is not None and any(m.healing for m in view.members)
        return limits.heal_timeout_s if healing else limits.timeout_s

    def _stalls(self, key: tuple[int, int]) -> None:
        if self._bound == key:  # else it has long ended
            self._event(self._stall, key)

    def _stall(self, key: tuple[int, int]) -> None:
        """A collective waited for longer than its timeout."""
        if self._bound == key and key not in self.results:
            self._tell(Fail("a collective stalled", stalled=True))

    def _end_step(
        self, total: Sum | None, shown: tuple[Position, int, tuple[int, int]] | None
    ) -> Generator[Wait, None, None]:
        replica, clock, habits = self.replica, self.clock, self.habits
        ok = replica.may_vote and total is not None
        step_before, lineage_before = replica.step, replica.lineage
        quorum_id = self.group_key
        if ok:
            self.checker.votes_yes(self.replica_id, quorum_id, step_before)
        control = f"{self.replica_id}".encode()
        reason = "" if ok else "lost the quorum"
        updates, digest = NOT_COUNTED, b""
        compare_steps = self.cluster.profile.compare_steps
        if compare_steps:
            updates = self.updates
            if step_before % compare_steps == 0:
                digest = ((self.state ^ self.flipped) % (1 << 64)).to_bytes(8, "little")
        every = self.cluster.profile.shut_every
        admits = not every or step_before % every < every // 2
        self._tell(CastVote(ok, reason, control, updates, digest, admits))
        settles = ok and habits.stops_waiting and not self.cluster.profile.group_commit
        if settles and replica.outcome is None:
            settles = yield from self._stop_waiting()
        yield lambda: replica.outcome is not None or replica.stage is Stage.REFUSED
        outcome = replica.outcome
        if outcome is None:
            return
        if settles and outcome.committed and not replica.lineage.startswith(TORN):
            self._tell(Unapplied("the loop went on without the outcome of its vote"))
            self.snapshot, self.fetched_state, self.updates = None, None, NOT_COUNTED
            self.fetches += 1
            return
        position = (replica.step, replica.lineage)
        self.attempts[-1] = (self.attempts[-1][0], outcome.committed)
        if not outcome.committed:
            heard = ok and not self.left  # one that leaves does not wait for the answer
            self.checker.discarded(
                self.replica_id, quorum_id, step_before, heard, position, replica.healing
            )
            return
        if position[1].startswith(TORN):
            return  # the state was given up, by another rank of the group, before the loop went on
        self.checker.require(total is not None, f"{self.replica_id} committed without a sum")
        assert total is not None
        if habits.update_fails and self._dispensable() and not self._over():
            habits.update_fails = False
            self._give_up()
            return
        self.state, self.updates = self._updated(total), 1
        self.checker.committed(
            self.replica_id,
            (step_before, lineage_before),
            position,
            self.state,
            total,
            outcome,
            clock.now,
        )
        self.commits += 1
        self._showable = admits
        if shown is not None and shown[0] == (
            step_before,
            lineage_before,
        ):  # else it has healed since
            self.cluster.observed(self, shown)
        every = self.habits.checkpoint_every
        if every and self.commits % every == 0:
            self.cluster.checkpoints[self.slot] = (position, self.state, replica.origin)

    def _updated(self, total: Sum) -> int:
        """The state that the committed step makes of the own one."""
        if self.cluster.profile.group_commit:
            return state_after(self.state, total)
        assert self._under is not None
        after = self.cluster.shares[self.state].after(self._under)
        state = state_after(self.state, total, after.holders)
        self.cluster.shares[state] = after
        return state

    def _stop_waiting(self) -> Generator[Wait, None, bool]:
        """The loop gives up the wait for its answer, and asks again later; True: it has begun another step
        meanwhile, and will not apply the outcome."""
        self.habits.stops_waiting = False
        self._tell(StopWaiting())
        yield self.rng.random() * 0.3
        if not self._over():
            self._tell(CastVote(True))
        return self.rng.random() < 0.5
