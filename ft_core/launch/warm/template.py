"""The template: a process that has imported the libraries of those that train, and forks one when it is told to.

It runs no user code, starts no thread, and makes no CUDA call; `unsafe` looks whether an import has.
A replacement is forked twice: the supervisor, a subreaper at that moment, becomes its parent when the
process between them ends. The replacement begins when the supervisor, which knows its process id by
then, says so. The template ends with the supervisor.

The second part of this file makes of a fork the process that a cold start gives. The ranks of a replica
group are forked in turn from the group's process, if that is such a fork (`spawn`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import logging
import os
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ft_core.launch.supervisor import die_with
from ft_core.launch.warm import learn
from ft_core.launch.warm.orders import Channel, Order, Started, place_order, surroundings

HIGH = 200
"""Where the template's own descriptors are, if the limit allows it: out of the replacements' way."""
FORK_SAFE = ("jemalloc_bg_thd",)
"""Threads, by name, of libraries that have fork handlers of their own (pyarrow's allocator)."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci", "/dev/accel", "/dev/infiniband")
READ_EARLY = (
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "PYTHON",
    "LC_",
    "LANG",
    "TORCH_",
    "PYTORCH_",
    "HF_",
    "TRANSFORMERS_",
    "USE_",
)
"""Prefixes of variables that libraries read when they are loaded or imported."""


class Template:
    """The process that imports. Main thread only.

    Args:
        modules, changed: what a process that trains has told (`learn.report`): its modules, and the
            variables that it has changed since its start.

    Attributes:
        imported: what the imports have left behind.
        refusal: why nothing can be forked from it; "" if it can.
    """

    def __init__(self, modules: learn.Modules, changed: Mapping[str, str | None]) -> None:
        began, handlers = dict(os.environ), _handlers()
        self._env, self._surroundings, self._cwd = began, surroundings(), os.getcwd()
        libraries = learn.Libraries(sys.path)
        self._stamps = _stamps([sys.executable, *libraries.sites])
        self._stamps |= _stamps(origin for _, origin in learn.loaded())
        wanted = [(name, origin) for name, origin in modules if libraries.has(name, origin)]
        self._stamps |= _stamps(origin for _, origin in wanted)  # first: it may change meanwhile
        for name, _ in wanted:
            _import(name)
        self._stamps |= _stamps(
            origin for _, origin in learn.loaded() if origin not in self._stamps
        )
        trial_fork()
        now = {n: os.environ.get(n) for n in began.keys() | os.environ.keys()}
        self.imported = Imported(
            path=list(sys.path),
            written={name: value for name, value in now.items() if began.get(name) != value},
            handlers=frozenset(n for n, handler in _handlers().items() if handlers[n] != handler),
        )
        self._taken = set(_descriptors())
        self.refusal = (
            _stranger(dict(modules), libraries) or self._set_by_script(changed) or unsafe()
        )
        gc.collect()
        gc.freeze()

    def _set_by_script(self, changed: Mapping[str, str | None]) -> str:
        for name, value in changed.items():
            if name.startswith(READ_EARLY) and os.environ.get(name) != value:
                return f"the script changes {name}, which libraries read when they are imported"
        return ""

    def reason_against(self, order: Order) -> str:
        """Why a fork could differ from a cold start; "" if it could not."""
        for name in sorted({*order.env, *self._env}):
            if order.env.get(name) != self._env.get(name) and not order.is_place(name):
                return f"{name} has another value in the environment"
        if order.cwd != self._cwd:
            return "another working directory"
        for name, value in self._surroundings.items():
            if order.surroundings[name] != value:
                return f"the supervisor's {name} have changed"
        if clash := self._taken.intersection(number for number in order.numbers if number > 2):
            return f"a library has opened descriptor {min(clash)}"
        return _shadowed(order) or unsafe()

    def stale(self) -> str:
        """Which file was changed since it was imported; "" if none was."""
        return learn.first_change(self._stamps)

    def serve(self, channel: Channel) -> tuple[Order, list[int]] | None:
        """Carry out orders. Returns one in each replacement, with its descriptors; None: it is over."""
        while True:
            try:
                message, descriptors = channel.receive()
            except (EOFError, OSError):
                return None
            order = Order(**message)
            if stale := self.stale():
                channel.send({"cold": stale})
                return None
            why = self.reason_against(order)
            pid = 0 if why else _fork_twice(channel, descriptors.pop())
            if pid < 0:
                return order, descriptors
            for each in descriptors:
                os.close(each)
            channel.send({"pid": pid} if pid else {"cold": why})


def main() -> None:
    """The process of `sys.argv`: descriptor of the channel, supervisor's process id. See `starter`."""
    number, supervisor = int(sys.argv[1]), int(sys.argv[2])
    die_with(supervisor)
    # Both were put there for this module; a script's folder takes their place.
    del sys.path[: 1 if sys.flags.safe_path else 2]
    channel = Channel(socket.socket(fileno=_moved(number)))
    told, _ = channel.receive()
    template = Template([(name, origin) for name, origin in told["modules"]], told["environment"])
    channel.send({"refusal": template.refusal, "modules": len(sys.modules)})
    show_as([sys.executable, f"({learn.TITLE}, ready)"])
    asked = None if template.refusal else template.serve(channel)
    channel.close()
    if asked is None:
        os._exit(0)  # what imports have registered for the exit is for the replacements
    live(*asked, template.imported)


def trial_fork() -> None:
    """A fork for nothing: OpenBLAS ends its threads before one, and starts them when it needs them."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def unsafe() -> str:
    """What makes a fork of this process unsafe: threads, processes, devices; "" if nothing does."""
    own = Path("/proc/self/task")
    for task in os.listdir(own):
        name = (own / task / "comm").read_text().strip()
        if int(task) != os.getpid() and name not in FORK_SAFE:
            return f"an import has started a thread ({name})"
    if children := (own / str(os.getpid()) / "children").read_text().split():
        return f"an import has started a process ({children[0]})"
    for where in _descriptors().values():
        if where.startswith(DEVICES):
            return f"an import has opened {where}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has initialized CUDA"
    return ""


def _fork_twice(channel: Channel, go: int) -> int:
    """The replacement's process id; -1 in the replacement, when it may begin."""
    told, tell = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(tell, struct.pack("!q", pid))
            os._exit(0)
        channel.close()
        for each in (told, tell):
            os.close(each)
        if not os.read(go, 1):
            os._exit(1)  # the supervisor has not waited for it
        os.close(go)
        return -1
    os.waitpid(middle, 0)  # from now on the replacement is the supervisor's child
    (pid,) = struct.unpack("!q", os.read(told, 8))
    for each in (told, tell, go):
        os.close(each)
    return int(pid)


def _import(name: str) -> None:
    # SystemExit, too. The replacement's own import will raise it, if the script wants the module.
    with contextlib.suppress(BaseException):
        importlib.import_module(name)


def _stranger(reference: Mapping[str, str], libraries: learn.Libraries) -> str:
    """Why the modules that are loaded are not those of a process that trains; "" if they are."""
    for name, origin in learn.loaded():
        if name in reference and origin != reference[name]:
            return f"{name} is found at {origin}, not at {reference[name]}"
        # Not those that the interpreter loads itself.
        if name not in learn.NEVER and not libraries.has(name, origin):
            return f"an import has loaded {name}, which is no library"
    return ""


def _shadowed(order: Order) -> str:
    """The module beside the script that a cold start would import instead of a library; "" if none."""
    scripts = [word for word in order.words if word.endswith(".py") and os.path.isfile(word)]
    folders = {os.path.dirname(os.path.realpath(word)) for word in scripts[:1]}
    if "-m" in order.words:
        folders.add(order.cwd)
    for folder in folders:
        for entry in os.scandir(folder):
            name, dot, ending = entry.name.partition(".")
            if name not in sys.modules:
                continue
            package = entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))
            if package or (dot and ending.rpartition(".")[2] in ("py", "pyc", "so")):
                origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
                if not origin.startswith(os.path.join(folder, name)):
                    return f"{entry.path} takes the place of a library"
    return ""


def _descriptors() -> dict[int, str]:
    """This process's, and what they are open to."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _handlers() -> dict[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _stamps(paths: Any) -> dict[str, learn.Stamp]:
    found = {}
    for path in paths:
        try:
            found[path] = learn.stamp(path)
        except OSError:  # built in, or frozen
            continue
    return found


def _moved(number: int) -> int:
    """The descriptor under a high number, closed in programs that are executed."""
    try:
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except (OSError, ValueError):
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(number)
    return high


# ---------------------------------------------------------------- from a fork to a process as a cold start makes it

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
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
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
