"""Random revocations of real Gloo groups: nothing hangs, no sum is wrong, nothing is left behind.

    python -m pytest tests/soak/test_process_group_soak.py                     a few hundred
    FT_SOAK_REVOCATIONS=10000 python -m pytest tests/soak/test_process_group_soak.py -s
    (or --soak-revocations 10000, where the conftest knows that option)

Each round is one quorum: a random choice of members (threads here, with a group each) configures,
runs collectives with several in flight, and is revoked at a random moment: of any time, so that it
often still configures, or after its first sums, however long those take here. FT_SOAK_SEED repeats a
run's choices (not its timing).
"""

from __future__ import annotations

import faulthandler
import os
import queue
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ft_core.collectives.allreduce import options_for
from ft_core.process_group import (
    ProcessGroupError,
    ProcessGroupGloo,
    native_reconfigure_available,
)

pytestmark = pytest.mark.soak

SUM = options_for("sum")
REVOCATIONS = 300
MEMBERS = 5
HANG_S = 20.0
OPERATION_S = 8.0  # how long Gloo keeps an operation that it forgot to fail, and its thread
SIZES = (1, 7, 1000, 40_000, 300_000)


@dataclass
class Tally:
    """What the members saw, summed over all rounds."""

    revocations: int = 0
    sums: int = 0
    wrong: list[str] = field(default_factory=list)
    failed_works: int = 0
    failed_configures: int = 0
    freed_s: list[float] = field(default_factory=list)
    configure_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    summing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by each member that has the first sums of its quorum, or none and gives up."""


class Member(threading.Thread):
    """One member: does what the driver puts into `orders`, reports to `results`."""

    def __init__(self, number: int, native: bool, tally: Tally, results: queue.Queue[Any]) -> None:
        super().__init__(daemon=True, name=f"member-{number}")
        self.number = number
        self.group = ProcessGroupGloo(OPERATION_S, hostname="127.0.0.1", native=native)
        self.orders: queue.Queue[Any] = queue.Queue()
        self._results = results
        self._tally = tally

    def run(self) -> None:
        while (order := self.orders.get()) is not None:
            outcome: Any = None
            try:
                self._round(*order)
            except BaseException as error:  # reported: a dead thread would look like a hang
                outcome = error
            self._results.put((self.number, outcome))

    def _round(self, quorum_id: int, members: list[int], addresses: list[bytes]) -> None:
        began = time.monotonic()
        try:
            self.group.configure(quorum_id, members.index(self.number), addresses, HANG_S)
        except ProcessGroupError:
            with self._tally.lock:
                self._tally.failed_configures += 1
            self._tally.summing.release()
            return
        with self._tally.lock:
            self._tally.configure_s.append(time.monotonic() - began)
        sizes = random.Random(quorum_id)  # the same for all members of the quorum
        for batch in range(1_000_000):
            flying = []
            for _ in range(sizes.randint(1, 4)):
                size = sizes.choice(SIZES)
                tensor = torch.full((size,), float(self.number + 1 + batch))
                if sizes.random() < 0.5:
                    flying.append((tensor, self.group.allreduce([tensor])))
                else:
                    flying.append((tensor, self.group.start_allreduce([tensor], SUM)))
            good = self._collect(members, batch, flying)
            if batch == 0:
                self._tally.summing.release()
            if not good:
                return

    def _collect(self, members: list[int], batch: int, flying: list[Any]) -> bool:
        expected = float(sum(number + 1 + batch for number in members))
        good = True
        for tensor, work in flying:
            try:
                work.wait()
            except ProcessGroupError:
                good = False
                with self._tally.lock:
                    self._tally.failed_works += 1
                continue
            with self._tally.lock:
                self._tally.sums += 1
                if not bool((tensor == expected).all()):
                    self._tally.wrong.append(f"{tensor.unique()} instead of {expected}")
        return good


def drive(revocations: int, native: bool, seed: int) -> Tally:
    """Run rounds until that many revocations were made. Raises AssertionError on a hang."""
    choose = random.Random(seed)
    tally = Tally()
    results: queue.Queue[Any] = queue.Queue()
    members = [Member(number, native, tally, results) for number in range(MEMBERS)]
    addresses = [member.group.address() for member in members]
    for member in members:
        member.start()
    quorum_id = 0
    try:
        while tally.revocations < revocations:
            quorum_id += 1
            chosen = choose.sample(range(MEMBERS), choose.choice((1, 2, 3, 4, 4, 5, 5)))
            for number in chosen:
                order = (quorum_id, chosen, [addresses[each] for each in chosen])
                members[number].orders.put(order)
            _let_pass(choose, tally)
            _revoke(choose, [members[number] for number in chosen], quorum_id, tally)
            revoked_at = time.monotonic()
            for _ in chosen:
                _expect_result(results, revoked_at, quorum_id, chosen)
            while tally.summing.acquire(blocking=False):
                pass  # of works without a waiter
            tally.freed_s.append(time.monotonic() - revoked_at)
    finally:
        for member in members:
            member.group.shutdown()
            member.orders.put(None)
        for member in members:
            member.join(HANG_S)
    return tally


def _let_pass(choose: random.Random, tally: Tally) -> None:
    """The time until the revocation."""
    pause_s = choose.choice((0.0, 0.001, 0.003, 0.01)) * choose.random() * 2
    if choose.random() < 0.3:
        assert tally.summing.acquire(timeout=HANG_S), "a quorum that is not revoked has no sums"
    time.sleep(pause_s)


def _revoke(choose: random.Random, members: list[Member], quorum_id: int, tally: Tally) -> None:
    victims = list(members)
    choose.shuffle(victims)
    for victim in victims:
        # A revocation that comes before `configure` began would count for the quorum before.
        while victim.group.quorum_id < quorum_id:
            time.sleep(0.0002)
    stagger_s = choose.choice((0.0, 0.0, 0.0005, 0.02))
    for victim in victims:
        victim.group.revoke(RuntimeError("soak"))
        tally.revocations += 1
        time.sleep(stagger_s * choose.random())


def _expect_result(
    results: queue.Queue[Any], revoked_at: float, quorum_id: int, chosen: list[int]
) -> None:
    try:
        number, outcome = results.get(timeout=max(0.0, revoked_at + HANG_S - time.monotonic()))
    except queue.Empty:
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"a member of quorum {quorum_id} {chosen} hangs") from None
    assert outcome is None, f"member {number}: {outcome!r}"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def settled(count: Any, at_most: int) -> int:
    """Wait for a count to come down, as long as an orphaned operation of Gloo may last."""
    end = time.monotonic() + 2 * OPERATION_S + 5.0
    while count() > at_most and time.monotonic() < end:
        time.sleep(0.01)
    return int(count())


def wanted(config: pytest.Config) -> int:
    option = config.getoption("--soak-revocations", default=None)
    return int(option or os.environ.get("FT_SOAK_REVOCATIONS") or REVOCATIONS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("native", [True, False], ids=["native", "rebuild"])
def test_random_revocations(native: bool, pytestconfig: pytest.Config) -> None:
    if native and not native_reconfigure_available():
        pytest.skip("this torch has no native reconfiguration")
    seed = int(os.environ.get("FT_SOAK_SEED", "0")) or random.randrange(1 << 30)
    print(f"\nFT_SOAK_SEED={seed}")
    drive(5, native, seed=1)  # what torch starts once and keeps is not a leak
    files, threads = descriptors(), tasks()

    began = time.monotonic()
    tally = drive(wanted(pytestconfig), native, seed)
    took_s = time.monotonic() - began

    freed = sorted(tally.freed_s)
    configure = sorted(tally.configure_s)
    print(
        f"torch {torch.__version__} {'native' if native else 'rebuild'}: "
        f"{tally.revocations} revocations in {len(freed)} quorums, {took_s:.1f} s; "
        f"{tally.sums} right sums, {tally.failed_works} works failed, "
        f"{tally.failed_configures} configures failed; freed after ms: "
        f"median {freed[len(freed) // 2] * 1e3:.2f}, 99 % {freed[len(freed) * 99 // 100] * 1e3:.1f}, "
        f"max {freed[-1] * 1e3:.1f}; configure median {configure[len(configure) // 2] * 1e3:.2f}"
    )
    assert not tally.wrong, tally.wrong[:5]
    assert tally.sums > tally.revocations / 10, (
        "hardly any collective succeeded: nothing was tested"
    )
    assert tally.failed_works > 0
    assert tally.failed_configures > 0
    assert settled(descriptors, files) <= files
    assert settled(tasks, threads) <= threads
