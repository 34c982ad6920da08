"""Carries out the replica's effects: on the process group and the heal transport.

Each rank of a member advertises a `RankAddress`. It is sent in `Join` and comes back in `Quorum`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ft_core.config import JobOptions, default_name
from ft_core.environment import SHARED_JOB
from ft_core.heal import HealDenied, HealError, HealKey, HealServer, Interrupt, fetch
from ft_core.process_group import ProcessGroup, ProcessGroupError
from ft_core.replica.events import (
    Abort,
    Configure,
    Configured,
    Fetched,
    FetchState,
    Tried,
    TryToReach,
    Withdraw,
)
from ft_core.replica.status import RanksHold
from ft_core.telemetry import HEAL_DONE, HEAL_START, QUORUM, REVOKED, SERVE, Telemetry
from lighthouse.errors import ProtocolError
from lighthouse.waits import Overdue
from lighthouse.wire.codec import MessageCodec
from lighthouse.wire.messages import MAX_NAMED, Member, Silence, name_of

log = logging.getLogger("ft_core")

ABORT_PATIENCE_S = 0.05


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where the process group and the heal server of one rank are reached."""

    process_group: bytes
    heal: str


addresses = MessageCodec(1, {"rank": RankAddress})
"""How a `RankAddress` travels."""


class DataPlane:
    """Carries out Configure, TryToReach, FetchState, Withdraw and Abort. See `control.Plane` for threads.

    `report` is called with an event when the work is over. `into` gives the tree to receive in
    place (or None); the fetched tree waits in `take_state` for the training loop.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        options: JobOptions,
        *,
        host: str,
        telemetry: Telemetry,
        into: Callable[[], Any],
    ) -> None:
        self.process_group = process_group
        process_group.advertise(host)
        self._server = HealServer(host=host, options=options)
        self._options = options
        self._telemetry, self._into = telemetry, into
        self._configuring, self._aborted = -1, 0  # quorums
        self._state: tuple[HealKey, Any] | None = None
        self.report: Callable[[Configured | Fetched | Tried], object] = lambda event: None
        self.when_diverged: Callable[[], object] = lambda: None
        """Called when this member's state has turned out to differ from its peers'. Any thread."""
        self._heal: tuple[threading.Thread, Interrupt] | None = None  # the newest one
        self._reach_lock = threading.Lock()
        self._reaching: list[threading.Thread] = []  # guarded by `_reach_lock`
        self._warned = options.job_id != SHARED_JOB or options.group_rank > 0
        self._own, self._owners = "", [""]  # replica_ids: this one's, by rank of the last group

    def address(self) -> bytes:
        """This rank's `RankAddress`, encoded."""
        return addresses.encode(RankAddress(self.process_group.address(), self._server.address))

    @property
    def source(self) -> str:
        """Where this rank's states are served."""
        return self._server.address

    def observed(self, step: int) -> bool:
        """Whether an observer waits for a state of this step. Any thread; costs nothing."""
        since = self._server.observed_from
        return since is not None and since <= step

    # ------------------------------------------------------------------ effects

    def configure(self, effect: Configure) -> None:
        """Plane thread. Blocks until the group is usable, has failed, or is revoked."""
        self._say_company([m.replica_id for m in effect.members])
        self._telemetry.emit(
            QUORUM,
            quorum_id=effect.quorum_id,
            replica_rank=effect.replica_rank,
            members=[m.replica_id for m in effect.members],
            healing=[m.replica_id for m in effect.members if m.healing],
            reason=effect.why,
        )
        if unreadable := self._unreadable(effect.members):
            error = f"no address can be read of {', '.join(map(name_of, unreadable))}"
            log.warning("quorum %s: no process group: %s", effect.quorum_id, error)
            self.report(Configured(effect.quorum_id, error, _named(unreadable)))
            return
        error, missed = "", []
        owners, mesh = self._mesh(effect.members)
        rank = owners.index(effect.members[effect.replica_rank].replica_id)
        rank += 0 if self._options.ranks_hold is RanksHold.SHARDS else self._options.group_rank
        self._own, self._owners = owners[rank], owners
        told: set[int] = set()

        def tell(ranks: Iterable[int]) -> None:
            told.update(ranks)
            self.report(Tried(_named(owners[each] for each in sorted(told)), ()))

        def tell_silent(ranks: Sequence[int]) -> None:
            """Ranks of this group wait for each other, too; of these the group itself hears."""
            others = [each for each in ranks if owners[each] != self._own][:MAX_NAMED]
            members = tuple(owners[each] for each in others)
            numbers = tuple(self._number(each) for each in others)
            silence = Silence(effect.quorum_id, self._options.group_rank, members, numbers)
            self.report(Tried((), (), silence))

        self.process_group.when_missed(tell)
        self.process_group.when_silent(tell_silent)
        # First set, then compare: `abort` does both in the other order, so that one of the two
        # notices the other where they cross. Last of all: a sink of telemetry may take long.
        self._configuring = effect.quorum_id
        if self._aborted >= effect.quorum_id:
            self._configuring = -1  # nobody waits for it to be entered
            return
        try:
            timeout_s = self._options.timeouts.timeout_s
            self.process_group.configure(effect.quorum_id, rank, mesh, timeout_s)
        except Exception as failure:  # whatever failed: there is no group, and the vote is no
            error = str(failure) or type(failure).__name__
            if isinstance(failure, ProcessGroupError):
                missed = [owners[each] for each in failure.missed if each not in told]
            given_up = self._aborted >= effect.quorum_id  # the machine knows, and has said why
            level = logging.DEBUG if given_up else logging.WARNING
            log.log(level, "quorum %s: no process group: %s", effect.quorum_id, error)
        self.report(Configured(effect.quorum_id, error, _named(missed)))

    def unanswered(self) -> tuple[str, ...] | None:
        """Members that a collective waits for in vain, as far as they can be identified: their
        machines acknowledge nothing of what is sent to them. None: there are none. Any thread."""
        ranks, owners = self.process_group.unanswered(), self._owners
        missed = [owners[each] for each in sorted(ranks) if owners[each] != self._own]
        return _named(missed) if ranks else None

    def _say_company(self, members: list[str]) -> None:
        """Warn once of members that may belong to another job, where no job id tells.

        Two starts of one script are told apart by their equal names (one of them is refused), or by too many
        members. So neither may be unknown."""
        named, expected = self._options.name != default_name(), self._options.expected_replicas
        too_many = 0 < expected < len(members)
        if self._warned or len(members) < 2 or (named and expected and not too_many):
            return
        self._warned = True
        why = f", which is more than the {expected} expected" if too_many else ""
        log.warning(
            "this job has no id, so it is shared by all replica groups at this lighthouse that have "
            "none; they are %s%s. If they are not one training, set FT_JOB_ID for each",
            ", ".join(map(name_of, members)),
            why,
        )

    def try_to_reach(self, effect: TryToReach) -> None:
        """Any thread; does not block. Tries in a thread of its own: a configure need not wait."""
        thread = threading.Thread(
            target=self._try_to_reach, args=(effect,), name="ft-reach", daemon=True
        )
        with self._reach_lock:
            try:
                thread.start()
            except RuntimeError as failure:  # no threads are left; the pair goes on resting
                log.warning("could not try to connect to other members: %s", failure)
                return
            self._reaching = [each for each in self._reaching if each.is_alive()] + [thread]

    def _try_to_reach(self, effect: TryToReach) -> None:
        unreadable = self._unreadable(effect.members)
        asked = tuple(m for m in effect.members if m.replica_id not in unreadable)
        owners, mesh = self._mesh(asked)
        try:
            failed = self.process_group.unreachable(mesh, self._options.timeouts.timeout_s)
        except Exception:  # the thread's outer edge; without an answer the pair goes on resting
            log.exception("could not try to connect to %s", ", ".join(m.replica_id for m in asked))
            return
        missed = _named([*unreadable, *(owners[each] for each in sorted(failed))])
        reached = [m.replica_id for m in asked if m.replica_id not in missed]
        self.report(Tried(missed, tuple(reached[: MAX_NAMED - len(missed)])))

    def abort(self, effect: Abort) -> None:
        """Any thread; does not block."""
        self._telemetry.emit(REVOKED, quorum_id=effect.quorum_id, reason=effect.reason)
        self._aborted = max(self._aborted, effect.quorum_id)
        if self._configuring == effect.quorum_id:
            self._await_entry()
        self.process_group.revoke(ProcessGroupError(effect.reason), quorum_id=effect.quorum_id)

    def _await_entry(self) -> None:
        """The plane thread has entered `configure` of the process group, or is microseconds away from it."""
        give_up, overdue = time.monotonic() + ABORT_PATIENCE_S, Overdue()
        while self.process_group.quorum_id < self._configuring and not overdue.passed(
            give_up, time.monotonic()
        ):
            time.sleep(0)

    def withdraw(self, effect: Withdraw) -> None:
        """Any thread; does not block."""
        self._server.disown(self._options.as_written(effect.reason))
        if effect.diverged:
            self.when_diverged()

    def interrupt(self) -> None:
        """Any thread: end a configure, a heal and all collectives, for good.

        Where none is under way here, peers may still read what this member has sent them.
        """
        self._aborted = sys.maxsize
        self._stop_heal()
        self._await_entry()
        if not self.process_group.idle:
            self.process_group.revoke(ProcessGroupError("shut down"))

    def fetch(self, effect: FetchState) -> None:
        """Plane thread. Start to fetch a state, in a thread of its own, so that the process group
        can be configured meanwhile.

        A fetch under way is stopped, and reports nothing more: both may be received into the
        same memory.
        """
        before, interrupt = self._stop_heal(), None
        try:
            interrupt = Interrupt()
            thread = threading.Thread(
                target=self._run_fetch,
                args=(effect, interrupt, before),
                name="ft-heal",
                daemon=True,
            )
            thread.start()
        except (OSError, RuntimeError) as failure:  # no descriptors are left, or no threads
            if interrupt is not None:
                interrupt.close()
            self.report(Fetched(effect, str(failure)))
            return
        self._heal = thread, interrupt

    def _run_fetch(
        self, effect: FetchState, interrupt: Interrupt, before: threading.Thread | None
    ) -> None:
        """Heal thread."""
        if before is not None:
            before.join()
        done = Fetched(effect) if interrupt.is_set else self._fetch(effect, interrupt)
        superseded = interrupt.is_set
        interrupt.close()
        if not superseded:
            self.report(done)

    def _stop_heal(self) -> threading.Thread | None:
        """Any thread. Returns the thread, which ends soon."""
        if self._heal is None:
            return None
        thread, interrupt = self._heal
        interrupt.set()
        return thread

    def _fetch(self, effect: FetchState, interrupt: Interrupt) -> Fetched:
        """Heal thread. Blocks until the state has arrived, or can't be had."""
        names = [m.replica_id for m in effect.sources]
        self._telemetry.emit(HEAL_START, step=effect.step, sources=names)
        key = HealKey(effect.step, effect.lineage)
        deadline = time.monotonic() + self._options.timeouts.heal_timeout_s
        try:
            tree, stats = fetch(
                [self._address_of(m).heal for m in effect.sources],
                key,
                into=self._into,
                deadline=deadline,
                options=self._options,
                interrupt=interrupt,
            )
        except Exception as failure:  # whatever failed: there is no state, and the vote is no
            expected = isinstance(failure, HealError)
            if not interrupt.is_set:
                log.warning(
                    "heal to step %s failed: %s", effect.step, failure, exc_info=not expected
                )
            denied = isinstance(failure, HealDenied)
            said = self._options.as_written(str(failure)) or type(failure).__name__
            return Fetched(effect, said, denied=denied)
        self._state = key, tree
        self._telemetry.emit(
            HEAL_DONE,
            step=effect.step,
            bytes=stats.bytes,
            same_host_bytes=stats.same_host_bytes,
            seconds=stats.seconds,
            sources=names,
        )
        return Fetched(effect)

    # ------------------------------------------------------------------ the training loop

    def take_state(self, step: int, lineage: str) -> Any:
        """The fetched tree of exactly this version; it can be taken once."""
        assert self._state is not None and self._state[0] == HealKey(step, lineage)
        _, tree = self._state
        self._state = None
        return tree

    def publish(
        self,
        step: int,
        lineage: str,
        tree: Any,
        targets: int,
        holds: Callable[[], bool],
        *,
        copy: bool = False,
        shown: bool = False,
    ) -> None:
        """Serve `tree` as the state (step, lineage) to `targets` members, or `shown` to observers; returns at once,
        unless it is to `copy` all of it.

        Else large tensors are served as they are: the step that follows must not change them before
        `freeze` was called. Small ones are copied. `holds`: whether this rank still holds that state.
        """
        start = time.perf_counter()
        key = HealKey(step, lineage)
        self._server.publish(
            key, tree, copy=copy, expected_targets=targets, holds=holds, shown=shown
        )
        self._telemetry.emit(SERVE, step=step, seconds=time.perf_counter() - start)

    def withhold(self, step: int, lineage: str, reason: str) -> None:
        """Refuse the state (step, lineage) to members that ask for it, and tell them why."""
        self._server.withhold(HealKey(step, lineage), self._options.as_written(reason))

    @property
    def quiet(self) -> bool:
        """Whether no reader reads what is published."""
        return self._server.quiet

    def freeze(self) -> None:
        """The state is about to change: copy what targets have not received (mostly nothing)."""
        self._server.freeze()

    def retire(self) -> None:
        """Stop serving."""
        self._server.retire()

    def close(self) -> None:
        """After the plane thread has ended."""
        heal = self._stop_heal()
        with self._reach_lock:
            reaching = list(self._reaching)
        for thread in (*reaching, *([heal] if heal is not None else [])):
            thread.join()
        self._server.close()
        self.process_group.shutdown()

    def _mesh(self, members: tuple[Member, ...]) -> tuple[list[str], list[bytes]]:
        """The ranks of the process group of `members`: (their replica_ids, their addresses)."""
        if self._options.ranks_hold is RanksHold.SHARDS:
            mine = [self._address_of(m).process_group for m in members]
            return [m.replica_id for m in members], mine
        owners = [m.replica_id for m in members for _ in m.addresses]
        frames = [frame for m in members for frame in m.addresses]
        return owners, [addresses.decode(frame).process_group for frame in frames]

    def _number(self, rank: int) -> int:
        """The number in its replica group of a rank of the process group."""
        if self._options.ranks_hold is RanksHold.SHARDS:
            return self._options.group_rank
        return rank % self._options.group_world_size

    def _unreadable(self, members: tuple[Member, ...]) -> list[str]:
        """Members (replica_ids) whose addresses are not those of as many ranks as a group has here."""
        found = []
        for member in members:
            try:
                read = [addresses.decode(frame) for frame in member.addresses]
            except ProtocolError:
                read = []
            if len(read) != self._options.group_world_size:
                found.append(member.replica_id)
        return found

    def _address_of(self, member: Member) -> RankAddress:
        """Of the rank of this one's number."""
        address: RankAddress = addresses.decode(member.addresses[self._options.group_rank])
        return address


def _named(replica_ids: Iterable[str]) -> tuple[str, ...]:
    """Each once, as many as a `ReachReport` may name."""
    return tuple(dict.fromkeys(replica_ids))[:MAX_NAMED]
