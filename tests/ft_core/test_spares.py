"""Hot spares: a member with weight 0 takes over the share of one that is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from ft_core.attempt import Attempts
from ft_core.config import JobOptions
from ft_core.diloco.diloco import LocalSGD
from ft_core.replica.events import Configure
from ft_core.replica.status import WorldSizeMode
from ft_core.shell.data_plane import DataPlane
from lighthouse import LighthouseServer
from lighthouse.errors import JoinRefused
from tests.harness.cluster import Replica, lighthouse, manager, replicas
from tests.harness.waiting import until

NO_TRACE = 100.0
"""What a spare brings to a sum."""


class Group(Replica):
    """A replica group that counts in each step which shares of the data were contributed."""

    def __init__(self, server: LighthouseServer, name: str, *, shares: int, **kw: Any) -> None:
        super().__init__(server, name, expected_replicas=shares + 1, spares=1, **kw)
        self.seen: dict[int, list[float]] = {}
        """By committed step: how often each share was contributed."""
        self.held: int | None = None

    def step(self, gradient: float = 1.0) -> bool:
        self.manager.start_quorum()
        return self.work()

    def work(self) -> bool:
        """The rest of a step."""
        manager = self.manager
        step, self.held = manager.current_step(), manager.data_share()
        counted = torch.zeros(manager.num_data_shares())
        if self.held is None:
            counted.fill_(NO_TRACE)
        else:
            counted[self.held] = 1.0
        manager.allreduce(counted, reduce_op=ReduceOp.SUM).wait()
        if committed := manager.should_commit():
            self.seen[step] = counted.tolist()
            self.weights += 1.0
            outcome = manager.last_outcome()
            assert outcome is not None
            assert outcome.participants == sum(self.seen[step])
        return committed

    def step_until(self, done: threading.Event) -> None:
        """Steps until then."""
        while not done.is_set():
            self.step()


def test_a_spare_takes_over_and_one_that_comes_back_is_the_next_spare() -> None:
    spare_works, is_back, over = (threading.Event() for _ in range(3))
    with lighthouse(all_join=True, expected_replicas=4) as server:
        zero, one, two, three = (Group(server, str(n), shares=3) for n in range(4))
        again = Group(server, "0", shares=3)

        def dies_first() -> None:
            zero.run_to(3)
            zero.close()
            spare_works.wait()
            while not again.seen:
                again.step()
            part = again.manager.in_quorum()
            assert part is not None and part.rank is None, "it leads none: it is a spare"
            is_back.set()
            while not (again.step() and again.held is not None):
                pass
            over.set()
            again.close()

        def dies_later() -> None:
            one.step_until(is_back)
            one.close()

        def lives(group: Group) -> None:
            while not over.is_set():
                if group.step() and group.held is not None and group is three:
                    spare_works.set()
            group.close()

        replicas(dies_first, dies_later, lambda: lives(two), lambda: lives(three))
    assert [zero.held, one.held, two.held, three.held, again.held] == [0, 1, 2, 0, 1]
    last = max(again.seen)
    for step in range(last + 1):
        found = [g.seen[step] for g in (zero, one, two, three, again) if step in g.seen]
        assert all(each == found[0] for each in found)
    lost = {step: two.seen[step] for step in range(last + 1) if two.seen[step] != [1.0, 1.0, 1.0]}
    assert lost == {3: [0.0, 1.0, 1.0], max(one.seen) + 1: [1.0, 0.0, 1.0]}, (
        "full strength after one step"
    )


def test_a_share_moves_at_once_where_no_step_would_be_committed_without_it() -> None:
    with lighthouse(all_join=True, expected_replicas=3) as server:
        options = {"shares": 2, "min_replica_size": 2}
        zero, one, spare = (Group(server, str(n), **options) for n in range(3))
        begun = threading.Event()

        def dies() -> None:
            zero.run_to(2)
            zero.manager.start_quorum()
            begun.wait()
            zero.close()

        def goes_on() -> None:
            one.run_to(4)
            one.close()

        def is_computing() -> None:
            spare.run_to(2)
            spare.manager.start_quorum()
            assert spare.manager.data_share() is None
            begun.set()
            members = lambda: server.status()["jobs"][0]["members"]  # noqa: E731
            until(lambda: [m["name"] for m in members() if not m["gone"]] == ["1", "2"])
            assert not spare.work(), "the batch that it has computed is of no share"
            spare.run_to(4)
            spare.close()

        replicas(dies, goes_on, is_computing)
    assert spare.held == 0
    assert one.seen == {step: [1.0, 1.0] for step in range(4)}


def test_no_share_moves_with_a_step_that_is_none_of_the_training() -> None:
    """As an operation in a script of Accelerate's."""
    with lighthouse(all_join=True, expected_replicas=3) as server:
        zero, one, spare = (Group(server, str(n), shares=2) for n in range(3))

        def dies() -> None:
            zero.run_to(2)
            zero.close()

        def goes_on(group: Group) -> None:
            group.run_to(2)
            group.manager.state.trains = False
            group.run_to(5)
            group.manager.state.trains = True
            group.run_to(7)
            group.close()

        replicas(dies, lambda: goes_on(one), lambda: goes_on(spare))
    strength = [sum(counted) for _, counted in sorted(one.seen.items())]
    assert strength == [2, 2, 1, 1, 1, 1, 2]


def test_what_a_checkpoint_holds_says_who_holds_which_share() -> None:
    mine = manager("tcp://127.0.0.1:1", "3", expected_replicas=4, spares=1)
    saved = mine.state_dict() | {"shares": ["3", "1", "2"]}
    mine.load_state_dict(saved)
    assert mine.state_dict() == saved
    mine.shutdown()
    plain = manager("tcp://127.0.0.1:1", "3")
    assert "shares" not in plain.state_dict()
    with pytest.raises(RuntimeError, match=r"Manager\(spares=...\)"):
        plain.data_share()
    plain.shutdown()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"spares": -1}, "at least 0"),
        ({"expected_replicas": 0}, "number of all replica groups"),
        ({"spares": 3}, "leaves 0 that contribute"),
        ({"min_replicas": 3}, "leaves 2 that contribute, fewer than min_replicas=3"),
        ({"commit": "group"}, 'needs commit="quorum"'),
        ({"async_quorum": True}, "a synchronous quorum"),
        ({"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}, "WorldSizeMode.DYNAMIC"),
    ],
)
def test_what_spares_do_not_serve_is_refused(options: dict[str, Any], sentence: str) -> None:
    given = {"name": "a", "expected_replicas": 3, "spares": 1, "async_quorum": False} | options
    with pytest.raises(ValueError, match=sentence):
        JobOptions(**given)


def test_algorithms_with_windows_of_their_own_have_no_spares() -> None:
    mine, model = manager("tcp://127.0.0.1:1", "a", expected_replicas=3, spares=1), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="has no hot spares"):
        LocalSGD(mine, model, torch.optim.SGD(model.parameters(), 0.1), sync_every=2)
    mine.shutdown()


def test_a_group_that_knows_another_number_of_spares_is_refused() -> None:
    with lighthouse(expected_replicas=3) as server:
        one = Group(server, "0", shares=2)
        one.step()
        other = Replica(server, "1", expected_replicas=3, spares=2)
        with pytest.raises(JoinRefused, match="1 does not match 0"):
            other.step()
        other.close()
        one.close()


def test_a_share_that_moves_while_a_collective_waits_for_a_quorum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch was computed as a spare's; the members of the next quorum connect later."""
    begun, waits = threading.Event(), threading.Event()
    coming = threading.Semaphore(0)
    configure, enter = DataPlane.configure, Attempts.enter

    def late(self: DataPlane, effect: Configure) -> None:
        coming.release()
        waits.wait()
        configure(self, effect)

    def noted(self: Attempts, **kw: Any) -> None:
        waits.set()
        enter(self, **kw)

    with lighthouse(all_join=True, expected_replicas=3) as server:
        options = {"shares": 2, "min_replica_size": 2}
        zero, one, spare = (Group(server, str(n), **options) for n in range(3))

        def leaves() -> None:
            zero.run_to(2)
            begun.wait()
            zero.close()

        def goes_on() -> None:
            one.run_to(2)
            waits.wait()
            one.run_to(4)
            one.close()

        def is_computing() -> None:
            spare.run_to(2)
            spare.manager.start_quorum()
            assert spare.manager.data_share() is None
            monkeypatch.setattr(DataPlane, "configure", late)
            begun.set()
            for _ in range(2):
                coming.acquire()
            monkeypatch.setattr(Attempts, "enter", noted)
            assert not spare.work(), "the batch that it has computed is of no share"
            spare.run_to(4)
            spare.close()

        replicas(leaves, goes_on, is_computing)
    assert spare.seen[3] == [1.0, 1.0]
