"""Training loops that make mistakes at random, on real threads, Gloo and ZeroMQ: members at an equal
version hold equal weights all the same, no error reaches a loop that is not documented, and none waits
for ever. So too where the lighthouse's answers are lost, repeated, late or made up."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch

from ft_core.errors import QuorumUnavailable, StepInDoubt
from ft_core.state import LARGE_BYTES
from lighthouse.machine.announce import Effect, Send
from lighthouse.wire.messages import TORN, Quorum, Revoke
from tests.harness.cluster import Replica, lighthouse, one_of_two, rendezvous, replicas

HASTY = timedelta(milliseconds=1)
FORWARD_S = 0.02
STEPS, MORE = 24, 4
"""Steps that are committed while loops make mistakes, and after."""

Weights = dict[tuple[int, str], list[float]]

HARMLESS = ("abandon", "report", "be_hasty", "begin_twice", "insist", "write_early")
"""Mistakes that cost a loop no state, and after which it heals from none that may be wrong: one group makes
no others, so that the job never loses all of its states."""
WITH_ITS_STATE = ("move", "give_up", "fail_to_update", "load_badly", "spoil")
AGAINST_THE_MAJORITY = ("leave_out_an_update",)
"""Of one group alone: two that leave out the same update are in the right, and the third heals from them."""
WITH_ITS_PROCESS = ("restart", "leave")
"""Of a group of one rank: the others of a larger one would have to be started again with it."""


class Loop:
    """The training loop of one rank. It makes one of `mistakes` in every other step or so. `options`: the
    manager's."""

    def __init__(
        self,
        server: Any,
        name: str,
        seed: str,
        *,
        mistakes: Sequence[str],
        seen: Weights,
        **options: Any,
    ) -> None:
        self._server, self._name, self._options = server, name, options
        self._rng, self._seen = random.Random(seed), seen
        self._starts = random.Random(name)  # the ranks of a group begin alike
        self._mistakes = [getattr(self, mistake) for mistake in mistakes]
        self._keeps_its_state = not set(mistakes) & set(WITH_ITS_STATE)
        self._loads_badly = False
        self.made: Counter[str] = Counter()
        self.replica = self._start()

    def run(self) -> None:
        try:
            self._train()
        finally:
            self.replica.close()

    def _train(self) -> None:
        while self.replica.manager.current_step() < STEPS:
            if self._rng.random() < 0.5:
                mistake = self._rng.choice(self._mistakes)
                self.made[mistake.__name__] += 1
                mistake()
            else:
                self.step()
        while self.replica.manager.current_step() < STEPS + MORE:
            self.step()

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        reduced = self.begin()
        if self.replica.manager.should_commit():
            self.update(reduced)

    def begin(self) -> torch.Tensor:
        return self.replica.begin(self._rng.random())

    def update(self, reduced: torch.Tensor) -> None:
        self.replica.weights -= reduced
        self.replica.manager.updated()
        self.note()

    def note(self) -> None:
        """The weights of a version, which are the same in all members that ever hold it."""
        state = self.replica.manager.state_dict()
        if state["lineage"].startswith(TORN):
            return  # another rank of this group has just lost its own
        assert len(self._queue.unique()) == 1, f"{self._name} has loaded a mixture of two states"
        version, held = (state["step"], state["lineage"]), self.replica.weights.tolist()
        assert self._seen.setdefault(version, held) == held, f"{self._name} differs at {version}"

    def _start(self) -> Replica:
        options = {"min_replica_size": 3, "expected_replicas": 3, **self._options}
        replica = Replica(self._server, self._name, self._starts.random(), **options)

        def load(state: Any) -> None:
            replica.weights[:4] = state["weights"][:4]
            if self._loads_badly:
                raise KeyError("momentum")
            replica.weights[4:] = state["weights"][4:]

        self._queue = queue = torch.zeros(2 * LARGE_BYTES // 4)
        replica.manager.register_state_dict_fn("queue", queue.copy_, lambda: queue)
        replica.manager.register_compared("weights", lambda: [replica.weights])
        replica.manager.set_state_dict_fns(load, lambda: {"weights": replica.weights})
        return replica

    # ------------------------------------------------------------------ mistakes

    def abandon(self) -> None:
        """Another step begins, before or after this one's collective."""
        self.replica.manager.start_quorum()
        if self._rng.random() < 0.5:
            self.replica.manager.allreduce(torch.ones(8))

    def begin_twice(self) -> None:
        self.replica.manager.start_quorum()
        self.step()

    def report(self) -> None:
        self.begin()
        self.replica.manager.report_error(RuntimeError("a bad batch"))
        assert not self.replica.manager.should_commit()

    def write_early(self) -> None:
        """Its forward changes a large tensor, which peers may be reading, before the vote. Within a step a
        receiver sees no change of its own loop's that bypasses the counters."""
        queue = self._queue if self._options.get("use_async_quorum") else self._queue.data
        first, last = queue.chunk(2)
        self.replica.manager.start_quorum()
        if not self._keeps_its_state and self.replica.heals_another():
            return  # one that heals from this group would have to heal from it again, and it may lose its state
        first.fill_(value := self._rng.random())
        time.sleep(self._rng.random() * FORWARD_S)
        last.fill_(value)
        reduced = self.replica.reduce(self._rng.random())
        if self.replica.manager.should_commit():
            self.update(reduced)

    def be_hasty(self) -> None:
        with suppress(QuorumUnavailable, StepInDoubt):
            self.replica.manager.start_quorum(timeout=HASTY)
            self.replica.manager.wait_quorum()

    def insist(self) -> None:
        """It asks again for an outcome that did not come in time."""
        reduced = self.begin()
        for patience in (HASTY, HASTY, None):
            try:
                if self.replica.manager.should_commit(timeout=patience):
                    self.update(reduced)
                return
            except StepInDoubt:
                assert patience is not None

    def give_up(self) -> None:
        """It does not: whether the step was committed, it never learns."""
        reduced = self.begin()
        with suppress(StepInDoubt):
            if self.replica.manager.should_commit(timeout=HASTY):
                self.update(reduced)

    def fail_to_update(self) -> None:
        reduced = self.begin()
        if self.replica.manager.should_commit():
            self.replica.weights[:4] -= reduced[:4]
            self.replica.manager.update_failed(MemoryError("out of memory"))

    def leave_out_an_update(self) -> None:
        self.begin()
        self.replica.manager.should_commit()

    def load_badly(self) -> None:
        """It heals, and its load function raises half way."""
        self.spoil()
        self._loads_badly = True
        with suppress(KeyError):
            self.replica.manager.start_quorum()
        self._loads_badly = False

    def move(self) -> None:
        self.begin()
        self.replica.manager.rejoin("moved", discard_state=False)

    def spoil(self) -> None:
        self.begin()
        self.replica.weights.fill_(99.0)
        self.replica.manager.rejoin("spoilt", join_now=self._rng.random() < 0.5)

    def restart(self) -> None:
        """In the middle of a step, or between two; it comes back with other weights."""
        if self._rng.random() < 0.5:
            self.replica.manager.start_quorum()
        self.replica.close()
        self.replica = self._start()

    def leave(self) -> None:
        """As at the end of its time on a machine."""
        self.replica.manager.start_quorum()
        self.replica.manager.leave_after_step()
        while not self.replica.manager.left():
            self.step()
        self.replica.close()
        self.replica = self._start()


class Unreliable:
    """The machine of a lighthouse whose answers a seed loses, repeats, holds back and makes up. The
    server's thread only."""

    LATE_S = 0.2
    KINDS: ClassVar = {"well": 80, "lost": 6, "twice": 6, "late": 6, "revoked": 2}
    """What becomes of an answer: how often of a hundred."""

    def __init__(self, machine: Any, seed: str) -> None:
        self._machine, self._rng = machine, random.Random(seed)
        self._held: list[tuple[float, Send]] = []
        self._newest: Send | None = None  # the newest quorum that was announced to a member
        self.made: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def handle(self, peer: Any, message: Any, now: float) -> list[Effect]:
        return self._answer(self._machine.handle(peer, message, now), now)

    def disconnected(self, peer: Any, now: float) -> list[Effect]:
        return self._answer(self._machine.disconnected(peer, now), now)

    def expire(self, now: float) -> list[Effect]:
        return self._answer(self._machine.expire(now), now)

    def deadline(self) -> float | None:
        dues = [due for due, _ in self._held]
        if (own := self._machine.deadline()) is not None:
            dues.append(own)
        return min(dues, default=None)

    def _answer(self, effects: list[Effect], now: float) -> list[Effect]:
        late = [send for due, send in self._held if due <= now]
        self._held = [entry for entry in self._held if entry[0] > now]
        return [*late, *(made for effect in effects for made in self._distort(effect, now))]

    def _distort(self, effect: Effect, now: float) -> list[Effect]:
        if not isinstance(effect, Send):
            return [effect]
        if isinstance(effect.message, Quorum):
            self._newest = effect
        kind = self._rng.choices(list(self.KINDS), list(self.KINDS.values()))[0]
        self.made[kind] += 1
        if kind == "lost":
            return []
        if kind == "twice":
            return [effect, effect]
        if kind == "late":
            self._held.append((now + self._rng.random() * self.LATE_S, effect))
            return []
        if kind == "revoked" and self._newest is not None:
            quorum = self._newest.message
            return [effect, Send(self._newest.peers, self._revoke(quorum))]
        return [effect]

    def _revoke(self, quorum: Any) -> Revoke:
        """Of a step that may be over, or not have begun."""
        step = quorum.step + self._rng.randrange(3)
        return Revoke(quorum.job, quorum.quorum_id, step, "a test made it up")


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "unreliable"])
@pytest.mark.parametrize("seed", range(2), ids=["synchronous", "asynchronous"])
def test_equal_versions_are_equal_weights(seed: int, reliable: bool) -> None:
    seen: Weights = {}
    costly = HARMLESS + WITH_ITS_STATE + WITH_ITS_PROCESS
    timeouts = {} if reliable else {"heartbeat_s": 0.05}  # what is lost is sent again soon
    with lighthouse(timeouts=timeouts) as server:
        unreliable = Unreliable(server._machine, f"lighthouse {seed}")
        if not reliable:
            server._machine = unreliable
        loops = [
            Loop(
                server,
                f"r{i}",
                f"{seed} {i}",
                mistakes=mistakes,
                seen=seen,
                use_async_quorum=seed % 2 == 1,
            )
            for i, mistakes in enumerate((HARMLESS, costly, costly + AGAINST_THE_MAJORITY))
        ]
        replicas(*[loop.run for loop in loops])
        held = [loop.replica.weights.tolist() for loop in loops]
    assert held[0] == held[1] == held[2]
    assert len(sum((loop.made for loop in loops), Counter())) >= 10
    assert reliable or all(unreliable.made[kind] >= 2 for kind in Unreliable.KINDS), unreliable.made


def test_so_are_those_of_both_ranks_of_each_group() -> None:
    """Each rank makes mistakes of its own: what it loses, its group loses."""
    seen: Weights = {}
    costly = HARMLESS + WITH_ITS_STATE
    mistakes = (HARMLESS, costly, costly + AGAINST_THE_MAJORITY)
    with lighthouse(all_join=True) as server, rendezvous(3) as stores:
        loops = [
            Loop(
                server,
                f"r{group}",
                f"0 {group} {rank}",
                mistakes=mistakes[group],
                seen=seen,
                **one_of_two(rank, store),
            )
            for group, store in enumerate(stores)
            for rank in (0, 1)
        ]
        replicas(*[loop.run for loop in loops])
        held = [loop.replica.weights.tolist() for loop in loops]
    assert held[1:] == held[:-1]
    assert len(sum((loop.made for loop in loops), Counter())) >= 8
