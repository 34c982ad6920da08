"""The template: a process that has imported the libraries of those that train, and forks one when it is told to.

It runs no user code, starts no thread, and makes no CUDA call; `unsafe` looks whether an import has.
A replacement is forked twice: the supervisor, a subreaper at that moment, becomes its parent when the
process between them ends. The replacement begins when the supervisor, which knows its process id by
then, says so. The template ends with the supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_core.launch.supervisor import die_with
from ft_core.launch.warm import learn, replacement
from ft_core.launch.warm.orders import Channel, Order, surroundings

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
        self.imported = replacement.Imported(
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
    replacement.show_as([sys.executable, f"({learn.TITLE}, ready)"])
    asked = None if template.refusal else template.serve(channel)
    channel.close()
    if asked is None:
        os._exit(0)  # what imports have registered for the exit is for the replacements
    replacement.live(*asked, template.imported)


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
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
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
