"""What members say to each other while they meet: addresses and frames. Pure.

An address is `ftpg1/<port>/<token>/<host>`; the token is drawn anew for every process group, so
that a port reused by another process is not mistaken for the old one.

A frame is its length (4 bytes), its kind (1 byte) and its body:
    HELLO   quorum_id, digest of the address list, rank, world size, token of the callee, handle
    KEY     one entry of the rendezvous store: length of the key, key, value
    DONE    the sender's communicator is connected; the connection ends here
    REFUSE  a sentence that says why the callee won't have this caller
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

HELLO, KEY, DONE, REFUSE = 1, 2, 3, 4
TOKEN_BYTES = 8
FRAME_BYTES_MAX = 1 << 22  # a blob takes eight bytes a member
_MAGIC = b"ftpg1"
_HEADER = struct.Struct("!IB")
_HELLO = struct.Struct(f"!5sQ16sII{TOKEN_BYTES}s")
_KEY = struct.Struct("!I")


class FrameError(Exception):
    """Bytes that no member sends: the connection is dropped."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process group can be met."""

    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        return f"{_MAGIC.decode()}/{self.port}/{self.token.hex()}/{self.host}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Raises `ValueError` when `data` did not come from `ProcessGroup.address()`."""
        try:
            magic, port, token, host = data.decode().split("/", 3)
            address = cls(host, int(port), bytes.fromhex(token))
        except ValueError as error:
            raise ValueError(f"{data!r} is no address of a process group") from error
        if magic.encode() != _MAGIC or len(address.token) != TOKEN_BYTES or not address.host:
            raise ValueError(f"{data!r} is no address of a process group of this version")
        return address


@dataclass(frozen=True, slots=True)
class Hello:
    """How a member presents itself."""

    quorum_id: int
    digest: bytes
    rank: int
    world_size: int
    token: bytes
    handle: bytes

    def encode(self) -> bytes:
        fields = (self.quorum_id, self.digest, self.rank, self.world_size, self.token)
        return frame(HELLO, _HELLO.pack(_MAGIC, *fields) + self.handle)

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        if len(body) < _HELLO.size:
            raise FrameError("a short hello")
        magic, quorum_id, digest, rank, world_size, token = _HELLO.unpack_from(body)
        if magic != _MAGIC:
            raise FrameError("a hello of another protocol")
        return cls(quorum_id, digest, rank, world_size, token, body[_HELLO.size :])


def members_digest(addresses: Sequence[bytes]) -> bytes:
    """Sixteen bytes that differ when two members hold different member lists."""
    digest = hashlib.blake2b(digest_size=16)
    for address in addresses:
        digest.update(struct.pack("!I", len(address)) + address)
    return digest.digest()


def frame(kind: int, body: bytes = b"") -> bytes:
    return _HEADER.pack(len(body), kind) + body


def key_frame(key: str, value: bytes) -> bytes:
    name = key.encode()
    return frame(KEY, _KEY.pack(len(name)) + name + value)


def parse_key(body: bytes) -> tuple[str, bytes]:
    if len(body) < _KEY.size:
        raise FrameError("a short key")
    end = _KEY.size + _KEY.unpack_from(body)[0]
    if end > len(body):
        raise FrameError("a key longer than its frame")
    return body[_KEY.size : end].decode(errors="replace"), body[end:]


def take_frame(buffer: bytearray) -> tuple[int, bytes] | None:
    """Remove the first whole frame from `buffer`: (kind, body), or None if there is none yet."""
    if len(buffer) < _HEADER.size:
        return None
    size, kind = _HEADER.unpack_from(buffer)
    if size > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {size} bytes")
    end = _HEADER.size + size
    if len(buffer) < end:
        return None
    body = bytes(buffer[_HEADER.size : end])
    del buffer[:end]
    return kind, body
