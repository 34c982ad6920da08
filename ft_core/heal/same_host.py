"""The memory of a source on this machine, which its target reads without the source's help.

Host memory is read by process_vm_readv through ctypes, as an optional fast path. It is taken where source and
target share boot id, PID and user namespace, and where the kernel lets the target read (same user, no stricter
ptrace policy). A device's memory is read where its driver lends it: CUDA's IPC, between processes of one GPU or of
GPUs that reach each other. Everything else goes through `ft_core.heal.bulk`.

A read within one memory cannot be corrupted on its way, so there are no checksums. But the source may
train on while it is read: the reader reads first and asks then, and the source answers whether the memory
still held that version when it was asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ft_core.heal.protocol import Block, Extent, Layout
from ft_core.heal.receive import Lane
from ft_core.process_group.device_memory import CopyDevice
from lighthouse.config import split_address

_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_ROWS_BYTES = 512


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        *(ctypes.POINTER(_IoVec), ctypes.c_ulong),
        *(ctypes.POINTER(_IoVec), ctypes.c_ulong),
        ctypes.c_ulong,
    ]
    return libc


def host_identity() -> bytes:
    """Equal for two processes that can address each other by PID; empty where that is unknown."""
    if sys.platform != "linux":
        return b""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}").encode() for name in ("pid", "user")]
    except OSError:
        return b""
    return b"|".join([boot, *spaces])


def read_memory(pid: int, remote: int, local: int, nbytes: int) -> None:
    """Copy `nbytes` from address `remote` of process `pid` to `local`. Releases the GIL meanwhile.

    Raises OSError: EPERM if the kernel refuses, ESRCH if the process is gone, EFAULT if the memory
    is gone.
    """
    done = 0
    while done < nbytes:
        mine = _IoVec(local + done, nbytes - done)
        theirs = _IoVec(remote + done, nbytes - done)
        count = _libc().process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if count <= 0:
            code = ctypes.get_errno() if count < 0 else 14
            raise OSError(code, os.strerror(code))
        done += count


def listens(pid: int, address: str) -> bool:
    """Whether process `pid` owns the socket that listens at `address` ("tcp://IP:port") here.

    False where that can't be told: in another network namespace, of another user.
    """
    try:
        host, port = split_address(address)
        ip = ipaddress.ip_address(host.partition("%")[0]).packed
        words = [ip[i : i + 4][::-1] for i in range(0, len(ip), 4)]  # as the kernel prints them
        local = b"".join(words).hex().upper() + f":{port:04X}"
        table = Path("/proc/net/tcp6" if len(ip) == 16 else "/proc/net/tcp")
        wanted = {f"socket:[{row[9]}]" for row in _listening(table) if row[1] == local}
        return bool(wanted) and not wanted.isdisjoint(_held(pid))
    except (OSError, ValueError, IndexError):
        return False


def _held(pid: int) -> Iterator[str]:
    """What each file descriptor of a process refers to. It opens and closes others meanwhile."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(each)


def _listening(table: Path) -> Iterator[list[str]]:
    """Rows of the sockets that listen, which the kernel lists first. Read in small pieces, since it searches
    all of its buckets for the others: 2 to 30 ms, while the source's peers wait."""
    with table.open("rb", buffering=_ROWS_BYTES) as lines:
        next(lines)
        for line in lines:
            row = line.decode().split()
            if row[3] != _LISTEN:
                return
            yield row


class SourceMemory:
    """What a source on this machine lends. The fetching thread.

    Args:
        pid: the source's process.
        addresses: of its segments, in its memory; 0: it lends that one not.
        blocks: those allocations of its devices that other processes can open.
        layout: of its state.
    """

    def __init__(
        self, pid: int, addresses: Sequence[int], blocks: Sequence[Block], layout: Layout
    ) -> None:
        self._pid, self._addresses = pid, addresses
        self._blocks = sorted(blocks, key=lambda block: block.address)
        self._starts = [block.address for block in self._blocks]
        self._borrowed: dict[tuple[CopyDevice, int], int] = {}  # where a device reads a block
        filled = [segment for segment, nbytes in enumerate(layout.segment_bytes) if nbytes]
        lent = {segment for segment in filled if addresses[segment]}
        on_host = [segment for segment in lent if self._block(addresses[segment]) is None]
        if on_host and not self._can_read(addresses[min(on_host)]):
            lent.difference_update(on_host)
        self.out_of_reach = frozenset(filled) - lent
        """Segments that can't be read, as far as is known without trying."""

    def _can_read(self, address: int) -> bool:
        byte = ctypes.c_ubyte()
        try:
            read_memory(self._pid, address, ctypes.addressof(byte), 1)
        except OSError:
            return False
        return True

    def _block(self, address: int) -> int | None:
        """The number of the one in which an address lies."""
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address >= self._starts[number] + self._blocks[number].nbytes:
            return None
        return number

    def read(self, extents: Sequence[Extent], lane: Lane) -> None:
        """Copy a chunk to its place; it is there when `lane.finish` returns. Raises OSError: it is refused by the
        kernel or the driver, or the process is gone, or the place is not on a device as the source's is."""
        on_host = []
        for extent in extents:
            address = self._addresses[extent.segment] + extent.offset
            number = self._block(address)
            if number is None:
                on_host.append((extent, address))
                continue
            device, stream, target = lane.device_place(extent)
            if (device, number) not in self._borrowed:
                self._borrowed[device, number] = device.borrow(self._blocks[number].handle)
            here = self._borrowed[device, number] + address - self._starts[number]
            stream.read(target, here)
        parts = lane.parts([extent for extent, _ in on_host])
        for (extent, address), part in zip(on_host, parts, strict=True):
            read_memory(self._pid, address, part.data_ptr(), extent.nbytes)
        lane.place()

    def close(self) -> None:
        """Give back what was borrowed. Every lane has finished."""
        for (device, _), address in self._borrowed.items():
            with contextlib.suppress(OSError):  # the driver frees it with the process
                device.give_back(address)
        self._borrowed.clear()
