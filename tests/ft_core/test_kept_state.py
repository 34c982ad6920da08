"""The keeper of states in threads of one process: it observes a member, and serves when none is left."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ft_core.heal import HealKey, HealServer
from ft_core.launch import kept_files
from ft_core.launch.board import Board, Slot, slot
from ft_core.launch.kept import Card, Version
from ft_core.launch.state_keeper import StateKeeper, TooLarge
from ft_core.state import LARGE_BYTES
from lighthouse import LighthouseServer
from tests.harness.cluster import (
    Replica,
    as_child,
    board_of,
    lighthouse,
    one_of_two,
    rendezvous,
    replicas,
)
from tests.harness.waiting import PATIENCE_S, until


@pytest.fixture
def board() -> Iterator[Board]:
    """This process is the only child of a supervisor."""
    with board_of(1) as made, as_child(made, 0):
        yield made


@contextmanager
def keeper(
    board: Board, tell: Callable[[str], object] = print, **options: Any
) -> Iterator[StateKeeper]:
    """Started as the supervisor's, in this process."""
    with as_child(board, board.keeper):
        found = slot()
    made = StateKeeper(found, 0.01, tell, **options)
    try:
        yield made
    finally:
        made.close()


def renewed(keeper: StateKeeper, replica: Replica, step: Callable[[], Any] | None = None) -> bool:
    """What `keeper.renew` returns or raises, while the replica trains until then."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(keeper.renew)
        while not found.done():
            (step or replica.step)()
    return found.result()


def kept_step(keeper: StateKeeper) -> int:
    assert keeper.card is not None
    assert keeper.card.version is not None
    return keeper.card.version.step


def begun(server: LighthouseServer, name: str = "b", **options: Any) -> Replica:
    """A process that starts, after its first quorum."""
    made = Replica(server, name, expected_replicas=1, **options)
    made.manager.start_quorum()
    return made


def test_all_die_and_go_on_from_what_is_kept(board: Board) -> None:
    with lighthouse() as server, keeper(board) as kept:
        a = Replica(server, "a", token="secret", expected_replicas=1)
        a.run_to(3)
        assert renewed(kept, a)
        first, ended = kept_step(kept), a.manager.current_step()
        assert 3 <= first < ended, "only what a step was committed from"
        assert renewed(kept, a), "into the memory of the version before"
        second, died_at = kept_step(kept), a.manager.current_step()
        assert second > first
        a.close()

        b = begun(server, "a", token="secret")
        assert b.manager.current_step() == second
        assert torch.equal(b.weights, torch.full((8,), -float(second)))
        assert b.manager.batches_committed() == second
        assert b.manager.state_dict()["genesis"] == kept.card.version.genesis  # type: ignore[union-attr]
        b.manager.report_error(RuntimeError("not trained"))
        assert not b.manager.should_commit()
        b.run_to(died_at + 1)
        assert torch.equal(b.weights, torch.full((8,), -float(died_at + 1)))
        b.close()


def test_a_loop_that_changes_its_state_before_each_vote_is_kept(board: Board) -> None:
    """As a forward changes a queue of keys, or a code book. The keeper does not wait for a version that was
    fetched before the loop changed it."""
    with lighthouse() as server, keeper(board, patience_s=1000.0) as kept:
        a = Replica(server, "a", expected_replicas=1)
        queue = torch.zeros(LARGE_BYTES // 4)
        a.manager.register_state_dict_fn("queue", queue.copy_, lambda: queue)

        def step() -> None:
            a.manager.start_quorum()
            queue.add_(1.0)
            a.end(a.reduce())

        for _ in range(3):
            step()
        assert renewed(kept, a, step) or renewed(kept, a, step)
        step()
        a.close()
        queue.zero_()
        b = Replica(server, "a", expected_replicas=1)
        b.manager.register_state_dict_fn("queue", queue.copy_, lambda: queue)
        b.manager.start_quorum()
        assert b.manager.current_step() == kept_step(kept)
        assert queue.unique().tolist() == [float(kept_step(kept))]
        b.close()


def test_a_newer_checkpoint_and_a_member_that_lives_come_first(board: Board) -> None:
    with lighthouse() as server, keeper(board) as kept:
        a = Replica(server, "a", expected_replicas=1)
        a.run_to(2)
        assert renewed(kept, a)
        a.step()
        checkpoint, weights = a.manager.state_dict(), a.weights.clone()
        a.close()

        b = Replica(server, "a", expected_replicas=1)
        b.manager.load_state_dict(checkpoint)
        b.weights.copy_(weights)
        b.step()
        assert b.manager.current_step() == checkpoint["step"] + 1
        slot().join()
        b.run_to(b.manager.current_step() + 1)

        # A process that starts, although no other one of this supervisor is known to train.
        board.clear(0)
        c = Replica(server, "c", value=5.0, expected_replicas=1)
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                b.step()

        training = threading.Thread(target=train, daemon=True)
        training.start()
        c.manager.start_quorum()
        assert c.manager.current_step() >= checkpoint["step"] + 2, "the member's, not what is kept"
        c.close()
        over.set()
        training.join(PATIENCE_S)
        b.close()


@pytest.mark.parametrize("room", ["default", "later"])
def test_it_is_of_one_room(board: Board, room: str) -> None:
    with lighthouse() as server, keeper(board) as kept:
        a = Replica(server, "a", expected_replicas=1)
        a.run_to(2)
        assert renewed(kept, a)
        a.close()
        b = Replica(server, "a", expected_replicas=1)
        b.manager.start_quorum(room_id=room)
        assert b.manager.current_step() == (kept_step(kept) if room == "default" else 0)
        b.close()


def test_while_another_process_trains_a_start_does_not_ask_for_it(board: Board) -> None:
    with lighthouse() as server, keeper(board) as kept:
        a = Replica(server, "a", expected_replicas=1)
        a.run_to(2)
        assert renewed(kept, a)
        a.close()
        board.clear(0)
        with as_child(board, board.keeper):
            slot().join()  # in the place of the one that trains
        b = begun(server, "a")
        assert b.manager.current_step() == 0
        b.close()


def test_a_keeper_that_has_died_costs_nothing_but_its_state(board: Board) -> None:
    with lighthouse() as server:
        with keeper(board) as kept:
            a = Replica(server, "a", expected_replicas=1)
            a.run_to(2)
            assert renewed(kept, a)
            a.close()
        b = begun(server, "a")  # its card is still there
        assert b.manager.current_step() == 0
        b.close()


def test_what_is_written_counts_where_the_keeper_is_dead_and_a_full_disk_costs_nothing(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setenv(kept_files.ENV_FOLDER, str(tmp_path))
    with lighthouse() as server:
        with keeper(board, told.append, folder=str(tmp_path)) as kept:
            a = Replica(server, "a", expected_replicas=1)
            a.run_to(2)
            assert renewed(kept, a)
            written = kept_step(kept)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "save", _full)
                assert renewed(kept, a) and renewed(kept, a), "it is held all the same"
            a.close()
        assert [line for line in told if "can't be written" in line] == [told[-1]]
        board.clear(board.keeper)
        file = kept_files.file_of(str(tmp_path), "default")
        assert [*file.parent.iterdir()] == [file], "no draft is left"
        b = begun(server, "a")
        assert b.manager.current_step() == written < kept_step(kept)
        assert torch.equal(b.weights, torch.full((8,), -float(written)))
        b.close()
        assert file.exists()
        c = Replica(server, "a", expected_replicas=1)
        c.manager.start_quorum()
        c.manager.shutdown(finished=True)
        assert not file.exists()


def _full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_state_that_changes_before_the_vote_is_not_kept(board: Board) -> None:
    with lighthouse() as server, keeper(board) as kept:
        a = Replica(server, "a", expected_replicas=1)
        a.weights = torch.zeros(1 << 19)  # large: read from the training's own memory

        spoiled = threading.Event()

        def step() -> None:
            a.manager.start_quorum()
            assert a.manager.should_commit()
            a.weights -= 1.0

        def spoil() -> None:
            """One step while it is shown; in those that follow, copies would be."""
            a.manager.start_quorum()
            a.weights += 0.0
            if a.manager.state.shows:
                spoiled.set()
            assert a.manager.should_commit()
            a.weights -= 1.0

        for _ in range(3):
            step()
        kept.patience_s = 1.5
        assert not renewed(kept, a, lambda: time.sleep(0.01) if spoiled.is_set() else spoil())
        assert spoiled.is_set()
        assert kept.card is None
        kept.patience_s = PATIENCE_S
        assert renewed(kept, a, step)
        assert kept.card is not None
        a.close()


def test_an_older_version_on_the_card_does_not_end_the_wait_for_the_one_that_was_fetched(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Slot] = []
    seen = Slot.card

    def card_of(board: Slot, child: int, rank: int = 0) -> dict[str, Any] | None:
        looks.append(board)
        return seen(board, child, rank)

    monkeypatch.setattr(Slot, "card", card_of)
    with keeper(board) as kept, HealServer(host="127.0.0.1") as member:
        card = Card(member.address, ("job",))
        slot().tell(card.row())
        older, newer = Version(2, "two", 1, 1), Version(3, "three", 1, 1)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(kept.renew)
            packed = {"manifest": b"", "tensors": []}
            member.publish(HealKey(newer.step, newer.lineage), packed, shown=True)
            until(lambda: member.stats().finished, "the fetch")
            slot().tell(replace(card, version=older).row())
            del looks[:]
            until(lambda: found.done() or looks[1:], "two looks at the card")
            slot().tell(replace(card, version=newer).row())
            assert found.result(PATIENCE_S)
        assert kept_step(kept) == newer.step


def test_what_a_member_has_confirmed_counts_for_a_keeper_that_was_stopped(board: Board) -> None:
    with keeper(board) as kept:
        card = Card("tcp://127.0.0.1:1/word", ("job",), Version(3, "three", 1, 1))
        slot().tell(card.row())
        version, past = HealKey(3, "three"), time.monotonic() - 100.0
        assert kept._confirmed(0, 0, card, version, past) == card
        assert kept._confirmed(0, 0, card, HealKey(4, "four"), past) is None


def test_a_state_that_is_too_large_is_not_kept(board: Board) -> None:
    with lighthouse() as server, keeper(board, free_bytes=lambda: 127) as kept:
        a = Replica(server, "a", expected_replicas=1)
        a.run_to(2)
        with pytest.raises(TooLarge, match="2 copies of"):
            renewed(kept, a)
        assert kept.card is None
        a.run_to(a.manager.current_step() + 2)
        a.close()


def test_a_state_that_cannot_travel_is_not_kept_and_the_training_goes_on(board: Board) -> None:
    told: list[str] = []
    with lighthouse() as server, keeper(board, tell=told.append) as kept:
        a = Replica(server, "a", expected_replicas=1)
        other: list[Any] = [1]
        a.manager.register_state_dict_fn("other", lambda state: None, lambda: other[0])
        a.run_to(2)
        other[0] = object()
        assert not renewed(kept, a)
        assert not renewed(kept, a)
        a.close()
    assert len(told) == 1
    assert "the state is not kept" in told[0]


def test_a_group_of_several_ranks_goes_on_as_one(board: Board) -> None:
    """Its rank 0 shows the state, and decides which one the group begins with."""

    def group(server: LighthouseServer, store: Any, value: float) -> list[Replica]:
        return [
            Replica(
                server,
                "a",
                value=value,
                expected_replicas=1,
                **one_of_two(rank, store),
            )
            for rank in (0, 1)
        ]

    with lighthouse() as server, keeper(board) as kept, rendezvous(2) as stores:
        over, died_at = threading.Event(), [0, 0]
        before = group(server, stores[0], 0.0)

        def train(rank: int) -> None:
            while True:
                before[rank].manager.start_quorum()
                # Both end after one step.
                last = rank == 0 and over.is_set() and before[0].manager.current_step() > 2
                total = torch.tensor([int(last)])
                before[rank].manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
                if not before[rank].manager.should_commit():
                    continue
                before[rank].weights -= 1.0
                if total.item():
                    break
            died_at[rank] = before[rank].manager.current_step()

        def keep() -> None:
            until(lambda: slot().cards(), "the group tells where its state is")
            try:
                assert kept.renew()
            finally:
                over.set()

        replicas(partial(train, 0), partial(train, 1), keep)
        replicas(*[member.close for member in before])
        assert died_at[0] == died_at[1] > kept_step(kept)

        after = group(server, stores[1], 7.0)

        def begin(rank: int) -> tuple[int, list[float]]:
            after[rank].manager.start_quorum()
            begun = after[rank].manager.current_step(), after[rank].weights.tolist()
            after[rank].manager.should_commit()
            return begun

        step = kept_step(kept)
        assert replicas(partial(begin, 0), partial(begin, 1)) == [(step, [-float(step)] * 8)] * 2
        replicas(*[member.close for member in after])


def test_each_rank_of_a_group_goes_on_from_its_own_shards(board: Board, tmp_path: Path) -> None:
    """All parts are of one version. It is written to disk, too, from which the next group begins."""

    def group(server: LighthouseServer, store: Any, value: float) -> list[Replica]:
        return [
            Replica(
                server,
                "a",
                value=value + 100 * rank,
                expected_replicas=1,
                **one_of_two(rank, store, hold="shards"),
            )
            for rank in (0, 1)
        ]

    with lighthouse() as server, rendezvous(3) as stores:
        with keeper(board, folder=str(tmp_path)) as kept:
            over, ends, turn = threading.Event(), threading.Event(), threading.Barrier(2)
            before = group(server, stores[0], 0.0)

            def train(rank: int) -> int:
                while not ends.is_set():
                    before[rank].step()
                    if turn.wait() == 0 and over.is_set():
                        ends.set()
                    turn.wait()
                return before[rank].manager.current_step()

            def keep() -> None:
                until(lambda: slot().card(0, 1), "the ranks tell where their shards are")
                try:
                    until(kept.renew, "one version of both ranks")
                finally:
                    over.set()

            died_at, _, _ = replicas(partial(train, 0), partial(train, 1), keep)
            replicas(*[member.close for member in before])
            step = kept_step(kept)
            assert died_at > step

            def begin(member: Replica) -> tuple[int, list[float]]:
                member.manager.start_quorum()
                begun = member.manager.current_step(), member.weights.tolist()
                member.manager.should_commit()
                return begun

            expected = [(step, [-float(step) + 100 * rank] * 8) for rank in (0, 1)]
            after = group(server, stores[1], 7.0)
            assert replicas(*[partial(begin, member) for member in after]) == expected
            replicas(*[member.close for member in after])
        for child in (0, board.keeper):  # all have died, the keeper, too
            board.clear(child)
        environment = kept_files.environment(str(tmp_path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*next(iter(environment.items())))
            last = group(server, stores[2], 9.0)
            assert replicas(*[partial(begin, member) for member in last]) == expected
            replicas(*[member.close for member in last])


def test_a_rank_that_was_asked_too_late_is_asked_for_a_later_version(board: Board) -> None:
    with keeper(board) as kept, ExitStack() as stack:
        members = [stack.enter_context(HealServer(host="127.0.0.1")) for _ in range(2)]
        cards = [Card(member.address, ("job",), parts=2) for member in members]
        slot().committed(3)
        assert not kept.renew(), "a rank has told nothing yet"
        for rank, card in enumerate(cards):
            slot().tell(card.row(), rank)

        def show(rank: int, step: int, *, asked_for: int, reads: int) -> None:
            member, version = members[rank], Version(step, f"after {step}", 1, 1)
            until(lambda: member.observed_from == asked_for, "all are asked for one step")
            key = HealKey(version.step, version.lineage)
            member.publish(key, {"manifest": bytes([rank]), "tensors": []}, shown=True)
            until(lambda: member.stats().finished == reads, f"rank {rank} is read")
            slot().tell(replace(cards[rank], version=version).row(), rank)

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(kept.renew)
            show(0, 5, asked_for=5, reads=1)
            slot().committed(7)
            show(1, 6, asked_for=5, reads=1)
            for rank in (0, 1):
                show(rank, 10, asked_for=10, reads=2)
            assert found.result(PATIENCE_S)
        assert kept_step(kept) == 10
        assert slot().keepers_card(1) is not None


def test_who_holds_which_share_of_the_data_is_kept_too(board: Board) -> None:
    """The spare has taken over before all die: it goes on as the holder, and the other one as the spare."""

    def both(server: LighthouseServer) -> list[Replica]:
        return [Replica(server, name, spares=1, expected_replicas=2) for name in "01"]

    with lighthouse() as server, keeper(board) as kept:
        zero, one = both(server)

        with as_child(board, board.keeper):
            shown = slot()

        # Both have this process's place on the board: its card is the last one.
        def run_one() -> None:
            until(lambda: bool(shown.cards()), "the card of the other")
            one.run_to(2)

        replicas(partial(zero.run_to, 2), run_one)
        assert (zero.manager.data_share(), one.manager.data_share()) == (0, None)
        zero.close()
        one.run_to(4)
        assert renewed(kept, one)
        one.close()

        def share(replica: Replica) -> tuple[int, int | None]:
            replica.manager.start_quorum()
            found = replica.manager.current_step(), replica.manager.data_share()
            replica.manager.should_commit()
            return found

        after = both(server)
        step = kept_step(kept)
        assert replicas(*[partial(share, each) for each in after]) == [(step, None), (step, 0)]
        replicas(*[each.close for each in after])


def test_a_member_whose_state_differs_takes_back_what_is_kept(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be that very state. Also where the keeper has just taken it, and tells of it later."""
    monkeypatch.setenv(kept_files.ENV_FOLDER, str(tmp_path))
    file, end = kept_files.file_of(str(tmp_path), "default"), list[int]()
    with lighthouse(all_join=True) as server, keeper(board, folder=str(tmp_path)) as kept:
        options: dict[str, Any] = {"expected_replicas": 3, "compare_steps": 4}
        with board_of(1) as elsewhere, as_child(elsewhere, 0):
            a, c = (Replica(server, name, **options) for name in "ac")
        b = Replica(server, "b", **options)
        for each in (a, b, c):
            each.manager.register_compared("weights", partial(list, [each.weights]))

        def held() -> tuple[bool, bool]:
            return slot().keepers_card() is not None, file.exists()

        def differ() -> None:
            b.run_to(3)
            assert renewed(kept, b)
            assert held() == (True, True)
            b.weights[3] += 1.0
            while b.step():
                pass
            assert "its parameters at step" in str(b.manager.last_outcome())
            assert held() == (False, False)
            assert renewed(kept, b)
            assert held() == (True, True), "of the state that it has healed to"
            serve = StateKeeper._serve

            def serve_late(*args: Any) -> None:
                slot().forget_kept(1)
                serve(*args)

            monkeypatch.setattr(StateKeeper, "_serve", serve_late)
            assert renewed(kept, b)
            assert held() == (False, False)

        def first() -> None:
            try:
                differ()
            finally:
                end.append(b.manager.current_step() + 3)
            b.run_to(end[0])

        def train(member: Replica) -> None:
            while not end or member.manager.current_step() < end[0]:
                member.step()

        replicas(partial(train, a), partial(train, c), first)
        replicas(*(each.close for each in (a, b, c)))
        assert torch.equal(a.weights, b.weights) and torch.equal(b.weights, c.weights)
