"""`python -m ft_accelerate`: the same as the command `ft-accelerate`."""

from __future__ import annotations

import sys

from ft_accelerate.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
