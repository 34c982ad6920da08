"""The command, as a person or a supervisor runs it."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from lighthouse.cli import DEFAULT_BIND
from lighthouse.server import LighthouseServer
from lighthouse.web import StatusPage
from tests.harness.waiting import PATIENCE_S, children_of, gone, until
from tests.lighthouse.support import Player

pytestmark = pytest.mark.process
REPO = Path(__file__).resolve().parents[2]


@contextmanager
def lighthouse(*options: str, ignored: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, address) of a running command. `ignored`: a signal."""
    command = [sys.executable, "-m", "lighthouse", "--bind", "tcp://127.0.0.1:0", *options]
    if ignored:
        command = ["env", f"--ignore-signal={ignored}", *command]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("lighthouse listening on tcp://127.0.0.1:")
            yield process, first.split()[-1]
        finally:
            process.kill()


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lighthouse", *options]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(signum: signal.Signals) -> None:
    with lighthouse() as (process, _):
        process.send_signal(signum)
        assert process.wait(PATIENCE_S) == 0


def test_a_signal_that_interrupts_no_wait_ends_it() -> None:
    with lighthouse() as (process, _):
        (child,) = children_of(process.pid)
        ctypes.CDLL(None).tgkill(child, other_thread(child, signal.SIGTERM), signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("starts", [1, 2])
def test_a_signal_that_comes_while_its_process_is_made_ends_it(starts: int) -> None:
    """The new process had the handler of the one that keeps it, took the signal for that, and served on."""
    slow = f"""
import os, runpy, select, signal
works, forks = os.fork, []
def fork():
    forks.append(1)
    if len(forks) < {starts}:
        return works()
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    child = works()
    if child:
        os.kill(os.getpid(), signal.SIGTERM)
        return child
    signal.set_wakeup_fd(tell)
    while signal.SIGTERM not in signal.sigpending() and not select.select([heard], [], [], 0.01)[0]:
        pass
    signal.set_wakeup_fd(-1)
    return 0
os.fork = fork
runpy.run_module("lighthouse", run_name="__main__")
"""
    command = [sys.executable, "-c", slow, "--bind", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        if starts > 1:
            assert process.stdout is not None
            assert process.stdout.readline()
            os.kill(*children_of(process.pid), signal.SIGKILL)
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def other_thread(process: int, signum: signal.Signals) -> int:
    """One that `signum` can be sent to: ZeroMQ's own threads block all signals."""
    for task in Path(f"/proc/{process}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
        if int(task.name) != process and not blocked & 1 << signum - 1:
            return int(task.name)
    raise AssertionError("all threads but the first block it")


@pytest.mark.parametrize(
    ("signum", "ignored"),
    [(signal.SIGABRT, ""), (signal.SIGKILL, ""), (signal.SIGKILL, "CHLD")],
)
def test_a_process_that_is_ended_is_started_again_at_its_address(
    context: zmq.Context[Any], signum: signal.Signals, ignored: str
) -> None:
    with lighthouse("--expected-replicas", "1", ignored=ignored) as (process, address):
        (first,) = children_of(process.pid)
        os.kill(first, signum)
        until(lambda: children_of(process.pid) not in ([], [first]))
        player = Player(address, "a", context)
        player.join()
        player.await_quorum()
        player.close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_where_no_process_can_be_started_it_is_tried_again(context: zmq.Context[Any]) -> None:
    """The limit of processes may be reached for a moment. It ended the command."""
    scarce = """
import os, runpy
works, forks = os.fork, []
def fork():
    forks.append(1)
    if len(forks) in (2, 3):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return works()
os.fork = fork
runpy.run_module("lighthouse", run_name="__main__")
"""
    options = "--bind", "tcp://127.0.0.1:0", "--expected-replicas", "1"
    with subprocess.Popen(
        [sys.executable, "-c", scarce, *options], cwd=REPO, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        (first,) = children_of(process.pid)
        os.kill(first, signal.SIGKILL)
        player = Player(address, "a", context)
        player.join()
        player.await_quorum()
        player.close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_what_serves_ends_with_the_command() -> None:
    with lighthouse() as (process, address):
        (child,) = children_of(process.pid)
        process.kill()
        process.wait()
        until(lambda: gone(child))
        # Its other threads may end, and close its sockets, a moment after the first one.
        until(lambda: _is_free(address))


def _is_free(address: str) -> bool:
    try:
        LighthouseServer(address).shutdown()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def test_the_default_is_this_machine_only() -> None:
    """Other machines are let in by an address that is named."""
    assert DEFAULT_BIND == "tcp://127.0.0.1:29510"
    assert "0.0.0.0" in run("--help").stdout


def test_a_quorum_is_one_line_and_a_step_is_none(context: zmq.Context[Any]) -> None:
    with lighthouse("--quiet", "--expected-replicas", "1") as (process, address):
        player = Player(address, "only one", context)
        player.join()
        player.await_quorum()
        for _ in range(5):
            player.vote()
            assert player.await_decision().committed
        player.close()
        process.terminate()
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert len(lines) == 1
    assert "only one" in lines[0]
    assert "at step 0" in lines[0]


def test_status_for_people_and_for_tools(context: zmq.Context[Any]) -> None:
    with lighthouse("--expected-replicas", "1") as (_, address):
        player = Player(address, "replica_0", context)
        player.join()
        player.await_quorum()
        table = run("status", "--address", address)
        answer = run("status", "--address", address, "--json")
        player.close()
    assert table.returncode == answer.returncode == 0
    assert "replica_0" in table.stdout
    assert "training" in table.stdout
    assert json.loads(answer.stdout)["jobs"][0]["members"][0]["name"] == "replica_0"


def test_a_job_does_not_wait_for_a_group_that_is_declared_dead(context: zmq.Context[Any]) -> None:
    """A member of its last quorum is away without a word, and the join timeout is far."""
    with lighthouse("--join-timeout", "1000") as (_, address):
        player = Player(address, "a", context)
        player.join(quorum_id=1, last_members=(player.replica_id, "b:4711"))
        tell = ("--address", address, "--job", player.job.job_id)
        refused = run("declare-dead", "a", *tell)
        done = run("declare-dead", "b", *tell)
        quorum = player.await_quorum()
        player.close()
    assert refused.returncode == 1
    assert "is connected" in refused.stderr
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not wait for b" in done.stdout
    assert [member.replica_id for member in quorum.changed] == [player.replica_id]


def test_a_job_goes_on_after_some_time_if_it_is_told_to(context: zmq.Context[Any]) -> None:
    options = ("--expected-replicas", "2", "--join-timeout", "0.1", "--go-on-after", "0.2")
    with lighthouse(*options) as (_, address):
        player = Player(address, "a", context)
        player.step = 5
        player.join(genesis=9, held=1)
        assert (
            "gave up waiting for 1 of 2 expected replica groups (here: a)"
            in player.await_quorum().reason
        )
        player.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--bind", "nonsense"], "no lighthouse address"),
        (["--bind", "tcp://127.0.0.1:0", "--resend", "100"], "resend_s .* must be less than"),
        (["--timeout", "-1"], "must be positive"),
        (["--min-replicas", "0"], "min_replicas must be at least 1"),
        (["--min_replicas", "0"], "min_replicas must be at least 1"),  # as torchft spells it
        (["--min-replicas", "3", "--expected-replicas", "2"], "expected_replicas"),
        (["--bind", "tcp://127.0.0.1:0", "--state-file", "/proc/no/such"], "can't be written"),
        (["--web", "nonsense"], "--web 'nonsense' is no HOST:PORT"),
        (["--go-on-after", "1"], "go_on_after_s .* must be at least join_timeout_s"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_2(options: list[str], sentence: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    import re

    assert re.search(sentence, line), line


def torchft_lighthouse(*options: str) -> list[str]:
    return [sys.executable, "-c", "from lighthouse.cli import torchft_main as m; m()", *options]


def test_torchfts_command_starts_a_lighthouse_with_its_options() -> None:
    command = torchft_lighthouse(
        "--min_replicas",
        "2",
        "--bind",
        "[::]:0",
        "--join_timeout_ms",
        "250",
        "--heartbeat_timeout_ms",
        "5000",
        "--quorum_tick_ms",
        "100",
    )
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("lighthouse listening on tcp://")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--min_replicas=0", "min_replicas must be at least 1"),
        ("--join_timeout_ms=-5", "join_timeout_s must be positive, got -0.005"),
        ("--heartbeat_timeout_ms=-6", "heartbeat_s must be positive, got -0.002"),
    ],
)
def test_torchfts_options_are_those_of_the_command(option: str, sentence: str) -> None:
    done = subprocess.run(
        torchft_lighthouse("--min_replicas=1", option),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_address_in_use_is_one_sentence_and_exit_2(server: LighthouseServer) -> None:
    done = run("--bind", server.address())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "Address already in use" in line
    assert "choose another port" in line


def test_an_absent_lighthouse_is_one_sentence_and_exit_1() -> None:
    with LighthouseServer() as server:
        address = server.address()
    done = run("status", "--address", address, "--timeout", "0.2")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert address in line


def test_help_names_every_timeout_and_its_default() -> None:
    text = " ".join(run("--help").stdout.split())
    for option in (
        "heartbeat-timeout",
        "join-timeout",
        "step-timeout",
        "revoke-timeout",
        "heal-timeout",
        "connect-timeout",
        "resend",
        "heartbeat",
    ):
        assert f"--{option} SECONDS" in text
    assert "[default: 60.0]" in text
    assert "[derived: timeout / 12, at least 0.5]" in text


def test_status_page(server: LighthouseServer) -> None:
    with StatusPage("127.0.0.1:0", server.status) as page:
        with urllib.request.urlopen(page.url, timeout=PATIENCE_S) as answer:
            shown = answer.read()
        assert b"textContent" in shown, "texts of others are set as text, never as markup"
        assert not re.search(b"innerHTML|outerHTML|insertAdjacent|document.write|eval", shown)
        with urllib.request.urlopen(page.url + "status", timeout=PATIENCE_S) as answer:
            assert json.load(answer)["jobs"] == []
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(page.url + "other", timeout=PATIENCE_S)
        server.shutdown()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(page.url + "status", timeout=PATIENCE_S)


def test_a_browser_that_hangs_up_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="lighthouse")
    asked = threading.Event()

    def status() -> dict[str, Any]:
        asked.set()
        return {"jobs": "x" * (64 << 20)}  # more than the kernel takes

    with StatusPage("127.0.0.1:0", status) as page:
        host, _, port = page.url.removeprefix("http://").strip("/").partition(":")
        with socket.create_connection((host, int(port))) as browser:
            browser.sendall(b"GET /status HTTP/1.1\r\n\r\n")
            assert asked.wait(PATIENCE_S)
        until(lambda: "an HTTP request of" in caplog.text)
    assert "Traceback" not in capfd.readouterr().err


def test_a_page_that_cannot_be_shown_ends_the_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--bind", "tcp://127.0.0.1:0", "--web", where)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"can't show the status page on {where}" in line


@pytest.mark.parametrize("where", ["8080", ":8080", "127.0.0.1:99999", "page"])
def test_a_wrong_address_of_the_page_names_the_option(where: str) -> None:
    done = run("--bind", "tcp://127.0.0.1:0", "--web", where)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"--web {where!r}" in line
    assert "0.0.0.0:8080" in line


def test_the_command_serves_the_page() -> None:
    with lighthouse("--web", "127.0.0.1:0") as (process, address):
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(url + "status", timeout=PATIENCE_S) as answer:
            assert json.load(answer)["server"]["address"] == address
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
