"""Lightning's command `fabric`, for a process that has imported Lightning already."""

from __future__ import annotations

from lightning.fabric.cli import _main

import ft_lightning  # noqa: F401  # registers the strategies

if __name__ == "__main__":
    _main()
