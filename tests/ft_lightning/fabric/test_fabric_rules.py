"""What a Fabric loop may do and what it is told, in one process with a real lighthouse."""

from __future__ import annotations

import copy
import logging
import os
import signal
import uuid
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ft_core.launch.board import slot
from ft_core.launch.kept import Card
from ft_lightning.fabric.loop_position import Window, WindowPlace
from lighthouse.errors import TooFewLeft
from tests.ft_lightning.fabric.scheduled import set_up
from tests.ft_lightning.trainer.test_batches import Placed as BegunAgain
from tests.harness.cluster import as_child, board_of
from tests.harness.lighthouses import patient_lighthouse

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with patient_lighthouse(join_timeout_s=1.0) as server:
        yield server.address()


@pytest.fixture
def fabric(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # Lightning sets it when it looks for devices, for good.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    made = make(address)
    yield made
    made.strategy.leave()


def make(address: str, name: str = "FTDDPStrategy", **options: Any) -> Any:
    from lightning.fabric import Fabric

    import ft_lightning.fabric

    kind = getattr(ft_lightning.fabric, name)
    strategy = kind(lighthouse=address, job_id=uuid.uuid4().hex, timeout_s=20, **options)
    made = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    made.launch()
    return made


def data(batches: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2.0 * batches).reshape(-1, 1)), 2)


def ready(fabric: Any, loader: Any, **options: Any) -> tuple[Any, Any, Any]:
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    return model, optimizer, fabric.setup_dataloaders(loader, **options)


def outcomes_of(fabric: Any) -> list[str]:
    """The kinds of events from here on."""
    kinds: list[str] = []
    fabric.strategy.manager.telemetry.add_sink(lambda event: kinds.append(event.kind))
    return kinds


def discard_in_backward(fabric: Any, loss: Any) -> None:
    """Have the first attempt of the step that `loss` belongs to discarded, once."""
    error = RuntimeError("injected")
    loss.register_hook(lambda gradient: fabric.strategy.manager.report_error(error))


def test_collectives_outside_of_a_step_wait_for_nobody(fabric: Any) -> None:
    value = torch.tensor([1.0, 2.0])
    assert fabric.broadcast({"a": 1}) == {"a": 1}
    fabric.barrier()
    assert torch.equal(fabric.all_reduce(value), value)
    assert torch.equal(fabric.all_gather(value), value)
    with fabric.rank_zero_first():
        pass


def test_validation_does_not_begin_a_step(fabric: Any) -> None:
    """Reading a loader in eval mode or without gradients is no training."""
    model, optimizer, loader = ready(fabric, data(), use_distributed_sampler=False)
    with torch.no_grad():
        for (batch,) in loader:
            model(batch)
    assert fabric.strategy.manager.last_outcome() is None
    model.train()
    for (batch,) in loader:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    assert fabric.strategy.current_step == 4


def test_optimizers_that_share_a_backward_are_one_step(fabric: Any) -> None:
    net = nn.Linear(1, 1)
    weight = torch.optim.SGD([net.weight], lr=0.01)
    bias = torch.optim.SGD([net.bias], lr=0.01)
    model, weight, bias = fabric.setup(net, weight, bias)
    outcomes = outcomes_of(fabric)
    seen = []
    for (batch,) in fabric.setup_dataloaders(data(3)):
        seen.append(float(batch[0]))
        before = net.weight.item(), net.bias.item()
        loss = model(batch + 1).sum()
        if len(seen) == 2:
            fabric.strategy.manager.report_error(RuntimeError("injected"))
        fabric.backward(loss)
        weight.step()
        bias.step()
        assert fabric.strategy.last_step_committed
        assert net.weight.item() != before[0] and net.bias.item() != before[1]
    assert seen == [0.0, 2.0, 4.0]
    assert fabric.strategy.current_step == 3
    assert outcomes.count("discard") == 1


def two_updates(fabric: Any, inject: int | None) -> tuple[list[float], int, Any, Any]:
    """As a GAN: (first samples of the batches seen, discarded steps, critic, net).

    `inject`: the number of the update of which the first attempt is discarded.
    """
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    critic = nn.Linear(1, 1)
    net_optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(net_optimizer, step_size=1, gamma=0.5)
    model, net_optimizer, scheduler = set_up(fabric, net, net_optimizer, scheduler)
    judge, optimizer = fabric.setup(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
    outcomes = outcomes_of(fabric)
    seen: list[float] = []
    updates = 0

    def update(which: Any, loss: Any) -> None:
        nonlocal updates
        which.zero_grad()
        if updates == inject:
            discard_in_backward(fabric, loss)
        fabric.backward(loss)
        which.step()
        assert fabric.strategy.last_step_committed
        updates += 1

    for (batch,) in fabric.setup_dataloaders(data(3)):
        seen.append(float(batch[0]))
        made = model(batch)  # for both updates
        update(optimizer, judge(made.detach()).square().mean())
        update(net_optimizer, judge(made).mean())
        scheduler.step()
    assert fabric.strategy.current_step == updates == 6
    return seen, outcomes.count("discard"), net, critic


@pytest.mark.parametrize("inject", [2, 3])
def test_a_discarded_update_is_tried_again_and_the_loop_does_not_notice(
    fabric: Any, address: str, inject: int
) -> None:
    seen, discards, net, critic = two_updates(fabric, inject)
    assert seen == [0.0, 2.0, 4.0]
    assert discards == 1
    again = make(address)
    expected = two_updates(again, inject=None)
    again.strategy.leave()
    assert expected[:2] == ([0.0, 2.0, 4.0], 0)
    for mine, other in ((net, expected[2]), (critic, expected[3])):
        for name, value in mine.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_a_further_update_may_call_backward_on_its_loss(fabric: Any) -> None:
    model, optimizer, loader = ready(fabric, data())
    (batch,) = next(iter(loader))
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert fabric.strategy.current_step == 2


def test_an_optimizer_needs_gradients_of_a_step(fabric: Any) -> None:
    model, optimizer, loader = ready(fabric, data())
    (batch,) = next(iter(loader))
    model(batch)
    with pytest.raises(RuntimeError, match=r"without gradients of a step.*fabric.backward"):
        optimizer.step()


def test_a_collective_within_a_step_is_an_agreement_of_its_own(fabric: Any) -> None:
    """A discard of it leaves the batch, the running statistics and the step's gradients alone."""
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    seen = []
    for (batch,) in fabric.setup_dataloaders(data(2)):
        seen.append(float(batch[0]))
        loss = model(batch).square().mean()
        fabric.strategy.manager.report_error(RuntimeError("injected"))
        assert float(fabric.all_reduce(loss.detach().clone())) == loss.item()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [0.0, 2.0]
    assert int(net[1].num_batches_tracked) == 2
    assert fabric.strategy.current_step == 2


def test_sigterm_ends_the_process_after_the_step_under_way(fabric: Any) -> None:
    calls: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        users = signal.getsignal(signal.SIGTERM)
        model, optimizer, loader = ready(fabric, data())
        seen = []
        with pytest.raises(SystemExit) as end:
            for (batch,) in loader:
                seen.append(float(batch[0]))
                if len(seen) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                assert fabric.strategy.last_step_committed
        assert (seen, calls, end.value.code) == ([0.0, 2.0], [signal.SIGTERM], 143)
        assert fabric.strategy.manager.left()
        fabric.strategy.leave()
        assert signal.getsignal(signal.SIGTERM) is users
    finally:
        signal.signal(signal.SIGTERM, former)


def test_sigterm_ends_a_process_that_would_have_to_wait_for_peers(fabric: Any) -> None:
    """Its step was lost with the quorum, which may never come back: all were told to end."""
    model, optimizer, loader = ready(fabric, data())
    seen = []
    with pytest.raises(SystemExit) as end:
        for (batch,) in loader:
            seen.append(float(batch[0]))
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            os.kill(os.getpid(), signal.SIGTERM)
            fabric.strategy.manager.rejoin("the others have left")
    assert (seen, end.value.code) == ([0.0], 143)


def test_what_comes_too_late_or_cannot_work_is_said(fabric: Any) -> None:
    model, optimizer, loader = ready(fabric, data())
    net = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        fabric.setup_optimizers(torch.optim.LBFGS(net.parameters()))
    seen = {"samples": 0}
    fabric.strategy.register("seen", seen)
    with pytest.raises(ValueError, match="the name is taken"):
        fabric.strategy.register("seen", seen)
    (batch,) = next(iter(loader))
    fabric.backward(model(batch).square().mean())
    optimizer.step()
    with pytest.raises(RuntimeError, match="before the first batch"):
        fabric.setup(net)
    with pytest.raises(ValueError, match="was fetched already"):
        fabric.strategy.register("more", {})


def test_a_loop_goes_on_from_what_is_kept_unless_it_is_past_that_or_cannot_go_there(
    fabric: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def goes_on(step: int, epoch: int = 0, optimizers: int = 1) -> bool:
        progress = {"epoch": 0, "step": step, "places": [[epoch, 3, 1]]}
        made = [{} for _ in range(optimizers)]
        kept = {"default": {"progress": progress, "lead": 0, "optimizers": made}}
        return bool(fabric.strategy.manager.state.takes_kept(kept))

    model, optimizer, loader = ready(fabric, data())
    (batch,) = next(iter(loader))
    assert goes_on(step=3)
    assert goes_on(step=3, epoch=2), "over `range` it runs there"
    assert not goes_on(step=3, optimizers=2)
    assert "the kept state of the job is not used: this process came back with 1" in caplog.text
    fabric.backward(model(batch).square().mean())
    optimizer.step()
    assert goes_on(step=1)
    assert not goes_on(step=0), "as with a newer checkpoint"


def test_the_first_group_of_an_optimizers_parameters_may_be_empty(fabric: Any) -> None:
    """As of those without weight decay. A process that came back ended with an IndexError."""
    net = nn.Linear(1, 1)
    groups: list[Any] = [{"params": []}, {"params": list(net.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    fabric.strategy.register("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 1))
    model, _ = fabric.setup(net, optimizer)
    (batch,) = next(iter(fabric.setup_dataloaders(data())))
    fabric.backward(model(batch).square().mean())
    progress = {"epoch": 0, "step": 3, "places": [[0, 3, 1]]}
    kept = {"default": {"progress": progress, "lead": 0, "optimizers": [{}]}}
    assert fabric.strategy.manager.state.takes_kept(kept)


def test_what_an_earlier_fabric_has_set_up_follows_the_later_one(fabric: Any, address: str) -> None:
    """A script may train the same data and schedule again. The first one's place and window counted, too."""
    raw, net = data(4), nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.01), 1)
    fabric.strategy.register("scheduler", scheduler)
    model, optimizer, loader = ready(fabric, raw, use_distributed_sampler=False)
    for (batch,) in loader:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    fabric.strategy.leave()
    later = make(address)
    later.strategy.register("scheduler", scheduler)
    model, optimizer, loader = ready(later, raw, use_distributed_sampler=False)
    progress = later.strategy.progress
    progress.load_state_dict({**progress.state_dict(), "places": [[0, 2, 1]]})
    assert [float(batch[0]) for (batch,) in loader] == [4.0, 6.0]
    later.strategy.last_step_committed = False
    scheduler.step()
    assert scheduler.last_epoch == 0
    later.strategy.leave()


def test_steps_behind_the_training_are_this_process_s_own(address: str) -> None:
    """LocalSGD and DiLoCo began again with the next forward, and would have waited for those that had ended."""
    fabric = make(address, "FTLocalSGDStrategy", sync_every=2)
    model, optimizer, loader = ready(fabric, data(4))
    for _ in fabric.strategy.epochs(1):
        for (batch,) in loader:
            fabric.backward(model(batch).square().mean())
            optimizer.step()
    assert fabric.strategy.outer_step == 2
    for _ in range(4):
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    assert fabric.strategy.outer_step == 2
    fabric.strategy.leave()


@pytest.mark.parametrize("lost", ["", "scheduler"])
def test_nothing_is_kept_from_which_a_loop_could_not_go_on(
    fabric: Any, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what the loop shows, nor what the keeper has from before."""
    model, optimizer, loader = ready(fabric, data(2))
    if lost == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    kept, manager = [], fabric.strategy.manager
    start = manager.start_quorum

    def start_quorum(*given: Any, **options: Any) -> Any:
        kept.append((manager.state.whole(), slot().keepers_card() is not None))
        return start(*given, **options)

    monkeypatch.setattr(manager, "start_quorum", start_quorum)
    with board_of(1) as board:
        with as_child(board, board.keeper):
            slot().tell(Card("", ()).row())
        with as_child(board, 0):
            for _ in range(2):
                for (batch,) in loader:
                    fabric.backward(model(batch).square().mean())
                    optimizer.step()
    good = {"": 4, "scheduler": 1}[lost]
    assert kept == [(True, True)] * good + [(False, False)] * (4 - good)


def test_a_discarded_step_is_tried_again_before_the_scheduler_steps(fabric: Any) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = set_up(fabric, net, optimizer, scheduler)
    loader = fabric.setup_dataloaders(data(3))
    seen, rates = [], []
    for (batch,) in loader:
        seen.append(float(batch[0]))
        loss = model(batch).square().mean()
        if len(seen) == 2:
            fabric.strategy.manager.report_error(RuntimeError("injected"))
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert seen == [0.0, 2.0, 4.0]
    assert rates == [0.5, 0.25, 0.125]
    assert fabric.strategy.current_step == 3


def test_a_loader_that_the_script_drops_is_not_kept(fabric: Any) -> None:
    """It may make one for each epoch. That there was one is kept: peers tell theirs by their numbers."""
    model, optimizer, first = ready(fabric, data(1))
    kept: list[Any] = []
    for _ in range(3):
        loader = fabric.setup_dataloaders(data(2))
        kept += weakref.ref(loader.dataset), weakref.ref(loader.sampler)
        for (batch,) in loader:
            fabric.backward(model(batch).square().mean())
            optimizer.step()
    del loader
    assert not any(known() for known in kept)
    assert len(fabric.strategy.progress.state_dict()["places"]) == 4
    assert fabric.strategy.current_step == 6
    assert len(list(first)) == 1


def test_a_loader_may_outlive_the_names_of_modules(
    fabric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a script's own names does when Python ends. It had printed a TypeError for each loader."""
    from ft_lightning.fabric import loop_position

    loader = fabric.setup_dataloaders(data(1))
    place = fabric.strategy.progress.places[0]
    for name in [name for name in vars(loop_position) if not name.startswith("__")]:
        monkeypatch.setattr(loop_position, name, None)
    del loader  # what it raises is an error of the test
    assert place.known is None


def test_a_compiled_model_is_compiled_around_what_reduces(fabric: Any) -> None:
    torch.manual_seed(5)
    net = nn.Linear(1, 1)
    start = net.weight.item()
    model, optimizer = fabric.setup(
        torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), lr=0.01)
    )
    assert isinstance(model._forward_module, torch._dynamo.OptimizedModule)
    for (batch,) in fabric.setup_dataloaders(data(3)):
        fabric.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert fabric.strategy.current_step == 3
    assert net.weight.item() == pytest.approx(start - 0.01 * (0 + 1 + 2 + 3 + 4 + 5), abs=1e-6)


def test_a_copy_of_a_model_that_was_set_up_keeps_its_weights(fabric: Any) -> None:
    """A target network, which answers what the model did when it was copied."""
    model, optimizer, loader = ready(fabric, data())
    target = copy.deepcopy(model)
    before = model(torch.ones(1, 1)).item()
    for (batch,) in loader:
        fabric.backward((model(batch) - target(batch) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert target(torch.ones(1, 1)).item() == before != model(torch.ones(1, 1)).item()
    assert target.state_dict().keys() == model.state_dict().keys()
    assert fabric.strategy.current_step == 4


def test_a_call_is_not_answered_with_what_the_peers_got_from_another() -> None:
    window = Window()
    window.place, window.results = WindowPlace(committed=1), [("all_reduce", 1.0), ("barrier", 2.0)]
    window.begin()
    assert window.answer("all_reduce") == 1.0
    with pytest.raises(RuntimeError, match=r"calls fabric.save where .* called fabric.barrier"):
        window.answer("save")
    assert window.answer("barrier") == 2.0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(6.0).reshape(-1, 1))


def test_a_discarded_step_leaves_an_iterable_at_its_place(fabric: Any) -> None:
    model, optimizer, loader = ready(fabric, DataLoader(Stream(), 2))
    seen = []
    for batch in loader:
        seen.append(float(batch[0]))
        loss = model(batch).square().mean()
        if len(seen) == 2:
            fabric.strategy.manager.report_error(RuntimeError("injected"))
        fabric.backward(loss)
        optimizer.step()
    assert seen == [0.0, 2.0, 4.0]
    assert fabric.strategy.current_step == 3


def test_an_iterable_starts_over_after_a_heal_and_that_is_said(
    fabric: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, loader = ready(fabric, DataLoader(Stream(), 2))
    (place,) = fabric.strategy.progress.places
    seen = []
    with caplog.at_level(logging.WARNING, "ft_lightning"):
        for batch in loader:
            seen.append(float(batch[0]))
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            if len(seen) == 1:
                place.go_to(place.epoch, place.batch + 1, True)  # as a heal does
    assert seen == [0.0, 0.0, 2.0, 4.0]
    assert "starts over" in caplog.text


class Placed(Stream):
    """Keeps its place, where it is read in this process."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 6:
            self.at += 1
            yield torch.tensor([self.at - 1.0])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Started(BegunAgain):
    """Begins a pass where its state says, or at its beginning: at the end of one that is its end."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([float(number)]) for number in super().__iter__())


def of_datasets(loader: type[Any] = DataLoader) -> Any:
    """It begins each pass at the state that it has loaded."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": range(6)}).to_iterable_dataset()
    return loader(
        stream, 2, collate_fn=lambda rows: torch.tensor([[float(row["x"])] for row in rows])
    )


def of_torchdata() -> Any:
    return of_datasets(pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader)


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: DataLoader(Placed(), 2),
        lambda: DataLoader(Started(), 2),
        of_datasets,
        of_torchdata,
    ],
    ids=["placed", "started", "datasets", "torchdata"],
)
@pytest.mark.parametrize("trained", [3, 4, 5])
def test_a_stream_with_a_state_goes_on_at_its_peers_place(
    address: str,
    fabric: Any,
    caplog: pytest.LogCaptureFixture,
    make_loader: Callable[[], Any],
    trained: int,
) -> None:
    """After a heal in its second pass, and from what was saved within it; later passes are whole."""
    model, optimizer, loader = ready(fabric, make_loader())
    places = []

    batches = (batch for _ in fabric.strategy.epochs(3) for batch in loader)
    for batch in islice(batches, trained):
        # Of the step, which began before the batch was fetched.
        places.append(fabric.strategy._state()["progress"])
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    saved = fabric.strategy.progress.state_dict()
    for place, done in ((places[-1], trained - 1), (saved, trained)):
        other = make(address)
        try:
            *_, again = ready(other, make_loader())
            other.strategy.progress.load_state_dict(place)
            read = [[float(batch[0]) for batch in again] for _ in other.strategy.epochs(3)]
        finally:
            other.strategy.leave()
        # Where a stream ends is known only when it is asked for a further batch.
        whole, passes = [0.0, 2.0, 4.0], (done - 1) // 3
        assert read == [whole[done - 3 * passes :], *[whole] * (2 - passes)]
    assert "starts over" not in caplog.text


@pytest.mark.parametrize("there", [False, True])
def test_where_others_have_finished_a_batch_may_be_asked_for_and_not_be_there(
    fabric: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """With `min_replicas` at the number of groups: at the end of a stream, and of `zip(loader, shorter)`."""
    model, optimizer, loader = ready(fabric, DataLoader(Stream(), 2))
    batches = iter(loader)
    for _ in range(2 if there else 3):
        fabric.backward(model(next(batches)).square().mean())
        optimizer.step()

    def left(**_: Any) -> None:
        raise TooFewLeft("others have finished")

    monkeypatch.setattr(fabric.strategy.manager, "start_quorum", left)
    if not there:
        assert next(batches, None) is None
        return
    batch = next(batches)
    with pytest.raises(TooFewLeft):
        fabric.backward(model(batch).square().mean())


def test_data_that_fabric_does_not_know(fabric: Any) -> None:
    """The step begins at the forward."""
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for _ in range(3):
        fabric.backward(model(torch.ones(2, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert fabric.strategy.current_step == 3
