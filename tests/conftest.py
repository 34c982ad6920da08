"""For all tests: one that leaves something behind fails."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import zmq

from ft_core.environment import ENV_WARM
from tests.harness.leaks import Snapshot, leaks_since
from tests.harness.lighthouses import patient_lighthouse
from tests.harness.waiting import PATIENCE_S

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")


# A template costs seconds of CPU, in each test that starts a supervisor; tests of warm starts set it.
os.environ[ENV_WARM] = "0"
# Our kernels are interpreted where no GPU can run them. Triton reads it when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# In a shell's background, and under nohup, one is ignored; what tests start would ignore it, too.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


class FailuresAtOnce:
    """Prints a failure when it happens: a run of many minutes that is cut off says why."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} failed ({report.when}):", red=True)
            self._terminal.write_line(report.longreprtext[-4000:])


def pytest_collection_finish() -> None:
    """What the imports have made stays: no collection looks through it again."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()  # until all is imported
    plugins = session.config.pluginmanager
    terminal = plugins.get_plugin("terminalreporter")
    if terminal is not None:  # the process that prints, where several run tests
        plugins.register(FailuresAtOnce(terminal))


@pytest.fixture(autouse=True, scope="session")
def pyzmq_thread() -> None:
    """pyzmq starts a thread and two sockets at a process's first zero-copy send, and keeps them:
    not a leak, so let it happen before the tests count."""
    with zmq.Context() as context:
        with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
            pull.bind("inproc://first")
            push.connect("inproc://first")
            tracker = push.send(bytearray(1 << 20), copy=False, track=True)
            pull.recv()
            tracker.wait(PATIENCE_S)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A thread, socket, env variable, process group or process left over fails the test.

    Set up before and torn down after all other fixtures of the test; what fixtures of a wider
    scope hold (a session's worker processes) is there already and does not count.
    """
    before = Snapshot.take()
    yield
    found = leaks_since(before)
    if found:
        pytest.fail("the test left something behind: " + "; ".join(found), pytrace=False)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse of the test's own."""
    with patient_lighthouse() as server:
        yield server.address()
