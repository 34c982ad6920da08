"""The pure part: how a script that is behind gets to where its peers are."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ft_accelerate.runtime.checkpoints import POSITION_FILE, SavedPosition
from ft_accelerate.runtime.leadership import main_of
from ft_accelerate.runtime.models import COPIED_BYTES, FaultTolerantModel, freeze, thaw
from ft_accelerate.runtime.script_position import (
    UNKNOWN,
    Elsewhere,
    Epoch,
    Iteration,
    Phase,
    ScriptPosition,
    SizeGivenUp,
    Target,
)
from ft_core.collectives.retry import RetryableReducer, RetryHooks


def peers(**changes: object) -> Target:
    target = Target(
        window=(1, 2),
        ops=(),
        grads=0,
        active=((1, 2, None),),
        iterations=2,
        lengths={},
        events=7,
        at="fetch",
    )
    return dataclasses.replace(target, **changes)  # type: ignore[arg-type]


def run_to(position: ScriptPosition, passes: list[int]) -> Iteration:
    """Passes of so many batches; the last one is left open."""
    for number, batches in enumerate(passes):
        iteration = position.begin(None)
        for _ in range(batches):
            assert not position.arrive(iteration)
            iteration.yielded += 1
        if number < len(passes) - 1:
            position.finish(iteration, has_length=True)
    return iteration


def test_passes_that_one_process_has_made_alone_are_not_counted() -> None:
    position, other = ScriptPosition(), ScriptPosition()
    run_to(position, [3, 2])  # the second pass is its own
    position.finish(position.active[0], has_length=False)
    run_to(other, [3])
    other.finish(other.active[0], has_length=True)
    for each in (position, other):
        each.open_window(each.begin(None))
    position.align(other.iterations, other.under_way)
    assert position.describe("grad") == other.describe("grad")

    run_to(position, [2])  # in the midst of the pass under way, which keeps its number
    position.finish(position.active[-1], has_length=True)
    position.align(other.iterations, other.under_way)
    assert position.describe("op") == other.describe("op")


def test_a_pass_whose_iterator_one_process_keeps_is_over_for_all() -> None:
    """What holds it: the frame of a loop over an epoch, in the traceback of an error of communication."""
    keeps, other = ScriptPosition(), ScriptPosition()
    for each in (keeps, other):
        each.leaves = each.iterations
        first = each.begin(None)
        first.length = 2
        each.open_window(first)
        first.yielded = 2
        each.step_taken()
        if each is other:
            each.finish(first, has_length=True)
    evaluations = [each.begin(None) for each in (keeps, other)]
    other.align(keeps.iterations, min(keeps.under_way, other.under_way))
    assert [iteration.seq for iteration in evaluations] == [1, 1]
    for each, evaluation in zip((keeps, other), evaluations, strict=True):
        each.finish(evaluation, has_length=True)
        each.leaves = each.iterations
        each.open_window(each.begin(None))
        each.step_taken()
    other.align(keeps.iterations, min(keeps.under_way, other.under_way))
    assert other.window == keeps.window == (2, 0)
    assert other.under_way == other.leaves == other.resumes_at == keeps.resumes_at == 2
    assert not keeps.resumes_behind


def test_an_epoch_has_the_number_of_its_pass_after_one_process_has_evaluated_alone() -> None:
    position, other = ScriptPosition(), ScriptPosition()
    run_to(position, [2])
    position.finish(position.active[0], has_length=True)
    for each in (position, other):
        each.leaves = each.iterations
        each.begin_epoch(0)
    position.align(other.iterations, UNKNOWN)  # an operation before its first batch
    assert position.leaves == position.epochs[0].first_pass == position.begin(None).seq == 0

    run_to(position, [2])
    position.finish(position.active[-1], has_length=True)
    other.begin(None)
    for each in (position, other):
        each.finish(each.active[0], has_length=True)
        each.leaves = each.iterations
        each.begin_epoch(1)
        each.open_window(each.begin(None))
    position.align(other.iterations, other.under_way)
    assert position.leaves == position.active[0].seq == 1
    assert position.describe("grad") == other.describe("grad")


def test_a_fast_forward_arrives_at_the_window_and_goes_live() -> None:
    position = ScriptPosition()
    position.relocate(peers())
    assert position.phase is Phase.FAST_FORWARD
    assert position.grad_is_done
    assert position.op_is_done
    iteration = run_to(position, [3, 2])
    assert position.arrive(iteration)
    assert position.phase is Phase.REPLAY
    assert position.settle("fetch")
    assert position.phase is Phase.LIVE
    assert (position.events, position.window) == (7, (1, 2))


def test_a_script_knows_how_much_it_was_led_past() -> None:
    position = ScriptPosition()
    position.relocate(peers(events=0, window=None))  # all begin with the state of one
    assert position.settle("fetch") and position.missed == 0
    position.log("gather", "a", 0)
    position.log("gather", "b", 0)
    position.relocate(peers())
    position.relocate(peers(events=9))  # it has joined again on its way
    assert position.arrive(run_to(position, [3, 2])) and position.settle("fetch")
    assert position.missed == 7
    position.graded()
    position.relocate(peers(events=12, window=(1, 4)))  # evicted, and back
    position.phase, position.grads = Phase.REPLAY, 0
    assert position.settle("fetch") and position.missed == 9


def test_the_main_process_is_the_first_whose_script_was_always_there() -> None:
    assert main_of({2: True, 0: True}) == 2
    assert main_of({2: False, 0: True, 1: True}) == 0
    assert main_of({1: False, 0: False}) == 1


def test_operations_before_the_gradient_step_are_replayed_with_real_work() -> None:
    position = ScriptPosition()
    position.relocate(peers(ops=(("gather", "a"), ("gather", "b")), at="op"))
    assert position.arrive(run_to(position, [3, 2]))
    assert position.phase is Phase.REPLAY
    assert not position.grad_is_done
    assert not position.settle("op")
    assert [position.replay_op("gather"), position.replay_op("gather")] == ["a", "b"]
    assert position.settle("op")
    assert position.phase is Phase.LIVE


@pytest.mark.parametrize("at", ["op", "grad"])
def test_one_whose_peers_have_used_the_windows_batches_goes_live_at_their_event(at: str) -> None:
    position = ScriptPosition()
    position.relocate(peers(at=at))
    assert position.arrive(run_to(position, [3, 2]))
    assert not position.settle("fetch")
    assert position.phase is Phase.REPLAY
    assert position.settle(at)
    assert position.phase is Phase.LIVE


def test_a_gradient_step_of_the_peers_is_not_done_again() -> None:
    position = ScriptPosition()
    position.relocate(peers(ops=(("gather", "a"),), grads=1, at="op"))
    assert position.arrive(run_to(position, [3, 2]))
    assert position.phase is Phase.REPLAY  # what comes after may need what is computed here
    position.replay_op("gather")
    assert position.grad_is_done
    position.replay_grad()
    assert position.settle("op")


def test_an_operation_is_not_answered_with_the_result_of_another() -> None:
    position = ScriptPosition()
    position.relocate(peers(ops=(("gather", "a"), ("reduce", "b")), at="op"))
    assert position.arrive(run_to(position, [3, 2]))
    assert position.replay_op("gather") == "a"
    with pytest.raises(RuntimeError, match=r"took another path .* to gather, they came to reduce"):
        position.replay_op("gather")


def test_in_the_same_window_what_was_done_here_is_not_replayed() -> None:
    position = ScriptPosition()
    iteration = position.begin(None)
    position.open_window(iteration)
    position.log("gather", "a", 0)
    position.relocate(
        peers(window=(0, 0), ops=(("gather", "a"), ("gather", "b")), grads=1, at="op")
    )
    assert position.phase is Phase.REPLAY
    assert position.replay_op("gather") == "b"
    assert position.grad_is_done


@pytest.mark.parametrize("later", [0, 1], ids=["in the same batch", "with a batch accumulated"])
def test_a_step_that_was_left_out_has_ended_the_peers_window(later: int) -> None:
    """The loop has caught an exception in place of the step, and its peers have begun a window."""
    position = ScriptPosition()
    iteration = position.begin(None)
    position.open_window(iteration)
    iteration.yielded += 1
    position.log("gather", "before", 0)
    position.graded()
    for _ in range(1 + later):
        position.open_window(iteration)
        iteration.yielded += 1
    position.log("gather", "a", 0)
    position.relocate(peers(window=(0, 1), ops=(("gather", "a"),), grads=0, at="grad"))
    assert position.phase is Phase.REPLAY
    assert not position.grad_is_done
    assert not position.op_is_done
    assert position.settle("grad")


def test_a_step_that_all_have_left_out_begins_no_window() -> None:
    position = ScriptPosition()
    iteration = position.begin(None)
    for _ in range(2):
        position.open_window(iteration)
        iteration.yielded += 1
        position.graded()
    position.relocate(peers(window=(0, 0), grads=2, at="grad"))
    assert position.phase is Phase.REPLAY
    assert not position.grad_is_done


def test_another_path_is_refused() -> None:
    position = ScriptPosition()
    position.relocate(peers())
    first = position.begin(None)
    position.finish(first, has_length=True)
    second = position.begin(None)  # the pass in which the peers are, but it ends too early
    position.finish(second, has_length=True)
    third = position.begin(None)
    with pytest.raises(RuntimeError, match="took another path"):
        position.arrive(third)


def test_windows_begin_where_an_optimizer_has_stepped() -> None:
    position = ScriptPosition()
    iteration = position.begin(None)
    position.open_window(iteration)
    iteration.yielded = 1
    position.log("gather", "a", 1)
    position.open_window(iteration)  # accumulation goes on
    assert position.describe("op").ops == (("gather", "a"),)
    position.graded()
    assert position.describe("op").pending
    position.step_taken()
    position.open_window(iteration)
    there = Target(
        (0, 1), (), 0, ((0, 1, None),), 1, {}, 2, "fetch", begun_before=(0,), trainings=(0,)
    )
    assert position.describe("fetch") == there


def test_large_results_are_not_kept() -> None:
    position = ScriptPosition()
    position.open_window(position.begin(None))
    position.log("gather", "small", 10)
    position.log("gather", "large", 1 << 40)
    assert position.ops == [("gather", "small"), ("gather", None)]


def test_norms_of_gradients_are_the_peers_as_far_as_they_have_asked_for_them() -> None:
    there, here = ScriptPosition(), ScriptPosition()
    iteration = there.begin(None)
    there.open_window(iteration)
    there.graded()
    assert there.measured(1.5) == 1.5
    there.step_taken()
    here.relocate(there.describe("op"))
    assert here.measured(0.0) == 0.0  # fast-forward: of no step at all
    assert here.arrive(here.begin(None))
    assert [here.measured(2.5), here.measured(3.5)] == [1.5, 3.5]
    iteration.yielded = 1
    there.open_window(iteration)
    assert there.describe("fetch").norms == ()


def test_gradients_are_pending_behind_the_last_step_that_the_peers_have_done() -> None:
    there, here = ScriptPosition(), ScriptPosition()
    there.open_window(there.begin(None))
    there.graded()
    there.graded()
    here.relocate(there.describe("op"))
    assert here.arrive(here.begin(None))
    here.replay_grad()
    assert not here.pending
    here.replay_grad()
    assert here.pending and here.settle("op")
    assert here.describe("op").pending
    here.step_taken()
    assert not here.pending


def told(epochs: int, passes: int = 2) -> ScriptPosition:
    """A script that has told of so many epochs of `passes` passes, and is in the first pass of the last
    one, where its window has begun with the fourth batch."""
    position = ScriptPosition()
    for number in range(epochs):
        position.begin_epoch(number, 10 * number)
        for _ in range(passes):
            position.finish(iteration := position.begin(None), has_length=True)
            position.stepped = True
            position.open_window(iteration)
    position.begin_epoch(epochs, 10 * epochs)
    iteration = position.begin(None)
    iteration.yielded, position.stepped = 3, True
    position.open_window(iteration)
    return position


def test_a_script_that_tells_of_its_epochs_enters_that_of_its_peers_wherever_that_is() -> None:
    for epochs in (1, 50_000):
        there = told(epochs).describe("fetch")
        assert len(there.epochs) <= 3  # what travels does not grow
        position = ScriptPosition()
        position.begin_epoch(0, 0)
        first = position.begin(None)
        position.relocate(there)
        assert (
            position.distance == 1
        )  # it is not run through, so nothing keeps it out of the quorum
        assert not position.leap(first) and not position.arrive(first)
        position.finish(first, has_length=True)
        entry = position.entry
        assert entry == Epoch(epochs, 2 * epochs, (10 * epochs,))
        assert position.enter(entry) == 3
        iteration = position.begin(None)
        assert position.leap(iteration) and iteration.yielded == 3
        assert not position.leap(iteration)
        assert position.arrive(iteration) and position.settle("fetch")
        assert position.entry is None


def test_passes_within_an_epoch_that_was_entered_behind_them_are_counted_as_its_peers_do() -> None:
    """Evaluations by steps. Its next pass had the number of one of them, so its peers could not find it."""
    peer = ScriptPosition()
    peer.begin_epoch(0, 0)
    training = peer.begin(None)
    for batch in range(3):
        peer.open_window(training)
        training.yielded = batch + 1
        peer.graded()
        peer.step_taken()
        peer.finish(peer.begin(None), has_length=True)
    peer.open_window(training)
    position = ScriptPosition()
    position.begin_epoch(0, 0)
    position.relocate(peer.describe("fetch"))
    entry = position.entry
    assert entry is not None
    position.enter(entry)
    iteration = position.begin(None)
    assert position.leap(iteration) and position.arrive(iteration) and position.settle("fetch")
    assert position.begin(None).seq == peer.begin(None).seq == 4


def test_a_frameworks_loop_is_left_once_and_entered_with_what_it_skips() -> None:
    position = ScriptPosition()
    position.begin_epoch(0)
    position.leaves = position.iterations
    first = position.begin(None)
    position.relocate(told(4).describe("fetch"))
    with pytest.raises(Elsewhere):
        position.leap(first)
    position.finish(first, has_length=True)
    entry = position.entry
    assert entry is not None
    left_out = position.enter(entry)
    position.leaves = position.iterations
    iteration = position.begin(None, left_out)
    assert not position.leap(iteration)
    assert position.arrive(iteration)


def test_at_the_end_of_an_epoch_and_before_the_first_batch_of_the_next_its_peers_are_in_the_window() -> (
    None
):
    peer = told(2)
    peer.begin_epoch(3, 30)
    peer.begin_epoch(4, 40)
    position = ScriptPosition()
    position.relocate(peer.describe("op"))
    assert position.entry == Epoch(2, 4, (20,))


def test_without_epochs_there_is_no_entry() -> None:
    position = ScriptPosition()
    position.relocate(peers())
    assert position.entry is None
    assert not position.leap(position.begin(None))


def searching(tries: int) -> ScriptPosition:
    """A script whose search for a batch size is at this try; each before it has begun one pass."""
    position = ScriptPosition()
    for number in range(tries):
        position.begin_try(again=number > 0)
        run_to(position, [1])
    return position


def test_a_search_for_a_batch_size_goes_on_to_the_try_of_its_peers() -> None:
    peer = searching(3)
    assert peer.describe("fetch").searches == ((3, 2, 0),)
    assert not peer.active[:-1], "what has run out of memory is abandoned"
    target = dataclasses.replace(peer.describe("fetch"), window=(2, 0), begun=4)
    position = searching(1)
    assert not position.is_in_past_of(target), "it can get there"
    position.relocate(target)
    for _ in range(2):
        assert position.given_up and position.entry is None
        with pytest.raises(SizeGivenUp, match=r" out of memory\."):
            position.refuse_size()
        position.begin_try(again=True)
    assert not position.given_up
    position.refuse_size()
    assert position.arrive(position.begin(None)), "its passes are counted as the peers' are"


def test_a_try_that_its_peers_have_just_begun_is_entered_at_their_operation() -> None:
    peer = searching(2)
    peer.begin_try(again=True)
    assert peer.window is None and peer.stepped and not peer.pending
    peer.log("gather", None, 0)
    position = searching(1)
    position.relocate(peer.describe("op"))
    assert position.phase is Phase.FAST_FORWARD
    position.begin_try(again=True)
    position.begin_try(again=True)
    assert position.phase is Phase.REPLAY and position.op_is_done
    position.replay_op("gather")
    assert position.settle("op")


def test_a_try_of_a_loop_without_prepared_loaders_is_a_later_training() -> None:
    target = dataclasses.replace(searching(2).describe("grad"), window=None, grads=3)
    assert searching(1).is_in_past_of(target)
    assert not searching(2).is_in_past_of(target)


def test_behind_the_end_of_a_pass_the_next_one_of_training_follows() -> None:
    """Passes of training are 0, 2, 4 and 6, with evaluations between; it has loaded what was saved at the end of 2."""

    def begins(left_out: int = 0, **there: object) -> Iteration:
        position = ScriptPosition()
        position.resume_at(2, behind=True)
        first = position.begin(None, left_out)
        if there:
            position.relocate(peers(iterations=7, **there))
        position.arrive(first)
        assert position.iterations == first.seq + 1
        return first

    assert begins().seq == 3, "all of the job begin so"
    assert begins(left_out=4).seq == 2, "it leaves that pass out, and evaluates"
    assert begins(window=(6, 1), trainings=(0, 2, 4, 6)).seq == 4
    assert begins(window=(3, 1), trainings=(0, 2, 3)).seq == 3, "they have begun with it, too"
    with pytest.raises(RuntimeError, match="the last batch of an epoch"):
        begins(window=(2, 3), trainings=(0, 2))


def test_a_script_goes_on_from_what_is_kept_unless_it_begins_behind_it_or_nobody_can_tell(
    tmp_path: Path,
) -> None:
    def goes_on(kept: Target, *, left_out: int = 0, loads: int | None = None, **said: Any) -> bool:
        position = ScriptPosition()
        saved = SavedPosition(position, "")
        if loads is not None:
            (tmp_path / POSITION_FILE).write_text(f'{{"pass": {loads}}}')
            saved.on_load([], str(tmp_path))
        position.begin(None, left_out)
        return saved.goes_on_from(kept, **{"past": None, "has_trained": False, **said})

    kept = peers()
    assert goes_on(kept)
    assert goes_on(kept, loads=0, has_trained=True), "the checkpoint is older"
    assert goes_on(kept, loads=1, left_out=2), "as new"
    assert not goes_on(kept, loads=1, left_out=3)
    assert not goes_on(kept, loads=2)
    assert not goes_on(kept, has_trained=True), "it has resumed in a way of its own"
    assert not goes_on(peers(begun=1)), "of a later training of the script"
    alone = peers(window=None, active=())
    assert goes_on(alone)
    assert not goes_on(alone, loads=0), "no pass tells how far that was"
    assert goes_on(kept, past=False, has_trained=True), "a framework counts its own steps"
    assert not goes_on(kept, past=True)


PEERS = Target(
    window=(3, 5), ops=(), grads=0, active=(), iterations=4, lengths={}, events=7, at="fetch"
)


def one_window(grads: int) -> ScriptPosition:
    """Of a script whose loader is not prepared."""
    position = ScriptPosition()
    position.relocate(dataclasses.replace(PEERS, window=None, grads=grads))
    return position


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COPIED_BYTES))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        large = self.weight * x
        return {"loss": large.sum(), "large": large, "index": large.argmax()}


def in_its_past(module: nn.Module, position: ScriptPosition) -> FaultTolerantModel:
    hooks = RetryHooks(
        begin=lambda: False,
        vote=lambda: True,
        again=lambda: False,
        committed=lambda: None,
        refused=lambda: None,
        unused_hint="",
    )
    return FaultTolerantModel(RetryableReducer(hooks), module, position)


def test_remembered_outputs_have_a_graph_and_are_not_copied_if_they_are_large() -> None:
    position = one_window(50)
    model = in_its_past(Twice(), position)
    x = torch.tensor(2.0)
    first, second = model(x), model(x)
    assert first["large"].data_ptr() == second["large"].data_ptr()
    assert first["loss"].data_ptr() != second["loss"].data_ptr()
    assert first["loss"].item() == 2.0 * COPIED_BYTES
    second["loss"] /= 2  # as scripts do that accumulate
    second["large"].mul_(0.5)
    (second["loss"] + second["large"].sum()).backward()
    assert position.grads == 1
    assert model.module.weight.grad is None
    assert first["loss"].item() == 2.0 * COPIED_BYTES
    with torch.no_grad():
        assert not model(x)["loss"].requires_grad


def test_remembered_outputs_for_batches_of_many_lengths_lie_in_one_place() -> None:
    """Logits of each length together would be more than fits."""
    model = in_its_past(nn.LSTM(4, 8), one_window(50))
    batches = [torch.ones(length, 64, 4) for length in (20, 30, 10, 30, 20)]
    first, *later = [model(batch)[0] for batch in batches]
    assert [len(each) for each in (first, *later)] == [20, 30, 10, 30, 20]
    assert len({each.data_ptr() for each in later}) == 1
    assert {each.untyped_storage().nbytes() for each in later} == {30 * 64 * 8 * 4}
    torch.testing.assert_close(first, later[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Acts:
    policy: torch.distributions.Distribution
    values: list[torch.Tensor]
    step: int = 1


class Policy(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return Acts(torch.distributions.Categorical(logits=logits), [logits.sum()])


def test_remembered_outputs_within_a_dataclass_or_a_distribution_have_a_graph() -> None:
    """A backward behind them raised."""
    position = one_window(50)
    model = in_its_past(Policy(4, 3), position)
    for done in (1, 2):
        acts = model(torch.ones(2, 4))
        assert acts.step == 1
        (acts.values[0] - acts.policy.log_prob(acts.policy.sample()).sum()).backward()
        assert position.grads == done


class OfBatches(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch["x"] if isinstance(batch, UserDict) else batch.x)


def test_outputs_for_batches_of_own_types_have_the_sizes_of_these() -> None:
    """As of transformers' tokenizers: the first one's output stood for all."""
    model = in_its_past(OfBatches(4, 3), one_window(50))
    for make in (UserDict, SimpleNamespace):
        assert [len(model(make(x=torch.ones(n, 4)))) for n in (2, 6, 2)] == [2, 6, 2]


class Patience:
    def __init__(self) -> None:
        self.worse = 1

    def __call__(self) -> bool:
        self.worse += 1
        return self.worse >= 2


def test_a_frozen_object_keeps_its_attributes_and_its_type_until_it_is_thawed() -> None:
    class Slots:
        __slots__ = ("value",)

    patience, slots, array = Patience(), Slots(), np.zeros(1)
    slots.value = 3
    for _ in range(2):
        freeze([patience, slots, array])
    assert not patience()
    assert isinstance(patience, Patience)
    assert type(patience).__name__ == "Patience"
    slots.value = 4
    array[0] = 5
    for _ in range(2):
        thaw([patience, slots, array])
    assert type(patience) is Patience and type(slots) is Slots
    assert patience()
    assert (slots.value, array[0]) == (3, 5)


class Known:
    def __init_subclass__(cls) -> None:
        raise ValueError("a name is known once")


def test_an_object_whose_type_takes_no_subclass_stays_as_it_is() -> None:
    """As one that keeps a list of its subclasses. No life of its process came to its peers."""
    known = Known()
    freeze([known])
    assert type(known) is Known
    thaw([known])


def test_a_copy_of_a_frozen_object_is_the_script_s_own() -> None:
    """Made in its past, and kept (the best of a moving average, say): what was assigned to it was dropped for ever."""
    patience, average = Patience(), nn.Linear(1, 1)
    freeze([patience, average])
    copies = [copy.copy(patience), copy.deepcopy(patience), copy.deepcopy(average).eval()]
    assert [type(each) for each in copies] == [Patience, Patience, nn.Linear]
    assert copies[0]() and copies[1]() and not copies[2].training
    assert not patience()
    assert average.training
    thaw([patience, average])


class Part:
    """Makes others of its type, in both ways in which Python's own and libraries' classes do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def half(self) -> Part:
        return type(self)(self.size // 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        made = self.__class__.__new__(self.__class__)
        made.size = self.size
        return made


def test_what_a_frozen_object_makes_is_the_script_s_own() -> None:
    """Its attributes were dropped, and the script ended where it read them."""
    part = Part(4)
    freeze([part])
    for made, size in ((part.half(), 2), (copy.deepcopy(part), 4)):
        assert type(made) is Part
        assert made.size == size
        made.size = 7
        assert made.size == 7
    part.size = 5
    thaw([part])
    assert (type(part), part.size) == (Part, 4)
