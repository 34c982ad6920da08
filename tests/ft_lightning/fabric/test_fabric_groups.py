"""What Fabric's collectives reach outside of a step: replica groups as threads, real everything."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ft_core.environment import ENV_HEARTBEAT
from ft_core.telemetry import HEAL_DONE
from lighthouse import LighthouseServer
from lighthouse.errors import JoinRefused
from lighthouse.wire.messages import Expelled
from tests.harness.lighthouses import has_joined, is_member, patient_lighthouse
from tests.harness.script import digest, fail_once, flip_bit
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process
_launching = threading.Lock()
"""Lightning changes torch's DataLoader meanwhile, for all threads."""


class Groups:
    """Replica groups of one job, each in a thread."""

    def __init__(self, address: str, count: int) -> None:
        self.options = {"lighthouse": address, "job_id": uuid.uuid4().hex, "timeout_s": 20}
        self.count = count
        self.strategy = "FTDDPStrategy"
        self.results: dict[int, Any] = {}
        self.threads: dict[int, threading.Thread] = {}
        """The last life of each group."""

    def start(self, index: int, body: Callable[[Any, int], Any]) -> threading.Thread:
        from lightning.fabric import Fabric

        from ft_lightning import fabric as strategies

        def run() -> None:
            strategy = getattr(strategies, self.strategy)(
                replica_name=str(index), num_replica_groups=self.count, **self.options
            )
            fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
            with _launching:
                fabric.launch()
            try:
                self.results[index] = body(fabric, index)
            except Exception as error:
                self.results[index] = error
            finally:
                strategy.leave()

        thread = threading.Thread(target=run)
        thread.start()
        self.threads[index] = thread
        return thread

    def run(self, body: Callable[[Any, int], Any]) -> list[Any]:
        for index in range(self.count):
            self.start(index, body)
        return self.join()

    def wait_for_joiner(
        self, server: LighthouseServer, name: str, *, or_member: bool = False
    ) -> None:
        """Until the lighthouse has it in its anteroom. `or_member`: it may have been let in already."""
        job = self.options["job_id"]
        until(lambda: has_joined(server, job, name, or_member=or_member), f"{name} to join")

    def until_gone(self, index: int, server: LighthouseServer) -> None:
        """Until this group has ended, and the lighthouse knows."""
        self.threads[index].join(PATIENCE_S)
        job = self.options["job_id"]
        until(lambda: not is_member(server, job, str(index)), f"group {index} to be gone")

    def until_gone_before_next(self, index: int, manager: Any, server: LighthouseServer) -> None:
        """The next outer step begins in a quorum without this group."""
        begin = manager.try_start_quorum

        def when_gone() -> bool:
            self.until_gone(index, server)
            until(begin, "a quorum of its own")
            return True

        manager.try_start_quorum = when_gone

    def join(self) -> list[Any]:
        for thread in self.threads.values():
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"the others have ended: {self.results}"
        return [self.results[index] for index in range(self.count)]

    def join_again(self, ready: threading.Event, body: Callable[[Any, int], Any]) -> list[Any]:
        """Results of two: group 1 leaves, and starts again when group 0 has set `ready`."""
        self.start(0, body)
        self.start(1, body).join(PATIENCE_S)
        assert self.results[1] == "left"
        assert ready.wait(PATIENCE_S)
        self.start(1, body)
        return self.join()


@pytest.fixture(scope="module")
def server() -> Iterator[LighthouseServer]:
    with patient_lighthouse() as server:
        yield server


@pytest.fixture
def two(server: LighthouseServer, monkeypatch: pytest.MonkeyPatch) -> Groups:
    # Lightning sets it when it looks for devices, for good.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The fork of a loader's worker stops a process of this size for longer than the default, under load.
    monkeypatch.setenv(ENV_HEARTBEAT, "0.5")
    return Groups(server.address(), 2)


def linear(fabric: Any, size: int = 1) -> Any:
    net = nn.Linear(size, 1)
    nn.init.constant_(net.weight, 0.5)
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.001))


def train(fabric: Any, batches: int = 2) -> Any:
    model, optimizer = linear(fabric)
    samples = torch.arange(2.0 * batches).reshape(-1, 1)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(samples), 1))
    for (batch,) in loader:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_validation_is_sharded_and_its_metric_over_all(
    two: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    def body(fabric: Any, index: int) -> Any:
        early = fabric.all_reduce(torch.tensor(float(index)))
        model = train(fabric)
        model.eval()
        samples = TensorDataset(torch.arange(6.0))
        mine = [float(x) for (x,) in fabric.setup_dataloaders(DataLoader(samples, 1))]
        total = torch.tensor(sum(mine))
        assert fabric.all_reduce(total, reduce_op="sum") is total  # in place
        fabric.barrier()
        hits = fabric.all_reduce({"n": torch.tensor(index + 1)}, reduce_op="max")
        rows = fabric.all_gather(torch.tensor([mine[0], mine[1]]))
        return float(early), mine, float(total), int(hits["n"]), rows.tolist()

    with caplog.at_level(logging.WARNING, "ft_lightning"):
        first, second = two.run(body)
    assert (first[0], second[0]) == (0.0, 1.0)
    assert "all_reduce was called outside of a step, before the first batch" in caplog.text
    assert sorted(first[1] + second[1]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert first[2:] == second[2:] == (15.0, 2, [first[1][:2], second[1][:2]])


def test_different_calls_raise_in_all(two: Groups) -> None:
    def body(fabric: Any, index: int) -> Any:
        train(fabric)
        return fabric.all_gather(torch.zeros(index + 1))

    for error in two.run(body):
        assert isinstance(error, RuntimeError)
        assert "other replica groups called something else" in str(error)


def test_a_backward_pass_in_place_of_another_call_raises_in_all(two: Groups) -> None:
    """A member waits for gradients, and the other one for what it has called: neither comes."""
    two.options["timeout_s"] = 2

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        for number, (batch,) in enumerate(loader):
            if number == 2 and index == 1:
                gathered(fabric, index)
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    for error in two.run(body):
        assert isinstance(error, RuntimeError)
        assert "called something else" in str(error)


@pytest.mark.parametrize("who", [0, 1])
def test_a_group_that_leaves_out_a_batch_alone_is_brought_to_its_peer(
    two: Groups, who: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients of its next batches were averaged with those of its peer's batches before them, up to the end of
    the epoch, at which the peer ended with an error. The second group is brought to the first: it goes back, or
    leaves out a batch, too."""
    two.options["min_replicas"] = 2

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        samples = torch.arange(200.0).reshape(-1, 1) / 200
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(samples), 1))
        read, counted = [], []
        for number, (batch,) in enumerate(loader):
            read.append(fabric.strategy.batch_idx)
            if number == 10 and index == who:
                continue
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if fabric.strategy.last_step_committed:
                counted.append(read[-1])
        return digest(model.state_dict()), read, counted

    with caplog.at_level(logging.WARNING, "ft_lightning"):
        first, second = two.run(body)
    mine, theirs = (64, 65) if who == 0 else (65, 64)
    where = f"is at batch {mine} of its pass over the data, and the others are at batch {theirs}"
    assert where in caplog.text
    assert first[0] == second[0]
    left_out = [*range(10), *range(11, 65)]
    assert first[1] == list(range(100))
    if who == 0:
        assert first[2] == [*left_out, *range(65, 100)]
        assert second[1:] == (list(range(100)), [*range(64), *range(65, 100)])
    else:
        assert first[2] == list(range(100))
        assert second[1:] == ([*range(66), *range(64, 100)], [*left_out, *range(64, 100)])


class Breaks(torch.autograd.Function):
    """Its backward raises, where the weights of one layer have their gradients, and those of another do not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")


@pytest.mark.parametrize("evaluates", [True, False])
def test_all_raise_in_a_backward_and_one_is_late_for_it(two: Groups, evaluates: bool) -> None:
    """The other one has gone on to what its loop does next, in another quorum: no divergence."""
    gone_on = threading.Event()

    def until_gone_on(manager: Any, began_in: int) -> None:
        assert gone_on.wait(PATIENCE_S)
        if evaluates:  # its vote is cast in that forward
            until(lambda: (part := manager.in_quorum()) and part.quorum_id != began_in, "a quorum")

    def body(fabric: Any, index: int) -> Any:
        net = nn.Sequential(nn.Linear(1, 1), nn.Identity(), nn.Linear(1, 1))
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.5)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.001))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        raised, means, began_in = 0, [], -1
        for _ in fabric.strategy.epochs(2):
            model.train()
            for (batch,) in loader:
                breaks = fabric.strategy.batch_idx == 3
                net[1].forward = Breaks.apply if breaks else nn.Identity().forward
                loss = model(batch).square().mean()
                if breaks and index == 1 and not raised:
                    until_gone_on(fabric.strategy.manager, began_in)
                try:
                    fabric.backward(loss)
                except torch.OutOfMemoryError:
                    raised += 1
                    optimizer.zero_grad()
                    continue
                if began_in < 0:
                    began_in = fabric.strategy.manager.in_quorum().quorum_id
                optimizer.step()
                optimizer.zero_grad()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(batch)
            gone_on.set()
            means.append(float(fabric.all_reduce(torch.tensor(float(index)))))
        return raised, means, fabric.strategy.progress.step, digest(net.state_dict())

    first, second = two.run(body)
    assert first == second
    assert first[:3] == (2, [0.5, 0.5], 6)


def test_one_that_came_back_and_calls_something_else_raises_alone(
    two: Groups, server: LighthouseServer
) -> None:
    two.options["timeout_s"] = 2
    alone = threading.Event()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(24, 1)), 1))
        for number, (batch,) in enumerate(loader):
            if index == 1 and alone.is_set() and number == 1:
                gathered(fabric, index)
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if index == 1 and fabric.strategy.current_step == 2:
                return "left"
            if index == 0 and fabric.strategy.current_step == 4:
                alone.set()
                two.wait_for_joiner(server, "1")
        return fabric.strategy.current_step

    first, second = two.join_again(alone, body)
    assert first == 12
    assert isinstance(second, RuntimeError)
    assert "called something else (fabric.backward)" in str(second)


def test_taking_turns_needs_data_that_fabric_knows(two: Groups) -> None:
    def body(fabric: Any, index: int) -> Any:
        pairs = [linear(fabric) for _ in range(2)]
        for model, optimizer in pairs:
            fabric.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()

    for error in two.run(body):
        assert isinstance(error, RuntimeError)
        assert "optimizers that take turns need data" in str(error)


def test_who_comes_back_in_a_validation_heals_after_it(
    two: Groups, server: LighthouseServer
) -> None:
    """The metric is that of the groups that validate: it sits their rounds out, and heals at a batch."""
    validating = threading.Event()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        metrics = []
        for epoch in fabric.strategy.epochs(3):
            model.train()
            for (batch,) in loader:
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if index == 1 and fabric.strategy.current_step == 2:
                    return "left"
            model.eval()
            if index == 0 and epoch == 0:
                validating.set()
                two.wait_for_joiner(server, "1")
            metrics += [float(gathered(fabric, index)) for _ in range(3)]
        return metrics, fabric.strategy.current_step, model.weight.item()

    first, second = two.join_again(validating, body)
    alone, both = [10.0] * 3, [10.0 + 11.0] * 3
    assert first == (alone + both + both, 12, first[2])
    assert second == (both + both, *first[1:])


def test_rows_are_in_the_order_of_ranks_when_the_first_group_has_come_back(
    two: Groups, server: LighthouseServer
) -> None:
    """Of the quorum's members it is the last one. A script finds its own row by `global_rank`, also while the other
    is away: its label was out of bounds."""
    alone, copied = threading.Event(), list[float]()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(16, 1)), 1))
        for (batch,) in loader:
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if index == 0 and fabric.strategy.current_step == 2:
                return "left"
            if index == 1 and fabric.strategy.current_step == 4:
                copied.extend(fabric.all_gather(torch.tensor(11.0)).tolist())
                with pytest.raises(ValueError, match="gather detached tensors"):
                    fabric.all_gather(model(batch), sync_grads=True)
                alone.set()
                two.wait_for_joiner(server, "0")
        rows = fabric.all_gather(torch.tensor(10.0 + fabric.global_rank))
        return rows.tolist(), fabric.strategy.manager.participating_rank()

    two.start(1, body)
    two.start(0, body).join(PATIENCE_S)
    assert two.results[0] == "left" and alone.wait(PATIENCE_S)
    two.start(0, body)
    assert two.join() == [([10.0, 11.0], 1), ([10.0, 11.0], 0)]
    assert copied == [11.0, 11.0]


def gathered(fabric: Any, index: int) -> Any:
    return fabric.all_reduce(torch.tensor(10.0 + index), reduce_op="sum")


def test_joins_between_two_updates_of_a_batch(two: Groups, server: LighthouseServer) -> None:
    """Of different sizes, so that it must leave out the first; between them there is a round. It leaves
    out the scheduler's step, too, of one that was registered."""
    between = threading.Event()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        fabric.strategy.register("scheduler", scheduler)
        large, large_optimizer = linear(fabric, 7)
        seen, sums = [], []
        data = TensorDataset(torch.arange(16.0).reshape(-1, 1))
        for (batch,) in fabric.setup_dataloaders(DataLoader(data, 1)):
            seen.append(int(batch))
            loss = model(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if index == 1 and fabric.strategy.current_step == 3:
                return "left"
            if index == 0 and fabric.strategy.current_step == 7:
                between.set()
                two.wait_for_joiner(server, "1")  # it is let in after the next commit: a round's
            sums.append(float(gathered(fabric, index)))
            fabric.backward(large(batch.expand(1, 7)).square().mean())
            large_optimizer.step()
            large_optimizer.zero_grad()
            sums.append(float(gathered(fabric, index)))
        ends = model.weight.item(), large.weight.tolist(), scheduler.last_epoch
        return seen, sums, fabric.strategy.current_step, *ends

    first, second = two.join_again(between, body)
    assert sorted({*first[0]}) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert second[0] == [7, 9, 11, 13, 15]
    # Of the agreement that it was not there for it is given what its peer has got.
    assert first[1][-10:] == second[1] == [10.0, *[21.0] * 9]
    assert first[2:] == second[2:]
    assert first[2] == 16 and first[-1] == 8


def test_who_heals_in_a_batch_goes_on_at_the_beginning_of_its_peers_batch(
    two: Groups, server: LighthouseServer
) -> None:
    """The rest of its own batch does not count as done in theirs: each would wait for the other in another
    collective, again and again."""
    past = threading.Event()

    def in_next_quorum() -> bool:
        return is_member(server, two.options["job_id"], "1")

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        data = TensorDataset(torch.arange(16.0).reshape(-1, 1))
        sums, numbers = [], []
        for (batch,) in fabric.setup_dataloaders(DataLoader(data, 1)):
            sums.append(float(gathered(fabric, index)))
            if index == 1 and fabric.strategy.progress.step == 2:
                fabric.strategy.manager.rejoin("it was away")
                assert past.wait(PATIENCE_S)
            if index == 0 and fabric.strategy.progress.step == 4:
                past.set()
                two.wait_for_joiner(server, "1")
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(fabric.strategy.batch_idx)
            if index == 0 and fabric.strategy.progress.step == 5:
                until(in_next_quorum, "group 1 to be in the quorum of the next batch")
        return model.weight.item(), fabric.strategy.progress.step, sums[-2:], numbers

    first, second = two.run(body)
    assert first[:3] == second[:3] == (first[0], 8, [21.0] * 2)
    assert (first[3], second[3]) == ([*range(8)], [0, 1, 2, 5, 6, 7])


@pytest.mark.parametrize("raising", [[1], [1, 2]], ids=["one of two", "two of three"])
@pytest.mark.parametrize("half", [True, False], ids=["half an update", "no update"])
def test_an_optimizer_that_raises_and_a_loop_that_goes_on(
    two: Groups, half: bool, raising: list[int]
) -> None:
    """The group gives up its state, and takes its peers' and their place; also where most have raised."""
    raised, steps = [], 24
    two.count = len(raising) + 1

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        strategy = fabric.strategy
        fail_once(
            optimizer.optimizer, lambda: index in raising and strategy.progress.step == 5, half=half
        )
        data = TensorDataset(torch.arange(float(two.count * steps)).reshape(-1, 1))
        for (batch,) in fabric.setup_dataloaders(DataLoader(data, 1)):
            fabric.backward(model(batch / steps).square().mean())
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                raised.append(int(batch))
                continue
            optimizer.zero_grad()
        return strategy.progress.step, strategy.current_step, model.weight.item(), model.bias.item()

    first, *others = two.run(body)
    assert all(other == first for other in others)
    assert first[0] == steps
    assert len(raised) == len(raising)


def test_a_flipped_bit_is_named_and_healed(
    two: Groups,
    server: LighthouseServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FT_COMPARE_STEPS", "8")
    two.count, healed = 3, list[int]()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        nn.init.zeros_(model.bias)  # no member heals at first
        data = TensorDataset(torch.arange(72.0).reshape(-1, 1) / 72)
        for number, (batch,) in enumerate(fabric.setup_dataloaders(DataLoader(data, 1))):
            if number == 16 and index != 1:
                two.wait_for_joiner(server, "1", or_member=True)
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            manager = fabric.strategy.manager
            if number == 0:
                manager.telemetry.add_sink(
                    lambda event: event.kind == HEAL_DONE and healed.append(index)
                )
            if number == 4 and index == 1:
                flip_bit(model.weight)
        return manager.current_step(), digest(model.state_dict())

    first, *others = two.run(body)
    assert others == [first, first]
    named = {*re.findall(r"1: its parameters at step (\d+) are not", caplog.text)}
    assert [5 <= int(step) < 5 + 8 for step in named] == [True]
    assert {*healed} == {1}


@pytest.mark.parametrize(
    "lost", ["pass of DiLoCo", "scheduler", "optimizer", "optimizer of DiLoCo", "loader"]
)
def test_a_loop_that_cannot_go_to_its_peers_place_ends_at_its_first_heal(
    two: Groups, server: LighthouseServer, lost: str
) -> None:
    """A loop over `range` with outer steps, and two schedulers that can't be told apart.

    Group 1 leaves, and comes back where its peer is in another pass, or (with `epochs`) at another
    number of steps, or of optimizers or loaders: a script that makes another one for its second phase."""
    held = threading.Event()
    if "DiLoCo" in lost:
        two.strategy, two.options["sync_every"] = "FTDiLoCoStrategy", 1

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        other = type(scheduler)(optimizer, 0.9) if lost == "scheduler" else None
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        steps = 0
        for epoch in range(3) if "pass" in lost else fabric.strategy.epochs(3):
            if lost == "loader" and epoch == 1:
                loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
            if "optimizer" in lost and epoch == 1:
                later = torch.optim.SGD(model.parameters(), lr=0.0001)
                optimizer = fabric.setup_optimizers(later)
            for number, (batch,) in enumerate(loader):
                if index == 0 and (epoch, number) == (1, 2):
                    held.set()
                    two.wait_for_joiner(server, "1")
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if index == 1 and steps == 3:
                    return "left"
            scheduler.step()
        return steps, scheduler.last_epoch, other is None

    first, second = two.join_again(held, body)
    assert first == (12, 3, lost != "scheduler")
    assert isinstance(second, RuntimeError)
    wanted = {"pass": "fabric.strategy.epochs(total)", "scheduler": "scheduler=scheduler"}
    wanted["optimizer"] = "with 1 optimizers, and its peers have set up 2"
    wanted["loader"] = "with 1 data loaders, and its peers train on one that they have set up after"
    assert wanted[lost.split()[0]] in str(second)


def test_a_loop_over_range_runs_through_its_past(
    two: Groups, server: LighthouseServer, tmp_path: Path
) -> None:
    """As Lightning's pages write it: `for epoch in range`, a validation, a file for each pass.

    Group 1 leaves in its first pass, and comes back where its peer is within the third."""
    held = threading.Event()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        train = DataLoader(TensorDataset(torch.arange(16.0).reshape(-1, 1) / 16), 1, shuffle=True)
        loader = fabric.setup_dataloaders(train)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        count = {"passes": 0}
        fabric.strategy.register("count", count)
        read: dict[int, list[int]] = {}
        losses = []
        for epoch in range(5):
            for (batch,) in loader:
                if index == 0 and epoch == 2 and len(read.get(2, ())) == 3:
                    held.set()
                    two.wait_for_joiner(server, "1")
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if fabric.strategy.last_step_committed:
                    read.setdefault(epoch, []).append(round(float(batch) * 16))
                if index == 1 and not held.is_set() and len(read[0]) == 3:
                    return "left"
            val = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 1)), 1))
            model.eval()
            with torch.no_grad():
                loss = sum(model(batch).sum() for (batch,) in val) / len(val)
            model.train()
            losses.append(float(fabric.all_reduce(loss)))
            scheduler.step()
            count["passes"] += 1
            fabric.save(tmp_path / f"{epoch}.ckpt", {"weight": loss, "count": dict(count)})
        saved = [torch.load(tmp_path / f"{epoch}.ckpt") for epoch in range(5)]
        rates = optimizer.param_groups[0]["lr"]
        return read, losses, digest(model.state_dict()), rates, count, saved

    first, second = two.join_again(held, body)
    assert set(first[0]) == set(range(5)) and set(second[0]) >= {3, 4}
    for epoch in (3, 4):
        assert sorted(first[0][epoch] + second[0][epoch]) == list(range(16))
    assert first[1][3:] == second[1][3:]
    assert first[2:] == second[2:]
    assert first[4] == {"passes": 5}
    assert [each["count"]["passes"] for each in first[5]] == [1, 2, 3, 4, 5]


def test_the_next_leader_logs_the_step_in_which_it_has_become_one(
    two: Groups, server: LighthouseServer
) -> None:
    """The leader leaves when the other has begun a batch, of which nothing is reduced yet."""
    fetched = threading.Event()

    def alone(fabric: Any) -> bool:
        part = fabric.strategy.manager.in_quorum()
        return part is not None and part.replica_world_size == 1

    def body(fabric: Any, index: int) -> Any:
        net = nn.Linear(1, 1)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
        data = TensorDataset(torch.arange(12.0).reshape(-1, 1))
        logged = []
        for step, (batch,) in enumerate(fabric.setup_dataloaders(DataLoader(data, 2))):
            if step == 1 and index == 0:
                assert fetched.wait(PATIENCE_S)
                return logged
            if step == 1:
                fetched.set()
                two.until_gone(0, server)
                until(lambda: alone(fabric), "a quorum of its own")
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            if fabric.is_global_zero:
                logged.append(step)
        return logged

    assert two.run(body) == [[0], [1, 2]]


@pytest.mark.parametrize("by", ["enumerate", "batch_idx"])
def test_who_comes_back_accumulates_the_same_batches(
    two: Groups, server: LighthouseServer, by: str
) -> None:
    """Group 1 comes back within a pass, in which its `enumerate` begins at 0: it would average at other
    batches than its peer, and each would wait for the other. So it ends, and its peer goes on.
    """
    held = threading.Event()

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        data = TensorDataset(torch.arange(24.0).reshape(-1, 1) / 24)
        loader = fabric.setup_dataloaders(DataLoader(data, 1))
        read = []
        for number, (batch,) in enumerate(loader):
            if index == 0 and number == 6:
                held.set()
                two.wait_for_joiner(server, "1")
            if by == "batch_idx":
                number = fabric.strategy.batch_idx
            read.append(number)
            last = (number + 1) % 5 == 0 or number + 1 == len(loader)
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(model(batch).square().mean())
            if last:
                optimizer.step()
                optimizer.zero_grad()
                if index == 1 and not held.is_set():
                    return "left"
                if index == 0 and number == 4:
                    two.until_gone(1, server)  # so that the next window is begun without it
        return read, digest(model.state_dict())

    first, second = two.join_again(held, body)
    assert first[0] == [*range(12)]
    if by == "enumerate":
        assert isinstance(second, RuntimeError)
        assert "at batch 10 of its pass" in str(second) and "strategy.batch_idx" in str(second)
    else:
        assert second == ([10, 11], first[1])


def test_what_was_frozen_at_setup_and_is_trained_later_is_refused(two: Groups) -> None:
    """Its gradients would not be averaged, under stock `ddp`, too."""

    def body(fabric: Any, index: int) -> None:
        net = nn.Linear(1, 1)
        net.bias.requires_grad = False
        model, optimizer = fabric.setup(net, torch.optim.SGD([net.weight], lr=0.001))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        for number, (batch,) in enumerate(loader):
            if number == 2:
                net.bias.requires_grad = True
                optimizer.add_param_group({"params": [net.bias]})
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            assert number < 2

    for error in two.run(body):
        assert isinstance(error, ValueError)
        assert str(error).startswith("bias: frozen at fabric.setup, and trained now")


@pytest.mark.parametrize("later", [False, True])
def test_what_is_in_no_model_that_was_set_up_is_refused(two: Groups, later: bool) -> None:
    """Also what comes into it later. Under stock `ddp` each process trains it by itself."""

    def body(fabric: Any, index: int) -> None:
        net, head = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
        all_ = [*net.parameters(), *head.parameters()]
        model, optimizer = fabric.setup(net, torch.optim.SGD(all_, lr=0.001))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        for number, (batch,) in enumerate(loader):
            if number == 2 and later:
                net.append(head)
            out = model(batch) if number < 2 or later else head(model(batch))
            fabric.backward(out.square().mean())
            optimizer.step()
            assert number < 2

    for error in two.run(body):
        assert isinstance(error, ValueError)
        assert str(error).startswith("the optimizer trains 2 parameters (of shapes [1, 1], [1])")
        assert str(error).endswith("fabric.setup(model, optimizer)")


SAMPLES = 48


def part_of_a_run(
    path: Path, end: int, workers: int = 0, **options: Any
) -> Callable[[Any, int], Any]:
    """From what was saved there to step `end`, where it is saved again; the samples of the second epoch
    that were read."""

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
        plain = DataLoader(data, 2, shuffle=True, num_workers=workers)
        loader = fabric.setup_dataloaders(plain, **options)
        state = {"model": model, "optimizer": optimizer, "progress": fabric.strategy.progress}
        if path.exists():
            fabric.load(path, state)
        seen = []
        for epoch in fabric.strategy.epochs(2):
            for (batch,) in loader:
                seen += [int(sample) for sample in batch if epoch == 1]
                fabric.backward(model(batch / SAMPLES).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if fabric.strategy.current_step == end:
                    fabric.save(path, state)
                    return seen
        return seen

    return body


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_within_an_epoch_goes_on_with_the_samples_that_are_left(
    two: Groups, tmp_path: Path, workers: int
) -> None:
    """Two groups save after 5 of 12 batches of the second epoch, three go on for 3 batches, one has the rest."""
    path = tmp_path / "state.ckpt"
    parts = two.run(part_of_a_run(path, 17, workers))
    parts += Groups(two.options["lighthouse"], 3).run(part_of_a_run(path, 20, workers))
    parts += Groups(two.options["lighthouse"], 1).run(part_of_a_run(path, 0, workers))
    assert [len(part) for part in parts] == [10, 10, 6, 6, 6, 10]
    assert {sample for part in parts for sample in part} == set(range(SAMPLES))


def test_a_resume_with_another_number_of_groups_says_so_where_the_order_is_not_known(
    two: Groups, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, own = tmp_path / "state.ckpt", {"use_distributed_sampler": False}
    two.run(part_of_a_run(path, 29, **own))
    (rest,) = Groups(two.options["lighthouse"], 1).run(part_of_a_run(path, 0, **own))
    assert len(rest) == SAMPLES - 10
    said = "saved within an epoch, by 2 processes; with 1 the epoch goes on at batch 5"
    assert capsys.readouterr().err.count(said) == 1


def test_who_comes_back_in_a_resumed_epoch_reads_what_is_left_of_it(
    two: Groups, server: LighthouseServer, tmp_path: Path
) -> None:
    """Of the checkpoint it knows nothing: another one of its job has rotated it away, say."""
    path, held = tmp_path / "state.ckpt", threading.Event()
    (first,) = Groups(two.options["lighthouse"], 1).run(part_of_a_run(path, 30))
    lives: list[list[int]] = [[], []]

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
        loader = fabric.setup_dataloaders(DataLoader(data, 2, shuffle=True))
        strategy = fabric.strategy
        back = index == 1 and bool(lives[1])
        if not back:
            state = {"model": model, "optimizer": optimizer, "progress": strategy.progress}
            fabric.load(path, state)
        for _ in strategy.epochs(2):
            for (batch,) in loader:
                if index == 0 and strategy.current_step == 33:
                    held.set()
                    two.wait_for_joiner(server, "1")
                lives[index] += [int(sample) for sample in batch]
                fabric.backward(model(batch / SAMPLES).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if index == 1 and not back and strategy.current_step == 32:
                    return "left"
        return strategy.current_step, model.weight.item()

    one, other = two.join_again(held, body)
    assert one == other
    assert one[0] == 30 + 9  # 36 samples are left, of which both read 4 a step
    seen = [*first, *lives[0], *lives[1]]
    assert len(first) == 12 and len(lives[0]) == 18
    assert len(set(seen)) == len(seen) > SAMPLES - 2 * 6


class Stream(IterableDataset[Any]):
    """Of a length that is not known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(self.length, 1))


@pytest.mark.parametrize("needed", [1, 2])
def test_a_loop_that_is_longer_than_its_peers_ends_when_they_have_finished(
    two: Groups, needed: int
) -> None:
    """Streams of unknown length, of which that of group 1 is longer. It may be too few by itself."""

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(Stream(3 + 4 * index), 1))
        for _ in fabric.strategy.epochs(2):
            for batch in loader:
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return fabric.strategy.current_step

    with patient_lighthouse(connect_timeout_s=2.0) as server:
        two.options["lighthouse"] = server.address()
        two.options["min_replicas"] = needed
        first, second = two.run(body)
    assert first == 6
    assert isinstance(second, RuntimeError if needed == 1 else JoinRefused)
    assert "have finished" in str(second)
    assert "its data is longer than theirs" in str(second)


def test_a_script_without_epochs_that_has_ended_is_not_started_over_by_one_group(
    two: Groups, server: LighthouseServer
) -> None:
    def body(fabric: Any, index: int) -> Any:
        train(fabric)
        fabric.strategy._at_exit()  # what the end of the process calls
        return fabric.strategy.progress.step

    def refused() -> bool:
        job = two.options["job_id"]
        reasons = [each["reason"] for each in server.status()["jobs"] if each["job_id"] == job]
        return any("the training has finished at step 2" in reason for reason in reasons)

    assert two.run(body) == [2, 2]
    two.start(1, body)
    until(refused, "group 1 to hear that the training is over")
    two.start(0, body)  # all of them start it over
    assert two.join() == [2, 2]


def test_the_next_leader_saves_what_a_dead_one_has_not(two: Groups, tmp_path: Path) -> None:
    path, deaths = tmp_path / "model.ckpt", list[int]()

    def body(fabric: Any, index: int) -> Any:
        storage = fabric.strategy.checkpoint_io
        save = storage.save_checkpoint

        def once(*args: Any, **kwargs: Any) -> None:
            if not deaths:
                deaths.append(index)
                raise LookupError("it dies in its save")
            save(*args, **kwargs)

        storage.save_checkpoint = once
        model = train(fabric)
        fabric.save(path, {"model": model})
        return index

    results = two.run(body)
    (dead,) = deaths
    assert isinstance(results[dead], LookupError)
    assert results[1 - dead] == 1 - dead
    assert path.exists()


@pytest.mark.parametrize("kind", ["quorum", "group"])
def test_what_a_failed_attempt_gathers_has_the_shape_of_what_any_gathers(
    two: Groups, kind: str
) -> None:
    """With per-group commit nothing is made again before the backward: it raised IndexError, and the group
    ended with its peer."""
    two.options |= {"commit": kind}
    losses = [0.0, 0.0]

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 1)), 1))
        for number, (batch,) in enumerate(loader):
            loss = model(batch * (index + 1)).square().mean()
            if number == 2:
                losses[index] = loss.item()
                fabric.strategy.manager.report_error(RuntimeError("injected"))
                rows = fabric.all_gather(loss.detach())
                total = fabric.all_reduce(loss.detach().clone(), reduce_op="sum")
            fabric.backward(loss)
            optimizer.step()
        return rows.tolist(), total.item(), digest(model.state_dict())

    (rows, total, weights), (others, others_total, same) = two.run(body)
    if kind == "quorum":
        assert sorted(rows) == sorted(others) == sorted(losses)
        assert total == others_total == pytest.approx(sum(losses))
    else:
        assert (rows, others) == ([losses[0]] * 2, [losses[1]] * 2)
        assert (total, others_total) == tuple(losses)
    assert weights == same


def evict(manager: Any) -> None:
    """As the lighthouse does with one whose loop makes no progress."""
    control = manager._session.control
    job, quorum_id = control._replica._template.job, control.status.view.quorum_id
    control.submit(Expelled(job, quorum_id, "evicted", hung=True))


@pytest.mark.parametrize("kind", ["quorum", "group", "diloco"])
@pytest.mark.parametrize("count", [1, 2])
def test_who_is_evicted_before_its_save_or_in_it_does_not_write_unless_it_leads_again(
    two: Groups, tmp_path: Path, kind: str, count: int
) -> None:
    groups, wrote, evicted = two, list[tuple[str, bool]](), set[str]()
    groups.count = count
    groups.options |= {"sync_every": 2} if kind == "diloco" else {"commit": kind}
    groups.strategy = "FTDiLoCoStrategy" if kind == "diloco" else groups.strategy

    def body(fabric: Any, index: int) -> Any:
        strategy, storage = fabric.strategy, fabric.strategy.checkpoint_io
        save = storage.save_checkpoint

        def written(checkpoint: Any, path: Path, **kwargs: Any) -> None:
            save(checkpoint, path, **kwargs)
            name = "within" if "within" in path.name else "before"
            if name == "within" and name not in evicted:
                evicted.add(name)
                evict(strategy.manager)
            part = strategy.manager.in_quorum()
            wrote.append((name, part is not None and part.rank == 0))

        storage.save_checkpoint = written
        model, optimizer = linear(fabric)
        samples = torch.arange(12.0 * count).reshape(-1, 1)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(samples), 1))
        values: dict[str, float] = {}
        for _ in strategy.epochs(1):
            for (batch,) in loader:
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                # Not by a count of its own: one that was evicted may go back, to a peer's step.
                if name := {4: "within", 8: "before"}.get(strategy.progress.step, ""):
                    if name == "before" and fabric.is_global_zero and name not in evicted:
                        evicted.add(name)
                        evict(strategy.manager)
                    values[name] = model.weight.item()
                    fabric.save(tmp_path / name, {"model": model})
        return values

    results = groups.run(body)
    for name in ("within", "before"):
        saved = torch.load(tmp_path / name)["model"]["weight"].item()
        assert saved in [values[name] for values in results]
        led = [leads for each, leads in wrote if each == name]
        assert led.count(False) == (name == "within")  # it was evicted when it had written
        # Without a vote behind each save, each new leader makes up what the one before may not have saved.
        assert 1 <= led.count(True) <= (2 if kind == "diloco" else 1)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("loads", ["all", "model", "nothing"])
def test_a_script_that_is_started_again_when_all_have_died_says_from_where_it_goes_on(
    two: Groups,
    server: LighthouseServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    loads: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "state.ckpt"

    def body(fabric: Any, index: int) -> Any:
        model, optimizer = linear(fabric)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 1)), 1))
        state = {"model": model, "progress": fabric.strategy.progress}
        if path.exists() and loads != "nothing":
            fabric.load(path, state if loads == "all" else {"model": model}, strict=False)
        for _ in fabric.strategy.epochs(2):
            for (batch,) in loader:
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            fabric.save(path, state)
            if fabric.strategy.scope.restarts == 0:
                break  # all die
        return fabric.strategy.current_step

    assert two.run(body) == [2, 2]
    assert capsys.readouterr().err.count("all had ended") == 0
    for index in range(two.count):
        two.until_gone(index, server)
    monkeypatch.setenv("FT_RESTARTS", "1")
    assert two.run(body) == [4, 4]
    said = [line for line in capsys.readouterr().err.splitlines() if "all had ended" in line]
    wanted = {
        "all": f"the job goes on from {path} (step 2)",
        "model": f"goes on from {path}, which has no progress",
        "nothing": f"has not called fabric.load, though the job has saved {path}: it begins anew",
    }
    assert len(said) == 1
    assert wanted[loads] in said[0]
    assert not list(tmp_path.glob("*.saved"))  # the training has come to its end


def stream_steps(fabric: Any) -> Iterator[int]:
    """Train on a stream of three batches; the number of each, when its step is taken."""
    model, optimizer = linear(fabric)
    loader = fabric.setup_dataloaders(DataLoader(Stream(3), 1))
    for _ in fabric.strategy.epochs(1):
        for number, batch in enumerate(loader):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            yield number


def test_a_group_that_ends_when_its_peer_is_gone_has_finished_as_well(
    two: Groups, server: LighthouseServer
) -> None:
    """Its stream has ended; but that is known only when it is asked for a further batch."""

    def body(fabric: Any, index: int) -> Any:
        for number in stream_steps(fabric):
            if (index, number) == (1, 2):
                two.until_gone(0, server)
        return fabric.strategy.current_step

    assert two.run(body) == [3, 3]


def test_a_last_outer_step_is_the_last_one_also_when_its_peer_is_gone_by_then(
    two: Groups, server: LighthouseServer
) -> None:
    """The next one is begun before it is known that no further batch comes. Who has led leads to the end."""
    two.strategy = "FTLocalSGDStrategy"
    two.options["sync_every"] = 3

    def body(fabric: Any, index: int) -> Any:
        for number in stream_steps(fabric):
            if (index, number) == (1, 2):
                two.until_gone_before_next(0, fabric.strategy.manager, server)
        return fabric.strategy.outer_step, fabric.is_global_zero

    assert two.run(body) == [(1, True), (1, False)]


@pytest.mark.parametrize(("min_replicas", "reduces"), [(1, False), (1, True), (2, False)])
def test_a_spare_takes_over_the_share_of_one_that_is_gone(
    two: Groups, server: LighthouseServer, min_replicas: int, reduces: bool
) -> None:
    """Group 1 goes within a batch: that is lost. None is where the others reduce something before their
    backward, which gives its share to the spare, or where all shares are needed: the spare computes it.
    The group comes back, and is the next spare."""
    two.count = 3
    two.options |= {"spares": 1, "min_replicas": min_replicas}
    counted: dict[tuple[int, int], list[int]] = {}  # by share and step: the samples

    def body(fabric: Any, index: int) -> Any:
        strategy, life = fabric.strategy, lives[index]
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
        samples = TensorDataset(torch.arange(24.0).reshape(-1, 1))
        loader = fabric.setup_dataloaders(DataLoader(samples, 2, shuffle=True))
        for _ in strategy.epochs(2):
            for (batch,) in loader:
                if index == 1 and life == 0 and strategy.current_step == 3:
                    strategy.leave()
                    lives[1] = 1
                    return "left"
                loss = model(batch / 24).mean()
                if reduces:
                    assert torch.isfinite(fabric.all_reduce(loss.detach().clone()))
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                share, step = strategy.manager.data_share(), strategy.current_step
                if strategy.last_step_committed and share is not None:
                    assert (share, step) not in counted
                    counted[share, step] = [int(x) for x in batch.flatten()]
                if step == 10 and index == 0:
                    assert back.wait(PATIENCE_S)
        return fabric.world_size, strategy.current_step, float(net.weight), strategy.share

    lives, back = [0, 0, 0], threading.Event()
    for index in (0, 2):
        two.start(index, body)
    two.start(1, body)
    two.until_gone(1, server)
    assert two.results[1] == "left"
    two.start(1, body)
    two.wait_for_joiner(server, "1", or_member=True)
    back.set()
    first, again, spare = two.join()
    assert first[:3] == spare[:3] == (2, 12, spare[2])
    assert again[:3] == first[:3]
    assert spare[3] == 1
    lost = set() if min_replicas == 2 or reduces else {(1, 4)}
    assert counted.keys() == {(share, step) for share in (0, 1) for step in range(1, 13)} - lost
    for epoch in (range(1, 7), range(7, 13)):
        seen = [x for (_, step), batch in counted.items() if step in epoch for x in batch]
        assert len(seen) == len(set(seen)) == 24 - 2 * (len(lost) * (4 in epoch))


def test_a_spare_needs_data_that_a_sampler_divides(two: Groups) -> None:
    two.options["spares"] = 1
    two.count = 3

    def body(fabric: Any, index: int) -> Any:
        model, _ = linear(fabric)
        samples = DataLoader(TensorDataset(torch.arange(4.0).reshape(-1, 1)))
        loader = fabric.setup_dataloaders(samples, use_distributed_sampler=False)
        return [model(x) for (x,) in loader]

    assert all("spares needs training data" in str(error) for error in two.run(body))
