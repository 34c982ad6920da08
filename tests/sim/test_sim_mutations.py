"""Break a machine on purpose, and see a net say so. A net that finds nothing proves nothing.

`mutants.py` takes single rules out of the machines. Here run those mutants of which it is known what the
simulator is to say; all of them: `python -m tests.sim.mutants`.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from ft_core.replica.machine import Replica
from ft_core.replica.status import Attempt
from lighthouse.wire.messages import Quorum
from tests.harness.waiting import PATIENCE_S
from tests.sim.mutants import ROOT, complaint, seeds
from tests.sim.network import NetworkProfile
from tests.sim.profile import Fault, Profile, profile_of
from tests.sim.run import run


def test_a_broken_machine_is_caught() -> None:
    command = [sys.executable, "-m", "tests.sim.mutants", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") > 20


def errors_on_a_lossy_network(seed: int) -> Profile:
    """So a member hears of the next quorum while its attempt is bound to the last one."""
    rng = random.Random(f"carried {seed}")
    faults = [
        Fault(rng.uniform(0.5, 4.0), rng.choice(("drop", "errors")), rng.choice("abc"), 0.2)
        for _ in range(40)
    ]
    return Profile(
        network=NetworkProfile(loss=0.1, repeat=0.1, reorder=0.1),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        faulty_s=4.0,
        restart_s=0.05,
        compare_steps=0,
    )


def test_sums_that_are_carried_into_the_next_quorum_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rules forbid it: the attempt fails, and it may not vote."""

    def said() -> str:
        for seed in range(100):
            try:
                run(seed, errors_on_a_lossy_network(seed))
            except Exception as error:
                return str(error)
        return ""

    assert said() == ""
    original = Replica._fail_if_bound

    def fail_if_bound(self: Replica, message: Quorum) -> None:
        if self.attempt is not Attempt.BOUND:
            original(self, message)

    monkeypatch.setattr(Replica, "_fail_if_bound", fail_if_bound)
    monkeypatch.setattr(Replica, "may_vote", property(lambda self: self.view is not None))
    assert re.search("S5|S6", said())


def test_a_healing_member_that_contributes_is_caught() -> None:
    def said() -> str:
        for seed in range(200):
            profile = replace(profile_of(seed), compare_steps=0, healing_stays_out=False)
            try:
                run(seed, profile)
            except Exception as error:
                return str(error)
        return ""

    assert "S4" in said()


def test_unbroken_machines_pass() -> None:
    """Also with comparison: no member is accused of a state that it does not hold."""
    assert complaint(lambda: seeds(0, 100)) == ""
