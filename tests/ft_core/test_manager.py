"""Manager's documented behaviour, with real Gloo, ZeroMQ and a real lighthouse."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.errors import QuorumUnavailable, StepInDoubt, TooManyDiscards
from ft_core.launch.rank_group import free_port
from ft_core.manager import Manager, WorldSizeMode
from ft_core.process_group import ProcessGroupGloo
from ft_core.shell import session
from ft_core.shell.control import SPIN_S
from ft_core.state import CHANGED_WHILE_SERVED
from ft_core.telemetry import REVOKED
from lighthouse.errors import (
    JoinRefused,
    LighthouseUnavailable,
    SettingsDiffer,
    TooFewLeft,
    TrainingOver,
)
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S, until


def pair(server, **kw):
    return [Replica(server, f"r{i}", expected_replicas=2, **kw) for i in range(2)]


def both(a, b, script):
    return replicas(lambda: script(a, 0), lambda: script(b, 1))


def test_steps_are_counted_and_averaged():
    with lighthouse() as server:
        a, b = pair(server)

        def script(replica, index):
            replica.run_to(3, gradient=float(index))
            manager = replica.manager
            seen = (
                manager.current_step(),
                manager.batches_committed(),
                manager.num_participants(),
                manager.participating_rank(),
                manager.is_participating(),
            )
            replica.close()
            return seen

        assert both(a, b, script) == [(3, 6, 2, 0, True), (3, 6, 2, 1, True)]
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.weights, torch.full((8,), -1.5))


def test_leaving_without_a_vote_after_the_last_all_reduce_costs_the_other_nothing():
    """The other's collectives have all that they need: they are not stopped, and its step commits."""
    with lighthouse() as server:
        a, b = pair(server)
        revoked = []
        a.manager.telemetry.add_sink(lambda event: revoked.append(event.kind == REVOKED))

        def reduce(replica):
            replica.manager.start_quorum()
            total = torch.full((1_000_000,), 1.0)
            replica.manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
            return total

        def script(replica, index):
            total = reduce(replica)
            if replica is b:
                replica.close()
                return True
            until(lambda: [m for m in server.status()["jobs"][0]["members"] if m["gone"]])
            assert bool((total == 2.0).all())
            committed = replica.manager.should_commit()
            replica.close()
            return committed

        assert both(a, b, script) == [True, True]
        assert not any(revoked)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.AVG, 3.0),
        (ReduceOp.SUM, 6.0),
        (ReduceOp.MIN, 2.0),
        (ReduceOp.MAX, 4.0),
        (ReduceOp.PRODUCT, 8.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_spares_are_neutral_under_every_reduction(op, expected, dtype):
    """S4: two take part with 2 and 4; the third is a spare whose 100 must leave no trace."""
    with lighthouse() as server:
        three = [
            Replica(
                server,
                f"r{i}",
                expected_replicas=3,
                min_replica_size=2,
                world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
            )
            for i in range(3)
        ]
        values = [2, 4, 100]

        def script(replica, index):
            manager = replica.manager
            manager.start_quorum()
            tensor = torch.full((5,), values[index], dtype=dtype)
            manager.allreduce(tensor, reduce_op=op).wait()
            found = (manager.should_commit(), tensor.tolist(), manager.participating_rank())
            replica.close()
            return found

        found = replicas(*[lambda r=r, i=i: script(r, i) for i, r in enumerate(three)])
        for index, (committed, values_found, rank) in enumerate(found):
            assert committed
            assert values_found == [expected] * 5
            assert rank == (index if index < 2 else None)


def test_one_that_hangs_is_evicted_though_the_process_groups_own_timeout_comes_first(monkeypatch):
    """The control thread, which looks now and then, may find the collective failed already. The one that hangs
    must not take part in the next attempt: it would fail alike, for ever."""
    monkeypatch.setattr(session, "LOOK_EVERY_S", PATIENCE_S)  # it is always late
    with lighthouse(all_join=True) as server:
        limit = {"timeout": timedelta(seconds=1), "expected_replicas": 2}
        a, b = [Replica(server, f"r{i}", pg=ProcessGroupGloo(timeout=1), **limit) for i in range(2)]
        evicted = threading.Event()

        def script(replica, index):
            replica.manager.start_quorum()
            if replica is b:
                assert evicted.wait(PATIENCE_S)
            else:
                assert not replica.end(replica.reduce())
                assert replica.step()
                assert replica.manager.num_participants() == 1
                evicted.set()
            replica.close()

        both(a, b, script)


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_a_joiner_contributes_to_its_first_step_if_it_heals_before_that(use_async_quorum):
    with lighthouse() as server:
        a = Replica(server, "r0", use_async_quorum=use_async_quorum)
        a.run_to(3)
        b = Replica(server, "r1", value=77.0, use_async_quorum=use_async_quorum)
        joined = threading.Event()

        def old(replica, _):
            while not joined.is_set():
                replica.step()
            replica.run_to(joined_at[0] + 3)
            replica.close()

        joined_at = []

        def new(replica, _):
            replica.manager.start_quorum()
            replica.manager.wait_quorum()
            joined_at.append(replica.manager.current_step())
            assert replica.manager.is_participating() is not use_async_quorum
            joined.set()
            tensor = torch.full((8,), 1000.0)  # an asynchronous one must not be seen by anybody
            replica.manager.allreduce(tensor).wait()
            assert replica.manager.should_commit()
            assert tensor.tolist() == [1.0 if use_async_quorum else 500.5] * 8
            replica.weights -= tensor
            replica.run_to(joined_at[0] + 3)
            replica.close()

        both(a, b, lambda r, i: old(r, i) if r is a else new(r, i))
        assert torch.equal(a.weights, b.weights)
        assert a.manager.current_step() == b.manager.current_step()


def test_a_state_that_changes_while_it_is_served_is_not_committed(caplog):
    """Large tensors are served live: a write to one before the vote would tear the heal. (The reason of the
    step may be the end of the quorum, which its peer leaves.)"""
    big = [torch.full((600_000,), float(i)) for i in range(2)]
    with lighthouse() as server:
        a, b = pair(server, min_replica_size=2)
        for index, replica in enumerate((a, b)):
            replica.manager.register_state_dict_fn(
                "big", lambda s, i=index: big[i].copy_(s["t"]), lambda i=index: {"t": big[i]}
            )

        def script(replica, index):
            replica.manager.start_quorum()  # r1 heals from r0
            replica.manager.allreduce(torch.ones(8)).wait()
            if index == 0:
                big[0].add_(1.0)  # too early
            first = replica.manager.should_commit()
            reason = replica.manager.last_outcome().reason
            if index == 0:
                big[0].sub_(1.0)
            replica.run_to(1)
            replica.close()
            return first, reason

        (first, reason), (second, _) = both(a, b, script)
        assert (first, second) == (False, False)
        left = "fewer than min_replica_size=2 participants"
        assert "changed before should_commit" in reason or left in reason
        assert CHANGED_WHILE_SERVED in caplog.text
        assert torch.equal(big[0], big[1])


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_different_starts_take_the_first_ones_state(use_async_quorum):
    with lighthouse() as server:
        a = Replica(server, "r0", value=1.0, expected_replicas=2, use_async_quorum=use_async_quorum)
        b = Replica(server, "r1", value=2.0, expected_replicas=2, use_async_quorum=use_async_quorum)
        both(a, b, lambda r, i: (r.run_to(2), r.close()))
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.weights, torch.full((8,), -1.0))


def test_equal_starts_transfer_nothing():
    with lighthouse() as server:
        a, b = pair(server, value=5.0)
        kinds: list[str] = []
        for replica in (a, b):
            replica.manager.telemetry.add_sink(lambda event: kinds.append(event.kind))
        both(a, b, lambda r, i: (r.run_to(2), r.close()))
        assert "commit" in kinds
        assert not {"heal_start", "serve"} & set(kinds)


def test_a_started_allreduce_is_an_allreduce():
    """With integers, behind a quantized one, in a failed step, and never waited for."""
    sent = threading.Barrier(2)  # or the step would not be the other's yet
    with lighthouse() as server:
        a, b = pair(server)

        def script(replica, index):
            manager = replica.manager
            manager.start_quorum()
            mean, whole, total = (
                torch.full((4,), index + 1.0),
                torch.tensor([3 + 2 * index]),
                torch.ones(2),
            )
            started = [
                manager.start_allreduce(mean),
                manager.start_allreduce(whole),
                manager.start_allreduce(total, ReduceOp.SUM),
            ]
            for one in reversed(started):
                one.wait()
            assert all(one.done() and one.future.done() for one in started)
            manager.allreduce(torch.ones(64), should_quantize=True)
            behind = manager.start_allreduce(torch.full((2,), float(index)))
            forgotten = manager.start_allreduce(torch.ones(1), ReduceOp.SUM)
            assert manager.should_commit()
            assert forgotten.future.value().item() == 2.0
            manager.start_quorum()
            if index == 0:
                sent.wait(PATIENCE_S)
                manager.report_error(RuntimeError("broken"))
                assert manager.start_allreduce(torch.ones(8)).done()
            else:
                late = manager.start_allreduce(torch.ones(8))
                sent.wait(PATIENCE_S)
                assert late.wait() is late.future.value()  # with an error, which the vote tells
            discarded = not manager.should_commit()
            replica.close()
            return mean.tolist(), whole.item(), total.tolist(), behind.wait().tolist(), discarded

        expected = ([1.5] * 4, 4, [2.0] * 2, [0.5] * 2, True)
        assert both(a, b, script) == [expected, expected]


def test_a_member_that_gets_late_answers_sleeps_at_once():
    with lighthouse() as server:
        a, b = pair(server)

        def script(replica, index):
            manager = replica.manager
            replica.run_to(1)
            manager.start_quorum()
            manager.allreduce(torch.ones(8)).wait()
            if index == 1:
                time.sleep(20 * SPIN_S)  # as one that computes for longer
            assert manager.should_commit()
            looks = manager._session.control._prompt
            replica.run_to(4)
            replica.close()
            return looks

        assert both(a, b, script)[0] is False


def test_an_error_of_one_discards_the_step_of_all():
    with lighthouse() as server:
        a, b = pair(server)

        def script(replica, index):
            replica.run_to(1)
            manager = replica.manager
            manager.start_quorum()
            tensor = torch.ones(8)
            manager.allreduce(tensor).wait()
            if index == 1:
                manager.report_error(ValueError("loss is nan"))
                assert isinstance(manager.errored(), ValueError)
            committed = manager.should_commit()
            reason = manager.last_outcome().reason
            replica.run_to(2)
            replica.close()
            return committed, reason

        (first, first_reason), (second, second_reason) = both(a, b, script)
        assert (first, second) == (False, False)
        assert "loss is nan" in second_reason
        assert "loss is nan" in first_reason or "revoked" in first_reason
        assert torch.equal(a.weights, b.weights)


def test_after_an_error_allreduce_returns_at_once():
    with lighthouse() as server:
        a, b = pair(server)

        def script(replica, index):
            manager = replica.manager
            manager.start_quorum()
            manager.report_error(RuntimeError("broken"))
            tensor = torch.ones(8)
            assert manager.allreduce(tensor).done()
            committed = manager.should_commit()
            replica.run_to(1)
            replica.close()
            return committed

        assert both(a, b, script) == [False, False]


def test_too_few_participants_never_commit():
    with lighthouse() as server:
        a, b = pair(server, min_replica_size=2)

        def script(replica, index):
            replica.run_to(2)
            if index == 1:
                replica.close()
                return None
            reason = ""
            while (
                "min_replicas=2" not in reason
            ):  # first the lighthouse has to hear of the other's end
                with pytest.raises(QuorumUnavailable) as raised:
                    while True:
                        replica.manager.start_quorum(timeout=timedelta(seconds=1))
                        replica.manager.allreduce(torch.ones(8)).wait()
                        assert not replica.manager.should_commit()
                reason = str(raised.value)
            step = replica.manager.current_step()
            replica.close()
            return step

        assert both(a, b, script)[0] == 2


def test_what_updates_nothing_may_be_committed_by_fewer():
    """Else a member whose peers are all new would wait for ever where they cannot heal."""
    options = {"min_replica_size": 2, "use_async_quorum": True}
    with lighthouse() as server:
        a, b = pair(server, **options)
        both(a, b, lambda replica, index: replica.run_to(2))
        b.close()
        c = Replica(server, "r1", expected_replicas=2, **options)

        def script(replica, index):
            manager, sums = replica.manager, torch.ones(1)

            def attempt(no_update):
                manager.start_quorum()
                manager.bind()
                seen = manager.num_participants(), manager.participating_rank()
                manager.allreduce(sums.fill_(1), reduce_op=ReduceOp.SUM).wait()
                committed = manager.should_commit(no_update=no_update)
                if index == 1:
                    manager.rejoin("as one that sits in")
                return committed, seen

            assert not attempt(False)[0]
            committed, seen = attempt(True)
            while not committed:  # one began again before it heard that the other has rejoined
                committed, seen = attempt(True)
            replica.close()
            return seen, float(sums)

        assert both(a, c, script) == [((1, 0), 1.0), ((1, None), 1.0)]


def test_a_quorum_lost_before_the_first_collective_is_waited_for_no_longer_than_asked():
    """The step began at once; its timeout counts all the same when the quorum must form anew."""
    with lighthouse() as server:
        a, b = pair(server, min_replica_size=2)
        both(a, b, lambda replica, index: replica.run_to(2))
        a.manager.start_quorum(timeout=timedelta(seconds=0.2))
        b.close()
        session = a.manager._session
        session.wait_for(lambda status: not status.ready, None)
        a.manager.allreduce(torch.ones(8)).wait()
        assert isinstance(a.manager.errored(), QuorumUnavailable)
        assert not a.manager.should_commit()
        a.close()


def test_the_report_of_a_heal_that_comes_after_the_end_is_ignored():
    """Its descriptor is closed by then, and its number perhaps another's."""
    with lighthouse() as server:
        a, b = pair(server)
        both(a, b, lambda replica, index: replica.run_to(1))
        control = a.manager._session.control
        a.close()
        control.wake()
        b.close()


def test_max_retries_ends_a_run_of_discards():
    with lighthouse() as server:
        a = Replica(server, "r0", max_retries=2)
        for _ in range(2):
            a.manager.start_quorum()
            a.manager.report_error(RuntimeError("again"))
            assert not a.manager.should_commit()
        a.manager.start_quorum()
        a.manager.report_error(RuntimeError("again"))
        with pytest.raises(TooManyDiscards, match="3 steps in a row"):
            a.manager.should_commit()
        a.close()


def test_wrap_future_swallows_errors_and_lateness():
    with lighthouse() as server:
        a = Replica(server, "r0")
        manager = a.manager
        manager.start_quorum()
        failing: Future[int] = Future()
        wrapped = manager.wrap_future(failing.then(lambda f: 1 // 0), 7)
        failing.set_result(1)
        assert wrapped.wait() == 7
        assert "by zero" in str(manager.errored())  # torch wraps it
        assert not manager.should_commit()
        manager.start_quorum()
        never: Future[int] = Future()
        late = manager.wrap_future(never, 8, timeout=timedelta(milliseconds=20))
        assert late.wait() == 8
        assert isinstance(manager.errored(), TimeoutError)
        assert not manager.should_commit()
        manager.start_quorum()
        fine: Future[int] = Future()
        good = manager.wrap_future(fine, 0)
        fine.set_result(3)
        assert good.wait() == 3
        assert manager.should_commit()
        a.close()


def test_state_dict_round_trip():
    with lighthouse() as server:
        a = Replica(server, "r0")
        a.run_to(4)
        saved = a.manager.state_dict()
        a.close()
        assert saved["step"] == 4 and saved["batches_committed"] == 4
        b = Replica(server, "r1", value=-4.0)
        b.manager.load_state_dict(saved)
        b.run_to(6)
        assert b.manager.batches_committed() == 6
        with pytest.raises(RuntimeError, match="before the first start_quorum"):
            b.manager.load_state_dict(saved)
        b.close()


def test_several_parts_of_state_heal():
    with lighthouse() as server:
        a, b = pair(server)
        extra = [{"epoch": 3}, {"epoch": 0}]
        for index, replica in enumerate((a, b)):
            replica.manager.register_state_dict_fn(
                "loop", lambda s, i=index: extra[i].update(s), lambda i=index: dict(extra[i])
            )
        both(a, b, lambda r, i: (r.run_to(1), r.close()))
        assert extra == [{"epoch": 3}, {"epoch": 3}]


def test_per_group_commit_does_not_wait_and_agrees():
    with lighthouse() as server:
        a, b = pair(server, commit="group")
        # The member that leaves has acted on its last vote; the other might have to do that step again, alone.
        both(a, b, lambda r, i: r.run_to(20, gradient=float(i)))
        both(a, b, lambda r, i: r.close())
        assert torch.equal(a.weights, b.weights)


def test_means_weighted_by_samples():
    with lighthouse() as server:
        a, b = pair(server, weighted=True)

        def script(replica, index):
            manager = replica.manager
            manager.start_quorum()
            manager.set_samples([3, 1][index])
            tensor = torch.full((4,), [4.0, 8.0][index])
            manager.allreduce(tensor).wait()
            assert manager.should_commit()
            manager.start_quorum()  # the second step says no number: nothing can be averaged
            manager.allreduce(torch.ones(4)).wait()
            assert not manager.should_commit()
            replica.close()
            return tensor.tolist()

        assert both(a, b, script) == [[5.0] * 4, [5.0] * 4]


def test_rooms_and_jobs_are_apart():
    with lighthouse() as server:
        one = Replica(server, "r0", job_id="one")
        two = Replica(server, "r0", job_id="two")
        both(one, two, lambda r, i: (r.run_to(2 + i), r.close()))
        assert (one.manager.current_step(), two.manager.current_step()) == (2, 3)
        a = Replica(server, "r0")
        a.manager.start_quorum("train")
        assert a.manager.should_commit()
        with pytest.raises(ValueError, match="room"):
            a.manager.start_quorum("other")
        a.close()


# ---------------------------------------------------------------- bad input


def test_different_models_are_refused_with_a_sentence():
    with lighthouse() as server:
        a = Replica(server, "r0")
        a.manager.register_schema("module", "2 tensors, 10 parameters")
        a.run_to(1)
        b = Replica(server, "r1")
        b.manager.register_schema("module", "3 tensors, 12 parameters")
        with pytest.raises(
            SettingsDiffer, match="r1 does not match r0: .*12 parameters.*same model"
        ):
            b.manager.start_quorum()
        b.close()
        a.run_to(2)
        a.close()


def test_the_same_name_twice_is_refused():
    with lighthouse(timeout_s=2.0) as server:
        a = Replica(server, "twin")
        a.run_to(1)
        b = Replica(server, "twin")
        with pytest.raises(JoinRefused, match="is called 'twin': .* \\(FT_JOB_ID\\)"):
            b.manager.start_quorum()
        b.close()
        a.run_to(2)
        a.close()


def test_one_that_only_tries_to_begin_does_not_wait_for_another_quorum(monkeypatch):
    """At the end of a training the others leave, also just when this one begins. It waited for the timeout."""
    with lighthouse(min_replicas=2) as server:
        a, b = (Replica(server, name, timeout=timedelta(hours=1)) for name in "ab")
        replicas(lambda: a.run_to(1), lambda: b.run_to(1))
        begin = a.manager._attempts.begin

        def begin_when_the_other_is_gone(*args, **options):
            b.manager.shutdown(finished=True)
            until(lambda: a.manager.in_quorum() is None, "the end of the quorum")
            begin(*args, **options)

        monkeypatch.setattr(a.manager._attempts, "begin", begin_when_the_other_is_gone)
        assert not a.manager.try_start_quorum()
        a.close()


def test_no_lighthouse_is_one_sentence():
    """And it may be started after that: each later call of a loop that catches this raised ValueError."""
    address = f"tcp://127.0.0.1:{free_port()}"
    a = Replica(address, "r0", connect_timeout=timedelta(seconds=0.5))
    with pytest.raises(LighthouseUnavailable, match=f"{address} within 0.5 s.*lighthouse --bind"):
        a.manager.start_quorum()
    with pytest.raises(LighthouseUnavailable, match="has been away for 0.5 s"):
        a.manager.start_quorum()
    with lighthouse(bind=address):
        assert a.manager._attempts.session.control.await_connected(None)
        a.run_to(1)
        a.close()


def test_a_lighthouse_that_stays_away_costs_the_connect_timeout_also_where_peers_may_be_late(
    caplog,
):
    """As at the end of an epoch, where a vote waits four timeouts. One line says until when."""
    with lighthouse() as server:
        a = Replica(server, "r0", connect_timeout=timedelta(seconds=1))
        a.run_to(1)
        a.manager.start_quorum()
    with pytest.raises(StepInDoubt, match="has been away for 1 s"):
        a.manager.should_commit(timedelta(seconds=PATIENCE_S), no_update=True)
    assert caplog.text.count("does not answer; this process waits for it until") == 1
    a.close()


def test_malformed_address():
    with pytest.raises(ValueError, match="tcp://"):
        Replica("nonsense", "r0")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_replica_size": 0}, "min_replica_size must be at least 1"),
        (
            {"min_replica_size": 3, "expected_replicas": 2},
            r"min_replica_size \(3\) must be at most",
        ),
        ({"commit": "sometimes"}, '"quorum" or "group"'),
        ({"timeout": timedelta(0)}, "timeout_s must be positive"),
        ({"heartbeat_interval": timedelta(seconds=30)}, "must be less than"),
        ({"load_state_dict": lambda s: None}, "both load_state_dict and state_dict"),
    ],
)
def test_wrong_options_are_refused_at_once(options, sentence):
    group = ProcessGroupGloo()
    try:
        with pytest.raises(ValueError, match=sentence):
            Manager(group, **options)
    finally:
        group.shutdown()


def test_unknown_reduction():
    with lighthouse() as server:
        a = Replica(server, "r0")
        a.manager.start_quorum()
        with pytest.raises(ValueError, match="reduce_op must be one of"):
            a.manager.allreduce(torch.ones(1), reduce_op=ReduceOp.BOR)
        assert a.manager.should_commit()
        a.close()


def test_should_commit_without_start_quorum():
    with lighthouse() as server:
        a = Replica(server, "r0")
        with pytest.raises(RuntimeError, match="start_quorum"):
            a.manager.should_commit()
        a.close()


def test_told_to_leave_before_its_first_step_a_member_leaves_with_it():
    """SIGTERM may come while a script still builds its model."""
    with lighthouse() as server:
        replica = Replica(server, "r")
        replica.manager.leave_after_step()
        assert not replica.manager.left()
        assert replica.step()
        assert replica.manager.left()
        replica.close()


def test_a_step_that_was_never_ended_is_a_no():
    with lighthouse() as server:
        a, b = pair(server)

        def script(replica, index):
            replica.manager.start_quorum()
            if index == 0:
                replica.manager.allreduce(torch.ones(8))
                replica.manager.start_quorum()  # started over without a vote
            replica.manager.allreduce(torch.ones(8)).wait()
            first = replica.manager.should_commit()
            replica.run_to(1)
            replica.close()
            return first

        both(a, b, script)
        assert a.manager.current_step() == b.manager.current_step() == 1


def test_one_that_comes_back_after_the_end_is_told_so() -> None:
    limits = {"connect_timeout_s": 2.0}
    with lighthouse(all_join=False, expected_replicas=2, timeouts=limits) as server:

        def trains(name: str) -> None:
            replica = Replica(server, name)
            replica.run_to(2)
            replica.manager.shutdown(finished=True)

        replicas(lambda: trains("a"), lambda: trains("b"))
        late = Replica(server, "a")
        with pytest.raises(TrainingOver, match="the training has finished at step"):
            late.manager.start_quorum()
        late.close()


@pytest.mark.parametrize("between", [False, True], ids=["in a step", "between steps"])
def test_a_loop_that_is_longer_than_its_peers_ends_where_too_few_are_left(between: bool) -> None:
    """`min_replica_size` needs a peer, and all have finished."""
    limits = {"connect_timeout_s": 2.0}
    with lighthouse(all_join=True, timeouts=limits) as server:
        a, b = pair(server, min_replica_size=2)
        ended = threading.Event()

        def finishes() -> None:
            a.run_to(2)
            a.manager.shutdown(finished=True)
            ended.set()

        def goes_on() -> None:
            b.run_to(2)
            if between:
                assert ended.wait(PATIENCE_S)
            with pytest.raises(TooFewLeft, match="too few are left for min_replicas=2: this loop"):
                b.run_to(4)
            assert b.manager.current_step() == 2
            b.close()

        replicas(finishes, goes_on)
        late = Replica(server, "r1", expected_replicas=2, min_replica_size=2)
        with pytest.raises(TrainingOver):  # started again, it does not start the training over
            late.manager.start_quorum()
        late.close()


def test_one_that_is_at_its_own_end_is_not_refused() -> None:
    """It asks for no quorum: it may still write, in its place among those that lead."""
    limits = {"connect_timeout_s": 0.5}
    with lighthouse(all_join=True, timeouts=limits) as server:
        a, b = pair(server, min_replica_size=2)
        said = threading.Event()
        b.manager.telemetry.add_sink(
            lambda event: said.set() if "too few are left" in str(event) else None
        )

        def finishes() -> None:
            a.run_to(2)
            a.manager.shutdown(finished=True)

        def writes() -> None:
            b.run_to(2)
            assert said.wait(PATIENCE_S)
            assert not b.manager.evicted()
            assert not b.manager.left()
            b.manager.shutdown(finished=True)

        replicas(finishes, writes)
