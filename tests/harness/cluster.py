"""Replica groups as threads of one process, with a real lighthouse, Gloo and ZeroMQ.

Scripts run in lock-step only where they ask for it; everything else is awaited by the protocol
itself. `replicas(...)` runs one function a replica and returns what each returned, or raises the
first error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from ft_core.collectives.agreement import agree
from ft_core.config import JobOptions
from ft_core.launch.board import Board, slot
from ft_core.launch.rank_group import free_port
from ft_core.manager import Manager
from ft_core.process_group import ProcessGroup, ProcessGroupGloo
from ft_core.shell.intra_group import IntraGroup
from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.harness.waiting import PATIENCE_S

T = TypeVar("T")

_LATE_S = 120.0
"""How late a member may be that a test does not let wait on purpose."""

_AFTER_ERROR_S = 60.0
"""How long the other replicas have when one has raised: they may wait for it."""


@contextmanager
def lighthouse(
    *, bind: str = "tcp://127.0.0.1:0", all_join: bool = False, **config: Any
) -> Iterator[LighthouseServer]:
    """A lighthouse for one test. `timeout_s` among `config` is its one knob. It has more patience
    with a silence than that says: all members are threads of one busy process. `all_join`: the first
    quorum has all expected members, however slow they are; else some come after the join timeout."""
    given = config.pop("timeouts", {})
    if "timeout_s" not in config:  # no test waits for that: only a busy machine comes near them
        given = {"step_timeout_s": _LATE_S, **given}
    timeout_s = config.pop("timeout_s", 20.0)
    silence_s = max(0.3, timeout_s / 2 if timeout_s >= 20 else min(2.0, timeout_s / 10))
    if all_join:
        given = {"join_timeout_s": PATIENCE_S, **given}
    timeouts = Timeouts.derive(
        timeout_s, **{"heartbeat_timeout_s": silence_s, "heartbeat_s": silence_s / 10, **given}
    )
    server = LighthouseServer(bind, config=LighthouseConfig(timeouts=timeouts, **config))
    try:
        yield server
    finally:
        server.shutdown()


def agreed(manager: Manager, attempt: Callable[[], T | None]) -> T:
    """What the members agree on in steps without an update; see `agree`."""
    found = agree(
        attempt,
        begin=manager.start_quorum,
        vote=lambda: manager.should_commit(no_update=True),
        is_behind=lambda: False,
    )
    assert found is not None
    return found.result


@contextmanager
def board_of(count: int, *, whole: bool = True) -> Iterator[Board]:
    """A supervisor's board for `count` children that have begun."""
    board = Board(count, whole=whole)
    for child in range(count):
        board.clear(child)
    try:
        yield board
    finally:
        board.close()


@contextmanager
def as_child(board: Board, child: int) -> Iterator[None]:
    """This process is that child of the board's supervisor: `slot()` is its slot."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in board.environment(child).items():
            patch.setenv(name, value)
        slot.cache_clear()
        try:
            yield
        finally:
            slot.cache_clear()


@contextmanager
def rendezvous(groups: int, port: int = 0) -> Iterator[list[Any]]:
    """A store for each replica group, as its launcher would run. `port`: of the only one."""
    limit = timedelta(seconds=_LATE_S)
    yield [
        dist.TCPStore("127.0.0.1", port, None, True, limit, wait_for_workers=False)
        for _ in range(groups)
    ]


def one_of_two(rank: int, store: Any, *, hold: str = "copies") -> dict[str, Any]:
    """The manager's options of a rank of a group of two, which meet at `store` (`rendezvous`)."""
    place = {"store_addr": "127.0.0.1", "store_port": store.port}
    return {"rank": rank, "world_size": 2, "ranks_hold": hold, **place}


@contextmanager
def ranks(size: int, port: int = 0, timeout_s: float = 20.0) -> Iterator[list[IntraGroup]]:
    """Each rank's calls among the ranks of one replica group, which are threads."""
    port = port or free_port()
    groups = [
        IntraGroup(
            JobOptions(
                name="group",
                group_rank=rank,
                group_world_size=size,
                store_addr="127.0.0.1",
                store_port=port,
            ),
            timeout_s=timeout_s,
        )
        for rank in range(size)
    ]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def manager(address: str, name: str, pg: ProcessGroup | None = None, **options: Any) -> Manager:
    """A manager of a replica group of one rank, which is a thread; by default with Gloo. `options`: the
    Manager's."""
    defaults: dict[str, Any] = {
        "use_async_quorum": False,
        "timeout": timedelta(seconds=20),
        "connect_timeout": timedelta(seconds=_LATE_S),
        "rank": 0,
        "world_size": 1,
        "watch_process": False,
    }
    given = {**defaults, **options}
    group = pg or ProcessGroupGloo(timeout=20)
    return Manager(group, lighthouse_addr=address, replica_id=name, **given)


class Replica:
    """A replica group of one rank with one tensor as its state."""

    def __init__(self, server: LighthouseServer | str, name: str, value: float = 0.0, **kw: Any):
        self.weights = torch.full((8,), value)
        address = server if isinstance(server, str) else server.address()
        self.manager = manager(
            address,
            name,
            load_state_dict=lambda state: self.weights.copy_(state["weights"]),
            state_dict=lambda: {"weights": self.weights},
            **kw,
        )

    def step(self, gradient: float = 1.0) -> bool:
        """One step: the weights lose the mean gradient. Whether it was committed."""
        return self.end(self.begin(gradient))

    def begin(self, gradient: float = 1.0) -> torch.Tensor:
        """Begin a step; the mean gradient."""
        self.manager.start_quorum()
        return self.reduce(gradient)

    def reduce(self, gradient: float = 1.0) -> torch.Tensor:
        """In an open step: the mean gradient."""
        reduced = torch.full_like(self.weights, gradient)
        self.manager.allreduce(reduced).wait()
        return reduced

    def end(self, reduced: torch.Tensor) -> bool:
        """Vote, and apply the mean gradient if the step was committed; whether it was."""
        committed = self.manager.should_commit()
        if committed:
            self.weights -= reduced
        return committed

    def run_to(self, step: int, gradient: float = 1.0) -> None:
        """Steps until `step` are committed."""
        while self.manager.current_step() < step:
            self.step(gradient)

    def heals_another(self) -> bool:
        """In an open step: whether a member heals from this one's state."""
        return bool(self.manager._session.control.status.targets)  # type: ignore[union-attr]

    def close(self) -> None:
        self.manager.shutdown()


def replicas(*scripts: Callable[[], Any]) -> list[Any]:
    """Run each script in a thread of its own; their results in order."""
    results: list[Any] = [None] * len(scripts)
    errors: list[BaseException] = []
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(index: int, script: Callable[[], Any]) -> None:
        try:
            results[index] = script()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.put(None)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(scripts)]
    for thread in threads:
        thread.start()
    hangs = False
    try:
        for _ in threads:
            ended.get(timeout=_AFTER_ERROR_S if errors else PATIENCE_S)
    except queue.Empty:
        hangs = True
    if errors:
        for other in errors[1:]:  # what one raises first may be what another's end has done to it
            errors[0].add_note(f"and another: {other!r}")
        raise errors[0]
    assert not hangs, "a replica hangs"
    for thread in threads:
        thread.join()
    return results
