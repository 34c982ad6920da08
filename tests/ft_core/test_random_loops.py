"""Training loops that make mistakes at random, on real threads, Gloo and ZeroMQ: members at an equal
version hold equal weights all the same, no error reaches a loop that is not documented, and none waits
for ever."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_core.errors import QuorumUnavailable, StepInDoubt
from tests.harness.cluster import Replica, lighthouse, replicas

HASTY = timedelta(milliseconds=1)
STEPS, MORE = 24, 4
"""Steps that are committed while loops make mistakes, and after."""

Weights = dict[tuple[int, str], list[float]]


class Loop:
    """The training loop of one replica group. It makes a mistake in every other step or so; `careful`:
    none that costs it its state, or after which it heals from one that may be wrong, so that the job never
    loses all of its states. `options`: the manager's."""

    def __init__(
        self, server: Any, name: str, seed: str, *, careful: bool, seen: Weights, **options: Any
    ) -> None:
        self._server, self._name, self._options = server, name, options
        self._rng, self._seen = random.Random(seed), seen
        self._mistakes = [
            self.abandon,
            self.report,
            self.be_hasty,
            self.begin_twice,
            self.insist,
        ]
        if not careful:
            self._mistakes += [
                self.move,
                self.give_up,
                self.fail_to_update,
                self.leave_out_an_update,
                self.load_badly,
                self.restart,
                self.spoil,
                self.leave,
            ]
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
        version, held = (state["step"], state["lineage"]), self.replica.weights.tolist()
        assert self._seen.setdefault(version, held) == held, f"{self._name} differs at {version}"

    def _start(self) -> Replica:
        options = {"min_replica_size": 3, "expected_replicas": 3, **self._options}
        replica = Replica(self._server, self._name, self._rng.random(), **options)

        def load(state: Any) -> None:
            replica.weights[:4] = state["weights"][:4]
            if self._loads_badly:
                raise KeyError("momentum")
            replica.weights[4:] = state["weights"][4:]

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


@pytest.mark.parametrize("seed", range(2), ids=["synchronous", "asynchronous"])
def test_equal_versions_are_equal_weights(seed: int) -> None:
    seen: Weights = {}
    with lighthouse() as server:
        loops = [
            Loop(
                server,
                f"r{i}",
                f"{seed} {i}",
                careful=i == 0,
                seen=seen,
                use_async_quorum=seed % 2 == 1,
            )
            for i in range(3)
        ]
        replicas(*[loop.run for loop in loops])
        held = [loop.replica.weights.tolist() for loop in loops]
    assert held[0] == held[1] == held[2]
    assert len(sum((loop.made for loop in loops), Counter())) >= 10
