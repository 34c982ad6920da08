"""Addresses of a lighthouse as people write them. PURE."""

from __future__ import annotations

import re

_SHAPE = re.compile(
    r"(?:(?:tcp|https?)://)?(?P<host>\[[\w:.%]+\]|[\w.\-*]+):(?P<port>\d{1,5})/?", re.ASCII
)


def normalize(address: str, *, to_connect: bool = True) -> str:
    """`address` as "tcp://host:port".

    Accepts "tcp://host:port", "host:port" and, because other launchers put it into the
    environment, "http://host:port". `to_connect` False: an address to bind, for which port 0
    (any free port) and the host "*" (all interfaces) are allowed too. Raises ValueError.
    """
    match = _SHAPE.fullmatch(address.strip())
    if match is None:
        raise ValueError(f"{address!r} is no lighthouse address: write it as tcp://host:port")
    host, port = match["host"], int(match["port"])
    if port > 65_535 or (to_connect and port == 0):
        raise ValueError(f"{address!r} has no usable port: write one from 1 to 65535")
    if to_connect and host == "*":
        raise ValueError(f"{address!r} names no host: write the lighthouse's host name or IP")
    return f"tcp://{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """(host without brackets, port) of a normalized address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
