"""What follows the end of a child: the rules alone, then with real processes."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from ft_core.environment import Supervision
from ft_core.launch.board import Board, Seen
from ft_core.launch.rank_group import group_command
from ft_core.launch.restarts import (
    AWAY_EXIT_CODE,
    BROKEN_EXIT_CODE,
    OVER_EXIT_CODE,
    SIGTERM_EXIT_CODE,
    RestartPolicy,
)
from ft_core.launch.supervisor import DUMP_S, Child, Roster, take
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.server import LighthouseServer
from tests.harness.waiting import PATIENCE_S, gone, until
from tests.lighthouse.support import Player

ROOT = Path(__file__).resolve().parents[3]


def policy(
    count: int, *, max_restarts: int | None = 2, min_alive: int = 1, elsewhere: bool = False
) -> Roster:
    policy = RestartPolicy(max_restarts, elsewhere)
    made = Roster(policy, min_alive, [Child(i) for i in range(count)])
    for child in made.children:
        child.process = object()  # type: ignore[assignment]  # only whether it is there matters
    return made


def test_killed_child_is_started_again_after_a_growing_pause() -> None:
    rules = policy(4, max_restarts=3)
    child = rules.children[1]
    pauses = []
    for _ in range(3):
        assert "started again" in rules.ended(child, -9, 100.0)
        pauses.append((rules.next_due() or 0) - 100.0)
        assert rules.due(100.0) == []
        assert rules.due(200.0) == [child]
        child.process = object()  # type: ignore[assignment]
    assert pauses == [0.5, 1.0, 2.0]
    assert "given up after 3 restarts" in rules.ended(child, -9, 300.0)
    assert rules.next_due() is None


def test_one_that_waits_for_long_is_started_soon_when_few_are_left() -> None:
    rules = policy(3, max_restarts=None)
    often, *others = rules.children
    for now in (100.0, 200.0, 300.0, 400.0):
        rules.ended(often, -9, now)
        assert rules.due(now + 30.0) == [often]
        often.process = object()  # type: ignore[assignment]
    assert rules.ended(often, -9, 500.0).endswith("it is started again in 8 s")
    rules.ended(others[0], -9, 501.0)
    assert rules.due(501.5) == [often, others[0]]


def test_no_child_is_started_again_once_one_has_finished() -> None:
    rules = policy(3)
    rules.ended(rules.children[0], 0, 1.0)
    assert "not started again" in rules.ended(rules.children[1], -9, 2.0)
    rules.ended(rules.children[2], 0, 3.0)
    assert rules.over()
    assert rules.exit_code() == 0


def test_an_error_in_all_scripts_ends_it() -> None:
    rules = policy(2, max_restarts=5)
    assert "started again" in rules.ended(rules.children[0], 1, 1.0)
    assert "an error of the script" in rules.ended(rules.children[1], 1, 1.1)
    assert rules.over()
    assert rules.exit_code() == 1


def test_an_error_after_having_trained_with_groups_elsewhere_is_none_of_the_script() -> None:
    rules = policy(1, max_restarts=5, elsewhere=True)
    (child,) = rules.children
    child.number, child.seen.joined, child.seen.step = 3, True, 7
    assert rules.ended(child, 75, 1.0).startswith("replica group 3 failed with exit code 75; it is")
    assert rules.due(60.0) == [child]
    assert "an error of the script" in rules.ended(child, 1, 61.0)  # before it met anybody
    assert rules.over()


def test_all_killed_are_started_again() -> None:
    rules = policy(2)
    for child in rules.children:
        assert "started again" in rules.ended(child, -9, 1.0)
    assert not rules.over()


def test_a_child_is_given_up_once() -> None:
    rules = policy(3, max_restarts=0)
    rules.children[0].seen.joined = True
    rules.ended(rules.children[0], 0, 1.0)
    assert rules.given_up() == [], "it has trained to the end"
    rules.ended(rules.children[1], -9, 1.0)
    assert rules.given_up() == [rules.children[1]]
    rules.ended(rules.children[2], 0, 1.0)
    assert rules.given_up() == [rules.children[2]], "it has trained nothing"


def test_one_that_runs_in_vain_is_sent_away_and_told_of_once() -> None:
    rules = policy(3)
    first, second, late = rules.children
    for child in rules.children:
        child.process = object()  # type: ignore[assignment]
    first.seen.joined = second.seen.joined = True
    rules.ended(first, 0, 1.0)
    assert rules.too_late() == [late]
    rules.ended(second, 0, 1.0)
    assert rules.too_late() == []
    assert rules.ended(late, -9, 1.1) == ""
    assert rules.over()
    assert rules.exit_code() == 0


def test_too_few_left_is_stuck() -> None:
    rules = policy(2, max_restarts=0, min_alive=2)
    assert not rules.stuck()
    rules.ended(rules.children[0], -9, 1.0)
    assert rules.stuck()
    rules.children[1].seen.over = True
    assert not rules.stuck(), "it saves, say"
    rules.children[1].seen.over = False
    assert rules.stuck(), "another training"


def test_the_same_end_of_all_ends_the_job_though_one_is_started_again_already() -> None:
    rules = policy(2)
    first, second = rules.children
    first.seen.step = second.seen.step = 57
    rules.ended(first, -11, 1.0)
    assert rules.due(2.0) == [first]
    first.process = object()  # type: ignore[assignment]
    said = rules.ended(second, -11, 2.1)
    assert said == (
        "replica group 1 was killed by SIGSEGV, and so have all at step 57: an error of the script, so "
        "nothing is started again"
    )
    rules.ended(first, -9, 2.2)
    assert rules.over()
    assert rules.exit_code() == 128 + 11


def test_one_that_comes_after_the_end_is_no_failure() -> None:
    rules = policy(2)
    rules.children[0].seen.joined = True
    rules.ended(rules.children[0], 0, 1.0)
    assert rules.ended(rules.children[1], OVER_EXIT_CODE, 2.0) == "", "the process has said it"
    assert rules.over()
    assert rules.exit_code() == 0


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("taken_over", [False, True])
def test_the_job_fails_if_what_its_leader_had_to_write_is_not_written(
    taken_over: bool, over: bool
) -> None:
    """`over`: the others have told already that the training is over. Some tell when their script ends."""
    rules = policy(2)
    leader, other = rules.children
    leader.seen.joined = other.seen.joined = leader.seen.leads = True
    leader.seen.over = other.seen.over = over
    rules.ended(leader, -9, 1.0)
    other.seen.leads = taken_over
    assert rules.due(2.0) == [leader]
    leader.process = object()  # type: ignore[assignment]
    rules.ended(other, 0, 3.0)
    rules.ended(leader, OVER_EXIT_CODE, 4.0)
    assert rules.over()
    assert ("what it had not written is missing" in rules.missing()) == (not taken_over)
    assert rules.exit_code() == (0 if taken_over else 128 + 9)


@pytest.mark.parametrize("code", [3, -9])
def test_a_leader_that_exits_with_an_error_has_not_written_all(code: int) -> None:
    """`sys.exit(3)` before the script's own save shuts Python down as its end does. Killed in that, it has
    written all."""
    rules = policy(2)
    leader, other = rules.children
    leader.seen.joined = other.seen.joined = leader.seen.leads = True
    leader.seen.over = other.seen.over = leader.seen.done = True
    rules.ended(leader, code, 1.0)
    assert rules.due(2.0) == [leader]
    leader.process = object()  # type: ignore[assignment]
    rules.ended(other, 0, 3.0)
    assert rules.too_late() == [leader]
    rules.ended(leader, -9, 4.0)
    assert ("what it had not written is missing" in rules.missing()) == (code == 3)
    assert rules.exit_code() == (3 if code == 3 else 0)


def test_what_the_first_leader_had_not_written_is_written_by_one_that_is_killed_after_its_end() -> (
    None
):
    """The first died in the training. The next has led to the end of its script, and is killed as Python shuts down."""
    rules = policy(2)
    first, other = rules.children
    first.seen.joined = other.seen.joined = first.seen.leads = True
    rules.ended(first, -9, 1.0)
    assert rules.due(2.0) == [first]
    first.process = object()  # type: ignore[assignment]
    first.seen.joined = other.seen.leads = True
    for child in rules.children:
        child.seen.over = True
    other.seen.done = True
    rules.ended(other, -9, 3.0)
    assert rules.due(4.0) == [other]
    other.process = object()  # type: ignore[assignment]
    rules.ended(first, 0, 5.0)
    assert rules.too_late() == [other]
    rules.ended(other, -9, 6.0)
    assert (rules.missing(), rules.exit_code()) == ("", 0)


def test_nothing_is_missing_where_the_training_went_on_after_the_leaders_death() -> None:
    """All die, and their next lives write all; though none of them need lead before it has finished."""
    rules = policy(2, max_restarts=None)
    leader, other = rules.children
    leader.seen.joined = other.seen.joined = leader.seen.leads = True
    for child, now in ((leader, 1.0), (other, 1.1)):
        rules.ended(child, -9, now)
    assert rules.due(3.0) == [leader, other]
    for child in rules.children:
        child.process = object()  # type: ignore[assignment]
        rules.ended(child, 0, 4.0)
    assert (rules.missing(), rules.exit_code()) == ("", 0)


def test_an_error_of_the_script_is_no_loss_of_what_its_leader_writes() -> None:
    rules = policy(2)
    leader, other = rules.children
    leader.seen.joined = other.seen.joined = leader.seen.leads = True
    rules.ended(leader, 1, 1.0)
    rules.ended(other, 1, 1.0)
    assert (rules.missing(), rules.exit_code()) == ("", 1)


@pytest.mark.parametrize("written_again", [False, True])
def test_the_job_fails_if_its_leader_dies_where_the_script_writes_by_itself(
    written_again: bool,
) -> None:
    """Another leads after it; but what is not whole stays so until a leader comes to that place again."""
    rules = policy(2)
    leader, other = rules.children
    leader.seen.joined = other.seen.joined = leader.seen.leads = True
    leader.seen.writes = leader.seen.lost = "line 7 of train.py"
    said = rules.ended(leader, -9, 1.0)
    assert "where the script itself may have been writing (line 7 of train.py); it is" in said
    other.seen.leads = True
    assert rules.due(2.0) == [leader]
    assert leader.seen.writes == ""
    leader.process = object()  # type: ignore[assignment]
    assert rules.missing() == "", "it may be written again"
    if written_again:
        leader.seen.lost = ""
    rules.ended(other, 0, 3.0)
    rules.ended(leader, 0, 4.0)
    assert ("(line 7 of train.py), and no main process came there" in rules.missing()) == (
        not written_again
    )
    assert rules.exit_code() == (0 if written_again else 128 + 9)


def test_one_that_hangs_is_killed_when_it_has_printed_its_stacks() -> None:
    rules = policy(2)
    child = rules.children[1]
    child.seen.hung_until = 10.0
    assert (rules.hanging(9.9), rules.next_due()) == ([], 10.0)
    assert rules.hanging(10.0) == [child]
    assert (rules.hanging(10.1), rules.doomed(10.1)) == ([], [])
    assert rules.next_due() == 10.0 + DUMP_S
    assert rules.doomed(10.0 + DUMP_S) == [child]
    assert (rules.doomed(20.0), rules.next_due()) == ([], None)
    assert "hung, and was killed; it is started again" in rules.ended(child, -9, 20.0)


def test_one_that_hangs_is_not_waited_for_when_another_has_finished() -> None:
    """It would find the training over. By default the others would have waited for ten minutes."""
    rules = policy(2)
    finished, child = rules.children
    finished.seen.joined = child.seen.joined = True
    child.seen.hung_until = 700.0
    assert (rules.hanging(100.0), rules.next_due()) == ([], 700.0)
    rules.ended(finished, 0, 100.0)
    assert rules.next_due() == 0.0
    assert rules.hanging(100.0) == [child]
    assert (rules.doomed(100.0), rules.doomed(100.0 + DUMP_S)) == ([], [child])
    assert "hung, and was killed; it is not started again" in rules.ended(child, -9, 102.0)
    assert (rules.over(), rules.exit_code()) == (True, 0)


def test_one_that_is_back_does_not_hang() -> None:
    rules = policy(2)
    rules.children[1].seen.hung_until = 10.0
    rules.children[1].seen.hung_until = 0.0
    assert (rules.hanging(10.0), rules.next_due()) == ([], None)


def test_exit_code_of_a_script_that_failed_after_others_finished() -> None:
    rules = policy(2)
    rules.ended(rules.children[0], 0, 1.0)
    rules.ended(rules.children[1], 3, 1.0)
    assert rules.over()
    assert rules.exit_code() == 3


@pytest.mark.parametrize("code", [AWAY_EXIT_CODE, BROKEN_EXIT_CODE, SIGTERM_EXIT_CODE, -9])
def test_one_that_waits_to_be_started_again_when_another_finishes_is_no_failure(code: int) -> None:
    """Its script is not at fault."""
    rules = policy(2)
    finished, child = rules.children
    finished.seen.joined = child.seen.joined = True
    assert "it is started again in" in rules.ended(child, code, 1.0)
    rules.ended(finished, 0, 1.1)
    assert rules.too_late() == []
    assert (rules.over(), rules.exit_code()) == (True, 0)


def test_exit_code_where_none_has_finished() -> None:
    rules = policy(2, max_restarts=0)
    rules.ended(rules.children[0], -9, 1.0)
    rules.ended(rules.children[1], BROKEN_EXIT_CODE, 1.0)
    assert (rules.over(), rules.exit_code()) == (True, BROKEN_EXIT_CODE)


# ---------------------------------------------------------------- with processes


def test_supervision_goes_through_the_environment() -> None:
    told = Supervision(pid=12, restarts=3, child=1, children=2)
    assert Supervision.read(told.environment()) == told
    assert Supervision.read({}) == Supervision()
    assert Supervision.read({"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2


CHILD = """
import os, sys, time
from pathlib import Path
index, restarts = os.environ["INDEX"], int(os.environ["FT_RESTARTS"])
log = Path(sys.argv[1])
(log / f"{index}.{restarts}").write_text(str(os.getpid()))
"""

PARENT = """
import os, sys
from ft_core.launch.supervisor import supervise, tell_lighthouse
def environment(index):
    return {**os.environ, "INDEX": str(index)}
sys.exit(supervise([sys.executable, sys.argv[1], sys.argv[2]], environment,
                   count=2, min_alive=1, max_restarts=0 if sys.argv[3] else 2,
                   on_given_up=tell_lighthouse(sys.argv[3], "job") if sys.argv[3] else None))
"""


def start(
    tmp_path: Path, child: str, *, told: str = "", ignored: Any = None, before: str = ""
) -> subprocess.Popen[bytes]:
    """`told`: address of a lighthouse that is told of children that are given up. `ignored`: a signal. `before`: what
    the supervisor's process runs first."""
    (tmp_path / "child.py").write_text(CHILD + textwrap.dedent(child))
    (tmp_path / "parent.py").write_text(before + PARENT)
    command = [sys.executable, "parent.py", str(tmp_path / "child.py"), str(tmp_path), told]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if ignored:
        command = ["env", f"--ignore-signal={ignored:d}", *command]
    return subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE)


def pid_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text(), path.name)
    return int(path.read_text())


def await_gone(*pids: int) -> None:
    until(lambda: all(map(gone, pids)), "the children of a supervisor that has ended")


def test_the_others_do_not_wait_for_a_child_that_is_given_up(tmp_path: Path) -> None:
    """Of the two groups of a job one ends before it has joined, and is not started again: the other
    one, which is played here, trains. The join timeout is far."""
    timeouts = Timeouts.derive(PATIENCE_S, join_timeout_s=10 * PATIENCE_S)
    config = LighthouseConfig(timeouts=timeouts, expected_replicas=2)
    context: zmq.Context[Any] = zmq.Context()
    with LighthouseServer(config=config) as server:
        other = Player(server.address(), "0", context)
        other.join()
        address = server.address()
        with start(
            tmp_path, "os._exit(1) if index == '1' else time.sleep(1e6)", told=address
        ) as parent:
            other.await_quorum()
            parent.terminate()
            assert parent.wait(PATIENCE_S) != 0
        other.close()
    context.term()


@pytest.mark.parametrize("ignored", [None, signal.SIGCHLD])
def test_killed_child_comes_back(tmp_path: Path, ignored: Any) -> None:
    # Each waits until the other's second life has begun, or its own has.
    parent = start(
        tmp_path,
        """
        while not (log / "1.1").exists():
            time.sleep(0.02)
        """,
        ignored=ignored,
    )
    pid_in(tmp_path / "0.0")
    os.kill(pid_in(tmp_path / "1.0"), signal.SIGKILL)
    assert parent.wait(PATIENCE_S) == 0
    assert b"was killed by SIGKILL; it is started again" in parent.communicate()[1]
    assert not (tmp_path / "0.1").exists()


@pytest.mark.parametrize("fails", ["subprocess.Popen._execute_child", "threading.Thread.start"])
def test_a_child_that_can_not_be_started_again_is_tried_again_and_costs_the_others_nothing(
    tmp_path: Path, fails: str
) -> None:
    """The limit of processes may be reached for a moment. It ended all that ran."""
    script = """
    while not (log / "1.2").exists():
        time.sleep(0.02)
    """
    before = f"""
    import os, subprocess, threading, time
    from pathlib import Path
    works, again = {fails}, Path("again")
    def scarce(*arguments, **options):
        if Path("1.0").exists() and again.exists():
            again.unlink()
            raise {"BlockingIOError(11, 'Resource temporarily unavailable')" if "Popen" in fails else "RuntimeError('no new thread')"}
        return works(*arguments, **options)
    {fails} = scarce
    """
    with start(tmp_path, script, before=textwrap.dedent(before)) as parent:
        pids = [pid_in(tmp_path / f"{index}.0") for index in (0, 1)]
        (tmp_path / "again").touch()
        os.kill(pids[1], signal.SIGKILL)
        assert parent.wait(PATIENCE_S) == 0
        assert parent.stderr is not None
        said = parent.stderr.read()
    assert said.count(b"replica group 1 can't be started") == 1
    assert not (tmp_path / "0.1").exists()


def test_standard_streams_that_are_closed_are_no_files_of_ours(tmp_path: Path) -> None:
    """In a child descriptor 2 was the board's file: what a library writes to stderr went into that."""
    (tmp_path / "child.py").write_text(
        CHILD
        + """
while index == "0" and not (log / "1.1").exists():
    time.sleep(0.02)
if (index, restarts) == ("1", 0):
    os._exit(1)  # the supervisor has something to say
(log / f"streams{index}").write_text(str([os.readlink(f"/proc/self/fd/{n}") for n in range(3)]))
"""
    )
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, "parent.py", str(tmp_path / "child.py"), str(tmp_path), ""]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(shell, env=env, cwd=tmp_path, timeout=PATIENCE_S).returncode == 0
    for index in (0, 1):
        assert (tmp_path / f"streams{index}").read_text() == str(["/dev/null"] * 3)


def test_the_job_goes_on_when_nobody_reads_its_lines(tmp_path: Path) -> None:
    """The terminal was closed, or `| head` has read enough: the first line ended the process that had to say it."""
    parent = start(
        tmp_path,
        """
        import signal
        from ft_core.launch.supervisor import say
        while not (log / "closed").exists():
            time.sleep(0.02)
        say("ft", "a line of a process that trains")
        if (index, restarts) == ("1", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        while index == "0" and not (log / "1.1").exists():
            time.sleep(0.02)
        """,
    )
    assert parent.stderr is not None
    parent.stderr.close()
    (tmp_path / "closed").touch()
    assert parent.wait(PATIENCE_S) == 0
    assert (tmp_path / "1.1").exists()
    assert not (tmp_path / "0.1").exists(), "a line that none can read is no error of the process"


def test_what_a_killed_child_has_started_dies_with_it(tmp_path: Path) -> None:
    """A loader's worker under `forkserver`, say: it lived on, in each life one more, when the job was over."""
    parent = start(
        tmp_path,
        """
        if index == "1" and restarts == 0:
            if os.fork():
                time.sleep(3600)
            (log / "worker").write_text(str(os.getpid()))
            time.sleep(3600)
        while not (log / "1.1").exists():
            time.sleep(0.02)
        """,
    )
    worker = pid_in(tmp_path / "worker")
    os.kill(pid_in(tmp_path / "1.0"), signal.SIGKILL)
    await_gone(worker)
    assert parent.wait(PATIENCE_S) == 0
    parent.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(tmp_path: Path, number: Any) -> None:
    # Not one long sleep: a signal that comes just before that begins does not interrupt it.
    parent = start(tmp_path, "while True: time.sleep(0.05)")
    children = [pid_in(tmp_path / f"{i}.0") for i in (0, 1)]
    parent.send_signal(number)
    code = parent.wait(PATIENCE_S)
    parent.communicate()
    # A Python script without a handler ends with 1 on SIGINT and by the signal on SIGTERM.
    told = signal.SIGTERM if number == signal.SIGHUP else number
    assert code in (128 + told, 1)
    await_gone(*children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_it_was_started_to_ignore_is_ignored(tmp_path: Path, number: Any) -> None:
    """As SIGINT is in a shell's background. Its children ignore it, too, and were killed after 30 s."""
    go_on = "while not (log / 'go').exists(): time.sleep(0.02)"
    parent = start(tmp_path, go_on, ignored=number)
    for index in (0, 1):
        pid_in(tmp_path / f"{index}.0")
    parent.send_signal(number)
    (tmp_path / "go").touch()
    assert parent.wait(PATIENCE_S) == 0
    assert b"SIG" not in parent.communicate()[1]


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    parent = start(
        tmp_path,
        """
        from ft_core.launch.supervisor import die_with
        die_with(os.getppid())
        (log / f"ready{index}").write_text(str(os.getpid()))
        time.sleep(3600)
        """,
    )
    children = [pid_in(tmp_path / f"ready{i}") for i in (0, 1)]
    parent.kill()
    parent.communicate()
    await_gone(*children)


def test_failing_script_is_not_run_for_ever(tmp_path: Path) -> None:
    parent = start(tmp_path, "sys.exit(3)")
    assert parent.wait(PATIENCE_S) == 3
    said = parent.communicate()[1]
    assert said.count(b"failed with exit code 3") >= 2
    assert said.count(b"an error of the script") == 1


def test_the_true_error_is_the_last_line(tmp_path: Path) -> None:
    parent = start(
        tmp_path,
        """
        from ft_core.launch.board import reported
        with reported():
            raise ValueError("min_replicas is too high")
        """,
    )
    assert parent.wait(PATIENCE_S) == 1
    last = parent.communicate()[1].splitlines()[-1]
    assert last == b"ft: ValueError: min_replicas is too high"


def test_the_error_of_one_that_is_given_up_is_told(tmp_path: Path) -> None:
    """Its own traceback is far above, among those of its lives before."""
    parent = start(
        tmp_path,
        """
        from ft_core.launch.board import reported
        with reported():
            if index == "1":
                raise ValueError("this script has diverged")
        while not (log / "1.2").exists():
            time.sleep(0.02)
        """,
    )
    parent.wait(PATIENCE_S)
    said = parent.communicate()[1]
    assert said.count(b"ft: ValueError: this script has diverged") == 1
    assert said.count(b"replica group 1 failed with exit code 1") == 3


def test_one_that_hangs_prints_its_stacks_and_comes_back(tmp_path: Path) -> None:
    """Its loop is told to be back at once. A group of two ranks, one of which hangs, as does a process that
    it has started: that would hold the supervisor's streams open."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, pathlib, sys, time
from ft_core.launch.board import slot
from ft_core.launch.supervisor import die_with
die_with(os.getppid())
log, life = pathlib.Path(sys.argv[1]), os.environ["FT_RESTARTS"]
def a_loader_that_hangs():
    if os.fork() == 0:  # a data loader's worker
        time.sleep(3600)
    slot().hangs(1, time.monotonic())
    time.sleep(3600)
slot().join()
slot().committed(3)
if os.environ["RANK"] == "1" and life == "0":
    while not (log / "joined").exists():  # the other rank can print its stacks, too
        time.sleep(0.002)
    a_loader_that_hangs()
(log / "joined").touch()
while life == "0":
    time.sleep(0.02)
"""
    )
    (tmp_path / "parent.py").write_text(
        """
import os, sys
from ft_core.launch.rank_group import group_command
from ft_core.launch.supervisor import supervise
command = group_command([sys.executable, sys.argv[1], sys.argv[2]], 2)
sys.exit(supervise(command, lambda index: os.environ.copy(),
                   count=1, min_alive=1, max_restarts=None))
"""
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, tmp_path / "parent.py", script, tmp_path],
        env=env,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "was evicted, since its training loop hangs" in ended.stderr
    both, one = ended.stderr.partition("the stacks of local rank 1:\n")[::2]
    assert "the stacks of local rank 0:\n" in both
    assert "in a_loader_that_hangs" in one
    again = "hung, and was killed; it is started again"  # by how long it has lived
    assert f"{again} in 0.5 s" in ended.stderr or f"{again} at once" in ended.stderr


def test_a_process_that_another_has_started_leaves_the_board_alone(tmp_path: Path) -> None:
    """It inherits the environment, and its descriptors of these numbers are other files."""
    board = Board(1)
    with (tmp_path / "its own").open("w+b") as own:
        own.write(bytes(4096))
        own.flush()
        shared, wake = board.descriptors
        env = {**os.environ, **board.environment(0), "PYTHONPATH": str(ROOT)}
        script = (
            "import os, sys\n"
            f"os.dup2(int(sys.argv[1]), {shared}); os.dup2(int(sys.argv[1]), {wake})\n"
            "from ft_core.launch.board import slot\n"
            "slot().join(); slot().committed(1); slot().hangs(0, 1.0)"
        )
        command = [sys.executable, "-c", script, str(own.fileno())]
        subprocess.run(command, env=env, pass_fds=(own.fileno(),), check=True, timeout=PATIENCE_S)
        assert (tmp_path / "its own").read_bytes() == bytes(4096)
    assert board.look(0).commits == 0
    board.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd_create")
def test_the_board_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is full each process that writes to it would end (SIGBUS)."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    board = Board(1)
    assert board.look(0).step == 0
    board.close()


@pytest.mark.parametrize("trains", [True, False])
def test_the_supervisor_is_told_nothing_by_a_process_that_was_forked(trains: bool) -> None:
    """It ends as scripts do, with all exit hooks; then the process of the script is killed, and may not have
    written all."""
    board = Board(1)
    board.clear(0)
    env = {**os.environ, **board.environment(0), "PYTHONPATH": str(ROOT)}
    script = (
        "import os, signal, sys\n"
        "from ft_core.launch.board import slot\n"
        f"slot().training(1, over={not trains})\n"
        "if (pid := os.fork()) == 0:\n"
        "    slot().training(1, over=True)\n"
        "    slot().writes('a line'); slot().failed('an error'); slot().committed(7)\n"
        "    sys.exit()\n"
        "os.waitpid(pid, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script]
    subprocess.run(command, env=env, pass_fds=board.descriptors, timeout=PATIENCE_S)
    seen = board.look(0)
    board.close()
    assert seen == Seen(over=not trains)


@pytest.mark.parametrize("broken", ["0", "1"])
def test_a_rank_that_only_noticed_does_not_speak_for_its_group(broken: str) -> None:
    """It ends first; the other is killed for it, and the group ends as one that was killed."""
    script = (
        "import os, signal, sys\n"
        f"sys.exit({BROKEN_EXIT_CODE}) if os.environ['RANK'] == sys.argv[1] else signal.pause()"
    )
    command = group_command([sys.executable, "-c", script, broken], 2)
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL


def group_of_which_rank_0_ends_first(
    folder: Path, code: int, then: str
) -> subprocess.CompletedProcess[str]:
    """Rank 0 ends with `code`; rank 1 does `then` half a second after that: time for a kill that must not come."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    script = (
        "import os, sys, time\n"
        f"if os.environ['RANK'] == '0': open({str(pipe)!r}, 'w'); os._exit({code})\n"
        f"open({str(pipe)!r}).read()\n"  # until rank 0 is gone
        f"time.sleep(0.5)\n{then}"
    )
    command = group_command([sys.executable, "-c", script], 2)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, timeout=PATIENCE_S, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_others_miss_says_why(tmp_path: Path) -> None:
    """Its connections are closed before it has printed its error."""
    ended = group_of_which_rank_0_ends_first(
        tmp_path, BROKEN_EXIT_CODE, "sys.exit('the optimizer is gone')"
    )
    assert (ended.returncode, ended.stderr) == (1, "the optimizer is gone\n")


def test_a_rank_that_was_told_to_end_gives_its_group_the_time_to_end(tmp_path: Path) -> None:
    done = tmp_path / "done"
    ended = group_of_which_rank_0_ends_first(
        tmp_path, 143, f"open({str(done)!r}, 'w').close(); sys.exit(143)"
    )
    assert (ended.returncode, done.exists()) == (143, True)


@pytest.mark.parametrize("due", [None, math.inf])
def test_a_signal_that_interrupts_no_wait_is_handled(due: float | None) -> None:
    """It comes to another thread, as it can just before a wait begins."""
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    handled = signal.signal(signal.SIGUSR1, lambda number, frame: events.put("signalled"))
    waits = threading.main_thread().native_id

    def send() -> None:
        until(lambda: " S " in Path(f"/proc/self/task/{waits}/stat").read_text())
        ctypes.CDLL(None).tgkill(os.getpid(), threading.get_native_id(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    assert take(events, due) == "signalled"
    sender.join()
    signal.signal(signal.SIGUSR1, handled)


class Late(queue.SimpleQueue[str]):
    """The thread that puts its event there was stopped, too: it comes with the second look."""

    looks = 0

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        self.looks += 1
        if self.looks == 1:
            raise queue.Empty
        return "it has ended"


def test_an_event_of_a_supervisor_that_was_stopped_comes_before_what_is_overdue() -> None:
    """Else it would kill a process that has ended, or is back."""
    assert take(Late(), time.monotonic() - 100.0) == "it has ended"


def test_what_a_torchrun_above_has_left_in_the_environment_is_not_the_ranks() -> None:
    """Its variable for a store of its own made each rank wait for a store that nobody ran."""
    script = (
        "import os, sys\n"
        "from ft_core.shell.group_store import group_store\n"
        "first, port = os.environ['RANK'] == '0', int(os.environ['MASTER_PORT'])\n"
        "store = group_store('127.0.0.1', port, float(sys.argv[1]), hosts=first)\n"
        "store.get('here') if first else store.set('here', '')\n"
    )
    left = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "3", "MASTER_PORT": "29500"}
    command = group_command([sys.executable, "-c", script, str(PATIENCE_S)], 2)
    env = {**os.environ, **left, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=env, timeout=PATIENCE_S).returncode == 0
