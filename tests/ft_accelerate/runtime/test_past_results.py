"""What a script in its past gets from operations, by their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_accelerate.runtime.past_results import LARGEST, MAX_BYTES, PastResults, refuse_unlike
from ft_accelerate.runtime.script_position import ScriptPosition


def own() -> str:
    return "own"


def moved(past: PastResults) -> PastResults:
    """Those of a process that comes back, at the beginning of its script."""
    taken = PastResults(ScriptPosition())
    taken.take(past.dump())
    return taken


@pytest.mark.parametrize(
    "result",
    [
        [torch.tensor([[1.5, 2.0]]), torch.tensor([[3.0, 4.0]])],
        torch.tensor(2, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.empty(0, 3, dtype=torch.bfloat16),
        [b"pickled", b""],
        True,
    ],
    ids=["rows", "scalar", "bools", "empty", "objects", "barrier"],
)
def test_a_result_is_what_it_was(result: Any) -> None:
    past = PastResults(ScriptPosition())
    past.add("gather", result, 8)
    found = moved(past).answer("gather", own)
    torch.testing.assert_close(found, result, rtol=0, atol=0)


def test_results_are_found_by_their_place() -> None:
    position = ScriptPosition()
    past = PastResults(position)
    past.add("gather", True, 0)
    iteration = position.begin(None)
    for number in range(3):
        iteration.yielded += 1
        past.add("gather", [str(number).encode()], 1)
    position.finish(iteration, has_length=True)
    past.add("reduce", [b"end"], 1)

    taken = moved(past)
    assert taken.within(0) and not taken.within(1)
    place = taken._position
    assert taken.answer("gather", own) is True
    iteration = place.begin(None)
    iteration.yielded = 2
    assert taken.answer("gather", own) == [b"1"]
    assert taken.answer("gather", own) == "own"  # none is known behind it
    place.finish(iteration, has_length=True)
    assert taken.answer("wait_for_everyone", own) == "own"  # the peers have left it out
    assert taken.answer("reduce", own) == [b"end"]


def test_one_large_result_leaves_out_those_beside_it() -> None:
    position = ScriptPosition()
    past = PastResults(position)
    past.add("gather", [b"labels"], 6)
    past.add("gather", [b"predictions"], LARGEST + 1)
    past.add("gather", [b"more"], 4)
    position.begin(None)
    past.add("gather", [b"small"], 5)
    taken = moved(past)
    assert [taken.answer("gather", own) for _ in range(3)] == ["own"] * 3
    taken._position.begin(None)
    assert taken.answer("gather", own) == [b"small"]


def test_the_memory_is_bounded() -> None:
    position = ScriptPosition()
    past = PastResults(position)
    position.begin(None)
    for _ in range(2 * MAX_BYTES // LARGEST):
        position.active[0].yielded += 1
        past.add("gather", [bytes(LARGEST)], LARGEST)
    assert len(past.dump()) < 1.1 * MAX_BYTES
    assert len(moved(past).dump()) == len(past.dump())


def test_a_result_of_another_operation_of_the_same_kind_is_refused() -> None:
    sizes, count = [torch.tensor([4, 2])], [torch.tensor(3)]
    with pytest.raises(RuntimeError, match=r"another path .*1 dimensions .* they came to one of 0"):
        refuse_unlike("gather", sizes, count)
    assert refuse_unlike("gather", count, count) is count
    assert refuse_unlike("an exchange of objects", [b""], [b"a"]) == [b"a"]
    shorter = [torch.zeros(2)]  # a script that has entered an epoch has collected less
    assert len(refuse_unlike("gather", shorter, [torch.zeros(5)])[0]) == 5
