"""A process that an error of the job ends does so with a line and an exit code; another as ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_core.launch.board import Board
from tests.harness.cluster import board_of
from tests.harness.waiting import PATIENCE_S, gone, until

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import atexit, sys
from ft_core.errors import (
    GroupBroken, OutsideStep, QuorumUnavailable, StartAgain, StepInDoubt, TooManyDiscards
)
from ft_core.launch.ending import end_with_a_line
from lighthouse.errors import JoinRefused, LighthouseUnavailable, SettingsDiffer, TrainingOver

for _ in range(2):
    end_with_a_line("ft_package", "1")
atexit.register(print, "waits for the lighthouse")
print("before")
try: raise {error}("a sentence")
{after}
"""


def ended(
    error: str, board: Board | None = None, *, after: str = "finally: pass", **env: str
) -> subprocess.CompletedProcess[str]:
    """A process that `error` has ended. `board`: of the supervisor whose child 1 it is. `after`: what the script has
    around it."""
    env = {**os.environ, **env, **(board.environment(1) if board else {})}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{error}", error).replace("{after}", after)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
        env=env,
        pass_fds=board.descriptors if board else (),
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("LighthouseUnavailable", 69),
        ("StepInDoubt", 69),
        ("GroupBroken", 75),
        ("TrainingOver", 79),
        ("JoinRefused", 1),
        ("SettingsDiffer", 78),
        ("QuorumUnavailable", 1),
        ("TooManyDiscards", 1),
        ("OutsideStep", 1),
        ("ValueError", 1),
    ],
)
def test_a_process_whose_script_is_not_at_fault_ends_with_a_line(error: str, code: int) -> None:
    done = ended(error)
    assert done.returncode == code
    if error in ("OutsideStep", "ValueError"):  # a call of the script's own: the stack shows it
        assert done.stderr.startswith("Traceback")
        assert done.stdout == "before\nwaits for the lighthouse\n"
    else:
        assert done.stderr == "ft_package: a sentence\n"
        assert done.stdout == "before\n"


def test_a_script_that_catches_the_errors_of_its_fits_starts_again_all_the_same() -> None:
    """A sweep's `except Exception` would go on, with the weights of a fit that this process has not made."""
    done = ended("StartAgain", after='except Exception: print("the next fit")')
    assert done.returncode == 75
    assert (done.stdout, done.stderr) == ("before\n", "ft_package: a sentence\n")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_tells_what_ends_its_group(rank: str) -> None:
    done = ended("TrainingOver", RANK=rank, WORLD_SIZE="2")
    assert done.returncode == 79
    assert done.stderr == ("" if rank == "1" else "ft_package: a sentence\n")


def test_under_a_supervisor_the_line_names_the_group() -> None:
    """Whatever the launcher calls it, and wherever: an integration may have variables of its own."""
    with board_of(2) as board:
        done = ended("TrainingOver", board)
    assert done.stderr == "ft_package: replica group 1: a sentence\n"


@pytest.mark.parametrize("error", ["GroupBroken", "TrainingOver"])
def test_the_line_is_one_write(error: str) -> None:
    """Also unbuffered: the ranks of a group end at the same time, and share the terminal."""
    script = SCRIPT.replace("{error}", error).replace("{after}", "finally: pass")
    counted = f"""
import io, sys
class Raw(io.FileIO):
    def write(self, data):
        return super().write(b"<" + bytes(data) + b">") and len(data)
sys.stderr = sys.__stderr__ = io.TextIOWrapper(Raw(2, "w", closefd=False), write_through=True)
{script}"""
    done = subprocess.run(
        [sys.executable, "-u", "-c", counted],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    assert done.stderr == "<ft_package: a sentence\n>"


def test_a_sigterm_that_launchers_pass_on_is_no_second_one() -> None:
    """A scheduler signals all processes of a job. Then that of the supervisor ended the groups at once."""
    script = """
import os, signal
from ft_core.launch import ending

class Loop:
    def waits(self):
        return False

loop, now = Loop(), [100.0]
ending.time.monotonic = lambda: now[0]
told = ending.Sigterm(loop.waits)
told.watch()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
print("finishes its step:", told.noted, flush=True)
now[0] += ending.PASSED_ON_S + 1
os.kill(os.getpid(), signal.SIGTERM)
print("after a second one")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
    )
    assert done.stdout == "finishes its step: True\n", done.stderr
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("before", "code"), [("signal.SIG_DFL", -15), ("lambda *_: os._exit(3)", 3)]
)
def test_a_process_that_was_forked_ends_by_sigterm(before: str, code: int) -> None:
    """As without the loop's handler, also if it comes at once: pools of workers end them so, and wait for them."""
    script = f"""
import multiprocessing, os, signal, time
from ft_core.launch import ending

class Loop:
    def waits(self):
        return False

def told_at_once():  # it is called before the hooks of `Sigterm`
    if at_once:
        os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(after_in_child=told_at_once)
loop, context = Loop(), multiprocessing.get_context("fork")
signal.signal(signal.SIGTERM, {before})
told = ending.Sigterm(loop.waits)
told.watch()
for at_once in (False, True):
    worker, runs = context.Process(target=lambda: (runs.set(), time.sleep(3600))), context.Event()
    worker.start()
    if not at_once:
        runs.wait()
        worker.terminate()
    worker.join()
    print(worker.exitcode)
print(signal.getsignal(signal.SIGTERM) == told._on_signal, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == (f"{code}\n{code}\nTrue set()\n", "")


def test_what_a_process_has_started_ends_with_it() -> None:
    """A worker of a loader under `forkserver` does not see that it is gone, nor does a Manager, as of a cache that
    workers share. They lived on, and so did a pipe that reads their output."""
    script = """
import time
from multiprocessing import get_context
from ft_core.launch.ending import end_at_once

worker = get_context("forkserver").Process(target=time.sleep, args=(3600,), daemon=True)
worker.start()
manager = get_context("fork").Manager()
print(worker.pid, manager._process.pid, flush=True)
end_at_once("ft_package", "", 75)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        started = [int(pid) for pid in process.stdout.readline().split()]
        assert process.wait(PATIENCE_S) == 75
        until(lambda: all(map(gone, started)), "what a process had started that has ended")
    assert len(started) == 2


def test_it_imports_no_torch() -> None:
    """Launchers, and processes that have just begun, end with it."""
    code = "import sys, ft_core.launch.ending; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0


def test_a_loop_of_ones_own_ends_so_too_and_its_files_are_written() -> None:
    script = """
from ft_core import Manager, ProcessGroupGloo
from lighthouse.errors import TrainingOver

manager = Manager(pg=ProcessGroupGloo(), lighthouse_addr="tcp://127.0.0.1:1", replica_id="1")
log = open("/dev/fd/1", "a")  # nobody closes it
log.write("a row ")

def train():
    another = open("/dev/fd/1", "a")
    another.write("another ")
    raise TrainingOver("a sentence")

train()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
    )
    assert (done.returncode, sorted(done.stdout.split())) == (79, ["a", "another", "row"]), (
        done.stderr
    )
    assert done.stderr == "ft_core: a sentence\n"
