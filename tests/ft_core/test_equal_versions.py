"""Members at an equal version hold equal weights, whatever a loop does around its vote."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_core.ddp import DistributedDataParallel
from ft_core.errors import StepInDoubt
from ft_core.optimizer import Optimizer
from ft_core.replica.status import Attempt
from lighthouse.errors import JoinRefused
from tests.harness import cluster
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import until
from tests.process.driver import LighthouseProcess

SHORT = timedelta(milliseconds=50)


def pair(server: Any, **kw: Any) -> list[Replica]:
    """None comes to its end alone, while the other is on its way back: that one would find no state to heal from."""
    options = {"expected_replicas": 2, "min_replica_size": 2, **kw}
    return [Replica(server, f"r{i}", **options) for i in range(2)]


def vote_in_vain(replica: Replica) -> torch.Tensor:
    """One step whose vote is not answered in time; the mean gradient, which was not applied."""
    reduced = replica.begin()
    with pytest.raises(StepInDoubt):
        replica.manager.should_commit(timeout=SHORT)
    return reduced


def both(first: Any, second: Any) -> list[Any]:
    return replicas(first, second)


def voted(replica: Replica) -> bool:
    session = replica.manager._session
    return session is not None and session.control.status.attempt is Attempt.VOTED


def stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def check_equal(a: Replica, b: Replica) -> None:
    assert a.manager.state_dict() == b.manager.state_dict()
    assert torch.equal(a.weights, b.weights)


@pytest.mark.parametrize("answered", [False, True], ids=["undecided", "decided"])
def test_the_next_should_commit_takes_the_outcome(answered: bool) -> None:
    with lighthouse() as server:
        a, b = pair(server)
        gave_up, decided = threading.Event(), threading.Event()

        def impatient() -> None:
            reduced = vote_in_vain(a)
            gave_up.set()
            if answered:
                decided.wait()
            assert a.manager.should_commit()
            a.weights -= reduced
            a.run_to(3)
            a.close()

        def slow() -> None:
            reduced = b.begin()
            gave_up.wait()
            assert b.manager.should_commit()
            decided.set()
            b.weights -= reduced
            b.run_to(3)
            b.close()

        both(impatient, slow)
        check_equal(a, b)
        assert torch.equal(a.weights, torch.full((8,), -3.0))


@pytest.mark.parametrize("answered", [False, True], ids=["undecided", "decided"])
def test_a_loop_that_goes_on_without_the_update_heals(answered: bool) -> None:
    with lighthouse() as server:
        a, b = pair(server)
        gave_up, decided = threading.Event(), threading.Event()

        def careless() -> None:
            vote_in_vain(a)
            gave_up.set()
            if answered:
                decided.wait()
            a.run_to(5)
            a.close()

        def slow() -> None:
            reduced = b.begin()
            gave_up.wait()
            assert b.manager.should_commit()
            b.weights -= reduced
            decided.set()
            b.run_to(5)
            b.close()

        both(careless, slow)
        check_equal(a, b)
        assert torch.equal(b.weights, torch.full((8,), -5.0))


def test_a_vote_waits_as_long_as_the_lighthouse_is_there() -> None:
    """A job may wait for longer than a lighthouse may be away: for a peer that hangs, or after a restart
    for groups that may hold the newest state. Whoever ends instead takes its state along."""
    connect_s = 3.0
    with lighthouse() as server:
        a, b = pair(server, connect_timeout=timedelta(seconds=connect_s))

        def waits() -> None:
            a.run_to(3)
            a.close()

        def late() -> None:
            b.run_to(2)
            reduced = b.begin()
            until(lambda: voted(a), "the other's vote")
            time.sleep(connect_s + 0.5)
            assert b.manager.should_commit()
            b.weights -= reduced
            b.run_to(3)
            b.close()

        both(waits, late)
        check_equal(a, b)


def test_no_member_has_applied_the_step() -> None:
    """The lighthouse is silent for longer than all loops wait: the job goes on from the state that
    its members hold."""
    process = LighthouseProcess(port=0, arguments=("--heartbeat-timeout", "2"))
    try:
        a, b = pair(process.address)
        a_ready, b_ready = threading.Barrier(3), threading.Barrier(3)

        def careless(replica: Replica) -> None:
            replica.run_to(2)
            replica.begin()
            a_ready.wait()
            b_ready.wait()  # the lighthouse has stopped
            with pytest.raises(StepInDoubt):
                replica.manager.should_commit(timeout=SHORT)
            a_ready.wait()
            replica.run_to(5)
            replica.close()

        def operator() -> None:
            a_ready.wait()
            os.kill(process.serving, signal.SIGSTOP)
            until(lambda: stopped(process.serving), "the lighthouse to stop")
            b_ready.wait()
            a_ready.wait()
            os.kill(process.serving, signal.SIGCONT)

        replicas(lambda: careless(a), lambda: careless(b), operator)
        check_equal(a, b)
        assert torch.equal(a.weights, torch.full((8,), -5.0))
    finally:
        process.close()


def test_a_hook_that_raises_after_the_commit_costs_no_equality() -> None:
    """`should_commit` raises although the step is committed: its caller can't have applied it."""
    with lighthouse() as server:
        a, b = pair(server)
        raising = [2]

        def hook(committed: bool) -> None:
            if committed and raising and a.manager.current_step() == raising[0]:
                raising.clear()
                raise RuntimeError("injected")

        a.manager.register_step_end(hook)

        def careless() -> None:
            a.run_to(1)
            with pytest.raises(RuntimeError, match="injected"):
                a.step()
            a.run_to(6)
            a.close()

        def other() -> None:
            b.run_to(6)
            b.close()

        both(careless, other)
        check_equal(a, b)
        assert torch.equal(b.weights, torch.full((8,), -6.0))


def test_an_exception_out_of_a_signal_handler_while_the_vote_waits() -> None:
    """A watchdog's, say, or Ctrl-C; the loop catches it and goes on."""

    class Watchdog(Exception):
        pass

    def fire(number: int, frame: Any) -> None:
        raise Watchdog

    with lighthouse() as server:
        a, b = pair(server)
        here = threading.get_ident()
        before = signal.signal(signal.SIGUSR1, fire)
        interrupted = threading.Event()

        def other() -> None:
            reduced = b.begin()
            until(lambda: voted(a), "the vote of r0")
            signal.pthread_kill(here, signal.SIGUSR1)
            interrupted.wait()
            assert b.manager.should_commit()
            b.weights -= reduced
            b.run_to(4)
            b.close()

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        try:
            with pytest.raises(Watchdog):
                a.step()
        finally:
            signal.signal(signal.SIGUSR1, before)
        interrupted.set()
        a.run_to(4)
        a.close()
        thread.join()
        check_equal(a, b)
        assert torch.equal(b.weights, torch.full((8,), -4.0))


class FailsOnce(torch.optim.SGD):
    """Updates half of its parameters in a step, and raises."""

    fail_at = -1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fail_at -= 1
        if self.fail_at == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(77.0)
            raise torch.OutOfMemoryError("injected")
        super().step()


def train_that_skips(
    server: Any, name: str, fail_at: int, net: torch.nn.Module, **options: Any
) -> int:
    """Six steps of a loop that skips a batch whose update runs out of memory; how many did."""
    inner = FailsOnce(net.parameters(), lr=0.1)
    inner.fail_at = fail_at
    manager = cluster.manager(
        server.address(),
        name,
        expected_replicas=2,
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        **options,
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    raised = 0
    try:
        while manager.current_step() < 6:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                raised += 1
    finally:
        manager.shutdown()
    return raised


def equal_nets() -> list[torch.nn.Module]:
    nets = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    nets[1].load_state_dict(nets[0].state_dict())
    return list(nets)


def test_an_optimizer_that_raises_after_the_commit() -> None:
    """The loop skips the batch, as many loops do; the member heals."""
    a, b = equal_nets()
    with lighthouse() as server:
        raised = both(
            lambda: train_that_skips(server, "r0", -1, a, min_replica_size=2),
            lambda: train_that_skips(server, "r1", 3, b, min_replica_size=2),
        )
    assert raised == [0, 1]
    assert all(torch.equal(a.state_dict()[key], b.state_dict()[key]) for key in a.state_dict())


def test_optimizers_that_raise_in_all_members() -> None:
    """Each may have updated other halves. If one has heard of the other's end before, it is alone, and keeps its
    state; else both are refused with that reason."""
    a, b = equal_nets()

    def train(name: str, net: torch.nn.Module) -> str:
        try:
            return f"raised {train_that_skips(server, name, 3, net, min_replica_size=2)}"
        except JoinRefused as refused:
            return str(refused)

    with lighthouse() as server:
        said = both(lambda: train("r0", a), lambda: train("r1", b))
    if said != ["raised 1", "raised 1"]:
        assert all("an update of its own has raised" in each for each in said), said
    else:
        assert all(torch.equal(a.state_dict()[key], b.state_dict()[key]) for key in a.state_dict())


def test_a_member_that_is_alone_keeps_its_state() -> None:
    with lighthouse() as server:
        a = Replica(server, "r0")
        a.run_to(2)
        a.manager.update_failed(RuntimeError("injected"))
        a.run_to(4)
        assert torch.equal(a.weights, torch.full((8,), -4.0))
        a.close()


def test_a_member_with_a_newcomer_keeps_the_only_state() -> None:
    """The newcomer is in the quorum already, and holds nothing: the job began anew with its state."""
    with lighthouse() as server:
        old, new = Replica(server, "r0"), Replica(server, "r1", 9.0)

        def trains() -> None:
            old.run_to(2)
            reduced = old.begin()
            until(lambda: server.status()["jobs"][0]["waiting"], "the newcomer")
            assert old.manager.should_commit()
            old.weights[:4] -= reduced[:4]
            old.manager.update_failed(RuntimeError("injected"))
            old.run_to(6)
            old.close()

        def comes() -> None:
            until(lambda: old.manager.current_step() == 2, "two steps")
            new.run_to(6)
            new.close()

        both(trains, comes)
        check_equal(old, new)
        assert torch.equal(old.weights, torch.tensor([-6.0] * 4 + [-5.0] * 4))


def test_a_load_that_raises_half_way() -> None:
    with lighthouse() as server:
        a = Replica(server, "r0")
        a.run_to(2)
        done, target = threading.Event(), [0]
        b = Replica(server, "r1")
        failures = [RuntimeError("injected")]

        def load(state: Any) -> None:
            b.weights[:4] = state["weights"][:4]
            if failures:
                raise failures.pop()
            b.weights.copy_(state["weights"])

        b.manager.set_state_dict_fns(load, lambda: {"weights": b.weights})

        def old() -> None:
            while not done.is_set():
                a.step()
            a.run_to(target[0])
            a.close()

        def new() -> None:
            with pytest.raises(RuntimeError, match="injected"):
                b.step()
            assert b.manager.current_step() == 0
            b.step()
            target[0] = b.manager.current_step() + 5
            done.set()
            b.run_to(target[0])
            b.close()

        both(old, new)
        check_equal(a, b)


@pytest.mark.parametrize("values", [(1.0, 2.0), (3.0, 3.0)], ids=["other weights", "equal weights"])
def test_checkpoints_without_a_lineage_are_compared(values: tuple[float, float]) -> None:
    """torchft's checkpoints name a step and no history: members may hold different weights there."""
    with lighthouse() as server:
        two = [
            Replica(server, f"r{i}", value, expected_replicas=2) for i, value in enumerate(values)
        ]
        heals: list[str] = []

        def run(replica: Replica, value: float) -> None:
            replica.manager.load_state_dict({"step": 5, "batches_committed": 10})
            replica.manager.start_quorum()
            heals.extend([replica.manager.replica_id] * (replica.weights[0].item() != value))
            replica.end(replica.reduce())
            replica.run_to(8)
            replica.close()

        replicas(*[lambda r=r, v=v: run(r, v) for r, v in zip(two, values, strict=True)])
        check_equal(*two)
        assert two[0].manager.current_step() == 8
        assert len(heals) == (values[0] != values[1])
