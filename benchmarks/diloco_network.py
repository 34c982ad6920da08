"""A bad link between two network namespaces: limited bandwidth, a delay, lost packets; bytes counted.

It consists of two TUN devices whose packets this process forwards. It needs root and /dev/net/tun,
but no kernel module for shaping (not every kernel has `tc`'s netem). Real TCP runs over it, with
its congestion windows, acknowledgements and headers.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from typing import Self

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
"""Jumbo frames: a packet costs this process about 20 us, whatever its size."""
QUEUE_S = 0.25
"""A packet that waits for longer than this at the link's entrance is dropped, as in a router."""


class Link:
    """Two hosts and a link while the context lasts: `command(side, ...)` runs on one host.

    `bytes_sent[side]`: what that side has put on the link, IP headers included.
    """

    addresses = ("10.213.8.1", "10.213.8.2")

    def __init__(self, mbit_s: float, delay_s: float, loss: float = 0.0) -> None:
        self.namespaces = self.interfaces = tuple(f"ftl{os.getpid()}x{side}" for side in (0, 1))
        self._byte_s = 8.0 / (mbit_s * 1e6)
        self._delay_s = delay_s
        self._loss, self._rng = loss, random.Random(1)
        self.bytes_sent = [0, 0]
        self._tuns: list[int] = []
        self._thread: threading.Thread | None = None
        self._wake = (-1, -1)

    def command(self, side: int, *words: str) -> list[str]:
        """The command line that runs `words` on one side."""
        return ["ip", "netns", "exec", self.namespaces[side], *words]

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
            raise RuntimeError("a slow link needs root and /dev/net/tun: run this as root")
        self._remove()
        try:
            for side in (0, 1):
                self._add(side)
        except BaseException:
            self._remove()
            raise
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake[1])
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake[0])
        self._remove()

    def _add(self, side: int) -> None:
        name, space = self.interfaces[side], self.namespaces[side]
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._tuns.append(tun)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        for command in (
            f"ip netns add {space}",
            f"ip link set {name} netns {space}",
            f"ip -n {space} addr add {self.addresses[side]}/24 dev {name}",
            f"ip -n {space} link set {name} mtu {MTU} up",
            f"ip -n {space} link set lo up",
        ):
            subprocess.run(command.split(), check=True)

    def _remove(self) -> None:
        for tun in self._tuns:
            os.close(tun)  # its device goes with it
        self._tuns.clear()
        for space in self.namespaces:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)

    def _carry(self) -> None:
        """The link itself: a packet that enters at one end leaves at the other, later."""
        under_way: list[collections.deque[tuple[float, bytes]]] = [
            collections.deque(),
            collections.deque(),
        ]
        free_at = [0.0, 0.0]
        while True:
            now = time.monotonic()
            due = [packets[0][0] for packets in under_way if packets]
            wait_s = max(0.0, min(due) - now) if due else None
            ready, _, _ = select.select([*self._tuns, self._wake[0]], [], [], wait_s)
            if self._wake[0] in ready:
                return
            now = time.monotonic()
            for side in (0, 1):
                if self._tuns[side] in ready:
                    free_at[side] = self._take(side, under_way[side], free_at[side], now)
                packets = under_way[side]
                while packets and packets[0][0] <= now:
                    os.write(self._tuns[1 - side], packets.popleft()[1])

    def _take(
        self, side: int, packets: collections.deque[tuple[float, bytes]], free_at: float, now: float
    ) -> float:
        """Take the packets that wait at one end; returns when the line is free again."""
        for _ in range(64):
            try:
                packet = os.read(self._tuns[side], MTU)
            except BlockingIOError:
                break
            if free_at - now > QUEUE_S:
                continue
            free_at = max(free_at, now) + len(packet) * self._byte_s
            self.bytes_sent[side] += len(packet)
            if self._rng.random() >= self._loss:
                packets.append((free_at + self._delay_s, packet))
        return free_at
