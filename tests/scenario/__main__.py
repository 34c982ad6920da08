"""`python -m tests.scenario --write`: let the machines write the expected answers anew."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.scenario.language import play


def main() -> int:
    for path in sorted(Path(__file__).parent.glob("*.txt")):
        before = path.read_text(encoding="utf-8")
        after = play(before)
        if before != after:
            print(f"{path.name} differs")
            if "--write" in sys.argv:
                path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
