"""Who reads from a HealServer, and whether it can still be served. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_core.heal.layout import Chunk
from ft_core.heal.snapshot import Publication
from ft_core.heal.types import HealKey

REPUBLISH_GRACE_S = 2.0  # a reader of a retired version may be early for the next publish of it


@dataclass(slots=True)
class Reader:
    """One target's connection."""

    key: HealKey
    chunk_bytes: int
    opened: float
    expires: float
    same_host: bool
    publication: Publication | None = None  # None: it waits for one
    chunks: list[Chunk] = field(default_factory=list)
    missing: tuple[int, ...] | None = None  # [lo, hi, lo, hi, ...); None: it said nothing yet

    def missing_segments(self) -> set[int]:
        """Segments of which this reader lacks something."""
        spans = (0, len(self.chunks)) if self.missing is None else self.missing
        return {
            chunk.segment
            for lo, hi in zip(spans[::2], spans[1::2], strict=True)
            for chunk in self.chunks[lo:hi]
        }

    def next_deadline(self, retired: Mapping[HealKey, str]) -> float:
        """When to look at this reader again though nothing came."""
        if self.publication is None and self.key in retired:
            return min(self.expires, self.opened + REPUBLISH_GRACE_S)
        return self.expires

    def gone_reason(
        self, current: Publication | None, retired: Mapping[HealKey, str], now: float
    ) -> str:
        """Why this reader cannot be served (any more), or nothing."""
        if self.publication is not None:
            if self.publication is current:
                return ""
        elif current is not None and self.key == current.key:
            return ""
        elif current is None or current.key.step <= self.key.step:
            # It may be published yet, or again.
            if self.key not in retired or now < self.opened + REPUBLISH_GRACE_S:
                return ""
        reason = retired.get(self.key)
        if reason is None:
            reason = f"the source is at {current.key}" if current is not None else "it was replaced"
        return f"{self.key} is gone: {reason}"
