"""A mutex that tells of the death of the thread that holds it (pthread's robust mutexes; Linux)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading

_PAGE_BYTES = mmap.PAGESIZE
_PROCESS_SHARED = 1
_ROBUST = 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_ATTRIBUTE_BYTES = 64  # generous: glibc and musl need 4


class RobustMutex:
    """A robust, process-shared pthread mutex at the start of a shared page.

    Raises OSError, or AttributeError, where the platform has no robust mutexes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Not through the mmap module: its maps end with their object and hold a descriptor.
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._libc.mmap(None, _PAGE_BYTES, access, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            _check(ctypes.get_errno())
        self._address = ctypes.c_void_p(address)
        self._owner: int | None = None

    @classmethod
    def create(cls) -> RobustMutex:
        """A new mutex, in an anonymous file that the watcher inherits."""
        if not sys.platform.startswith("linux"):
            raise OSError(f"robust mutexes are not used on {sys.platform}")
        fd = os.memfd_create("lighthouse-watch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _PAGE_BYTES)
            mutex = cls(fd)
            mutex._initialize()
        except BaseException:
            os.close(fd)
            raise
        return mutex

    def _initialize(self) -> None:
        libc = self._libc
        attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _check(libc.pthread_mutexattr_init(attribute))
        _check(libc.pthread_mutexattr_setpshared(attribute, _PROCESS_SHARED))
        _check(libc.pthread_mutexattr_setrobust(attribute, _ROBUST))
        _check(libc.pthread_mutex_init(self._address, attribute))
        _check(libc.pthread_mutexattr_destroy(attribute))

    def lock(self) -> None:
        """Lock it; it stays locked until the calling thread ends. It must be free."""
        _check(self._libc.pthread_mutex_trylock(self._address))
        self._owner = threading.get_ident()

    def wait_for_death(self) -> bool:
        """Block until the mutex is free; True if its owner has died."""
        result: int = self._libc.pthread_mutex_lock(self._address)
        return result == errno.EOWNERDEAD

    def discard(self) -> None:
        """Unlock and release it.

        Only its owner can unlock it. If that is another thread, the page stays mapped for good,
        since the kernel walks the list of held mutexes when that thread ends.
        """
        os.close(self.fd)
        if self._owner is None or self._owner == threading.get_ident():
            if self._owner is not None:
                self._libc.pthread_mutex_unlock(self._address)
            self._libc.munmap(self._address, ctypes.c_size_t(_PAGE_BYTES))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(result, os.strerror(result))
