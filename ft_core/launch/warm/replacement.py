"""From a fork of the template to a process as a cold start makes it.

Used in the template's forks only. The ranks of a replica group are forked in turn from the group's
process, if that is such a fork (`spawn`).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ft_core.launch.warm.orders import Order, Started, place_order
from lighthouse.files import write_out

log = logging.getLogger("ft_core")

_OF_PYTHON = {signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)}
"""Signals that every Python process ignores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What the template's imports have left behind.

    Attributes:
        path: `sys.path`, without what a script puts first.
        written: environment variables that were set, and to what; None: removed.
        handlers: signals whose handlers were set.
    """

    path: Sequence[str]
    written: Mapping[str, str | None]
    handlers: frozenset[int]


class _Again(BaseException):
    """In a fork of a replacement: leave its script, and become what `order` says."""

    def __init__(self, order: Order) -> None:
        self.order = order


_imported: Imported | None = None
_order: Order | None = None


def live(order: Order, descriptors: Sequence[int], imported: Imported) -> None:
    """Become what `order` says, and run it to its end. Once per process, in the main thread.

    Leaves as the script does: by returning, SystemExit, or an exception that has been printed.
    """
    global _imported, _order
    _imported = imported
    # What the template has frozen is freed at the end, or libraries take it for leaked and say so.
    atexit.register(gc.unfreeze)
    again: Order | None = order
    while again is not None:
        _order = again
        _become(again, descriptors, imported)
        descriptors = ()
        try:
            _run(again.words, imported.path)
            return
        except _Again as left:
            again = left.order


def spawn(command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int]) -> Started:
    """`Popen`, for the ranks of a replica group: forked from this process, if it is a fork itself.

    Main thread only, before this process starts any thread. In the new process it does not return.
    """
    return Started(_fork, command, env=env, pass_fds=pass_fds)


def _fork(given: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    if _order is None or _imported is None:
        return 0
    order = place_order(given, descriptors, _order.places, _order.renew)
    why = order if isinstance(order, str) else _reason_against(order, _order, _imported)
    if isinstance(order, str) or why:
        log.debug("cold start: %s", why)
        return 0
    write_out(sys.stdout)
    write_out(sys.stderr)
    # The new process has this one's handlers until `_set_signals`: what comes before waits for its own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid == 0:
        raise _Again(order)
    return pid


def _reason_against(order: Order, own: Order, imported: Imported) -> str:
    """Why this process, which is what `own` says, can't be forked for `order`; "" if it can."""
    if threading.active_count() > 1:
        return "there are threads"
    for name in sorted({*order.env, *own.env} - imported.written.keys()):
        if order.env.get(name) != own.env.get(name) and not order.is_place(name):
            return f"{name} has another value in the environment"
    return ""


# ---------------------------------------------------------------- becoming


def _become(order: Order, descriptors: Sequence[int], imported: Imported) -> None:
    if order.new_session:
        os.setsid()
    else:
        os.setpgid(0, order.process_group)
    _take(descriptors, order.numbers)
    environment = dict(order.env)
    for name, value in imported.written.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(order.cwd)
    os.umask(order.umask)
    _set_signals(order, imported.handlers)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        # The object stays: handlers of libraries' loggers hold it.
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    _draw_anew()
    # Python 3.11 keeps the parent's.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    show_as([sys.executable, *order.words])
    for each in order.renew:
        module, _, name = each.partition(":")
        if module in sys.modules:
            getattr(sys.modules[module], name)()


def _take(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors their numbers, which may be those of others of them."""
    above = max([*numbers, *descriptors]) + 1
    held = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(held, numbers, strict=False):
        os.dup2(each, number, inheritable=True)
        os.close(each)


def _set_signals(order: Order, kept: frozenset[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *kept}:
        wanted: Any = signal.SIG_DFL
        if number in order.ignored or number in _OF_PYTHON:
            wanted = signal.SIG_IGN
        elif number == signal.SIGINT:
            wanted = signal.default_int_handler
        # Only what differs: a handler that C code has set is not seen here, and stays.
        if signal.getsignal(number) not in (wanted, None):
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked)


def _draw_anew() -> None:
    """What each process draws for itself when it starts; `random` does so after a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def show_as(words: Sequence[str]) -> None:
    """Show `words` in /proc and `ps`: they are written over the command line, as far as it is long."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start == 0:  # hidden from this process
        return
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text[: end - start - 1], min(len(text), end - start - 1))


# ---------------------------------------------------------------- running


def _run(words: Sequence[str], path: Sequence[str]) -> None:
    """What `python` does with these words. An exception leaves after `sys.excepthook` has seen it."""
    main = sys.modules["__main__"].__dict__
    kept = {name: main[name] for name in ("__builtins__", "__name__")}
    main.clear()
    main.update(kept, __doc__=None, __package__=None, __spec__=None, __annotations__={})
    sys.orig_argv[:] = [sys.executable, *words]
    as_module = words[0] == "-m"
    first = os.getcwd() if as_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path[:] = [*([] if sys.flags.safe_path else [first]), *path]
    try:
        if as_module:
            sys.argv[:] = ["-m", *words[2:]]
            # It becomes `__main__`: runpy warns of one that a library of the template has imported.
            sys.modules.pop(words[1], None)
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv[:] = words
            _run_script(words[0], main)
    except (SystemExit, _Again):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        # What ends the process, and how, is left to Python; it is to print nothing.
        sys.excepthook = lambda *seen: None
        raise


def _run_script(given: str, main: dict[str, Any]) -> None:
    path = given
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path.removeprefix("./"))
    main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main)
