"""Members that are processes, one of which is killed in the middle of a collective."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ft_core.process_group import ProcessGroupError, ProcessGroupGloo
from ft_core.process_group.torch_versions import native_reconfigure_available
from tests.ft_core.process_group.members import (
    KIND_NAMES,
    Calls,
    assert_freed,
    configure,
    gloo_groups,
    right_sum,
    sums,
)
from tests.harness.waiting import PATIENCE_S
from tests.harness.workers import run, start

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


class Child:
    """A member in a process of its own, told what to do line by line."""

    def __init__(self) -> None:
        self.process = start(
            "torch",
            ["-m", "tests.ft_core.process_group.child"],
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = self.read().encode()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.end()


@pytest.fixture
def mixed(child: Child) -> Iterator[list[ProcessGroupGloo]]:
    """Ranks 0, 1 and 2 are threads here, rank 3 is the child; quorum 1 is configured."""
    with gloo_groups(3, timeout_s=30.0) as groups:
        addresses = [*(group.address() for group in groups), child.address]
        child.tell(*(address.decode() for address in addresses))
        child.tell(3)
        Calls(lambda rank: groups[rank].configure(1, rank, addresses, 30.0), range(3)).values()
        assert child.read() == "configured"
        yield groups


@pytest.mark.parametrize("elements", [10, 1 << 23], ids=["40 B", "32 MiB"])
def test_survivors_of_a_kill_are_freed_and_go_on(
    mixed: list[ProcessGroupGloo], child: Child, elements: int
) -> None:
    child.tell(elements)  # a whole collective first
    tensors = [torch.ones(elements) for _ in mixed]
    Calls(lambda rank: mixed[rank].allreduce([tensors[rank]]).wait(), range(3)).values()
    assert child.read() == "reduced 4.0"
    assert all(bool((tensor == 4).all()) for tensor in tensors)

    issued = threading.Barrier(4)

    def blocked(rank: int) -> None:
        work = mixed[rank].allreduce([tensors[rank]])
        issued.wait(PATIENCE_S)
        with pytest.raises(ProcessGroupError) as caught:
            work.wait()
        assert_freed(caught.value)

    calls = Calls(blocked, range(3))
    issued.wait(PATIENCE_S)
    if elements > 10:
        child.tell(elements)  # it joins in, and dies somewhere in the middle
    child.process.send_signal(signal.SIGKILL)
    child.process.wait(PATIENCE_S)
    for group in mixed:
        group.revoke(RuntimeError("rank 3 was killed"))
    calls.values()

    configure(mixed, 2)
    assert sums(mixed, elements) == right_sum(3)


EXITS = """
import threading
import torch
from ft_core.process_group import ProcessGroupGloo
group, other = (ProcessGroupGloo(30.0, hostname='127.0.0.1') for _ in range(2))
members = [group.address(), other.address()]
connects = threading.Thread(target=other.configure, args=(1, 1, members, 5.0))
connects.start()
group.configure(1, 0, members, 5.0)
connects.join()
works = [each.allreduce([torch.ones(3)]) for each in (group, other)]
for work in works:
    work.wait()
"""
LATE = {
    "": "",
    "to the very end": "threading.kept = group",  # as an attribute of what goes late
    "within a collective": "group.allreduce([torch.ones(3)])",  # which the other member never begins
}


@pytest.mark.parametrize("late", LATE)
def test_a_process_may_exit_without_shutdown(late: str) -> None:
    """Python 3.12 starts no thread any more while the groups are shut down."""
    code = [sys.executable, "-c", EXITS + LATE[late]]
    done = subprocess.run(code, cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


DROPPED = """
import threading, time, weakref
import torch
from ft_core.process_group import ProcessGroupGloo
groups = [ProcessGroupGloo(30.0, hostname='127.0.0.1', native=%s) for _ in range(2)]
addresses = [group.address() for group in groups]
call = threading.Thread(target=groups[1].configure, args=(1, 1, addresses, 30.0))
call.start()
groups[0].configure(1, 0, addresses, 30.0)
call.join()
entered, dropped = threading.Event(), threading.Event()
work = groups[0].allreduce([torch.ones(3)])
work.get_future().add_done_callback(lambda _: (entered.set(), dropped.wait()))
last = groups[1].allreduce([torch.ones(3)])
entered.wait()
first = weakref.ref(groups.pop(0))
del work
dropped.set()
last.wait()
groups.pop().shutdown()
while first() is not None:
    time.sleep(0.01)
"""
"""A thread of the backend, in which a future ends, has the last reference to the group."""


@pytest.mark.parametrize("native", [native_reconfigure_available() or None, False])
def test_a_group_may_be_dropped_where_its_backend_still_ends_a_collective(
    native: bool | None,
) -> None:
    """A backend that is destroyed by a thread of its own ends the process."""
    done = run("torch", ["-c", DROPPED % native], env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")


FORKED = """
import os, sys, threading, warnings
import torch
from ft_core.process_group import ProcessGroupGloo
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads
groups = [ProcessGroupGloo(30.0, hostname='127.0.0.1', native=%s) for _ in range(2)]
addresses = [group.address() for group in groups]
call = threading.Thread(target=groups[1].configure, args=(1, 1, addresses, 30.0))
call.start()
groups[0].configure(1, 0, addresses, 30.0)
call.join()
def reduce_across(happens):
    mine, other = torch.ones(1 << 20), torch.ones(1 << 20)
    work = groups[0].allreduce([mine])
    happens()
    groups[1].allreduce([other]).wait()
    work.wait()
    assert mine[-1] == other[-1] == 2.0
def fork():
    if (pid := os.fork()) == 0:
        sys.exit(5)  # as a script ends, and not with os._exit
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
for happens in (fork, lambda: None):
    reduce_across(happens)
fork()
reduce_across(lambda: None)
"""


@pytest.mark.parametrize("native", [native_reconfigure_available() or None, False])
def test_a_process_that_was_forked_may_end_as_scripts_do(native: bool | None) -> None:
    """It shares the connections, and has none of the threads that it would wait for."""
    done = run("torch", ["-c", FORKED % native], env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_process_ends_well_while_gloo_holds_an_orphaned_operation(kind: str) -> None:
    """Without waiting for it the process aborted, after all its work was done."""
    command = [sys.executable, "-m", "tests.ft_core.process_group.ending", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
