"""Heals between real processes, some of which are killed or stopped on the way."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from ft_core.heal import HealError, HealProgress, fetch
from tests.ft_core.heal.support import KEY, SourceProcess, same, soon, state

pytestmark = pytest.mark.process
MakeSource = Callable[..., SourceProcess]
both_paths = pytest.mark.parametrize("same_host", [False, True], ids=["tcp", "memory"])


def _when_begun(action: Callable[[], object]) -> Callable[[HealProgress], None]:
    """A progress callback that acts once, as soon as bytes have come."""
    done: list[object] = []

    def progress(seen: HealProgress) -> None:
        if seen.bytes_done and not done:
            done.append(action())

    return progress


@both_paths
def test_one_of_two_sources_is_killed_in_mid_transfer(
    make_source: MakeSource, same_host: bool
) -> None:
    victim, other = make_source(256), make_source(256)
    back, stats = fetch(
        [victim.address, other.address],
        KEY,
        deadline=soon(),
        same_host=same_host,
        progress=_when_begun(lambda: victim.signal(signal.SIGKILL)),
    )
    assert same(back, state(256))
    assert stats.source_bytes[other.address] > stats.source_bytes[victim.address]


def test_the_only_source_is_killed(make_source: MakeSource) -> None:
    victim = make_source(256)
    with pytest.raises(
        HealError, match=r"no source is left with \d+ of \d+ chunks missing"
    ) as caught:
        fetch(
            [victim.address],
            KEY,
            deadline=soon(),
            same_host=False,
            progress=_when_begun(lambda: victim.signal(signal.SIGKILL)),
        )
    assert "the deadline passed" not in str(caught.value)


@both_paths
def test_one_of_two_sources_is_stopped(make_source: MakeSource, same_host: bool) -> None:
    victim, other = make_source(256), make_source(256)
    back, stats = fetch(
        [victim.address, other.address],
        KEY,
        deadline=soon(),
        same_host=same_host,
        progress=_when_begun(lambda: victim.signal(signal.SIGSTOP)),
    )
    assert same(back, state(256))
    assert stats.source_bytes[other.address] > 0


@both_paths
def test_a_source_trains_on_in_mid_transfer(make_source: MakeSource, same_host: bool) -> None:
    source = make_source(256, live=1)
    back, _ = fetch(
        [source.address],
        KEY,
        deadline=soon(),
        same_host=same_host,
        progress=_when_begun(lambda: source.ask("train")),
    )
    assert same(back, state(256))


def test_the_memory_of_a_source_on_this_host_is_read(make_source: MakeSource) -> None:
    source = make_source(64)
    back, stats = fetch([source.address], KEY, deadline=soon())
    assert same(back, state(64))
    assert stats.same_host_bytes in (0, stats.bytes)  # 0 where the kernel does not let us
