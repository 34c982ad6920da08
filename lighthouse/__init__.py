"""The coordinator: decides which replica groups train together, and what becomes of each step.

Never imports torch. `python -m lighthouse --help` or the `lighthouse` command start one;
`LighthouseServer` embeds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lighthouse.client import LighthouseClient
    from lighthouse.config import LighthouseConfig
    from lighthouse.server import LighthouseServer

__all__ = ["LighthouseClient", "LighthouseConfig", "LighthouseServer"]
__version__ = "0.1.0"

_HOMES = {
    "LighthouseClient": "lighthouse.client",
    "LighthouseConfig": "lighthouse.config",
    "LighthouseServer": "lighthouse.server",
}


def __getattr__(name: str) -> Any:
    # Lazy: the pure modules stay importable without pyzmq.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lighthouse' has no attribute {name!r}")
