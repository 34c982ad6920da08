"""A network of its own for each member of a test: Linux network namespaces, entered by threads.

A thread that enters a namespace opens its sockets there, and so do the threads that it starts. So
members that are threads of one process can be cut off from each other packet by packet, one way or
both. Needs root and the command `ip`; `available()` says whether it is so here.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def available() -> bool:
    """Whether namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with networks(1):
            return True
    except OSError:
        return False


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Networks:
    """`count` networks with one host each, on one bridge; and a host for the lighthouse (the last).

    `ipv6`: no host has an IPv4 address, but for 127.0.0.1.
    """

    def __init__(self, count: int, *, ipv6: bool = False) -> None:
        self._ipv6 = ipv6
        self.prefix = f"ft{os.getpid()}x{next(_numbers)}x"
        self.count = count
        self._cuts: set[tuple[int, int]] = set()

    def host(self, index: int) -> str:
        """The address of a network's host."""
        return f"fd77::{index + 1:x}" if self._ipv6 else f"10.77.0.{index + 1}"

    def name(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def build(self) -> None:
        hub = self.name(self.count)
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "eth0", "type", "bridge")
        _ip("-n", hub, "link", "set", "eth0", "up")
        self._name_host(self.count, "eth0")
        for index in range(self.count):
            name, port = self.name(index), f"port{index}"
            _ip("netns", "add", name)
            pair = f"{port} type veth peer name eth0 netns {name}"
            _ip("-n", hub, "link", "add", *pair.split())
            _ip("-n", hub, "link", "set", port, "master", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            self._name_host(index, "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def _name_host(self, index: int, device: str) -> None:
        # nodad: the address is there at once, not when no other host was found to have it.
        how = ("/64", "nodad") if self._ipv6 else ("/24",)
        address = [self.host(index) + how[0], "dev", device, *how[1:]]
        _ip("-n", self.name(index), "addr", "add", *address)

    def lose_route(self, source: int, target: int) -> None:
        """From now on `source` has no route to `target`: it is told so when it connects."""
        self._refuse("add", source, target)

    def find_route(self, source: int, target: int) -> None:
        """Undo `lose_route`."""
        self._refuse("del", source, target)

    def _refuse(self, what: str, source: int, target: int) -> None:
        bits = 128 if self._ipv6 else 32
        _ip("-n", self.name(source), "route", what, "blackhole", f"{self.host(target)}/{bits}")

    def swallow_large(self, index: int, most: int = 576) -> None:
        """From now on packets of more than `most` bytes from and to a host are lost, and nobody is told: it and
        the others still take the network for one of 1,500 bytes."""
        hub, port = self.name(self.count), f"port{index}"
        _ip("-n", hub, "link", "set", port, "mtu", str(most))
        for name in (
            hub,
            *map(self.name, range(self.count)),
        ):  # or large packets travel as one, uncut
            _ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")

    def remove(self) -> None:
        for index in range(self.count + 1):
            subprocess.run(
                ["ip", "netns", "del", self.name(index)], capture_output=True, check=False
            )

    def cut(self, source: int, target: int) -> None:
        """From now on no packet of `source` gets to `target`. The other way is as it was."""
        # They leave for an address on the bridge that no host has, as if they were lost on the way.
        nowhere = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.name(source), "neigh", "replace", self.host(target), *nowhere)
        self._cuts.add((source, target))

    def mend(self, source: int, target: int) -> None:
        """Undo `cut`. Idempotent."""
        if (source, target) in self._cuts:
            self._cuts.discard((source, target))
            _ip("-n", self.name(source), "neigh", "del", self.host(target), "dev", "eth0")

    @contextmanager
    def inside(self, index: int) -> Iterator[str]:
        """Within it the calling thread is in a network; gives its host's address."""
        thread = threading.get_native_id()
        home = os.open(f"/proc/self/task/{thread}/ns/net", os.O_RDONLY)
        there = os.open(f"/var/run/netns/{self.name(index)}", os.O_RDONLY)
        try:
            _enter(there)
            yield self.host(index)
        finally:
            _enter(home)
            os.close(there)
            os.close(home)


def enter(name: str) -> None:
    """From now on the calling thread is in the network of this name, and so are threads that it
    starts."""
    there = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(there)
    finally:
        os.close(there)


@contextmanager
def networks(count: int, *, ipv6: bool = False) -> Iterator[Networks]:
    """`Networks` for a test."""
    made = Networks(count, ipv6=ipv6)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
