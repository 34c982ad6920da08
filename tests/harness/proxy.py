"""A proxy in front of a process group's address, which lets some members through and others not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from ft_core.process_group.rendezvous_messages import Address, Hello, take_message

_BYTES = 1 << 16


class Proxy:
    """From now on `group` advertises this proxy's address. Close it after the group's last use.

    `cut`: called with the hello of each member that connects; True ends its connection unanswered.
    `swallows`: the same; True keeps all that it sends, and its connection open.
    `swallows_answers`: the same; True lets what it sends pass, and keeps what comes back.
    """

    def __init__(self, group: Any) -> None:
        self.cut: Callable[[Hello], bool] = lambda hello: False
        self.swallows: Callable[[Hello], bool] = lambda hello: False
        self.swallows_answers: Callable[[Hello], bool] = lambda hello: False
        self._target = Address.decode(group.address())
        self._server = socket.create_server((self._target.host, 0))
        self._sockets: list[socket.socket] = []
        port = self._server.getsockname()[1]
        mine = Address(self._target.host, port, self._target.cookie).encode()
        group.address = lambda: mine
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and threads."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._sockets:
            _end(each)
        for thread in self._threads:
            thread.join()
        for each in (self._server, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:  # closed
                return
            self._sockets.append(peer)
            self._start(self._admit, peer)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _admit(self, peer: socket.socket) -> None:
        received = bytearray()
        hello = None
        while hello is None:
            try:
                data = peer.recv(_BYTES)
            except OSError:
                data = b""
            if not data:
                return
            received += data
            hello = take_message(bytearray(received))
        assert isinstance(hello, Hello)
        if self.cut(hello):
            _end(peer)
            return
        if self.swallows(hello):
            _pass(peer, None)
            return
        try:
            onward = socket.create_connection((self._target.host, self._target.port))
            self._sockets.append(onward)
            onward.sendall(received)
        except OSError:  # the target is gone
            _end(peer)
            return
        self._start(_pass, onward, None if self.swallows_answers(hello) else peer)
        _pass(peer, onward)


def _pass(source: socket.socket, target: socket.socket | None) -> None:
    """Until `source` ends; no `target`: into nothing."""
    try:
        while data := source.recv(_BYTES):
            if target is not None:
                target.sendall(data)
    except OSError:
        pass
    _end(source)
    if target is not None:
        _end(target)


def _end(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
