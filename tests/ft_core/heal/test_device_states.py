"""States on a device, which is a double whose streams are late (tests/harness/copy_double.py)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ft_core.heal import HealError, HealKey, HealProgress, HealServer, HealStats, fetch
from ft_core.heal.transfer_plan import PACE_AFTER_S
from tests.ft_core.heal.support import KEY, same, soon, state
from tests.harness.copy_double import CopyDouble
from tests.harness.waiting import PATIENCE_S, until

MakeServer = Callable[..., HealServer]
CHUNK = 1 << 20


@pytest.fixture
def device() -> Iterator[CopyDouble]:
    chance = random.Random(1)
    with CopyDouble(delay_s=lambda: 0.002 * chance.random()) as double:
        yield double
    assert not double.faults


def placed(device: CopyDouble, tree: dict[str, Any]) -> dict[str, Any]:
    """A state of which one tensor is not contiguous, and a small one stays on the host."""
    tree["across"] = torch.arange(1 << 19, dtype=torch.int64).view(1 << 9, 1 << 10).t()
    for value in tree.values():
        if isinstance(value, torch.Tensor):
            device.place(value)
    tree["step"] = torch.tensor(3.0)
    return tree


def update(device: CopyDouble, tree: dict[str, Any], value: int) -> None:
    """The model's stream is to change all that lies on the device."""
    for each in tree.values():
        if isinstance(each, torch.Tensor) and device.holds(each):
            device.model.run(lambda each=each: each.data.fill_(value))  # type: ignore[misc]


def filled(tree: dict[str, Any], device: CopyDouble, value: int) -> dict[str, Any]:
    """What `tree` is after that update."""
    return {
        key: torch.full_like(each, value)
        if isinstance(each, torch.Tensor) and device.holds(each)
        else each
        for key, each in tree.items()
    }


@pytest.mark.parametrize("copy", [False, True], ids=["live", "snapshot"])
@pytest.mark.parametrize("same_host", [False, True], ids=["tcp", "memory"])
def test_what_a_source_serves_comes_after_its_update(
    make_server: MakeServer, device: CopyDouble, copy: bool, same_host: bool
) -> None:
    """Its loop goes on at once: the device is not done with the update, and the state is published."""

    def read(seed: int) -> tuple[Any, HealStats]:
        mine = placed(device, state(8, seed)) if same_host else None
        return fetch(
            [server.address],
            KEY,
            into=mine,
            deadline=soon(),
            chunk_bytes=CHUNK,
            same_host=same_host,
        )

    tree, server, hold = placed(device, state(8)), make_server(), threading.Event()
    expected = filled(tree, device, 7)
    device.model.run(lambda: hold.wait(PATIENCE_S))
    update(device, tree, 7)
    server.publish(KEY, tree, copy=copy)
    if copy:  # "the tree may change": in the order of the stream
        update(device, tree, 9)
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(read, seed) for seed in (1, 2)]
        until(lambda: server.stats().opened == 2)
        hold.set()
        for read in reads:
            back, stats = read.result()
            assert same(back, expected)
            assert stats.corrupted == 0
            assert stats.same_host_bytes == (stats.bytes if same_host else 0)
    assert not device.borrowed


def test_what_was_not_read_is_kept_before_the_loop_trains_on(
    make_server: MakeServer, device: CopyDouble
) -> None:
    """`freeze` waits for nothing. The copies come before the update in the model's stream."""
    tree, server, hold = placed(device, state(8)), make_server(), threading.Event()
    expected = filled(tree, device, 7)
    update(device, tree, 7)
    server.publish(KEY, tree, copy=False, expected_targets=1)
    device.model.run(lambda: hold.wait(PATIENCE_S))
    server.freeze()
    update(device, tree, 9)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, [server.address], KEY, deadline=soon(), chunk_bytes=CHUNK)
        until(lambda: server.stats().opened == 1)
        hold.set()
        assert same(reading.result()[0], expected)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("same_host", [False, True], ids=["tcp", "memory"])
def test_training_on_in_mid_transfer(
    make_server: MakeServer, device: CopyDouble, keeps: bool, same_host: bool
) -> None:
    """What is copied while the update runs is void: it is sent again, or gone, and never wrong."""
    tree, server = placed(device, state(16)), make_server()
    expected = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
    server.publish(KEY, tree, copy=False)
    trained: list[float] = []

    def train(progress: HealProgress) -> None:
        if progress.bytes_done and not trained:
            trained.append(server.freeze() if keeps else 0.0)
            if not keeps:
                server.retire("the source trained on")
            update(device, tree, 9)

    def read() -> tuple[Any, HealStats]:
        return fetch(
            [server.address],
            KEY,
            into=placed(device, state(16, seed=1)) if same_host else None,
            deadline=soon(),
            progress=train,
            chunk_bytes=1 << 16,
            same_host=same_host,
        )

    if keeps:
        back, stats = read()
        assert same(back, expected)
        assert stats.corrupted == 0
        assert (0 < stats.same_host_bytes < stats.bytes) == same_host  # the rest comes by streams
    else:
        with pytest.raises(HealError, match="the source trained on"):
            read()
    assert trained
    # Its memory is written again when the device is done with it.
    newer = HealKey(8, "y")
    server.publish(newer, tree, copy=False)
    back, _ = fetch([server.address], newer, deadline=soon())
    assert same(back, filled(tree, device, 9))


@pytest.mark.parametrize("same_host", [False, True], ids=["tcp", "memory"])
def test_a_target_receives_into_its_device(
    make_server: MakeServer, device: CopyDouble, same_host: bool
) -> None:
    """Pinned memory of three chunks a connection is used again and again, while copies are late. On the
    source's machine what lies on its device is read there."""
    tree, mine = placed(device, state(16)), placed(device, state(16, seed=1))
    server = make_server()
    server.publish(KEY, tree, copy=False)
    device.delay_s = lambda: 0.01
    back, stats = fetch(
        [server.address],
        KEY,
        into=mine,
        deadline=soon(),
        chunk_bytes=1 << 19,
        same_host=same_host,
    )
    assert device.done == device.queued > 0
    assert (device.read > 0) == same_host
    assert stats.same_host_bytes == (stats.bytes if same_host else 0)
    assert not device.borrowed
    assert same(back, tree)
    assert all(back[key] is mine[key] for key in mine if key != "epoch")


@pytest.mark.parametrize("refused", ["host", "lend", "borrow"])
def test_what_can_not_be_read_is_sent(
    make_server: MakeServer, device: CopyDouble, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets no process read another one's memory: what lies on the host comes over a connection, and
    the device's memory is read nevertheless. Or its memory can't be lent, or not be opened."""
    tree, mine = placed(device, state(16)), placed(device, state(16, seed=1))
    server = make_server()
    server.publish(KEY, tree, copy=False)
    device.lends, device.can_borrow = refused != "lend", refused != "borrow"
    if refused == "host":
        monkeypatch.setattr("ft_core.heal.same_host.read_memory", _refuse)
    back, stats = fetch([server.address], KEY, into=mine, deadline=soon(), chunk_bytes=1 << 19)
    assert same(back, tree)
    assert all(back[key] is mine[key] for key in mine if key != "epoch")
    assert (device.read > 0) == (refused == "host")
    assert stats.same_host_bytes < stats.bytes
    assert not device.borrowed


def test_a_copy_does_not_come_later_than_what_is_sent_in_its_place(
    make_server: MakeServer, device: CopyDouble
) -> None:
    """A chunk lies in two allocations, of which the second can't be opened; the source trains on meanwhile."""
    tree, mine = placed(device, state(16)), placed(device, state(16, seed=1))
    expected = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
    server, borrow = make_server(), device.borrow
    server.publish(KEY, tree, copy=False)

    def once(handle: bytes) -> int:
        if device.borrowed:
            server.freeze()
            update(device, tree, 9)
            raise OSError("no more")
        return borrow(handle)

    device.borrow = once  # type: ignore[method-assign]
    device.model.drain()
    slow = [1.0]  # the copy that was begun, and no other one
    device.delay_s = lambda: slow.pop() if slow else 0.0
    back, stats = fetch([server.address], KEY, into=mine, deadline=soon(), chunk_bytes=8 << 20)
    assert device.read == 1
    device.synchronize()
    assert same(back, expected)
    assert stats.same_host_bytes == 0


def _refuse(*_: int) -> None:
    raise PermissionError("not permitted")


def test_a_target_receives_after_what_was_queued_for_its_memory(
    make_server: MakeServer, device: CopyDouble
) -> None:
    tree, mine, hold = state(8), placed(device, state(8, seed=1)), threading.Event()
    server = make_server()
    server.publish(KEY, tree | {"across": mine["across"].clone(), "step": mine["step"]})
    device.model.run(lambda: hold.wait(PATIENCE_S))
    update(device, mine, 9)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, [server.address], KEY, into=mine, deadline=soon())
        until(lambda: server.stats().opened == 1)
        hold.set()
        back, _ = reading.result()
    assert all(back[key] is mine[key] for key in mine if isinstance(mine[key], torch.Tensor))
    assert same({key: mine[key] for key in tree}, tree)


def test_the_pace_of_a_transfer_is_that_of_its_bytes(
    make_server: MakeServer, device: CopyDouble
) -> None:
    """The source computes for a second before its state is as published. Judged by that second, the rest of
    so many chunks would take minutes."""
    tree, server, hold = placed(device, state(32)), make_server(), threading.Event()
    device.model.run(lambda: hold.wait(PATIENCE_S))
    server.publish(KEY, tree, copy=False)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(fetch, [server.address], KEY, deadline=soon(20), chunk_bytes=1 << 16)
        until(lambda: server.stats().opened == 1)
        time.sleep(1.5 * PACE_AFTER_S)
        hold.set()
        assert same(reading.result()[0], tree)
