"""The pure part: how a script that is behind gets to where its peers are."""

from __future__ import annotations

import dataclasses

import pytest

from ft_accelerate.runtime.script_position import Iteration, Phase, ScriptPosition, Target


def peers(**changes: object) -> Target:
    target = Target(
        window=(1, 2), ops=(), grads=0, active=((1, 2, None),), iterations=2, lengths={}, events=7,
        at="fetch",
    )  # fmt: skip
    return dataclasses.replace(target, **changes)  # type: ignore[arg-type]


def run_to(course: ScriptPosition, passes: list[int]) -> Iteration:
    """Passes of so many batches; the last one is left open."""
    for number, batches in enumerate(passes):
        iteration = course.begin(None)
        for _ in range(batches):
            assert not course.arrive(iteration)
            iteration.yielded += 1
        if number < len(passes) - 1:
            course.finish(iteration, has_length=True)
    return iteration


def test_ghost_arrives_at_the_window_and_goes_live() -> None:
    course = ScriptPosition()
    course.relocate(peers())
    assert course.phase is Phase.GHOST
    assert course.work_is_ghost
    assert course.grad_is_done
    assert course.op_is_done
    iteration = run_to(course, [3, 2])
    assert course.arrive(iteration)
    assert course.phase is Phase.REPLAY
    assert course.settle()
    assert course.phase is Phase.LIVE
    assert (course.events, course.window) == (7, (1, 2))
    assert not course.work_is_ghost


def test_operations_before_the_gradient_step_are_replayed_with_real_work() -> None:
    course = ScriptPosition()
    course.relocate(peers(ops=("a", "b"), at="op"))
    assert course.arrive(run_to(course, [3, 2]))
    assert not course.work_is_ghost
    assert not course.grad_is_done
    assert not course.settle()
    assert [course.replay_op(), course.replay_op()] == ["a", "b"]
    assert course.settle()
    assert course.phase is Phase.LIVE


def test_a_gradient_step_of_the_peers_is_not_done_again() -> None:
    course = ScriptPosition()
    course.relocate(peers(ops=("a",), grads=1, at="op"))
    assert course.arrive(run_to(course, [3, 2]))
    assert not course.work_is_ghost  # what comes after may lean on what is computed here
    course.replay_op()
    assert course.grad_is_done
    course.replay_grad()
    assert course.settle()


def test_in_the_same_window_what_was_done_here_is_not_replayed() -> None:
    course = ScriptPosition()
    iteration = course.begin(None)
    course.open_window(iteration)
    course.fresh = False
    course.log("a", 0)
    course.relocate(peers(window=(0, 0), ops=("a", "b"), grads=1, at="op"))
    assert course.phase is Phase.REPLAY
    assert not course.work_is_ghost
    assert course.replay_op() == "b"
    assert course.grad_is_done


def test_another_course_is_refused() -> None:
    course = ScriptPosition()
    course.relocate(peers())
    first = course.begin(None)
    course.finish(first, has_length=True)
    second = course.begin(None)  # the pass in which the peers are, but it ends too early
    course.finish(second, has_length=True)
    third = course.begin(None)
    with pytest.raises(RuntimeError, match="took another course"):
        course.arrive(third)


def test_windows_begin_where_an_optimizer_has_stepped() -> None:
    course = ScriptPosition()
    iteration = course.begin(None)
    course.open_window(iteration)
    iteration.yielded = 1
    course.log("a", 1)
    course.open_window(iteration)  # accumulation goes on
    assert course.describe("op").ops == ("a",)
    course.graded()
    assert course.describe("op").pending
    assert not course.describe("op").reachable
    course.step_taken()
    course.open_window(iteration)
    assert course.describe("fetch") == Target((0, 1), (), 0, ((0, 1, None),), 1, {}, 2, "fetch")


def test_large_results_are_not_kept() -> None:
    course = ScriptPosition()
    course.open_window(course.begin(None))
    course.log("small", 10)
    course.log("large", 1 << 40)
    assert course.ops == ["small", None]


def test_places_without_the_peers_gradients() -> None:
    assert peers(at="grad").reachable
    assert peers(at="grad", grads=1).reachable  # a GAN's second update: the first has stepped
    assert not peers(at="grad", grads=1, pending=True).reachable
    assert peers(at="op", grads=1).reachable
