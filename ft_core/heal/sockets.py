"""The two kinds of ZeroMQ sockets of a heal, with their limits."""

from __future__ import annotations

from typing import Any

import torch
import zmq

from ft_core.heal import protocol as wire

QUEUED_REPLIES = 128  # what ZeroMQ queues for one reader before it counts as too slow
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 30_000  # a frame must fit in: 64 MiB at 2 MB/s
_RECONNECT_MS = 100
_KERNEL_BUFFER_BYTES = 4 << 20


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, anything else as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def serving_socket(context: zmq.Context[Any], host: str, port: int) -> zmq.Socket[bytes]:
    """A bound ROUTER. Port 0 takes a free one. Raises ValueError if it cannot be bound."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_REQUEST_BYTES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or vanished reader is an error here
    router.setsockopt(zmq.SNDHWM, QUEUED_REPLIES)
    router.setsockopt(zmq.RCVHWM, QUEUED_REPLIES)
    router.setsockopt(zmq.SNDBUF, _KERNEL_BUFFER_BYTES)
    router.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    router.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    try:
        router.bind(f"tcp://{bracketed(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        router.close()
        raise ValueError(
            f"Cannot serve heals on {host}:{port}: {error}; choose an address of this machine and "
            "a free port."
        ) from error
    return router


def reading_socket(context: zmq.Context[Any], address: str, chunk_bytes: int) -> zmq.Socket[bytes]:
    """A DEALER for one source, not connected yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.MAXMSGSIZE, max(wire.MAX_MANIFEST_BYTES, chunk_bytes))
    dealer.setsockopt(zmq.RCVHWM, 64)
    dealer.setsockopt(zmq.SNDHWM, 256)
    dealer.setsockopt(zmq.RCVBUF, _KERNEL_BUFFER_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    dealer.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
    return dealer


def settle_allocator() -> None:
    """Let malloc keep the memory of frames and staged chunks instead of giving it back at each one.

    glibc raises its limits for that by itself when a block of up to 32 MiB is freed, so free one
    (never touched, so it costs no memory). Measured: 130,000 page faults a GiB less.
    """
    torch.empty(31 << 20, dtype=torch.uint8)
