"""What the members of a quorum say to each other while they find each other (`rendezvous`), and their addresses.

A frame on a connection is its length (4 bytes, big-endian) and a message (`lighthouse.wire.codec`).
Each group draws a random cookie, so that a port which another process reuses is not mistaken for it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse.errors import ProtocolError
from lighthouse.wire.codec import MessageCodec

PROTOCOL_VERSION = 2
_MAGIC = f"ftpg{PROTOCOL_VERSION}"
FRAME_BYTES_MAX = 1 << 22  # Gloo publishes eight bytes per member, plus its addresses
COOKIE_BYTES = 8
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process group can be reached. Travels as text: `ftpg2/<port>/<cookie>/<host>`."""

    host: str
    port: int
    cookie: bytes

    def encode(self) -> bytes:
        """Under 300 bytes of UTF-8."""
        return f"{_MAGIC}/{self.port}/{self.cookie.hex()}/{self.host}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Raises `ValueError` when `data` did not come from `ProcessGroup.address()`."""
        try:
            magic, port, cookie, host = data.decode().split("/", 3)
            address = cls(host, int(port), bytes.fromhex(cookie))
        except ValueError as error:
            raise ValueError(f"{data!r} is no address of a process group") from error
        if not (0 < address.port < 1 << 16 and host.isprintable()):
            raise ValueError(f"{data!r} is no address of a process group")
        if magic != _MAGIC or len(address.cookie) != COOKIE_BYTES or not host:
            raise ValueError(f"{data!r} is no address of a process group of this version")
        return address


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection, in both directions.

    `digest`: of the member list. `cookie`: that of the receiver. `handle`: what the receiver's
    backend needs to reach the sender's, maybe empty.
    """

    quorum_id: int
    digest: bytes
    rank: int
    world_size: int
    cookie: bytes
    handle: bytes


@dataclass(frozen=True, slots=True)
class StoreKey:
    """One entry of the rendezvous store."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class RendezvousOver:
    """The sender's communicator is connected; the connection ends here."""


@dataclass(frozen=True, slots=True)
class HelloRejected:
    """The sender does not accept the receiver's hello."""

    reason: str


RendezvousMessage = Hello | StoreKey | RendezvousOver | HelloRejected
_CODEC = MessageCodec(
    PROTOCOL_VERSION,
    {
        "hello": Hello,
        "key": StoreKey,
        "connected": RendezvousOver,
        "rejected": HelloRejected,
    },
)


def members_digest(addresses: Sequence[Address]) -> bytes:
    """Sixteen bytes that differ when two members hold different member lists."""
    text = b"\n".join(address.encode() for address in addresses)
    return hashlib.blake2b(text, digest_size=16).digest()


def to_frame(message: RendezvousMessage) -> bytes:
    """The bytes of a message on a connection."""
    data = _CODEC.encode(message)
    return _LENGTH.pack(len(data)) + data


def take_message(buffer: bytearray) -> RendezvousMessage | None:
    """Remove the first whole frame from `buffer` and return its message, or None if there is none.

    Raises `ProtocolError` for bytes that no member sends.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(buffer)
    if size > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {size} bytes")
    end = _LENGTH.size + size
    if len(buffer) < end:
        return None
    message: RendezvousMessage = _CODEC.decode(bytes(buffer[_LENGTH.size : end]))
    del buffer[:end]
    return message
