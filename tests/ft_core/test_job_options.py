"""Each option of a job shows by its effect, with real threads, Gloo and ZeroMQ."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from lightning.pytorch import Trainer

from ft_accelerate.options import FaultTolerancePlugin, field_names
from ft_core.attempt import FIRST_CHECKS
from ft_core.config import UNNAMED, JobOptions, new_replica_id
from ft_core.environment import ReplicaEnv
from ft_core.errors import QuorumUnavailable
from ft_core.heal import UnsupportedObjectError
from ft_core.heal.source import HealServer
from ft_core.heal.transport import HealAddress
from ft_core.launch.rank_group import free_port
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from ft_core.shell import session
from ft_lightning.pytorch import FTDDPStrategy
from ft_lightning.shared.strategy_base import Options
from lighthouse.client import Connection, LighthouseClient, new_identity
from lighthouse.config import split_address
from lighthouse.errors import JoinRefused, SettingsDiffer
from lighthouse.wire.messages import is_replica_id, name_of
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S, children_of_all_threads, until

ZMTP_GREETING = b"\xff"


class Note:
    """An object that only pickle can carry."""

    def __init__(self, text: str) -> None:
        self.text = text


def with_note(replica: Replica, text: str) -> Replica:
    """`replica`, with a `Note` in its state as `replica.note`."""

    def load(state: dict[str, Any]) -> None:
        replica.note = state["note"]

    replica.note = Note(text)
    replica.manager.register_state_dict_fn("note", load, lambda: {"note": replica.note})
    return replica


def beside(running: Replica, newcomer: Replica, script: Callable[[], Any]) -> Any:
    """What `script` returns, while `running` steps; at its end `newcomer` leaves, or `running` would
    wait for it in a step."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            running.step()

    def finish() -> Any:
        try:
            return script()
        finally:
            over.set()
            newcomer.close()

    return replicas(run, finish)[1]


def test_heal_server_listens_at_the_port_asked_for() -> None:
    port = free_port()
    with lighthouse() as server:
        replica = Replica(server, "r0", port=port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        replica.run_to(1)
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.settimeout(5)
            assert connection.recv(1) == ZMTP_GREETING
        replica.close()


def test_a_port_that_is_taken_costs_no_start() -> None:
    """Such as by workers of a loader, which outlive a process that was killed by seconds."""
    with lighthouse() as server, socket.create_server(("127.0.0.1", 0)) as taken:
        replica = Replica(server, "r0", port=taken.getsockname()[1])
        replica.run_to(1)
        replica.close()


def test_ranks_of_one_group_may_name_one_port() -> None:
    """A launcher gives all ranks the same arguments. In torchft only rank 0 listens at the port."""
    options = dataclasses.replace(UNNAMED, group_world_size=2, heal_port=free_port())
    with HealServer(host="127.0.0.1", options=options) as first:
        with HealServer(host="127.0.0.1", options=options) as second:
            ports = [split_address(HealAddress.parse(s.address).where)[1] for s in (first, second)]
    assert ports[0] == options.heal_port
    assert ports[1] not in (0, options.heal_port)


@pytest.mark.parametrize("init_sync", [True, False])
def test_arbitrary_objects_heal_where_they_are_allowed(init_sync: bool) -> None:
    with lighthouse() as server:
        options = {"heal_allow_objects": True, "init_sync": init_sync}
        a = with_note(Replica(server, "r0", **options), "first")
        a.run_to(2)
        b = with_note(Replica(server, "r1", value=7.0, **options), "second")

        def join() -> None:
            b.step()
            b.run_to(b.manager.current_step() + 1)

        beside(a, b, join)
        assert b.note.text == "first"
        assert torch.equal(b.weights, torch.full((8,), -float(b.manager.current_step())))
        a.close()
        b.close()


def test_an_arbitrary_object_is_refused_by_name() -> None:
    with lighthouse() as server:
        a = with_note(Replica(server, "r0"), "first")
        sentence = (
            r"\['note'\]\['note'\] is a .*Note.*set Manager\(heal_allow_objects=True\) on every"
        )
        with pytest.raises(UnsupportedObjectError, match=sentence):
            a.manager.start_quorum()
        a.close()


def test_what_cannot_travel_is_found_after_the_first_step() -> None:
    """As the state of an optimizer, which there is none of before."""
    with lighthouse() as server:
        a = Replica(server, "r0", init_sync=False)
        notes: list[Note] = []
        a.manager.register_state_dict_fn("notes", lambda _: None, lambda: list(notes))
        assert a.step()
        notes.append(Note("of the first step"))
        sentence = r"\['notes'\]\[0\] is a .*Note.*set Manager\(heal_allow_objects=True\) on every"
        with pytest.raises(UnsupportedObjectError, match=sentence):
            a.manager.start_quorum()
        a.close()


def test_the_option_has_the_name_that_users_write() -> None:
    accelerate = FaultTolerancePlugin().job(ReplicaEnv())
    strategy = FTDDPStrategy()
    Trainer(strategy=strategy, devices=1, accelerator="cpu", logger=False)
    said = "set heal_allow_objects=True on every member"
    assert accelerate.as_written(said).startswith(
        "set fault_tolerance_heal_allow_objects: true in fault_tolerance_config (or the flag "
        "--fault_tolerance_heal_allow_objects) on"
    )
    assert strategy._job.as_written(said).startswith(
        "set FTDDPStrategy(heal_allow_objects=True) on"
    )


def test_a_source_trains_on_and_the_target_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    """An object comes into the state later, and then a hook of the user's raises."""
    with lighthouse() as server:
        a = with_note(Replica(server, "r0", init_sync=False), "")
        a.note = "plain"  # type: ignore[assignment]
        a.run_to(1 + FIRST_CHECKS)
        for told, note in (("Note.*set Manager", Note("x")), ("no disk", OSError("no disk"))):

            def save(note: Any = note) -> dict[str, Any]:
                if isinstance(note, OSError):
                    raise note
                return {"note": note}

            a.manager.register_state_dict_fn("note", lambda _: None, save)
            b = with_note(Replica(server, "r1", init_sync=False), "second")

            def join(b: Replica = b, told: str = told) -> None:
                with pytest.raises(JoinRefused, match=told) as refusal:
                    b.manager.start_quorum()
                assert refusal.type is JoinRefused, "it is not this one that has to change"

            beside(a, b, join)
            assert b.note.text == "second"
        before = a.manager.current_step()
        a.run_to(before + 2)
        assert torch.equal(a.weights, torch.full((8,), -float(a.manager.current_step())))
        said = [r for r in caplog.records if "this one trains on" in r.getMessage()]
        assert len(said) == 2, "each reason once"
        a.close()


def test_a_member_that_does_not_allow_objects_takes_none() -> None:
    with lighthouse() as server:
        a = with_note(Replica(server, "r0", heal_allow_objects=True, init_sync=False), "first")
        a.run_to(2)
        b = with_note(Replica(server, "r1", init_sync=False), "second")

        def join() -> None:
            with pytest.raises(
                SettingsDiffer, match=r"set Manager\(heal_allow_objects=True\) here too"
            ):
                b.manager.start_quorum()

        beside(a, b, join)
        assert b.note.text == "second"
        a.close()
        b.close()


def test_another_token_is_refused_by_the_heal_server() -> None:
    with lighthouse() as server:
        a = Replica(server, "r0", token="ours")
        a.run_to(1)
        stranger = Replica(server, "r1", token="theirs")

        def join() -> None:
            with pytest.raises(
                SettingsDiffer, match="wrong token; set the same heal token on every"
            ):
                stranger.manager.start_quorum()

        beside(a, stranger, join)
        stranger.close()
        friend = Replica(server, "r2", token="ours")
        beside(a, friend, friend.step)
        assert friend.manager.current_step() >= 2
        friend.close()
        a.close()


def test_another_token_is_refused_where_the_heal_runs_beside_the_step() -> None:
    with lighthouse() as server:
        a = Replica(server, "r0", token="ours", use_async_quorum=True)
        a.run_to(1)
        stranger = Replica(server, "r1", token="theirs", use_async_quorum=True)

        def join() -> None:
            with pytest.raises(JoinRefused, match="wrong token"):
                while True:
                    stranger.step()

        beside(a, stranger, join)
        stranger.close()
        a.close()


def test_quorum_timeout_bounds_the_wait_for_a_quorum() -> None:
    with lighthouse() as server:
        a = Replica(server, "r0", min_replica_size=2, quorum_timeout=timedelta(seconds=0.3))
        with pytest.raises(QuorumUnavailable, match="no quorum within 0.3 s"):
            a.manager.start_quorum()
        a.close()


def test_a_job_is_known_by_its_id() -> None:
    with lighthouse() as server:
        lives = [Replica(server, "r0", job_id=job_id) for job_id in ("one", "two")]
        for replica in lives:
            replica.run_to(1)
        jobs = {
            job["job_id"]: [m["name"] for m in job["members"]] for job in server.status()["jobs"]
        }
        assert jobs == {"one": ["r0"], "two": ["r0"]}
        for replica in lives:
            replica.close()


def test_trainings_of_one_job_have_rooms_of_their_own() -> None:
    with lighthouse() as server:
        managers = [
            Manager.from_options(
                process_group_for(torch.device("cpu"), 20.0),
                JobOptions(name="0", lighthouse=server.address(), job_id="job", room_id=room),
            )
            for room in ("default", "training-2")
        ]
        for manager in managers:  # of one name: in one room the second would wait for the first
            manager.register_state_dict_fn("x", lambda state: None, dict)
            manager.start_quorum()
            manager.wait_quorum()
        rooms = {job["room_id"] for job in server.status()["jobs"] if job["members"]}
        for manager in managers:
            manager.shutdown()
    assert rooms == {"default", "training-2"}


def test_a_group_that_is_expected_and_does_not_come_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A person reads which one is missing, and how to go on without it; and that ends the wait."""
    with caplog.at_level(logging.WARNING, "ft_core"), lighthouse(timeout_s=6.0) as server:
        a = Replica(server, "0", expected_replicas=2, job_id="mine")
        a.manager.load_state_dict({"step": 5, "batches_committed": 5})  # of a checkpoint

        def declare() -> None:
            until(
                lambda: any("(1); each has to join" in text for text in caplog.messages), "a line"
            )
            (line,) = [text for text in caplog.messages if "declare-dead" in text]
            assert line.endswith(f"(lighthouse {server.address()}, job id mine)")
            with LighthouseClient(server.address()) as client:
                accepted, _ = client.declare_dead("1", job_id="mine")
            assert accepted

        replicas(lambda: a.run_to(6), declare)
        a.close()


def test_one_that_waits_for_others_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may have been started on one of two machines only, and the lighthouse's lines be elsewhere."""
    monkeypatch.setattr(session, "WAIT_TOLD_S", 0.1)
    with caplog.at_level(logging.WARNING, "ft_core"), lighthouse(min_replicas=2) as server:
        a, b = (Replica(server, name) for name in "01")
        said = f"replica group 0: waiting for 1 of min_replicas=2 (lighthouse {server.address()})"

        def come() -> None:
            until(lambda: said in caplog.messages, "a line")
            b.run_to(1)

        replicas(lambda: a.run_to(1), come)
        a.close()
        b.close()


def test_the_first_quorum_forms_as_soon_as_all_expected_are_there() -> None:
    """Without the number it would wait out the join timeout, which never comes here."""
    with lighthouse(timeouts={"join_timeout_s": 2 * PATIENCE_S}) as server:
        a, b = (Replica(server, f"r{i}", expected_replicas=2) for i in range(2))
        replicas(lambda: a.run_to(1), lambda: b.run_to(1))
        assert [job["commits"] for job in server.status()["jobs"]] == [1]
        a.close()
        b.close()


def test_a_group_that_commits_by_itself_does_not_wait_for_the_others_votes() -> None:
    with lighthouse() as server:
        a, b = (Replica(server, f"r{i}", expected_replicas=2, commit="group") for i in range(2))
        committed = threading.Event()

        def first() -> None:
            assert a.step()
            committed.set()

        def second() -> None:
            b.manager.start_quorum()
            b.manager.allreduce(torch.ones(8)).wait()
            assert committed.wait(PATIENCE_S), "it waits for a vote that is not cast yet"
            assert b.manager.should_commit()

        replicas(first, second)
        a.close()
        b.close()


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_an_asynchronous_quorum_is_not_waited_for(use_async_quorum: bool) -> None:
    with lighthouse() as server:
        limit = timedelta(seconds=0.3)
        options = {"use_async_quorum": use_async_quorum, "quorum_timeout": limit}
        alone = Replica(server, "r0", min_replica_size=2, **options)
        if use_async_quorum:
            alone.manager.start_quorum()
            assert not alone.manager.in_quorum()
        else:
            with pytest.raises(QuorumUnavailable):
                alone.manager.start_quorum()
        alone.close()


def test_each_start_of_a_group_has_an_id_of_its_own() -> None:
    with lighthouse() as server:
        lives = [Replica(server, "r0") for _ in range(2)]
        ids = {replica.manager.replica_id for replica in lives}
        assert len(ids) == 2 and all(each.startswith("r0:") for each in ids)
        for replica in lives:
            replica.close()


def test_hostname_is_where_a_member_is_reached() -> None:
    port = free_port()
    with lighthouse() as server:
        replica = Replica(server, "r0", hostname="127.0.0.2", port=port)
        replica.run_to(1)
        socket.create_connection(("127.0.0.2", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        replica.close()


def test_heartbeat_interval_reaches_the_sockets() -> None:
    timeouts = JobOptions(name="r0", heartbeat_s=0.125).timeouts
    context: zmq.Context[Any] = zmq.Context()
    connection = Connection(
        "tcp://127.0.0.1:9", identity=new_identity("r0"), timeouts=timeouts, context=context
    )
    dealer, _ = connection.sockets
    assert dealer.getsockopt(zmq.HEARTBEAT_IVL) == 125
    assert dealer.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 375
    connection.close()
    context.term()


def test_timeout_bounds_how_long_a_collective_waits() -> None:
    with lighthouse() as server:
        names = [("r0", 1.0), ("r1", 20.0)]
        waits, hangs = (
            Replica(server, name, expected_replicas=2, timeout=timedelta(seconds=limit_s))
            for name, limit_s in names
        )
        over = threading.Event()

        def wait() -> str:
            waits.manager.start_quorum()
            waits.manager.allreduce(torch.ones(8))
            assert not waits.manager.should_commit()
            over.set()
            return str(waits.manager.last_outcome().reason)

        def hang() -> None:
            hangs.manager.start_quorum()
            assert hangs.manager.bind()
            over.wait(20)
            assert not hangs.manager.should_commit()

        reason, _ = replicas(wait, hang)
        assert "a collective waited 1." in reason
        waits.close()
        hangs.close()


@pytest.mark.parametrize("watch", [True, False])
def test_watch_process_starts_a_watcher_or_none(watch: bool) -> None:
    with lighthouse() as server:
        before = children_of_all_threads("self")
        replica = Replica(server, "r0", watch_process=watch)
        replica.run_to(1)
        started = children_of_all_threads("self") - before
        texts = [Path(f"/proc/{child}/cmdline").read_text() for child in started]
        assert any("watcher" in text for text in texts) == watch
        replica.close()


def test_arguments_beat_the_frameworks_options_which_beat_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FT_JOB_ID", "environment")
    monkeypatch.setenv("REPLICA_GROUP_ID", "environment")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "tcp://environment:1")
    framework = SimpleNamespace(name="framework", lighthouse="", job_id="framework")
    found = JobOptions.resolve(framework, job_id="argument", name=None)
    assert (found.job_id, found.name) == ("argument", "framework")
    assert found.lighthouse == "tcp://environment:1"


# ---------------------------------------------------------------- the table

HERE = "test_job_options.py::"
MANAGER = "test_manager.py::"
COPIES = "test_copies.py::"
EFFECTS = {
    "name": MANAGER + "test_the_same_name_twice_is_refused",
    "job_id": HERE + "test_a_job_is_known_by_its_id",
    "room_id": HERE + "test_trainings_of_one_job_have_rooms_of_their_own",
    "lighthouse": MANAGER + "test_no_lighthouse_is_one_sentence",
    "min_replicas": MANAGER + "test_too_few_participants_never_commit",
    "expected_replicas": HERE + "test_the_first_quorum_forms_as_soon_as_all_expected_are_there",
    "spares": "test_spares.py::test_a_spare_takes_over_and_one_that_comes_back_is_the_next_spare",
    "commit": HERE + "test_a_group_that_commits_by_itself_does_not_wait_for_the_others_votes",
    "async_quorum": HERE + "test_an_asynchronous_quorum_is_not_waited_for",
    "own_loop": MANAGER + "test_a_joiner_contributes_to_its_first_step_if_it_heals_before_that",
    "init_sync": HERE + "test_a_member_that_does_not_allow_objects_takes_none",
    "weighted": MANAGER + "test_means_weighted_by_samples",
    "world_size_mode": MANAGER + "test_spares_are_neutral_under_every_reduction",
    "max_retries": MANAGER + "test_max_retries_ends_a_run_of_discards",
    "compare_steps": "test_compared_states.py::test_comparing_can_be_switched_off",
    "timeout_s": HERE + "test_timeout_bounds_how_long_a_collective_waits",
    "quorum_timeout_s": HERE + "test_quorum_timeout_bounds_the_wait_for_a_quorum",
    "connect_timeout_s": MANAGER + "test_no_lighthouse_is_one_sentence",
    "heartbeat_s": HERE + "test_heartbeat_interval_reaches_the_sockets",
    "group_rank": COPIES + "test_means_counts_and_numbers_span_all_ranks",
    "group_world_size": COPIES + "test_groups_of_other_sizes_are_refused",
    "ranks_hold": COPIES + "test_means_counts_and_numbers_span_all_ranks",
    "store_addr": COPIES + "test_means_counts_and_numbers_span_all_ranks",
    "store_port": COPIES + "test_means_counts_and_numbers_span_all_ranks",
    "interface": HERE + "test_hostname_is_where_a_member_is_reached",
    "watch_process": HERE + "test_watch_process_starts_a_watcher_or_none",
    "heal_port": HERE + "test_heal_server_listens_at_the_port_asked_for",
    "token": HERE + "test_another_token_is_refused_by_the_heal_server",
    "heal_allow_objects": HERE + "test_arbitrary_objects_heal_where_they_are_allowed",
    "trains": "launch/test_board.py::test_commits_count_from_the_first_quorum_of_the_training_on",
    "objects_option": HERE + "test_the_option_has_the_name_that_users_write",
    "timeouts": HERE + "test_heartbeat_interval_reaches_the_sockets",
}
"""Each option, and the test that shows its effect."""

TAKEN_BY_NAME = {
    "min_replicas",
    "lighthouse",
    "timeout_s",
    "quorum_timeout_s",
    "commit",
    "heal_allow_objects",
    "token",
    "job_id",
    "spares",
}
"""What users of both frameworks choose under the names of `JobOptions`."""
SETTLED_BY_THE_LAUNCHER = {
    "num_replica_groups",
    "max_restarts",
    "group_size",
    "warm_start",
    "keep_state_s",
    "keep_state_dir",
}
"""Not the member's: tests/ft_core/launch/test_supervisor.py, tests/ft_lightning and tests/ft_accelerate."""


def test_each_option_has_a_test_of_its_effect() -> None:
    assert set(EFFECTS) == {field.name for field in dataclasses.fields(JobOptions)}
    for option, where in EFFECTS.items():
        path, _, name = where.partition("::")
        text = (Path(__file__).parent / path).read_text()
        assert f"def {name}(" in text, option


def test_what_both_frameworks_choose_gets_here_whole() -> None:
    """A field that is renamed on one side only would be lost without a word."""
    mine = {field.name for field in dataclasses.fields(JobOptions)}
    lightning = {field.name for field in dataclasses.fields(Options)}
    accelerate = set(field_names())
    assert lightning & mine == TAKEN_BY_NAME | {"max_retries"}
    assert accelerate & mine == TAKEN_BY_NAME
    alone = {"replica_name", "resume", "validation"}
    assert lightning - mine == SETTLED_BY_THE_LAUNCHER | alone
    assert accelerate - mine == SETTLED_BY_THE_LAUNCHER | {"replica_group_id"}


@pytest.mark.parametrize(
    ("job_id", "expected", "why"),
    [
        (None, 1, ", which is more than the 1 expected"),
        (None, 0, ""),  # nothing says how many there are to be
        (None, 2, None),
        ("mine", 1, None),
    ],
)
def test_members_that_may_be_of_another_job_are_warned_of(
    job_id: str | None, expected: int, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ft_core"), lighthouse(expected_replicas=2) as server:

        def run(name: str) -> None:
            replica = Replica(server, name, job_id=job_id, expected_replicas=expected)
            together = False
            while not together:
                together = replica.step() and replica.manager.num_participants() == 2
            replica.close()

        replicas(lambda: run("a"), lambda: run("b"))
    said = [record.getMessage() for record in caplog.records if "FT_JOB_ID" in record.getMessage()]
    assert len(said) == (0 if why is None else 2), "one from each"
    assert all(f"they are a, b{why}. If they" in text for text in said)


def test_a_process_without_number_and_job_is_told_with_which_it_trains(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_core.shell.data_plane.default_name", lambda: "host-1")
    with caplog.at_level(logging.WARNING, "ft_core"), lighthouse(expected_replicas=2) as server:

        def run(name: str) -> None:
            replica = Replica(server, name, min_replica_size=2, expected_replicas=2)
            replica.run_to(2)
            replica.close()

        replicas(lambda: run("host-1"), lambda: run("host-2"))
    said = [record.getMessage() for record in caplog.records if "FT_JOB_ID" in record.getMessage()]
    assert len(said) == 1
    assert "they are host-1, host-2." in said[0]


@pytest.mark.parametrize("name", ["0", "a:1", "host:29510", "10.0.0.1:0:1"])
def test_a_name_with_a_colon_is_not_taken_for_a_process(name: str) -> None:
    assert not is_replica_id(name)
    assert is_replica_id(new_replica_id(name))
    assert name_of(new_replica_id(name)) == name
