"""How long a process that is behind may stay among its peers."""

from __future__ import annotations

import dataclasses

from ft_accelerate.runtime.catch_up import BATCHES_A_S, GROWS, STAY_S, TELL_S, CatchUp
from ft_accelerate.runtime.script_position import COMPUTED_GRADS, Phase, ScriptPosition
from tests.ft_accelerate.runtime.test_script_position import PEERS, one_window


def behind(batches: int) -> ScriptPosition:
    position = ScriptPosition()
    position.relocate(dataclasses.replace(PEERS, batches=batches))
    return position


def test_one_that_is_soon_there_stays_and_one_that_is_slow_leaves() -> None:
    near = int(STAY_S * BATCHES_A_S * 0.9)
    position = behind(near)
    catch_up = CatchUp(position, measures=True, longest_s=15.0)
    catch_up.joined(100.0)
    assert not catch_up.overstays(100.0)
    position.batches = near * 2 // 3
    assert not catch_up.overstays(100.0 + STAY_S / 2)
    assert catch_up.overstays(100.0 + STAY_S)  # at the speed that it has, it would be too long
    catch_up.left()
    assert not catch_up.overstays(200.0)  # it is not in the quorum


def test_one_that_is_far_leaves_at_once_and_may_stay_longer_the_next_time() -> None:
    position = behind(int(STAY_S * BATCHES_A_S * 1.1))
    catch_up = CatchUp(position, measures=False, longest_s=15.0)
    catch_up.joined(0.0)
    assert catch_up.overstays(0.0)
    catch_up.left()
    catch_up.joined(10.0)
    assert not catch_up.overstays(10.0)
    assert not catch_up.overstays(1000.0)  # ranks of a group decide alike
    assert GROWS > 2
    catch_up.live()
    catch_up.joined(20.0)
    assert catch_up.overstays(20.0)


def test_one_that_is_no_faster_than_its_peers_comes_nearer_while_they_wait() -> None:
    """10 batches a second. It leaves before it would be evicted, and what it has gained is kept."""
    position, now = behind(40), 0.0
    catch_up = CatchUp(position, measures=True, longest_s=0.5)
    distances, stays = [], []
    for _ in range(8):
        catch_up.joined(now)
        since = now
        while position.distance > 1 and not catch_up.overstays(now):
            now += 0.1
            position.batches += 1
        distances.append(position.distance)
        stays.append(now - since)
        catch_up.left()
        now += position.distance * 0.1  # in which its peers come as far again
    assert distances == sorted(distances, reverse=True) and distances[-1] == 1
    assert 0.5 < max(stays) < 0.65


def test_one_that_is_evicted_while_it_is_behind_is_not_back() -> None:
    catch_up = CatchUp(behind(40), measures=True, longest_s=15.0)
    catch_up.joined(0.0)
    assert catch_up.overstays(0.0, lambda: True)
    assert not catch_up.overstays(0.0, lambda: False)
    catch_up.left()
    assert not catch_up.overstays(0.0, lambda: True)


def test_a_long_catching_up_is_foretold_once() -> None:
    position = behind(10_000)
    catch_up = CatchUp(position, measures=True, longest_s=15.0)
    catch_up.joined(0.0)
    catch_up.left()
    position.batches = 100
    assert catch_up.news(STAY_S / 2) == ""
    at = TELL_S
    assert "9,900 batches behind: at 50 a second it is back in 198 s" in catch_up.news(at)
    assert catch_up.news(at + 1) == ""


def test_less_than_a_batch_a_second_is_not_said_to_be_none() -> None:
    """As where the first batch of a process that comes back is compiled."""
    position = behind(18)
    catch_up = CatchUp(position, measures=True, longest_s=15.0)
    catch_up.joined(0.0)
    position.batches = 1
    assert catch_up.news(4.0).endswith(
        "about 17 batches behind: at 0.2 a second it is back in 68 s"
    )


def test_a_past_that_is_one_window_is_answered_from_memory_but_for_its_end() -> None:
    position = one_window(100)
    catch_up = CatchUp(position, measures=True, longest_s=15.0)
    catch_up.joined(0.0)
    assert "runs through 100 gradient steps of its past" in catch_up.news(0.0)
    while position.remembers:
        position.replay_grad()
    assert position.distance == COMPUTED_GRADS
    assert position.phase is Phase.REPLAY
