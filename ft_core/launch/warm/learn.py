"""Which libraries a template imports: those of a process that trains, as it tells after its first commit.

Libraries are modules of the standard library, of a site-packages folder, and of this suite. What the
user edits is imported anew by every process. Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import struct
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENV_REPORT = "FT_WARM_REPORT"
"""The name of the socket (abstract, Unix) to which the first process that commits tells its modules."""
REPORT_TIMEOUT_S = 2.0
TITLE = "template of warm starts"
"""Its name in `ps`."""
SITES = ("site-packages", "dist-packages")
OUR_ROOT = Path(__file__).resolve().parents[3]
OURS = ("lighthouse", "ft_core", "ft_lightning", "ft_accelerate", "ft_lightning_autoload")
NEVER = ("__main__", "__mp_main__", "sitecustomize", "usercustomize", "antigravity", "this")
"""Modules of the process itself, and those that do something visible when they are imported."""

Stamp = tuple[int, int, int]
Modules = Sequence[tuple[str, str]]
"""(name, file), in the order in which their imports began."""


@functools.cache
def report() -> None:
    """Tell the supervisor the modules of this process, once, if it asks for them. Never raises.

    The training loop's thread calls it after each commit. The first call takes about 10 ms where the
    supervisor asks.
    """
    name = os.environ.get(ENV_REPORT, "")
    if not name:
        return
    data = json.dumps({"modules": loaded(), "environment": changed_environment()}).encode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(REPORT_TIMEOUT_S)
        sock.connect("\0" + name)  # from now on it is waited for
        sock.sendall(struct.pack("!I", len(data)) + data)


def receive(listener: socket.socket) -> dict[str, Any]:
    """The next report. Raises OSError if the listener is closed, ValueError for one that is torn or of
    another user."""
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(REPORT_TIMEOUT_S)
        said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", said)[1] != os.getuid():
            raise ValueError("a report of another user")
        data = b""
        while part := sock.recv(1 << 20):
            data += part
    if len(data) < 4 or len(data) != 4 + struct.unpack_from("!I", data)[0]:
        raise ValueError("a torn report")
    told: dict[str, Any] = json.loads(data[4:])
    return told


def loaded() -> list[tuple[str, str]]:
    """(name, file) of this process's modules that an import of that name would load again."""
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        # Aliases (six.moves, os.path) have a spec with another name.
        if spec is not None and spec.name == name and spec.has_location and isinstance(origin, str):
            found.append((name, origin))
    return found


def changed_environment() -> dict[str, str | None]:
    """Variables that this process has changed since it was started; None: removed."""
    try:
        words = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    began = dict(word.split(b"=", 1) for word in words if b"=" in word)
    before = {os.fsdecode(name): os.fsdecode(value) for name, value in began.items()}
    names = before.keys() | os.environ.keys()
    return {n: os.environ.get(n) for n in names if os.environ.get(n) != before.get(n)}


class Libraries:
    """Tells libraries from the user's modules, in this interpreter. `path`: as `sys.path`."""

    def __init__(self, path: Sequence[str]) -> None:
        stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        sites = [p for p in path if os.path.basename(p.rstrip("/")) in SITES and os.path.isdir(p)]
        self.sites = tuple(sorted(set(sites)))
        folders = {os.path.realpath(p) for p in stdlib | set(sites) if p}
        self._inside = tuple(sorted(f + os.sep for f in folders))
        self._known: dict[str, bool] = {}

    def has(self, name: str, origin: str) -> bool:
        """Whether the module `name`, loaded from `origin`, is a library's."""
        if name in NEVER:
            return False
        folder = os.path.dirname(origin)
        if folder not in self._known:
            real = os.path.realpath(folder) + os.sep
            self._known[folder] = real.startswith(self._inside)
        return self._known[folder] or (
            name.partition(".")[0] in OURS and os.path.realpath(folder).startswith(str(OUR_ROOT))
        )


def stamp(path: str) -> Stamp:
    """Differs if the file is another one, or was written to. Raises OSError if there is none."""
    about = os.stat(path)
    return about.st_mtime_ns, about.st_size, about.st_ino


def first_change(stamps: Mapping[str, Stamp]) -> str:
    """What has become of the first file that is not what it was; "" if all are."""
    for path, before in stamps.items():
        try:
            if stamp(path) != before:
                return f"{path} has changed"
        except OSError:
            return f"{path} is gone"
    return ""
