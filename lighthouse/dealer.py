"""A DEALER that reconnects by itself, and the monitor of a socket.

Imports nothing of this package, for the watcher, of which each training process has one. `sockets` knows the
options of a lighthouse's connections.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import zmq

HANDSHAKE_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)

# Plain integers: arithmetic on pyzmq's enumerations costs as much as asking the socket.
EVENTS, RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
POLLIN, NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)

Options = list[tuple[int, int | bytes]]
"""(ZeroMQ's number of an option, its value), in the order in which they are set."""

_MONITOR_FRAME = struct.Struct("=Hi")


def connect(
    context: zmq.Context[Any], endpoint: str, options: Options
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """(a DEALER that connects to `endpoint`, and reconnects forever; its monitor)."""
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    set_options(dealer, options)
    monitor = open_monitor(dealer, context, HANDSHAKE_SUCCEEDED | DISCONNECTED)
    try:
        dealer.connect(endpoint)
    except BaseException:
        close(dealer, monitor)
        raise
    return dealer, monitor


def set_options(each: zmq.Socket[bytes], options: Options) -> None:
    """Set them, in order."""
    for number, value in options:
        each.setsockopt(number, value)


def open_monitor(
    watched: zmq.Socket[bytes], context: zmq.Context[Any], events: int
) -> zmq.Socket[bytes]:
    """A socket that tells of these events of `watched`; see `read_monitor`."""
    name = f"inproc://monitor-{os.urandom(8).hex()}"
    watched.monitor(name, events)
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    # No limit: at a limit, ZeroMQ's own thread would block. There are two events per connection.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(name)
    return monitor


def read_monitor(monitor: zmq.Socket[bytes]) -> tuple[int, int] | None:
    """(event, file descriptor) of the next monitor event; None if there is none. Never blocks."""
    if not int(monitor.getsockopt(EVENTS)) & POLLIN:
        return None  # cheaper than the exception
    try:
        frames = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    event, value = _MONITOR_FRAME.unpack(frames[0])
    return event, value


def close(watched: zmq.Socket[bytes], monitor: zmq.Socket[bytes], linger_ms: int = 0) -> None:
    """Close a socket and its monitor; queued messages get `linger_ms` in the background."""
    watched.disable_monitor()
    monitor.close(linger=0)
    watched.close(linger=linger_ms)
